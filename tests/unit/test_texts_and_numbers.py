"""Numbers travel beside the texts that refer to them: of kernels, of graphs, of ranks. Two calls that differ in numbers alone,
in which of these are equal, or in what captured tensors hold, have results of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import strobe
from strobe.call.bound_call import remembered
from strobe.cuda.parts import print_condition
from strobe.cuda.parts.print_score import printed
from strobe.cuda.plans.families import FAMILIES
from strobe.problem import supposed
from strobe.variants.score import Score, parse_score

Function = Callable[..., Any]
SCALE = 0.125
# Equal to one another, to the scale, to its inverse; and 0 with both signs, which are equal as numbers.
PAIRS = [(1.0, 1.0), (1.0, 2.0), (8.0, 1.0), (0.125, 8.0), (0.0, 1.0), (-0.0, 1.0), (0.3, 0.3)]


def function(a: float, b: float) -> Function:
    def score(s: Any, b_: Any, h: Any, q: Any, k: Any) -> Any:
        distance = (q - k).abs()
        return s - a * distance + b * torch.exp(-distance) + torch.where(q >= k, a, b) / 2.0

    return score


def mask(a: float, b: int) -> Function:
    return lambda b_, h, q, k: ((q - k).abs() * 1.0 > a) | (k % 3 == b) | (q == b) | (k < 1)


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, n, 2, 64, dtype=torch.float64, generator=generator) for n in (5, 9, 9)]


def plain(x: list[torch.Tensor], score: Function, seen: Function | None = None) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in x)
    rows, keys = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2], torch.arange(k.shape[2])
    where = torch.zeros((), dtype=torch.long), torch.arange(2)[:, None, None], rows, keys
    s = score(q @ k.mT * SCALE, *where)
    s = s if seen is None else torch.where(seen(*where), s, -torch.inf)
    return (s.softmax(-1) @ v).transpose(1, 2)


def test_which_numbers_are_equal_changes_no_text() -> None:
    scores = [strobe.score_function(function(a, b)) for a, b in PAIRS]
    texts_of_scores = [printed(score) for score in scores]
    assert len({p.text for p in texts_of_scores}) == 1
    for scale in (1.0, SCALE):
        for (a, b), p in zip(PAIRS, texts_of_scores, strict=True):
            assert p.numbers(scale).floats == [1.0, a, 1 / scale, b, a, b, 2.0]
    conditions = [strobe.mask_function(mask(a, b)).rest for a, b in ((1.0, 1), (2.0, 3), (0.0, 0))]
    texts = [print_condition.printed(c, ()) for c in conditions if c is not None]
    assert len({t.text for t in texts}) == 1 and len(texts) == 3
    found = [t.fields.values() for t in texts]
    assert found == [([1.0, a], [b, b, 1]) for a, b in ((1.0, 1), (2.0, 3), (0.0, 0))]


def test_repeated_subexpressions_are_computed_once() -> None:
    """Each has one number, in the score and in its derivative."""

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.sin(0.5 * s * 3.0) * torch.exp(0.25 * (q - k)) + torch.exp(0.25 * (q - k))

    found = printed(strobe.score_function(score))
    assert found.numbers(1.0).floats == [1.0, 0.5, 3.0, 0.25]
    for method in ("operator()", "slope"):
        line = next(line for line in found.text.splitlines() if f" {method}(" in line)
        assert line.count("exp_fast") == line.count("c[3]") == 1


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_repeated_calls(backend: str) -> None:
    x = inputs()
    for a, b in PAIRS:
        for limit in (1.0, 2.0):
            seen = mask(limit, int(b))
            found = strobe.attention(*x, score=function(a, b), mask=seen, backend=backend)
            torch.testing.assert_close(found, plain(x, function(a, b), seen))


def test_zeros_of_both_signs_are_two_calls() -> None:
    x = inputs()
    for zero in (0.0, -0.0, 0.0):
        score = lambda s, b, h, q, k, zero=zero: s + torch.where((q + 1.0) / zero > 0, 1.0, 5.0) * k  # noqa: E731
        torch.testing.assert_close(strobe.attention(*x, score=score), plain(x, score))


def test_what_captured_tensors_hold() -> None:
    x, table = inputs(), torch.zeros(2, 30)
    remembered.calls.clear()
    score = strobe.score_function(lambda s, b, h, q, k: s + table[h, k + 9])
    other = torch.zeros(2, 30)
    for t in (table, other, table):
        t.copy_(torch.randn(2, 30, generator=torch.Generator().manual_seed(len(remembered.calls))))
        t += 1.0
        own = score if t is table else strobe.score_function(lambda s, b, h, q, k: s + other[h, k + 9])
        expected = plain(x, lambda s, b, h, q, k, t=t: s + t.double()[h, k + 9])
        torch.testing.assert_close(strobe.attention(*x, score=own), expected)
    assert len(remembered.calls) == 1


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_graphs(pair: tuple[float, float]) -> None:
    """One text for all; `parse_score` remembers what it has read."""
    x = inputs()
    score = strobe.score_function(function(*pair))
    text, numbers = score.text_and_numbers()
    assert text == strobe.score_function(function(0.7, 0.9)).text_and_numbers()[0]
    assert parse_score(text, tuple(numbers)) == score == parse_score(score.text())
    compiled = torch.compile(lambda *x: strobe.attention(*x, score=score), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*x), plain(x, function(*pair)))


def test_graphs_read_what_captured_tensors_hold() -> None:
    """One graph, whatever a score and a mask that were made before it read."""
    x, table, ids = inputs(), torch.randn(2, 18, dtype=torch.float64), torch.arange(9) // 3
    score = strobe.score_function(lambda s, b, h, q, k: s + table[h, k + 9] * table[0, 0])
    seen = strobe.mask_function(lambda b, h, q, k: ids[q] >= ids[k])
    compiled = torch.compile(
        lambda *x: strobe.attention(*x, score=score, mask=strobe.causal & seen), backend="aot_eager", fullgraph=True
    )
    for shift in range(3):
        table.add_(float(shift))
        ids.copy_((torch.arange(9) + shift) % 4)
        expected = plain(
            x,
            lambda s, b, h, q, k: s + table[h, k + 9] * table[0, 0],
            lambda b, h, q, k: (q >= k) & (ids[q] >= ids[k]),
        )
        torch.testing.assert_close(compiled(*x), expected)


def test_numbers_keep_their_kinds_and_signs_in_texts() -> None:
    for first, second in ((1, 1.0), (0.0, -0.0), (1.0, True)):
        for number in (first, second, first):
            (found,) = parse_score("(+ s ?);x", (number,)).expr.args[1].args
            assert repr(found) == repr(number)
    for n in ((1 << 53) + 1, -(1 << 62) - 1, (1 << 63) - 1):
        score = strobe.score_function(lambda s, b, h, q, k, n=n: s + (k > n))
        assert parse_score(score.text()) == score and str(n) in score.text()
    with pytest.raises(ValueError, match="'9223372036854775808' is not an integer of magnitude 9223372036854775807"):
        parse_score(f"(+ s {1 << 63});x")
    with pytest.raises(TypeError, match="the integer 9223372036854775808 has more than 64 bits"):
        strobe.score_function(lambda s, b, h, q, k: s + (k > 1 << 63))
    far = strobe.score_function(lambda s, b, h, q, k: s + (k * ((1 << 53) + 1) > 7))
    with pytest.raises(ValueError, match="number 9007199254740993; a graph holds it as a float"):
        far.text_and_numbers()


# ---- factors ---------------------------------------------------------------------------------------------------------

FACTORS: dict[str, Function] = {
    "of the score": lambda s, b, h, q, k: s * 0.0 - 0.1 * (q - k).abs(),
    "of a sum": lambda s, b, h, q, k: 0.0 * (s - 0.1 * (q - k).abs()),
    "negative": lambda s, b, h, q, k: s * -2.0 - 0.1 * (q - k).abs(),
    "negative of a sum": lambda s, b, h, q, k: -1.0 * (2.0 * (s - 0.1 * (q - k).abs())),
    "tiny": lambda s, b, h, q, k: s * 1e-40 - 0.1 * (q - k).abs(),
    "huge divisor": lambda s, b, h, q, k: s / 1e300 - 0.1 * (q - k).abs(),
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors_that_nothing_can_be_divided_by(name: str) -> None:
    x = inputs()
    torch.testing.assert_close(strobe.attention(*x, score=FACTORS[name]), plain(x, FACTORS[name]))
    form = strobe.score_function(FACTORS[name]).form
    assert (form.factor, form.is_sum) == (1.0, False) or name == "huge divisor"


@pytest.mark.parametrize("scale", [0.0, -0.125, 1e-40])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_scales_that_kernels_refuse(family: str, scale: float) -> None:
    score = strobe.score_function(lambda s, b, h, q, k: s - 0.1 * (q - k).abs())

    def limits(score: Score, scale: float) -> str | None:
        problem = supposed(torch.device("cuda"), torch.bfloat16, *[(1, 64, 4, 64)] * 3, score=score, scale=scale)
        return FAMILIES[family].limits(problem)

    assert limits(score, SCALE) is None
    assert f"scale {scale}; the kernels' running maximum needs a scale greater than 0" in str(limits(score, scale))
