"""Expressions are evaluated, differentiated, printed as C++ and sent as text: four views of one thing."""

from __future__ import annotations

import ctypes
import importlib
import subprocess
from pathlib import Path

import pytest
import torch

import strobe
from strobe.cuda.parts import print_score
from strobe.variants.expression import OPERATIONS, Expr
from strobe.variants.mask import parse_mask
from strobe.variants.score import Score, alibi, identity, parse_score, softcap
from strobe.variants.text import Grammar, parse

s, x = Expr("var", ("s",)), Expr("var", ("x",))
ANY = Grammar(frozenset("sx"), frozenset(OPERATIONS))
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
    assert parse(expr.text(), ANY) == expr
    derivative = expr.derivative("s")
    assert parse(derivative.text(), ANY) == derivative


@pytest.mark.parametrize("text", ["", "(+ s", "(? s s)", "s s", "(+ s 1))"])
def test_damaged_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text, ANY)


# ---- text from strangers ---------------------------------------------------------------------------------------------

NO_MASKS = {
    "a call": 'system("true")',
    "a call without brackets or blanks": "x=system",
    "C++ as a variable": "q,}int/**/evil=system",
    "another name": "threadIdx",
    "a name of scores": "s",
    "a name with a backslash": "q\\",
    "a literal that is text": "'1,system",
    "a literal that is a name": "'q",
    "a macro": "STROBE_DEVICE",
    "an attribute": "q.__class__",
    "digits of another script": "١٢",
    "digits with underscores": "1_000",
    "hexadecimal": "0x10",
    "a fraction": "1.5",
    "infinity": "inf",
    "not a number": "nan",
    "too large for 32 bits": "4294967296",
    "a captured tensor": "(load 0 3 h)",
    "no operands": "(+)",
    "one operand": "(+ q)",
    "three operands": "(max q q q)",
    "an operation of scores": "(tanh q)",
    "an operation of Python": "(__import__ q)",
    "true division": "(/ q 2)",
    "division by zero": "(// q 0)",
    "division by what may be zero": "(// q len_k)",
    "division by a negative number": "(// q -3)",
    "a quotient of a quotient": "(// (+ (// q 2) 1) 2)",
    "an end that moves left": "(- len_k q)",
    "an end that turns round": "(* q -1)",
    "a product of q": "(* q q)",
    "operators of C++": "(, q q)",
    "a comment": "q/*",
    "a new line": "q\nx",
    "a directive": "#include",
    "nothing but brackets": "()",
    "too deep": "(+ q " * 50_000 + "q" + ")" * 50_000,
    "deep, but short": "(+ q " * 200 + "q" + ")" * 200,
    "deep without an end": "(max 1 " * 300,
    "too long": "(+ q 1" + " " * 100_000 + ")",
}


@pytest.mark.parametrize("name", NO_MASKS)
def test_a_mask_says_nothing_but_masks(name: str) -> None:
    """The text of a mask comes with an exported graph and ends up in the source of a kernel."""
    for text in (f"{NO_MASKS[name]};;x", f";{NO_MASKS[name]};x"):
        with pytest.raises(ValueError) as error:
            parse_mask(text)
        assert len(str(error.value)) < 400


NO_SCORES = {
    "a call": 'system("true")',
    "a name of kernels": "c[0]",
    "the result": "y",
    "a literal that is text": "'1f,system",
    "an infinite literal": "'inf",
    "a literal that becomes infinite": "'1e999",
    "a tensor without a kind": "(* s (load 0))",
    "a tensor without a number": "(* s (load h))",
    "a tensor of another kind": "(* s (load 0 4 h))",
    "a negative tensor": "(* s (load -1 3 h))",
    "a seventh tensor": "(* s (load 6 3 h))",
    "five axes": "(* s (load 0 3 b h h h h))",
    "an index that is a score": "(* s (load 0 3 s))",
    "an index that is a fraction": "(* s (load 0 3 (/ h 2)))",
    "a tensor without an end": "(* s (load 0 3 h",
    "C++ as a number of a tensor": "(* s (load 0],system 3 h))",
    "an operation of kernels": "(biased s s)",
    "an integer division by zero": "(* s (// h '0))",
    "a remainder by zero": "(* s (mod h 0))",
    "division by zero": "(/ s 0.0)",
    "two operands of one": "(tanh s s)",
    "a name behind a number": "1.0f",
    "too deep": "(tanh " * 50_000 + "s" + ")" * 50_000,
}


@pytest.mark.parametrize("name", NO_SCORES)
def test_a_score_says_nothing_but_scores(name: str) -> None:
    with pytest.raises(ValueError):
        parse_score(f"{NO_SCORES[name]};x")


def test_a_score_without_its_name() -> None:
    with pytest.raises(ValueError, match="an expression and a name"):
        parse_score("s")


@pytest.mark.parametrize("name", ['";system("true");"', "*/ int evil;", "a\nint evil;", "a\\\nb", "a\r", "??/", "<b>"])
def test_names_cannot_leave_a_string_or_a_comment(name: str) -> None:
    for found in (parse_mask(f";q;{name}").name, parse_score(f"s;{name}").name):
        assert len(found) == len(name) and not set(found) & set('";*/\\\n\r<>?')
    assert parse_score("s;softcap(3) with alibi").name == "softcap(3) with alibi"


def test_a_score_refers_to_the_tensors_that_it_has() -> None:
    score = parse_score("(* s (load 1 3 b h));x")
    assert score.with_tensors([torch.ones(2), torch.ones(1, 2)]).tensors
    for wrong in ([], [torch.ones(2)], [torch.ones(2), torch.ones(2)], [torch.ones(2), torch.ones(1, 2).long()]):
        with pytest.raises(ValueError, match="reads 2 axes of float of tensor 1"):
            score.with_tensors(wrong)


@pytest.mark.parametrize("interval, score", [(";q,throw;x", "s;x"), (";;full", "s,throw;x"), (";(+ q);x", "s;x")])
def test_an_operation_compiles_no_text_of_strangers(interval: str, score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the operation, as an exported graph makes it."""
    compiler = importlib.import_module("strobe.emulator.compiler")

    def build(*_: object, **__: object) -> None:
        raise AssertionError("something was compiled")

    monkeypatch.setattr(compiler, "_compile", build)
    monkeypatch.setattr(subprocess, "run", build)
    q = torch.randn(1, 16, 1, 64, dtype=torch.float16)
    given = {
        "q": q,
        "k": q,
        "v": q,
        "score_tensors": [],
        "interval": interval,
        "score": score,
        "interval_numbers": [],
        "score_numbers": [],
        "dropout": 0.0,
        "seed": 0,
    }
    given |= {"layout": "bshd", "deterministic": False, "backend": "emulator", "with_lse": False}
    names = [argument.name for argument in torch.ops.strobe.attention.default._schema.arguments]
    with pytest.raises(ValueError):
        torch.ops.strobe.attention(*[given.get(name) for name in names])


def test_every_mask_of_ours_can_be_read() -> None:
    most = strobe.window(1, 2)
    for left in range(3, 16):
        most = most & strobe.window(10**left, None) & strobe.chunked(10**left)
    for mask in (most, strobe.full, strobe.causal & strobe.prefix(3) & strobe.window(4, 5) & strobe.chunked(7)):
        assert parse_mask(mask.text()) == mask


def test_numbers_travel_beside_a_text() -> None:
    """Two masks of the same kind have one text; names are the same on the other side."""
    for mask in (strobe.full, strobe.window(2, None) & strobe.prefix(1 << 40), strobe.causal & strobe.chunked(7)):
        text, numbers = mask.text_and_numbers()
        found = parse_mask(text, tuple(numbers))
        assert found == mask and found.name == mask.name and found.text() == mask.text()
    assert strobe.window(2, 3).text_and_numbers()[0] == strobe.window(5, 0).text_and_numbers()[0]
    text, numbers = softcap(2.5).text_and_numbers()
    assert (
        parse_score(text, tuple(numbers)) == softcap(2.5) and parse_score(text, tuple(numbers)).name == "softcap(2.5)"
    )


@pytest.mark.parametrize(
    "text, numbers", [(";(+ q ?);x", ()), (";(+ q ?);x", (1 << 40,)), (";(// q ?);x", (0,)), (";(* q ?);x", (-1,))]
)
def test_numbers_beside_a_text_are_checked_as_those_in_it(text: str, numbers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        parse_mask(text, numbers)


def test_what_has_no_derivative_says_so() -> None:
    with pytest.raises(ValueError, match="'tanh_near' of 's' has no derivative"):
        Expr("tanh_near", (s,)).derivative("s")


# ---- scores ----------------------------------------------------------------------------------------------------------


def test_factors_leave_the_expression_that_kernels_compute() -> None:
    capped = softcap(30.0).kernel_form(0.125)
    assert (capped.inner.op, capped.after) == ("tanh", 30.0) and capped.before == pytest.approx(0.125 / 30)
    assert identity.kernel_form(0.125)[:3] == (1.0, s, 0.125)
    both = Score(s * 2.0 + Expr("tanh", (s,)), "both").kernel_form(0.5)  # `s` occurs twice: nothing can be taken out
    assert both.before == 0.5 and both.after == 1.0


def test_one_text_for_every_number() -> None:
    large, small, nothing = (print_score.printed(score) for score in (softcap(30.0), softcap(2.0), identity))
    assert large.text == small.text != nothing.text
    assert large.numbers(0.125).floats != small.numbers(0.125).floats
    assert "kIdentity = true" in nothing.text


@pytest.mark.parametrize("cap", [0.7, 30.0])
def test_cpp_text_means_the_same(tmp_path: Path, cap: float) -> None:
    scale, score = 0.31, softcap(cap)
    printed = print_score.printed(score)
    numbers = ", ".join(f"{c!r}f" for c in printed.numbers(scale).floats)
    (tmp_path / "score.cpp").write_text(
        "#include <cmath>\n#define STROBE_DEVICE\n"
        "using std::fabs;\nconstexpr float kTanhNear = 0.25f;\nstruct Where { static constexpr bool kOneHead = true; };\n"
        "float tanh_fast(float x) { return std::tanh(x); }\n"
        "float tanh_near(float x, float scale) { return std::tanh(x * scale); }\n"
        f"{printed.text}static const float c[] = {{{numbers}}};\n"
        'extern "C" float value(float x) { return Score{c}(x, Where{}, 0); }\n'
        'extern "C" float slope(float x) { Score f{c}; return f.slope(x, f(x, Where{}, 0), Where{}, 0); }\n'
    )
    subprocess.run(["g++", "-shared", "-fPIC", "-o", tmp_path / "score.so", tmp_path / "score.cpp"], check=True)
    library = ctypes.CDLL(str(tmp_path / "score.so"))
    for function in (library.value, library.slope):
        function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float]
    before, _, after, _ = score.kernel_form(scale)
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
        with pytest.raises(ValueError, match="slopes must be .*, got "):
            alibi(wrong)  # type: ignore[arg-type]
