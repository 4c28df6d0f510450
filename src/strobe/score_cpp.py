"""A score as the kernels compute it: the text of `struct Score`, and the numbers that it refers to."""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from strobe.expression import CTYPES, OPERATIONS, Expr
from strobe.expression_cpp import Body, Numbers, is_of_head
from strobe.kernel_form import is_sum

if TYPE_CHECKING:
    from strobe.score import Score

_S, _X, _Y = (Expr("var", (name,)) for name in ("s", "x", "y"))
_FINITE = ("+", "-", "*", "/", "tanh", "abs")  # operations that make no -inf of numbers


class Entries(NamedTuple):
    """How kernels read the entries of a tensor."""

    name: str  # of the tensor among those of a plan
    element: str  # "float", "bf16", "bool", "int" and so on
    pairs: bool  # indexed by batch, head, query and key; else as the score says
    unit: bool = False  # keys are neighbours in memory
    size: int = 0  # bytes of an entry
    staged: bool = False  # some kernels read it by whole tiles (pipeline/pair_tile.cuh)
    prefetched: bool = False  # heads do not share it, so that it is not in the L2 when it is read

    def cpp(self, number: int) -> str:
        if not self.pairs:
            return ""
        result = "bool" if self.element == "bool" else "float"
        staged = "if constexpr (At::kStaged) return at.staged(i); else " if self.staged else ""
        return (
            f"  template <class At> STROBE_DEVICE {result} entry{number}(const At& at, int i) const {{ {staged}"
            f"return entry_of_pair<{self.element}, {str(self.unit).lower()}>(t{number}, strides{number}, at, i); }}\n"
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
    made, methods, of_head = _printed(score, 1.0, entries)
    inner = score.kernel_form(1.0).inner
    staged = "".join(
        f"  using Staged = {e.element};\n"
        f"  STROBE_DEVICE const void* staged_tensor() const {{ return t{i}; }}\n"
        f"  STROBE_DEVICE const i64* staged_strides() const {{ return strides{i}; }}\n"
        for i, e in enumerate(entries)
        if e.staged
    )
    tensors = "".join(f"  const void* t{i};\n  const i64* strides{i};\n" for i in range(len(entries)))
    given = "".join(f", p.{e.name}, p.{e.name}_strides" for e in entries)
    integers = ("  const int* n;\n", ", p.score_integers") if made.integers else ("", "")
    may_hide = bool(entries) or any(node.op in OPERATIONS and node.op not in _FINITE for node in score.expr.nodes())
    of_tanh = _arguments_of_tanh(inner)
    reach = "reach * fabs(c[0])" if of_tanh == [_S] else "reach"
    members = "".join(f"  {CTYPES[e.kind]} h{i};\n" for i, e in enumerate(of_head))
    loads = "".join(f" s.h{i} = {load};" for i, load in enumerate(of_head.values()))
    visits = "".join(f" f(t{i}, strides{i}, {e.size});" for i, e in enumerate(entries) if e.prefetched)
    return (
        "struct Score {\n"
        f"  static constexpr bool kIdentity = {str(inner == _S).lower()};\n"
        f"  static constexpr bool kPositional = {str(not score.pointwise).lower()};\n"
        f"  static constexpr bool kMayHide = {str(may_hide).lower()};  // a logit may be -inf\n"
        f"  static constexpr bool kCheapSum = {str(_is_cheap_sum(inner, entries)).lower()};  // s and little more\n"
        f"  static constexpr bool kStaged = {str(bool(staged)).lower()};\n"
        f"  static constexpr bool kHasTanh = {str(bool(of_tanh)).lower()};\n"
        f"  const float* c;\n{integers[0]}{tensors}"
        f"{staged}{members}"
        "  template <class Config, class Params> STROBE_DEVICE static Score of(const Params& p, int batch, int head) "
        f"{{ return Score{{p.score{integers[1]}{given}}}.at_head<Config>(batch, head); }}\n"
        "  template <class Config> STROBE_DEVICE Score at_head(int batch, int head) const "
        f"{{ Score s = *this; if constexpr (Config::kPackGqa == 1) {{{loads}}} return s; }}\n"
        f"  STROBE_DEVICE bool is_near(float reach) const {{ return {reach} <= kTanhNear; }}\n"
        f"{''.join(e.cpp(i) for i, e in enumerate(entries))}"
        f"  template <class F> STROBE_DEVICE void each_tensor_to_prefetch(F f) const {{{visits}}}\n"
        f"{methods}"
        "};\n"
    )


def _is_cheap_sum(inner: Expr, entries: Sequence[Entries]) -> bool:
    """Whether the slope is 1 and no addresses are computed for single scores: the registers for them are taken while dP is
    under way."""
    near = all(e.staged or not e.pairs for e in entries) and all(map(is_of_head, _indices(inner)))
    return near and inner.op != "where" and inner.derivative("s").is_one


def _indices(inner: Expr) -> list[Expr]:
    return [index for load in inner.loads() for index in load.operands]


def numbers(score: Score, scale: float) -> Numbers:
    """What c[i] and n[i] are in the text of `struct`."""
    return _printed(score, scale, ())[0]


def _printed(score: Score, scale: float, entries: Sequence[Entries]) -> tuple[Numbers, str, dict[Expr, str]]:
    """The numbers, the methods, and what they need of a head."""
    form = score.kernel_form(scale)
    made = Numbers()
    made.floats.append(form.before)
    plain = form.inner.args[0] if form.inner.op == "where" else form.inner
    s = "x" if is_sum(plain) else "x * c[0]"
    given = {_X: "x", _Y: "y", _S: "s", Expr("tanh_near", (_S,)): "tanh_near(x, c[0])"}
    elements = collections.defaultdict(str, {i: e.element for i, e in enumerate(entries)})
    lines, of_head = [], dict[Expr, str]()
    for method in _methods(form.inner, score.condition):
        body = Body([method.expr], made, given, elements, of_head)
        text = body.text(method.expr)
        if body.reads(_S):
            body.statements.insert(0, f"const float s = {s};")
        lines.append(
            f"  template <class At> STROBE_DEVICE {method.result} {method.name}({method.given}const At& at, int i) const "
            f"{body.function(text)}\n"
        )
    return made, "".join(lines), of_head


def _methods(inner: Expr, condition: Expr | None) -> list[_Method]:
    found = [
        _Method("float", "operator()", "float x, ", inner),
        _Method("float", "slope", "float x, float y, ", inner.derivative("s").replaced(inner, _Y)),
    ]
    if reach := _arguments_of_tanh(inner):
        raw = [_X] if reach == [_S] else reach
        farthest = functools.reduce(lambda a, b: Expr("max", (a, b)), [Expr("abs", (e,)) for e in raw])
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
