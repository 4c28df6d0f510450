"""Score and mask functions that are drawn at random over all that functions may use. Their numbers are few, so that they are
often equal to one another, to the scale and to its inverse."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import function_cases
import pytest
import torch
from function_cases import FunctionCase, Made, Tensors

import strobe

_NUMBERS = ("0.0", "1.0", "-1.0", "2.0", "0.5", "0.125", "8.0")
_SMOOTH = (
    "torch.tanh({})", "torch.sigmoid({})", "torch.sin({})", "torch.cos(0.5 * {})", "torch.erf({})", "torch.exp(-{}.abs())",
    "torch.exp2(-{}.abs())", "torch.log({}.abs() + 1.0)", "torch.log2({}.abs() + 2.0)", "torch.log1p({}.abs())",
    "torch.sqrt({}.abs() + 1.0)", "torch.rsqrt({}.abs() + 1.0)", "torch.reciprocal({}.abs() + 1.0)", "1 / (1 + {}.abs())",
    "torch.nn.functional.softplus({}.double())", "torch.nn.functional.silu({}.double())", "torch.relu({})",
    *(f"torch.nn.functional.{name}({{}}.double())" for name in ("gelu", "elu", "mish", "logsigmoid", "leaky_relu", "relu6")),
    "torch.clamp({}, -1.0, 2.0)", "torch.square(torch.tanh({}))", "({}.abs() + 1.0) ** 1.5", "(0.125 * {}) ** 2", "{}.abs()",
)  # fmt: skip
_ROUNDED = ("{}.floor()", "torch.ceil({})", "torch.round({})", "torch.trunc({})", "torch.sign({})")
# Captured tensors by what indexes them. Those of floats are multiples of 1/16, which every type holds.
_FLOATS = {
    "of_head": "[h]", "of_batch": "[b]", "of_both": "[b, h]", "of_key": "[b, k]", "table": "[h, {}]", "number": "[h // 2]",
}  # fmt: skip
_INTEGERS = {"document": "[b, k]", "mark": "[q]", "small": "[{}]", "byte": "[k]"}
_BOOLS = {"flag": "[b, k]", "picked": "[h, {}]"}


def captured(batch: int, heads: int, len_k: int, g: torch.Generator) -> Tensors:
    def floats(*shape: int) -> torch.Tensor:
        return torch.randint(-16, 17, shape, generator=g) / 16

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g)

    return {
        "of_head": floats(heads),
        "of_batch": floats(batch).half(),
        "of_both": floats(batch, heads).bfloat16(),
        "of_key": floats(len_k, batch).t(),
        "table": floats(heads, 31),
        "number": floats(heads).double(),
        "document": integers(0, 4, batch, len_k).sort()[0],
        "mark": integers(-9, 9, len_k).int(),
        "small": integers(-9, 9, len_k).to(torch.int8),
        "byte": integers(0, 5, len_k).to(torch.uint8),
        "flag": integers(0, 2, batch, len_k).bool(),
        "picked": integers(0, 2, heads, 16).bool(),
    }


@dataclass(frozen=True)
class Generated:
    """Python text of the functions, which says all in a report of a failure."""

    score: str
    mask: str
    reads: frozenset[str]  # the captured tensors
    learns: frozenset[str]  # those of floats that the score reads, unless none are to learn
    options: tuple[tuple[str, Any], ...]

    def case(self, **shape: Any) -> FunctionCase:
        score, mask = (compiled(text) if text else None for text in (self.score, self.mask))
        return FunctionCase(score=score, mask=mask, captured=captured, options=self.options, **shape)

    def tensors(self, case: FunctionCase, device: str, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        x, everything = case.tensors(device, dtype)
        return x, {n: t.requires_grad_(n in self.learns) for n, t in everything.items() if n in self.reads}


def compiled(text: str) -> Made:
    def made(t: Any) -> Any:
        names: dict[str, Any] = {"torch": torch, "t": t, "inf": math.inf}
        exec(text, names)
        return names["function"]

    return made


def generated(r: Random, functions: int = 1, learning: bool = False) -> Generated:
    """`functions`: so many make one, each for a head, so that a program has them all."""
    writer = _Writer(r)
    score = mask = ""
    if r.random() < 0.9:
        score = writer.function("s, b, h, q, k", 4, lambda: _by_head(writer, functions))
    learns = writer.reads & _FLOATS.keys() if learning else frozenset()
    reads = writer.reads
    if not score or r.random() < 0.4:
        mask = writer.function("b, h, q, k", 2, lambda: writer.condition(2))
    options = (("scale", r.choice((0.125, 0.125, 1.0, 0.5))),)
    return Generated(score, mask, frozenset(reads | writer.reads), frozenset(learns), options)


def _by_head(writer: _Writer, functions: int) -> str:
    """Most of them are sums of the score and of what is added to it, which kernels compute in a form of their own."""
    if functions == 1:
        return writer.score()
    if writer.r.random() < 0.6:
        return writer.sum(lambda: _nested([writer.added(2) for _ in range(functions)]))
    return _nested([writer.score() for _ in range(functions)])


def _nested(texts: list[str]) -> str:
    first, *rest = texts
    return f"torch.where(h == {len(rest)}, {first}, {_nested(rest)})" if rest else first


class _Writer:
    """Every text of a float or of an integer is a tensor's: never a number alone."""

    def __init__(self, r: Random) -> None:
        self.r, self._few = r, r.sample(_NUMBERS, 4)
        self._most, self.reads = 0, set[str]()
        self._lines: list[str] = []

    def function(self, arguments: str, most: int, write: Callable[[], str]) -> str:
        """The text of one that reads so many captured tensors at most: kernels take six for both."""
        self._most, self.reads, self._lines = most, set(), []
        result = write()
        return "\n    ".join([f"def function({arguments}):", *self._lines, f"return {result}"]) + "\n"

    def score(self) -> str:
        return self._one_of(
            self.sum,
            self.sum,
            lambda: f"{self._number()} * {self._smooth(self._of_score())} + {self.added(1)}",
            lambda: f"{self._of_score()} + {self._smooth('s')} * {self._number()}",
            lambda: f"torch.where({self.condition(1)}, {self._of_score()}, {self.sum()})",
            lambda: f"torch.maximum({self._of_score()}, {self.added(1)}) + 0.5 * s",
            lambda: f"torch.where({self.condition(1)}, {self._of_score()}, -inf)",
            lambda: f"4.0 * torch.tanh({self._of_score()} / 4.0)",
        )

    def _of_score(self) -> str:
        return self._one_of(
            lambda: "s",
            lambda: f"(s * {self._number()})",
            lambda: f"(s + {self.added(1)})",
            lambda: f"({self._number()} * s - {self.added(1)})",
            lambda: f"(s * {self.added(1)})",
        )

    def sum(self, added: Callable[[], str] | None = None) -> str:
        """The score and something that does not depend on it."""
        added, sign = added or (lambda: self.added(2)), self.r.choice("+-")
        return self._one_of(
            lambda: f"s {sign} {added()}",
            lambda: f"s * {self.r.choice(('0.0', *self._few))} {sign} {added()}",
            lambda: f"{self._number()} * (s {sign} {added()})",
            lambda: f"s / {self._divisor()} {sign} {added()} {sign} {self.added(0)}",
        )

    def added(self, depth: int) -> str:
        choice = self.r.randrange(6) if depth else self.r.randrange(2)
        if choice == 0:
            return self._exact(depth)
        if choice == 1:
            return f"({self._number()} * {self._exact(depth)})"
        if choice == 2:
            return f"torch.where({self.condition(1)}, {self._number()}, {self._number()})"
        if choice == 3:
            return f"({self.added(depth - 1)} {self.r.choice('+-*')} {self._smooth(self._exact(1))})"
        return f"({self._number()} * {self._smooth(self._exact(depth))})"

    def condition(self, depth: int) -> str:
        choice = self.r.randrange(7 if depth else 3)
        if choice < 2:
            sign = self.r.choice(("<", "<=", ">", ">=", "==", "!="))
            return f"({self._integer(1)} {sign} {self.r.choice((self._integer(1), *'012'))})"
        if choice == 2:
            return self._load(_BOOLS) or "(q >= k)"
        if choice == 3:
            return f"({self._exact(1)} {self.r.choice('<>')} {self._number()})"
        if choice == 4:
            return f"~{self.condition(depth - 1)}"
        return f"({self.condition(depth - 1)} {self.r.choice('&|')} {self.condition(depth - 1)})"

    def _exact(self, depth: int) -> str:
        """A float of few bits, which fp32 holds as well as fp64: it may be rounded and compared. Some are used again."""
        if self._lines and self.r.random() < 0.4:
            return f"x{self.r.randrange(len(self._lines))}"
        choice = self.r.randrange(8 if depth else 3)
        if choice == 0:
            found = f"({self._integer(depth)} * {self._number()})"
        elif choice == 1:
            found = self._load(_FLOATS) or "(q - k)"
        elif choice == 2:
            found = "(q - k).abs()"
        elif choice == 3:
            found = f"torch.where({self.condition(0)}, {self._number()}, {self._number()})"
        elif choice == 4:
            found = f"({self._exact(depth - 1)} {self.r.choice('+-')} {self.r.choice((self._number(), '(q - k)'))})"
        elif choice == 5:
            found = self.r.choice(_ROUNDED).format(f"({self._number()} * {self._exact(depth - 1)})")
        else:
            found = f"({self._integer(depth)} - {self._number()})"
        if self.r.random() < 0.5:
            self._lines.append(f"x{len(self._lines)} = {found}")
            return f"x{len(self._lines) - 1}"
        return found

    def _integer(self, depth: int) -> str:
        choice = self.r.randrange(8 if depth else 4)
        if choice < 3:
            return self.r.choice(("q", "k", "(q - k)", "(k - q)", "h", "b"))
        if choice == 3:
            return self._load(_INTEGERS) or "q"
        inner = self._integer(depth - 1)
        if choice == 4:
            return f"({inner} {self.r.choice('+-')} {self.r.choice((self._integer(0), *'12'))})"
        if choice == 5:
            return f"{inner}.abs()"
        if choice == 6:
            return f"({inner} {self.r.choice(('* 2', '* -1', '// 2', '// 3', '% 2', '% 3', '// -2', '% -3'))})"
        return f"torch.where({self.condition(0)}, {inner}, {self._integer(0)})"

    def _smooth(self, x: str) -> str:
        x = x if x.startswith("(") and x.endswith(")") else f"({x})"
        return self.r.choice(_SMOOTH).format(x)

    def _load(self, tensors: dict[str, str]) -> str | None:
        left = [n for n in tensors if n in self.reads or len(self.reads) < self._most]
        if not left:
            return None
        name = self.r.choice(left)
        self.reads.add(name)
        place = self.r.choice(("(q - k).abs()", "(k // 4)", "(k - q + 9)"))
        return f"t.{name}{tensors[name].format(place)}"

    def _one_of(self, *ways: Callable[[], str]) -> str:
        return self.r.choice(ways)()

    def _number(self) -> str:
        return self.r.choice(self._few)

    def _divisor(self) -> str:
        return self.r.choice([n for n in self._few if n != "0.0"])


def check(drawn: Generated, case: Any, device: str, backend: str) -> None:
    """Skips functions of more numbers than the kernels take."""
    try:
        function_cases.check(case, drawn.tensors(case, device, torch.float16), backend)
    except strobe.Unsupported as error:
        if "numbers in a score function" not in str(error):
            raise
        pytest.skip(str(error))
