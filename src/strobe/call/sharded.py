"""`strobe.sdpa` of DTensors, which are sharded over the ranks of a mesh. Batches and heads do not see each other: each
rank attends to its own. Whatever else is sharded is gathered first."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from strobe.problem.arguments import Arguments


def is_sharded(t: Any) -> bool:
    """Whether it is a DTensor. There is none unless the caller has imported their module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def refuse(a: Arguments) -> None:
    """Kernels read memory, and a DTensor has none of its own."""
    for name, t in (("q", a.q), ("k", a.k), ("v", a.v)):
        if is_sharded(t):
            way_out = "call it on local tensors (to_local()), or strobe.sdpa, which takes DTensors"
            raise TypeError(f"{name} is a DTensor with placements {tuple(t.placements)}; {way_out}")


def sdpa(
    attend: Callable[..., torch.Tensor], query: Any, key: Any, value: Any, attn_mask: Any, dropout: float, *options: Any
) -> Any:
    """`attend`: the same of local tensors. `attn_mask` may also be a `strobe.Mask`."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    given = [t for t in (query, key, value, attn_mask) if is_sharded(t)]
    source = next((t for t in (query, key, value) if is_sharded(t)), given[0])
    mesh = source.device_mesh
    if any(t.device_mesh != mesh for t in given):
        raise ValueError(f"query, key, value and attn_mask lie on different meshes: {[t.device_mesh for t in given]}")
    axes = query.dim()
    if axes < 2 or key.dim() != axes or value.dim() != axes:
        found = f"{axes}, {key.dim()}, {value.dim()}"
        raise ValueError(f"query, key and value must have the same number of axes, at least 2; got {found}")
    sizes = torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value)))
    if axes > 2:  # heads: fewer ones are grouped, or one is for all
        sizes = (*sizes, max(t.shape[-3] for t in (query, key, value)))
    shape = (*sizes, query.shape[-2], value.shape[-1])
    parts = [
        math.prod(mesh.size(i) for i, p in enumerate(source.placements) if p.is_shard(axis)) for axis in range(axes - 2)
    ]  # into how many parts each axis is cut

    def stays(axis: int) -> bool:
        """Whether parts along an axis fit: they do where all have the same size, or one for all, or equal groups."""
        found = {t.shape[axis] for t in (query, key, value)} - {1}
        return len(found) == 1 or all(n % parts[axis] == 0 for n in found)

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
    if 0 < dropout < 1 and any(p == Replicate() and mesh.size(i) > 1 for i, p in enumerate(placements)):
        has = f"dropout_p is {dropout} and ranks compute the same ({tuple(placements)})"
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

    out = attend(local(query), local(key), local(value), local(attn_mask), dropout, *options).contiguous()
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(out, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)
