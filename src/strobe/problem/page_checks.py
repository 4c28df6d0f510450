"""Checks of paged keys: what a call says of them, and what its tables and lengths hold.

Facts are checked when a call is bound. Contents are checked at every call on a CPU; elsewhere that would wait for the
device, so lengths are clamped to the table there, and entries outside the pool are missing keys.
"""

from __future__ import annotations

from typing import Any

import torch

from strobe.problem.arguments import Arguments
from strobe.problem.checks import check_queries, checked_tensor
from strobe.variants.expression import Expr
from strobe.variants.mask import Mask, Positions

LAYOUTS = ("nhd", "hnd")  # of a pool
MOST_TAIL = 64  # the bits of a row of `tail`
NO_GRADIENTS = (
    "attention_paged has no gradients: gather the keys, k[table].flatten(1, 2), and call strobe.attention_varlen or "
    "strobe.attention, which have them; or call it under torch.no_grad()"
)


def in_order(k: torch.Tensor, v: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pools as views (pages, page, heads_k, dim)."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}, got {layout!r}")
    for name, t in (("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor) or t.dim() != 4:
            got = f"{t.dim()} axes" if isinstance(t, torch.Tensor) else type(t).__name__
            raise ValueError(f"{name} must be a pool of pages with 4 axes, (pages, page, heads_k, dim); got {got}")
    return (k, v) if layout == "nhd" else (k.transpose(1, 2), v.transpose(1, 2))


def entries_of(table: Any) -> tuple[Any, Any]:
    """(table, None) or (indices, indptr)."""
    if isinstance(table, (tuple, list)):
        if len(table) != 2:
            raise ValueError(f"table must be a tensor or (indptr, indices), got {len(table)} tensors")
        for name, part in zip(("indptr", "indices"), table, strict=True):
            if not isinstance(part, torch.Tensor):
                raise TypeError(f"table must be a tensor or (indptr, indices); {name} is {type(part).__name__}")
        return table[1], table[0]
    return table, None


def check_paged(a: Arguments) -> tuple[int, int, int]:
    """(sequences, longest queries, most keys that the table has room for)."""
    for name in ("bias", "cu_k", "positions", "state_lse", "state_out"):
        if getattr(a, name) is not None:
            raise ValueError(f"{name} was given, which paged keys do not go with")
    if a.dropout:
        raise ValueError(f"dropout is {a.dropout}, which paged keys do not go with")
    if isinstance(a.mask, torch.Tensor):
        raise TypeError("mask must be a strobe mask or None beside paged keys, got a tensor; trees go in tail")
    sequences, longest = _check_queries(a)
    _check_ints("lengths", a.lengths, a.q, (sequences,))
    if a.starts is not None:
        _check_ints("starts", a.starts, a.q, (sequences,))
    size = a.k.shape[1]
    if size < 1:
        raise ValueError(f"k has pages of {size} rows; a page has at least 1")
    if a.indptr is None:
        _check_ints("table", a.table, a.q, (sequences, None))
        most = a.table.shape[1] * size
    else:
        _check_ints("the indptr of table", a.indptr, a.q, (sequences + 1,))
        _check_ints("the indices of table", a.table, a.q, (None,))
        most = a.table.shape[0] * size
    return sequences, longest, most


def check_tail(tail: Any, q: torch.Tensor, cu_q: Any, max_q: int | None) -> None:
    """Nothing waits for a device. What is wrong with `cu_q`, other checks say."""
    checked_tensor("tail", tail)
    rows = tuple(q.shape[:-2])
    if tail.dtype != torch.int64 or tuple(tail.shape) != rows or tail.device != q.device:
        got = f"{tail.dtype} of shape {tuple(tail.shape)} on {tail.device}"
        raise ValueError(f"tail must be int64 of shape {rows} on {q.device}, a number for each query; got {got}")
    longest = max_q or 0
    if cu_q is None:
        longest = q.shape[1]
    elif max_q is None and isinstance(cu_q, torch.Tensor) and cu_q.is_cpu and cu_q.numel() > 1:
        longest = int(cu_q.diff().max())
    if longest > MOST_TAIL:
        raise ValueError(f"tail has {MOST_TAIL} bits, one for each of a sequence's new keys; there are {longest}")


def _check_queries(a: Arguments) -> tuple[int, int]:
    """(sequences, longest queries)."""
    if a.cu_q is None:
        if a.q.dim() != 4:
            allowed = "4 (batch, queries, heads, dim), or 3 (total, heads, dim) with cu_q"
            raise ValueError(f"q has {a.q.dim()} axes; allowed are {allowed}. One query each: q[:, None]")
        return a.q.shape[0], a.q.shape[1]
    return check_queries(a)


def _check_ints(name: str, t: Any, q: torch.Tensor, want: tuple[int | None, ...]) -> None:
    checked_tensor(name, t)
    if t.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {t.dtype}")
    if t.dim() != len(want) or any(need is not None and have != need for have, need in zip(t.shape, want, strict=True)):
        shape = ", ".join("any" if n is None else str(n) for n in want)
        raise ValueError(f"{name} must have shape ({shape}), got {tuple(t.shape)}")
    if t.device != q.device:
        raise ValueError(f"{name} is on {t.device}, q is on {q.device}")


# ---- contents --------------------------------------------------------------------------------------------------------


def with_numbers_on(mask: Mask, device: torch.device) -> Mask:
    """The mask with its numbers in the memory of a device: comparing a tensor there with a number of the host copies the
    number, which waits, and which no CUDA graph may capture."""
    if device.type == "cpu":
        return mask

    def moved(e: Expr | None) -> Expr | None:
        if e is None or e.op == "var":
            return e
        if e.op in ("const", "literal"):
            return Expr(e.op, (torch.full((), e.args[0], dtype=torch.int64, device=device),))
        return Expr(e.op, tuple(moved(a) for a in e.args))

    return Mask(moved(mask.lo), moved(mask.hi), mask.title, mask.sizes)


def visible_spans(
    mask: Mask, len_q: torch.Tensor, length: torch.Tensor, start: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The range of each sequence's keys that some query sees, counted from the first key in the table: from, to. All
    are int64, one for each sequence; `mask` is that of a problem, which hides what lies outside of the sequence."""
    mask = with_numbers_on(mask, len_q.device)
    at = Positions(0, len_q, start, start + length)  # type: ignore[arg-type]
    first, _ = mask.bounds(torch.zeros_like(len_q), 0, _FAR, at)
    _, end = mask.bounds(len_q - 1, 0, _FAR, at)
    end = torch.where(len_q > 0, end, 0).clamp(min=0)
    return torch.minimum(first, end), end


_FAR = 1 << 30  # beyond every key


def check_contents(
    table: torch.Tensor,
    indptr: torch.Tensor | None,
    lengths: torch.Tensor,
    pages: int,
    size: int,
    spans: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Lengths fit into the table, and the entries of keys in `spans` (None: of all in use) are pages of the pool. Waits
    for a device."""
    table, lengths = table.cpu(), lengths.cpu().long()
    if indptr is None:
        room = torch.full_like(lengths, table.shape[1])
        sequence, column = torch.arange(len(lengths))[:, None], torch.arange(table.shape[1])[None]
    else:
        indptr = indptr.cpu().long()
        room = indptr.diff()
        if indptr[0] != 0 or indptr[-1] > len(table):
            raise ValueError(f"indptr must run from 0 to at most {len(table)}, got {indptr[0]} … {indptr[-1]}")
        if (room < 0).any():
            raise ValueError(f"indptr must not decrease, but does at sequence {int((room < 0).nonzero()[0])}")
        table = table[: indptr[-1]]
        sequence = torch.repeat_interleave(room)
        column = torch.arange(len(table)) - indptr[sequence]
    wrong = ((lengths < 0) | (lengths > room * size)).nonzero()
    if len(wrong):
        i = int(wrong[0])
        has = f"{int(room[i])} pages of {size} rows"
        raise ValueError(
            f"lengths[{i}] is {int(lengths[i])}; sequence {i} has {has} and may use 0 to {int(room[i]) * size}"
        )
    first, end = (torch.zeros_like(lengths), lengths) if spans is None else (t.cpu() for t in spans)
    first, end = first // size, torch.where(end > first, (end + size - 1) // size, 0)
    looked_at = (first[sequence] <= column) & (column < end[sequence])
    wrong = (looked_at & ((table < 0) | (table >= pages))).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        i, entry = at if indptr is None else (int(sequence[at[0]]), int(column[at[0]]))
        asked = f"sequence {i} looks at its entries {int(first[i])} to {int(end[i]) - 1}"
        raise ValueError(f"entry {entry} of sequence {i} is {int(table[at])}; {asked}, and the pool has {pages} pages")


def check_call(a: Arguments, mask: Mask) -> None:
    """Checks the contents of a call's tables, for kernels that read them as they are. `mask` is that of the problem."""
    lengths = a.lengths.long()
    len_q = torch.full_like(lengths, a.q.shape[1]) if a.cu_q is None else a.cu_q.diff().long()
    start = torch.zeros_like(lengths) if a.starts is None else a.starts.long()
    spans = visible_spans(mask, len_q, lengths, start)
    check_contents(a.table, a.indptr, a.lengths, a.k.shape[0], a.k.shape[1], spans)
