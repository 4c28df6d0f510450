"""Decoding against a cache that is shared out among ranks: every rank has the new queries and attends to its own keys.

What travels is the partial output and its LSE, whose size does not depend on how long the cache is.
"""

from __future__ import annotations

from typing import Any

import torch

from strobe.distributed.agreement import agree, short_text
from strobe.distributed.pieces import Axis, Piece, pieces
from strobe.distributed.shard_plan import ShardPlan
from strobe.distributed.step import Keys, State, Step
from strobe.distributed.transport import Transport, only
from strobe.merging import add_sinks_, merge_
from strobe.problem import Problem
from strobe.problem.arguments import Arguments
from strobe.problem.checks import lse_dtype
from strobe.problem.resolve import with_softcap
from strobe.variants.mask import Mask, full
from strobe.variants.score import DerivedScore, Score


@torch.no_grad()
def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: Any,
    plan: ShardPlan | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    score: Score | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    check: bool | None = None,
) -> Any:
    """`strobe.attention(q, all keys, all values)` on every rank, from the keys and values that each holds.

    q is (batch, new tokens, heads, dim), the same on every rank; k and v are (batch, rows, heads_k, dim), this rank's
    part of the cache, which may be empty. A leading batch axis may be missing. Not differentiable.

    plan   which positions of the cache each rank holds: `strategy="striped"` leaves them where they are as the cache
           grows. Queries stand opposite the last positions, as in `strobe.attention`. Without a plan every query sees
           every key, wherever that is
    mask   that of the plan by default
    check  whether ranks make sure that they mean the same call, as in `strobe.distributed.attention`

    The other arguments are those of `strobe.attention`."""
    transport = only(mesh)
    template = Arguments(None, None, None, scale=scale, sinks=sinks, backend=backend)
    batched = q.dim() == 4
    step: Step | None = None
    error: Exception | None = None
    facts: dict[str, Any] = {"function": "strobe.distributed.decode"}
    score = score.current() if isinstance(score, DerivedScore) else score
    try:
        if not batched:
            q, k, v = q[None], k[None], v[None]
        template = template._replace(score=with_softcap(score, softcap))
        Problem.of(template._replace(q=q, k=k, v=v), needs_grad=False)
        step = _step(q.shape[1], k.shape[1], plan, transport, mask, score)
        facts |= _facts(template, q, k, v, plan, mask)
    except Exception as found:
        error = found
    agree([transport], facts, error, q.device, check)
    assert step is not None
    state = State(q, v.shape[-1])
    step.forward(template._replace(sinks=None), q, Keys(k, v), state)
    out, lse = _merged(*state.results(), transport)
    if sinks is not None:
        add_sinks_(out, lse, sinks)
    out = out.to(q.dtype)
    if not batched:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def _facts(
    a: Arguments, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: ShardPlan | None, mask: Mask | None
) -> dict[str, Any]:
    """Return the facts on which all ranks must agree. Where ranks ask only about new kinds of calls, a cache that grows
    is none."""
    shapes = {name: (t.shape[0], "rows", *t.shape[2:]) for name, t in (("k", k), ("v", v))}
    cut = None if plan is None else plan.text if q.device.type == "cpu" else (plan.strategy, plan.ranks, plan.block)
    options = {"scale": a.scale, "score": None if a.score is None else a.score.text()}
    options |= {"sinks": None if a.sinks is None else tuple(a.sinks.shape), "backend": a.backend}
    mask = mask if mask is not None or plan is None else plan.mask
    return {"q": tuple(q.shape), **shapes, "dtype": q.dtype, "plan": short_text(str(cut)), "mask": mask, **options}


def _step(
    queries: int, rows: int, plan: ShardPlan | None, transport: Transport, mask: Mask | None, score: Score | None
) -> Step:
    rank = transport.rank
    positional = score is not None and not score.pointwise
    if plan is None:
        if (mask is not None and mask != full) or positional:
            raise ValueError(f"mask={mask!r} and score={score!r} look at positions: a plan must say which those are")
        everything = Piece((0, queries), (0, rows), 0, None)
        return Step((everything,) if rows and queries else (), full, 0)
    if len(plan.lengths) != 1:
        raise ValueError(f"plan has {len(plan.lengths)} documents; a cache has one sequence, or a batch of equal ones")
    if plan.ranks != transport.size:
        raise ValueError(f"plan is for {plan.ranks} ranks, mesh has {transport.size}")
    if rows != plan.rows(rank):
        raise ValueError(f"k has {rows} rows, but rank {rank} holds {plan.rows(rank)} positions of the plan")
    plan = plan.with_mask(mask)
    key = ("decode", rank, queries, positional)
    if key not in plan.prepared:
        axis = Axis(plan.lengths, plan.starts)
        new, new_axis = ((0, queries),) if queries else (), Axis((queries,), (0, queries))
        calls = pieces(new, plan.shards[rank], new_axis, axis, plan.mask, positional=positional)
        plan.prepared[key] = Step(calls, plan.mask, 0)
    return plan.prepared[key]


@torch.no_grad()
def merge(out: torch.Tensor, lse: torch.Tensor, *, mesh: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) over the keys of all ranks, from those of each over its own: out (…, rows, heads, dim) and LSE (…, heads,
    rows). Both come back in fp32, or fp64. Ranks merge in the same order, so each has the same bits."""
    transport = only(mesh)
    error: Exception | None = None
    if tuple(lse.shape) != (*out.shape[:-3], out.shape[-2], out.shape[-3]):
        wanted = "(…, heads, rows) for out (…, rows, heads, dim)"
        error = ValueError(f"lse must be {wanted}, got {tuple(lse.shape)} for {tuple(out.shape)}")
    facts = {"function": "strobe.distributed.merge", "out": tuple(out.shape), "dtypes": (out.dtype, lse.dtype)}
    agree([transport], facts, error, out.device, None)
    return _merged(out.to(lse_dtype(out.dtype)), lse, transport)


def _merged(out: torch.Tensor, lse: torch.Tensor, transport: Transport) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` in the dtype of the LSE."""
    if transport.size == 1:
        return out, lse
    mine = torch.cat([out, lse.mT.unsqueeze(-1).to(out.dtype)], -1).contiguous()
    parts = mine.new_empty((transport.size, *mine.shape))
    transport.all_gather(parts, mine).wait()
    total, total_lse = parts[0, ..., :-1].clone(), parts[0, ..., -1].mT.clone()
    for part in parts[1:]:
        merge_(total, total_lse, part[..., :-1], part[..., -1].mT)
    return total, total_lse
