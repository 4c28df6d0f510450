"""A case, checked and brought to the form of the backends, and what it has to give."""

from __future__ import annotations

import functools
from typing import Any

import torch
from cases import Case, make

from strobe.backends import dispatch, reference
from strobe.backends.backend import Gradients
from strobe.call import autograd
from strobe.call.bound_call import bind
from strobe.problem import Problem
from strobe.problem.arguments import Arguments, Inputs, layout_of
from strobe.problem.checks import with_longest
from strobe.problem.resolve import with_softcap

LEAVES = ("q", "k", "v", "bias", "sinks")


def prepare(
    case: Case, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> tuple[Problem, Inputs]:
    q, k, v, kwargs = make(case, dtype, device, seed)
    return checked(q, k, v, kwargs)


def checked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kwargs: dict[str, Any]) -> tuple[Problem, Inputs]:
    """Make a problem and its inputs from the keywords of strobe.attention, or of attention_varlen if cu_q is among
    them."""
    kwargs = dict(kwargs)
    kwargs["score"] = with_softcap(kwargs.get("score"), kwargs.pop("softcap", None))
    a = Arguments(q, k, v, **kwargs)
    if a.cu_q is not None:
        a = with_longest(a)
    problem, layout = Problem.of(a)
    return problem, Inputs.of(a, layout)


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> tuple[Problem, Inputs]:
    return checked(q, k, v, kwargs)


def arguments(p: Problem, x: Inputs, **more: Any) -> Arguments:
    """The call whose problem and inputs these are, in PyTorch's order of axes."""
    q, k, v = (t[0].transpose(0, 1) if p.varlen else t for t in (x.q, x.k, x.v))
    return Arguments(
        q, k, v, x.cu_q, x.cu_k, *((p.len_q, p.len_k) if p.varlen else (None, None)),
        mask=p.mask if x.mask is None else x.mask, scale=p.scale, score=p.score.with_tensors(x.score_tensors), bias=x.bias,
        dropout=p.dropout, seed=x.seed, sinks=x.sinks, layout="bshd" if p.varlen else "bhsd", return_lse=True,
        deterministic=p.deterministic, **more,
    )  # fmt: skip


def forward(
    backend: str, p: Problem, x: Inputs, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse) of a backend that is bound to the problem as it is, (batch, heads, length, …)."""
    a = arguments(p, x)
    layout = layout_of(a)
    found, lse = dispatch.get(backend).bind(p, layout).run(a._replace(out=None if out is None else layout.outside(out)))
    return layout.inside(found) if out is None else out, None if lse is None else layout.rows_inside(lse)


def backward(
    backend: str,
    p: Problem,
    x: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    gradients: tuple[str, ...] | None = None,
) -> Gradients:
    """All gradients that there can be, or those named, in the shapes of the inputs."""
    wanted = tuple(n for n in LEAVES if getattr(x, n) is not None) if gradients is None else gradients
    a = arguments(p, x)
    layout = layout_of(a)
    results = (layout.outside(out), layout.rows_outside(lse), layout.outside(dout))
    run = dispatch.get(backend).bind(p.backward(wanted), layout).run
    found = run(a, *results, None if dlse is None else layout.rows_outside(dlse))
    return Gradients(*(None if g is None else layout.inside(g) for g in found[:3]), *found[3:])


def attend(p: Problem, x: Inputs, backend: str = "tiled") -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a backend, differentiable, (batch, heads, length, …)."""
    a = arguments(p, x, backend=backend)
    bound = bind(a, needs_grad=True)
    out, lse = autograd.attention(bound, a)
    return bound.layout.inside(out), bound.layout.rows_inside(lse)


def with_leaves(inputs: Inputs, dtype: torch.dtype | None = None) -> tuple[Inputs, list[torch.Tensor]]:
    """Return the same inputs as leaves of a graph of their own, and those that there are."""
    found: dict[str, Any] = {}
    for name in LEAVES:
        t = getattr(inputs, name)
        found[name] = None if t is None else t.detach().clone().to(dtype or t.dtype).requires_grad_()
    return inputs._replace(**found), [t for t in found.values() if t is not None]


def cotangents(p: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Directions for out and lse, the same for every backend, in the dtype of each."""
    generator = torch.Generator().manual_seed(99)
    rows = inputs.q.shape[:3]
    dout = torch.randn((*rows, p.dim_v), generator=generator, dtype=torch.float64).to(device=p.device, dtype=p.dtype)
    return dout, torch.randn(rows, generator=generator, dtype=torch.float64).to(device=p.device, dtype=p.lse_dtype)


def finite_part(lse: torch.Tensor) -> torch.Tensor:
    """Rows that see nothing have a constant LSE."""
    return torch.where(torch.isfinite(lse), lse, 0)


def gradients(p: Problem, inputs: Inputs, dtype: torch.dtype, through_lse: bool) -> list[torch.Tensor]:
    """Return the gradients by PyTorch's autograd through the reference in `dtype`."""
    held, leaves = with_leaves(inputs, dtype)
    out, lse = reference.attention(p, held, dtype)
    dout, dlse = cotangents(p, inputs)
    total = (out * dout.to(dtype)).sum()
    if through_lse:
        total = total + (finite_part(lse) * dlse.to(dtype)).sum()
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True)]


@functools.cache
def expected(
    case: Case, dtype: torch.dtype
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """(exact, same dtype), each (out, lse); the LSE of the second in at least fp32, as every backend returns it."""
    p, inputs = prepare(case, dtype)
    exact = reference.attention(p, inputs)
    same, _ = reference.attention(p, inputs, dtype)
    _, lse = reference.attention(p, inputs, p.lse_dtype)
    return exact, (same, lse)


@functools.cache
def expected_gradients(case: Case, dtype: torch.dtype, through_lse: bool = True) -> tuple[list[torch.Tensor], ...]:
    """(exact, same dtype), each for q, k, v and, where there are, bias and sinks."""
    p, inputs = prepare(case, dtype)
    return gradients(p, inputs, torch.float64, through_lse), gradients(p, inputs, dtype, through_lse)
