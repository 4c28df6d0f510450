"""Small expressions, written once: evaluated with numbers or tensors, printed as C++, differentiated, sent as text.

Masks are integer expressions (`mask.py`), what happens to a score is a floating-point one (`score.py`). Each operation
is one row of `OPERATIONS`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Value = Any  # a number, or a tensor evaluated element by element
PLACEHOLDER = "?"  # in a text, for a number that travels beside it


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

    @property
    def operands(self) -> int:
        return 2 if "{1}" in self.cpp else 1


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
    # A score and its bias, for kernels: see biased() in pipeline/scores.cuh.
    "biased": Operation(lambda a, b: a + b, "biased({0}, {1})", lambda a, b, y: (_ONE, _ONE)),
    # A score where the second operand is true; elsewhere nothing: -inf.
    "where": Operation(
        lambda a, b: torch.where(b, a, -math.inf), "({1} ? {0} : neg_inf())", lambda a, b, y: (_ONE, _ZERO)
    ),
}


@dataclass(frozen=True)
class Expr:
    """`op` is "var" (a name), "const" (a user's number, which kernels get as an argument), "literal" (a number of ours,
    which is part of their text), "tensor" (a captured tensor's number and the axes that index it: "h", "bh" or, of a bias
    or a mask, "bhqk") or a key of OPERATIONS."""

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

    def tensors(self) -> set[tuple[int, str]]:
        """Its captured tensors: their numbers, and the axes that index them."""
        if self.op == "tensor":
            return {(self.args[0], self.args[1])}
        return set().union(*(a.tensors() for a in self.args)) if self.op in OPERATIONS else set()

    def cpp(self, constants: list[Any]) -> str:
        """C++ text. Constants become fields `c[i]` of the arguments: a new window size needs no new kernel."""
        if self.op == "var":
            return self.args[0]
        if self.op == "const":
            constants.append(self.args[0])
            return f"c[{len(constants) - 1}]"
        if self.op == "literal":
            return f"{self.args[0]}f" if isinstance(self.args[0], float) else f"{self.args[0]}"
        if self.op == "tensor":
            return f"entry{self.args[0]}(at, i)"
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

    def text(self, numbers: list[Any] | None = None) -> str:
        """The whole expression, as `parse` reads it; given `numbers`, the user's are appended there and a `?` stands for
        each, since a number that PyTorch's compiler traces has no text. Only f-strings: it can follow them."""
        if self.op == "const":
            if numbers is None:
                return f"{self.args[0]!r}"
            numbers.append(self.args[0])
            return PLACEHOLDER
        if self.op == "literal":
            return f"'{self.args[0]!r}"
        if self.op == "var":
            return f"{self.args[0]}"
        if self.op == "tensor":
            return f"#{self.args[0]}{self.args[1]}"
        if len(self.args) == 1:
            return f"({self.op} {self.args[0].text(numbers)})"
        return f"({self.op} {self.args[0].text(numbers)} {self.args[1].text(numbers)})"


_ZERO: Expr = Expr("literal", (0.0,))
_ONE: Expr = Expr("literal", (1.0,))
_MINUS_ONE: Expr = Expr("literal", (-1.0,))


def _product(a: Expr, b: Expr) -> Expr:
    return b if a == _ONE else a if b == _ONE else a * b


# ---- from text -------------------------------------------------------------------------------------------------------

_MOST_CHARACTERS, _MOST_LEVELS = 4096, 100  # of a text; of operations inside of operations
_MOST_INTEGER = 1 << 53  # as a float has it
_INTEGER = re.compile(r"-?[0-9]{1,16}")
_FLOAT = re.compile(r"-?([0-9]+(\.[0-9]*)?(e[+-]?[0-9]{1,4})?|inf)|nan")
_TENSOR = re.compile(r"#([0-9]{1,3})(h|bh)")


@dataclass(frozen=True)
class Grammar:
    """What the text of an expression may hold. Texts come with exported graphs, so from anywhere, and what is read from
    them is printed into the source of kernels: nothing but these names, numbers and operations gets there."""

    variables: frozenset[str]
    operations: frozenset[str]
    integers: int | None = None  # all numbers are integers, none of larger magnitude; None: floats, too
    tensors: bool = False  # captured ones


def parse(text: str, grammar: Grammar, numbers: Iterable[Any] = ()) -> Expr:
    """The expression that has this `text()`. Placeholders take the next of the `numbers`."""
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"{text!r:.80} has {len(text)} characters; an expression has at most {_MOST_CHARACTERS}")
    words = re.findall(r"[()]|[^\s()]+", text)
    found, end = _parse(words, 0, grammar, iter(numbers), _MOST_LEVELS)
    if end < len(words):
        raise ValueError(f"{text!r:.80} is not one expression: {' '.join(words[end:])!r:.80} is left over")
    return found


def _parse(words: list[str], at: int, grammar: Grammar, numbers: Iterator[Any], levels: int) -> tuple[Expr, int]:
    """The expression that begins with the word `at`, and where the next one would."""
    if at >= len(words):
        raise ValueError("an expression ends too early")
    if words[at] != "(":
        return _leaf(words[at], grammar, numbers), at + 1
    if not levels:
        raise ValueError(f"an expression has more than {_MOST_LEVELS} operations inside of each other")
    op = words[at + 1] if at + 1 < len(words) else ""
    if op not in grammar.operations:
        raise ValueError(f"{op!r:.80} is no operation here; allowed are {' '.join(sorted(grammar.operations))}")
    args: list[Expr] = []
    end = at + 2
    while end < len(words) and words[end] != ")":
        arg, end = _parse(words, end, grammar, numbers, levels - 1)
        args.append(arg)
    if end >= len(words):
        raise ValueError(f"{' '.join(words[at:])!r:.80} has no end")
    if len(args) != OPERATIONS[op].operands:
        raise ValueError(f"{op!r} has {len(args)} operands, it takes {OPERATIONS[op].operands}")
    _check_division(op, args)
    return Expr(op, tuple(args)), end + 1


def _check_division(op: str, args: list[Expr]) -> None:
    """On a CPU, an integer division by 0 ends the process. The C++ text of a division may hold its dividend several times:
    it must not grow with each level."""
    divisor = args[-1]
    if op == "//" and _holds(args[0], "//"):
        raise ValueError(f"'//' divides {args[0].text()!r:.80}, in which there is another '//'")
    if op == "//" and not (divisor.op == "const" and divisor.args[0] > 0):
        raise ValueError(f"'//' divides by {divisor.text()!r:.80}; it must be an integer greater than 0")
    if op == "/" and divisor.op in ("const", "literal") and not divisor.args[0]:
        raise ValueError("'/' divides by 0")


def _holds(expr: Expr, op: str) -> bool:
    return expr.op == op or (expr.op in OPERATIONS and any(_holds(arg, op) for arg in expr.args))


def _leaf(word: str, grammar: Grammar, numbers: Iterator[Any]) -> Expr:
    if word in grammar.variables:
        return Expr("var", (word,))
    if grammar.tensors and (tensor := _TENSOR.fullmatch(word)):
        return Expr("tensor", (int(tensor[1]), tensor[2]))
    if word.startswith("'"):
        value = _number(word[1:], grammar)
        if not math.isfinite(value):
            raise ValueError(f"{word!r:.80} is not finite")
        return Expr("literal", (value if grammar.integers is not None else float(value),))
    if word == PLACEHOLDER:
        number = next(numbers, None)
        if number is None:
            raise ValueError(f"an expression has more {PLACEHOLDER} than there are numbers")
        word = f"{number!r}"  # checked as if it had come in the text
    return Expr.of(_number(word, grammar))


def _number(word: str, grammar: Grammar) -> float:
    most = grammar.integers or _MOST_INTEGER
    if _INTEGER.fullmatch(word) and abs(int(word)) <= most:
        return int(word)
    if grammar.integers is None and _FLOAT.fullmatch(word):
        return float(word)
    numbers = "a number" if grammar.integers is None else f"an integer of magnitude {most} at most"
    tensors = ", nor a captured tensor such as #0h" if grammar.tensors else ""
    raise ValueError(f"{word!r:.80} is neither {numbers} nor one of {' '.join(sorted(grammar.variables))}{tensors}")


def full_name(title: str, numbers: Iterable[Any]) -> str:
    """The name of a mask or a score: its title with the numbers in the place of the placeholders."""
    given = iter(numbers)
    first, *rest = title.split(PLACEHOLDER)
    return first + "".join(f"{_shown(next(given, PLACEHOLDER))}{part}" for part in rest)


def _shown(number: Any) -> str:
    return f"{number:g}" if isinstance(number, float) else f"{number}"


def parse_name(title: str, numbers: Iterable[Any] = ()) -> str:
    """The name of a mask or a score, which errors, logs and kernels show: signs that could end a line, a string or a
    comment become underscores."""
    return re.sub(r"[^\w .,()&+-]", "_", full_name(title[:1000], numbers))
