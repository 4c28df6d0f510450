"""Users' functions at their edges: pairs that a mask hides, factors that are not positive, 32-bit integers, NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import strobe

BACKENDS = ["tiled", "reference", None]


def inputs(len_q: int = 6, len_k: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(2, n, 2, 8, dtype=torch.float64, generator=generator, requires_grad=True)
        for n in (len_q, len_k, len_k)
    ]


def dense(x: list[torch.Tensor], score: Callable[[torch.Tensor], torch.Tensor], seen: torch.Tensor) -> torch.Tensor:
    """`score` of the scores of visible pairs alone."""
    q, k, v = (t.transpose(1, 2) for t in x)
    s = q @ k.mT / q.shape[-1] ** 0.5
    return torch.where(seen, score(s), -torch.inf).softmax(-1).matmul(v).transpose(1, 2)


def gradients(out: torch.Tensor, x: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(6))
    return torch.autograd.grad((out * weights).sum(), x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_what_a_function_hides_stays_hidden_whatever_the_scale(scale: float, backend: str | None) -> None:
    x = inputs()
    seen = (torch.arange(6)[:, None] + torch.arange(8)) % 3 < 2
    found = strobe.attention(*x, mask=lambda b, h, q, k: (q - 2 + k) % 3 < 2, scale=scale, backend=backend)
    q, k, v = (t.transpose(1, 2) for t in x)
    expected = torch.where(seen, q @ k.mT * scale, -torch.inf).softmax(-1).matmul(v).transpose(1, 2)
    torch.testing.assert_close(found, expected)
    for f, e in zip(gradients(found, x), gradients(expected, x), strict=True):
        torch.testing.assert_close(f, e)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_infinite_slope_of_a_hidden_pair(backend: str | None) -> None:
    """1 / 0 where nobody sees."""
    x = inputs()
    rows, keys = torch.arange(6)[:, None] + 2, torch.arange(8)
    distance = (rows - keys).double()
    for mask, seen in ((lambda b, h, q, k: k < q, keys < rows), (lambda b, h, q, k: q != k, keys != rows)):
        found = strobe.attention(*x, mask=mask, score=lambda s, b, h, q, k: s / (q - k), backend=backend)
        expected = dense(x, lambda s, seen=seen: s / torch.where(seen, distance, 1.0), seen)
        torch.testing.assert_close(found, expected)
        for f, e in zip(gradients(found, x), gradients(expected, x), strict=True):
            torch.testing.assert_close(f, e)


def test_second_derivatives_beside_an_infinite_slope() -> None:
    x = [t[:1, :, :1].detach().requires_grad_() for t in inputs(3, 3)]

    def call(*x: torch.Tensor) -> torch.Tensor:
        return strobe.attention(*x, mask=lambda b, h, q, k: k < q, score=lambda s, b, h, q, k: s + s * s / (q - k))

    assert torch.autograd.gradgradcheck(call, x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_bias_says_nothing_of_hidden_pairs(value: float, backend: str | None) -> None:
    x, seen = inputs(), torch.arange(8) % 2 == 0
    bias = torch.randn(6, 8, dtype=torch.float64).masked_fill(~seen, value)
    found = strobe.attention(*x, mask=lambda b, h, q, k: k % 2 == 0, bias=bias, backend=backend)
    torch.testing.assert_close(found, dense(x, lambda s: s + bias, seen))
    assert all(g.isfinite().all() for g in gradients(found, x))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_vmap_counts_the_sequences_of_each_example(layout: str) -> None:
    examples = torch.randn(3, 2, 4, 4, 8, dtype=torch.float64)
    functions: list[dict[str, Any]] = [
        {"score": lambda s, b, h, q, k: torch.where(b == 1, s * 2, s)},
        {"mask": lambda b, h, q, k: (b == 0) | (k != 2)},
    ]
    for options in functions:
        call = lambda x, options=options: strobe.attention(x, x, x, layout=layout, **options)  # noqa: E731
        torch.testing.assert_close(torch.vmap(call)(examples), torch.stack([call(x) for x in examples]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_indexed_by_the_score(backend: str | None) -> None:
    x, table = inputs(), torch.randn(21, dtype=torch.float64)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return 2.0 * s + table[(s * 4.0).floor().int() + 10]

    expected = dense(x, lambda s: 2 * s + table[((s * 4).floor().long() + 10).clamp(0, 20)], torch.tensor(True))
    torch.testing.assert_close(strobe.attention(*x, score=score, backend=backend), expected)
    loads_only = dense(x, lambda s: (s * 3.0).tanh() + table[(s.floor().long() + 10).clamp(0, 20)], torch.tensor(True))
    found = strobe.attention(
        *x, score=lambda s, b, h, q, k: torch.tanh(s * 3.0) + table[s.floor().int() + 10], backend=backend
    )
    torch.testing.assert_close(found, loads_only)


def test_the_inverse_of_an_order_of_floats_lets_nan_through() -> None:
    limit = torch.tensor([1.0, torch.nan, 3.0])
    below = strobe.mask_function(lambda b, h, q, k: k.float() < limit[q])
    assert torch.equal((~below).dense(3, 3), ~below.dense(3, 3))
    inside = strobe.mask_function(lambda b, h, q, k: ~(k.float() < limit[q]))
    assert torch.equal(inside.dense(3, 3), ~below.dense(3, 3))
    integers = ~strobe.mask_function(lambda b, h, q, k: k < q)
    assert integers.rest is None  # still an interval


@pytest.mark.parametrize("backend", BACKENDS)
def test_integers_have_32_bits(backend: str | None) -> None:
    """Integers wrap around, as in kernels, unless something with 64 bits takes part."""
    x = inputs()
    rows, keys = torch.arange(6)[:, None] + 2, torch.arange(8)
    small = torch.tensor([100, 127, 5, 7, 11, 13, 17, 120], dtype=torch.int8)
    far, eight = (keys.int() * 900_000_000 < 0).expand(6, 8), small.int()[rows] + small.int()
    cases: list[tuple[Any, torch.Tensor]] = [
        (lambda b, h, q, k: k * 900_000_000 < 0, far),
        (lambda b, h, q, k: k.long() * 900_000_000 > 2_000_000_000, (keys * 900_000_000 > 2e9).expand(6, 8)),
        (lambda b, h, q, k: k * 3_000_000_000 > 8_000_000_000, (keys > 2).expand(6, 8)),
        (lambda b, h, q, k: small[q] + small[k] > 150, eight > 150),  # not 8 bits either
    ]
    for mask, seen in cases:
        found = strobe.attention(*x, mask=mask, backend=backend)
        expected = torch.where(seen.any(-1)[None, :, None, None], dense(x, lambda s: s, seen), 0.0)
        torch.testing.assert_close(found, expected)
        assert torch.equal(strobe.mask_function(mask).dense(6, 8), seen)


def test_slopes_at_zero_are_those_of_torch() -> None:
    q = torch.zeros(1, 1, 1, 4, dtype=torch.float64, requires_grad=True)
    k, v = torch.randn(2, 1, 3, 1, 4, dtype=torch.float64)
    functions: list[Callable[[Any], Any]] = [torch.abs, torch.relu, lambda s: (s + 0.0) ** 1.5]
    for function in functions:
        found = strobe.attention(q, k, v, score=lambda s, b, h, q, k, f=function: f(s) + k)
        expected = dense([q, k, v], lambda s, f=function: f(s) + torch.arange(3), torch.tensor(True))
        for f, e in zip(gradients(found, [q]), gradients(expected, [q]), strict=True):
            torch.testing.assert_close(f, e)


def test_a_power_of_zero_learns() -> None:
    x = [t.detach() for t in inputs()]
    exponent = torch.tensor([2.0, 0.5], dtype=torch.float64, requires_grad=True)
    found = strobe.attention(*x, score=lambda s, b, h, q, k: s + (q - k).abs().float() ** exponent[h])
    distance = (torch.arange(6)[:, None] + 2 - torch.arange(8)).abs().double()
    expected = dense(x, lambda s: s + distance ** exponent[:, None, None], torch.tensor(True))
    torch.testing.assert_close(gradients(found, [exponent]), gradients(expected, [exponent]))
    base = torch.tensor([0.5, 0.0], dtype=torch.float64, requires_grad=True)
    found = strobe.attention(*x, score=lambda s, b, h, q, k: s * base[h] ** (q - k).abs())
    expected = dense(x, lambda s: s * base[:, None, None] ** distance, torch.tensor(True))
    torch.testing.assert_close(gradients(found, [base]), gradients(expected, [base]))


def test_every_captured_tensor_is_read_at_every_call() -> None:
    x, factor, table, inner = inputs(), torch.ones(()), torch.ones(2), torch.ones(4, 2)
    functions = [
        lambda s, b, h, q, k: s * factor,
        lambda s, b, h, q, k: torch.where(q >= k, s * table[0], s),
        lambda s, b, h, q, k: s * table[h] + torch.tensor([1.0, 2.0]).mul(2)[h] * torch.tensor(0.5),
        lambda s, b, h, q, k: s * inner.t()[1:].detach()[0, b] + inner.unbind(1)[0][h],
    ]
    for function in functions:
        score = strobe.score_function(function)
        for _ in range(2):
            for t in (factor, table, inner):
                t.mul_(3.0)
            torch.testing.assert_close(strobe.attention(*x, score=score), strobe.attention(*x, score=function))


DERIVED: dict[str, tuple[Callable[[torch.Tensor], Callable[..., Any]], str]] = {
    "a product": (lambda t: lambda s, b, h, q, k: s * (2 * t)[h], "'mul' of a captured tensor of shape"),
    "of a view": (lambda t: lambda s, b, h, q, k: s * t[1:].sin()[0], "'sin' of a captured tensor of shape"),
    "a cast": (lambda t: lambda s, b, h, q, k: s * t.float()[h], "'_to_copy' of a captured"),
    "a number": (lambda t: lambda s, b, h, q, k: s * t[0].item(), "'_local_scalar_dense' of a captured"),
    "a branch": (lambda t: lambda s, b, h, q, k: s * 2 if t[0] > 0 else s, "'gt' of a captured tensor of shape"),
    "written": (lambda t: lambda s, b, h, q, k: s * torch.zeros(2).copy_(t)[h], "'copy_' of a captured tensor"),
}


@pytest.mark.parametrize("name", DERIVED)
def test_what_is_derived_from_a_captured_tensor_is_not_kept(name: str) -> None:
    """A function that is passed to a call is traced in it, and may derive what it likes."""
    x, table = inputs(), torch.rand(2, dtype=torch.float64) + 1
    make, message = DERIVED[name]
    function = make(table)
    before = strobe.attention(*x, score=function)
    with pytest.raises(TypeError, match=message):
        strobe.score_function(function)
    with pytest.raises(TypeError, match=message):
        strobe.mask_function(lambda b, h, q, k: function(1.0, b, h, q, k) > 0)
    table.neg_()
    assert not torch.equal(strobe.attention(*x, score=function), before)


def test_a_derived_tensor_has_a_gradient_in_every_step() -> None:
    x, gate = [t.detach() for t in inputs()], torch.zeros(2, requires_grad=True)
    for _ in range(2):
        out = strobe.attention(*x, score=lambda s, b, h, q, k: s + gate.exp()[h] * k)
        (found,) = torch.autograd.grad(out.square().sum(), gate)
        assert found.abs().sum() > 0


def test_a_value_of_an_earlier_trace_is_refused() -> None:
    """Its tensors have the numbers that they had there."""
    first, second, values = torch.ones(2), torch.zeros(2), []
    strobe.score_function(lambda s, b, h, q, k: values.append(first[h]) or s + first[h])
    with pytest.raises(TypeError, match="a value of another call of a function"):
        strobe.score_function(lambda s, b, h, q, k: s + second[h] + values[0])
    with pytest.raises(TypeError, match="a value of another call of a function"):
        strobe.mask_function(lambda b, h, q, k: torch.ones(3)[values[0].int()] > 0)


def test_a_power_of_integers_is_a_float() -> None:
    table = torch.ones(50)
    with pytest.raises(TypeError, match="an index is float; it must be an integer"):
        strobe.score_function(lambda s, b, h, q, k: s + table[k**2])
