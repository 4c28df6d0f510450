"""A case, checked and brought to the form of the backends, and what it has to give."""

from __future__ import annotations

import functools
from typing import Any

import torch
from cases import Case, make

from strobe import problem
from strobe.backends import reference
from strobe.problem import Inputs, Problem

LEAVES = ("q", "k", "v", "bias", "sinks")


def prepare(
    case: Case, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> tuple[Problem, Inputs]:
    q, k, v, kwargs = make(case, dtype, device, seed)
    return checked(q, k, v, kwargs)


def checked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kwargs: dict[str, Any]) -> tuple[Problem, Inputs]:
    """From the keywords of strobe.attention, or of attention_varlen if cu_q is among them."""
    rest = dict(kwargs)
    cu = tuple(rest.pop(name, None) for name in ("cu_q", "cu_k", "max_q", "max_k"))
    return problem.check(q, k, v, cu=None if cu[0] is None else cu, **rest)  # type: ignore[arg-type]


def with_leaves(inputs: Inputs, dtype: torch.dtype | None = None) -> tuple[Inputs, list[torch.Tensor]]:
    """The same inputs as leaves of a graph of their own, and those that there are."""
    found: dict[str, Any] = {}
    for name in LEAVES:
        t = getattr(inputs, name)
        found[name] = None if t is None else t.detach().clone().to(dtype or t.dtype).requires_grad_()
    rest = (inputs.seed, inputs.cu_q, inputs.cu_k)
    held = Inputs(found["q"], found["k"], found["v"], inputs.mask, found["bias"], found["sinks"], *rest)
    return held, [t for t in found.values() if t is not None]


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
    """By PyTorch's autograd through the reference in `dtype`."""
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
