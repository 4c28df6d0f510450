"""A score as kernels compute it: factors leave the expression, so that an exponential costs one FMA and one EX2."""

from __future__ import annotations

import math
from typing import NamedTuple

from strobe.variants.expression import Expr, S

UNSCALE = Expr("var", ("unscale",))  # what the rest of a sum is multiplied by: it follows from the scale of a call
LEAST = 2.0**-64  # of a factor: what is divided by it stays within fp32
_PLACES = {"q", "k"}  # variables that differ within a fragment of scores


class ScaledForm(NamedTuple):
    """exp2(after * log2(e) * inner(before * q.k))"""

    before: float
    inner: Expr  # of "s"; `s` itself where nothing happens
    after: float
    unscale: float = 1.0  # UNSCALE in `inner`


class KernelForm(NamedTuple):
    """The form of a score for any scale, on which no text depends therefore."""

    inner: Expr
    is_sum: bool  # `inner` is q.k and what is added to it, divided by the scale; else "s" in it has been scaled
    factor: float  # joins the scale
    after: float

    def at(self, scale: float) -> ScaledForm | None:
        """None: nothing may be multiplied by `after` later, or divided by the scale, since they are too small or negative."""
        scale = scale * self.factor
        if not self.is_sum:
            return ScaledForm(scale, self.inner, self.after) if self.after >= LEAST else None
        after = self.after * scale
        return ScaledForm(1.0, self.inner, after, 1 / scale) if min(scale, after) >= LEAST else None


def kernel_form(expr: Expr) -> KernelForm:
    """Outer factors join the exponential's, inner ones the scale. The scale of a sum divides what is added to q.k, which is
    often the same for many scores, instead of multiplying each of them."""
    if expr.op == "where" and "s" not in expr.args[1].variables():  # hidden is -inf, whatever the factors
        form = kernel_form(expr.args[0])
        return form._replace(inner=Expr("where", (form.inner, expr.args[1])))
    after = 1.0
    while expr.op == "*" and (outer := _factor(expr.args[0]) or _factor(expr.args[1])):
        after *= outer
        expr = expr.args[1] if _factor(expr.args[0]) else expr.args[0]
    factor, scaled = 1.0, _only_parent_of_s(expr)
    if scaled is not None and (number := _factor(scaled.args[1])):
        factor = number if scaled.op == "*" else 1 / number
        expr = expr.replaced(scaled, S)
    if is_sum(expr):
        return KernelForm(_divided(expr), True, factor, after)
    return KernelForm(expr, False, factor, after)


def is_sum(expr: Expr) -> bool:
    """Return whether it is `s`, or `s` and something that does not depend on it."""
    if expr.op not in ("+", "-"):
        return expr == S
    of_s = [a for a in expr.args if "s" in a.variables()]
    return len(of_s) == 1 and is_sum(of_s[0]) and (expr.op == "+" or of_s[0] is expr.args[0])


def _divided(total: Expr) -> Expr:
    """A sum, of which everything but `s` is divided by the scale."""
    if total == S:
        return total
    if "s" in total.variables():
        return Expr(total.op, tuple(map(_divided, total.args)))
    return _unscaled(total)


def _unscaled(e: Expr) -> Expr:
    """The quotient, formed out of what is the same for many scores as far as there is such a factor."""
    for i, a in enumerate(e.args if e.op == "*" else ()):
        if not a.variables() & _PLACES:
            return Expr("*", tuple(_unscaled(a) if i == j else b for j, b in enumerate(e.args)))
    return Expr("*", (e, UNSCALE))


def _factor(x: Expr) -> float | None:
    """The number, if others may be multiplied and divided by it."""
    return x.args[0] if x.op == "const" and LEAST <= x.args[0] < math.inf else None


def _only_parent_of_s(expr: Expr) -> Expr | None:
    """`s * c` or `s / c` if `s` occurs nowhere but in this one subexpression."""
    parents = {e for e in expr.nodes() if S in e.operands}
    parent = parents.pop() if len(parents) == 1 else None
    if parent is not None and parent.op in ("*", "/") and parent.args[0] == S and parent.args[1].op == "const":
        return parent
    return None
