"""What others reached in other runs, as a section of docs/results.md."""

from __future__ import annotations

from collections.abc import Iterable

from strobe.bench import anchors
from strobe.bench.anchors import Anchors, Line
from strobe.bench.claims import merged
from strobe.bench.results import Results

TITLE = "Beside FlashAttention-3 and 4, over cuDNN"
_PASSES = ("forward", "backward")


def section(name: str, elsewhere: Anchors, runs: Iterable[Results]) -> list[str]:
    """`name`: of the file of anchors."""
    lines = anchors.comparison(elsewhere, merged(runs).rows)
    missing = [] if any(line.ahead for line in lines) else ["Ours by the same method has not been taken yet.", ""]
    return [
        f"### {TITLE}",
        "",
        f"{anchors.note(elsewhere)} {elsewhere.provenance['note']} Data: `{name}`.",
        "",
        "| | forward | backward | built from |",
        "|---|---|---|---|",
        *(_row(line) for line in lines),
        "",
        *missing,
    ]


def _row(line: Line) -> str:
    title = f"`{line.title}`" if line.ahead else line.title
    return f"| {title} | {' | '.join(anchors.text_of_line(line, p) for p in _PASSES)} | {line.built} |"
