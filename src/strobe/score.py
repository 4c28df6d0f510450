"""What happens to a score before the softmax, as one expression: s = scale * q.k becomes `score(s)`, then + bias.

Softcap and ALiBi are instances. One definition serves the torch backends, which evaluate it, the kernels, which get its
C++ text, and the backward pass, which needs its derivative. Masking follows, and is `mask.py`'s business.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from strobe.expression import OPERATIONS, Expr, Grammar, full_name, parse, parse_name

LOG2E = math.log2(math.e)
_s = Expr("var", ("s",))


class KernelForm(NamedTuple):
    """A score as kernels compute it, so that an exponential costs one FMA and one EX2:
    exp2(after * log2(e) * inner(before * q.k))."""

    before: float
    inner: Expr  # of "s"; `s` itself where nothing happens
    after: float


class Entries(NamedTuple):
    """How kernels read the entries of a tensor."""

    name: str  # of the tensor among those of a plan
    element: str  # "float", "bf16", "fp16" or "bool"
    pairs: bool  # indexed by query and key, too, not only by batch and head
    unit: bool = False  # keys are neighbours in memory

    def cpp(self, number: int) -> str:
        read = f"entry_of_pair<{self.element}, {str(self.unit).lower()}>" if self.pairs else "entry_of_head"
        result = "bool" if self.element == "bool" else "float"
        return (
            f"  template <class At> STROBE_DEVICE {result} entry{number}(const At& at, int i) const "
            f"{{ return {read}(t{number}, strides{number}, at, i); }}\n"
        )


@dataclass(frozen=True, eq=False)
class Score:
    """An expression of `s`, the scaled score, and perhaps of the positions `q`, `k`, `len_q`, `len_k` and of captured
    tensors that are indexed by head or by batch and head. Captured tensors are constants: they have no gradient. Title
    and `sizes` make the name, as those of a mask."""

    expr: Expr
    title: str
    tensors: tuple[torch.Tensor, ...] = ()
    sizes: tuple[Any, ...] = ()

    @functools.cached_property
    def name(self) -> str:
        return full_name(self.title, self.sizes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what is derived: a hash of strings means nothing to another process."""
        return Score, (self.expr, self.title, self.tensors, self.sizes)

    def __repr__(self) -> str:
        return f"strobe.{self.name}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Score) and self.expr == other.expr and self._same_tensors(other)

    def _same_tensors(self, other: Score) -> bool:
        return len(self.tensors) == len(other.tensors) and all(map(operator.is_, self.tensors, other.tensors))

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.expr)

    @functools.cached_property
    def structure(self) -> Score:
        """The score without its tensors: what a `Problem` knows of it."""
        return Score(self.expr, self.title, (), self.sizes) if self.tensors else self

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Score:
        for number, axes in sorted(self.expr.tensors()):
            if number >= len(tensors) or tensors[number].dim() != len(axes):
                shapes = [tuple(t.shape) for t in tensors]
                raise ValueError(f"{self!r} refers to tensor {number} with {len(axes)} axes; its tensors have {shapes}")
        return Score(self.expr, self.title, tuple(tensors), self.sizes)

    @property
    def is_identity(self) -> bool:
        return self.expr == _s

    @functools.cached_property
    def pointwise(self) -> bool:
        """Whether it depends on the score alone, not on where that is."""
        return self.expr.variables() <= {"s"}

    @functools.cached_property
    def derivative(self) -> Expr:
        """d score / d s. It shares its subexpressions with `expr`: evaluate both with the same `known`."""
        return self.expr.derivative("s")

    def kernel_form(self, scale: float) -> KernelForm:
        """Constant factors leave the expression: outer ones join the exponential's, inner ones the scale."""
        expr, after = self.expr, 1.0
        while expr.op == "*" and (factor := _positive(expr.args[0]) or _positive(expr.args[1])):
            after *= factor
            expr = expr.args[1] if expr.args[0].op == "const" else expr.args[0]
        if expr == _s:
            return KernelForm(1.0, _s, after * scale)
        scaled = _only_parent_of_s(expr)
        if scaled is not None:
            number = scaled.args[1].args[0]
            before = scale * number if scaled.op == "*" else scale / number
            return KernelForm(before, expr.replaced(scaled, _s), after)
        return KernelForm(scale, expr, after)

    def with_pairs(self, bias: bool, mask: bool) -> Score:
        """The score with a bias added, and what a mask hides hidden: two more tensors, indexed by (batch, head, q, k)."""
        expr, number = self.expr, len(self.expr.tensors())
        if bias:
            expr, number = Expr("biased", (expr, Expr("tensor", (number, "bhqk")))), number + 1
        if mask:
            expr = Expr("where", (expr, Expr("tensor", (number, "bhqk"))))
        return Score(expr, self.title, (), self.sizes) if bias or mask else self

    def cpp(self, entries: Sequence[Entries] = ()) -> str:
        """`struct Score` for the kernels: x is q.k, y the inner expression of `kernel_form`, of which they compute
        exp2(scale_log2 * y), and `slope` its derivative. `at` tells where entry i of a fragment lies
        (pipeline/scores.cuh). The text does not depend on numbers: those are fields, see `constants`. `entries`: how the
        captured tensors are read, by their numbers."""
        inner, slope = self._inner_and_slope(1.0)
        numbers: list[float] = [1.0]
        value, derivative = inner.cpp(numbers), slope.cpp(numbers)
        identity = inner == _s
        tensors = "".join(f"  const void* t{i};\n  const i64* strides{i};\n" for i in range(len(entries)))
        given = "".join(f", p.{e.name}, p.{e.name}_strides" for e in entries)
        return (
            "struct Score {\n"
            f"  static constexpr bool kIdentity = {str(identity).lower()};\n"
            f"  static constexpr bool kPositional = {str(not self.pointwise).lower()};\n"
            f"  static constexpr bool kMayHide = {str(bool(entries)).lower()};  // a logit may be -inf\n"
            "  const float* c;\n"
            f"{tensors}"
            "  template <class Params> STROBE_DEVICE static Score of(const Params& p) "
            f"{{ return Score{{p.score{given}}}; }}\n"
            f"{''.join(e.cpp(i) for i, e in enumerate(entries))}"
            "  template <class At> STROBE_DEVICE float operator()(float x, const At& at, int i) const "
            f"{{ {'' if identity else _names(inner)}return {'x' if identity else value}; }}\n"
            "  template <class At> STROBE_DEVICE float slope(float x, float y, const At& at, int i) const "
            f"{{ {_names(slope)}return {derivative}; }}\n"
            "};\n"
        )

    def constants(self, scale: float) -> tuple[float, ...]:
        """The numbers c[i] that the text of `cpp` refers to."""
        inner, slope = self._inner_and_slope(scale)
        numbers: list[float] = [self.kernel_form(scale).before]
        inner.cpp(numbers)
        slope.cpp(numbers)
        return tuple(numbers)

    def _inner_and_slope(self, scale: float) -> tuple[Expr, Expr]:
        """The inner expression, and its derivative by `s` with the value of the former, `y`, known."""
        inner = self.kernel_form(scale).inner
        return inner, inner.derivative("s").replaced(inner, Expr("var", ("y",)))

    def text(self) -> str:
        """The expression, as `parse_score` reads it; the tensors travel apart."""
        return f"{self.expr.text()};{self.name}"

    def text_and_numbers(self) -> tuple[str, list[Any]]:
        """The text with a placeholder for each number, and the numbers, which may be symbols of a tracer."""
        numbers: list[Any] = []
        text = self.expr.text(numbers)
        return f"{text};{self.title}", [*numbers, *self.sizes]


# How the C++ text of an expression gets the variables in it.
_PLACES = {
    "s": "const float s = x * c[0]; ",
    "q": "const float q = float(at.q(i)); ",
    "k": "const float k = float(at.k(i)); ",
    "len_q": "const float len_q = float(at.len_q); ",
    "len_k": "const float len_k = float(at.len_k); ",
}


def _names(expr: Expr) -> str:
    used = expr.variables()
    return "".join(text for name, text in _PLACES.items() if name in used)


def _positive(x: Expr) -> float | None:
    return x.args[0] if x.op == "const" and 0 < x.args[0] < math.inf else None


def _only_parent_of_s(expr: Expr) -> Expr | None:
    """`s * c` or `s / c` if `s` occurs nowhere but in this one subexpression."""
    parents: set[Expr] = set()

    def visit(e: Expr) -> None:
        if e.op not in OPERATIONS:
            return
        if _s in e.args:
            parents.add(e)
        for a in e.args:
            visit(a)

    visit(expr)
    found = parents.pop() if len(parents) == 1 else None
    if found is not None and found.op in ("*", "/") and found.args[0] == _s and found.args[1].op == "const":
        return found
    return None


MAX_CONSTANTS = 8  # room for them in the kernels' arguments

_GRAMMAR = Grammar(
    frozenset(("s", "q", "k", "len_q", "len_k")), frozenset(OPERATIONS) - {"//", "where", "biased"}, tensors=True
)

identity = Score(_s, "identity")


def softcap(cap: float) -> Score:
    """Scores become cap * tanh(score / cap)."""
    return Score(Expr.of(cap) * Expr("tanh", (_s / cap,)), "softcap(?)", (), (cap,))


def alibi(slopes: torch.Tensor) -> Score:
    """Attention with linear biases: scores fall by slopes[head] (or slopes[batch, head]) for every position between
    query and key. The last query stands opposite the last key."""
    if not isinstance(slopes, torch.Tensor) or slopes.dim() not in (1, 2) or not slopes.dtype.is_floating_point:
        raise ValueError("slopes must be a floating-point tensor (heads,) or (batch, heads)")
    if slopes.requires_grad:
        raise ValueError("slopes requires grad; the tensors of a score are constants: pass slopes.detach()")
    q, k, len_q, len_k = (Expr("var", (name,)) for name in ("q", "k", "len_q", "len_k"))
    distance = Expr("abs", (q + (len_k - len_q) - k,))
    return Score(_s - Expr("tensor", (0, "h" if slopes.dim() == 1 else "bh")) * distance, "alibi", (slopes,))


@functools.lru_cache(maxsize=64)
def parse_score(text: str, numbers: tuple[float, ...] = ()) -> Score:
    """The score that has this `text()`, or this text and these numbers, without tensors."""
    if ";" not in text:
        raise ValueError(f"{text!r:.80} is not the text of a score: an expression and a name, separated by ;")
    expr, title = text.split(";", 1)
    given = iter(numbers)
    return Score(parse(expr, _GRAMMAR, given), parse_name(title, given))
