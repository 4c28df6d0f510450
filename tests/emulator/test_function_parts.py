"""The parts with which kernels compute users' functions are right, number by number: tile/functions.cuh, and the
wrappers below it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from emulator.toy_kernels import Toy, aligned

from strobe.emulator import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
# One of each, for each pair of numbers. Text -> what Python computes.
INTEGERS = {
    "floor_div(a, b)": lambda a, b: a // b if b else 0,
    "floor_mod(a, b)": lambda a, b: a % b if b else a,
    "int(floor_div(i64(a) * 4000000000, i64(b) * 4000000000))": lambda a, b: a // b if b else 0,
    "int(within(a, 5))": lambda a, b: min(max(a, 0), 4),
    "int(within(i64(a) * 4000000000, b < 1 ? 1 : b))": lambda a, b: 0 if a <= 0 else max(b, 1) - 1,
    "minimum(a, b)": min,
    "maximum(a, b)": max,
    "absolute(a)": lambda a, b: abs(a),
}
FLOATS = {
    "minimum(x, y)": min,
    "maximum(x, y)": max,
    "absolute(x)": lambda x, y: abs(x),
    "exp_fast(x)": lambda x, y: math.exp(x),
    "log_fast(y)": lambda x, y: math.log(y),
    "sigmoid_fast(x)": lambda x, y: 1 / (1 + math.exp(-x)),
    "pow_fast(y, x)": lambda x, y: y**x,
    "sqrt_approx(y)": lambda x, y: math.sqrt(y),
    "sine(x)": lambda x, y: math.sin(x),
    "cosine(x)": lambda x, y: math.cos(x),
    "error_function(x)": lambda x, y: math.erf(x),
    "round_down(x)": lambda x, y: math.floor(x),
    "round_up(x)": lambda x, y: math.ceil(x),
    "round_to_zero(x)": lambda x, y: math.trunc(x),
    "round_to_even(x)": lambda x, y: round(x),
}


def _kernel(texts: list[str], given: str) -> str:
    lines = "".join(f"  p.out[{i} * p.n + i] = {text};\n" for i, text in enumerate(texts))
    return (
        "#include <strobe/tile/functions.cuh>\n"
        "STROBE_KERNEL(32, 1) kernel(STROBE_GRID_CONSTANT Params p) {\n"
        f"  for (int i = thread_idx(); i < p.n; i += 32) {{\n  {given}\n{lines}  }}\n}}\n"
    )


def test_integers_are_divided_as_python_does() -> None:
    pairs = np.array([(a, b) for a in range(-8, 9) for b in range(-4, 5)], dtype=np.int32)
    toy = Toy(
        _kernel(list(INTEGERS), "const int a = p.a[i], b = p.b[i];"), dict.fromkeys(("a", "b", "out"), "int32"), ("n",)
    )
    x = {name: aligned(len(pairs), "int32") for name in ("a", "b")}
    x["a"][:], x["b"][:] = pairs.T
    out = aligned((len(INTEGERS), len(pairs)), "int32")
    toy.run(**x, out=out, n=len(pairs))
    for row, (text, function) in zip(out, INTEGERS.items(), strict=True):
        assert row.tolist() == [function(int(a), int(b)) for a, b in pairs], text


def test_functions_of_floats() -> None:
    numbers = [-7.5, -2.5, -1.0, -0.3, 0.0, 0.2, 0.5, 1.0, 1.5, 2.5, 6.4]
    pairs = np.array([(x, y) for x in numbers for y in (0.1, 0.9, 1.0, 3.7)], dtype=np.float32)
    toy = Toy(
        _kernel(list(FLOATS), "const float x = p.x[i], y = p.y[i];"),
        dict.fromkeys(("x", "y", "out"), "float32"),
        ("n",),
    )
    given = {name: aligned(len(pairs), "float32") for name in ("x", "y")}
    given["x"][:], given["y"][:] = pairs.T
    out = aligned((len(FLOATS), len(pairs)), "float32")
    toy.run(**given, out=out, n=len(pairs))
    for row, (text, function) in zip(out, FLOATS.items(), strict=True):
        exact = [function(float(x), float(y)) for x, y in pairs]
        np.testing.assert_allclose(row, exact, rtol=1e-5, atol=1e-6, err_msg=text)
