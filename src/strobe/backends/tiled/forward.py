"""FlashAttention in PyTorch tiles, on any device: the algorithm, its memory saving, and every argument there is.

For a block of query rows the tiles of keys are visited one after the other, keeping for each row the largest score so
far (m), the sum of exponentials (ell) and the output not yet divided by it (o). When a tile brings a larger score, what
has been summed relative to the old maximum is brought to the new one by the factor exp(m_old - m_new)."""

from __future__ import annotations

from typing import Protocol

import torch

from strobe.backends.backend import Backend
from strobe.backends.tiled.backward import backward
from strobe.backends.tiled.slab import LN2, Slab, add_product_, block_sizes, choose_blocks, slabs
from strobe.problem import Inputs, Problem

__all__ = ["BACKENDS", "Observer", "backward", "block_sizes", "forward"]


class Observer(Protocol):
    """Watches `forward` tile by tile. What it is shown lives in buffers that are overwritten: keep copies. Rows are
    those of a tile, scores and maxima in units of log2."""

    def scored(self, rows: range, keys: range, whole: bool, s: torch.Tensor, m: torch.Tensor) -> None:
        """Before the softmax of a tile: its scores, and the largest of each row before it."""

    def summed(
        self, p: torch.Tensor, rescale: torch.Tensor, m: torch.Tensor, ell: torch.Tensor, o: torch.Tensor
    ) -> None:
        """After the same tile."""


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
    blocks = choose_blocks(problem, block_q, block_k)
    q = inputs.q
    if out is None:
        out = empty_rows(q, problem.dim_v)
    lse = torch.empty(q.shape[:3], dtype=problem.lse_dtype, device=q.device)
    rows = blocks.q * problem.group if problem.heads_k else 0
    buffer = torch.empty(blocks.pairs * rows * blocks.k, dtype=problem.lse_dtype, device=q.device)
    for slab in slabs(problem, inputs, blocks.pairs):
        slab_out, slab_lse = slab.of_queries(out), slab.of_queries(lse)
        for block in slab.row_blocks(blocks.q):
            o, row_lse = _block_of_rows(slab, block, blocks.k, buffer, observer)
            slab_out[:, :, :, block.start : block.stop] = slab.spread(o, block)
            slab_lse[:, :, :, block.start : block.stop] = slab.spread(row_lse, block).squeeze(-1)
    return out, lse


def _block_of_rows(
    slab: Slab, rows: range, block_k: int, buffer: torch.Tensor, observer: Observer | None
) -> tuple[torch.Tensor, torch.Tensor]:
    problem = slab.problem
    q = slab.query_tile(rows)  # (b*hk, g*rows, dim)
    o = q.new_zeros((*q.shape[:2], problem.dim_v), dtype=slab.accumulate)
    minus_m, ell = _before_the_first_tile(slab, rows, o)
    for keys, whole in slab.key_tiles(rows, block_k):
        k, v = slab.keys_of(slab.k, keys), slab.keys_of(slab.v, keys)
        s, _ = slab.scores(q, k, rows, keys, whole, buffer)
        if observer is not None:
            observer.scored(rows, keys, whole, s * slab.unit, -minus_m)
        minus_new = torch.minimum(minus_m, s.amax(-1, keepdim=True).mul_(slab.minus_unit))
        p = slab.exponentials(s, minus_new, out=s)
        rescale = torch.sub(minus_new, minus_m, out=minus_m).exp2_()
        ell = torch.addcmul(p.sum(-1, keepdim=True), ell, rescale)
        if problem.dropout:
            p.mul_(slab.kept(rows, keys))
        add_product_(o.mul_(rescale), p.to(slab.operand), v)
        minus_m = minus_new
        if observer is not None:
            observer.summed(p, rescale, -minus_m, ell, o)
    o.div_(torch.where(ell == 0, 1, ell) * (1 - problem.dropout))
    return o, ell.log2_().sub_(minus_m).mul_(LN2)  # log2(0) = -inf for a row that saw nothing


def _before_the_first_tile(slab: Slab, rows: range, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-m, to which scores are added, and ell, (b*hk, g*rows, 1). The sink is a key already seen whose value is 0.
    Without one m is the least finite number and not -inf: masked scores, which are -inf, can then be compared with it
    and subtracted from it without NaN."""
    least = torch.finfo(slab.accumulate).min
    minus_m = like.new_full((*like.shape[:2], 1), -least)
    if slab.inputs.sinks is None:
        return minus_m, torch.zeros_like(minus_m)
    sink = slab.sinks().expand(len(slab.batch), len(slab.heads), slab.group, len(rows)).reshape(minus_m.shape)
    minus_m = -sink.clamp(min=least)
    return minus_m, (sink + minus_m).exp2_()


def empty_rows(q: torch.Tensor, dim: int) -> torch.Tensor:
    """An output for the queries `q`, its axes in memory in the same order."""
    batch, heads, length, _ = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty(batch, length, heads, dim).transpose(1, 2)
    return q.new_empty(batch, heads, length, dim)


def _details(problem: Problem) -> dict[str, object]:
    blocks = choose_blocks(problem)
    return {"block_q": blocks.q, "block_k": blocks.k}


def _extra_bytes(problem: Problem) -> int:
    """Two tiles of scores, the accumulators of a block of rows and, for gradients, those of all keys and values."""
    blocks, size = choose_blocks(problem), problem.lse_dtype.itemsize
    rows = blocks.pairs * blocks.q * (problem.group if problem.heads_k else 1)
    extra = size * rows * (2 * blocks.k + problem.dim + problem.dim_v + 4)
    if problem.needs_grad:
        extra += 2 * size * rows * blocks.k + size * problem.heads_k * problem.total_k * (problem.dim + problem.dim_v)
    return extra


BACKENDS = {
    "tiled": Backend(
        name="tiled",
        summary="FlashAttention in PyTorch tiles; every argument, any device",
        supports=lambda problem: None,
        forward=forward,
        details=_details,
        extra_bytes=_extra_bytes,
    )
}
