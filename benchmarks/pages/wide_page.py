"""The speed of head dims above 256 in docs/variants.md, from the study of them."""

from __future__ import annotations

from pathlib import Path

from benchmarks import committed

BEGIN, END = "<!-- wide: begin (python -m benchmarks.pages --write) -->", "<!-- wide: end -->"
PAGE = Path("docs", "variants.md")


def block(root: Path) -> str:
    study = committed.study(root, "wide")
    if study is None:
        return ""
    lines = [
        f"Times of PyTorch's backends over ours on an {committed.where(study)}, forward and backward.",
        study["note"],
        "Data: `studies/wide.json`.",
        "",
        "| head dim | ours, ms | efficient | math |",
        "|---|---|---|---|",
    ]
    for row in study["rows"]:
        ours, *others = (row["ms"][name] for name in ("strobe", "efficient", "math"))
        shown = [", ".join(f"{o[d] / ours[d]:.1f} ×" for d in ("forward", "backward")) for o in others]
        lines.append(f"| {row['name']} | {ours['forward']:.2f}, {ours['backward']:.2f} | {shown[0]} | {shown[1]} |")
    return "\n".join([*lines, ""])
