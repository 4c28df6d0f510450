"""Second derivatives of attention: the formulas of the gradients once more, in differentiable operations, one block of
query rows at a time. Query rows do not see each other, so memory stays at (rows of a block) x (keys)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from strobe.backends.reference import probabilities, scores
from strobe.backends.tiled.slab import Slab, choose_blocks, slabs, tile_of
from strobe.problem import Problem
from strobe.problem.arguments import Arguments, Inputs, Layout
from strobe.variants import dropout

_Tensors = tuple[torch.Tensor | None, ...]


def second_derivatives(
    problem: Problem, layout: Layout, a: Arguments, cotangents: Sequence[Any], dout: Any, dlse: Any
) -> _Tensors:
    """The gradients of <cotangents, gradients of attention> for (dout, dlse, q, k, v, bias, sinks) and the floats that a
    score captures, in the caller's layout. The cotangents belong to the gradients of all but dout and dlse."""
    x = Inputs.of(a, layout)
    inside = [None if t is None else layout.inside(t) for t in (dout, *cotangents[:3])]
    rows = None if dlse is None else layout.rows_inside(dlse)
    bias = None if cotangents[3] is None else cotangents[3].view(x.bias.shape)  # type: ignore[union-attr]
    captured = [t if t.is_floating_point() else None for t in x.score_tensors]
    saved = (inside[0], rows, x.q, x.k, x.v, x.bias, x.sinks, *captured)
    grads = _on_views(problem, x, (*inside[1:], bias, *cotangents[4:]), saved)
    outside = [None if t is None else layout.outside(t) for t in (grads[0], *grads[2:5])]
    of_bias = None if grads[5] is None else grads[5].view(a.bias.shape)
    return outside[0], None if grads[1] is None else layout.rows_outside(grads[1]), *outside[1:], of_bias, *grads[6:]


def _on_views(problem: Problem, inputs: Inputs, cotangents: Sequence[Any], saved: Sequence[Any]) -> _Tensors:
    totals = [None if t is None else torch.zeros(t.shape, dtype=problem.lse_dtype, device=t.device) for t in saved]
    blocks = choose_blocks(problem)
    for slab in slabs(problem, inputs, blocks):
        for rows in slab.row_blocks(blocks.q):
            parts = _parts(slab, rows, saved)
            directions = _parts(slab, rows, (None, None, *cotangents))[2:]
            leaves: list[Any] = [
                None if t is None else t.detach().to(problem.lse_dtype).requires_grad_() for t in parts
            ]
            with torch.enable_grad():
                out, lse = _dense_rows(slab, rows, leaves[2:])
                first = [t for t in leaves[2:] if t is not None]
                scalar = (out * leaves[0]).sum()
                if leaves[1] is not None:
                    scalar = scalar + torch.where(torch.isfinite(lse), lse * leaves[1], 0).sum()
                gradients = iter(torch.autograd.grad(scalar, first, create_graph=True, materialize_grads=True))
                paired = [(next(gradients), d) for t, d in zip(leaves[2:], directions, strict=True) if t is not None]
                total = sum((g * d).sum() for g, d in paired if d is not None)
                if not isinstance(total, torch.Tensor) or not total.requires_grad:
                    continue
                wanted = [t for t in leaves if t is not None]
                computed = iter(torch.autograd.grad(total, wanted, allow_unused=True))
            for into, leaf in zip(_parts(slab, rows, totals), leaves, strict=True):
                if leaf is not None and (g := next(computed)) is not None:
                    into += g
    return tuple(None if t is None or like is None else t.to(like.dtype) for t, like in zip(totals, saved, strict=True))


def _parts(slab: Slab, rows: range, tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    """The views of (dout, dlse, q, k, v, bias, sinks), or of tensors shaped like them, that concern a block of rows;
    captured tensors concern all rows."""
    here = slice(rows.start, rows.stop)
    dout, dlse, q, k, v, bias, sinks, *captured = tensors
    by_rows = [None if t is None else slab.of_queries(t)[:, :, :, here] for t in (dout, dlse, q)]
    by_keys = [None if t is None else slab.of_keys(t) for t in (k, v)]
    bias = None if bias is None else tile_of(slab.of_pairs(bias), rows, range(slab.len_k))  # type: ignore[arg-type]
    heads = slab.query_heads
    sinks = None if sinks is None else sinks[heads.start : heads.stop].unflatten(0, (len(slab.heads), slab.group))
    return [*by_rows, *by_keys, bias, sinks, *captured]


def _dense_rows(slab: Slab, rows: range, leaves: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a block of rows with all their scores at once, (b, hk, g, rows, len_k), in differentiable
    operations."""
    problem, (q, k, v, bias, sinks, *captured) = slab.problem, leaves
    keys = range(slab.len_k)
    where = slab.environment(rows, keys) | {i: t for i, t in enumerate(captured) if t is not None}
    product = q @ k.unsqueeze(2).mT
    s = scores(problem, product, where, bias)
    index = [torch.arange(r.start, r.stop, device=s.device) for r in (rows, keys)]
    visible = problem.mask.block(index[0], index[1], slab.len_q, slab.len_k, slab.positions) & (s != -torch.inf)
    if slab.mask is not None:
        visible = visible & tile_of(slab.mask, rows, keys)
    if not problem.score.is_identity:  # hidden pairs may have an infinite slope
        for t in (product, s):
            if t.requires_grad:
                t.register_hook(lambda g: torch.where(visible, g, 0))
    p, lse = probabilities(s, visible, None if sinks is None else sinks[:, :, None, None])
    if problem.dropout:
        p = torch.where(slab.spread(slab.kept(rows, keys), rows), p / dropout.kept_share(problem.dropout), 0)
    return p @ v.unsqueeze(2), lse
