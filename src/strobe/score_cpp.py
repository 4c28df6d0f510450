"""A score as the kernels compute it: the text of `struct Score`, and the numbers that it refers to."""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from strobe.expression import OPERATIONS, Expr
from strobe.expression_cpp import Body, Numbers

if TYPE_CHECKING:
    from strobe.score import Score

_S, _Y = (Expr("var", (name,)) for name in ("s", "y"))
_FINITE = ("+", "-", "*", "/", "tanh", "abs")  # operations that make no -inf of numbers


class Entries(NamedTuple):
    """How kernels read the entries of a tensor."""

    name: str  # of the tensor among those of a plan
    element: str  # "float", "bf16", "bool", "int" and so on
    pairs: bool  # indexed by batch, head, query and key; else as the score says
    unit: bool = False  # keys are neighbours in memory
    size: int = 0  # bytes of an entry
    prefetched: bool = False  # heads do not share it, so that it is not in the L2 when it is read

    def cpp(self, number: int) -> str:
        if not self.pairs:
            return ""
        result = "bool" if self.element == "bool" else "float"
        return (
            f"  template <class At> STROBE_DEVICE {result} entry{number}(const At& at, int i) const "
            f"{{ return entry_of_pair<{self.element}, {str(self.unit).lower()}>(t{number}, strides{number}, at, i); }}\n"
        )


class _Method(NamedTuple):
    result: str
    name: str
    given: str  # arguments before `at` and `i`
    expr: Expr


def struct(score: Score, entries: Sequence[Entries] = ()) -> str:
    """x is q.k, y the inner expression of `kernel_form`, of which kernels compute exp2(scale_log2 * y), and `slope` its
    derivative. `at` tells where entry i of a fragment lies (pipeline/scores.cuh). The text does not depend on numbers:
    those are fields, see `numbers`. `entries`: how the captured tensors are read, by their numbers."""
    made, methods = _printed(score, 1.0, entries)
    inner = score.kernel_form(1.0).inner
    tensors = "".join(f"  const void* t{i};\n  const i64* strides{i};\n" for i in range(len(entries)))
    given = "".join(f", p.{e.name}, p.{e.name}_strides" for e in entries)
    integers = ("  const int* n;\n", ", p.score_integers") if made.integers else ("", "")
    may_hide = bool(entries) or any(node.op in OPERATIONS and node.op not in _FINITE for node in score.expr.nodes())
    visits = "".join(f" f(t{i}, strides{i}, {e.size});" for i, e in enumerate(entries) if e.prefetched)
    return (
        "struct Score {\n"
        f"  static constexpr bool kIdentity = {str(inner == _S).lower()};\n"
        f"  static constexpr bool kPositional = {str(not score.pointwise).lower()};\n"
        f"  static constexpr bool kMayHide = {str(may_hide).lower()};  // a logit may be -inf\n"
        f"  static constexpr bool kHasTanh = {str(bool(_arguments_of_tanh(inner))).lower()};\n"
        f"  const float* c;\n{integers[0]}{tensors}"
        "  template <class Params> STROBE_DEVICE static Score of(const Params& p) "
        f"{{ return Score{{p.score{integers[1]}{given}}}; }}\n"
        f"{''.join(e.cpp(i) for i, e in enumerate(entries))}"
        f"  template <class F> STROBE_DEVICE void each_tensor_to_prefetch(F f) const {{{visits}}}\n"
        f"{methods}"
        "};\n"
    )


def numbers(score: Score, scale: float) -> Numbers:
    """What c[i] and n[i] are in the text of `struct`."""
    return _printed(score, scale, ())[0]


def _printed(score: Score, scale: float, entries: Sequence[Entries]) -> tuple[Numbers, str]:
    form = score.kernel_form(scale)
    made = Numbers()
    made.floats.append(form.before)
    plain = form.inner.args[0] if form.inner.op == "where" else form.inner
    s = "x" if plain == _S else "x * c[0]"
    elements = collections.defaultdict(str, {i: e.element for i, e in enumerate(entries)})
    lines = []
    for method in _methods(form.inner, score.condition):
        body = Body([method.expr], made, {_Y: "y", _S: "s"}, elements)
        text = body.text(method.expr)
        if "s" in method.expr.variables():
            body.statements.insert(0, f"const float s = {s};")
        lines.append(
            f"  template <class At> STROBE_DEVICE {method.result} {method.name}({method.given}const At& at, int i) const "
            f"{body.function(text)}\n"
        )
    return made, "".join(lines)


def _methods(inner: Expr, condition: Expr | None) -> list[_Method]:
    found = [
        _Method("float", "operator()", "float x, ", inner),
        _Method("float", "slope", "float x, float y, ", inner.derivative("s").replaced(inner, _Y)),
    ]
    if reach := _arguments_of_tanh(inner):
        farthest = functools.reduce(lambda a, b: Expr("max", (a, b)), [Expr("abs", (e,)) for e in reach])
        found += [
            _Method("float", "near", "float x, ", inner.mapped(_near)),
            _Method("float", "reach", "float x, ", farthest),
        ]
    if condition is not None:  # for blocks in which it hides nothing
        inside = inner.args[0]
        slope = inside.derivative("s").replaced(inside, _Y)
        found += [
            _Method("float", "inside", "float x, ", inside),
            _Method("float", "inside_slope", "float x, float y, ", slope),
        ]
    return found


def _arguments_of_tanh(e: Expr) -> list[Expr]:
    return [node.args[0] for node in e.nodes() if node.op == "tanh"]


def _near(e: Expr) -> Expr | None:
    return Expr("tanh_near", (e.args[0].mapped(_near),)) if e.op == "tanh" else None
