"""Users' functions of scores and masks: traced, evaluated, differentiated, split into intervals, remembered and sent."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import function_cases
import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import strobe
import strobe.tiled
from strobe.backends import dispatch
from strobe.call.bound_call import remembered
from strobe.cuda.parts.print_score import Entries, printed
from strobe.problem import Problem, supposed
from strobe.variants.mask import parse_mask
from strobe.variants.score import Score


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("name", function_cases.CASES)
def test_against_plain_torch(name: str, backend: str) -> None:
    case = function_cases.small(function_cases.CASES[name])
    with strobe.tiled.block_sizes(32, 48):  # several tiles, some of them ragged
        function_cases.check(case, case.tensors(dtype=torch.float64), backend, 1e-6)


# ---- captured tensors that learn -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["tiled", "reference", None])
@pytest.mark.parametrize("name", function_cases.LEARNING)
def test_gradients_of_captured_tensors(name: str, backend: str | None) -> None:
    case = function_cases.small(function_cases.CASES[name])
    x, captured = case.tensors(dtype=torch.float64)
    captured = {n: t.double() if t.is_floating_point() else t for n, t in captured.items()}
    with strobe.tiled.block_sizes(32, 48):
        function_cases.check(case, (x, function_cases.learning(name, captured)), backend, 1e-6)


def test_a_captured_gradient_is_deterministic() -> None:
    q, k, v = (torch.randn(2, 130, 2, 16) for _ in range(3))
    table = torch.randn(2, 9, requires_grad=True)
    score = strobe.score_function(lambda s, b, h, q, k: s * table[h, (k - q) // 16 + 4])
    found = []
    for _ in range(3):
        out = strobe.attention(q, k, v, score=score, deterministic=True)
        found.append(torch.autograd.grad(out.square().sum(), table)[0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_derivatives_of_captured_tensors_in_every_order_and_transformation() -> None:
    torch.manual_seed(0)
    x = [torch.randn(2, n, h, 4, dtype=torch.float64, requires_grad=True) for n, h in ((3, 4), (5, 2), (5, 2))]
    table = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        score = lambda s, b, h, q, k: torch.tanh(s * table[h, k - q + 2]) + table[h, k]  # noqa: E731
        return strobe.attention(q, k, v, score=score, mask=lambda b, h, q, k: (k - q) % 3 < 2)

    assert torch.autograd.gradcheck(call, (*x, table)) and torch.autograd.gradgradcheck(call, (*x, table))
    wanted = torch.autograd.grad(call(*x, table).square().sum(), (*x, table))
    inside = torch.func.grad(lambda *a: call(*a).square().sum(), argnums=(0, 1, 2, 3))(*x, table)
    compiled = torch.autograd.grad(torch.compile(call, backend="aot_eager")(*x, table).square().sum(), (*x, table))
    for found in (inside, compiled):
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)


def test_gradients_of_captured_tensors_beside_a_bias() -> None:
    torch.manual_seed(0)
    x = [torch.randn(2, n, h, 4, dtype=torch.float64, requires_grad=True) for n, h in ((3, 4), (5, 2), (5, 2))]
    bias, table = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 3, 5), (4, 6)))

    def call(*x: torch.Tensor) -> torch.Tensor:
        score = lambda s, b, h, q, k: 2.0 * torch.tanh(s * x[4][h, k - q + 2])  # noqa: E731
        return strobe.attention(*x[:3], bias=x[3], score=score, sinks=torch.ones(4), return_lse=True)

    assert torch.autograd.gradcheck(call, (*x, bias, table))


def test_which_gradients_of_captured_tensors_kernels_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(dim: int = 64, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Problem:
        score, shape = strobe.alibi(torch.empty(4, device="meta")), (1, 64, 4, dim)
        return supposed(torch.device("cuda"), dtype, shape, shape, shape, ("q", "score0"), score=score, **options)

    def reason(family: str, problem: Problem) -> str | None:
        monkeypatch.setenv("STROBE_EMULATE", family)
        found = dispatch.get(family).lacks(problem)
        assert dispatch.get("emulator").lacks(problem) == found
        return found

    for family in ("sm90", "sm80"):
        assert reason(family, problem()) is None and reason(family, problem(128)) is None
        assert "deterministic gradients of tensors that" in str(reason(family, problem(deterministic=True)))
    assert "captures above head dim 128" in str(reason("sm90", problem(192)))
    assert reason("sm80", problem(192)) is None
    assert "captures with float32 inputs" in str(reason("sm90", problem(dtype=torch.float32)))
    huge = replace(problem().loads[0], strides=(1 << 16, 1, 0, 0, 1 << 15, 1 << 16, 0, 0))
    assert "2^31 numbers" in str(reason("sm90", replace(problem(), loads=(huge,))))
    for other in (problem(192), problem(deterministic=True), problem(dtype=torch.float32)):
        assert dispatch.get("tiled").supports(other) is None


# ---- intervals -------------------------------------------------------------------------------------------------------

IDS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3])
INTERVALS: dict[str, tuple[Callable[..., Any], str]] = {  # and how much of the function they are
    "causal": (lambda b, h, q, k: q >= k, "all"),
    "not before": (lambda b, h, q, k: ~(q < k), "all"),
    "window": (lambda b, h, q, k: (q >= k) & (q - k <= 3), "all"),
    "both sides": (lambda b, h, q, k: (q - k).abs() < 4, "all"),
    "limited": (lambda b, h, q, k: (k - q).abs() <= 4, "all"),
    "prefix": (lambda b, h, q, k: (k <= q) | (k < 3), "all"),
    "chunks": (lambda b, h, q, k: q // 4 == k // 4, "all"),
    "some keys": (lambda b, h, q, k: (k >= 2) & (k < 9), "all"),
    "not outside": (lambda b, h, q, k: ~((k > q + 1) | (k < q - 5)), "all"),
    "coarse rows": (lambda b, h, q, k: k <= q // 3 * 2 + 1, "all"),
    "everything": (lambda b, h, q, k: torch.ones((), dtype=torch.bool), "all"),
    "document": (lambda b, h, q, k: IDS[q] == IDS[k], "none"),
    "causal document": (lambda b, h, q, k: (q >= k) & (IDS[q] == IDS[k]), "some"),
    "dilated": (lambda b, h, q, k: ((q - k) % 3 == 0) & (q >= k), "some"),
    "moves left": (lambda b, h, q, k: k <= 9 - q, "none"),
    "some rows": (lambda b, h, q, k: q > 4, "none"),
    "not one": (lambda b, h, q, k: k != q, "none"),
    "far": (lambda b, h, q, k: (q - k).abs() > 3, "none"),
    "by head": (lambda b, h, q, k: k <= h, "none"),
    "a fraction": (lambda b, h, q, k: k <= 0.5 * q, "none"),
    "two sides": (lambda b, h, q, k: (k < 3) | (k > q), "none"),
    "rows of rows": (lambda b, h, q, k: k <= (q // 2 + 1) // 2, "none"),
    "nothing": (lambda b, h, q, k: torch.zeros((), dtype=torch.bool), "none"),
    "large numbers": (lambda b, h, q, k: k < (1 << 31) + q, "none"),
}


def dense(function: Callable[..., Any], len_q: int, len_k: int, batch: int = 2, heads: int = 3) -> torch.Tensor:
    b, h = torch.arange(batch).view(-1, 1, 1, 1), torch.arange(heads).view(-1, 1, 1)
    q, k = torch.arange(len_q).view(-1, 1) + (len_k - len_q), torch.arange(len_k)
    return torch.as_tensor(function(b, h, q, k)).expand(batch, heads, len_q, len_k)


@pytest.mark.parametrize("name", INTERVALS)
def test_what_is_an_interval(name: str) -> None:
    function, share = INTERVALS[name]
    traced = strobe.mask_function(function)
    found = "all" if traced.rest is None else "none" if traced.interval == strobe.full else "some"
    assert found == share
    for len_q, len_k in ((12, 12), (5, 12), (1, 12)):
        assert torch.equal(traced.dense(len_q, len_k, 2, 3), dense(function, len_q, len_k))
        lo, hi = traced.interval.bounds(torch.arange(len_q), len_q, len_k)
        assert (lo.diff() >= 0).all() and (hi.diff() >= 0).all()
        combined = {
            strobe.causal & traced: torch.ones(len_q, len_k).tril(len_k - len_q).bool() & dense(function, len_q, len_k),
            traced | strobe.window(1, 2): strobe.window(1, 2).dense(len_q, len_k) | dense(function, len_q, len_k),
            ~traced: ~dense(function, len_q, len_k),
        }
        for mask, expected in combined.items():
            assert torch.equal(mask.dense(len_q, len_k, 2, 3), expected), mask
    assert parse_mask(traced.interval.text()) == traced.interval


def test_functions_of_ours_are_recognised() -> None:
    """The functions become the same kernels."""
    same = {
        strobe.causal: lambda b, h, q, k: q >= k,
        strobe.window(7, 0): lambda b, h, q, k: (q >= k) & (q - k < 8),
        strobe.window(7, 2): lambda b, h, q, k: (k - q <= 2) & (q - 7 <= k),
        strobe.prefix(3): lambda b, h, q, k: (k <= q) | (k < 3),
        strobe.chunked(5): lambda b, h, q, k: k // 5 == q // 5,
    }
    for mask, function in same.items():
        found = strobe.mask_function(function)
        assert found.interval == mask and found.rest is None
    rows = strobe.mask_function(lambda b, h, q, k: q >= k, rows=True)  # FlexAttention counts rows from 0
    assert rows.interval == strobe.causal_top_left and rows.rest is None
    either = strobe.causal | strobe.window(None, 3)
    assert either.rest is None and torch.equal(either.dense(5, 9), strobe.window(None, 3).dense(5, 9))


_CONDITIONS = st.deferred(lambda: _COMPARISONS | st.tuples(st.sampled_from("&|"), _CONDITIONS, _CONDITIONS) | _NEGATED)
_NEGATED = st.tuples(st.just("~"), st.deferred(lambda: _CONDITIONS))
_COMPARISONS = st.tuples(
    st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]),
    st.integers(-2, 2),  # of q
    st.integers(-2, 2),  # of k
    st.integers(-9, 9),
    st.sampled_from([1, 1, 2, 3]),  # q is divided by it
    st.booleans(),  # of the absolute value
)


def _evaluated(condition: Any, q: Any, k: Any) -> Any:
    op, *rest = condition
    if op == "~":
        return ~_evaluated(rest[0], q, k)
    if op in "&|":
        a, b = (_evaluated(c, q, k) for c in rest)
        return a & b if op == "&" else a | b
    of_q, of_k, number, divisor, absolute = rest
    x = of_q * (q if divisor == 1 else q // divisor)
    for _ in range(abs(of_k)):
        x = x + k if of_k > 0 else x - k
    x = x + 0 * k  # a number, if q and k are without effect
    return getattr(torch, op)(x.abs() if absolute else x, number)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(_CONDITIONS, st.integers(1, 9), st.integers(1, 9))
def test_linear_conditions_are_split_exactly(condition: Any, len_q: int, len_k: int) -> None:
    def function(b: Any, h: Any, q: Any, k: Any) -> Any:
        return _evaluated(condition, q, k)

    traced = strobe.mask_function(function)
    assert torch.equal(traced.dense(len_q, len_k), dense(function, len_q, len_k, 1, 1)[0, 0])
    lo, hi = traced.interval.bounds(torch.arange(len_q), len_q, len_k)
    assert (lo.diff() >= 0).all() and (hi.diff() >= 0).all()


# ---- what cannot be traced -------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "if": (lambda s, b, h, q, k: s if q >= k else -s, "whether a value is true"),
    "max": (lambda s, b, h, q, k: s + max(q, k), "whether a value is true"),
    "and": (lambda s, b, h, q, k: torch.where(q > 2 and k > 2, s, 0.0), "whether a value is true"),
    "math": (lambda s, b, h, q, k: s + math.log(q), "asks for a number"),
    "item": (lambda s, b, h, q, k: s + q.item(), "asks for a number"),
    "list": (lambda s, b, h, q, k: s + [1.0, 2.0][h], "asks for a number"),
    "iterate": (lambda s, b, h, q, k: sum(x for x in s), "asks for a number"),
    "unknown": (lambda s, b, h, q, k: torch.cumsum(s, 0), "'cumsum' cannot be part of a kernel"),
    "method": (lambda s, b, h, q, k: s.bernoulli(), "'bernoulli' cannot be part of a kernel"),
    "in place": (lambda s, b, h, q, k: s.add_(1), "'add_' cannot be part of a kernel"),
    "keyword": (lambda s, b, h, q, k: torch.add(s, q, alpha=2), "add with alpha="),
    "operands": (lambda s, b, h, q, k: s.round(2), "round of 2 operands"),
    "whole tensor": (lambda s, b, h, q, k: s + torch.ones(3), "shape (3,) has 0 indices"),
    "row": (lambda s, b, h, q, k: s + torch.ones(3, 4)[h], "shape (3, 4) has 1 indices"),
    "too many": (lambda s, b, h, q, k: s + torch.ones(3)[h, q], "1 axes has 2 indices"),
    "slice": (lambda s, b, h, q, k: s + torch.ones(3, 4)[h, :], "no slices"),
    "float index": (lambda s, b, h, q, k: s + torch.ones(3)[q / 2], "an index is float"),
    "dtype": (lambda s, b, h, q, k: s + torch.ones(3, dtype=torch.complex64)[h], "complex64"),
    "half": (lambda s, b, h, q, k: s.to(torch.complex64), "to() takes a dtype"),
    "stack": (lambda s, b, h, q, k: torch.stack([s, s]).sum(), "'stack'"),
    "text": (lambda s, b, h, q, k: s * "2", "a str takes part"),
    "bits": (lambda s, b, h, q, k: s & 1, "'&' of a float"),
    "zero": (lambda s, b, h, q, k: s + q // 0, "divided by 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_names_the_operation_and_the_line(name: str) -> None:
    function, what = WRONG[name]
    with pytest.raises(TypeError) as caught:
        strobe.score_function(function)
    assert what in str(caught.value) and f'"{name}": (lambda' in str(caught.value)


def test_errors_of_the_function_itself_say_what_it_was_called_with() -> None:
    slopes = torch.ones(2).numpy()
    with pytest.raises(IndexError) as caught:
        strobe.score_function(lambda s, b, h, q, k: s + slopes[h])
    assert "symbols for (score, b, h, q, k)" in caught.value.__notes__[0]


def test_wrong_arguments_of_functions() -> None:
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    with pytest.raises(TypeError, match="a mask function takes .b, h, q, k."):
        strobe.attention(q, k, v, mask=lambda q, k: q >= k)
    with pytest.raises(TypeError, match="a score function takes .score, b, h, q, k."):
        strobe.attention(q, k, v, score=lambda b, h, q, k: q - k)
    with pytest.raises(TypeError, match="must return a bool"):
        strobe.attention(q, k, v, mask=lambda b, h, q, k: q - k)
    for wrong in (lambda s, b, h, q, k: q >= k, lambda s, b, h, q, k: None):
        with pytest.raises(TypeError, match=r"must return a number .a condition goes in mask=.*\n.*test_functions.py"):
            strobe.attention(q, k, v, score=wrong)
    few, elsewhere = torch.ones(1), torch.ones(9, device="meta")
    with pytest.raises(ValueError, match="axis 0 is for 2 heads"):
        strobe.attention(q, k, v, score=lambda s, b, h, q, k: s * few[h])
    ids = torch.zeros(2, 3, dtype=torch.int32)
    for mask in (strobe.documents(ids), strobe.documents(ids[0]), lambda b, h, q, k: ids[b, k] == 0):
        with pytest.raises(ValueError, match=r"has shape \((2, )?3,?\); axis [01] is for 4 (keys|positions)"):
            strobe.attention(q, k, v, mask=mask)
    with pytest.raises(ValueError, match="axis 0 is for 4 queries"):
        strobe.attention(q, k, v, mask=strobe.mask_function(lambda b, h, q, k: ids[0][q] == 0, rows=True))
    with pytest.raises(ValueError, match="softcap and score cannot be given together"):
        strobe.attention(q, k, v, score=lambda s, b, h, q, k: s, softcap=3.0)
    with pytest.raises(ValueError, match="is on meta, q is on cpu"):
        strobe.attention(q, k, v, mask=lambda b, h, q, k: elsewhere[k] > 0)


# ---- remembered and sent ---------------------------------------------------------------------------------------------


def _made(cap: float, table: torch.Tensor, window: int) -> Score:
    score = strobe.score_function(lambda s, b, h, q, k: cap * torch.tanh(s / cap) + table[h, k - q + window])
    mask = strobe.mask_function(lambda b, h, q, k: (q + k) % 3 < window)
    return score.hiding(mask)


def test_numbers_and_tensors_change_no_text() -> None:
    entries = [Entries("score0", "float", False)]
    a, b = _made(30.0, torch.ones(4, 9), 4), _made(50.0, torch.ones(2, 7), 3)
    first, second = printed(a, entries), printed(b, entries)
    assert first.text == second.text
    assert all(x != y for x, y in zip(first.numbers(1.0), second.numbers(1.0), strict=True))
    assert a.structure != b.structure
    again = _made(30.0, torch.ones(2, 5), 4)
    assert a.structure == again.structure and hash(a.structure) == hash(again.structure) and a != again


def test_repeated_calls_are_remembered() -> None:
    q, k, v = (torch.randn(1, 12, 2, 8) for _ in range(3))
    remembered.calls.clear()
    for i in range(3):
        table, ids = torch.randn(2, 30), IDS + i
        strobe.attention(
            q,
            k,
            v,
            score=lambda s, b, h, q, k, t=table: s + t[h, k - q + 11],
            mask=lambda b, h, q, k, i=ids: i[q] == i[k],
        )
    assert len(remembered.calls) == 1


def test_pickled_functions_are_the_same() -> None:
    score, mask = _made(3.0, torch.randn(2, 9), 4), strobe.causal & strobe.mask_function(INTERVALS["document"][0])
    other, hidden = pickle.loads(pickle.dumps((score, mask)))
    assert other.expr == score.expr and torch.equal(other.tensors[0], score.tensors[0]) and other.name == score.name
    assert torch.equal(hidden.dense(12, 12), mask.dense(12, 12)) and repr(hidden) == repr(mask)


def test_functions_in_a_compiled_function() -> None:
    q, k, v = (torch.randn(1, 12, 2, 8) for _ in range(3))
    table = torch.randn(2, 30)
    score = strobe.score_function(lambda s, b, h, q, k: s * 0.5 + table[h, k - q + 11])
    mask = strobe.causal & strobe.mask_function(INTERVALS["document"][0])

    def traced_before(q: torch.Tensor) -> torch.Tensor:
        return strobe.attention(q * 2, k, v, score=score, mask=mask) + 1

    def bare(q: torch.Tensor) -> torch.Tensor:
        return strobe.attention(q * 2, k, v, score=lambda s, b, h, q, k: s * 0.5 + table[h, k - q + 11], mask=mask) + 1

    expected = traced_before(q)
    torch.testing.assert_close(torch.compile(traced_before, fullgraph=True, backend="eager")(q), expected)
    torch.testing.assert_close(torch.compile(bare, backend="eager")(q), expected)


def test_functions_in_an_exported_graph() -> None:
    q, k, v = (torch.randn(1, 12, 2, 8) for _ in range(3))
    table = torch.randn(2, 30)

    class Module(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return strobe.attention(q, k, v, score=score, mask=mask)

    score = strobe.score_function(lambda s, b, h, q, k: s + table[h, (k - q) // 2 + 5])
    mask = strobe.mask_function(INTERVALS["causal document"][0])
    exported = torch.export.export(Module(), (q, k, v))
    torch.testing.assert_close(exported.module()(q, k, v), Module()(q, k, v))


def test_explain_takes_functions() -> None:
    q, k, v = (torch.randn(1, 12, 2, 8) for _ in range(3))
    found = strobe.explain(q, k, v, mask=lambda b, h, q, k: q >= k, score=lambda s, b, h, q, k: s * 2)
    assert found.backend == "tiled" and "causal" not in found.problem


def test_scores_that_look_at_little() -> None:
    """The scores look at nothing but the positions, or at nothing at all."""
    q, k, v = (torch.randn(2, 5, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for function in (lambda s, b, h, q, k: 0.25, lambda s, b, h, q, k: 0.1 * q - 0.2 * k, lambda s, b, h, q, k: s + s):
        found = [strobe.attention(q, k, v, score=function, backend=name) for name in ("tiled", "reference")]
        torch.testing.assert_close(*found)
        gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in found]
        twice = torch.autograd.gradcheck(lambda *x, f=function: strobe.attention(*x, score=f), (q, k, v))
        assert twice
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)
