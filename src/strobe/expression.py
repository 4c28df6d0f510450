"""Small expressions, written once: evaluated with numbers or tensors, printed as C++, differentiated, sent as text.

Masks are integer expressions (`mask.py`), what happens to a score is a floating-point one (`score.py`). Each operation
is one row of `OPERATIONS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Value = Any  # a number, or a tensor evaluated element by element


def _minmax(of_numbers: Any, of_tensors: Any, a: Value, b: Value) -> Value:
    if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
        return of_numbers(a, b)
    like = a if isinstance(a, torch.Tensor) else b
    return of_tensors(torch.as_tensor(a, device=like.device), torch.as_tensor(b, device=like.device))


@dataclass(frozen=True)
class Operation:
    evaluate: Callable[..., Value]
    cpp: str  # with {0} and {1} for the operands
    # The partial derivatives by each operand, from the operands and the result; None: a constant, or not differentiable.
    partials: Callable[..., tuple[Expr, ...]] | None = None


OPERATIONS: dict[str, Operation] = {
    "+": Operation(lambda a, b: a + b, "({0} + {1})", lambda a, b, y: (_ONE, _ONE)),
    "-": Operation(lambda a, b: a - b, "({0} - {1})", lambda a, b, y: (_ONE, _MINUS_ONE)),
    "*": Operation(lambda a, b: a * b, "({0} * {1})", lambda a, b, y: (b, a)),
    "/": Operation(lambda a, b: a / b, "({0} / {1})", lambda a, b, y: (_ONE / b, _MINUS_ONE * y / b)),
    # Of integers, by a positive one, rounded down. C++ rounds towards zero.
    "//": Operation(lambda a, b: a // b, "(({0} < 0 ? {0} - ({1} - 1) : {0}) / {1})"),
    "min": Operation(functools.partial(_minmax, min, torch.minimum), "min({0}, {1})"),
    "max": Operation(functools.partial(_minmax, max, torch.maximum), "max({0}, {1})"),
    "abs": Operation(abs, "fabs({0})"),
    "tanh": Operation(torch.tanh, "tanh_fast({0})", lambda a, y: (_ONE - y * y,)),
}


@dataclass(frozen=True)
class Expr:
    """`op` is "var" (a name), "const" (a user's number, which kernels get as an argument), "literal" (a number of ours,
    which is part of their text), "tensor" (a captured tensor's number and the axes that index it, "h" or "bh") or a key
    of OPERATIONS."""

    op: str
    args: tuple[Any, ...]

    @staticmethod
    def of(x: Expr | float) -> Expr:
        return x if isinstance(x, Expr) else Expr("const", (x,))

    def __add__(self, other: Expr | float) -> Expr:
        return Expr("+", (self, Expr.of(other)))

    def __sub__(self, other: Expr | float) -> Expr:
        return Expr("-", (self, Expr.of(other)))

    def __mul__(self, other: Expr | float) -> Expr:
        return Expr("*", (self, Expr.of(other)))

    def __truediv__(self, other: Expr | float) -> Expr:
        return Expr("/", (self, Expr.of(other)))

    def __floordiv__(self, other: Expr | float) -> Expr:
        return Expr("//", (self, Expr.of(other)))

    def evaluate(self, env: Mapping[Any, Value], known: dict[Expr, Value] | None = None) -> Value:
        """`env` maps names, and the numbers of captured tensors, to values. `known` collects the values of operations:
        passed on, it spares a second expression what it shares with this one."""
        if self.op in ("const", "literal"):
            return self.args[0]
        if self.op in ("var", "tensor"):
            return env[self.args[0]]
        if known is None:
            return OPERATIONS[self.op].evaluate(*(a.evaluate(env) for a in self.args))
        if self not in known:
            known[self] = OPERATIONS[self.op].evaluate(*(a.evaluate(env, known) for a in self.args))
        return known[self]

    def variables(self) -> set[str]:
        """The names in it; "tensor" if it has captured tensors."""
        if self.op == "var":
            return {self.args[0]}
        if self.op == "tensor":
            return {"tensor"}
        return set().union(*(a.variables() for a in self.args)) if self.op in OPERATIONS else set()

    def cpp(self, constants: list[Any]) -> str:
        """C++ text. Constants become fields `c[i]` of the arguments: a new window size needs no new kernel."""
        if self.op == "var":
            return self.args[0]
        if self.op == "const":
            constants.append(self.args[0])
            return f"c[{len(constants) - 1}]"
        if self.op == "literal":
            return f"{self.args[0]}f" if isinstance(self.args[0], float) else f"{self.args[0]}"
        return OPERATIONS[self.op].cpp.format(*(arg.cpp(constants) for arg in self.args))

    def derivative(self, name: str) -> Expr:
        """By the variable `name`. It shares its subexpressions with this one."""
        if name not in self.variables():
            return _ZERO
        if self.op == "var":
            return _ONE
        partials = OPERATIONS[self.op].partials
        if partials is None:
            raise ValueError(f"{self.op!r} of {name!r} has no derivative here")
        total: Expr | None = None
        for arg, partial in zip(self.args, partials(*self.args, self), strict=True):
            if name in arg.variables():
                term = _product(partial, arg.derivative(name))
                total = term if total is None else total + term
        assert total is not None
        return total

    def replaced(self, old: Expr, new: Expr) -> Expr:
        if self == old:
            return new
        if self.op not in OPERATIONS:
            return self
        return Expr(self.op, tuple(a.replaced(old, new) for a in self.args))

    def text(self) -> str:
        """The whole expression, as `parse` reads it. Only f-strings: PyTorch's compiler can follow them."""
        if self.op == "const":
            return f"{self.args[0]!r}"
        if self.op == "literal":
            return f"'{self.args[0]!r}"
        if self.op == "var":
            return f"{self.args[0]}"
        if self.op == "tensor":
            return f"#{self.args[0]}{self.args[1]}"
        if len(self.args) == 1:
            return f"({self.op} {self.args[0].text()})"
        return f"({self.op} {self.args[0].text()} {self.args[1].text()})"


_ZERO: Expr = Expr("literal", (0.0,))
_ONE: Expr = Expr("literal", (1.0,))
_MINUS_ONE: Expr = Expr("literal", (-1.0,))


def _product(a: Expr, b: Expr) -> Expr:
    return b if a == _ONE else a if b == _ONE else a * b


def parse(text: str) -> Expr:
    """The expression that has this `text()`."""
    words = text.replace("(", " ( ").replace(")", " ) ").split()
    found, rest = _parse(words)
    if rest:
        raise ValueError(f"{text!r} is not one expression: {' '.join(rest)!r} is left over")
    return found


def _parse(words: list[str]) -> tuple[Expr, list[str]]:
    if not words:
        raise ValueError("an expression ends too early")
    word, rest = words[0], words[1:]
    if word == "(":
        if not rest or rest[0] not in OPERATIONS:
            raise ValueError(f"{' '.join(words)!r} does not begin with an operation")
        op, rest, args = rest[0], rest[1:], []
        while rest and rest[0] != ")":
            arg, rest = _parse(rest)
            args.append(arg)
        if not rest:
            raise ValueError(f"{' '.join(words)!r} has no end")
        return Expr(op, tuple(args)), rest[1:]
    if word[0] == "'":
        return Expr("literal", (_number(word[1:]),)), rest
    if word[0] == "#":
        return Expr("tensor", (int(word[1:].rstrip("bh")), word.lstrip("#0123456789"))), rest
    if word[0].isalpha() and word not in ("inf", "nan"):
        return Expr("var", (word,)), rest
    return Expr.of(_number(word)), rest


def _number(word: str) -> float:
    return int(word) if word.lstrip("-").isdigit() else float(word)
