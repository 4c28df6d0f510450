"""Packed sequences that a caller describes, and transformers' continuous batching.

In continuous batching all requests of a step are one row of tokens. The paged cache takes the new keys and gives back
those of all requests, one after the other: a gather, which our kernels shall one day not need.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache import PagedAttentionCache

# Before 5.18 or so the cache took the indices one by one, and names had to begin with "paged|".
_TAKES_KEYWORDS = "kwargs" in inspect.signature(PagedAttentionCache.update).parameters
Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int]


def is_paged(cache: Any) -> bool:
    return isinstance(cache, PagedAttentionCache)


def packed(
    module: Any,
    query: torch.Tensor,  # (1, heads, total_q, dim)
    key: torch.Tensor,
    value: torch.Tensor,
    sliding_window: int | None,
    cache: Any,
    kwargs: dict[str, Any],
) -> Packed:
    """q, k and v as (total, heads, dim), where their sequences begin, and how long the longest are."""
    if cache is None:
        k, v = key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1)
    elif _TAKES_KEYWORDS:
        found = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
        k, v = (t.squeeze(0).transpose(0, 1) for t in found)
    else:
        k, v = cache.update(
            key_states=key,
            value_states=value,
            layer_idx=module.layer_idx,
            read_index=kwargs["read_index"],
            write_index=kwargs["write_index"],
        )
    lengths = [_of_layer(kwargs[name], sliding_window) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    cu_q, cu_k = (cu.to(torch.int32) for cu in lengths)
    max_q, max_k = (_of_layer(_longest(kwargs, axis), sliding_window) for axis in "qk")
    q = query.transpose(1, 2).flatten(0, 1)
    return q, k, v, cu_q, cu_k, _as_int(max_q), _as_int(max_k)


def together(query: torch.Tensor, key: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """(batch, 1, len_q, len_k), whether a query and a key are of one sequence."""

    def sequence_of(cu: torch.Tensor, batch: int, length: int) -> torch.Tensor:
        at = torch.arange(batch * length, device=cu.device, dtype=cu.dtype)
        return torch.searchsorted(cu, at, right=True).view(batch, length)

    of_q = sequence_of(kwargs["cu_seq_lens_q"], query.shape[0], query.shape[2])
    of_k = sequence_of(kwargs["cu_seq_lens_k"], key.shape[0], key.shape[2])
    return (of_q[:, :, None] == of_k[:, None, :])[:, None]


def _longest(kwargs: dict[str, Any], axis: str) -> Any:
    found = kwargs.get(f"max_length_{axis}")
    return kwargs.get(f"max_seqlen_{axis}") if found is None else found


def _as_int(n: Any) -> Any:
    return int(n) if isinstance(n, torch.Tensor) and n.is_cpu else n


def _of_layer(x: Any, sliding_window: int | None) -> Any:
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
