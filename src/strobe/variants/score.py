"""A score is one expression, applied before the softmax: s = scale * q.k becomes `score(s)`, then + bias.

Softcap and ALiBi are instances. One definition serves the torch backends, which evaluate it, the kernels, which get its
C++ text, and the backward pass, which needs its derivative. Masking follows, and is `mask.py`'s business.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from strobe.variants.expression import (
    BOOL,
    CTYPES,
    FLOAT,
    INT,
    LEN_K,
    LEN_Q,
    LONG,
    OPERATIONS,
    PLACE,
    B,
    Expr,
    H,
    K,
    Q,
    S,
)
from strobe.variants.kernel_form import KernelForm, ScaledForm, kernel_form
from strobe.variants.mask import Mask
from strobe.variants.text import Grammar, full_name, parse, parse_name

_FINITE = ("+", "-", "*", "/", "tanh", "abs", "float")  # operations that make no -inf of finite numbers
LOG2E = math.log2(math.e)
# dtypes of the tensors that a function may capture -> the kind of their elements
ELEMENT_KINDS = {
    **dict.fromkeys((torch.float64, torch.float32, torch.bfloat16, torch.float16), FLOAT),
    **dict.fromkeys((torch.int32, torch.int16, torch.int8, torch.uint8), INT),
    torch.int64: LONG,
    torch.bool: BOOL,
}


@dataclass(frozen=True, eq=False)
class Score:
    """An expression of `s`, the scaled score, and perhaps of where it is (expression.PLACE) and of captured tensors.
    Title and `sizes` make the name, as for a mask."""

    expr: Expr
    title: str
    tensors: tuple[torch.Tensor, ...] = ()
    sizes: tuple[Any, ...] = ()

    @functools.cached_property
    def name(self) -> str:
        return full_name(self.title, self.sizes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles no derived values: a hash of strings means nothing to another process."""
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
        for load in self.expr.loads():
            number, kind, axes = load.args[0], load.kind, len(load.operands)
            if (
                number >= len(tensors)
                or tensors[number].dim() != axes
                or ELEMENT_KINDS.get(tensors[number].dtype) != kind
            ):
                shapes = [(tuple(t.shape), t.dtype) for t in tensors]
                raise ValueError(
                    f"{self!r} reads {axes} axes of {CTYPES[kind]} of tensor {number}; its tensors are {shapes}"
                )
        return Score(self.expr, self.title, tuple(tensors), self.sizes)

    @property
    def is_identity(self) -> bool:
        return self.expr == S

    @functools.cached_property
    def pointwise(self) -> bool:
        """Return whether it depends on the score alone, not on where that is."""
        return self.expr.variables() <= {"s"}

    @functools.cached_property
    def derivative(self) -> Expr:
        """d score / d s. It shares its subexpressions with `expr`: evaluate both with the same `known`."""
        return self.expr.derivative("s")

    @functools.cached_property
    def may_hide(self) -> bool:
        """Return whether its operations may make -inf of finite numbers."""
        return any(n.op in OPERATIONS and n.op not in _FINITE for n in self.expr.nodes())

    @functools.cached_property
    def form(self) -> KernelForm:
        return kernel_form(self.expr)

    def kernel_form(self, scale: float) -> ScaledForm:
        """The form that kernels compute; where they cannot, since no factors can be taken out, the score as it is."""
        plain = ScaledForm(1.0, S, scale) if self.is_identity else ScaledForm(scale, self.expr, 1.0)
        return self.form.at(scale) or plain

    def hiding(self, mask: Mask) -> Score:
        """The score where the condition of a mask is true, and nothing elsewhere. Its interval is not looked at."""
        assert mask.rest is not None
        visible = mask.rest.with_later_tensors(len(self.tensors))
        title = mask.title if self.is_identity else f"{self.title} & {mask.title}"
        return Score(Expr("where", (self.expr, visible)), title, self.tensors + mask.tensors, self.sizes + mask.sizes)

    def with_first_head(self, head: int) -> Score:
        """The score for a call that has only some of the heads, from this one on: tensors have an entry for every
        head."""
        shifted = self.expr.replaced(H, H + Expr.of(head)) if "h" in self.expr.variables() else self.expr
        return Score(shifted, self.title, self.tensors, self.sizes)

    def with_pairs(self, bias: bool, mask: bool) -> Score:
        """The score with a bias added, and what a mask hides hidden: two more tensors, indexed by (batch, head, q, k)."""
        expr, number = self.expr, tensor_count(self.expr)
        if bias:
            biased = "biased_if_seen" if self.may_hide else "biased"
            expr, number = Expr(biased, (expr, Expr("tensor", (number,)))), number + 1
        if mask:
            expr = Expr("where", (expr, Expr("tensor", (number,))))
        return Score(expr, self.title, (), self.sizes) if bias or mask else self

    @functools.cached_property
    def condition(self) -> Expr | None:
        """The condition that hides scores, if it is a function of where they are alone."""
        condition = self.expr.args[1] if self.expr.op == "where" else None
        if condition is None or any(node.op == "tensor" or node == S for node in condition.nodes()):
            return None
        return condition

    def text(self) -> str:
        """The expression, as `parse_score` reads it; the tensors travel apart."""
        return f"{self.expr.text()};{self.name}"

    def text_and_numbers(self) -> tuple[str, list[Any]]:
        """The text with a placeholder for each number, and the numbers, which may be symbols of a tracer."""
        numbers: list[Any] = []
        text = self.expr.text(numbers)
        for n in numbers:
            if isinstance(n, int) and abs(n) > 1 << 53:
                raise ValueError(f"{self.title} has the number {n}; a graph holds it as a float, which has 53 bits")
        return f"{text};{self.title}", [*numbers, *self.sizes]


@dataclass(frozen=True, eq=False)
class DerivedScore(Score):
    """A score whose tensors are computed from others, which may learn: each call computes them again."""

    derive: Callable[[], tuple[torch.Tensor, ...]] = tuple

    def __reduce__(self) -> tuple[Any, ...]:
        return DerivedScore, (self.expr, self.title, self.tensors, self.sizes, self.derive)

    def current(self) -> Score:
        """The score with tensors computed now, through which gradients flow."""
        return Score(self.expr, self.title, self.derive(), self.sizes)


def tensor_count(expr: Expr) -> int:
    return 1 + max((load.args[0] for load in expr.loads()), default=-1)


_GRAMMAR = Grammar(
    frozenset(("s", *PLACE)),
    frozenset(OPERATIONS) - {"biased", "biased_if_seen", "tanh_near"},
    tensors=True,
)

identity = Score(S, "identity")


def softcap(cap: float) -> Score:
    """Scores become cap * tanh(score / cap)."""
    return Score(Expr.of(cap) * Expr("tanh", (S / cap,)), "softcap(?)", (), (cap,))


def alibi(slopes: torch.Tensor) -> Score:
    """Attention with linear biases: scores fall by slopes[head] (or slopes[batch, head]) for every position between
    query and key. The last query stands opposite the last key."""
    if not isinstance(slopes, torch.Tensor) or slopes.dim() not in (1, 2) or not slopes.dtype.is_floating_point:
        got = f"{slopes.dtype} of shape {tuple(slopes.shape)}" if isinstance(slopes, torch.Tensor) else repr(slopes)
        raise ValueError(f"slopes must be a floating-point tensor (heads,) or (batch, heads), got {got}")
    q, k, len_q, len_k = (Expr("float", (e,)) for e in (Q, K, LEN_Q, LEN_K))
    distance = Expr("abs", (q + (len_k - len_q) - k,))
    index = (H,) if slopes.dim() == 1 else (B, H)
    return Score(S - Expr("load", (0, FLOAT, *index)) * distance, "alibi", (slopes,))


def parse_score(text: str, numbers: tuple[float, ...] = ()) -> Score:
    """The score that has this `text()`, or this text and these numbers, without tensors."""
    return _parse_score(text, numbers, repr(numbers))


@functools.lru_cache(maxsize=64)
def _parse_score(text: str, numbers: tuple[float, ...], key: str) -> Score:
    """`key` tells 1 from 1.0, and 0.0 from -0.0, which are equal."""
    if ";" not in text:
        raise ValueError(f"{text!r:.80} is not the text of a score: an expression and a name, separated by ;")
    expr, title = text.split(";", 1)
    values = iter(numbers)
    parsed = parse(expr, _GRAMMAR, values)
    if parsed.kind != FLOAT:
        raise ValueError(f"{expr!r:.80} is no score: it is of type {CTYPES[parsed.kind]}")
    return Score(parsed, parse_name(title, values))
