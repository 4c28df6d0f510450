"""The public functions of `strobe.distributed`."""

from __future__ import annotations

from typing import Any

import torch

from strobe.call.autograd import cast_for_autocast
from strobe.distributed import operation
from strobe.distributed.agreement import agree, short_text
from strobe.distributed.shard_plan import ShardPlan, axis_of, join
from strobe.distributed.transport import Transport, names_of, only, sizes_of
from strobe.problem import any_requires_grad
from strobe.problem.arguments import Arguments
from strobe.problem.resolve import with_softcap
from strobe.variants.mask import Mask
from strobe.variants.score import DerivedScore, Score, identity


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: Any,
    plan: ShardPlan | None = None,
    method: str = "auto",
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    score: Score | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    sinks: torch.Tensor | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    deterministic: bool = False,
    invariant: bool = False,
    backend: str | None = None,
    check: bool | None = None,
) -> Any:
    """`strobe.attention` of a sequence whose positions are shared out among ranks: each passes its shards of q, k and v
    and gets its shard of the result. Differentiable.

    Shards are (batch, rows, heads, dim), or (rows, heads, dim). A plan of several documents is `strobe.attention_varlen`:
    (rows, heads, dim), or with a batch of 1.

    mesh           a `DeviceMesh` of one dimension or, for `hybrid`, two (rows travel along the first, heads are traded
                   along the second); or a process group, or a pair of those
    plan           which rank holds which positions; by default equal parts, in the order of the ranks
    method         "ring", "allgather", "ulysses", "halo", "hybrid", or "auto": the one that costs least on paper
    mask           that of the plan by default; `strobe.full` hides nothing
    seed           must be given with dropout. The weights that are dropped do not depend on how the sequence is cut
    sinks          (heads,), the same on every rank. Their gradient is this rank's contribution, to be summed over ranks
                   as that of any weight
    deterministic  only bit-for-bit reproducible algorithms: sums over ranks have a fixed order
    invariant      out, LSE and dq have the same bits for any number of ranks; needs a plan with a block, and time
    check          whether ranks make sure that they mean the same call. By default at each call on a CPU, at each new
                   kind of call on a GPU; True: at each call; False: never

    The other arguments are those of `strobe.attention`. All ranks of the mesh must call, in the same order."""
    names, sizes = names_of(mesh), sizes_of(mesh)
    ranks = sizes[0] if len(sizes) == 1 else sizes[0] * sizes[1]
    try:
        call, batched, documents = _call(
            q, k, v, names, ranks, plan, method, mask, scale, softcap, score, dropout, seed, sinks, layout,
            deterministic, invariant, backend, check,
        )  # fmt: skip
    except Exception as error:
        if ranks > 1 and isinstance(q, torch.Tensor) and not operation.is_compiling():
            operation.tell(names, error, q.device, check)
        raise
    if ranks == 1 and not invariant:
        out, lse = operation.alone(call)
    else:
        out, lse = operation.attention(call)
    if documents and batched:
        out, lse = out[None], lse[None]
    elif not documents and not batched:
        out, lse = out[0], lse[0]
    if layout == "bhsd":
        out = out.transpose(-3, -2)
    return (out, lse) if return_lse else out


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    names: list[str],
    ranks: int,
    plan: ShardPlan | None,
    method: str,
    mask: Mask | None,
    scale: float | None,
    softcap: float | None,
    score: Score | None,
    dropout: float,
    seed: int | None,
    sinks: torch.Tensor | None,
    layout: str,
    deterministic: bool,
    invariant: bool,
    backend: str | None,
    check: bool | None,
) -> tuple[operation.Call, bool, bool]:
    """The arguments of `attention` as those of the operation; whether the tensors had a batch, and whether there are
    several documents."""
    if check not in operation.CHECKS:
        raise ValueError(f"check must be None, True or False, got {check!r}")
    if dropout and seed is None:
        raise ValueError(f"dropout is {dropout}; it needs a seed, the same on every rank")
    score = with_softcap(score, softcap)
    if score is not None and not isinstance(score, Score):
        raise TypeError(f"score must be a strobe.Score (strobe.score_function(f), …) or None, got {score!r}")
    if isinstance(score, DerivedScore):
        score = score.current()
    if score is not None and torch.is_grad_enabled() and any(t.requires_grad for t in score.tensors):
        raise ValueError(f"a tensor of {score!r} requires grad, which shards do not compute; capture its .detach()")
    if mask is not None and (not isinstance(mask, Mask) or mask.rest is not None):
        raise TypeError(f"mask must be a strobe mask (strobe.causal, strobe.window(…), …) or None, got {mask!r}")
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout must be one of 'bshd', 'bhsd', got {layout!r}")
    if layout == "bhsd":
        q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    if not 3 <= q.dim() <= 4:
        raise ValueError(f"q has {q.dim()} axes; allowed are 3 (rows, heads, dim) and 4 (batch, rows, heads, dim)")
    documents = plan is not None and len(plan.lengths) > 1
    a = Arguments(q, k, v, sinks=sinks)
    a = cast_for_autocast(a)
    q, k, v = a.q, a.k, a.v
    batched = q.dim() == 4
    if documents and batched:
        if q.shape[0] != 1:
            raise ValueError(
                f"q has batch size {q.shape[0]}; with a plan of several documents it must be 1, or missing"
            )
        q, k, v = q[0], k[0], v[0]
    elif not documents and not batched:
        q, k, v = q[None], k[None], v[None]
    score = identity if score is None else score
    call = operation.Call(
        q, k, v, sinks, score.tensors, names,
        _contiguous_plan(int(q.shape[-3]) * ranks, ranks) if plan is None else plan.text,
        "" if mask is None else mask.text(), score.text(), scale, float(dropout), seed or 0, method, deterministic,
        invariant, backend, operation.CHECKS[check], torch.is_grad_enabled() and any_requires_grad(a),
    )  # fmt: skip
    return call, batched, documents


def _contiguous_plan(length: int, ranks: int) -> str:
    """The text of the plan that supposes equal parts."""
    return f"{length}|contiguous|{ranks}|1||;;full"


def unshard(plan: ShardPlan, *tensors: torch.Tensor, mesh: Any, dim: int = 1) -> tuple[torch.Tensor, ...]:
    """The whole of each tensor, on every rank, from the shards of all of them: the inverse of `shard`. Not
    differentiable."""
    if not tensors:
        return ()
    transport = only(mesh)
    axes: list[int] = []
    error: Exception | None = None
    try:
        axes = [_axis_of_shard(plan, t, transport, dim) for t in tensors]
    except Exception as found:
        error = found
    shapes = [(*t.shape[:axis], "rows", *t.shape[axis + 1 :], t.dtype) for t, axis in zip(tensors, axes, strict=False)]
    facts = {"function": "strobe.distributed.unshard", "plan": short_text(plan.text), "dim": dim, "tensors": shapes}
    agree([transport], facts, error, tensors[0].device, None)
    wholes = []
    for t, axis in zip(tensors, axes, strict=True):
        room = t.new_zeros((*t.shape[:axis], plan.largest, *t.shape[axis + 1 :]))
        room.narrow(axis, 0, t.shape[axis]).copy_(t.detach())
        into = room.new_empty((transport.size, *room.shape))
        transport.all_gather(into, room).wait()
        wholes.append(join(plan, [into[r].narrow(axis, 0, plan.rows(r)) for r in range(plan.ranks)], axis))
    return tuple(wholes)


def _axis_of_shard(plan: ShardPlan, t: torch.Tensor, transport: Transport, dim: int) -> int:
    axis = axis_of(t, dim)
    if plan.ranks != transport.size or t.shape[axis] != plan.rows(transport.rank):
        have = f"a tensor has shape {tuple(t.shape)}, mesh {transport.size} ranks"
        rows = plan.rows(transport.rank) if transport.rank < plan.ranks else 0
        raise ValueError(f"{have}; the plan has {plan.ranks} ranks and {rows} positions for axis {axis} here")
    return axis
