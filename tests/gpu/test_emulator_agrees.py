"""The emulator against the GPU: the same kernels, plans and arguments, so the same results."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import exact_inputs
import pytest
import torch
from cases import Case, make
from emulator.emulate import only, plan_of
from gpu.kernels import DTYPES, KERNELS, compile_together, kernels_here, problem_of
from oracle import prepare

import strobe
from strobe.emulator import compiler
from strobe.emulator.compiler import build

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
kernels = pytest.mark.parametrize(
    "kernel", [pytest.param(k, marks=() if k in kernels_here() else pytest.mark.skip("no Hopper GPU")) for k in KERNELS]
)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile for the GPU and for the emulator, side by side."""
    problems = [problem_of(case, dtype) for case in exact_inputs.CASES for dtype in DTYPES]
    compile_together((kernel, problem) for problem in problems for kernel in kernels_here())
    on_cpu = [prepare(case, dtype)[0] for case in exact_inputs.CASES for dtype in DTYPES]
    plans = [plan_of(kernel, p, (0, p.dim_v, p.heads * p.dim_v)) for p in on_cpu for kernel in kernels_here()]
    with ThreadPoolExecutor() as pool:
        list(
            pool.map(
                lambda spec: build(spec.source, name=spec.name, entry=spec.entry), {only(plan).kernel for plan in plans}
            )
        )


def both(kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """((out, lse) of the emulator, of the GPU), on the CPU, with heads before rows."""
    there = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
    call = strobe.attention_varlen if "cu_q" in kwargs else strobe.attention
    out, lse = call(q.cuda(), k.cuda(), v.cuda(), **there, return_lse=True, backend=kernel)
    if "cu_q" in kwargs:
        out, lse = out[None], lse[None]
    return exact_inputs.emulate(kernel, q, k, v, **kwargs), (out.transpose(1, 2).cpu(), lse.cpu())


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", exact_inputs.CASES, ids=str)
def test_bit_for_bit_where_the_order_of_sums_does_not_matter(case: Case, dtype: torch.dtype, kernel: str) -> None:
    q, k, v, kwargs = exact_inputs.make_exact(case, dtype)
    (out, lse), (out_gpu, lse_gpu) = both(kernel, q, k, v, kwargs)
    assert torch.equal(out, out_gpu), f"{(out != out_gpu).sum()} of {out.numel()} differ"
    assert torch.allclose(lse, lse_gpu, rtol=1e-6, atol=1e-6)  # the logarithm is approximate


@kernels
@pytest.mark.parametrize("case", exact_inputs.CASES, ids=str)
def test_random_inputs(case: Case, kernel: str) -> None:
    """Sums in another order move the last bit of some weights, hence their values by up to 2^-9 each, and few
    outputs."""
    q, k, v, kwargs = make(case, torch.bfloat16)
    (out, lse), (out_gpu, lse_gpu) = both(kernel, q, k, v, kwargs)
    one_bit = torch.maximum(out.abs(), out_gpu.abs()).float() * 2**-7
    assert ((out - out_gpu).abs() <= one_bit + v.abs().max() * 2**-8).all()
    assert (out != out_gpu).float().mean() < 0.02
    assert torch.allclose(lse, lse_gpu, rtol=2e-6, atol=2e-6)
