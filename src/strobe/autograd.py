"""Attention as a differentiable operation of PyTorch, whatever backend computes it.

First derivatives come from the backend's backward or from `tiled`. For second derivatives the backward is an operation
in its own right: it is written down once more in ordinary differentiable formulas, one block of query rows at a time,
and PyTorch differentiates those. Query rows do not see each other, so memory stays at (rows of a block) x (keys)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from strobe.backends.backend import Backend
from strobe.backends.reference import probabilities
from strobe.backends.tiled import backward as tiled_backward
from strobe.backends.tiled.slab import Slab, choose_blocks, slabs, tile_of
from strobe.problem import Inputs, Problem
from strobe.score import softcapped

_Tensors = tuple[torch.Tensor | None, ...]


def attention(backend: Backend, problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), differentiable in q, k, v, bias and sinks through both."""
    return _Attention.apply(backend, problem, inputs, inputs.q, inputs.k, inputs.v, inputs.bias, inputs.sinks)


def _with(inputs: Inputs, q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Inputs:
    return Inputs(q, k, v, inputs.mask, bias, sinks, inputs.seed, inputs.cu_q, inputs.cu_k)


def _without_tensors(inputs: Inputs) -> Inputs:
    """What need not be saved for the backward by PyTorch, because nothing differentiates it."""
    return _with(inputs, None, None, None, None, None)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backend: Backend, problem: Problem, inputs: Inputs, *tensors: torch.Tensor | None) -> Any:
        out, lse = backend.forward(problem, inputs, None)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.call = backend, problem, _without_tensors(inputs)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        dout, dlse = grads
        *tensors, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 8
        dout = torch.zeros_like(out) if dout is None else dout
        backend, problem, rest = ctx.call
        needs = ctx.needs_input_grad[3:]
        if not torch.is_grad_enabled():  # nobody asks for second derivatives
            return None, None, None, *gradients(backend, problem, rest, needs, out, lse, dout, dlse, tensors)
        found = _Backward.apply(backend, problem, rest, needs, out.detach(), lse.detach(), dout, dlse, *tensors)
        return None, None, None, *found


class Plain(torch.autograd.Function):
    """The output alone as a function of q, k and v alone: `_Attention` where Python's own time counts. `call` is
    (forward, backward, backend, problem), the first two functions of tensors: (q, k, v) and (dout, q, k, v, out,
    lse)."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        out, lse = call[0](*tensors)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        _, backward, backend, problem = ctx.call
        if not torch.is_grad_enabled():
            return None, *backward(*grads, q, k, v, out, lse)
        rest, needs = _without_tensors(Inputs(q, k, v)), (*ctx.needs_input_grad[1:], False, False)
        found = _Backward.apply(
            backend, problem, rest, needs, out.detach(), lse.detach(), *grads, None, q, k, v, None, None
        )
        return None, *found[:3]


def gradients(
    backend: Backend,
    problem: Problem,
    rest: Inputs,
    needs: tuple[bool, ...],
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    tensors: Sequence[torch.Tensor | None],
) -> _Tensors:
    """Of q, k, v, bias and sinks, those that are needed."""
    inputs = _with(rest, *tensors)
    if backend.backward is None:
        found = tiled_backward.backward(problem, inputs, out, lse, dout, dlse, bias_gradient=needs[3])
    else:
        found = backend.backward(problem, inputs, out, lse, dout, dlse)
    return tuple(g if need else None for g, need in zip(found, needs, strict=True))


class _Backward(torch.autograd.Function):
    """The gradients as a function of (dout, dlse, q, k, v, bias, sinks). The results of the forward are passed as
    constants: second derivatives go through the recomputation."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: Backend,
        problem: Problem,
        rest: Inputs,
        needs: tuple[bool, ...],
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        *tensors: torch.Tensor | None,
    ) -> _Tensors:
        ctx.save_for_backward(dout, dlse, *tensors)
        ctx.call = problem, rest, needs
        ctx.set_materialize_grads(False)
        return gradients(backend, problem, rest, needs, out, lse, dout, dlse, tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        """`cotangents` belong to the gradients of q, k, v, bias and sinks."""
        problem, rest, needs = ctx.call
        if torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (*ctx.saved_tensors, *cotangents)
        ):
            return (None,) * 6 + _Third.apply(problem, rest, *cotangents, *ctx.saved_tensors)
        return (None,) * 6 + second_derivatives(problem, rest, cotangents, ctx.saved_tensors)


class _Third(torch.autograd.Function):
    """Computes second derivatives and refuses to be differentiated any further."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, rest: Inputs, *tensors: torch.Tensor | None) -> _Tensors:
        return second_derivatives(problem, rest, tensors[:5], tensors[5:])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        raise NotImplementedError("strobe.attention has first and second derivatives, but no third")


def second_derivatives(problem: Problem, rest: Inputs, cotangents: Sequence[Any], saved: Sequence[Any]) -> _Tensors:
    """The gradients of <cotangents, gradients of attention> for (dout, dlse, q, k, v, bias, sinks)."""
    inputs = _with(rest, *saved[2:])
    totals = [None if t is None else torch.zeros_like(t, dtype=problem.lse_dtype) for t in saved]
    blocks = choose_blocks(problem)
    for slab in slabs(problem, inputs, blocks.pairs):
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
                    seen = torch.isfinite(lse)
                    scalar = scalar + torch.where(seen, lse * leaves[1], 0).sum()
                gradients = iter(torch.autograd.grad(scalar, first, create_graph=True))
                paired = [(next(gradients), d) for t, d in zip(leaves[2:], directions, strict=True) if t is not None]
                total = sum((g * d).sum() for g, d in paired if d is not None)
                if not isinstance(total, torch.Tensor) or not total.requires_grad:
                    continue
                wanted = [t for t in leaves if t is not None]
                found = iter(torch.autograd.grad(total, wanted, allow_unused=True))
            for into, leaf in zip(_parts(slab, rows, totals), leaves, strict=True):
                if leaf is not None and (g := next(found)) is not None:
                    into += g
    return tuple(None if t is None else t.to(like.dtype) for t, like in zip(totals, saved, strict=True))


def _parts(slab: Slab, rows: range, tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    """Of (dout, dlse, q, k, v, bias, sinks), or of what is shaped like them, the views that a block of rows has to do
    with."""
    here = slice(rows.start, rows.stop)
    dout, dlse, q, k, v, bias, sinks = tensors
    by_rows = [None if t is None else slab.of_queries(t)[:, :, :, here] for t in (dout, dlse, q)]
    by_keys = [None if t is None else slab.of_keys(t) for t in (k, v)]
    bias = None if bias is None else tile_of(slab.of_pairs(bias), rows, range(slab.len_k))  # type: ignore[arg-type]
    heads = slab.query_heads
    sinks = None if sinks is None else sinks[heads.start : heads.stop].unflatten(0, (len(slab.heads), slab.group))
    return [*by_rows, *by_keys, bias, sinks]


def _dense_rows(slab: Slab, rows: range, leaves: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a block of rows with all their scores at once, (b, hk, g, rows, len_k), in differentiable
    operations."""
    problem, (q, k, v, bias, sinks) = slab.problem, leaves
    s = softcapped(q @ k.unsqueeze(2).mT * problem.scale, problem.softcap)
    if bias is not None:
        s = s + bias
    keys = range(slab.len_k)
    index = [torch.arange(r.start, r.stop, device=s.device) for r in (rows, keys)]
    visible = problem.mask.block(index[0], index[1], slab.len_q, slab.len_k) & (s > -torch.inf)
    if slab.mask is not None:
        visible = visible & tile_of(slab.mask, rows, keys)
    p, lse = probabilities(s, visible, None if sinks is None else sinks[:, :, None, None])
    if problem.dropout:
        p = torch.where(slab.spread(slab.kept(rows, keys), rows), p / (1 - problem.dropout), 0)
    return p @ v.unsqueeze(2), lse
