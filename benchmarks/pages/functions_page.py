"""The speed of users' functions in docs/variants.md, from the study of them."""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks import committed

BEGIN, END = "<!-- functions: begin (python -m benchmarks.pages --write) -->", "<!-- functions: end -->"
PAGE = Path("docs", "variants.md")
_PASSES = ("forward", "backward")


def block(root: Path) -> str:
    study = committed.study(root, "functions")
    if study is None:
        return ""
    rows = study["rows"]
    ratios = {d: [row["ms"]["flex"][d] / row["ms"]["strobe"][d] for row in rows] for d in _PASSES}
    lines = [
        f"FlexAttention's time over ours on an {committed.where(study)}.",
        study["note"],
        "Data: `studies/functions.json`.",
        "",
        "| function | forward | backward |",
        "|---|---|---|",
    ]
    for i, row in enumerate(rows):
        shown = [f"{ratios[d][i]:.2f} × ({row['ms']['strobe'][d]:.2f} ms)" for d in _PASSES]
        lines.append(f"| {row['name']} | {shown[0]} | {shown[1]} |")
    means = [f"**{math.exp(sum(map(math.log, ratios[d])) / len(rows)):.2f} ×**" for d in _PASSES]
    lines.append(f"| geometric mean | {means[0]} | {means[1]} |")
    return "\n".join([*lines, ""])
