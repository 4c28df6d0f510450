"""The condition of a score as its block map evaluates it: `struct Condition`, with one function for a pair of a query
and a key, and one for a whole block at once, by interval arithmetic (tile/ranges.cuh).

What depends on the query alone, or on the key alone, is evaluated for each row of a block: its least and its largest value
are exact, whatever it does. Only what depends on both is left to the rules of intervals.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from strobe.cuda.parts.print_expression import Body, Numbers, with_places
from strobe.cuda.parts.print_score import Entries
from strobe.variants.expression import BOOL, CTYPES, OPERATIONS, Expr

# Operations with a rule; others may give anything. A `>` is a `<` with its operands exchanged.
_ARITHMETIC = {
    "+": "add", "-": "subtract", "*": "multiply", "//": "floor_divide", "mod": "modulo", "min": "least",
    "max": "greatest", "abs": "magnitude", "iabs": "magnitude",
}  # fmt: skip
_COMPARISONS = {"<": "less", "<=": "less_equal", "==": "equal"}
_OF_BOOLEANS = {"&": "both", "|": "either", "not": "negate"}
_ROUNDING = ("floor", "ceil", "trunc", "round")
_CASTS = ("int", "long", "float")


class PrintedCondition(NamedTuple):
    text: str
    fields: Numbers
    entries: dict[int, Entries]  # of the tensors that it reads, by their numbers


@functools.lru_cache(maxsize=256)
def printed(condition: Expr, entries: tuple[Entries, ...]) -> PrintedCondition:
    """`entries`: how all tensors of the score are read."""
    condition = with_places(condition)
    read = {load.args[0] for load in condition.loads()}
    read_entries = {i: e for i, e in enumerate(entries) if i in read}
    fields, elements = Numbers(), {i: e.element for i, e in enumerate(entries)}
    body = Body([condition], fields, {}, elements)
    of_pair = body.text(condition)
    ranges = _Ranges(fields, elements)
    of_block = ranges.name(condition)
    tensors = "".join(f"  const void* t{i};\n  const i64* strides{i};\n" for i in read_entries)
    arguments = "".join(f", p.{e.name}, p.{e.name}_strides" for e in read_entries.values())
    integers = ("  const int* n;\n", ", p.score_integers") if fields.integers else ("", "")
    text = (
        "struct Condition {\n"
        "  static constexpr bool kPositional = true;\n"
        f"  const float* c;\n{integers[0]}{tensors}"
        "  template <class Params> STROBE_DEVICE static Condition of(const Params& p) "
        f"{{ return Condition{{p.score{integers[1]}{arguments}}}; }}\n"
        f"  template <class At> STROBE_DEVICE bool of_pair(const At& at, int i) const {body.function(of_pair)}\n"
        "  template <class Block> STROBE_DEVICE Range<bool> of_block(const Block& block) const {\n"
        "    using At = typename Block::At;\n"
        f"{''.join(f'    {line}' for line in ranges.statements)}    return {of_block};\n  }}\n"
        "};\n"
    )
    return PrintedCondition(text, fields, read_entries)


class _Ranges:
    """One statement for each expression: r0, r1 and so on are the ranges of their values."""

    def __init__(self, fields: Numbers, elements: Mapping[int, str]) -> None:
        self._fields, self._elements = fields, elements
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
            body = Body([e], self._fields, {}, self._elements)
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
        body = Body([e], self._fields, {a: f"{r}.lo" for a, r in indices.items()}, self._elements)
        entry = f"ranges::point<{ctype}>({body.text(e)})"
        same = " && ".join(f"{r}.lo == {r}.hi" for r in indices.values())
        return f"{same} ? {entry} : ranges::anything<{ctype}>()"
