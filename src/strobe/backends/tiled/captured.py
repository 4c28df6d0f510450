"""The derivatives of a score function in a tile: by the score, and by the entries of tensors that the function captures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from strobe.variants.expression import FLOAT, Expr, on_device, places


def spread_over(value: Any, like: torch.Tensor) -> torch.Tensor:
    """Expands a value that may not depend on all of the score's axes to one for each score, in memory that can be
    written."""
    value = on_device(value, like.device, like.dtype)
    return value if value.shape == like.shape else value.expand_as(like).contiguous()


class Slopes:
    """`inner`: the function, of "s" in `env`, (b, hk, g, rows, keys). What it computed on the way is kept."""

    def __init__(self, inner: Expr, env: Mapping[Any, Any]) -> None:
        self.inner, self.env = inner, env
        self._known: dict[Expr, Any] = {}

    def value(self) -> Any:
        return self.inner.evaluate(self.env, self._known)

    def of_score(self) -> torch.Tensor | None:
        """The derivative for each score; None: 1."""
        derivative = self.inner.derivative("s")
        return None if derivative.is_one else spread_over(derivative.evaluate(self.env, self._known), self.env["s"])

    def add_captured_(self, totals: Mapping[int, torch.Tensor], ds: torch.Tensor) -> None:
        """Adds to the gradients of captured tensors, by their numbers. `ds`: the gradient of the function's result."""
        for load in self.inner.loads():
            number = load.args[0]
            derivative = self.inner.derivative(load)
            if number not in totals or load.kind != FLOAT or derivative.is_zero:
                continue
            slope = derivative.evaluate(self.env, self._known)
            part = torch.where(ds == 0, 0, ds * slope)  # hidden pairs may have an infinite slope
            index = [i.evaluate(self.env, self._known) for i in load.operands]
            _add_at_(totals[number], places(totals[number], index), part)


def _add_at_(total: torch.Tensor, index: tuple[torch.Tensor, ...], part: torch.Tensor) -> None:
    """total[index] += part, also where an entry occurs several times, always in the same order."""
    shape = (1,) * part.dim()
    for i in index:
        shape = tuple(max(a, b) for a, b in zip(shape, (1,) * (part.dim() - i.dim()) + tuple(i.shape), strict=True))
    repeated = [axis for axis, (n, m) in enumerate(zip(shape, part.shape, strict=True)) if n == 1 < m]
    part = part.sum(repeated, keepdim=True) if repeated else part
    at = torch.zeros(part.shape, dtype=torch.int64, device=part.device)
    for i, n in zip(index, total.shape, strict=True):
        at = at * n + i
    flat = total.view(-1)  # contiguous
    if total.is_cpu:
        flat.index_add_(0, at.flatten(), part.flatten())  # one after the other
    else:
        flat.index_put_((at.flatten(),), part.flatten(), accumulate=True)  # sorted; `index_add_` adds atomically
