"""Keys and values in pages: writing new ones, checking tables, and planning work. `strobe.attention_paged` reads them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from strobe.problem import Unsupported
from strobe.problem.page_checks import check_contents, in_order

Table = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # (sequences, width), or (indptr, indices)


class Level(NamedTuple):
    """Keys before several sequences' own, for `shared=` of `strobe.attention_paged`. Group g is the queries from
    cu_q[g] to cu_q[g + 1], counted over the rows of all sequences; each of its queries sees all of the group's keys. A
    group without keys has length 0."""

    table: Table
    lengths: torch.Tensor
    cu_q: torch.Tensor


class Rotary(NamedTuple):
    """The rotation of new keys by `append`: tables (positions, rotary_dim / 2), the position of each new row, and
    whether pairs are (2 i, 2 i + 1), else (i, i + rotary_dim / 2)."""

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    interleaved: bool = False


def slots(
    table: torch.Tensor, page: int, positions: torch.Tensor, sequences: torch.Tensor | None = None
) -> torch.Tensor:
    """Return where rows go, for `append`: the slot of the key at `positions` (…) of each of `sequences` (…), counted in
    the rows of the table; without `sequences`, positions are (batch, …). Nothing is read back. A slot is page · page
    size + row; -1 where the table has no entry for a position."""
    if sequences is None:
        sequences = torch.arange(table.shape[0], device=table.device).view(-1, *(1,) * (positions.dim() - 1))
    entry = positions.long() // page
    there = (positions >= 0) & (entry < table.shape[1])
    page_number = table[sequences.long(), entry.clamp(0, max(0, table.shape[1] - 1))].long()
    return torch.where(there & (page_number >= 0), page_number * page + positions.long() % page, -1)


def append(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    *,
    rotary: Rotary | tuple[Any, ...] | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    layout: str = "nhd",
) -> None:
    """Write new keys and values into a pool, in place.

    k_new, v_new  (…, heads_k, dim), a row for each token
    k, v          the pool, (pages, page, heads_k, dim), or (pages, heads_k, page, dim) with `layout="hnd"`; any strides
    slots         (…) int64 or int32: page · page size + row, where each row goes; negative: it is not written. Slots that
                  are written must differ
    rotary        (cos, sin, positions, interleaved), a `strobe.paged.Rotary`: rotate the new keys first
    k_scale       and v_scale: of 8-bit pools, which are not built yet

    On a GPU it is one launch for bfloat16 and float16 pools whose rows are aligned to 16 bytes; nothing is read back, so it
    may be captured in a CUDA graph. Slots that the pool does not have are skipped there, and positions that the rotary
    tables do not have are clamped to them; on a CPU both are errors.
    """
    if k_scale is not None or v_scale is not None:
        raise Unsupported("k_scale and v_scale were given, but there are no 8-bit keys and values yet")
    k, v = in_order(k, v, layout)
    turn = None if rotary is None else Rotary(*rotary)
    if _written_by_kernel(k_new, v_new, k, v, slots, turn):
        return
    for name, new, pool in (("k", k_new, k), ("v", v_new, v)):
        if new.shape != (*slots.shape, *pool.shape[2:]) or new.dtype != pool.dtype or new.device != pool.device:
            got = f"{new.dtype} of shape {tuple(new.shape)} on {new.device}"
            wanted = f"{pool.dtype} of shape {(*slots.shape, *pool.shape[2:])} on {pool.device}"
            raise ValueError(f"{name}_new must be {wanted}, as slots and the pool are; got {got}")
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k and v must have the same pages, got {tuple(k.shape[:2])} and {tuple(v.shape[:2])}")
    if slots.is_floating_point() or slots.dtype == torch.bool:
        raise TypeError(f"slots must be int64 or int32, got {slots.dtype}")
    with torch.no_grad():
        _append(k_new, v_new, k, v, slots, turn)


def _written_by_kernel(
    k_new: torch.Tensor, v_new: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, turn: Rotary | None
) -> bool:
    if not k.is_cuda or torch.compiler.is_compiling():
        return False
    from strobe.cuda.append import append

    return append(k_new, v_new, k, v, slots, turn)


def _append(
    k_new: torch.Tensor, v_new: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, turn: Rotary | None
) -> None:
    at, rows = slots.flatten().long(), k.shape[0] * k.shape[1]
    if at.is_cpu and at.numel() and not torch.compiler.is_compiling() and int(at.max()) >= rows:
        i = int(at.argmax())
        raise ValueError(f"slot {i} is {int(at[i])}; the pool has {rows} rows, {k.shape[0]} pages of {k.shape[1]}")
    if turn is not None:
        k_new = _turned(k_new, turn)
        if _written_by_kernel(k_new, v_new, k, v, slots, None):  # it does not take all tables
            return
    if not at.numel() or not rows:
        return
    for new, pool in ((k_new, k), (v_new, v)):
        scatter = _scatter if at.is_cpu else scatter_without_reading
        scatter(pool, at, new.reshape(-1, *new.shape[-2:]))


def _scatter(pool: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> None:
    size, used = pool.shape[1], at >= 0
    pool[at[used] // size, at[used] % size] = rows[used]


def scatter_without_reading(pool: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> None:
    """Does not read back which rows are skipped. A skipped row repeats the write of the first row that is written or,
    if none is, writes to slot 0 what is there already. Slots that the pool does not have are skipped, too."""
    size = pool.shape[1]
    used = (at >= 0) & (at < pool.shape[0] * size)
    first = used.to(torch.int8).argmax()
    source = torch.where(used, torch.arange(len(at), device=at.device), first)
    target = torch.where(used.any(), at[source], 0)
    old = pool[target // size, target % size]
    pool[target // size, target % size] = torch.where(used.any(), rows[source], old)


def _turned(k_new: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    at = rotary.positions
    if tuple(at.shape) != tuple(k_new.shape[:-2]):
        raise ValueError(
            f"positions of rotary must have shape {tuple(k_new.shape[:-2])}, one for each new row; got {tuple(at.shape)}"
        )
    from strobe.nn.rotary import rotate

    cos, sin = (t.index_select(0, at.flatten()).unflatten(0, at.shape) for t in (rotary.cos, rotary.sin))
    return rotate(k_new, cos, sin, rotary.interleaved)


def check(table: Table, lengths: torch.Tensor, k: torch.Tensor, *, layout: str = "nhd") -> None:
    """Raise a ValueError that names sequence and entry if a length does not fit into the table, or if an entry in use is no
    page of the pool `k`. Waits for the device: for debugging on a GPU. On a CPU, `attention_paged` checks by itself the
    entries that it looks at."""
    k, _ = in_order(k, k, layout)
    indptr, entries = table if isinstance(table, (tuple, list)) else (None, table)
    wanted = (entries.shape[0],) if indptr is None else (indptr.numel() - 1,)
    if tuple(lengths.shape) != wanted:
        raise ValueError(f"lengths must have shape {wanted}, one for each sequence; got {tuple(lengths.shape)}")
    check_contents(entries, indptr, lengths, k.shape[0], k.shape[1])
