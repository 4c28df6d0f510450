"""`strobe.sdpa`: attention with the signature and the habits of torch.nn.functional.scaled_dot_product_attention."""

from __future__ import annotations

import math
from typing import Any

import torch

from strobe.api import attention, attention_varlen
from strobe.call.attend import is_sharded
from strobe.problem.hints import raises_as_hosts
from strobe.variants import mask as masks
from strobe.variants.mask import Mask

_Mask = Mask | torch.Tensor | None


@raises_as_hosts
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
    strides, `torch.nn.attention.bias.causal_lower_right`, jagged nested tensors, tensors that are sharded by batch or
    heads. Its errors are RuntimeErrors, too."""
    mask: _Mask = attn_mask
    if is_causal:
        if attn_mask is not None:
            raise ValueError("attn_mask must be None when is_causal is True")
        mask = masks.causal_top_left
    elif attn_mask is not None and type(attn_mask) is not torch.Tensor:
        mask = _without_causal_bias(attn_mask, query, key)
    if isinstance(scale, torch.Tensor):
        scale = float(scale)
    return _attend(query, key, value, mask, dropout_p, scale, enable_gqa)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: _Mask,
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    for t in (query, key, value, mask):
        if isinstance(t, torch.Tensor) and type(t) is not torch.Tensor and (special := _special(t)) is not None:
            return special(query, key, value, mask, dropout_p, scale, enable_gqa)
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        raise ValueError(
            f"query, key and value must have at least 2 axes; got {query.dim()}, {key.dim()}, {value.dim()}"
        )
    q, k, v = query, key, value
    if not query.dim() == key.dim() == value.dim():
        most = max(query.dim(), key.dim(), value.dim())
        q, k, v = (t[(None,) * (most - t.dim())] for t in (q, k, v))
    axes, lead = q.dim(), q.shape[:-3]
    if axes > 2 and not enable_gqa and not q.shape[-3] == k.shape[-3] == v.shape[-3]:
        q, k, v = _same_heads(q, k, v)
    if axes > 4 or not k.shape[:-3] == v.shape[:-3] == lead:
        lead = torch.broadcast_shapes(lead, k.shape[:-3], v.shape[:-3])
        q, k, v = (t.expand(*lead, *t.shape[-3:]).reshape(-1, *t.shape[-3:]) for t in (q, k, v))
    if q.shape[-1] == k.shape[-1] == 0:  # every score is 0
        q, k = (torch.nn.functional.pad(t, (0, 1)) for t in (q, k))
    q, k, v = (t if t.stride(-1) == 1 or t.shape[-1] < 2 else t.contiguous() for t in (q, k, v))
    interval, bias = _mask_and_bias(mask, lead)
    options: dict[str, Any] = {"mask": interval, "bias": bias, "scale": scale, "layout": "bhsd"}
    if dropout_p == 1.0:  # nothing is left, whatever the scores are
        out = attention(q, k, v, **options)
        out = out.masked_fill(torch.ones((), dtype=torch.bool, device=out.device), 0)
    else:
        out = attention(q, k, v, dropout=dropout_p, **options)
    return out if axes <= 4 else out.reshape(*lead, *out.shape[-3:])


def _without_causal_bias(attn_mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Mask | torch.Tensor:
    """PyTorch's `CausalBias` is a tensor without contents that says where the diagonal is."""
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(attn_mask, CausalBias):
        return attn_mask
    if getattr(query, "is_nested", False):
        raise ValueError("attn_mask cannot be given with nested tensors; pass is_causal=True")
    lengths = attn_mask.seq_len_q, attn_mask.seq_len_kv
    if lengths != (query.shape[-2], key.shape[-2]):
        got = f"{query.shape[-2]} queries and {key.shape[-2]} keys"
        raise ValueError(f"attn_mask is a causal bias of {lengths[0]} queries and {lengths[1]} keys; there are {got}")
    return masks.causal_top_left if attn_mask.variant == CausalVariant.UPPER_LEFT else masks.causal


_HEADS = "query has {} heads, key has {}, value has {}; pass enable_gqa=True to group them"


def _same_heads(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A single head is one for all; key heads are shared without a copy, so only the others need be expanded."""
    heads = [t.shape[-3] for t in tensors]
    most = max(heads)
    if any(n not in (1, most) for n in heads):
        raise ValueError(_HEADS.format(*heads))
    if heads[1] == heads[2] == 1:
        return tensors
    return tuple(t.expand(*t.shape[:-3], most, *t.shape[-2:]) for t in tensors)


def _mask_and_bias(mask: _Mask, lead: torch.Size) -> tuple[_Mask, torch.Tensor | None]:
    if not isinstance(mask, torch.Tensor):
        return mask, None
    if mask.dim() > 4:
        mask = mask.expand(*lead, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
    return (mask, None) if mask.dtype == torch.bool else (None, mask)


def _special(t: torch.Tensor) -> Any:
    """Return the function that attends to tensors which are more than one piece of memory; None for others."""
    if getattr(t, "is_nested", False):
        return _nested
    return _sharded if is_sharded(t) else None


def _nested(query: Any, key: Any, value: Any, mask: _Mask, dropout_p: float, scale: Any, enable_gqa: bool) -> Any:
    """(batch, heads, ragged length, dim), as a transposed jagged tensor is."""
    if isinstance(mask, torch.Tensor):
        raise ValueError("attn_mask cannot be given with nested tensors")
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not getattr(t, "is_nested", False) or t.layout != torch.jagged or t.dim() != 4 or t._ragged_idx != 2:
            raise ValueError(f"{name} must be a jagged nested tensor (batch, heads, length, dim), as the others are")
        if t.lengths() is not None:
            raise ValueError(f"{name} has gaps between its sequences, as torch.nested.narrow leaves them; make a copy")
    heads = query.size(1), key.size(1), value.size(1)
    if not enable_gqa and not heads[0] == heads[1] == heads[2]:
        raise ValueError(_HEADS.format(*heads))
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))  # (batch, ragged length, heads, dim)
    # Keys and values need the same offsets, or equal ones, whose contents are compared.
    if k.offsets() is not v.offsets() and not torch.equal(k.offsets(), v.offsets()):
        raise ValueError("key and value must have sequences of the same lengths")
    cu_q, cu_k = (t.offsets().to(torch.int32) for t in (q, k))
    out = attention_varlen(q.values(), k.values(), v.values(), cu_q, cu_k, mask=mask, dropout=dropout_p, scale=scale)
    return torch.nested.nested_tensor_from_jagged(out, offsets=q.offsets()).transpose(1, 2)


def _sharded(query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, scale: Any, enable_gqa: bool) -> Any:
    """Attention of DTensors, which are sharded over the ranks of a mesh. Batches and heads do not see each other, so each
    rank attends to its own; whatever else is sharded is gathered first."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    tensors = [t for t in (query, key, value, attn_mask) if is_sharded(t)]
    source = next((t for t in (query, key, value) if is_sharded(t)), tensors[0])
    mesh = source.device_mesh
    if any(t.device_mesh != mesh for t in tensors):
        raise ValueError(f"query, key, value and attn_mask lie on different meshes: {[t.device_mesh for t in tensors]}")
    axes = query.dim()
    if axes < 2 or key.dim() != axes or value.dim() != axes:
        counts = f"{axes}, {key.dim()}, {value.dim()}"
        raise ValueError(f"query, key and value must have the same number of axes, at least 2; got {counts}")
    sizes = torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value)))
    if axes > 2:  # heads: fewer ones are grouped, or one is for all
        sizes = (*sizes, max(t.shape[-3] for t in (query, key, value)))
    shape = (*sizes, query.shape[-2], value.shape[-1])
    parts = [
        math.prod(mesh.size(i) for i, p in enumerate(source.placements) if p.is_shard(axis)) for axis in range(axes - 2)
    ]  # into how many parts each axis is cut

    def stays(axis: int) -> bool:
        """Return whether parts along an axis fit: they do where all have the same size, or one for all, or equal
        groups."""
        lengths = {t.shape[axis] for t in (query, key, value)} - {1}
        return len(lengths) == 1 or all(n % parts[axis] == 0 for n in lengths)

    def is_kept(p: Any) -> bool:
        # `type`: a kind of Shard that torch has for itself cuts in another order.
        return (
            type(p) is Shard
            and source is not attn_mask
            and p.dim < axes - 2
            and source.shape[p.dim] > 1
            and stays(p.dim)
        )

    placements = [p if is_kept(p) else Replicate() for p in source.placements]
    if 0 < dropout_p < 1 and any(p == Replicate() and mesh.size(i) > 1 for i, p in enumerate(placements)):
        has = f"dropout_p is {dropout_p} and ranks compute the same ({tuple(placements)})"
        raise ValueError(f"{has}, but would not drop the same weights; shard by batch or heads, or call to_local()")

    def local(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):  # no mask, or an interval
            return t
        if not is_sharded(t):
            t = DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
        missing = axes - t.dim()  # a mask may have fewer axes, or 1 where it is the same for all
        wanted = [
            Shard(p.dim - missing)
            if type(p) is Shard and p.dim >= missing and t.shape[p.dim - missing] > 1
            else Replicate()
            for p in placements
        ]
        # What is whole here and used by parts elsewhere gets a part of its gradient from each rank.
        gradients = [Partial() if w == Replicate() and p != w else w for w, p in zip(wanted, placements, strict=True)]
        return t.redistribute(mesh, wanted).to_local(grad_placements=gradients)

    q, k, v, mask = map(local, (query, key, value, attn_mask))
    out = _attend(q, k, v, mask, dropout_p, scale, enable_gqa).contiguous()
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(out, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)
