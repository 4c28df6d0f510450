"""First and second derivatives, through both results, of every argument that has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import CASES, Case
from everyday import everyday
from oracle import attend, finite_part, prepare, with_leaves

import strobe
from strobe.backends import dispatch, reference
from strobe.problem import Problem
from strobe.problem.arguments import Inputs
from strobe.tiled import block_sizes
from strobe.variants.mask import causal
from strobe.variants.ready_made import window

TILED, ATEN = "tiled", "aten_cpu"

TINY = [
    Case("plain", 3, 4, batch=1, heads=1, heads_k=1, dim=2),
    Case("group_causal", 3, 5, batch=1, heads=4, heads_k=2, dim=3, dim_v=2, mask=causal),
    Case("empty_rows", 5, 3, batch=2, heads=1, heads_k=1, dim=2, mask=causal),
    Case("mask_tensor", 3, 4, batch=2, heads=2, heads_k=1, dim=2, mask_tensor=(2, 1, 3, 4)),
    Case("bias_row", 3, 4, batch=2, heads=2, heads_k=2, dim=2, bias=(1, 2, 1, 4)),
    Case("softcap", 3, 4, batch=1, heads=1, heads_k=1, dim=2, softcap=0.7),
    Case("sinks", 4, 3, batch=2, heads=2, heads_k=1, dim=2, sinks=True, mask=causal),
    Case("dropout", 4, 5, batch=1, heads=2, heads_k=2, dim=2, dropout=0.4),
    Case(
        "all",
        4,
        5,
        batch=1,
        heads=2,
        heads_k=1,
        dim=2,
        dim_v=3,
        mask=window(2, 1),
        bias=(1, 2, 4, 5),
        softcap=1.5,
        sinks=True,
        dropout=0.3,
    ),
    Case(
        "packed",
        0,
        0,
        heads=2,
        heads_k=1,
        dim=2,
        mask=causal,
        lengths=((2, 3), (0, 2), (3, 2)),
        sinks=True,
        bias=(3, 1, 3, 3),
    ),
]


def as_function(backend: str, p: Problem, inputs: Inputs) -> tuple[Callable, tuple[torch.Tensor, ...]]:
    """Return a function of the leaves that there are, in their order; small tiles are forced by the caller."""
    held, leaves = with_leaves(inputs)
    present = [name for name in ("q", "k", "v", "bias", "sinks") if getattr(held, name) is not None]

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = {name: None for name in ("q", "k", "v", "bias", "sinks")} | dict(zip(present, tensors, strict=True))
        out, lse = attend(p, inputs._replace(**given), backend)
        return out, finite_part(lse)

    return function, tuple(leaves)


@pytest.mark.parametrize("case", TINY, ids=str)
def test_gradcheck(case: Case) -> None:
    function, leaves = as_function(TILED, *prepare(case, torch.float64))
    with block_sizes(2, 2):
        assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("jacobian", everyday(["projected", "whole"], ["projected"]))
@pytest.mark.parametrize("case", TINY, ids=str)
def test_gradgradcheck(case: Case, jacobian: str) -> None:
    """A random projection of the Jacobian takes a tenth of the time of all its columns."""
    function, leaves = as_function(TILED, *prepare(case, torch.float64))
    with block_sizes(2, 2):
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=jacobian == "projected")


@pytest.mark.parametrize("name", ["plain", "top_left", "mask_padding"])
def test_aten_cpu_first_and_second(name: str) -> None:
    case = Case(
        name,
        3,
        4,
        batch=1,
        heads=2,
        heads_k=1,
        dim=2,
        **{k: getattr(by_name(name), k) for k in ("mask",)},
        mask_tensor=(1, 1, 1, 4) if name == "mask_padding" else None,
    )
    p, inputs = prepare(case, torch.float64)
    assert dispatch.get(ATEN).supports(p) is None
    function, leaves = as_function(ATEN, p, inputs)
    assert torch.autograd.gradcheck(function, leaves) and torch.autograd.gradgradcheck(function, leaves)


def by_name(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def test_second_derivatives_of_larger_blocks() -> None:
    """Several blocks of rows and several slabs add up to what PyTorch finds in one piece."""
    p, inputs = prepare(by_name("everything"), torch.float64)
    results = []
    for compute in (lambda held: attend(p, held), lambda held: reference.attention(p, held)):
        held, leaves = with_leaves(inputs)
        out, lse = compute(held)
        first = torch.autograd.grad(out.square().sum() + finite_part(lse).sin().sum(), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    torch.testing.assert_close(results[0], results[1], atol=1e-9, rtol=1e-9)


def test_only_what_is_asked_for() -> None:
    p, inputs = prepare(by_name("bias"), torch.float32)
    held, _ = with_leaves(inputs)
    held = held._replace(q=held.q.detach(), bias=held.bias.detach())
    out, lse = attend(p, held)
    assert out.requires_grad and lse.requires_grad
    (out.sum() + lse.sum()).backward()
    assert held.q.grad is None and held.bias.grad is None and held.k.grad is not None and held.v.grad is not None


@pytest.mark.parametrize("which", [0, 1])
def test_through_one_result_only(which: int) -> None:
    p, inputs = prepare(by_name("ragged_causal"), torch.float64)
    held, leaves = with_leaves(inputs)
    found = torch.autograd.grad(attend(p, held)[which].square().sum(), leaves, allow_unused=True)
    held, leaves = with_leaves(inputs)
    expected = torch.autograd.grad(reference.attention(p, held)[which].square().sum(), leaves, allow_unused=True)
    for g, e, t in zip(found, expected, leaves, strict=True):
        torch.testing.assert_close(torch.zeros_like(t) if g is None else g, torch.zeros_like(t) if e is None else e)


@pytest.mark.parametrize("which", [0, 1])
def test_second_derivatives_through_one_result_only(which: int) -> None:
    """The gradient of the other one is no tensor that could be differentiated."""
    p, inputs = prepare(by_name("ragged_causal"), torch.float64)
    results = []
    for compute in (attend, reference.attention):
        held, (q, k, _) = with_leaves(inputs)
        first = torch.autograd.grad(finite_part(compute(p, held)[which]).sin().sum(), (q, k), create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), (q, k)))
    torch.testing.assert_close(results[0], results[1], atol=1e-9, rtol=1e-9)


def test_no_graph_without_grad() -> None:
    p, inputs = prepare(by_name("plain"), torch.float32)
    out, lse = attend(p, inputs)
    assert not out.requires_grad and not lse.requires_grad


def test_third_derivatives_are_refused() -> None:
    p, inputs = prepare(TINY[0], torch.float64)
    held, (q, *_) = with_leaves(inputs)
    x = attend(p, held)[0].square().sum()
    for _ in range(2):
        (g,) = torch.autograd.grad(x, q, create_graph=True)
        x = g.square().sum()
    with pytest.raises(strobe.Unsupported, match="no third"):
        torch.autograd.grad(x, q)


def test_a_call_without_its_lse_has_the_same_derivatives() -> None:
    """Autograd does not see an LSE that is not returned."""
    q, k, v = (torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def attention(*leaves: torch.Tensor) -> torch.Tensor:
        return strobe.attention(*leaves, mask=causal)

    out, lse = strobe.attention(q, k, v, mask=causal, return_lse=True)
    expected = torch.autograd.grad(out.sum(), (q, k, v))
    for found, gradient in zip(torch.autograd.grad(attention(q, k, v).sum(), (q, k, v)), expected, strict=True):
        assert torch.equal(found, gradient)
    assert lse.requires_grad
    assert torch.autograd.gradcheck(attention, (q, k, v))
    assert torch.autograd.gradgradcheck(attention, (q, k, v))
