"""Masks and scores that many models use, each a few lines: an interval, or a traced function (`user_function.py`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from strobe.variants.expression import DIAGONAL, FLOAT, LEN_K, Expr, H, K, Q, S
from strobe.variants.intervals import LARGEST
from strobe.variants.mask import Mask
from strobe.variants.score import DerivedScore, Score
from strobe.variants.user_function import mask_function


def window(left: int | None, right: int | None) -> Mask:
    """Keys from `left` before the diagonal to `right` after it, both included; `None` leaves that side open."""
    return Mask(
        None if left is None else DIAGONAL - _number(_size(left, "window(left, right): left", 0)),
        None if right is None else DIAGONAL + _number(_size(right, "window(left, right): right", 0) + 1),
        f"window({None if left is None else '?'}, {None if right is None else '?'})",
        tuple(size for size in (left, right) if size is not None),
    )


def cached_window(left: int) -> Mask:
    """Return the mask of a window over keys that all stand before the first query: each query sees those from `left`
    positions before it on."""
    return Mask(Q + LEN_K - _number(left), None, "cached_window(?)", (left,))


def prefix(n: int) -> Mask:
    """Causal, but the first `n` keys are visible to every query."""
    first = _number(_size(n, "prefix(n): n", 0))
    return Mask(None, Expr("max", (DIAGONAL + 1, first)), "prefix(?)", (n,))


def chunked(n: int) -> Mask:
    """Queries see the keys of their own chunk of `n` positions: those with the same `position // n`. The last query
    stands opposite the last key; queries before the first key are in chunks of their own, without keys."""
    size = _number(_size(n, "chunked(n): n", 1))
    chunk = DIAGONAL // size
    return Mask(chunk * size, (chunk + 1) * size, "chunked(?)", (n,))


def _number(value: int) -> Expr:
    return Expr.of(min(value, LARGEST))


def _size(value: Any, what: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{what} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{what} must be at least {least}, got {value}")
    return value  # type: ignore[return-value]


def documents(ids: torch.Tensor) -> Mask:
    """Queries see the keys of their own document: those with the same number in `ids`, (len_k,) or (batch, len_k).
    Combine with `strobe.causal &`. Numbers of 32 bits cost kernels less than those of 64."""
    _check_integers("documents(ids): ids", ids)
    if ids.dim() == 1:
        return replace(mask_function(lambda b, h, q, k: ids[q] == ids[k]), title="documents")
    return replace(mask_function(lambda b, h, q, k: ids[b, q] == ids[b, k]), title="documents")


def relative_bias(table: torch.Tensor) -> Score:
    """Adds `table[head, k - q + n - 1]`; the table is (heads, 2 n - 1) and may learn. Distances of n or more take its first
    or its last entry."""
    if (
        not isinstance(table, torch.Tensor)
        or table.dim() != 2
        or not table.shape[1] % 2
        or not table.is_floating_point()
    ):
        raise ValueError(f"table must be a floating-point tensor (heads, 2 n - 1), got {_shown(table)}")
    offset = K - DIAGONAL + table.shape[1] // 2  # clamped to the table where it is read
    return Score(S + Expr("load", (0, FLOAT, H, offset)), "relative_bias", (table,))


def t5_bias(table: torch.Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> Score:
    """T5's bias: `table`, (buckets, heads), has an entry for each bucket of distances, which grow logarithmically up to
    `max_distance`. `bidirectional`: keys after a query have buckets of their own, as in T5's encoder."""
    least = 4 if bidirectional else 2
    if (
        not isinstance(table, torch.Tensor)
        or table.dim() != 2
        or table.shape[0] < least
        or not table.is_floating_point()
    ):
        raise ValueError(
            f"table must be a floating-point tensor (buckets, heads) of at least {least} buckets, got {_shown(table)}"
        )
    buckets = table.shape[0] // 2 if bidirectional else table.shape[0]
    if max_distance <= buckets // 2:
        raise ValueError(f"max_distance must be greater than {buckets // 2}, got {max_distance}")
    offset = torch.arange(-max_distance, max_distance + 1)  # of a key from its query
    distance = offset.abs() if bidirectional else (-offset).clamp(min=0)
    exact = buckets // 2
    share = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (share * (buckets - exact)).long()).clamp(max=buckets - 1)
    bucket = torch.where(distance < exact, distance, far) + (offset > 0) * (buckets if bidirectional else 0)
    derive = functools.partial(_by_offset, table, bucket.to(table.device))
    of_pair = Expr("load", (0, FLOAT, H, K - DIAGONAL + max_distance))  # clamped where it is read
    return DerivedScore(S + of_pair, "t5_bias", derive(), (), derive)


def _by_offset(table: torch.Tensor, bucket: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The entry for each head and offset: a kernel reads one entry for a pair, where bucket and table would be two."""
    return (table.t().index_select(1, bucket),)


def neighbourhood(height: int, width: int, radius: int | tuple[int, int]) -> Mask:
    """Positions are the pixels of a picture, row by row. A query sees the square of pixels around its own, `radius` in each
    direction; at a border the square is moved inside, so that all queries see as many. A pair of radii: down, across.

    The picture is not compared with the call: queries behind its last pixel see a square in its last rows, and keys
    behind it are not seen."""
    down, across = (radius, radius) if isinstance(radius, int) else radius
    for what, size, r in (("height", height, down), ("width", width, across)):
        if not 0 <= 2 * r < size:
            raise ValueError(f"radius must be at least 0, and 2 radius + 1 at most the {what} {size}, got {r}")

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        row = (q // width).clamp(down, height - 1 - down) - k // width
        column = (q % width).clamp(across, width - 1 - across) - k % width
        return (row.abs() <= down) & (column.abs() <= across)

    return replace(mask_function(mask), title="neighbourhood")


def tree(parents: Sequence[int] | torch.Tensor, first: int = 0, device: torch.device | str | None = None) -> Mask:
    """Each query sees itself and those above it: `parents[i]` is the token above token i, -1 if there is none. The tree
    begins at position `first`; all queries see the keys before it. On the device of `parents`, or on `device`. The mask
    holds the tree as it is now: after a change of `parents` make another."""
    if isinstance(parents, torch.Tensor):
        device, parents = device or parents.device, parents.tolist()
    begin, end = (torch.tensor(x, dtype=torch.int32, device=device) for x in _depth_first(list(parents)))

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        at, above = begin[(q - first).clamp(min=0)], (k - first).clamp(min=0)
        return (k < first) | ((begin[above] <= at) & (at < end[above]))

    return replace(mask_function(mask), title="tree")


def _depth_first(parents: list[int]) -> tuple[list[int], list[int]]:
    """Return for each token its number in a walk that goes down first, and that of the first token after all below
    it."""
    below: list[list[int]] = [[] for _ in range(len(parents) + 1)]  # the last one: of no token
    for i, parent in enumerate(parents):
        if not -1 <= parent < len(parents):
            raise ValueError(f"parents[{i}] is {parent}; allowed are -1 and the {len(parents)} tokens from 0 on")
        below[parent].append(i)
    begin, end = [-1] * len(parents), [0] * len(parents)
    count, waiting = 0, [(i, False) for i in reversed(below[-1])]
    while waiting:
        i, left = waiting.pop()
        if left:
            end[i] = count
            continue
        begin[i], count = count, count + 1
        waiting += [(i, True), *((child, False) for child in reversed(below[i]))]
    if count < len(parents):
        raise ValueError(f"parents[{begin.index(-1)}] leads round in a circle")
    return begin, end


def _check_integers(what: str, t: Any) -> None:
    if not isinstance(t, torch.Tensor) or t.dim() not in (1, 2) or t.is_floating_point():
        raise ValueError(f"{what} must be a tensor of integers, (len_k,) or (batch, len_k), got {_shown(t)}")


def _shown(t: Any) -> str:
    return f"{t.dtype} of shape {tuple(t.shape)}" if isinstance(t, torch.Tensor) else repr(t)
