"""The table of benchmarks/README.md: when in its turn a call is fast."""

from __future__ import annotations

from pathlib import Path

from benchmarks import committed
from benchmarks.pages import comparisons
from benchmarks.studies.experiments import BOTH
from strobe.bench import read_results

BEGIN, END = "<!-- turns: begin (python -m benchmarks.pages --write) -->", "<!-- turns: end -->"


def block(root: Path) -> str:
    found = committed.study(root, "turns")
    if found is None:
        return ""
    lines = ["| case | in turns | provider | 1st call | 2nd | 6th | 12th | 60th |", "|---|---|---|---|---|---|---|---|"]
    for row in found["rows"]:
        ours, theirs = row["ms"][BOTH[0]], row["ms"][BOTH[1]]
        shown = {"`strobe-sm90`, ms": ours, "`torch-cudnn`, ms": theirs}
        speed = [b / a for a, b in zip(ours, theirs, strict=True)]
        for name, values in [*shown.items(), ("ratio", speed)]:
            cells = [f"{values[place - 1]:.3f}" if place <= len(values) else "" for place in (1, 2, 6, 12, 60)]
            lines.append(
                f"| {row['case']} | {len(row['ms'])} providers, {len(ours)} calls | {name} | {' | '.join(cells)} |"
            )
    return "\n".join(lines + _best_moments(root)) + "\n"


def _best_moments(root: Path) -> list[str]:
    """How far the ratio of the whole grid depends on the medians."""
    path = root / committed.RESULTS / "grid36.json"
    if not path.exists():
        return []
    grid = read_results.load(path)
    ways = (lambda row: row.timing.summary.median, lambda row: row.timing.summary.p5)
    median, best = (comparisons.mean_ratio(comparisons.ratios(grid, "grid36", *BOTH, of=way)) for way in ways)
    found = f"{median:.3f} by medians, {best:.3f} by 5th percentiles"
    return ["", f"`strobe-sm90` over `torch-cudnn`, geometric mean of `grid36`: {found}."]
