"""Decoding against a cache that is shared out among ranks: every rank has the new queries and attends to its own keys.

What travels is the partial output and its LSE, whose size does not depend on how long the cache is.
"""

from __future__ import annotations

from typing import Any

import torch

from strobe.arguments import Arguments
from strobe.distributed.merging import add_sinks_, merge_
from strobe.distributed.pieces import Axis, Piece, pieces
from strobe.distributed.shard_plan import ShardPlan
from strobe.distributed.step import Keys, State, Step
from strobe.distributed.transport import names_of, resolve
from strobe.mask import Mask, full
from strobe.score import Score


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
) -> Any:
    """`strobe.attention(q, all keys, all values)` on every rank, from the keys and values that each holds.

    q is (batch, new tokens, heads, dim), the same on every rank; k and v are (batch, rows, heads_k, dim), this rank's
    part of the cache, which may be empty. A leading batch axis may be missing. Not differentiable.

    plan  which positions of the cache each rank holds: `strategy="striped"` leaves them where they are as the cache
          grows. Queries stand opposite the last positions, as in `strobe.attention`. Without a plan every query sees
          every key, wherever that is
    mask  that of the plan by default

    The other arguments are those of `strobe.attention`."""
    (transport,) = (resolve(name) for name in names_of(mesh))
    batched = q.dim() == 4
    if not batched:
        q, k, v = q[None], k[None], v[None]
    template = Arguments(None, None, None, scale=scale, softcap=softcap, score=score, backend=backend)
    step = _step(q.shape[1], k.shape[1], plan, transport.rank, mask, score)
    state = State(q, v.shape[-1])
    step.forward(template, q, Keys(k, v), state)
    out, lse = merge(*state.results(), mesh=mesh)
    if sinks is not None:
        add_sinks_(out, lse, sinks)
    out = out.to(q.dtype)
    if not batched:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def _step(queries: int, rows: int, plan: ShardPlan | None, rank: int, mask: Mask | None, score: Score | None) -> Step:
    positional = score is not None and not score.pointwise
    if plan is None:
        if (mask is not None and mask != full) or positional:
            raise ValueError(f"mask={mask!r} and score={score!r} look at positions: a plan must say which those are")
        everything = Piece((0, queries), (0, rows), 0, None)
        return Step((everything,) if rows and queries else (), full, 0)
    if len(plan.lengths) != 1:
        raise ValueError(f"plan has {len(plan.lengths)} documents; a cache has one sequence, or a batch of equal ones")
    if rows != plan.rows(rank):
        raise ValueError(f"k has {rows} rows, but rank {rank} holds {plan.rows(rank)} positions of the plan")
    plan = plan.with_mask(mask)
    key = ("decode", rank, queries, positional)
    if key not in plan.prepared:
        axis = Axis(plan.lengths, plan.starts)
        new, new_axis = ((0, queries),) if queries else (), Axis((queries,), (0, queries))
        found = pieces(new, plan.shards[rank], new_axis, axis, plan.mask, positional=positional)
        plan.prepared[key] = Step(found, plan.mask, 0)
    return plan.prepared[key]


@torch.no_grad()
def merge(out: torch.Tensor, lse: torch.Tensor, *, mesh: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) over the keys of all ranks, from those of each over its own: out (…, rows, heads, dim) and LSE (…, heads,
    rows), both in fp32. Ranks merge in the same order, so each has the same bits."""
    (transport,) = (resolve(name) for name in names_of(mesh))
    if transport.size == 1:
        return out, lse
    mine = torch.cat([out, lse.mT.unsqueeze(-1).to(out.dtype)], -1).contiguous()
    parts = mine.new_empty((transport.size, *mine.shape))
    transport.all_gather(parts, mine).wait()
    total, total_lse = parts[0, ..., :-1].clone(), parts[0, ..., -1].mT.clone()
    for part in parts[1:]:
        merge_(total, total_lse, part[..., :-1], part[..., -1].mT)
    return total, total_lse
