"""One palette for every figure: the committed ones, those of the report, and its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("ours", "peer", "standard")  # of providers, in the order in which they are shown
COLOURS = {
    "ours": ("#d1495b", "#e07a3f", "#b8336a", "#e0a13f", "#8f2d56"),
    "peer": ("#2f6fb3", "#2a9d8f", "#6a5acd", "#4f9d3a", "#1f8fb8", "#5b7fa6", "#3a7d6b"),
    "standard": ("#8a8d93", "#a67c52", "#6f7d5c", "#9a7aa0", "#7a6a5a", "#8f8f5f"),
}
_SHAPES = {"ours": "circle", "peer": "square", "standard": "triangle"}


@dataclass(frozen=True)
class Style:
    """The look of a provider's line. Kinds differ in shape too, so that a figure can be read without colours."""

    colour: str
    shape: str  # circle, square or triangle
    dashed: bool
    width: float


def styles(providers: Sequence[tuple[str, str]]) -> dict[str, Style]:
    """Return the style of each provider, given (name, kind) pairs. The order among those of one kind decides the
    colour."""
    look: dict[str, Style] = {}
    for kind in KINDS:
        names = dict.fromkeys(name for name, its_kind in providers if its_kind == kind)
        for i, name in enumerate(names):
            colour = COLOURS[kind][i % len(COLOURS[kind])]
            look[name] = Style(colour, _SHAPES[kind], kind == "standard", 2.4 if kind == "ours" else 1.6)
    return look
