"""A score as kernels compute it: factors leave the expression, so that an exponential costs one FMA and one EX2."""

from __future__ import annotations

import math
from typing import NamedTuple

from strobe.variants.expression import Expr

_S = Expr("var", ("s",))
_PLACES = {"q", "k"}  # variables that differ within a fragment of scores


class KernelForm(NamedTuple):
    """exp2(after * log2(e) * inner(before * q.k))"""

    before: float
    inner: Expr  # of "s"; `s` itself where nothing happens
    after: float


def kernel_form(expr: Expr, scale: float) -> KernelForm:
    """Outer factors join the exponential's, inner ones the scale. The scale of a sum divides what is added to q.k, which is
    often the same for many scores, instead of multiplying each of them."""
    if expr.op == "where" and "s" not in expr.args[1].variables():  # hidden is -inf, whatever the factors
        form = kernel_form(expr.args[0], scale)
        return form._replace(inner=Expr("where", (form.inner, expr.args[1])))
    after = 1.0
    while expr.op == "*" and (factor := _positive(expr.args[0]) or _positive(expr.args[1])):
        after *= factor
        expr = expr.args[1] if expr.args[0].op == "const" else expr.args[0]
    before, scaled = scale, _only_parent_of_s(expr)
    if scaled is not None:
        number = scaled.args[1].args[0]
        before = scale * number if scaled.op == "*" else scale / number
        expr = expr.replaced(scaled, _S)
    if expr == _S:
        return KernelForm(1.0, _S, after * before)
    if is_sum(expr) and before:
        return KernelForm(1.0, _divided(expr, before), after * before)
    return KernelForm(before, expr, after)


def is_sum(expr: Expr) -> bool:
    """Whether it is `s`, or `s` and something that does not depend on it."""
    if expr.op not in ("+", "-"):
        return expr == _S
    of_s = [a for a in expr.args if "s" in a.variables()]
    return len(of_s) == 1 and is_sum(of_s[0]) and (expr.op == "+" or of_s[0] is expr.args[0])


def _divided(total: Expr, divisor: float) -> Expr:
    """A sum, of which everything but `s` is divided."""
    if total == _S:
        return total
    if "s" in total.variables():
        return Expr(total.op, tuple(_divided(a, divisor) for a in total.args))
    return _times(total, Expr("const", (1 / divisor,)))


def _times(e: Expr, factor: Expr) -> Expr:
    """The product, formed out of what is the same for many scores as far as there is such a factor."""
    for i, a in enumerate(e.args if e.op == "*" else ()):
        if not a.variables() & _PLACES:
            return Expr("*", tuple(_times(a, factor) if i == j else b for j, b in enumerate(e.args)))
    return Expr("*", (e, factor))


def _positive(x: Expr) -> float | None:
    return x.args[0] if x.op == "const" and 0 < x.args[0] < math.inf else None


def _only_parent_of_s(expr: Expr) -> Expr | None:
    """`s * c` or `s / c` if `s` occurs nowhere but in this one subexpression."""
    parents = {e for e in expr.nodes() if _S in e.operands}
    found = parents.pop() if len(parents) == 1 else None
    if found is not None and found.op in ("*", "/") and found.args[0] == _S and found.args[1].op == "const":
        return found
    return None
