"""The text of an expression, read back: how masks and scores travel where objects cannot."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from strobe.variants.expression import FLOAT, INT, LONG, OPERATIONS, PLACEHOLDER, Expr

_MOST_CHARACTERS, _MOST_LEVELS = 1 << 16, 100  # of a text; of operations inside of operations
MOST_TENSORS, MOST_AXES = 6, 4  # of a score; as many have a place in the arguments of kernels
MOST_INTEGER = (1 << 63) - 1
_MOST_DIGITS = 20  # and a sign; Python takes time for very long ones
_INTEGER = re.compile(r"-?[0-9]+")
_FLOAT = re.compile(r"-?([0-9]+(\.[0-9]*)?(e[+-]?[0-9]{1,4})?|inf)|nan")


@dataclass(frozen=True)
class Grammar:
    """The names, numbers and operations that the text of an expression may hold. Texts come with exported graphs, so
    from anywhere, and what is read from them is printed into the source of kernels: nothing else gets there."""

    variables: frozenset[str]
    operations: frozenset[str]
    integers: int | None = None  # all numbers are integers, none of larger magnitude; None: floats, too
    tensors: bool = False  # captured ones


def parse(text: str, grammar: Grammar, numbers: Iterable[Any] = ()) -> Expr:
    """The expression that has this `text()`. Placeholders take the next of the `numbers`."""
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"{text!r:.80} has {len(text)} characters; an expression has at most {_MOST_CHARACTERS}")
    words = re.findall(r"[()]|[^\s()]+", text)
    expr, end = _parse(words, 0, grammar, iter(numbers), _MOST_LEVELS)
    if end < len(words):
        raise ValueError(f"{text!r:.80} is not one expression: {' '.join(words[end:])!r:.80} is left over")
    return expr


def _parse(words: list[str], at: int, grammar: Grammar, numbers: Iterator[Any], levels: int) -> tuple[Expr, int]:
    """The expression that begins with the word `at`, and where the next one would."""
    if at >= len(words):
        raise ValueError("an expression ends too early")
    if words[at] != "(":
        return _leaf(words[at], grammar, numbers), at + 1
    if not levels:
        raise ValueError(f"an expression has more than {_MOST_LEVELS} operations inside of each other")
    op = words[at + 1] if at + 1 < len(words) else ""
    if op == "load" and grammar.tensors:
        return _parse_load(words, at, grammar, numbers, levels)
    if op not in grammar.operations:
        raise ValueError(f"{op!r:.80} is no operation here; allowed are {' '.join(sorted(grammar.operations))}")
    args, end = _parse_operands(words, at + 2, grammar, numbers, levels)
    if len(args) != OPERATIONS[op].operands:
        raise ValueError(f"{op!r} has {len(args)} operands, it takes {OPERATIONS[op].operands}")
    _check_division(op, args)
    return Expr(op, tuple(args)), end


def _parse_operands(
    words: list[str], at: int, grammar: Grammar, numbers: Iterator[Any], levels: int
) -> tuple[list[Expr], int]:
    """The expressions up to the closing parenthesis, and the index of the word after it."""
    args: list[Expr] = []
    end = at
    while end < len(words) and words[end] != ")":
        arg, end = _parse(words, end, grammar, numbers, levels - 1)
        args.append(arg)
    if end >= len(words):
        raise ValueError(f"{' '.join(words[at:])!r:.80} has no end")
    return args, end + 1


def _parse_load(words: list[str], at: int, grammar: Grammar, numbers: Iterator[Any], levels: int) -> tuple[Expr, int]:
    number, kind = (int(w) if w.isdecimal() else -1 for w in (words + ["", ""])[at + 2 : at + 4])
    if not 0 <= number < MOST_TENSORS or not 0 <= kind <= FLOAT:
        raise ValueError(f"{' '.join(words[at : at + 4])!r:.80} is no captured tensor and its kind")
    index, end = _parse_operands(words, at + 4, grammar, numbers, levels)
    if len(index) > MOST_AXES or any(i.kind not in (INT, LONG) for i in index):
        raise ValueError(
            f"tensor {number} has {len(index)} indices; it takes at most {MOST_AXES}, all of them integers"
        )
    return Expr("load", (number, kind, *index)), end


def _check_division(op: str, args: list[Expr]) -> None:
    """Refuse a division by 0, which ends the process on a CPU if it is one of integers, and one that C++ would
    round."""
    divisor = args[-1]
    if op in ("//", "mod") and divisor.op in ("const", "literal") and not divisor.args[0]:
        raise ValueError(f"{op!r} divides by 0")
    if op == "/" and divisor.op in ("const", "literal") and not divisor.args[0]:
        raise ValueError("'/' divides by 0")
    if op == "/" and all(a.kind != FLOAT for a in args):
        raise ValueError("'/' divides integers; C++ would round the quotient")


def _leaf(word: str, grammar: Grammar, numbers: Iterator[Any]) -> Expr:
    if word in grammar.variables:
        return Expr("var", (word,))
    if word.startswith("'"):
        value = _number(word[1:], grammar)
        if not math.isfinite(value):
            raise ValueError(f"{word!r:.80} is not finite")
        return Expr("literal", (value,))
    if word in (PLACEHOLDER, f"{PLACEHOLDER}i"):
        number = next(numbers, None)
        if number is None:
            raise ValueError(f"an expression has more {PLACEHOLDER} than there are numbers")
        if word != PLACEHOLDER and math.isfinite(number):  # an integer, which has travelled as a float
            number = int(number)
        word = f"{number!r}"  # checked as if it had come in the text
    return Expr.of(_number(word, grammar))


def _number(word: str, grammar: Grammar) -> float:
    most = grammar.integers or MOST_INTEGER
    if word in ("True", "False") and grammar.integers is None:
        return word == "True"
    if _INTEGER.fullmatch(word):  # a float would hold 53 bits of it
        if len(word) <= _MOST_DIGITS and abs(int(word)) <= most:
            return int(word)
        raise ValueError(f"{word!r:.80} is not an integer of magnitude {most} at most")
    if grammar.integers is None and _FLOAT.fullmatch(word):
        return float(word)
    numbers = "a number" if grammar.integers is None else f"an integer of magnitude {most} at most"
    raise ValueError(f"{word!r:.80} is neither {numbers} nor one of {' '.join(sorted(grammar.variables))}")


def parse_name(title: str, numbers: Iterable[Any] = ()) -> str:
    """The name of a mask or a score, which errors, logs and kernels show: signs that could end a line, a string or a
    comment become underscores."""
    return re.sub(r"[^\w .,()&+-]", "_", full_name(title[:1000], numbers))


def full_name(title: str, numbers: Any) -> str:
    """The name of a mask or a score: its title with the numbers in the place of the placeholders."""
    values = iter(numbers)
    first, *rest = title.split(PLACEHOLDER)
    return first + "".join(f"{_shown(next(values, PLACEHOLDER))}{part}" for part in rest)


def _shown(number: Any) -> str:
    return f"{number:g}" if isinstance(number, float) else f"{number}"
