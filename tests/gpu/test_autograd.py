"""Gradients of CUDA tensors by the kernels, both ways, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tolerance
import torch
from cases import Case
from gpu.kernels import DTYPES, KERNELS, compile_together, hopper, kernels_here, problem_of
from kernel_cases import SUPPORTED
from oracle import LEAVES, attend, cotangents, finite_part, gradients, prepare, with_leaves

import strobe
from strobe.backends import dispatch
from strobe.call.bound_call import remembered
from strobe.cuda.plans import backward_sm90
from strobe.problem import Problem
from strobe.variants.mask import causal
from strobe.variants.ready_made import window

# Many blocks of queries and keys, several rounds of each head's keys.
LARGE = [
    Case("b_64", 1024, 1024, batch=2, heads=8, heads_k=8, dim=64),
    Case("b_64_causal", 1500, 1500, batch=1, heads=12, heads_k=4, dim=64, mask=causal),
    Case("b_96_causal", 700, 900, heads=4, heads_k=4, dim=96, mask=causal),
    Case("b_128_causal", 1500, 1500, batch=1, heads=16, heads_k=2, dim=128, mask=causal),
    Case("b_128_window", 2000, 2500, batch=1, heads=4, heads_k=4, dim=128, mask=window(300, 200)),
    Case("b_128_dropout", 500, 700, batch=2, heads=4, heads_k=2, dim=128, mask=causal, dropout=0.25),
    Case("b_64_dropout_packed", 0, 0, heads=4, heads_k=2, dim=64, dropout=0.1, lengths=((500, 300), (0, 5), (333, 700))),
    Case("b_192_128", 700, 700, batch=1, heads=8, heads_k=8, dim=192, dim_v=128, mask=causal),
    Case("b_256", 500, 600, batch=2, heads=4, heads_k=2, dim=256),
    Case("b_256_dropout", 300, 400, batch=1, heads=4, heads_k=4, dim=256, mask=causal, dropout=0.5),
    Case("b_packed", 0, 0, heads=8, heads_k=2, dim=128, mask=causal, softcap=15.0, sinks=True,
         lengths=((1000, 1000), (1, 1), (0, 0), (513, 700), (0, 5), (700, 128), (77, 77))),
]  # fmt: skip
CASES = [*SUPPORTED, *LARGE]


def backward_problem(case: Case, dtype: torch.dtype) -> Problem:
    problem, inputs = prepare(case, dtype, "cuda")
    return problem.backward(tuple(n for n in LEAVES if getattr(inputs, n) is not None))


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """Compile what the tests that were chosen run."""
    chosen = [item.callspec.params for item in request.session.items if item.name.startswith("test_gradients[")]
    for which in (problem_of, backward_problem):
        here = [p for p in chosen if "case" in p and p.get("kernel") in kernels_here()]
        compile_together((p["kernel"], which(p["case"], p["dtype"])) for p in here)


@pytest.fixture
def sums_in_any_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few keys would take turns. Calls that are remembered have their plans."""
    monkeypatch.setattr(backward_sm90, "TURNS_UP_TO", 0)
    remembered.calls.clear()
    compile_together(("sm90", backward_problem(case, torch.bfloat16)) for case in SUPPORTED)
    yield
    remembered.calls.clear()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients(kernel: str, dtype: torch.dtype, case: Case) -> None:
    if kernel not in kernels_here():
        pytest.skip("no Hopper GPU")
    problem, inputs = prepare(case, dtype, "cuda")
    assert dispatch.get(kernel).limits(backward_problem(case, dtype)) is None
    held, leaves = with_leaves(inputs)
    out, lse = attend(problem, held, kernel)
    dout, dlse = cotangents(problem, inputs)
    found = torch.autograd.grad((out * dout).sum() + (finite_part(lse) * dlse).sum(), leaves)
    exact, same = (gradients(problem, inputs, kind, True) for kind in (torch.float64, dtype))
    names = [name for name in LEAVES if getattr(held, name) is not None]
    for name, gradient, e, s in zip(names, found, exact, same, strict=True):
        floor = tolerance.gradient_floor(name, problem, inputs, lse.detach(), dout, e)
        tolerance.check(f"d{name}", gradient, e, s, tolerance.GRADIENTS, floor)


@pytest.mark.skipif(not hopper(), reason="no Hopper GPU")
def test_gradients_with_sums_in_any_order(sums_in_any_order: None) -> None:
    for case in SUPPORTED:
        test_gradients("sm90", torch.bfloat16, case)


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
