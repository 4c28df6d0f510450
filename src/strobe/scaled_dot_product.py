"""`strobe.sdpa`: attention with the signature and the habits of torch.nn.functional.scaled_dot_product_attention."""

from __future__ import annotations

import functools
from typing import Any

import torch

from strobe import mask as masks, sharded
from strobe.api import attention, attention_varlen
from strobe.mask import Mask


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """A drop-in for torch.nn.functional.scaled_dot_product_attention: its signature, its (batch, heads, length, dim)
    layout, its causal mask aligned to the top left. It takes what that takes: broadcast leading axes and heads, any
    strides, jagged nested tensors, tensors that are sharded by batch or heads."""
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask must be None when is_causal is True")
    if isinstance(scale, torch.Tensor):
        scale = float(scale)
    for t in (query, key, value, attn_mask):
        if t is not None and type(t) is not torch.Tensor and (special := _special(t)) is not None:
            return special(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if query.dim() < 2 or key.dim() != query.dim() or value.dim() != query.dim():
        axes = f"{query.dim()}, {key.dim()}, {value.dim()}"
        raise ValueError(f"query, key and value must have the same number of axes, at least 2; got {axes}")
    q, k, v, lead = query, key, value, query.shape[:-3]
    if query.dim() > 2 and not enable_gqa and not q.shape[-3] == k.shape[-3] == v.shape[-3]:
        q, k, v = _same_heads(q, k, v)
    if query.dim() > 4 or not key.shape[:-3] == value.shape[:-3] == lead:
        lead = torch.broadcast_shapes(lead, key.shape[:-3], value.shape[:-3])
        q, k, v = (t.expand(*lead, *t.shape[-3:]).reshape(-1, *t.shape[-3:]) for t in (q, k, v))
    q, k, v = (t if t.stride(-1) == 1 or t.shape[-1] < 2 else t.contiguous() for t in (q, k, v))
    mask, bias = _mask_and_bias(attn_mask, is_causal, lead)
    options: dict[str, Any] = {"mask": mask, "bias": bias, "scale": scale, "layout": "bhsd"}
    if dropout_p == 1.0:  # nothing is left, whatever the scores are
        out = attention(q, k, v, **options)
        out = out.masked_fill(torch.ones((), dtype=torch.bool, device=out.device), 0)
    else:
        out = attention(q, k, v, dropout=dropout_p, **options)
    return out if query.dim() <= 4 else out.reshape(*lead, *out.shape[-3:])


def _same_heads(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A single head is one for all; key heads are shared without a copy, so only the others need be expanded."""
    heads = [t.shape[-3] for t in tensors]
    most = max(heads)
    if any(n not in (1, most) for n in heads):
        names = "query has {} heads, key has {}, value has {}".format(*heads)
        raise ValueError(f"{names}; pass enable_gqa=True to group them")
    if heads[1] == heads[2] == 1:
        return tensors
    return tuple(t.expand(*t.shape[:-3], most, *t.shape[-2:]) for t in tensors)


def _mask_and_bias(
    attn_mask: torch.Tensor | None, is_causal: bool, lead: torch.Size
) -> tuple[Mask | torch.Tensor | None, torch.Tensor | None]:
    if attn_mask is None:
        return (masks.causal_top_left if is_causal else None), None
    if attn_mask.dim() > 4:
        attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-3:]).reshape(-1, *attn_mask.shape[-3:])
    return (attn_mask, None) if attn_mask.dtype == torch.bool else (None, attn_mask)


def _special(t: torch.Tensor) -> Any:
    """How to attend to tensors that are more than one piece of memory."""
    if getattr(t, "is_nested", False):
        return _nested
    return functools.partial(sharded.sdpa, sdpa) if sharded.is_sharded(t) else None


def _nested(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, is_causal: bool, scale: Any, enable_gqa: bool
) -> Any:
    """(batch, heads, ragged length, dim), as a transposed jagged tensor is."""
    if attn_mask is not None:
        raise ValueError("attn_mask cannot be given with nested tensors")
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not getattr(t, "is_nested", False) or t.layout != torch.jagged or t.dim() != 4:
            raise ValueError(f"{name} must be a jagged nested tensor (batch, heads, length, dim), as the others are")
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))  # (batch, ragged length, heads, dim)
    cu_q, cu_k = (t.offsets().to(torch.int32) for t in (q, k))
    out = attention_varlen(
        q.values(),
        k.values(),
        v.values(),
        cu_q,
        cu_k,
        mask=masks.causal_top_left if is_causal else None,
        dropout=dropout_p,
        scale=scale,
    )
    return torch.nested.nested_tensor_from_jagged(out, offsets=q.offsets()).transpose(1, 2)
