"""Users' score and mask functions in the kernels, against fp64."""

from __future__ import annotations

from dataclasses import replace

import function_cases
import pytest
import torch
from gpu.kernels import hopper

import strobe
from strobe.backends import dispatch
from strobe.backends.backend import Backend
from strobe.problem import Problem

BACKENDS = [pytest.param("sm90", marks=pytest.mark.skipif(not hopper(), reason="not a Hopper GPU")), "sm80"]
LONG = {
    "alibi": (1000, 1500),
    "packed": (700, 900),
    "rounding": (1000, 1000),
    "mask_causal_document": (1024, 1024),
    "mask_neighbourhood": (1024, 1024),
    "mask_late": (500, 700),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [*function_cases.CASES, *(f"{name} long" for name in LONG)])
def test_against_plain_torch(name: str, backend: str) -> None:
    short, _, long = name.partition(" ")
    case = function_cases.CASES[short]
    if long:
        case = replace(case, len_q=LONG[short][0], len_k=LONG[short][1])
    function_cases.check(case, case.tensors("cuda"), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [*function_cases.LEARNING, "alibi long", "relative long", "several long"])
def test_gradients_of_captured_tensors(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels compute them: no backward pass goes to another backend."""
    monkeypatch.setattr(dispatch, "choose_backward", _checked)
    short, _, long = name.partition(" ")
    case = function_cases.CASES[short]
    if long:
        case = replace(case, len_q=1000, len_k=1500)
    x, captured = case.tensors("cuda")
    for _ in range(2):
        function_cases.check(case, (x, function_cases.learning(short, captured)), backend)


def _checked(problem: Problem, forward: Backend) -> Backend:
    assert forward.supports(problem) is None
    return forward


@pytest.mark.parametrize("dim", [64, 256])
def test_who_computes_gradients_of_captured_tensors(dim: int) -> None:
    q, k, v = (torch.randn(1, 256, 4, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    table = torch.zeros(4, 511, device="cuda", requires_grad=True)
    for deterministic in (False, True):
        found = strobe.explain(q, k, v, score=strobe.relative_bias(table), deterministic=deterministic)
        by_kernels = "sm90" if hopper() and dim == 64 else "sm80"
        assert found.backward == ("tiled" if deterministic else by_kernels)


def test_a_second_step_learns_from_other_numbers() -> None:
    """Each backward pass begins with zeros."""
    q, k, v = (torch.randn(1, 200, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    table = torch.randn(4, 399, device="cuda", requires_grad=True)
    for _ in range(3):
        gradients = []
        for backend in (None, "tiled"):
            out = strobe.attention(q, k, v, score=strobe.relative_bias(table), backend=backend)
            gradients.append(torch.autograd.grad(out.float().square().sum(), table)[0])
        assert (gradients[0] - gradients[1]).abs().max() <= 0.02 * gradients[1].abs().max()
        with torch.no_grad():
            table += 0.1 * gradients[0]


def test_kernels_are_chosen() -> None:
    q, k, v = (torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ids = torch.arange(256, device="cuda") // 60
    functions = {
        "score": lambda s, b, h, q, k: s - 0.1 * (q - k).abs(),
        "mask": lambda b, h, q, k: ids[q] == ids[k],
    }
    for name, function in functions.items():
        assert strobe.explain(q, k, v, **{name: function}).backend in ("sm90", "sm80"), name


def test_a_second_call_sees_other_tensors_and_numbers() -> None:
    """Repeated calls are launched with new addresses, and numbers are arguments of the same kernel."""
    q, k, v = (torch.randn(1, 200, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for i in range(3):
        ids, table = torch.arange(200, device="cuda") // (30 + i), torch.randn(4, 399, device="cuda")
        options = {
            "mask": strobe.mask_function(lambda b, h, q, k, ids=ids: ids[q] == ids[k]),
            "score": strobe.score_function(lambda s, b, h, q, k, t=table, i=i: 0.5 * (i + 1) * s + t[h, k - q + 199]),
        }
        found = strobe.attention(q, k, v, **options)
        exact = strobe.attention(q.float(), k.float(), v.float(), **options)
        assert (found.float() - exact).abs().max() < 0.03
