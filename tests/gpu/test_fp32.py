"""fp32 inputs on Hopper, both ways, against float64 and by the tolerance of fp32."""

from __future__ import annotations

import random

import pytest
import torch
from cases import Case, make
from gpu import test_autograd
from gpu.kernels import attend, check, check_repeats, compile_together, hopper, problem_of, references
from kernel_cases import FP32_CASES
from oracle import prepare

import strobe
from strobe.backends import dispatch
from strobe.variants.mask import causal, full
from strobe.variants.ready_made import window

pytestmark = pytest.mark.skipif(not hopper(), reason="no Hopper GPU")

LARGE = [
    Case("g_128", 2048, 2048, batch=2, heads=8, heads_k=8, dim=128),
    Case("g_128_causal", 3000, 3000, batch=1, heads=8, heads_k=2, dim=128, mask=causal),
    Case("g_128_long_keys", 100, 9000, batch=1, heads=4, heads_k=1, dim=128),
    Case("g_64_window", 4096, 4096, batch=1, heads=4, heads_k=4, dim=64, mask=window(300, 0)),
    Case("g_72_causal", 1000, 1300, batch=2, heads=6, heads_k=2, dim=72, mask=causal),
    Case("g_128_packed", 0, 0, heads=8, heads_k=2, dim=128, mask=causal,
         lengths=((1000, 1000), (1, 1), (0, 0), (513, 700), (0, 5), (700, 128))),
]  # fmt: skip
ALL = [*FP32_CASES, *LARGE]


def fuzzed(count: int) -> list[Case]:
    """Draw cases of three head dims and masks, so that few kernels are compiled."""
    r, found = random.Random(32), []
    for i in range(count):
        heads_k = r.choice((1, 2, 3))
        mask = r.choice((full, causal, window(r.randint(0, 200), r.randint(0, 200))))
        shape = {"len_q": r.randint(1, 700), "len_k": r.randint(1, 700), "batch": r.choice((1, 3))}
        dims = {"dim": r.choice((40, 64, 128)), "heads": heads_k * r.choice((1, 2, 5)), "heads_k": heads_k}
        found.append(Case(f"fuzz_{i}", mask=mask, memory=r.choice(("dense", "sliced")), **shape, **dims))
    return found


FUZZED = fuzzed(20)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    for which in (problem_of, test_autograd.backward_problem):
        compile_together(("sm90", which(case, torch.float32)) for case in (*ALL, *FUZZED))


@pytest.mark.parametrize("case", [*ALL, *FUZZED], ids=str)
def test_forward(case: Case) -> None:
    assert dispatch.get("sm90").supports(problem_of(case, torch.float32)) is None
    check(*attend(case, torch.float32, "sm90"), references(*prepare(case, torch.float32, "cuda")))


@pytest.mark.parametrize("case", [*ALL, *FUZZED], ids=str)
def test_gradients(case: Case) -> None:
    test_autograd.test_gradients("sm90", torch.float32, case)


def test_it_is_chosen_and_tf32_flags_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, kwargs = make(LARGE[0], torch.float32, "cuda")
    found = strobe.explain(*(t.requires_grad_() for t in (q, k, v)), **kwargs)
    assert (found.backend, found.backward) == ("sm90", "sm90")
    results = []
    for allowed in (False, True):
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allowed)
        results.append(strobe.attention(q, k, v, **kwargs))
    assert torch.equal(*results)


def test_repeated_calls_and_graphs_have_the_same_bits() -> None:
    """Terms lie in a workspace, which every call has for itself."""
    q, k, v = (torch.randn(1, 700, n, 128, device="cuda") for n in (4, 2, 2))
    check_repeats(q, k, v)


@pytest.mark.parametrize("wanted", ["", "qkv", "q"], ids=["forward", "backward", "dq"])
@pytest.mark.parametrize("dim", [64, 128])
def test_terms_are_waited_for(dim: int, wanted: str) -> None:
    """A kernel starts while the one before it runs, and waits for what that one writes. Without the wait it would read
    the terms, or the statistics of rows, of an earlier call, which had the same workspace and other inputs. All calls
    stand in line before the first one starts, and no launch has a block for each multiprocessor, so that the next one
    finds room at once: the wait alone holds it back."""
    calls = [[torch.randn(1, 512, 4, dim, device="cuda") for _ in range(4)] for _ in range(30)]

    def run(tensors: list[torch.Tensor], backend: str) -> tuple[torch.Tensor, ...]:
        leaves = {name: t.detach().requires_grad_(name in wanted) for name, t in zip("qkv", tensors, strict=False)}
        out = strobe.attention(*leaves.values(), backend=backend)
        return torch.autograd.grad(out, [leaves[name] for name in wanted], tensors[3]) if wanted else (out,)

    run(calls[-1], "sm90")  # compiles
    torch.cuda._sleep(100_000_000)  # some 60 ms, longer than the calls below take on the host
    found = [run(tensors, "sm90") for tensors in calls]
    for tensors, results in zip(calls, found, strict=True):
        exact = run([t.double() for t in tensors], "tiled")
        for result, expected in zip(results, exact, strict=True):
            torch.testing.assert_close(result.double(), expected, atol=1e-4, rtol=0)


def test_sums_are_not_pulled_towards_zero() -> None:
    """The tensor cores would pull them: with many keys of like weights errors of one sign add up to a mean that is not
    far below the largest of them."""
    torch.manual_seed(0)
    q, k = (0.1 * torch.randn(1, 8192, 2, 128, device="cuda") for _ in range(2))
    v = 1 + torch.rand(1, 8192, 2, 128, device="cuda")
    out = strobe.attention(q, k, v, backend="sm90")[:, :256].double()
    exact = strobe.attention(q[:, :256].double(), k.double(), v.double(), backend="tiled")
    assert ((out - exact) / exact).mean().abs() < 5e-7
