"""Steps of whole models in docs/results.md."""

from __future__ import annotations

from strobe.bench.results import Results, Row
from strobe.measure import units
from strobe.measure.method import TITLES
from strobe.measure.statistics import separated


def tables(run: Results) -> list[str]:
    """Tokens per second by attention implementation, with the time and the memory of a step."""
    lines: list[str] = []
    for method in run.methods():
        rows = [r for r in run.rows if r.case.measure == "model" and r.method == method and r.timed]
        if not rows:
            continue
        lines += [
            f"### Whole models, {TITLES[method]} (`llama`)",
            "",
            "Layers of transformers; only the attention implementation differs. A training step is a forward and a "
            "backward pass without an optimiser. Memory is what a step needs beyond weights and inputs.",
            "",
            "| step | attention | tokens/s | time | memory | of `strobe`'s speed |",
            "|---|---|---|---|---|---|",
        ]
        for title in dict.fromkeys(r.case.title for r in rows):
            same = [r for r in rows if r.case.title == title]
            ours = next((r for r in same if r.kind == "ours"), None)
            lines += [f"| {size(row)} | {_cells(row, ours)} |" for row in same]
        lines.append("")
    return lines


def size(row: Row) -> str:
    return f"{row.case.model}, {row.case.batch} × {units.length(row.case.len_q)} tokens"


def _cells(row: Row, ours: Row | None) -> str:
    speed = "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}"
    cells = [f"`{row.provider}`", speed, units.milliseconds(row.ms), units.size(row.peak_bytes), _share(row, ours)]
    return " | ".join(cells)


def _share(row: Row, ours: Row | None) -> str:
    if ours is None or row is ours or not row.ms or not ours.ms or row.timing is None or ours.timing is None:
        return ""
    clear = separated(row.timing.summary, ours.timing.summary)
    return f"{ours.ms / row.ms:.2f}" + ("" if clear else " (no clear difference)")
