"""The backward pass by recomputation: the probabilities of a tile come back from the scores and the LSE, p = exp(s -
lse).

With delta = rowsum(dout * out) - dlse, for each row: dv += pᵀ dout; dp = dout vᵀ; ds = p (dp - delta); dq += ds k; dk
+= dsᵀ q.

Beside a huge maximum, as a bias of finfo.min gives, the LSE has no bits left for the sum of exponentials: p would be 1
for each of n equal scores, not 1/n. For such rows the maximum and the sum are computed again, and kept apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from strobe.backends.backend import Gradients
from strobe.backends.tiled.sequences import Order
from strobe.backends.tiled.slab import Blocks, Slab, add_product_, choose_blocks, product, slabs, tile_of
from strobe.problem import Problem
from strobe.problem.arguments import GRADIENTS, Inputs
from strobe.variants import dropout


@dataclass
class _Totals:
    """The sums of gradients, in 32 bits at least; None for gradients that nobody wants."""

    q: torch.Tensor | None  # written once per block of rows, so in the dtype of the result
    k: torch.Tensor | None
    v: torch.Tensor | None
    bias: torch.Tensor | None
    sinks: torch.Tensor | None
    captured: dict[int, torch.Tensor]  # by the numbers of the score's tensors


@torch.no_grad()
def backward(
    problem: Problem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    *,
    block_q: int | None = None,
    block_k: int | None = None,
) -> Gradients:
    """The gradients that the problem names; all that there are if it names none. Those of a partial problem stay in fp32:
    they are summed up with others."""
    if not problem.empty and (order := Order.of(problem, inputs)) is not None:
        by_rows = [None if t is None else t[:, :, order.rows] for t in (out, lse, dout, dlse)]
        moved = backward(problem, order.inputs, *by_rows, block_q=block_q, block_k=block_k)  # type: ignore[arg-type]
        places = (order.rows, order.keys, order.keys)
        q, k, v = (
            None if g is None else torch.empty_like(g).index_copy_(2, index, g)
            for g, index in zip(moved[:3], places, strict=True)
        )
        return Gradients(q, k, v, moved.bias, moved.sinks, moved.score)
    wide, wanted = problem.lse_dtype, problem.gradients or GRADIENTS

    def zeros(name: str, dtype: torch.dtype = wide) -> torch.Tensor | None:
        like = getattr(inputs, name)
        return torch.zeros(like.shape, dtype=dtype, device=like.device) if name in wanted and like is not None else None

    captured = {
        i: torch.zeros(t.shape, dtype=wide, device=t.device)
        for i, t in enumerate(inputs.score_tensors)
        if f"score{i}" in wanted
    }
    totals = _Totals(zeros("q", problem.out_dtype), zeros("k"), zeros("v"), zeros("bias"), zeros("sinks"), captured)
    if problem.empty:  # rows see nothing but the sink, if there is one
        if totals.sinks is not None and dlse is not None:
            totals.sinks += dlse.sum((0, 2))
    else:
        _walk(problem, inputs, totals, out, lse, dout, dlse, choose_blocks(problem, block_q, block_k))

    def result(name: str) -> torch.Tensor | None:
        total = getattr(totals, name)
        return None if total is None else total.to(wide if problem.partial else getattr(inputs, name).dtype)

    of_score = [totals.captured[i].to(t.dtype) if i in captured else None for i, t in enumerate(inputs.score_tensors)]
    q, k, v, bias, sinks = map(result, GRADIENTS)
    return Gradients(q, k, v, bias, sinks, tuple(of_score) if captured else None)


def _walk(
    problem: Problem,
    inputs: Inputs,
    totals: _Totals,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    blocks: Blocks,
) -> None:
    buffers = torch.empty(2, blocks.scores, dtype=problem.lse_dtype, device=inputs.q.device)
    for slab in slabs(problem, inputs, blocks):
        # (b*hk, len_k, dim): views, or copies, still 0, of what packed sequences have.
        of_keys = [None if t is None else slab.of_keys(t).flatten(0, 1) for t in (totals.k, totals.v)]
        for block in slab.row_blocks(blocks.q):
            _block_of_rows(slab, block, blocks, totals, of_keys, out, lse, dout, dlse, buffers)
        if of_keys[0] is not None:
            of_keys[0].mul_(slab.slope_factor)
        for total, part in zip((totals.k, totals.v), of_keys, strict=True):
            if total is not None and part is not None and (into := slab.of_keys(total)).data_ptr() != part.data_ptr():
                into.copy_(part.view_as(into))


def _block_of_rows(
    slab: Slab,
    rows: range,
    blocks: Blocks,
    totals: _Totals,
    of_keys: Sequence[torch.Tensor | None],
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
    # In the units of the scores; +inf, so that p = 0, in rows that saw nothing.
    m, log_ell = slab.in_units(row_lse).masked_fill(empty, torch.inf), None
    if _may_lose_sums(problem, row_lse):
        m, log_ell = _apart(slab, rows, q, m, blocks.k, buffers[0])
    if totals.sinks is not None:
        _add_sinks(slab, rows, totals.sinks, delta, m, log_ell)
    do = (do / dropout.kept_share(problem.dropout) if problem.dropout else do).to(slab.operand)

    dq = q.new_zeros(q.shape, dtype=slab.accumulate)
    dk_all, dv_all = of_keys
    dbias_all = slab.of_pairs(totals.bias)
    needs_ds = totals.q is not None or dk_all is not None or dbias_all is not None or bool(totals.captured)
    for keys, whole in slab.key_tiles(rows, blocks.k):
        k, v = slab.keys_of(slab.k, keys), slab.keys_of(slab.v, keys)
        s, slopes = slab.scores(q, k, rows, keys, whole, buffers[0])
        p = slab.exponentials(s, m) if log_ell is None else slab.exponential(s.sub_(m).sub_(log_ell))
        kept = slab.kept(rows, keys) if problem.dropout else None
        here = slice(keys.start, keys.stop)
        if dv_all is not None:
            add_product_(dv_all[:, here], (p if kept is None else p * kept).to(slab.operand).mT, do)
        if not needs_ds:
            continue
        dp = product(do, v.mT, buffers[1])
        ds = (dp if kept is None else dp.mul_(kept)).sub_(delta).mul_(p)
        if dbias_all is not None:
            dbias = tile_of(dbias_all, rows, keys)
            dbias += slab.spread(ds, rows).sum_to_size(dbias.shape)
        if slopes is not None:
            if totals.captured:
                slopes.add_captured_(totals.captured, slab.spread(ds, rows) * slab.captured_factor)
            if (slope := slopes.of_score()) is not None:
                ds = torch.where(ds == 0, 0, ds * slope.view_as(ds))  # hidden pairs may have an infinite slope
        ds = ds.to(slab.operand)
        if totals.q is not None:
            add_product_(dq, ds, k)
        if dk_all is not None:
            add_product_(dk_all[:, here], ds.mT, q)
    if totals.q is not None:
        dq.mul_(slab.slope_factor)
        slab.of_queries(totals.q)[:, :, :, rows.start : rows.stop] = slab.spread(dq, rows)


def _may_lose_sums(problem: Problem, row_lse: torch.Tensor) -> bool:
    """Return whether LSEs may be that large. On a GPU no number is read back: there, only a bias is expected to bring
    huge scores."""
    return lse_loses_sums(row_lse) if problem.device.type == "cpu" else problem.has_bias


def lse_loses_sums(lse: torch.Tensor) -> bool:
    """Return whether some LSE is so large that its last bit matters: exp(s - lse) would be wrong by 1/4096 or more."""
    if not lse.numel():
        return False
    most = 2**-11 / torch.finfo(lse.dtype).eps
    least, largest = torch.aminmax(lse)
    if -most <= least.item() and largest.item() <= most:  # as most of the time
        return False
    return bool((lse.isfinite() & (lse.abs() > most)).any())


def _apart(
    slab: Slab, rows: range, q: torch.Tensor, row_lse: torch.Tensor, block_k: int, buffer: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The row maxima and the logarithms of the sums of exponentials, in the units of the scores. Where they do not add
    up to the LSE, that covers more keys than there are here: then the LSE itself, and 0."""
    m, ell = slab.before_the_first_tile(rows, q)
    for keys, whole in slab.key_tiles(rows, block_k):
        s, _ = slab.scores(q, slab.keys_of(slab.k, keys), rows, keys, whole, buffer)
        _, _, m, ell = slab.softmax_step(s, m, ell)
    log_ell = ell.log2_().div_(slab.unit)
    rounding = 8 * torch.finfo(m.dtype).eps * row_lse.abs()
    same = (m + log_ell - row_lse).abs() <= rounding  # not where a row saw nothing, or an infinite sink
    same &= row_lse.isfinite()
    return torch.where(same, m, row_lse), torch.where(same, log_ell, 0)


def _add_sinks(
    slab: Slab, rows: range, total: torch.Tensor, delta: torch.Tensor, m: torch.Tensor, log_ell: torch.Tensor | None
) -> None:
    """The sink is a key whose value is 0, hence dp = 0 and ds = -p delta. An infinite one has p = 1 or 0."""
    shape = (len(slab.batch), len(slab.heads), slab.group, len(rows))
    sinks, m = slab.in_units(slab.sinks()), m.view(shape)
    difference = torch.where(sinks == m, 0, sinks - m)
    if log_ell is not None:
        difference -= log_ell.view(shape)
    p = slab.exponential(difference).masked_fill_(sinks == -torch.inf, 0)
    total[slab.query_heads.start : slab.query_heads.stop] -= (p * delta.view(shape)).sum((0, 3)).flatten()
