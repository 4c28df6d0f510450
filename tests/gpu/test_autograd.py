"""Gradients of CUDA tensors: forward by a kernel, backward by `tiled`, against float64."""

from __future__ import annotations

import dataclasses

import pytest
import tolerance
import torch
from cases import Case
from gpu.kernels import KERNELS, kernels_here
from kernel_cases import SUPPORTED
from oracle import cotangents, finite_part, gradients, prepare, with_leaves

import strobe
from strobe import autograd
from strobe.backends import dispatch
from strobe.mask import causal

NAMES = (
    "plain",
    "ragged_causal",
    "empty_rows",
    "group_3",
    "dim_v_smaller",
    "sliced",
    "softcap",
    "sinks",
    "packed_causal",
    "k_128_causal",
    "k_96_window_packed",
    "k_192_128",
    "k_64_softcap_sinks",
    "k_chunked",
)
CASES = [case for case in SUPPORTED if case.name in NAMES]
assert len(CASES) == len(NAMES)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients(kernel: str, case: Case) -> None:
    if kernel not in kernels_here():
        pytest.skip("no Hopper GPU")
    problem, inputs = prepare(case, torch.bfloat16, "cuda")
    problem = dataclasses.replace(problem, needs_grad=True)
    held, leaves = with_leaves(inputs)
    out, lse = autograd.attention(dispatch.choose(problem, kernel), problem, held)
    dout, dlse = cotangents(problem, inputs)
    found = torch.autograd.grad((out * dout).sum() + (finite_part(lse) * dlse).sum(), leaves)
    exact, same = (gradients(problem, inputs, dtype, True) for dtype in (torch.float64, torch.bfloat16))
    names = [name for name in ("q", "k", "v", "bias", "sinks") if getattr(held, name) is not None]
    for name, gradient, e, s in zip(names, found, exact, same, strict=True):
        floor = tolerance.gradient_floor(name, problem, inputs, lse.detach(), dout, e)
        tolerance.check(f"d{name}", gradient, e, s, tolerance.GRADIENTS, floor)


def textbook(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    future = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("kernel", KERNELS)
def test_training_step_through_the_public_call(kernel: str) -> None:
    if kernel not in kernels_here():
        pytest.skip("no Hopper GPU")
    q, k, v = (torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = strobe.attention(q, k, v, mask=causal, backend=kernel)
    assert out.requires_grad
    with torch.no_grad():
        assert torch.equal(out, strobe.attention(q, k, v, mask=causal, backend=kernel))
    out.square().sum().backward()
    wanted = []
    for dtype in (torch.float64, torch.bfloat16):
        copies = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        textbook(*copies).square().sum().backward()
        wanted.append([t.grad for t in copies])
    for name, t, exact, same in zip("qkv", (q, k, v), *wanted, strict=True):
        assert t.grad is not None and t.grad.dtype == torch.bfloat16
        tolerance.check(f"d{name}", t.grad, exact, same, tolerance.GRADIENTS)
