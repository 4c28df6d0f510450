"""Attention to a cache of keys and values that is longer than what is in use, one length per sequence: a contiguous one, or
pages that a table lists.

New keys are written into the cache, in place. `positions` says on the device what is in use: nothing is copied and
nothing waits. If the length is one int for all, the cache is simply cut off there.
"""

from __future__ import annotations

from typing import Any

import torch

from strobe import paged
from strobe.call.attend import attend as attend_to
from strobe.compat import flash_terms
from strobe.nn.rotary import rotate
from strobe.problem.arguments import Arguments
from strobe.problem.hints import InvalidArgument, raises_as_hosts
from strobe.variants.mask import Mask
from strobe.variants.score import Score

_Maybe = torch.Tensor | None


@raises_as_hosts
@torch.no_grad()
def attend(
    q: torch.Tensor,  # (batch, len_q, heads, dim), or (total_q, heads, dim) with cu_q
    k_cache: torch.Tensor,  # (batch_cache, capacity, heads_k, dim), or (pages, page, heads_k, dim) with a table
    v_cache: torch.Tensor,
    k: _Maybe,  # (batch, len_new, heads_k, dim), or (total_new, heads_k, dim) with cu_new
    v: _Maybe,
    rotary_cos: _Maybe,  # (positions, rotary_dim / 2)
    rotary_sin: _Maybe,
    cache_seqlens: int | torch.Tensor | None,  # (batch,): rows in use before k and v are written
    cache_batch_idx: _Maybe,  # (batch,): where in the cache the sequences are
    cache_leftpad: _Maybe,  # (batch,): rows at the beginning that are not in use
    softmax_scale: float | None,
    mask: Mask,
    score: Score | None,
    rotary_interleaved: bool,
    return_lse: bool,
    *,
    cu_q: _Maybe = None,
    max_q: int | None = None,
    cu_new: _Maybe = None,
    rotary_seqlens: _Maybe = None,  # (batch,): where rotary positions start, if not at cache_seqlens
    qv: _Maybe = None,  # (…, heads, dim_v), beside q: adds qv vᵀ to the scores
    table: _Maybe = None,  # (batch or batch_cache, width): the pages of each sequence
) -> Any:
    q, k, v = map(flash_terms.last_axis_contiguous, (q, k, v))
    batch = q.shape[0] if cu_q is None else cu_q.numel() - 1
    if table is not None:  # from here on it has a row for each sequence
        table, cache_batch_idx = _rows_of_table(table, batch, cache_batch_idx), None
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    used: Any = capacity if cache_seqlens is None else cache_seqlens
    if not isinstance(used, torch.Tensor) or used.dim() == 0:
        used = flash_terms.integer("cache_seqlens", used)
    _check(batch, q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cu_new)
    if qv is not None and (qv.shape != (*q.shape[:-1], v_cache.shape[-1]) or qv.dtype != q.dtype):
        want = f"{q.dtype} of shape {(*q.shape[:-1], v_cache.shape[-1])}, as q and the values are"
        raise InvalidArgument(f"qv must be {want}; got {qv.dtype} of shape {tuple(qv.shape)}")
    if k is not None and cache_seqlens is None:
        raise InvalidArgument("cache_seqlens must be given with k and v: it says where they are written")
    new: Any = 0 if k is None else k.shape[1] if cu_new is None else cu_new.diff()
    caches = k_cache.shape[0] if table is None else batch
    _check_places(batch, caches, capacity, used, new, cache_batch_idx, cache_leftpad, rotary_seqlens)
    if rotary_cos is not None and rotary_sin is not None:
        assert k is not None
        start = used if rotary_seqlens is None else rotary_seqlens
        moves = mask.lo is not None or mask.hi is not None  # else every query stands after the cache
        q = _turned(q, rotary_cos, rotary_sin, start, cu_q, rotary_interleaved, moves)
        k = _turned(k, rotary_cos, rotary_sin, start, cu_new, rotary_interleaved)
    if k is not None and v is not None:
        if table is None:
            _write(k_cache, v_cache, k, v, used, cache_batch_idx, cu_new)
        else:
            at, sequence = _places(k, used, cu_new)
            slots = paged.slots(table, k_cache.shape[1], at, sequence)
            if slots.is_cpu and (slots < 0).any():
                raise InvalidArgument("the table has no page for some of the new keys")
            paged.append(k, v, k_cache, v_cache, slots)
        used = used + new
    if qv is not None:  # (q, qv) · (k, v), for which keys and values are copied
        q, k_cache = torch.cat((q, qv), dim=-1), torch.cat((k_cache, v_cache), dim=-1)
    a = Arguments(
        q, k_cache, v_cache, mask=mask, scale=flash_terms.scale_of(softmax_scale, q.shape[-1]), score=score,
        return_lse=return_lse,
    )  # fmt: skip
    if table is not None:
        a = a._replace(cu_q=cu_q, max_q=flash_terms.longest("max_seqlen_q", max_q))
        return attend_to(flash_terms.in_pages(a, table, used, cache_leftpad))
    return attend_to(_looked_up(a, batch, used, cache_batch_idx, cache_leftpad, cu_q, max_q))


def _check(
    batch: int,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: _Maybe,
    v: _Maybe,
    cos: _Maybe,
    sin: _Maybe,
    cu_new: _Maybe,
) -> None:
    """Shapes and types, before anything is written: an assignment would broadcast, and convert."""
    if (k is None) != (v is None):
        raise InvalidArgument("k and v must be given together")
    if (cos is None) != (sin is None):
        raise InvalidArgument("rotary_cos and rotary_sin must be given together")
    if cos is not None and k is None:
        raise InvalidArgument("rotary_cos and rotary_sin turn queries and new keys: k and v must be given")
    if k_cache.dim() != 4 or v_cache.dim() != 4 or v_cache.shape[:3] != k_cache.shape[:3]:
        got = f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        raise InvalidArgument(f"k_cache and v_cache must be (batch_cache, capacity, heads_k, dim), got {got}")
    if q.shape[-1] != k_cache.shape[3] or q.dtype != k_cache.dtype:
        got = f"{q.dtype} of dim {q.shape[-1]} and {k_cache.dtype} of dim {k_cache.shape[3]}"
        raise InvalidArgument(f"q and k_cache must have one dtype and one head dim, got {got}")
    if q.shape[-2] % max(1, k_cache.shape[2]):
        raise InvalidArgument(
            f"q has {q.shape[-2]} heads, which is not a multiple of the {k_cache.shape[2]} heads of k_cache"
        )
    if k is None or v is None:
        return
    rows = (batch, *k.shape[1:2]) if cu_new is None else k.shape[:1]
    for name, t, cache in (("k", k, k_cache), ("v", v, v_cache)):
        want = (*rows, *cache.shape[2:])
        if t.shape != want or t.dtype != cache.dtype:
            got = f"{t.dtype} of shape {tuple(t.shape)}"
            raise InvalidArgument(f"{name} must be {cache.dtype} of shape {want}, as the cache and q are; got {got}")


def _rows_of_table(table: torch.Tensor, batch: int, batch_idx: _Maybe) -> torch.Tensor:
    """The table of the sequences of this call. With `batch_idx` a table has a row for each place in the cache."""
    if table.dim() != 2 or (batch_idx is None and table.shape[0] != batch) or table.dtype != torch.int32:
        found = f"{table.dtype} of shape {tuple(table.shape)}"
        rows = batch if batch_idx is None else "sequences of the cache"
        raise InvalidArgument(f"the table of pages must be int32 of shape ({rows}, pages of a sequence), got {found}")
    if batch_idx is None:
        return table
    flash_terms.check_counts("cache_batch_idx", batch_idx, batch, 0, table.shape[0] - 1)
    return table[batch_idx.long()]


def _check_places(
    batch: int, caches: int, capacity: int, used: Any, new: Any, batch_idx: _Maybe, leftpad: _Maybe, rotary: _Maybe
) -> None:
    """Check where in the cache things are, before anything is written: a negative number would count from the end."""
    if batch_idx is None and caches != batch:
        raise InvalidArgument(
            f"k_cache has batch size {caches}, q has {batch}; cache_batch_idx must map one to the other"
        )
    if batch_idx is not None:
        flash_terms.check_counts("cache_batch_idx", batch_idx, batch, 0, caches - 1)
    flash_terms.check_counts("cache_seqlens", used, batch, 0, capacity)
    most = used + new
    if isinstance(most, torch.Tensor):
        known = most.is_cpu and not torch.compiler.is_compiling()  # reading it elsewhere would wait
        most = int(most.max()) if known and most.numel() else 0
    if most > capacity:
        raise InvalidArgument(f"the cache holds {capacity} rows; cache_seqlens and the new keys come to {most}")
    if leftpad is not None:
        flash_terms.check_counts("cache_leftpad", leftpad, batch, 0, used + new)
    if rotary is not None:
        flash_terms.check_counts("rotary_seqlens", rotary, batch, 0, torch.iinfo(torch.int32).max)


def _looked_up(
    a: Arguments, batch: int, used: Any, batch_idx: _Maybe, leftpad: _Maybe, cu_q: _Maybe, max_q: Any
) -> Arguments:
    """The call on the part of the cache that is in use."""
    k, v = a.k, a.v
    if isinstance(used, int) and used < k.shape[1]:
        k, v = k[:, :used], v[:, :used]
    if batch_idx is not None:
        k, v = k[batch_idx.long()], v[batch_idx.long()]
    a = a._replace(k=k, v=v)
    if cu_q is not None:
        capacity = k.shape[1]
        cu_k = torch.arange(0, (batch + 1) * capacity, max(1, capacity), dtype=torch.int32, device=k.device)[
            : batch + 1
        ]
        max_q = flash_terms.longest("max_seqlen_q", max_q)
        a = a._replace(
            k=k.flatten(0, 1), v=v.flatten(0, 1), cu_q=cu_q, cu_k=cu_k, max_q=max_q, max_k=capacity
        )  # every sequence's buffer is one of the packed ones
    return a if isinstance(used, int) and leftpad is None else flash_terms.in_use(a, None, used, leftpad)


def _write(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    used: Any,
    batch_idx: _Maybe,
    cu_new: _Maybe,
) -> None:
    if isinstance(used, int) and cu_new is None and batch_idx is None:
        for cache, rows in ((k_cache, k), (v_cache, v)):
            cache[:, used : used + k.shape[1]] = rows
        return
    at, sequence = _places(k, used, cu_new)
    if batch_idx is not None:
        sequence = batch_idx.long()[sequence]
    for cache, rows in ((k_cache, k), (v_cache, v)):
        cache[sequence, at] = rows


def _places(t: torch.Tensor, start: Any, cu: _Maybe) -> tuple[torch.Tensor, torch.Tensor]:
    """The position and the sequence of each row of t, (batch, length) or (total,): positions count on from `start`."""
    if cu is None:
        sequence = torch.arange(t.shape[0], device=t.device)[:, None]
        row = torch.arange(t.shape[1], device=t.device)
    else:
        row = torch.arange(t.shape[0], device=t.device)
        sequence = torch.bucketize(row, cu[1:], right=True, out_int32=False)
        row = row - cu[sequence]
    first = start[sequence] if isinstance(start, torch.Tensor) else start
    return first + row, sequence


def _turned(
    t: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    start: Any,
    cu: _Maybe,
    interleaved: bool,
    moves: bool = True,
) -> torch.Tensor:
    """Rotates rows to the positions from `start` on; all to `start` if positions do not move."""
    at, sequence = _places(t, start, cu)
    if not moves:
        first = start[sequence] if isinstance(start, torch.Tensor) else torch.full_like(at, start)
        at = first.expand_as(at)
    return rotate(t, *flash_terms.rotary_rows(cos, sin, at), interleaved)
