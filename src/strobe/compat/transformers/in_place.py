"""Continuous batching without a copy of the cache: new rows are written, and all keys are read from the pages where they lie.

A layer that sees everything has its keys in pages. One with a sliding window has a ring of as many rows, laid over pages:
the key at position p is row p % window. A step with one token for each request may write first, since the row that it
overwrites has just left the window, and since one query sees the whole ring, whose order does not matter then. In steps
that hold pieces of prompts, new rows may overwrite what is still to be seen: cached and new keys are two states, merged,
and rows are written last.

The names that are looked up here are transformers' own, and change. Where one is missing, or where no kernel reads such
pages, `attend` returns None and computes nothing: the caller then asks the cache for a copy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from strobe.call.attend import attend as attend_to
from strobe.call.bound_call import lookup
from strobe.compat.transformers.paged import of_layer
from strobe.merging import merge
from strobe.paged import append
from strobe.problem import Unsupported
from strobe.problem.arguments import Arguments
from strobe.variants.mask import causal, full
from strobe.variants.ready_made import cached_window, window


class Layer(NamedTuple):
    """The cache of a layer. `window`: the rows of a ring, or None. Sequence i reads the rows read[cu_k[i] : cu_k[i +
    1]]; in a ring's list the new keys, which come last, are `sentinel`."""

    k: torch.Tensor  # (rows, heads_k, dim)
    v: torch.Tensor
    page: int
    window: int | None
    sentinel: int
    read: torch.Tensor  # int64; empty if no sequence has keys in the cache
    write: torch.Tensor  # (total_q,)
    cu_k: torch.Tensor  # (sequences + 1,)


def layer_of(cache: Any, index: int, kwargs: dict[str, Any]) -> Layer | None:
    """None if the cache is not one that we know."""
    try:
        if hasattr(cache, "layer_to_allocator"):
            has = cache.layer_to_allocator[index]
            k, v = has._kv_token_views[index]
            group, page, sentinel = has.index, has.tokens_per_page, has.sentinel_index
            rows = getattr(has, "sliding_window", None)
        else:  # 5.17
            group, within = cache.layer_index_to_group_indices[index]
            k, v = cache.key_cache[within], cache.value_cache[within]
            page, sentinel = cache.block_size, cache.sentinel_index
            rows = None if cache.sliding_windows[index] == 1 else cache.sliding_windows[index]
        read, write = kwargs["read_index"][group], kwargs["write_index"][group]
    except (AttributeError, KeyError, TypeError, IndexError, ValueError):
        return None
    whole = min(len(k), len(v)) // page * page
    cu_k = of_layer(kwargs["cu_seq_lens_k"], rows).to(torch.int32)
    return Layer(k[:whole], v[:whole], page, rows, sentinel, read, write, cu_k)


@torch.compiler.disable  # as the cache's own update: views of one tensor with all layers
@torch.no_grad()
def attend(a: Arguments, cache: Any, index: int, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """`a`: packed queries and new keys of a causal call, `max_k` with those in the cache. (total_q, heads, dim), or None."""
    if kwargs.get("block_table") is not None:
        raise Unsupported("block_table was given, which is for flash_attention_2 and flash_attention_3 by name")
    layer = layer_of(cache, index, kwargs)
    if layer is None or a.dropout or not isinstance(a.max_k, int):
        return None
    if layer.window is not None:
        a = a._replace(mask=causal & window(layer.window - 1, None))
    if not layer.read.numel():  # nothing is cached yet
        out = attend_to(a)
        _write(layer, a)
        return out
    past = _past(a, kwargs)
    if layer.window is None:
        call = _in_pages(layer, a, _table(layer, a.max_k))
    elif past is not None:
        call = _in_pages(layer, a._replace(mask=full), _table_of_ring(layer, past, a.max_k))
    else:
        return _two_states(layer, a)
    if not _reads_pages(call):
        return None
    _write(layer, a)
    return attend_to(call)


def _two_states(layer: Layer, a: Arguments) -> torch.Tensor | None:
    assert layer.window is not None
    new = a._replace(sinks=None, partial=True, return_lse=True, cu_k=a.cu_q, max_k=a.max_q)
    lengths = layer.cu_k.diff() - a.cu_q.diff()
    cached = new._replace(
        k=layer.k[:, None], v=layer.v[:, None], cu_k=None, max_k=None, mask=cached_window(layer.window - 1),
        table=layer.read.to(torch.int32), indptr=layer.cu_k, lengths=lengths,
    )  # fmt: skip
    if not _reads_pages(cached):
        return None
    outs, lses = zip(attend_to(cached), attend_to(new), strict=True)
    _write(layer, a)
    out = a.q.new_empty((*a.q.shape[:-1], a.v.shape[-1]))
    return merge(outs, lses, sinks=a.sinks, out=out)[0]


def _write(layer: Layer, a: Arguments) -> None:
    """Writes the new keys and values. Rows of padding go to a place that is never read."""
    append(a.k, a.v, layer.k[:, None], layer.v[:, None], layer.write)


def _in_pages(layer: Layer, a: Arguments, table: torch.Tensor) -> Arguments:
    k, v = (t.unflatten(0, (-1, layer.page)) for t in (layer.k, layer.v))
    return a._replace(k=k, v=v, cu_k=None, max_k=None, table=table, lengths=layer.cu_k.diff())


def _table(layer: Layer, max_k: int) -> torch.Tensor:
    """The table of pages, from a list of rows. A page's rows are neighbours in the list, so every page-th entry names a
    page."""
    return _pages(layer, layer.read, torch.arange(0, max_k, layer.page, device=layer.read.device)[None])


def _table_of_ring(layer: Layer, past: torch.Tensor, max_k: int) -> torch.Tensor:
    """The list begins with the oldest key: where the ring is full, that is the row after the new one."""
    assert layer.window is not None
    rows = layer.read.masked_scatter(layer.read == layer.sentinel, layer.write)
    slot = torch.arange(0, min(max_k, layer.window), layer.page, device=rows.device)
    past = past[:, None]
    return _pages(layer, rows, torch.where(past < layer.window, slot, (slot - past - 1) % layer.window))


def _pages(layer: Layer, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """(sequences, width), int32: the pages of the rows `at` (sequences or 1, width) of each sequence's list. Entries
    after a sequence's last key are not looked at."""
    index = (layer.cu_k[:-1, None] + at).clamp(max=len(rows) - 1)
    return (rows[index] // layer.page).to(torch.int32)


def _past(a: Arguments, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return how many keys each sequence had before, if it has one query each and that is known without waiting."""
    positions = kwargs.get("position_ids")
    if a.max_q != 1 or positions is None or positions.shape != (1, a.q.shape[0]):
        return None
    return positions[0, a.cu_q[:-1].long().clamp(max=a.q.shape[0] - 1)].long()


def _reads_pages(a: Arguments) -> bool:
    """Return whether to read keys in pages. On a GPU the backends without kernels gather keys tile by tile, which takes
    longer than one copy."""
    return a.q.is_cpu or lookup(a).backend.name not in ("tiled", "reference")
