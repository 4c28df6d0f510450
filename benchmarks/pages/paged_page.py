"""The speed of paged keys in docs/serving.md, from the suite `decode`; what that does not time, from a study."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import committed
from strobe.bench.decode import READ

BEGIN, END = "<!-- paged: begin (python -m benchmarks.pages --write) -->", "<!-- paged: end -->"
PAGE = Path("docs", "serving.md")
FILE = "decode.json"
WHOLE = "contiguous"


def block(root: Path) -> str:
    path, study = root / committed.RESULTS / FILE, committed.study(root, "paged")
    if not path.exists() or study is None:
        return ""
    run = json.loads(path.read_text(encoding="utf-8"))
    us = {(row["batch"], row["way"]): row["us"] for row in run["rows"] if row["us"] is not None}
    batches = [batch for batch, way in us if way == WHOLE and not batch.endswith(("queries", "uniform"))]
    ways = [way for batch, way in us if batch == batches[0] and way != READ]
    lines = [
        f"On an {committed.where(run)}: µs, and the speed relative to the same keys in one piece. Decoding, 1 query, 32 "
        "heads on 8, head dim 128, bfloat16; CUDA graphs over caches that do not fit the L2, in turns. Pages in random "
        "order, with a plan.",
        f"Data: `{FILE}`, `studies/paged.json`.",
        "",
        f"| sequences and keys | {' | '.join(batches)} |",
        f"|---{'|---' * len(batches)}|",
    ]
    for way in ways:
        shown = [f"{us[b, way]:.0f} ({us[b, WHOLE] / us[b, way]:.2f})" for b in batches]
        lines.append(f"| {way} | {' | '.join(shown)} |")
    lines += ["", "| what else | |", "|---|---|"]
    lines += [f"| {what} | {ratio:.2f} |" for what, ratio in run["comparisons"].items() if _is_shown(what, batches)]
    host = study["host_us"]
    lines += [
        f"| planning 64, 1,024 sequences | {study['plan_us']['64']:.1f}, {study['plan_us']['1024']:.1f} µs |",
        f"| appending a token to each of 64 sequences | {study['append_us']:.1f} µs |",
        f"| CPU time of a planned call over that of SDPA | {host['paged plan'] / host['sdpa']:.2f} |",
    ]
    return "\n".join([*lines, ""])


def _is_shown(what: str, batches: list[str]) -> bool:
    """Not those that the table says, and not cuDNN with 4 queries, which it takes for a prompt."""
    return not what.startswith(tuple(f"{batch}: " for batch in batches)) and "cuDNN" not in what
