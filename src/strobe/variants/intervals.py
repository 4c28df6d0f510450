"""The interval in a mask function: which of its conditions bound the keys of a row from the left or the right.

`k <= q`, `q - k < 128`, `k < n` become the two ends of a `Mask`: tiles outside are never visited, and no code runs for what
lies inside. What is left over is evaluated for each pair.
"""

from __future__ import annotations

from strobe.variants.expression import DIAGONAL, FLOAT, INT, LEN_K, LEN_Q, Expr, K, Q

_DIAGONAL_TERMS = ((1, Q), (1, LEN_K), (-1, LEN_Q))
# What an end of a mask is made of, beside numbers.
END_VARIABLES = frozenset(("q", "len_q", "len_k"))
END_OPERATIONS = frozenset(("+", "-", "*", "//", "min", "max"))
LARGEST = 1 << 30  # of its numbers
# Kernels compute an end in 32 bits. Positions and lengths are supposed to be no more than this many.
_MOST_POSITIONS = 1 << 28
_REVERSED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}

Ends = tuple[Expr | None, Expr | None]  # lo and hi; None: open


def split(condition: Expr) -> tuple[Ends, Expr | None]:
    """The interval, and the condition that is left over; None: nothing is."""
    lo: Expr | None = None
    hi: Expr | None = None
    rest: Expr | None = None
    for part in conjuncts(condition):
        ends = _ends(part)
        if ends is None:
            rest = part if rest is None else Expr("&", (rest, part))
            continue
        lo, hi = joined("max", lo, ends[0]), joined("min", hi, ends[1])
    return (lo, hi), rest


def joined(op: str, a: Expr | None, b: Expr | None) -> Expr | None:
    """The tighter end (`op` "max" on the left), where None is open."""
    if a is None or b is None or a == b:
        return a if b is None else b
    return Expr(op, (a, b))


def condition_of(ends: Ends) -> Expr:
    """An interval as a condition of a pair."""
    lo, hi = ends
    parts = ([] if lo is None else [lo <= K]) + ([] if hi is None else [hi > K])
    if not parts:
        return Expr("literal", (True,))
    return parts[0] if len(parts) == 1 else Expr("&", tuple(parts))


def _has_opposite(e: Expr) -> bool:
    """Not an order of floats: NaN is neither less than a number nor at least as large."""
    return e.op in ("==", "!=") or (e.op in _OPPOSITE and FLOAT not in (a.kind for a in e.args))


def negated(e: Expr) -> Expr:
    if _has_opposite(e):
        return Expr(_OPPOSITE[e.op], e.args)
    if e.op in ("&", "|"):
        return Expr("|" if e.op == "&" else "&", tuple(map(negated, e.args)))
    return e.args[0] if e.op == "not" else Expr("not", (e,))


def conjuncts(e: Expr) -> list[Expr]:
    if e.op == "&":
        return [part for a in e.args for part in conjuncts(a)]
    if e.op == "not" and (e.args[0].op in ("&", "|", "not") or _has_opposite(e.args[0])):
        return conjuncts(negated(e.args[0]))
    return [] if e == Expr("literal", (True,)) else [e]


def _ends(e: Expr) -> Ends | None:
    """The ends of a condition that is an interval by itself; None if it is not."""
    if e.op == "|":
        return _union(*map(_ends, e.args))
    if e.op not in ("<", "<=", ">", ">=", "==") or e.args[0].kind != INT or e.args[1].kind != INT:
        return None
    a, b = e.args
    if e.op == "==":
        return _same_chunk(a, b) or _same_chunk(b, a)
    op = e.op
    if b.op == "iabs":
        a, b, op = b, a, _REVERSED[op]
    if a.op == "iabs":  # |x| <= n: x <= n and -x <= n
        if op not in ("<", "<="):
            return None
        x = a.args[0]
        return _intersection(_bound(op, _terms(x, 1) + _terms(b, -1)), _bound(op, _terms(x, -1) + _terms(b, -1)))
    return _bound(op, _terms(a, 1) + _terms(b, -1))


def _union(a: Ends | None, b: Ends | None) -> Ends | None:
    """Only where it is an interval whatever the ends are: both are open on the same side."""
    if a is None or b is None:
        return None
    if a[0] is None and b[0] is None and a[1] is not None and b[1] is not None:
        return None, Expr("max", (a[1], b[1]))
    if a[1] is None and b[1] is None and a[0] is not None and b[0] is not None:
        return Expr("min", (a[0], b[0])), None
    return None


def _intersection(a: Ends | None, b: Ends | None) -> Ends | None:
    return None if a is None or b is None else (joined("max", a[0], b[0]), joined("min", a[1], b[1]))


def _terms(e: Expr, sign: int) -> list[tuple[int, Expr]]:
    if e.op in ("+", "-"):
        return _terms(e.args[0], sign) + _terms(e.args[1], sign if e.op == "+" else -sign)
    return [(sign, e)]


def _bound(op: str, terms: list[tuple[int, Expr]]) -> Ends | None:
    """The ends of `sum of terms OP 0`, if the key is one of the terms."""
    of_key = [sign for sign, e in terms if e == K]
    rest = [(sign, e) for sign, e in terms if e != K]
    if len(of_key) != 1 or any("k" in e.variables() for _, e in rest):
        return None
    sign = of_key[0]
    op = op if sign > 0 else _REVERSED[op]  # k OP -rest, or k OP rest
    left = op in (">", ">=")
    return _checked(_sum([(-sign * s, e) for s, e in rest], int(op in ("<=", ">")), left), left)


def _sum(terms: list[tuple[int, Expr]], number: int, left: bool) -> Expr:
    """The sum in the order of our own masks, so that equal functions of positions share a kernel: the diagonal, then
    the rest, then one number."""
    number += sum(sign * e.args[0] for sign, e in terms if e.op in ("const", "literal"))
    rest = [(sign, e) for sign, e in terms if e.op not in ("const", "literal")]
    total: Expr | None = None
    if all(term in rest for term in _DIAGONAL_TERMS):
        total = DIAGONAL
        for term in _DIAGONAL_TERMS:
            rest.remove(term)
    for sign, e in sorted(rest, key=lambda term: -term[0]):
        before = total or Expr("literal", (0,))
        total = e if total is None and sign > 0 else before + e if sign > 0 else before - e
    if total is None:
        return Expr.of(number)
    return total - Expr.of(-number) if left else total + Expr.of(number)


def _checked(end: Expr, left: bool) -> Ends | None:
    return None if not (is_end(end) and _fits(end)) else (end, None) if left else (None, end)


def is_end(e: Expr) -> bool:
    """Return whether an expression can be an end of a mask: made of positions and numbers, and never moving left."""
    return e.variables() <= END_VARIABLES and all(map(_may_be_in_an_end, e.nodes())) and _never_moves_left(e)


def _fits(e: Expr) -> bool:
    """Return whether 32 bits hold the end and all that it is computed from, for any positions."""
    return all(_magnitude(node) < 1 << 31 for node in e.nodes())


def _magnitude(e: Expr) -> int:
    """The largest magnitude of an end's value, for any positions."""
    if e.op in ("const", "literal"):
        return abs(e.args[0])
    if e.op == "var":
        return _MOST_POSITIONS
    a, b = map(_magnitude, e.args)
    if e.op == "*":
        return a * b
    if e.op == "//":
        return a // e.args[1].args[0] + 1
    return a + b if e.op in ("+", "-") else max(a, b)


def _may_be_in_an_end(e: Expr) -> bool:
    if e.op in ("const", "literal"):
        return e.kind == INT and abs(e.args[0]) <= LARGEST
    return e.op == "var" or (e.op in END_OPERATIONS and (e.op != "//" or _is_plain_division(e)))


def _is_plain_division(e: Expr) -> bool:
    """Kernels get the divisor as an argument, which must not be 0. Their text holds the dividend twice, so that it must not be
    a quotient itself."""
    dividend, divisor = e.args
    return divisor.op == "const" and divisor.args[0] > 0 and not any(node.op == "//" for node in dividend.nodes())


def _never_moves_left(end: Expr) -> bool:
    """Return whether it is plain that the end does not decrease as `q` grows."""
    if "q" not in end.variables() or end.op == "var":
        return True
    a, b = end.args
    if end.op in ("-", "//"):
        return _never_moves_left(a) and "q" not in b.variables()
    if end.op == "*":
        factor, rest = (a, b) if a.op == "const" else (b, a)
        return factor.op == "const" and factor.args[0] >= 0 and _never_moves_left(rest)
    return _never_moves_left(a) and _never_moves_left(b)


def _same_chunk(a: Expr, b: Expr) -> Ends | None:
    """k // n == x: from x * n on, n keys."""
    if a.op != "//" or a.args[0] != K or not _is_plain_division(a) or "k" in b.variables():
        return None
    n = a.args[1]
    return _intersection(_checked(b * n, left=True), _checked((b + Expr.of(1)) * n, left=False))
