"""A score as the kernels compute it: the text of `struct Score`, and the numbers that it refers to."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from strobe.cuda.parts.print_expression import BEFORE, Body, Numbers, Values, is_of_head, with_places
from strobe.variants.expression import CTYPES, FLOAT, Expr, S
from strobe.variants.kernel_form import KernelForm, ScaledForm, kernel_form
from strobe.variants.score import Score

_X, _Y = (Expr("var", (name,)) for name in ("x", "y"))
# Operations on places and numbers that have a finite result.
_BOUNDED = {"+", "-", "*", "abs", "iabs", "float", "int", "min", "max", "select"}
_UNBOUNDED = {"/", "exp", "log", "pow", "sqrt"}  # that may have an infinite result, or NaN
_OF_PAIRS = {"q", "k", "s"}  # variables that differ between the pairs of a head


class Entries(NamedTuple):
    """The entries of a tensor as kernels read them."""

    name: str  # of the tensor among those of a plan
    element: str  # "float", "bf16", "bool", "int" and so on
    pairs: bool  # indexed by batch, head, query and key; else as the score says
    unit: bool = False  # keys are neighbours in memory
    size: int = 0  # bytes of an entry
    staged: bool = False  # some kernels read it by whole tiles (pipeline/pair_tile.cuh)
    prefetched: bool = False  # heads do not share it, so that it is not in the L2 when it is read
    learnt: bool = False  # its gradient is wanted

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


@dataclass(frozen=True)
class PrintedScore:
    """A score as the kernels have it: the text of `struct Score`, and the numbers that it refers to, which are a call's."""

    text: str
    fields: Numbers
    # Kernels that can read a bias by whole tiles do so: before dP is there, which a cheap sum alone allows.
    staged: bool
    _form: KernelForm
    _whole: bool

    def numbers(self, scale: float) -> Values:
        return self.fields.values(self._at(scale).before, self._at(scale).unscale)

    def factor_of_gradients(self, scale: float) -> float:
        """Return the factor of what `add_gradients` and `finish_gradients` add."""
        return 1.0 if self._whole else self._at(scale).after

    def _at(self, scale: float) -> ScaledForm:
        form = self._form.at(scale)
        assert form is not None, scale  # `Scores.limits`
        return form


def printed(score: Score, entries: Sequence[Entries] = ()) -> PrintedScore:
    """`entries`: how the captured tensors are read, by their numbers."""
    return _printed(score.structure, tuple(entries))


@functools.lru_cache(maxsize=256)
def _printed(score: Score, entries: tuple[Entries, ...]) -> PrintedScore:
    """x is q.k, y the inner expression of `kernel_form`, of which kernels compute exp2(scale_log2 * y), and `slope` its
    derivative. `at` tells where entry i of a fragment lies (pipeline/scores.cuh). The text does not depend on numbers:
    those are fields."""
    learnt = tuple(i for i, e in enumerate(entries) if e.learnt)
    expr = with_places(score.expr)
    form = kernel_form(expr)
    inner = form.inner
    of_learnt = _Learnt.of(expr, form, learnt)
    fields, of_head = Numbers([BEFORE]), dict[Expr, str]()
    methods = "".join(_methods_text(form, score.condition, of_learnt, entries, fields, of_head))
    cheap = _is_cheap_sum(inner, entries, of_learnt)
    staged = "".join(
        f"  using Staged = {e.element};\n"
        f"  STROBE_DEVICE const void* staged_tensor() const {{ return t{i}; }}\n"
        f"  STROBE_DEVICE const i64* staged_strides() const {{ return strides{i}; }}\n"
        for i, e in enumerate(entries)
        if e.staged and cheap
    )
    tensors = "".join(f"  const void* t{i};\n  const i64* strides{i};\n" for i in range(len(entries)))
    tensors += "".join(f"  float* g{i};\n" for i in learnt)
    arguments = "".join(f", p.{e.name}, p.{e.name}_strides" for e in entries)
    arguments += "".join(f", p.d{entries[i].name}" for i in learnt)
    integers = ("  const int* n;\n", ", p.score_integers") if fields.integers else ("", "")
    steep = _may_be_infinite(inner.derivative("s"))
    of_tanh = _arguments_of_tanh(inner)
    reach = "reach * fabs(c[0])" if of_tanh == [S] else "reach"
    members = "".join(f"  {CTYPES[e.kind]} h{i};\n" for i, e in enumerate(of_head))
    loads = "".join(f" s.h{i} = {load};" for i, load in enumerate(of_head.values()))
    visits = "".join(f" f(t{i}, strides{i}, {e.size});" for i, e in enumerate(entries) if e.prefetched)
    text = (
        "struct Score {\n"
        f"  static constexpr bool kIdentity = {str(inner == S).lower()};\n"
        f"  static constexpr bool kPositional = {str(not score.pointwise).lower()};\n"
        f"  static constexpr bool kMayHide = {str(score.may_hide or bool(entries)).lower()};  // a logit may be -inf\n"
        f"  static constexpr bool kCheapSum = {str(cheap).lower()};  // s and little more\n"
        f"  static constexpr bool kSteep = {str(steep).lower()};  // a slope may be infinite where a mask hides the pair\n"
        f"  static constexpr bool kLearns = {str(bool(learnt)).lower()};  // tensors that it captures have gradients\n"
        f"  static constexpr int kOfHead = {len(of_learnt.of_head)}, kRunning = {len(of_learnt.running)};  // their sums\n"
        f"  static constexpr bool kStaged = {str(bool(staged)).lower()};\n"
        f"  static constexpr bool kHasTanh = {str(bool(of_tanh)).lower()};\n"
        f"  const float* c;\n{integers[0]}{tensors}"
        f"{staged}{members}"
        "  template <class Config, class Params> STROBE_DEVICE static Score of(const Params& p, int batch, int head) "
        f"{{ return Score{{p.score{integers[1]}{arguments}}}.at_head<Config>(batch, head); }}\n"
        "  template <class Config> STROBE_DEVICE Score at_head(int batch, int head) const "
        f"{{ Score s = *this; if constexpr (Config::kPackGqa == 1) {{{loads}}} return s; }}\n"
        f"  STROBE_DEVICE bool is_near(float reach) const {{ return {reach} <= kTanhNear; }}\n"
        f"{''.join(e.cpp(i) for i, e in enumerate(entries))}"
        f"  template <class F> STROBE_DEVICE void each_tensor_to_prefetch(F f) const {{{visits}}}\n"
        f"{methods}"
        "};\n"
    )
    stages = cheap and any(e.staged for e in entries)
    return PrintedScore(text, fields, stages, form, of_learnt.whole)


def _is_cheap_sum(inner: Expr, entries: Sequence[Entries], learnt: _Learnt) -> bool:
    """Return whether the slope is 1 and no addresses are computed for single scores: the registers for them are taken
    while dP is under way. What tensors learn would take them again."""
    near = all(e.staged or not e.pairs for e in entries) and all(map(is_of_head, _indices(inner)))
    return near and inner.op != "where" and inner.derivative("s").is_one and not learnt.slopes


def _indices(inner: Expr) -> list[Expr]:
    return [index for load in inner.loads() for index in load.operands]


def _methods_text(
    form: KernelForm,
    condition: Expr | None,
    learnt: _Learnt,
    entries: Sequence[Entries],
    fields: Numbers,
    of_head: dict[Expr, str],
) -> Iterator[str]:
    """`fields` collects the numbers of the methods, `of_head` what they need of a head."""
    s = "x" if form.is_sum else f"x * {fields.field(BEFORE)}"
    variables = {_X: "x", _Y: "y", S: "s", Expr("tanh_near", (S,)): f"tanh_near(x, {fields.field(BEFORE)})"}
    elements = collections.defaultdict(str, {i: e.element for i, e in enumerate(entries)})
    for method in _methods(form.inner, condition):
        body = Body([method.expr], fields, variables, elements, of_head)
        text = body.text(method.expr)
        if body.reads(S):
            body.statements.insert(0, f"const float s = {s};")
        yield (
            f"  template <class At> STROBE_DEVICE {method.result} {method.name}({method.given}const At& at, int i) const "
            f"{body.function(text)}\n"
        )
    if learnt.slopes or any(e.learnt for e in entries):
        yield from _gradients(learnt, fields, s, elements, of_head)


class _Learnt(NamedTuple):
    """The loads through which gradients of captured tensors flow."""

    slopes: dict[Expr, Expr]  # the derivative by each load, where nothing is hidden
    of_head: list[Expr]  # at one place for all pairs of a head
    running: list[Expr]  # the others
    whole: bool  # else they are to be multiplied by the factor of the kernel form

    @staticmethod
    def of(expr: Expr, form: KernelForm, learnt: Sequence[int]) -> _Learnt:
        """Return what the tensors of `learnt` learn. If the score is a sum, the logit itself is differentiated: what is
        added to q.k in the kernel form is divided by a number."""
        slopes, of_logit = _slopes(_visible(form.inner), learnt), _slopes(_visible(expr), learnt)
        whole = form.is_sum and not any("s" in slope.variables() for slope in of_logit.values())
        slopes = of_logit if whole else slopes
        of_head = [e for e in slopes if not any(index.variables() & _OF_PAIRS for index in e.operands)]
        return _Learnt(slopes, of_head, [e for e in slopes if e not in of_head], whole)


def _slopes(e: Expr, learnt: Sequence[int]) -> dict[Expr, Expr]:
    loads = [load for load in e.loads() if load.args[0] in learnt and load.kind == FLOAT]
    return {load: slope for load in loads if not (slope := e.derivative(load)).is_zero}


def _visible(e: Expr) -> Expr:
    """Return the expression of visible entries: elsewhere dS is 0."""
    return _visible(e.args[0]) if e.op == "where" else e


def _is_finite(slope: Expr) -> bool:
    return all(n.op in _BOUNDED or n.op in ("const", "literal") or (n.op == "var" and n != S) for n in slope.nodes())


def _may_be_infinite(slope: Expr) -> bool:
    """Return whether the slope may be infinite where the score and the entries of tensors are finite."""
    by_number = [n for n in slope.nodes() if n.op == "/" and n.args[1].op in ("const", "literal")]
    return any(n.op in _UNBOUNDED and n not in by_number for n in slope.nodes())


def _gradients(
    learnt: _Learnt, fields: Numbers, s: str, elements: Mapping[int, str], of_head: dict[Expr, str]
) -> Iterator[str]:
    """`add_gradients` takes dS of an entry; what it leaves in `sums` is for `finish_gradients`, once for many. Where dS is 0
    the slope may be infinite."""
    roots = [*learnt.slopes.values(), *(index for e in learnt.running for index in e.operands)]
    body = Body(roots, fields, {S: "s"}, elements, of_head)

    def part(load: Expr) -> str:
        slope = learnt.slopes[load]
        product = f"ds * {body.text(slope)}"
        return "ds" if slope.is_one else product if _is_finite(slope) else f"ds == 0.f ? 0.f : {product}"

    adds = [f"sums.of_head[{i}] += {part(e)};" for i, e in enumerate(learnt.of_head)]
    for i, e in enumerate(learnt.running):
        adds.append(f"sums.running[{i}][fragment_row(i)].add(g{e.args[0]}, int({body.place(e)}), {part(e)});")
    given_s = [f"const float s = {s};"] if body.reads(S) else []
    yield (
        "  template <class Sums, class At> "
        "STROBE_DEVICE void add_gradients(Sums& sums, float x, float ds, const At& at, int i) const "
        f"{{ {' '.join([*given_s, *body.statements, *adds])} }}\n"
    )
    body = Body([index for e in learnt.of_head for index in e.operands], fields, {}, elements)
    adds = [f"add_of_warp(g{e.args[0]} + ({body.place(e)}), sums.of_head[{i}]);" for i, e in enumerate(learnt.of_head)]
    adds += [
        f"for (const RunningSum& of_row : sums.running[{i}]) of_row.finish(g{e.args[0]});"
        for i, e in enumerate(learnt.running)
    ]
    yield (
        "  template <class Sums, class At> STROBE_DEVICE void finish_gradients(const Sums& sums, const At& at) const "
        f'{{ static_assert(At::kOneHead, "one place for all"); const int i = 0; {" ".join([*body.statements, *adds])} }}\n'
    )


def _methods(inner: Expr, condition: Expr | None) -> list[_Method]:
    methods = [
        _Method("float", "operator()", "float x, ", inner),
        _Method("float", "slope", "float x, float y, ", inner.derivative("s").replaced(inner, _Y)),
    ]
    if reach := _arguments_of_tanh(inner):
        raw = [_X] if reach == [S] else reach
        farthest = functools.reduce(lambda a, b: Expr("max", (a, b)), [Expr("abs", (e,)) for e in raw])
        methods += [
            _Method("float", "near", "float x, ", inner.mapped(_near)),
            _Method("float", "reach", "float x, ", farthest),
        ]
    if condition is not None:  # for blocks in which it hides nothing
        inside = inner.args[0]
        slope = inside.derivative("s").replaced(inside, _Y)
        methods += [
            _Method("float", "inside", "float x, ", inside),
            _Method("float", "inside_slope", "float x, float y, ", slope),
        ]
    return methods


def _arguments_of_tanh(e: Expr) -> list[Expr]:
    return [node.args[0] for node in e.nodes() if node.op == "tanh"]


def _near(e: Expr) -> Expr | None:
    return Expr("tanh_near", (e.args[0].mapped(_near),)) if e.op == "tanh" else None
