"""The attention function of the implementation "strobe", called by every layer of a model."""

from __future__ import annotations

from typing import Any

import torch

from strobe.api import attend
from strobe.arguments import Arguments
from strobe.compat.transformers import paged
from strobe.compat.transformers.layer_mask import LayerMask
from strobe.mask import Mask, causal, causal_top_left, full, window
from strobe.problem import Unsupported

_Maybe = torch.Tensor | None


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # (batch, heads, len_q, dim)
    key: torch.Tensor,  # (batch, heads_k, len_k, dim)
    value: torch.Tensor,
    attention_mask: LayerMask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: _Maybe = None,
    position_bias: _Maybe = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """((batch, len_q, heads, dim), None). `sliding_window` counts the keys that a query sees, itself included; `s_aux`
    (heads,) are sinks; `position_bias`, broadcastable to (batch, heads, len_q, len_k), is added to the scores."""
    if kwargs.get("output_attentions"):
        raise Unsupported(
            'output_attentions=True: strobe never holds the attention weights; load the model with attn_implementation="eager"'
        )
    if kwargs.get("indices") is not None:
        raise Unsupported("indices: attention to chosen keys is not built; use another attn_implementation")
    deterministic = kwargs.get("deterministic") or False
    if cache is not None and not paged.is_paged(cache):
        cache = None
    if cache is not None or kwargs.get("cu_seq_lens_q") is not None:
        q, k, v, cu_q, cu_k, max_q, max_k = paged.packed(
            module, query, key, value, sliding_window, cache, kwargs
        )  # (total, heads, dim) each
        if position_bias is not None or (cache is None and _limits_keys(attention_mask)):
            raise Unsupported("padding and position_bias cannot be combined with packed sequences (cu_seq_lens_q)")
        if isinstance(attention_mask, LayerMask) and cache is None:
            mask = attention_mask.mask
        else:
            mask = _mask_of(module, is_causal or cache is not None or None, sliding_window)
        out = attend(
            Arguments(
                q, k, v, cu_q, cu_k, max_q, max_k, mask, scaling, softcap, None, None, dropout, None, s_aux, "bshd",
                None, False, deterministic,
            )
        )  # fmt: skip
        return out.unflatten(0, (query.shape[0], -1)), None

    bias, positions, documents = position_bias, None, None
    chosen: Any = None  # a mask of ours, or booleans
    if attention_mask is None:
        if query.shape[2] > 1:
            chosen = _mask_of(module, is_causal, sliding_window, query.shape[2] != key.shape[2])
    elif isinstance(attention_mask, LayerMask):
        chosen, positions = attention_mask.mask, attention_mask.positions
        if attention_mask.keys is not None:
            key, value = key[:, :, : attention_mask.keys], value[:, :, : attention_mask.keys]
            bias = None if bias is None else bias[..., : attention_mask.keys]
        if attention_mask.bias is not None:
            bias = attention_mask.bias if bias is None else bias + attention_mask.bias
        documents = attention_mask.documents()
    else:
        chosen, bias = _given(attention_mask, bias, key.shape[2])
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if documents is None:
        out = attend(
            Arguments(
                q, k, v, None, None, None, None, chosen, scaling, softcap, None, bias, dropout, None, s_aux, "bshd", None,
                False, deterministic, None, positions,
            )
        )  # fmt: skip
        return out, None
    if bias is not None:
        raise Unsupported("position_bias cannot be combined with packed sequences (position_ids that start again)")
    cu, longest = documents
    out = attend(
        Arguments(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu, cu, longest, longest, chosen, scaling, softcap, None,
            None, dropout, None, s_aux, "bshd", None, False, deterministic,
        )
    )  # fmt: skip
    return out.unflatten(0, q.shape[:2]), None


def _limits_keys(attention_mask: LayerMask | torch.Tensor | None) -> bool:
    """Whether it says more than which keys a query sees by position."""
    return isinstance(attention_mask, LayerMask) and (
        attention_mask.padding is not None or attention_mask.positions is not None
    )


def _mask_of(module: Any, is_causal: bool | None, sliding_window: int | None, top_left: bool = False) -> Mask:
    """What a layer without a mask sees. A causal one with more keys than queries is aligned with the first key, as in
    PyTorch: the keys behind are room for tokens to come."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    mask = (causal_top_left if top_left else causal) if is_causal else full
    if sliding_window is None:
        return mask
    if top_left:
        raise Unsupported("sliding_window without an attention mask needs as many keys as queries")
    return mask & window(sliding_window - 1, None if is_causal else sliding_window - 1)


def _given(mask: torch.Tensor, bias: _Maybe, len_k: int) -> tuple[_Maybe, _Maybe]:
    """(mask, bias) of a tensor: booleans or numbers to add, broadcastable to (batch, heads, len_q, len_k)."""
    if mask.dim() != 4:
        raise Unsupported(
            f"attention_mask has shape {tuple(mask.shape)}; allowed are 4 axes (batch, heads, len_q, len_k)"
        )
    if mask.shape[-1] > len_k:
        mask = mask[..., :len_k]
    if bias is not None and bias.shape[-1] > len_k:
        bias = bias[..., :len_k]
    if mask.dtype == torch.bool:
        return mask, bias
    return None, mask if bias is None else bias + mask
