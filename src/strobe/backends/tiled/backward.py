"""The backward pass by recomputation: the probabilities of a tile come back from the scores and the LSE, p = exp(s -
lse).

With delta = rowsum(dout * out) - dlse, for each row: dv += pᵀ dout; dp = dout vᵀ; ds = p (dp - delta); dq += ds k; dk
+= dsᵀ q."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strobe.backends.backend import Gradients
from strobe.backends.tiled.slab import Blocks, Slab, add_product_, choose_blocks, product, slabs, tile_of
from strobe.problem import Inputs, Problem
from strobe.score import LOG2E


@dataclass
class _Totals:
    """What is being summed up, in 32 bits at least."""

    q: torch.Tensor  # written once per block of rows, so in the dtype of the result
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None
    sinks: torch.Tensor | None


@torch.no_grad()
def backward(
    problem: Problem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    *,
    bias_gradient: bool = True,
    block_q: int | None = None,
    block_k: int | None = None,
) -> Gradients:
    """`bias_gradient=False` saves the work and the memory when the bias is a constant."""
    blocks = choose_blocks(problem, block_q, block_k)
    wide = problem.lse_dtype
    bias = inputs.bias if bias_gradient else None
    totals = _Totals(
        torch.zeros_like(inputs.q),
        torch.zeros(inputs.k.shape, dtype=wide, device=inputs.k.device),
        torch.zeros(inputs.v.shape, dtype=wide, device=inputs.v.device),
        None if bias is None else torch.zeros(bias.shape, dtype=wide, device=bias.device),
        None if inputs.sinks is None else torch.zeros_like(inputs.sinks, dtype=wide),
    )
    rows = blocks.q * problem.group if problem.heads_k else 0
    buffers = torch.empty(2, blocks.pairs * rows * blocks.k, dtype=wide, device=inputs.q.device)
    for slab in slabs(problem, inputs, blocks.pairs):
        for block in slab.row_blocks(blocks.q):
            _block_of_rows(slab, block, blocks, totals, out, lse, dout, dlse, buffers)
        slab.of_keys(totals.k).mul_(problem.scale)

    def result(total: torch.Tensor | None, like: torch.Tensor | None) -> torch.Tensor | None:
        return None if total is None or like is None else total.to(like.dtype)

    return Gradients(
        totals.q,
        result(totals.k, inputs.k),
        result(totals.v, inputs.v),
        result(totals.bias, inputs.bias),
        result(totals.sinks, inputs.sinks),
    )


def _block_of_rows(
    slab: Slab,
    rows: range,
    blocks: Blocks,
    totals: _Totals,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    buffers: torch.Tensor,
) -> None:
    problem = slab.problem
    q = slab.query_tile(rows)  # (b*hk, g*rows, dim)
    row_lse = slab.rows_of(slab.of_queries(lse).unsqueeze(-1), rows, slab.accumulate)  # (b*hk, g*rows, 1)
    empty = row_lse == -torch.inf
    o, do = (slab.rows_of(slab.of_queries(t), rows, slab.accumulate) for t in (out, dout))
    delta = (o * do).sum(-1, keepdim=True)
    if dlse is not None:
        delta -= slab.rows_of(slab.of_queries(dlse).unsqueeze(-1), rows, slab.accumulate)
    delta.masked_fill_(empty, 0)
    minus_lse = (row_lse * -LOG2E).masked_fill_(empty, -torch.inf)  # in log2; so that p = 0 in these rows
    if totals.sinks is not None:
        _add_sinks(slab, rows, totals.sinks, delta, minus_lse)
    do = (do / (1 - problem.dropout) if problem.dropout else do).to(slab.operand)

    dq = q.new_zeros(q.shape, dtype=slab.accumulate)
    dk_all, dv_all = (slab.of_keys(t).flatten(0, 1) for t in (totals.k, totals.v))  # views: the totals are contiguous
    dbias_all = slab.of_pairs(totals.bias)
    for keys, whole in slab.key_tiles(rows, blocks.k):
        k, v = slab.keys_of(slab.k, keys), slab.keys_of(slab.v, keys)
        s, capped = slab.scores(q, k, rows, keys, whole, buffers[0])
        p = slab.exponentials(s, minus_lse, out=None if s is capped else s)
        dp = product(do, v.mT, buffers[1])
        p_kept = p
        if problem.dropout:
            kept = slab.kept(rows, keys)
            p_kept = p * kept
            dp.mul_(kept)
        here = slice(keys.start, keys.stop)
        add_product_(dv_all[:, here], p_kept.to(slab.operand).mT, do)
        ds = dp.sub_(delta).mul_(p)
        if dbias_all is not None:
            dbias = tile_of(dbias_all, rows, keys)
            dbias += slab.spread(ds, rows).sum_to_size(dbias.shape)
        if capped is not None:
            ds.mul_(capped.square_().neg_().add_(1))
        ds = ds.to(slab.operand)
        add_product_(dq, ds, k)
        add_product_(dk_all[:, here], ds.mT, q)
    dq.mul_(problem.scale)
    slab.of_queries(totals.q)[:, :, :, rows.start : rows.stop] = slab.spread(dq, rows)


def _add_sinks(slab: Slab, rows: range, total: torch.Tensor, delta: torch.Tensor, minus_lse: torch.Tensor) -> None:
    """The sink is a key whose value is 0, hence dp = 0 and ds = -p delta."""
    shape = (len(slab.batch), len(slab.heads), slab.group, len(rows))
    p = (slab.sinks() + minus_lse.view(shape)).exp2_()
    total[slab.query_heads.start : slab.query_heads.stop] -= (p * delta.view(shape)).sum((0, 3)).flatten()
