"""What functions may call, one by one, against torch: values and slopes, of floats, integers and rows of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import flex_attention as flex

import strobe
from strobe.variants.expression import WORKING_DTYPE

AT = torch.linspace(-9.0, 9.0, 73, dtype=torch.float64)  # with -3, 0, 3 and 6, where activations have kinks
WHOLE = torch.arange(-7, 8)
EDGES = torch.tensor([-2.5, 0.0, 3.0, 6.0], dtype=torch.float64)


def evaluated(function: Callable[..., Any], s: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The traced function of a score and of a key, and its derivative."""
    score = strobe.score_function(lambda s, b, h, q, k: function(s, k), rows=True)
    env: dict[Any, Any] = {"s": s, "k": k, WORKING_DTYPE: s.dtype, **dict(enumerate(score.tensors))}
    value, slope = score.expr.evaluate(env), score.derivative.evaluate(env)
    return (torch.as_tensor(x, dtype=s.dtype).expand(torch.broadcast_shapes(s.shape, k.shape)) for x in (value, slope))


OF_FLOATS: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(functional, name) for name in (
        "gelu", "elu", "leaky_relu", "mish", "hardswish", "hardsigmoid", "logsigmoid", "relu6", "relu", "silu", "softplus",
        "hardtanh",
    )},
    **{name: getattr(torch, name) for name in ("tan", "expm1", "exp2", "sign", "square")},
    "gelu of tanh": lambda s: functional.gelu(s, approximate="tanh"),
    "elu of 2": lambda s: functional.elu(s, alpha=2.0),
    "leaky": lambda s: functional.leaky_relu(s, 0.2),
    "softplus of 2": lambda s: functional.softplus(s, beta=2.0),
    "fmod": lambda s: torch.fmod(s, 2.5),
    "fmod of a negative": lambda s: s.fmod(-2.5),
    "div": lambda s: torch.div(s, 3.0) + s.div(2.0, rounding_mode="floor") + torch.div(s, 0.7, rounding_mode="trunc"),
    "type_as": lambda s: s + (s > 0).type_as(s),
    "isin": lambda s: s + torch.isin(s, EDGES) + torch.isin(s, EDGES, invert=True) * 2,
    "bucketize": lambda s: s + torch.bucketize(s, EDGES) + 10.0 * torch.bucketize(s, EDGES, right=True),
    "ones": lambda s: s * torch.ones_like(s, dtype=torch.int32) + torch.zeros_like(s) + torch.full_like(s, 0.25),
    "new": lambda s: s * s.new_ones(()) + s.new_full((), 0.1) + s.new_zeros(size=(), dtype=torch.bool),
    "as_tensor": lambda s: torch.as_tensor(s) + torch.as_tensor(s, dtype=torch.int32),
    "the power 0": lambda s: s**0 + 0 * s**0.0 + s,
    "bool + bool": lambda s: s + ((s > 0) + (s > 1)) * 1.0 + ((s > 0) * (s < 2)) * 2.0,
    "a double": lambda s: s.clamp(-0.1, 0.7) + torch.minimum(s, torch.tensor(0.3, dtype=torch.float64)),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_FLOATS)
def test_an_operation_of_a_score(name: str) -> None:
    s = AT.clone().requires_grad_()
    expected = OF_FLOATS[name](s)
    value, slope = evaluated(lambda s, k: OF_FLOATS[name](s), AT, torch.zeros((), dtype=torch.int64))
    torch.testing.assert_close(value, expected.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(slope, torch.autograd.grad(expected.sum(), s)[0], rtol=1e-8, atol=1e-8)


OF_INTEGERS: dict[str, Callable[[Any], Any]] = {
    "fmod": lambda k: torch.fmod(k, 3) + 10 * torch.fmod(k, -3),
    "trunc": lambda k: torch.div(k, 3, rounding_mode="trunc") + 100 * k.div(-2, rounding_mode="trunc"),
    "floor": lambda k: torch.div(k, 3, rounding_mode="floor"),
    "rounded already": lambda k: k.floor() // 2 + torch.round(k),
    "type_as": lambda k: (k * 0.4).type_as(k),
    "isin": lambda k: torch.isin(k, torch.tensor([2, 5])).int() + k,
    "relu6": functional.relu6,
    "bits of bools": lambda k: ((k > 0) + (k > 2)).int() + (torch.as_tensor(k > 1) ^ (k > 3)) * 4,
    "sign": lambda k: torch.sign(k) + torch.sign(k > 0),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_an_operation_of_a_position(name: str) -> None:
    value, _ = evaluated(lambda s, k: s * 0.0 + OF_INTEGERS[name](k), torch.zeros((), dtype=torch.float64), WHOLE)
    torch.testing.assert_close(value, OF_INTEGERS[name](WHOLE).double())


POINTS = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
OF_ROWS: dict[str, Callable[[Any, Any], Any]] = {
    "distance": lambda q, k: (POINTS[q] - POINTS[k]).norm(dim=-1),
    "distance of linalg": lambda q, k: torch.linalg.norm(POINTS[q] - POINTS[k], dim=-1),
    "squares": lambda q, k: (POINTS[q, :] - POINTS[k, ...]).square().sum(-1),
    "product": lambda q, k: (POINTS[q] * POINTS[k]).sum(dim=-1) * 0.5 + POINTS[q].abs().amax(-1),
    "weights": lambda q, k: (POINTS[q] * WEIGHTS - POINTS[k]).mean(-1),
    "where": lambda q, k: torch.where(POINTS[q] > POINTS[k], 1.0, 0.25).sum(-1),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_an_operation_of_rows(name: str) -> None:
    q, k = torch.arange(9)[:, None], torch.arange(9)
    score = strobe.score_function(lambda s, b, h, q, k: s + OF_ROWS[name](q, k), rows=True)
    env = {"s": 0.0, "q": q, "k": k, WORKING_DTYPE: torch.float64, **dict(enumerate(score.tensors))}
    torch.testing.assert_close(score.expr.evaluate(env), OF_ROWS[name](q, k).double())


def test_a_dot_of_two_rows() -> None:
    score = strobe.score_function(lambda s, b, h, q, k: s + torch.dot(POINTS[q], POINTS[k]) + POINTS[q] @ WEIGHTS)
    env = {"s": 0.0, "q": torch.arange(9)[:, None], "k": torch.arange(9), "len_q": 9, "len_k": 9}
    env |= {WORKING_DTYPE: torch.float64, **dict(enumerate(score.tensors))}
    torch.testing.assert_close(score.expr.evaluate(env), POINTS @ POINTS.T + (POINTS @ WEIGHTS)[:, None])


def test_a_distance_learns_where_it_is_zero() -> None:
    points = POINTS[:6].clone().requires_grad_()
    x = [torch.randn(1, 6, 1, 4, dtype=torch.float64) for _ in range(3)]
    out = strobe.attention(*x, score=lambda s, b, h, q, k: s - (points[q] - points[k]).norm(dim=-1))
    q, k, v = (t.transpose(1, 2) for t in x)
    expected = (q @ k.mT / 2 - (points[:, None] - points).norm(dim=-1)).softmax(-1).matmul(v).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    gradients = (torch.autograd.grad(o.square().sum(), points)[0] for o in (out, expected))
    torch.testing.assert_close(*gradients)


def test_masks_that_pytorch_combines() -> None:
    """`and_masks` and `or_masks` begin with a tensor that they make of b."""
    causal: Callable[..., Any] = lambda b, h, q, k: q >= k  # noqa: E731
    near: Callable[..., Any] = lambda b, h, q, k: q - k < 4  # noqa: E731
    odd: Callable[..., Any] = lambda b, h, q, k: k % 2 == 1  # noqa: E731
    both = strobe.mask_function(flex.and_masks(causal, near))
    assert both == strobe.causal & strobe.window(3, None) and both.rest is None
    assert strobe.mask_function(flex.or_masks(causal, lambda b, h, q, k: k < 3)).interval == strobe.prefix(3)
    assert strobe.mask_function(flex.noop_mask) == strobe.full
    either = strobe.mask_function(flex.or_masks(flex.and_masks(causal, odd), near)).dense(12, 12)
    q, k = torch.arange(12)[:, None], torch.arange(12)
    assert torch.equal(either, ((q >= k) & (k % 2 == 1)) | (q - k < 4))
    assert not strobe.mask_function(flex.or_masks()).dense(3, 3).any()


LARGE = torch.ones(9, 40)
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a long row": (lambda s, q: s + (LARGE[q] * LARGE[q]).sum(-1), "to a last axis of 32 numbers at most"),
    "a truth": (lambda s, q: s if POINTS[q] else 0.0, "whether a value is true"),
    "an equality": (lambda s, q: s + (POINTS[q] == 0.5), "a row of 3 numbers stands where one number is needed"),
    "an equality of two axes": (lambda s, q: s + (torch.ones(2, 3, 4)[q] == 0.5), "has 1 indices"),
    "a row": (lambda s, q: POINTS[q], "a row of 3 numbers stands where one number is needed"),
    "rows of other lengths": (lambda s, q: (POINTS[q] + torch.ones(4)).sum(), "rows of 3 and 4 numbers"),
    "a dot of other lengths": (lambda s, q: torch.dot(POINTS[q], torch.ones(4)), "rows of 3 and 4 numbers"),
    "an axis": (lambda s, q: s + POINTS[q].sum(-2), "takes nothing but dim=-1"),
    "minus a bool": (lambda s, q: s + -(q > 2), "'neg' of a bool"),
    "a bool less": (lambda s, q: s + (1 - (q > 2)), "'-' of a bool"),
    "a quotient of bools": (lambda s, q: s + (q > 2) // (q > 1), "'//' of a bool"),
    "a shape": (lambda s, q: s.new_ones((3,)), "makes a tensor of shape (3,)"),
    "a complex one": (lambda s, q: s.new_ones((), dtype=torch.complex64), "torch.complex64"),
    "torch's own refusal": (lambda s, q: torch.minimum(s, 2.0), "must be Tensor, not float"),
    "numpy": (lambda s, q: s + torch.ones(9).numpy()[q], "asks for a number"),
    "an argument": (lambda s, q: functional.gelu(s, exact=True), "exact"),
    "the index of an entry": (lambda s, q: s + torch.ones(3, 4)[q, 4], "index 4 is out of bounds for axis 1 of 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_unsupported_and_a_type_error(name: str) -> None:
    function, what = REFUSED[name]
    with pytest.raises(strobe.Unsupported) as caught:
        strobe.score_function(lambda s, b, h, q, k: function(s, q))
    assert isinstance(caught.value, TypeError) and what in str(caught.value) and __file__ in str(caught.value)


def test_a_power_of_zero() -> None:
    """0 ** 0 is 1, with an exponent that is known or not."""
    exponents, finite = torch.tensor([0.0, 1.0, 2.0]), torch.zeros(3, dtype=torch.float64)
    value, _ = evaluated(lambda s, k: s ** exponents[k], finite, torch.arange(3))
    assert value.tolist() == [1.0, 0.0, 0.0] and math.isfinite(float(value.sum()))
