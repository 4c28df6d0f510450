"""Masks of sequences that end with a tree of draft tokens: which query sees which of the last keys is told bit by bit."""

from __future__ import annotations

import functools

import torch

from strobe.variants.expression import INT, LEN_K, LEN_Q, LONG, B, Expr, K, Q
from strobe.variants.mask import Mask, causal, full


def with_tail(mask: Mask, tail: torch.Tensor, cu_q: torch.Tensor | None) -> Mask:
    """The tail of a sequence is its last keys, as many as it has queries. Bit j of a query's number in `tail`, (batch,
    queries) or, with `cu_q`, (total,), says whether it sees key j of the tail; `mask` is for the keys before the tail."""
    lo, condition = _before_a_tail(mask.lo, mask.hi, mask.rest, len(mask.tensors), cu_q is not None)
    tensors = (*mask.tensors, tail, *(() if cu_q is None else (cu_q,)))
    return Mask(lo, None, "tail", (), condition, tensors)


@functools.lru_cache(maxsize=64)
def _before_a_tail(
    lo: Expr | None, hi: Expr | None, rest: Expr | None, number: int, packed: bool
) -> tuple[Expr | None, Expr]:
    """The left end that has the tail as well, and the condition; `number`: of the tail among the tensors."""
    begin = Expr("max", (LEN_K - LEN_Q, _int(0)))
    j = Expr("min", (Expr("max", (K - begin, _int(0))), _int(63)))
    first_row = Expr("load", (number + 1, INT, B))  # of a sequence, among packed ones
    bits = Expr("load", (number, LONG, *((first_row + Q,) if packed else (B, Q))))
    seen = Expr("!=", (Expr("&", (Expr(">>", (bits, j)), _int(1))), _int(0)))
    is_before = begin > K
    before = Mask(lo, hi, "", (), rest)
    if before in (causal, full):  # which hide none of the keys before
        condition = Expr("|", (is_before, seen))
    else:
        condition = Expr("select", (is_before, before.as_condition().rest, seen))
    return None if lo is None else Expr("min", (lo, LEN_K - LEN_Q)), condition


def _int(number: int) -> Expr:
    return Expr("literal", (number,))
