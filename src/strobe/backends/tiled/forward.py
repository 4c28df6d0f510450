"""FlashAttention in PyTorch tiles, on any device: the algorithm, its memory saving, and every argument there is.

For a block of query rows the tiles of keys are visited one after the other, keeping for each row the largest score so
far (m), the sum of exponentials (ell) and the output not yet divided by it (o). When a tile brings a larger score, what
has been summed relative to the old maximum is brought to the new one by the factor exp(m_old - m_new)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from strobe.backends.tiled.paged_slab import PagedSlab, paged_slabs
from strobe.backends.tiled.sequences import Order
from strobe.backends.tiled.slab import LN2, Slab, add_product_, choose_blocks, slabs
from strobe.problem import Problem
from strobe.problem.arguments import Inputs
from strobe.variants import dropout


class Observer(Protocol):
    """Watches `forward` tile by tile. What it is shown lives in buffers that are overwritten: keep copies. Rows are
    those of a tile, scores and maxima in units of log2."""

    def scored(self, rows: range, keys: range, whole: bool, s: torch.Tensor, m: torch.Tensor) -> None:
        """Called before the softmax of a tile, with its scores and the largest of each row before it."""

    def summed(
        self, p: torch.Tensor, rescale: torch.Tensor, m: torch.Tensor, ell: torch.Tensor, o: torch.Tensor
    ) -> None:
        """Called after the softmax of the same tile."""


@torch.no_grad()
def forward(
    problem: Problem,
    inputs: Inputs,
    out: torch.Tensor | None = None,
    *,
    block_q: int | None = None,
    block_k: int | None = None,
    observer: Observer | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), (batch, heads, len_q, dim_v) and (batch, heads, len_q)."""
    q = inputs.q
    if out is None:
        out = empty_rows(q, problem.dim_v, problem.out_dtype)
    lse = torch.empty(q.shape[:3], dtype=problem.lse_dtype, device=q.device)
    if problem.empty:
        return out.zero_(), _nothing_seen(inputs, lse)
    if problem.k.pages is not None:
        return run_slabs(problem, paged_slabs(problem, inputs), out, lse)
    if (order := Order.of(problem, inputs)) is not None:
        result = forward(problem, order.inputs, block_q=block_q, block_k=block_k, observer=observer)
        return out.index_copy_(2, order.rows, result[0]), lse.index_copy_(2, order.rows, result[1])
    blocks = choose_blocks(problem, block_q, block_k)
    buffer = torch.empty(blocks.scores, dtype=problem.lse_dtype, device=q.device)
    for slab in slabs(problem, inputs, blocks):
        slab_out, slab_lse = slab.of_queries(out), slab.of_queries(lse)
        for block in slab.row_blocks(blocks.q):
            o, row_lse = _block_of_rows(slab, block, blocks.k, buffer, observer)
            slab_out[:, :, :, block.start : block.stop] = slab.spread(o, block)
            slab_lse[:, :, :, block.start : block.stop] = slab.spread(row_lse, block).squeeze(-1)
    return out, lse


def run_slabs(
    problem: Problem, slabs: Iterable[tuple[PagedSlab, int, int]], out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of paged keys. Each slab comes with the sizes of its tiles."""
    if problem.q.varlen and not out.is_cpu:  # `cu_q` is taken on trust, and may leave rows out
        out.zero_()
        lse.fill_(-torch.inf)
    for slab, block_q, block_k in slabs:
        part_out = out.new_empty((len(slab.batch), problem.heads, slab.len_q, problem.dim_v))
        part_lse = lse.new_empty(part_out.shape[:3])
        buffer = lse.new_empty(slab.pairs * slab.group * block_q * block_k)
        for block in slab.row_blocks(block_q):
            o, row_lse = _block_of_rows(slab, block, block_k, buffer, None)
            slab.of_queries(part_out)[:, :, :, block.start : block.stop] = slab.spread(o, block)
            slab.of_queries(part_lse)[:, :, :, block.start : block.stop] = slab.spread(row_lse, block).squeeze(-1)
        slab.put(out, part_out)
        slab.put(lse, part_lse)
    return out, lse


def _nothing_seen(inputs: Inputs, lse: torch.Tensor) -> torch.Tensor:
    """The sink alone is in the sum of a row that sees no key."""
    return lse.fill_(-torch.inf) if inputs.sinks is None else lse.copy_(inputs.sinks[None, :, None].expand_as(lse))


def _block_of_rows(
    slab: Slab, rows: range, block_k: int, buffer: torch.Tensor, observer: Observer | None
) -> tuple[torch.Tensor, torch.Tensor]:
    problem = slab.problem
    q = slab.query_tile(rows)  # (b*hk, g*rows, dim)
    o = q.new_zeros((*q.shape[:2], problem.dim_v), dtype=slab.accumulate)
    m, ell = slab.before_the_first_tile(rows, o)
    for keys, whole in slab.key_tiles(rows, block_k):
        k, v = slab.keys_of(slab.k, keys), slab.keys_of(slab.v, keys)
        s, _ = slab.scores(q, k, rows, keys, whole, buffer)
        if observer is not None:
            observer.scored(rows, keys, whole, s * slab.unit, m * slab.unit)
        p, rescale, m, ell = slab.softmax_step(s, m, ell)
        if problem.dropout:
            p.mul_(slab.kept(rows, keys))
        add_product_(o.mul_(rescale), p.to(slab.operand), v)
        if observer is not None:
            observer.summed(p, rescale, m * slab.unit, ell, o)
    o.div_(torch.where(ell == 0, 1, ell) * dropout.kept_share(problem.dropout))
    return o, ell.log2_().div_(slab.unit).add_(m).mul_(slab.unit * LN2)  # log(0) = -inf for a row that saw nothing


def empty_rows(q: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An output for the queries `q`, its axes in memory in the same order."""
    batch, heads, length, _ = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty((batch, length, heads, dim), dtype=dtype).transpose(1, 2)
    return q.new_empty((batch, heads, length, dim), dtype=dtype)
