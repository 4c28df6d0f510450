"""Masks that are functions of (batch, head, query, key): what an interval per row cannot say."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from strobe.variants import intervals, user_function
from strobe.variants.expression import BOOL, FLOAT, INT, LONG, WORKING_DTYPE, Expr
from strobe.variants.mask import Mask, causal, full
from strobe.variants.score import Score, identity

_GIVEN = (user_function.B, user_function.H, user_function.Q, user_function.K)


class MaskFunction:
    """The keys of an interval mask for which a condition holds, too. Combine with `&`, `|` and `~`."""

    def __init__(self, interval: Mask, rest: Expr | None, tensors: tuple[torch.Tensor, ...], title: str) -> None:
        self.interval, self.rest, self.tensors, self.title = interval, rest, tensors, title
        # The score that hides what the condition does not let through; None: the interval says all.
        self.over_identity: Score | None = None if rest is None else identity.hiding(rest, tensors, title)

    def __reduce__(self) -> tuple[Any, ...]:
        return MaskFunction, (self.interval, self.rest, self.tensors, self.title)

    def __repr__(self) -> str:
        return f"strobe.mask_function({self.title})"

    def __and__(self, other: Any) -> MaskFunction:
        if not isinstance(other, (Mask, MaskFunction)):
            return NotImplemented
        other = as_function(other)
        rest, tensors = _together("&", self, other)
        return MaskFunction(self.interval & other.interval, rest, tensors, f"{self.title} & {other.title}")

    __rand__ = __and__

    def __or__(self, other: Any) -> MaskFunction:
        if not isinstance(other, (Mask, MaskFunction)):
            return NotImplemented
        condition, tensors = _together("|", _all_of(self), _all_of(as_function(other)))
        assert condition is not None
        return _split(condition, tensors, f"{self.title} or {as_function(other).title}")

    __ror__ = __or__

    def __invert__(self) -> MaskFunction:
        condition = _all_of(self).rest
        assert condition is not None
        return _split(intervals.negated(condition), self.tensors, f"not {self.title}")

    def dense(self, len_q: int, len_k: int, batch: int = 1, heads: int = 1) -> torch.Tensor:
        """The mask as booleans, (batch, heads, len_q, len_k). For small pictures."""
        return self.seen(range(len_q), len_q, len_k, batch, heads, torch.device("cpu"))

    def seen(self, rows: range, len_q: int, len_k: int, batch: int, heads: int, device: torch.device) -> torch.Tensor:
        """The booleans of some rows, (batch, heads, rows, len_k)."""
        row, key, head, sequence = (
            torch.arange(r.start, r.stop, device=device) for r in (rows, range(len_k), range(heads), range(batch))
        )
        seen = self.interval.block(row, key, len_q, len_k)
        if self.rest is not None:
            row = row[:, None]
            env: dict[Any, Any] = {"qi": row, "ki": key, "len_qi": len_q, "len_ki": len_k}
            env |= {"q": row.float(), "k": key.float(), "len_q": len_q, "len_k": len_k}
            env |= {"h": head[:, None, None], "b": sequence[:, None, None, None]}
            env |= {WORKING_DTYPE: torch.float32}
            env |= enumerate(t.to(device) for t in self.tensors)
            seen = seen & self.rest.evaluate(env)
        return seen.expand(batch, heads, len(rows), len_k)


def mask_function(function: Callable[..., Any], *, rows: bool = False) -> MaskFunction:
    """A mask from `function(b, h, q, k) -> bool`, plain Python over torch operations, traced once. It may close over tensors
    and index them. q and k are positions: the last query stands opposite the last key. `rows`: q counts query rows from
    0 instead, as FlexAttention does."""
    given = (*_GIVEN[:2], user_function.ROW, _GIVEN[3]) if rows else _GIVEN
    return _split(*user_function.trace(function, given, BOOL, None))


def score_function(function: Callable[..., Any], *, rows: bool = False) -> Score:
    """A score from `function(score, b, h, q, k)`, traced once: see `mask_function`. Its derivative follows from the
    trace."""
    q = user_function.ROW if rows else user_function.Q
    given = (user_function.S, user_function.B, user_function.H, q, user_function.K)
    expr, tensors, name = user_function.trace(function, given, FLOAT, None)
    return Score(expr, name, tensors)


def as_function(mask: Mask | MaskFunction) -> MaskFunction:
    return mask if isinstance(mask, MaskFunction) else MaskFunction(mask, None, (), mask.name)


def either(a: Mask, b: Mask) -> MaskFunction:
    return as_function(a) | b


def inverse(mask: Mask) -> MaskFunction:
    return ~as_function(mask)


def _split(condition: Expr, tensors: tuple[torch.Tensor, ...], title: str) -> MaskFunction:
    (lo, hi), rest = intervals.split(condition)
    return MaskFunction(Mask(lo, hi, title), rest, tensors, title)


def _all_of(mask: MaskFunction) -> MaskFunction:
    """The same mask, with its interval as a part of the condition."""
    condition = intervals.condition_of((mask.interval.lo, mask.interval.hi))
    if mask.rest is not None:
        condition = Expr("&", (condition, mask.rest))
    return MaskFunction(full, condition, mask.tensors, mask.title)


def _together(op: str, a: MaskFunction, b: MaskFunction) -> tuple[Expr | None, tuple[torch.Tensor, ...]]:
    if a.rest is None or b.rest is None:
        return (a.rest, a.tensors) if b.rest is None else (b.rest, b.tensors)
    moved = Score(Expr("where", (Expr("var", ("s",)), a.rest)), "", a.tensors).hiding(b.rest, b.tensors, "")
    return Expr(op, (a.rest, moved.expr.args[1])), moved.tensors


# ---- tails -----------------------------------------------------------------------------------------------------------


def with_tail(mask: Mask | MaskFunction, tail: torch.Tensor, cu_q: torch.Tensor | None) -> MaskFunction:
    """The tail of a sequence is its last keys, as many as it has queries. Bit j of a query's number in `tail`, (batch,
    queries) or, with `cu_q`, (total,), says whether it sees key j of the tail; `mask` is for the keys before the tail."""
    base = as_function(mask)
    interval, condition = _before_a_tail(base.interval, base.rest, len(base.tensors), cu_q is not None)
    return MaskFunction(interval, condition, (*base.tensors, tail, *(() if cu_q is None else (cu_q,))), "tail")


@functools.lru_cache(maxsize=64)
def _before_a_tail(interval: Mask, rest: Expr | None, number: int, packed: bool) -> tuple[Mask, Expr]:
    """The interval that has the tail as well, and the condition; `number`: of the tail among the tensors."""
    begin = Expr("max", (_len_k - _len_q, _int(0)))
    j = Expr("min", (Expr("max", (user_function.K - begin, _int(0))), _int(63)))
    first_row = Expr("load", (number + 1, INT, user_function.B))  # of a sequence, among packed ones
    at = (first_row + user_function.ROW,) if packed else (user_function.B, user_function.ROW)
    bits = Expr("load", (number, LONG, *at))
    seen = Expr("!=", (Expr("&", (Expr(">>", (bits, j)), _int(1))), _int(0)))
    is_before = begin > user_function.K
    if rest is None and interval in (causal, full):  # which hide none of the keys before
        condition = Expr("|", (is_before, seen))
    else:
        of_mask = _all_of(MaskFunction(interval, rest, (), "")).rest
        condition = Expr("select", (is_before, of_mask, seen))
    lo = interval.lo
    if lo is not None:
        lo = Expr("min", (lo, Expr("var", ("len_k",)) - Expr("var", ("len_q",))))
    return Mask(lo, None, "tail"), condition


def _int(number: int) -> Expr:
    return Expr("literal", (number,))


_len_q, _len_k = Expr("var", ("len_qi",)), Expr("var", ("len_ki",))
