"""The speed of paged keys in docs/serving.md, from the study of them."""

from __future__ import annotations

from pathlib import Path

from benchmarks import committed

BEGIN, END = "<!-- paged: begin (python -m benchmarks.pages --write) -->", "<!-- paged: end -->"
PAGE = Path("docs", "serving.md")


def block(root: Path) -> str:
    study = committed.study(root, "paged")
    if study is None:
        return ""
    rows = study["rows"]
    heads = [f"{row['batch']} × {row['keys']}" for row in rows]
    lines = [
        f"On an {committed.where(study)}: µs, and the speed relative to the same keys in one piece.",
        study["note"],
        "Data: `studies/paged.json`.",
        "",
        f"| sequences × keys | {' | '.join(heads)} |",
        f"|---{'|---' * len(heads)}|",
    ]
    for name in rows[0]["us"]:
        whole = [row["us"]["contiguous"] for row in rows]
        shown = [f"{row['us'][name]:.0f} ({w / row['us'][name]:.2f})" for row, w in zip(rows, whole, strict=True)]
        lines.append(f"| {name.replace('cudnn', 'cuDNN, contiguous')} | {' | '.join(shown)} |")
    skewed, shared, mixed, host = (study[f"{name}_us"] for name in ("skewed", "cascade", "mixed", "host"))
    lines += [
        "",
        "| what else | |",
        "|---|---|",
        f"| 64 sequences of 128 to 32k keys against 64 of equal length, speed | {skewed['uniform'] / skewed['skewed']:.2f} |",
        "| 64 × (8k shared + 1k own keys): gain over a copy of the shared keys for each | "
        f"{shared['copies'] / shared['shared plan']:.1f} × |",
        f"| the same, over tables that name the same pages | {shared['apart'] / shared['shared plan']:.1f} × |",
        "| 2,048 new tokens at 8k beside 64 decodes at 4k, one call, time over both apart | "
        f"{mixed['mixed'] / (mixed['prefill'] + mixed['decode']):.2f} |",
        f"| planning 64, 1,024 sequences | {study['plan_us']['64']:.1f}, {study['plan_us']['1024']:.1f} µs |",
        f"| appending a token to each of 64 sequences | {study['append_us']:.1f} µs |",
        f"| CPU time of a planned call over that of SDPA | {host['paged plan'] / host['sdpa']:.2f} |",
    ]
    return "\n".join([*lines, ""])
