"""A call gives the same bits each time, however its blocks are scheduled."""

from __future__ import annotations

import pytest
import torch
from cases import Case, make
from gpu.kernels import KERNELS, kernels_here

import strobe
from strobe.variants.mask import causal
from strobe.variants.ready_made import window

RUNS = 20
CASES = [
    Case("causal_128", 1500, 1500, batch=2, heads=16, heads_k=4, dim=128, mask=causal),
    Case("full_64", 1000, 1000, batch=4, heads=16, heads_k=16, dim=64),
    Case("window_256", 700, 900, batch=2, heads=8, heads_k=8, dim=256, mask=window(200, 50)),
    Case("split_keys", 20, 9000, batch=1, heads=16, heads_k=4, dim=128, mask=causal),
    Case("packed", 0, 0, heads=8, heads_k=8, dim=128, mask=causal, lengths=((900, 900), (0, 5), (33, 700), (400, 10))),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_runs_are_equal_bit_for_bit(kernel: str, case: Case) -> None:
    if kernel not in kernels_here():
        pytest.skip("no Hopper GPU")
    q, k, v, kwargs = make(case, torch.bfloat16, "cuda")
    call = strobe.attention if case.lengths is None else strobe.attention_varlen
    # Others keep part of the GPU busy, so that blocks start in different orders and on different multiprocessors.
    noise, beside = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    first: tuple[torch.Tensor, torch.Tensor] | None = None
    for run in range(RUNS):
        if run % 2:
            with torch.cuda.stream(beside):
                noise = (noise @ noise).clamp(-1, 1)
        out, lse = call(q, k, v, **kwargs, return_lse=True, deterministic=True, backend=kernel)
        if first is None:
            first = out, lse
            assert torch.isfinite(out).all()
        assert torch.equal(out, first[0]) and torch.equal(lse, first[1]), f"run {run} differs"
    torch.cuda.synchronize()


@pytest.mark.parametrize("case", [c for c in CASES if c.name != "split_keys"], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_are_equal_bit_for_bit(kernel: str, case: Case) -> None:
    if kernel not in kernels_here():
        pytest.skip("no Hopper GPU")
    q, k, v, kwargs = make(case, torch.bfloat16, "cuda")
    leaves = [t.requires_grad_() for t in (q, k, v)]
    call = strobe.attention if case.lengths is None else strobe.attention_varlen
    noise, beside = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    out = call(*leaves, **kwargs, deterministic=True, backend=kernel)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    anyhow = torch.autograd.grad(call(*leaves, **kwargs, backend=kernel), leaves, dout)  # sums in any order
    for x, y in zip(first, anyhow, strict=True):
        assert (x - y).float().norm() <= 0.01 * y.float().norm()
    for run in range(RUNS):
        if run % 2:
            with torch.cuda.stream(beside):
                noise = (noise @ noise).clamp(-1, 1)
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), f"run {run} differs"
    torch.cuda.synchronize()
