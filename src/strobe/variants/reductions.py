"""Reductions: torch's functions of all numbers in a row, here of a few symbols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from strobe.variants.composed import of_all

_ROW = (None, -1, 0, (-1,), (0,), [-1], [0])  # names of the one axis of a row
_TAKEN: dict[str, tuple[Any, ...]] = {"dim": _ROW, "axis": _ROW, "p": (None, 2, "fro"), "ord": (None, 2)}


class Reduction(NamedTuple):
    of: Callable[..., Any]
    operands: int = 1


def _sum(items: list[Any]) -> Any:
    return of_all(torch.add, [x.int() if x.dtype == torch.bool else x for x in items])


def _norm(items: list[Any]) -> Any:
    """The slope at 0 is 0, as torch has it."""
    total = _sum([x * x for x in items])
    return torch.where(total == 0, 0.0, total.sqrt())


def _dot(a: list[Any], b: list[Any]) -> Any:
    if len(a) != len(b):
        raise TypeError(f"rows of {len(a)} and {len(b)} numbers are multiplied")
    return _sum([x * y for x, y in zip(a, b, strict=True)])


def _of_two(function: Callable[..., Any]) -> Reduction:
    return Reduction(lambda items: of_all(function, items))


REDUCTIONS = {
    "sum": Reduction(_sum),
    "mean": Reduction(lambda items: _sum(items) / len(items)),
    "prod": _of_two(torch.mul),
    "amax": _of_two(torch.maximum),
    "amin": _of_two(torch.minimum),
    "any": _of_two(torch.logical_or),
    "all": _of_two(torch.logical_and),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm"), Reduction(_norm)),
    **dict.fromkeys(("dot", "vdot", "inner", "matmul", "rmatmul"), Reduction(_dot, 2)),
}


def of_the_row(name: str, value: Any) -> bool:
    """Return whether an argument leaves a reduction as it is: it names the one axis, or what is so anyway."""
    return value in _TAKEN.get(name, (None, False))
