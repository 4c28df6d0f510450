"""The C++ text of a score: straight-line code in which a value that is used twice has a name."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from strobe.variants.expression import CTYPES, FLOAT, INT, LEN_K, LEN_Q, LONG, OPERATIONS, Expr, K, Q
from strobe.variants.kernel_form import UNSCALE

# How the text gets the variables in it; `s` is given by the caller. `at` tells where entry i of a fragment lies.
_PLACES = {
    "q": "at.q(i)", "k": "at.k(i)", "len_q": "at.len_q", "len_k": "at.len_k", "b": "at.batch", "h": "at.head(i)",
}  # fmt: skip
_OF_ONE_TYPE = ("min", "max", "//", "mod")  # templates
# What q.k is multiplied by to become `s`. Like UNSCALE it is a number of a call, since it follows from its scale.
BEFORE = Expr("var", ("before",))


def with_places(expr: Expr) -> Expr:
    """The expression, with a place beside each of the user's numbers: that two are equal by chance must not change the text
    of a kernel. A subexpression that occurs twice is computed once, and its numbers have one place."""
    places = itertools.count()
    fields = expr.mapped(_with_literal_divisor)
    return fields.mapped(lambda e: Expr("const", (e.args[0], next(places))) if e.op == "const" else None)


def _with_literal_divisor(e: Expr) -> Expr | None:
    """A divisor and a number of bits are part of the text: they choose the instructions."""
    if e.op not in ("//", "mod", "<<", ">>") or e.args[1].op != "const":
        return None
    return Expr(e.op, (e.args[0].mapped(_with_literal_divisor), Expr("literal", e.args[1].args)))


class Values(NamedTuple):
    """The numbers of a text: `c[i]` are floats, `n[i]` integers."""

    floats: list[float]
    integers: list[int]


class Numbers:
    """The numbers that a text refers to as `c[i]` and `n[i]`, which are fields of the arguments: the user's numbers,
    and those that follow from the scale."""

    def __init__(self, floats: Iterable[Expr] = ()) -> None:
        self.floats, self.integers = list(floats), list[Expr]()

    def field(self, e: Expr) -> str:
        name, fields = ("c", self.floats) if e.kind == FLOAT else ("n", self.integers)
        if e not in fields:
            fields.append(e)
        return f"{name}[{fields.index(e)}]"

    def values(self, before: float = 1.0, unscale: float = 1.0) -> Values:
        of_scale = {BEFORE: before, UNSCALE: unscale}
        floats = [of_scale[e] if e in of_scale else e.args[0] for e in self.floats]
        return Values(floats, [int(e.args[0]) for e in self.integers])


class Body:
    """The statements of one function. `given`: texts of expressions that are known. `of_head`, if it is given, collects what
    is loaded for a head: texts with `batch` and `head` in them."""

    def __init__(
        self,
        roots: Iterable[Expr],
        numbers: Numbers,
        texts: Mapping[Expr, str],
        elements: Mapping[int, str],
        of_head: dict[Expr, str] | None = None,
    ):
        self._numbers, self._names, self._elements, self._of_head = numbers, dict(texts), elements, of_head
        self.statements: list[str] = []
        self._uses: Counter[Expr] = Counter()
        todo = list(roots)
        while todo:
            node = todo.pop()
            self._uses[node] += 1
            if self._uses[node] == 1 and node not in self._names:
                todo += node.operands

    def reads(self, e: Expr) -> bool:
        """Return whether the text contains that of `e`."""
        return self._uses[e] > 0

    def text(self, e: Expr) -> str:
        if e in self._names:
            return self._names[e]
        text = self._text(e)
        if self._uses[e] > 1 and e.op not in ("const", "literal", "var") and not _is_converted_place(e):
            name = f"x{len(self.statements)}"
            self.statements.append(f"const {CTYPES[e.kind]} {name} = {text};")
            self._names[e] = text = name
        return text

    def _text(self, e: Expr) -> str:
        if e.op == "const" or e in (BEFORE, UNSCALE):
            return self._numbers.field(e)
        if e.op == "var":
            return _PLACES[e.args[0]]
        if e.op == "literal":
            return literal(e)
        if e.op == "tensor":
            return f"entry{e.args[0]}(at, i)"
        if e.op == "load":
            return self._load(e)
        converts = e.kind == FLOAT and e.op in ("+", "-", "*", "/", "float", "abs") and not _is_converted_place(e)
        args = [(converts and self._sum_of_places(a)) or self.text(a) for a in e.operands]
        if e.op in _OF_ONE_TYPE and e.kind == LONG:  # numbers that fit are 32-bit ones
            args = [text if a.kind == LONG else f"i64({text})" for a, text in zip(e.operands, args, strict=True)]
        if e.op in ("//", "mod") and e.args[1].op == "literal":
            divisor = e.args[1].args[0]
            if isinstance(divisor, int) and divisor > 0 and divisor & (divisor - 1) == 0:  # rounds down below 0, too
                shift = divisor.bit_length() - 1
                return f"({args[0]} >> {shift})" if e.op == "//" else f"({args[0]} & {divisor - 1})"
        if e.op in ("min", "max") and e.kind != INT:
            return f"{e.op}imum({args[0]}, {args[1]})"
        return OPERATIONS[e.op].cpp.format(*args)

    def place(self, load: Expr, text: Callable[[Expr], str] | None = None) -> str:
        """Return where the entry lies in its tensor. `text`: of an index."""
        number, text = load.args[0], text or self.text
        places = [
            f"i64({text(index)}) * strides{number}[{axis}]"
            if is_of_head(index)  # checked on the host
            else f"within({text(index)}, strides{number}[{4 + axis}]) * strides{number}[{axis}]"
            for axis, index in enumerate(load.operands)
        ]
        return " + ".join(places) or "0"

    def _load(self, e: Expr) -> str:
        number = e.args[0]

        def text(place: Callable[[Expr], str]) -> str:
            entry = f"load_entry<{self._elements[number]}>(t{number}, {self.place(e, place)}, true)"
            return f"int({entry})" if e.kind == INT else entry  # of 8 bits, perhaps, and templates take two of a type

        if self._of_head is None or not all(map(is_of_head, e.operands)):
            return text(self.text)
        self._of_head.setdefault(e, text(lambda index: {"b": "batch", "h": "head"}[index.args[0]]))
        return f"(At::kOneHead ? h{list(self._of_head).index(e)} : {text(self.text)})"

    def _sum_of_places(self, e: Expr) -> str | None:
        """The text of a sum of positions and integers, or of its absolute value, as a float; None: it is something else."""
        if e.op in ("iabs", "abs"):
            inside = self._sum_of_places(e.args[0])
            return inside and f"fabs({inside})"
        signs: dict[str, int] = {}
        rest = None if any(node in self._names for node in e.nodes()) else _collected(e, 1, signs)
        if rest is None or not signs or any(abs(sign) > 1 for sign in signs.values()):
            return None
        return f"at.template sum<{signs.get('q', 0)}, {signs.get('k', 0)}>({rest.removeprefix(' + ') or '0'}, i)"

    def function(self, result: str) -> str:
        return f"{{ {''.join(s + ' ' for s in self.statements)}return {result}; }}"


def _is_converted_place(e: Expr) -> bool:
    """Return whether it is a position or a length as a float."""
    return e.op == "float" and e.args[0] in (Q, K, LEN_Q, LEN_K)


def is_of_head(index: Expr) -> bool:
    return index.op == "var" and index.args[0] in ("b", "h")


def _collected(e: Expr, sign: int, signs: dict[str, int]) -> str | None:
    """The terms of a sum that are no positions; those of q and k are counted in `signs`."""
    if _is_converted_place(e):
        e = e.args[0]
    if e.op in ("+", "-"):
        terms = [_collected(a, sign * s, signs) for a, s in zip(e.args, (1, -1 if e.op == "-" else 1), strict=True)]
        return None if None in terms else "".join(filter(None, terms))
    if e in (Q, K):
        signs[e.args[0]] = signs.get(e.args[0], 0) + sign
        return ""
    minus = "-" if sign < 0 else "+"
    if e in (LEN_Q, LEN_K):
        return f" {minus} {_PLACES[e.args[0]]}"
    return f" {minus} {literal(e)}" if e.op == "literal" and type(e.args[0]) is int and e.kind == INT else None


def literal(e: Expr) -> str:
    value = e.args[0]
    if isinstance(value, bool):
        return str(value).lower()
    text = f"{value!r}f" if isinstance(value, float) else f"{value}" if e.kind == INT else f"i64({value})"
    assert e.kind in (FLOAT, INT, LONG)
    return f"({text})" if text.startswith("-") else text
