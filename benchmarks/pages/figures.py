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

from strobe.bench.report.page import families, family
from strobe.bench.results import Results, Row
from strobe.measure import palette, units
from strobe.measure.method import TITLES, TURNS

_MARKERS = {"circle": "o", "square": "s", "triangle": "^"}


def unavailable() -> str | None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return f"{error}; install it with `pip install matplotlib`"
    return None


@dataclass(frozen=True)
class Committed:
    """A figure in the documents."""

    digest: str
    draw: Callable[[], str]  # its SVG

    def is_current(self, path: Path) -> bool:
        return path.exists() and f"<!-- strobe figure {self.digest} -->" in path.read_text(encoding="utf-8")


def speed(results: Results, suite: str, direction: str = "forward", method: str = TURNS) -> Committed | None:
    """TFLOP/s against length, one panel per head dim and mask; None without such rows."""
    wanted = (suite, direction, "time", method)
    rows = [r for r in results.rows if (r.case.suite, r.case.direction, r.case.measure, r.method) == wanted]
    if not families([r for r in rows if r.timed]):
        return None
    points = [(family(r), r.provider, r.kind, r.case.len_k, f"{r.tflops:.4g}") for r in rows if r.timed and r.tflops]
    digest = hashlib.sha256(json.dumps([points, palette.COLOURS]).encode()).hexdigest()[:16]
    return Committed(digest, lambda: svg(_lines(rows, method), digest))


def svg(figure: Any, digest: str) -> str:
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "strobe", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    head, _, body = text.getvalue().partition("<svg")
    drawn = re.sub(r"[ \t]+$", "", f"<svg{body}", flags=re.MULTILINE)
    return f"{head}<!-- strobe figure {digest} -->\n{drawn}"


def panels(count: int) -> tuple[Any, list[Any]]:
    import matplotlib.pyplot as plt

    columns = min(3, count)
    lines = -(-count // columns)
    size = (max(4.6 * columns, 6.4), 3.2 * lines + 0.6)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    flat = list(axes.flat)
    for axis in flat[count:]:
        axis.set_visible(False)
    plt.close(figure)
    return figure, flat


def _lines(rows: list[Row], method: str) -> Any:
    """A panel per family."""
    shown = families([r for r in rows if r.timed and r.tflops])
    styles = palette.styles([(r.provider, r.kind) for r in rows if r.timed])
    figure, axes = panels(len(shown))
    for axis, (title, same) in zip(axes, shown.items(), strict=False):
        for provider, style in styles.items():
            points = sorted((r.case.len_k, r.tflops or 0.0) for r in same if r.provider == provider)
            if points:
                fmt = _MARKERS[style.shape] + ("--" if style.dashed else "-")
                line = {"color": style.colour, "linewidth": style.width, "markersize": 4, "zorder": 2 + style.width}
                axis.plot(*zip(*points, strict=True), fmt, label=provider, **line)
        lengths = sorted({r.case.len_k for r in same})
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [units.length(n) for n in lengths])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=10)
        axis.set(xlabel="sequence length", ylabel=f"TFLOP/s, {TITLES[method]}")
        axis.grid(alpha=0.25)
    names = {text: handle for axis in axes for handle, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(names.values(), names.keys(), fontsize=8, loc="outside lower center", ncols=4)
    return figure
