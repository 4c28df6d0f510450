"""The C++ text of a score: straight-line code in which a value that is used twice has a name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from strobe.expression import CTYPES, FLOAT, INT, LONG, OPERATIONS, Expr

# How the text gets the variables in it; `s` is given by the caller. `at` tells where entry i of a fragment lies.
_PLACES = {
    "q": "float(at.q(i))",
    "k": "float(at.k(i))",
    "len_q": "float(at.len_q)",
    "len_k": "float(at.len_k)",
    "qi": "at.q(i)",
    "ki": "at.k(i)",
    "len_qi": "at.len_q",
    "len_ki": "at.len_k",
    "b": "at.batch",
    "h": "at.head(i)",
}

_OF_ONE_TYPE = ("min", "max", "floordiv", "mod")  # templates


class Numbers:
    """The user's numbers in a text, which are fields of the arguments: `c[i]` are floats, `n[i]` integers."""

    def __init__(self) -> None:
        self.floats: list[float] = []
        self.integers: list[int] = []

    def add(self, value: float, kind: int) -> str:
        if kind == FLOAT:
            self.floats.append(value)
            return f"c[{len(self.floats) - 1}]"
        self.integers.append(int(value))
        return f"n[{len(self.integers) - 1}]"


class Body:
    """The statements of one function. `given`: texts of expressions that are known."""

    def __init__(self, roots: Iterable[Expr], numbers: Numbers, given: Mapping[Expr, str], elements: Mapping[int, str]):
        self._numbers, self._names, self._elements = numbers, dict(given), elements
        self.statements: list[str] = []
        self._uses: Counter[Expr] = Counter()
        todo = list(roots)
        while todo:
            node = todo.pop()
            self._uses[node] += 1
            if self._uses[node] == 1 and node not in self._names:
                todo += node.operands

    def text(self, e: Expr) -> str:
        if e in self._names:
            return self._names[e]
        text = self._text(e)
        if self._uses[e] > 1 and e.op not in ("literal", "var"):
            name = f"x{len(self.statements)}"
            self.statements.append(f"const {CTYPES[e.kind]} {name} = {text};")
            self._names[e] = text = name
        return text

    def _text(self, e: Expr) -> str:
        if e.op == "var":
            return _PLACES[e.args[0]]
        if e.op == "const":
            return self._numbers.add(e.args[0], e.kind)
        if e.op == "literal":
            return literal(e)
        if e.op == "tensor":
            return f"entry{e.args[0]}(at, i)"
        if e.op == "load":
            return self._load(e)
        args = [self.text(a) for a in e.operands]
        if e.op in _OF_ONE_TYPE and e.kind == LONG:  # numbers that fit are 32-bit ones
            args = [text if a.kind == LONG else f"i64({text})" for a, text in zip(e.operands, args, strict=True)]
        if e.op in ("floordiv", "mod") and e.args[1].op == "literal":
            divisor = e.args[1].args[0]
            if isinstance(divisor, int) and divisor > 0 and divisor & (divisor - 1) == 0:  # rounds down below 0, too
                shift = divisor.bit_length() - 1
                return f"({args[0]} >> {shift})" if e.op == "floordiv" else f"({args[0]} & {divisor - 1})"
        if e.op in ("min", "max") and e.kind != INT:
            return f"{e.op}imum({args[0]}, {args[1]})"
        return OPERATIONS[e.op].cpp.format(*args)

    def _load(self, e: Expr) -> str:
        number = e.args[0]
        places = [
            f"i64({self.text(index)}) * strides{number}[{axis}]"
            if index.op == "var" and index.args[0] in ("b", "h")  # checked on the host
            else f"within({self.text(index)}, strides{number}[{4 + axis}]) * strides{number}[{axis}]"
            for axis, index in enumerate(e.operands)
        ]
        return f"load_entry<{self._elements[number]}>(t{number}, {' + '.join(places) or '0'}, true)"

    def function(self, result: str) -> str:
        return f"{{ {''.join(s + ' ' for s in self.statements)}return {result}; }}"


def literal(e: Expr) -> str:
    value = e.args[0]
    if isinstance(value, bool):
        return str(value).lower()
    text = f"{value!r}f" if isinstance(value, float) else f"{value}" if e.kind == INT else f"i64({value})"
    assert e.kind in (FLOAT, INT, LONG)
    return f"({text})" if text.startswith("-") else text
