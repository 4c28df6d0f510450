"""Figures of the lessons that need a plotting library: photographs, heat maps, curves. Each has an alternative text."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from strobe.learn.drawing import Figure

_LINES = ("#1b1c1f", "#5433a0", "#a85200", "#1f7038")
_MARKERS = "osD^"


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ImportError("figures need matplotlib: pip install matplotlib") from None
    from matplotlib.figure import Figure as Canvas

    matplotlib.rcParams["svg.hashsalt"] = "strobe"
    return Canvas


def _drawn(canvas: Any, alt: str, *, photograph: bool = False) -> Figure:
    """Draw the canvas as a bitmap, which every notebook viewer shows."""
    file = io.BytesIO()
    how: dict[str, Any] = {"format": "png", "metadata": {"Software": None}}
    if photograph:
        how = {"format": "jpeg", "pil_kwargs": {"quality": 85, "optimize": True}}
    canvas.savefig(file, dpi=110, bbox_inches="tight", facecolor="white", **how)
    return Figure(alt, alt=alt, image=(f"image/{how['format']}", file.getvalue()))


def photograph() -> torch.Tensor:
    """A photograph as (height, width, 3) numbers from 0 to 1: Grace Hopper, who wrote one of the first compilers."""
    _matplotlib()
    from matplotlib.image import imread

    pixels = imread(Path(__file__).parent / "pictures" / "hopper.jpg")
    return torch.from_numpy(pixels.copy()).float() / 255


def images(panels: Mapping[str, torch.Tensor], alt: str) -> Figure:
    """Pictures side by side: (height, width, 3) in colour, (height, width) in grey, both from 0 to 1."""
    canvas = _matplotlib()(figsize=(2.6 * len(panels), 3.2))
    for axes, (title, image) in zip(canvas.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        axes.imshow(image.cpu().clamp(0, 1).numpy(), cmap="gray", vmin=0, vmax=1)
        axes.set_title(title, fontsize=10)
        axes.axis("off")
    return _drawn(canvas, alt, photograph=True)


def heat_maps(panels: Mapping[str, torch.Tensor], words: Sequence[str] | None, alt: str) -> Figure:
    """Matrices side by side, darker where a number is larger; with the words as rows and columns, and numbers if few."""
    canvas = _matplotlib()(figsize=(3.9 * len(panels), 3.6), layout="constrained")
    for axes, (title, matrix) in zip(canvas.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        values = matrix.detach().cpu().double().numpy()
        axes.imshow(values, cmap="Purples")
        axes.set_title(title, fontsize=10)
        ticks = range(len(words)) if words else []
        axes.set_xticks(ticks, words or [], fontsize=9)
        axes.set_yticks(ticks, words or [], fontsize=9)
        middle = (values.max() + values.min()) / 2
        for (i, j), value in ((index, values[index]) for index in _indices(values.shape) if values.size <= 64):
            axes.text(
                j, i, f"{value:.2g}", ha="center", va="center", fontsize=8, color="white" if value > middle else "black"
            )
    return _drawn(canvas, alt)


def _indices(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(i, j) for i in range(shape[0]) for j in range(shape[1])]


def curves(
    title: str,
    x: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    labels: tuple[str, str],
    alt: str,
    *,
    logarithmic: bool = False,
) -> Figure:
    """Lines against `x`, each with its name at its end. Axes begin at 0 unless they are logarithmic."""
    canvas = _matplotlib()(figsize=(6.4, 3.6), layout="constrained")
    axes = canvas.subplots()
    for i, (name, values) in enumerate(series.items()):
        points = [(a, b) for a, b in zip(x, values, strict=True) if b is not None]
        axes.plot(*zip(*points, strict=True), color=_LINES[i % 4], marker=_MARKERS[i % 4], markersize=4, label=name)
    if logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_xticks(list(x), [_thousands(value) for value in x], fontsize=8)
    axes.minorticks_off()
    axes.grid(True, color="#e6e6e1", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return _drawn(canvas, alt)


def _thousands(value: float) -> str:
    return f"{value / 1024:g}K" if value >= 1024 and value % 1024 == 0 else f"{value:g}"
