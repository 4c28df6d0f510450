"""Expressions are evaluated, differentiated, printed as C++ and sent as text: four views of one thing."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from strobe.expression import OPERATIONS, Expr, parse
from strobe.score import Score, alibi, identity, parse_score, softcap

s, x = Expr("var", ("s",)), Expr("var", ("x",))
EXPRESSIONS = {
    "identity": s,
    "scaled": s * 3.0,
    "softcap": softcap(2.5).expr,
    "nested": Expr("tanh", (s * 0.5 + x,)) * s - s / 4.0,
    "quotient": s / (s * s + 2.0),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_derivatives_agree_with_autograd(name: str) -> None:
    expr = EXPRESSIONS[name]
    values = torch.linspace(-3, 3, 13, dtype=torch.float64, requires_grad=True)
    env = {"s": values, "x": torch.tensor(0.3, dtype=torch.float64)}
    expected = torch.autograd.grad(expr.evaluate(env).sum(), values)[0]
    found = torch.as_tensor(expr.derivative("s").evaluate(env), dtype=torch.float64).expand_as(values)
    torch.testing.assert_close(found.detach(), expected)


def test_a_derivative_shares_what_was_computed() -> None:
    """tanh is the costly part of softcap: it is evaluated once for the value and the slope."""
    counted = []
    tanh = OPERATIONS["tanh"]
    try:
        OPERATIONS["tanh"] = type(tanh)(lambda t: counted.append(1) or torch.tanh(t), tanh.cpp, tanh.partials)
        score, known = softcap(2.0), {}
        env = {"s": torch.randn(4)}
        score.expr.evaluate(env, known)
        score.derivative.evaluate(env, known)
    finally:
        OPERATIONS["tanh"] = tanh
    assert len(counted) == 1


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_text_and_back(name: str) -> None:
    expr = EXPRESSIONS[name]
    assert parse(expr.text()) == expr
    derivative = expr.derivative("s")
    assert parse(derivative.text()) == derivative


@pytest.mark.parametrize("text", ["", "(+ s", "(? s s)", "s s", "(+ s 1))"])
def test_damaged_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


def test_what_has_no_derivative_says_so() -> None:
    with pytest.raises(ValueError, match="'max' of 's' has no derivative"):
        Expr("max", (s, Expr.of(0.0))).derivative("s")


# ---- scores ----------------------------------------------------------------------------------------------------------


def test_factors_leave_the_expression_that_kernels_compute() -> None:
    before, inner, after = softcap(30.0).kernel_form(0.125)
    assert (before, inner.op, after) == (0.125 / 30, "tanh", 30.0)
    assert identity.kernel_form(0.125) == (1.0, s, 0.125)
    both = Score(s * 2.0 + Expr("tanh", (s,)), "both").kernel_form(0.5)  # `s` occurs twice: nothing can be taken out
    assert both.before == 0.5 and both.after == 1.0


def test_one_text_for_every_number() -> None:
    assert softcap(30.0).cpp() == softcap(2.0).cpp() != identity.cpp()
    assert softcap(30.0).constants(0.125) != softcap(2.0).constants(0.125)
    assert "kIdentity = true" in identity.cpp()


@pytest.mark.parametrize("cap", [0.7, 30.0])
def test_cpp_text_means_the_same(tmp_path: Path, cap: float) -> None:
    scale, score = 0.31, softcap(cap)
    numbers = ", ".join(f"{c!r}f" for c in score.constants(scale))
    (tmp_path / "score.cpp").write_text(
        "#include <cmath>\n#define STROBE_DEVICE\nfloat tanh_fast(float x) { return std::tanh(x); }\n"
        f"{score.cpp()}static const float c[] = {{{numbers}}};\n"
        'extern "C" float value(float x) { return Score{c}(x); }\n'
        'extern "C" float slope(float x) { Score f{c}; return f.derivative(x, f(x)); }\n'
    )
    subprocess.run(["g++", "-shared", "-fPIC", "-o", tmp_path / "score.so", tmp_path / "score.cpp"], check=True)
    library = ctypes.CDLL(str(tmp_path / "score.so"))
    for function in (library.value, library.slope):
        function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float]
    before, _, after = score.kernel_form(scale)
    for product in (-9.0, -0.2, 0.0, 1.5, 40.0):
        scaled = torch.tensor(scale * product, dtype=torch.float64)
        assert after * library.value(product) == pytest.approx(score.expr.evaluate({"s": scaled}).item(), rel=1e-5)
        slope = score.derivative.evaluate({"s": scaled}).item() * scale  # by q.k
        assert before * after * library.slope(product) == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_scores_travel_as_text() -> None:
    for score in (identity, softcap(3.0), alibi(torch.ones(4))):
        assert parse_score(score.text()) == score.structure


def test_alibi_is_a_score_that_depends_on_positions() -> None:
    score = alibi(torch.tensor([0.5, 0.25]))
    assert not score.pointwise and softcap(1.0).pointwise and score.derivative.variables() == set()
    for wrong in (torch.ones(1, 2, 3), torch.ones(2, dtype=torch.int32), [0.5]):
        with pytest.raises(ValueError, match="slopes must be"):
            alibi(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="requires grad"):
        alibi(torch.ones(2, requires_grad=True))
