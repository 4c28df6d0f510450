"""The condition of a score as its block map evaluates it: `struct Condition`, with one function for a pair of a query
and a key, and one for a whole block at once, by interval arithmetic (tile/ranges.cuh).

What depends on the query alone, or on the key alone, is evaluated for each row of a block: its least and its largest value
are exact, whatever it does. Only what depends on both is left to the rules of intervals.
"""

from __future__ import annotations

from collections.abc import Mapping

from strobe.cuda.parts.print_expression import Body, Numbers
from strobe.cuda.parts.print_score import Entries
from strobe.variants.expression import BOOL, CTYPES, FLOAT, OPERATIONS, Expr

# Operations with a rule; others may give anything. A `>` is a `<` with its operands exchanged.
_ARITHMETIC = {
    "+": "add", "-": "subtract", "*": "multiply", "//": "floor_divide", "mod": "modulo", "min": "least",
    "max": "greatest", "abs": "magnitude", "iabs": "magnitude",
}  # fmt: skip
_COMPARISONS = {"<": "less", "<=": "less_equal", "==": "equal"}
_OF_BOOLEANS = {"&": "both", "|": "either", "not": "negate"}
_ROUNDING = ("floor", "ceil", "trunc", "round")
_CASTS = ("int", "long", "float")


class _Distinct(Numbers):
    """Both functions have the same numbers: equal ones share a field."""

    def add(self, value: float, kind: int) -> str:
        known: list[float] = [*(self.floats if kind == FLOAT else self.integers)]
        if value in known:
            return f"{'c' if kind == FLOAT else 'n'}[{known.index(value)}]"
        return super().add(value, kind)


def struct(condition: Expr, entries: Mapping[int, Entries]) -> str:
    """`entries`: how the tensors that it reads are read, by their numbers."""
    made, methods = _printed(condition, entries)
    tensors = "".join(f"  const void* t{i};\n  const i64* strides{i};\n" for i in entries)
    given = "".join(f", p.{e.name}, p.{e.name}_strides" for e in entries.values())
    integers = ("  const int* n;\n", ", p.score_integers") if made.integers else ("", "")
    return (
        "struct Condition {\n"
        "  static constexpr bool kPositional = true;\n"
        f"  const float* c;\n{integers[0]}{tensors}"
        "  template <class Params> STROBE_DEVICE static Condition of(const Params& p) "
        f"{{ return Condition{{p.score{integers[1]}{given}}}; }}\n"
        f"{methods}"
        "};\n"
    )


def numbers(condition: Expr) -> Numbers:
    """What c[i] and n[i] are in the text of `struct`."""
    tensors = {load.args[0]: Entries("", "", pairs=False) for load in condition.loads()}
    return _printed(condition, tensors)[0]


def _printed(condition: Expr, entries: Mapping[int, Entries]) -> tuple[Numbers, str]:
    made, elements = _Distinct(), {i: e.element for i, e in entries.items()}
    body = Body([condition], made, {}, elements)
    of_pair = body.text(condition)
    ranges = _Ranges(made, elements)
    of_block = ranges.name(condition)
    return made, (
        f"  template <class At> STROBE_DEVICE bool of_pair(const At& at, int i) const {body.function(of_pair)}\n"
        "  template <class Block> STROBE_DEVICE Range<bool> of_block(const Block& block) const {\n"
        "    using At = typename Block::At;\n"
        f"{''.join(f'    {line}' for line in ranges.statements)}    return {of_block};\n  }}\n"
    )


class _Ranges:
    """One statement for each expression: r0, r1 and so on are the ranges of their values."""

    def __init__(self, made: Numbers, elements: Mapping[int, str]) -> None:
        self._made, self._elements = made, elements
        self._names: dict[Expr, str] = {}
        self.statements: list[str] = []

    def name(self, e: Expr) -> str:
        if e not in self._names:
            text = self._text(e)
            self._names[e] = f"r{len(self.statements)}"
            self.statements.append(f"const Range<{CTYPES[e.kind]}> {self._names[e]} = {text};\n")
        return self._names[e]

    def _text(self, e: Expr) -> str:
        of_queries, of_keys = "q" in e.variables(), "k" in e.variables()
        ctype = CTYPES[e.kind]
        if not (of_queries and of_keys):
            body = Body([e], self._made, {}, self._elements)
            text = body.text(e)
            over = "over_queries" if of_queries else "over_keys" if of_keys else "of_all"
            return f"block.{over}([&](const At& at, int i) -> {ctype} {body.function(text)})"
        if e.op == "load":
            return self._load(e, ctype)
        if e.op in (">", ">="):
            return self._text(Expr(e.op.replace(">", "<"), (e.args[1], e.args[0])))
        if e.op in ("!=", "^") and (e.op == "!=" or e.kind == BOOL):
            return f"ranges::negate({self._text(Expr('==', e.args))})"
        args = ", ".join(self.name(a) for a in e.operands)
        if e.op in _COMPARISONS:
            return f"ranges::{_COMPARISONS[e.op]}<{CTYPES[max(a.kind for a in e.args)]}>({args})"
        if e.op in _OF_BOOLEANS and e.kind == BOOL:
            return f"ranges::{_OF_BOOLEANS[e.op]}({args})"
        if e.op in _ARITHMETIC:
            return f"ranges::{_ARITHMETIC[e.op]}<{ctype}>({args})"
        if e.op == "/":
            return f"ranges::divide({args})"
        if e.op == "select":
            return f"ranges::select<{ctype}>({args})"
        if e.op in _CASTS:
            return f"ranges::convert<{ctype}>({args})"
        if e.op in _ROUNDING:
            function = OPERATIONS[e.op].cpp.format("x")
            return f"ranges::rising([](float x) {{ return {function}; }}, {args})"
        return f"ranges::anything<{ctype}>()"

    def _load(self, e: Expr, ctype: str) -> str:
        """Known where a block has one index for each axis, as in a table of blocks."""
        indices = {a: self.name(a) for a in e.operands}
        body = Body([e], self._made, {a: f"{r}.lo" for a, r in indices.items()}, self._elements)
        entry = f"ranges::point<{ctype}>({body.text(e)})"
        same = " && ".join(f"{r}.lo == {r}.hi" for r in indices.values())
        return f"{same} ? {entry} : ranges::anything<{ctype}>()"
