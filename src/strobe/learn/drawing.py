"""Small figures for the lessons, each as text and as SVG: a terminal shows one, a notebook the other."""

from __future__ import annotations

import base64
import html
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strobe.learn.simulator import Dim3

# Light enough for black digits, different enough without colour vision: the hue turns and the lightness alternates.
_FILLS = ("#bcd7f5", "#ffe3a8", "#cdebc5", "#f3c6c6", "#d9cdf0", "#f0f0c0", "#c2ecec", "#f5d5b5")
_CELL = 30


@dataclass(frozen=True)
class Figure:
    """A text for terminals, a picture for notebooks, and an alternative text for those who cannot see it."""

    text: str
    svg: str = ""
    alt: str = ""
    image: tuple[str, bytes] | None = None  # instead of `svg`: "image/png" or "image/jpeg", and the file

    def __str__(self) -> str:
        return self.text

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> tuple[dict[str, str], dict[str, Any]]:
        """Return what a notebook stores: viewers choose the picture, screen readers the text."""
        kind, data = self.image or ("image/svg+xml", b"")
        alt = self.alt or self.text
        picture = base64.b64encode(data).decode() if self.image else self.svg
        return {kind: picture, "text/plain": alt}, {kind: {"alt": alt}}


def show(figure: Figure) -> None:
    """Draw it in a notebook, print it elsewhere."""
    shell = sys.modules.get("IPython")
    if shell is not None and shell.get_ipython() is not None:
        shell.display.display(figure)
    else:
        print(figure.text)


def _svg(width: float, height: float, title: str, parts: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" '
        f'aria-label="{html.escape(title)}" font-family="sans-serif" font-size="11">'
        f'<rect width="{width:g}" height="{height:g}" fill="white"/><title>{html.escape(title)}</title>{"".join(parts)}</svg>'
    )


def thread_map(height: int, width: int, block: tuple[int, int] | int) -> Figure:
    """Return which thread of which block has which element of a (height, width) array; `block` is (x, y), as CUDA
    writes it.

    Every cell says block.thread. Threads that stick out beyond the array are in brackets: they exist and must do
    nothing."""
    dims = Dim3(block) if isinstance(block, int) else Dim3(*block)
    grid = Dim3(-(-width // dims.x), -(-height // dims.y))
    title = f"{height} x {width} elements, {grid.size} blocks of {dims.x} x {dims.y} threads"
    lines, parts = [title], [f'<text x="4" y="16">{html.escape(title)}</text>']
    for row in range(grid.y * dims.y):
        cells = []
        for column in range(grid.x * dims.x):
            number = (row // dims.y) * grid.x + column // dims.x
            thread = (row % dims.y) * dims.x + column % dims.x
            inside = row < height and column < width
            name = f"{number}.{thread}"
            cells.append(name.center(7) if inside else f"({name})".center(7))
            x, y = 4 + column * _CELL, 24 + row * _CELL
            fill = _FILLS[number % len(_FILLS)] if inside else "none"
            dashes = "" if inside else ' stroke-dasharray="3 3"'
            parts.append(
                f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" fill="{fill}" stroke="#555"{dashes}/>'
            )
            colour = "#000" if inside else "#777"
            parts.append(f'<text x="{x + _CELL / 2}" y="{y + 19}" text-anchor="middle" fill="{colour}">{name}</text>')
        lines.append("".join(cells).rstrip())
    size = max(grid.x * dims.x * _CELL, 7 * len(title)) + 8
    alt = f"{title}. Each cell names its block and its thread; threads beyond the array are dashed."
    return Figure("\n".join(lines), _svg(size, 28 + grid.y * dims.y * _CELL, alt, parts), alt)


def bars(title: str, values: Mapping[str, float], unit: str = "", *, logarithmic: bool = False) -> Figure:
    """One bar per value, the value beside it."""
    if not values or min(values.values()) < 0 or (logarithmic and min(values.values()) <= 0):
        raise ValueError(f"values: {dict(values)}; at least one, none negative, none zero on a logarithmic scale")

    def share(value: float) -> float:
        most = max(values.values())
        if logarithmic:
            least = min(values.values()) / 2
            return math.log(value / least) / math.log(most / least)
        return value / most if most else 0.0

    label_width = max(map(len, values))
    lines, parts = [title], [f'<text x="4" y="16">{html.escape(title)}</text>']
    left = 12 + 7 * label_width
    for i, (label, value) in enumerate(values.items()):
        shown = f"{value:.4g} {unit}".rstrip()
        lines.append(f"{label:>{label_width}} {'█' * max(value > 0, round(40 * share(value)))} {shown}")
        y, length = 26 + 22 * i, max(2.0, 320 * share(value))
        parts.append(f'<text x="{left - 6}" y="{y + 13}" text-anchor="end">{html.escape(label)}</text>')
        parts.append(
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="18" fill="{_FILLS[i % 2]}" stroke="#555"/>'
        )
        parts.append(f'<text x="{left + length + 6:.1f}" y="{y + 13}">{html.escape(shown)}</text>')
    width = max(left + 330 + 90, 7 * len(title))
    alt = f"{title}: " + ", ".join(f"{label} {value:.4g} {unit}".rstrip() for label, value in values.items())
    return Figure("\n".join(lines), _svg(width, 32 + 22 * len(values), alt, parts), alt)


def hierarchy(gpu: Mapping[str, Any]) -> Figure:
    """The memories of a GPU as nested places, with their sizes and speeds; areas are not to scale."""
    registers, shared = (f"{gpu['sms'] * gpu[name] / 1024:.0f} MiB" for name in ("registers", "shared"))
    levels = (
        ("registers", f"{gpu['registers']} KiB on each of {gpu['sms']} multiprocessors: {registers}", "of one thread"),
        ("shared memory", f"{gpu['shared']} KiB on each: {shared}", "of one block of threads"),
        ("L2 cache", f"{gpu['l2']} MiB", "of the whole chip"),
        (gpu["memory"], f"{gpu['capacity']} GB, {gpu['bandwidth'] / 1000:g} TB per second", "beside the chip"),
    )
    parts, lines = [], [f"The memories of an {gpu['name']}, nearest first:"]
    fills = ("#ffe27a", "#ffffff", "#f4f4f1", "#d9dce2")
    for i, (name, size, whose) in enumerate(levels):
        wide, y = 250 + 95 * i, 8 + 56 * i
        place = f'x="{(560 - wide) / 2:g}" y="{y}" width="{wide}" height="48" rx="5"'
        parts.append(f'<rect {place} fill="{fills[i]}" stroke="#8b8e95"/>')
        for dy, text, weight in ((20, f"{name}: {whose}", 600), (37, size, 400)):
            style = f'x="280" y="{y + dy}" text-anchor="middle" font-weight="{weight}"'
            parts.append(f"<text {style}>{html.escape(text)}</text>")
        lines.append(f"  {name:14s} {whose:24s} {size}")
    alt = " ".join(lines[:1] + [f"{name}, {whose}, {size};" for name, size, whose in levels])
    return Figure("\n".join(lines), _svg(560, 8 + 56 * len(levels), alt, parts), alt)
