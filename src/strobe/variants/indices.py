"""The indices of captured tensors: a negative one counts from the end of its axis, as in torch.

Kernels and tiles clamp an index to its axis. What comes before that is part of the expression, and only where an index may be
negative: it costs an addition for each pair.
"""

from __future__ import annotations

from strobe.variants.expression import BOOL, DIAGONAL, PLACE, Expr

_AS_THEIR_OPERANDS = {"+", "*", "//", "min", "int", "long", "float", "floor", "ceil", "trunc", "round"}
_NEVER_NEGATIVE = {"iabs", "abs", "exp", "sqrt", "sigmoid"}


def counted_from_zero(index: Expr, size: int) -> Expr | None:
    """The index of an axis of this size, where it is not negative; None: it is a number beyond the axis."""
    if index.op in ("const", "literal"):
        number = index.args[0]
        return None if not -size <= number < size else Expr(index.op, (number % size,))
    if is_never_negative(index):
        return index
    return Expr("select", (index < Expr("literal", (0,)), index + Expr.of(size), index))


def is_never_negative(e: Expr) -> bool:
    """Return whether it is plain that an index is not negative. A query's position is not: calls with more queries than
    keys are refused."""
    if e == DIAGONAL or e.kind == BOOL or e.op in _NEVER_NEGATIVE:
        return True
    if e.op in ("const", "literal"):
        return e.args[0] >= 0
    if e.op == "var":
        return e.args[0] in PLACE
    if e.op == "max":
        return any(map(is_never_negative, e.args))
    if e.op == "mod":
        return is_never_negative(e.args[1])
    if e.op == "select":
        return all(map(is_never_negative, e.args[1:]))
    return e.op in _AS_THEIR_OPERANDS and all(map(is_never_negative, e.args))
