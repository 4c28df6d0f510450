"""The functions of torch that are made of others: each takes symbols, and has the arguments of torch's."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from strobe.variants.expression import FLOAT


def square(x: Any) -> Any:
    return x * x


def rsqrt(x: Any) -> Any:
    return 1.0 / x.float().sqrt()


def reciprocal(x: Any) -> Any:
    return 1.0 / x.float()


def exp2(x: Any) -> Any:
    return (x * math.log(2.0)).exp()


def expm1(x: Any) -> Any:
    return x.exp() - 1.0


def log2(x: Any) -> Any:
    return x.log() * math.log2(math.e)


def log10(x: Any) -> Any:
    return x.log() * math.log10(math.e)


def log1p(x: Any) -> Any:
    return (x + 1.0).log()


def tan(x: Any) -> Any:
    return x.sin() / x.cos()


def sign(x: Any) -> Any:
    zero = x.new_zeros(())
    return x if x.dtype == torch.bool else (x > zero).type_as(x) - (x < zero).type_as(x)


# ---- activations: at a kink their slope is torch's


def relu(x: Any, inplace: bool = False) -> Any:
    return x.new_zeros(()).maximum(x)  # at 0 its slope is that of the 0


def relu6(x: Any, inplace: bool = False) -> Any:
    return hardtanh(x, 0, 6)


def hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    return torch.where(x <= min_val, min_val, torch.where(x >= max_val, max_val, x))


def leaky_relu(x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    return torch.where(x > 0, x, x * negative_slope)


def elu(x: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    return torch.where(x > 0, x, alpha * expm1(x))


def hardsigmoid(x: Any, inplace: bool = False) -> Any:
    return relu6(x + 3.0) / 6.0


def hardswish(x: Any, inplace: bool = False) -> Any:
    return x * hardsigmoid(x)


def silu(x: Any, inplace: bool = False) -> Any:
    return x * x.sigmoid()


def softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """Compute softplus without overflow, so that no threshold is needed: beyond it torch returns x itself. The slope at 0
    is 1/2."""
    y = x if beta == 1 else x * beta
    y = torch.where(y > 0, y, 0.0) + torch.where(y > 0, -y, y).exp().log1p()
    return y if beta == 1 else y / beta


def log_sigmoid(x: Any) -> Any:
    return -softplus(-x)


def mish(x: Any, inplace: bool = False) -> Any:
    return x * softplus(x).tanh()


def gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1.0 + (math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)).tanh())
    return 0.5 * x * (1.0 + (x * math.sqrt(0.5)).erf())


# ---- of two


def fmod(x: Any, y: Any) -> Any:
    """It has the sign of x."""
    y = x.operand_like(y)
    if FLOAT in (x.kind, y.kind):
        return x - (x / y).trunc() * y
    return sign(x) * (x.abs() % y.abs())


def div(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    y = x.operand_like(y)
    if rounding_mode is None:
        return x / y
    if rounding_mode == "floor":
        return x // y
    return (x / y).trunc() if FLOAT in (x.kind, y.kind) else (x - fmod(x, y)) // y


def type_as(x: Any, other: Any) -> Any:
    return x.to(other.dtype)


# ---- of the few entries of a tensor


def isin(x: Any, test_elements: Any, assume_unique: bool = False, invert: bool = False) -> Any:
    one_of_them = of_all(torch.logical_or, [x == e for e in x.entries(test_elements)] or [x.new_zeros(()).bool()])
    return ~one_of_them if invert else one_of_them


def bucketize(x: Any, boundaries: Any, out_int32: bool = False, right: bool = False) -> Any:
    below = [(e <= x if right else e < x).int() for e in x.entries(boundaries)]
    return of_all(torch.add, below or [x.new_zeros((), dtype=torch.int32)])


def of_all(function: Any, items: list[Any]) -> Any:
    """The function of two, of all items: a balanced tree, since a text has few operations inside of each other."""
    if len(items) < 3:
        return functools.reduce(function, items)
    middle = len(items) // 2
    return function(of_all(function, items[:middle]), of_all(function, items[middle:]))


COMPOSED = {
    f.__name__: f
    for f in (
        square, rsqrt, reciprocal, exp2, expm1, log2, log10, log1p, tan, sign, relu, relu6, hardtanh, leaky_relu, elu,
        hardsigmoid, hardswish, silu, softplus, log_sigmoid, mish, gelu, fmod, div, type_as, isin, bucketize,
    )
} | {"logsigmoid": log_sigmoid, "divide": div}  # fmt: skip
