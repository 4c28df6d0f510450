"""Packed sequences that a caller describes, and transformers' continuous batching.

In continuous batching all requests of a step are one row of tokens. `in_place` reads the paged cache where it lies. Where
it cannot, the cache takes the new keys and gives back those of all requests, one after the other: a copy.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from strobe.problem.arguments import Arguments

# Before 5.18 or so the cache took the indices one by one, and names had to begin with "paged|".
_TAKES_KEYWORDS = "kwargs" in inspect.signature(PagedAttentionCache.update).parameters


def is_paged(cache: Any) -> bool:
    return isinstance(cache, PagedAttentionCache)


def packed(a: Arguments, sliding_window: int | None, kwargs: dict[str, Any]) -> Arguments:
    """q, k and v (batch, heads, length, dim) as (total, heads, dim), with where their sequences begin, and how long the
    longest are."""
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in a[:3])
    cu_q, cu_k = (of_layer(kwargs[f"cu_seq_lens_{axis}"], sliding_window).to(torch.int32) for axis in "qk")
    max_q, max_k = (_as_int(of_layer(_longest(kwargs, axis), sliding_window)) for axis in "qk")
    return a._replace(q=q, k=k, v=v, cu_q=cu_q, cu_k=cu_k, max_q=max_q, max_k=max_k)


def updated(a: Arguments, cache: Any, index: int, kwargs: dict[str, Any]) -> Arguments:
    """The keys and values of all requests, copied from the cache of a layer after the new ones were written to it."""
    _, key, value = a[:3]
    if _TAKES_KEYWORDS:
        k, v = cache.update(key_states=key, value_states=value, layer_idx=index, kwargs=kwargs)
        return a._replace(k=k, v=v)
    k, v = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=index,
        read_index=kwargs["read_index"],
        write_index=kwargs["write_index"],
    )
    return a._replace(k=k.transpose(0, 1)[None], v=v.transpose(0, 1)[None])


def together(query: torch.Tensor, key: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """(batch, 1, len_q, len_k), whether a query and a key are of one sequence."""

    def sequence_of(cu: torch.Tensor, batch: int, length: int) -> torch.Tensor:
        at = torch.arange(batch * length, device=cu.device, dtype=cu.dtype)
        return torch.searchsorted(cu, at, right=True).view(batch, length)

    of_q = sequence_of(kwargs["cu_seq_lens_q"], query.shape[0], query.shape[2])
    of_k = sequence_of(kwargs["cu_seq_lens_k"], key.shape[0], key.shape[2])
    return (of_q[:, :, None] == of_k[:, None, :])[:, None]


def _longest(kwargs: dict[str, Any], axis: str) -> Any:
    longest = kwargs.get(f"max_length_{axis}")
    return kwargs.get(f"max_seqlen_{axis}") if longest is None else longest


def _as_int(n: Any) -> Any:
    return int(n) if isinstance(n, torch.Tensor) and n.is_cpu else n


def of_layer(x: Any, sliding_window: int | None) -> Any:
    """Models that mix kinds of layers have one number for each kind."""
    if not isinstance(x, dict):
        return x
    kind = "full_attention" if sliding_window is None else "sliding_attention"
    return x[kind] if kind in x else next(iter(x.values()))


# ---- the gate of continuous batching ---------------------------------------------------------------------------------


def open_gate(name: str) -> Any:
    """Continuous batching replaces, or refuses, implementations that it does not know. Afterwards it leaves ours as it
    is. Returns what `close_gate` needs."""
    owner: Any = continuous_api.ContinuousBatchingManager
    original = owner.switch_to_cb_friendly_attn

    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation != name:
            original(self, model, *args, **kwargs)
        elif not _TAKES_KEYWORDS:
            model.set_attn_implementation(f"paged|{name}")
            self._original_attn_impl = name

    owner.switch_to_cb_friendly_attn = switch_to_cb_friendly_attn
    return owner, original


def close_gate(opened: Any) -> None:
    owner, original = opened
    owner.switch_to_cb_friendly_attn = original
