"""The figures of the documents.

Each carries a digest of the numbers in it. Whether it is current is decided by that: matplotlib draws the same numbers a
little differently from version to version."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strobe.bench import figures
from strobe.bench.results import Results
from strobe.measure import palette
from strobe.measure.method import TURNS


@dataclass(frozen=True)
class Committed:
    """A figure in the documents."""

    digest: str
    draw: Callable[[], str]  # its SVG

    def is_current(self, path: Path) -> bool:
        return path.exists() and f"<!-- strobe figure {self.digest} -->" in path.read_text(encoding="utf-8")


def speed(results: Results, suite: str, direction: str = "forward", method: str = TURNS) -> Committed | None:
    """TFLOP/s against length, one panel per head dim and mask; None without such rows."""
    rows = [
        r
        for r in results.rows
        if (r.case.suite, r.case.direction, r.case.measure, r.method) == (suite, direction, "time", method)
        and r.case.tile is None
    ]
    if not figures.families([r for r in rows if r.timed]):
        return None
    points = [
        (figures.family(r), r.provider, r.kind, r.case.len_k, f"{r.tflops:.4g}") for r in rows if r.timed and r.tflops
    ]
    digest = hashlib.sha256(json.dumps([points, palette.COLOURS]).encode()).hexdigest()[:16]
    return Committed(digest, lambda: svg(figures.speed(rows, method), digest))


def svg(figure: Any, digest: str) -> str:
    text = io.StringIO()
    with figures.style():
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    head, _, body = text.getvalue().partition("<svg")
    drawn = re.sub(r"[ \t]+$", "", f"<svg{body}", flags=re.MULTILINE)
    return f"{head}<!-- strobe figure {digest} -->\n{drawn}"
