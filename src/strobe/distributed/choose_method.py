"""Choose the method that runs a call, and make it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strobe.distributed import cost
from strobe.distributed.gather import Gather
from strobe.distributed.method import Method, Task
from strobe.distributed.ring import Deliver
from strobe.distributed.transport import Transport
from strobe.distributed.ulysses import Local, Ulysses

METHODS = ("auto", *cost.METHODS)
MIN_BLOCK = 16  # positions that an invariant call works on at once, at least
_MACHINE = cost.Machine()  # what `auto` supposes; ratios matter, not the numbers


def shape_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> cost.Shape:
    """Return the shape of a call with shards (…, rows, heads, dim)."""
    batch = q.shape[0] if q.dim() == 4 else 1
    sizes = (q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], q.dtype.itemsize, batch)
    return cost.Shape(*map(int, sizes))


def check_name(name: str) -> None:
    if name not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {name!r}")


def chosen(name: str, task: Task, transports: Sequence[Transport], shape: cost.Shape, gradients: bool) -> str:
    """The name of a method that can run this; `auto` becomes the one that costs least."""
    check_name(name)
    inner = transports[1].size if len(transports) == 2 else None
    if task.invariant:
        if task.plan.block < MIN_BLOCK:
            need = f"a plan that is cut at multiples of at least {MIN_BLOCK} positions"
            raise ValueError(f"invariant=True needs {need}: ShardPlan(…, block=128), got block={task.plan.block}")
        if name not in ("auto", "allgather") or inner is not None:
            raise ValueError(f"invariant=True needs method='allgather' and one dimension of mesh, got method={name!r}")
        return "allgather"
    if name == "auto":
        return cost.choose(task.plan, shape, _MACHINE, gradients=gradients, inner=inner)
    if (name == "hybrid") != (inner is not None):
        dimensions = f"mesh has {len(transports)} dimension{'s' if inner else ''}"
        raise ValueError(f"method='hybrid' needs two dimensions of mesh and the others one; {dimensions}, got {name!r}")
    if name not in cost.possible(task.plan, shape, inner):
        ranks = inner or task.plan.ranks
        raise ValueError(f"method={name!r} needs a query head for each of the {ranks} ranks, q has {shape.heads} heads")
    return name


def make(name: str, task: Task, transports: Sequence[Transport]) -> Method:
    if name == "ulysses":
        return Ulysses(task, transports[0], Local)
    if name == "hybrid":
        outer, inner = transports
        return Ulysses(task, inner, lambda whole: Deliver(whole, outer, "ring"))
    return Gather(task, transports[0]) if name == "allgather" else Deliver(task, transports[0], name)


def rank_of(transports: Sequence[Transport]) -> int:
    """Return the rank in the plan: neighbours along the last dimension of a mesh hold neighbouring shards."""
    rank = 0
    for transport in transports:
        rank = rank * transport.size + transport.rank
    return rank
