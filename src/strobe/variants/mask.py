"""Masks, each defined once: query row `q` sees the keys `lo(q) <= k < hi(q)`, and neither end ever moves left as `q` grows.

From these two integer expressions come the dense mask of the reference, the C++ text of the kernels, the range of key tiles to
visit and which of them need no masking, and the exact count of visible pairs. `q`, `k`, `len_q` and `len_k` are positions and
lengths in the whole sequence, of which a call may hold a part (`Positions`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from strobe.variants.expression import Expr, Value, on_device
from strobe.variants.text import Grammar, full_name, parse, parse_name

_UNBOUNDED = 1 << 30  # larger constants are clamped so that 32-bit arithmetic in the kernels cannot overflow


class Positions(NamedTuple):
    """Where the rows and keys of a call lie in the whole sequence: its queries are those from `offset_q` on of `len_q`."""

    offset_q: int
    len_q: int
    offset_k: int
    len_k: int


def _join(op: str, a: Expr | None, b: Expr | None) -> Expr | None:
    if a is None or b is None or a == b:
        return a if b is None else b
    return Expr(op, (a, b))


@dataclass(frozen=True, eq=False)
class Mask:
    """An interval of keys per query row; `None` leaves that end open. Combine with `&`.

    The name is put together when someone asks for it, from a title and the `sizes` that stand for its `?`: where PyTorch
    traces, sizes may be symbols, which cannot be printed."""

    lo: Expr | None
    hi: Expr | None
    title: str
    sizes: tuple[Any, ...] = ()

    @functools.cached_property
    def name(self) -> str:
        return " & ".join(dict.fromkeys(full_name(self.title, self.sizes).split(" & ")))

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        lo, hi = _join("max", self.lo, other.lo), _join("min", self.hi, other.hi)
        if other.lo is None and other.hi is None:
            return Mask(lo, hi, self.title, self.sizes)
        if self.lo is None and self.hi is None:
            return Mask(lo, hi, other.title, other.sizes)
        return Mask(lo, hi, f"{self.title} & {other.title}", self.sizes + other.sizes)

    def __or__(self, other: Mask) -> Any:
        from strobe.variants.mask_function import either

        return either(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Any:
        from strobe.variants.mask_function import inverse

        return inverse(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles no derived values: a hash of strings means nothing to another process."""
        return Mask, (self.lo, self.hi, self.title, self.sizes)

    def __repr__(self) -> str:
        return (
            f"strobe.{self.name}" if "&" not in self.name else " & ".join(f"strobe.{n}" for n in self.name.split(" & "))
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self.lo == other.lo and self.hi == other.hi

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.lo, self.hi))

    def __hash__(self) -> int:
        return self._hash

    # ---- everything else is derived from the two ends -------------------------------------------------------------------

    def bounds(self, rows: Value, len_q: int, len_k: int, at: Positions | None = None) -> tuple[Value, Value]:
        """(lo, hi) of one row or a tensor of rows, clipped to the keys there are; nothing is visible where hi <= lo.
        Rows and keys count from the first one of the call, wherever that is `at`."""
        offset_q, whole_q, offset_k, whole_k = at or (0, len_q, 0, len_k)
        env = {"q": rows + offset_q, "len_q": whole_q, "len_k": whole_k}
        ends = []
        for expr, default in ((self.lo, 0), (self.hi, len_k)):
            end = default if expr is None else expr.evaluate(env) - offset_k
            if isinstance(rows, torch.Tensor):
                end = on_device(end, rows.device, rows.dtype).clamp(0, len_k).expand_as(rows)
            else:
                end = min(max(end, 0), len_k)
            ends.append(end)
        return ends[0], ends[1]

    def dense(
        self, len_q: int, len_k: int, device: torch.device | str = "cpu", at: Positions | None = None
    ) -> torch.Tensor:
        """The mask as booleans, (len_q, len_k); True may be attended. For the reference and for small pictures."""
        return self.block(torch.arange(len_q, device=device), torch.arange(len_k, device=device), len_q, len_k, at)

    def block(
        self, rows: torch.Tensor, keys: torch.Tensor, len_q: int, len_k: int, at: Positions | None = None
    ) -> torch.Tensor:
        """The booleans of the given rows and keys, (rows, keys)."""
        lo, hi = self.bounds(rows, len_q, len_k, at)
        return (lo[:, None] <= keys) & (keys < hi[:, None])

    def tiles(
        self, q0: int, q1: int, block_k: int, len_q: int, len_k: int, at: Positions | None = None
    ) -> tuple[int, int, int, int]:
        """Key tiles for the rows [q0, q1): (first, end, first_full, end_full). Tiles outside [first, end) are invisible
        to all of the rows; those in [first_full, end_full) are wholly visible to each of them and need no masking."""
        lo_first, hi_first = self.bounds(q0, len_q, len_k, at)
        lo_last, hi_last = self.bounds(q1 - 1, len_q, len_k, at)
        first, end = lo_first // block_k, -(-hi_last // block_k)
        end = max(first, end)
        first_full = min(max(-(-lo_last // block_k), first), end)
        end_full = min(max(hi_first // block_k, first_full), end)
        return first, end, first_full, end_full

    def area(self, len_q: int, len_k: int, at: Positions | None = None) -> int:
        """How many (query, key) pairs are visible: the exact work of one head."""
        if self.lo is None and self.hi is None:
            return len_q * len_k
        lo, hi = self.bounds(torch.arange(len_q, device="cpu"), len_q, len_k, at)
        return int((hi - lo).clamp(min=0).sum())

    def hides_nothing(self, len_q: int, len_k: int) -> bool:
        """Whether every query sees every key, whatever the mask is called."""
        if self.lo is None and self.hi is None:
            return True
        if not len_q:
            return True
        first, last = self.bounds(0, len_q, len_k), self.bounds(len_q - 1, len_q, len_k)
        return last[0] == 0 and first[1] == len_k  # neither end ever moves left

    @functools.cached_property
    def constants(self) -> tuple[int, ...]:
        """The numbers in the mask (window sizes, ...), in the order in which `cpp` refers to them."""
        constants: list[int] = []
        for expr in (self.lo, self.hi):
            if expr is not None:
                expr.cpp(constants)
        return tuple(constants)

    def cpp(self, positions: bool = False) -> str:
        """`struct Mask` for the kernels. Two masks of the same shape print the same text, whatever their constants."""
        return self._cpp_with_positions if positions else self._cpp

    @functools.cached_property
    def _cpp(self) -> str:
        return self._struct("int len_q, len_k;\n  const int* c;", lambda end: f"max(0, min(len_k, {end}))", "len_k")

    @functools.cached_property
    def _cpp_with_positions(self) -> str:
        fields = "int len_q, len_k;\n  const int* c;\n  int offset_q, offset_k, keys;"
        return self._struct(fields, lambda end: f"q += offset_q, max(0, min(keys, {end} - offset_k))", "keys")

    def _struct(self, fields: str, clipped: Callable[[str], str], keys: str) -> str:
        constants: list[int] = []
        lo, hi = (None if expr is None else expr.cpp(constants) for expr in (self.lo, self.hi))
        return (
            "struct Mask {\n"
            f"  static constexpr bool kHasLo = {str(lo is not None).lower()}, kHasHi = {str(hi is not None).lower()};\n"
            f"  {fields}\n"
            f"  STROBE_DEVICE int lo(int q) const {{ return {clipped(lo) if lo else '0'}; }}\n"
            f"  STROBE_DEVICE int hi(int q) const {{ return {clipped(hi) if hi else keys}; }}\n"
            "};\n"
        )

    def text(self) -> str:
        """Both ends and the name, as `parse_mask` reads them: how a mask travels where objects cannot."""
        return f"{'' if self.lo is None else self.lo.text()};{'' if self.hi is None else self.hi.text()};{self.name}"

    def text_and_numbers(self) -> tuple[str, list[Any]]:
        """The text with a placeholder for each number, and the numbers, which may be symbols of a tracer."""
        numbers: list[Any] = []
        lo = "" if self.lo is None else self.lo.text(numbers)
        hi = "" if self.hi is None else self.hi.text(numbers)
        return f"{lo};{hi};{self.title}", [*numbers, *self.sizes]


MAX_CONSTANTS = 32  # room for them in the kernels' arguments

_GRAMMAR = Grammar(frozenset(("q", "len_q", "len_k")), frozenset(("+", "-", "*", "//", "min", "max")), _UNBOUNDED)
_q, _len_q, _len_k = (Expr("var", (name,)) for name in ("q", "len_q", "len_k"))
_diag = _q + (_len_k - _len_q)  # the key that stands opposite query q when the last query is aligned with the last key


def _number(value: int) -> Expr:
    return Expr.of(min(value, _UNBOUNDED))


def _size(value: Any, what: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{what} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{what} must be at least {least}, got {value}")
    return value  # type: ignore[return-value]


full = Mask(None, None, "full")
causal = Mask(None, _diag + 1, "causal")
causal_top_left = Mask(None, _q + 1, "causal_top_left")

# Only the keys of the whole sequence, from 0 to len_k as positions say it, not all that a buffer holds.
used_keys = Mask(Expr("literal", (0,)), _len_k, "used")


def window(left: int | None, right: int | None) -> Mask:
    """Keys from `left` before the diagonal to `right` after it, both included; `None` leaves that side open."""
    return Mask(
        None if left is None else _diag - _number(_size(left, "window(left, right): left", 0)),
        None if right is None else _diag + _number(_size(right, "window(left, right): right", 0) + 1),
        f"window({None if left is None else '?'}, {None if right is None else '?'})",
        tuple(size for size in (left, right) if size is not None),
    )


def cached_window(left: int) -> Mask:
    """For keys that all stand before the first query: each query sees those from `left` positions before it on."""
    return Mask(_q + _len_k - _number(left), None, "cached_window(?)", (left,))


def prefix(n: int) -> Mask:
    """Causal, but the first `n` keys are visible to every query."""
    first = _number(_size(n, "prefix(n): n", 0))
    return Mask(None, Expr("max", (_diag + 1, first)), "prefix(?)", (n,))


def chunked(n: int) -> Mask:
    """Queries see the keys of their own chunk of `n` positions: those with the same `position // n`. The last query
    stands opposite the last key; queries before the first key are in chunks of their own, without keys."""
    size = _number(_size(n, "chunked(n): n", 1))
    chunk = _diag // size
    return Mask(chunk * size, (chunk + 1) * size, "chunked(?)", (n,))


@functools.lru_cache(maxsize=256)
def parse_mask(text: str, numbers: tuple[int, ...] = ()) -> Mask:
    """The mask that has this `text()`, or this text and these numbers."""
    if text.count(";") < 2:
        raise ValueError(f"{text!r:.80} is not the text of a mask: two expressions and a name, separated by ;")
    *ends, title = text.split(";", 2)
    given = iter(numbers)
    lo, hi = [parse(end, _GRAMMAR, given) if end else None for end in ends]
    for end in (lo, hi):
        if end is not None and not never_moves_left(end):
            raise ValueError(f"{end.text()!r:.80} is no end of a mask: it may become less as q grows")
    return Mask(lo, hi, parse_name(title, given))


def never_moves_left(end: Expr) -> bool:
    """Whether it is plain that the end does not decrease as `q` grows."""
    if "q" not in end.variables() or end.op == "var":
        return True
    a, b = end.args
    if end.op in ("-", "//"):
        return never_moves_left(a) and "q" not in b.variables()
    if end.op == "*":
        factor, rest = (a, b) if a.op == "const" else (b, a)
        return factor.op == "const" and factor.args[0] >= 0 and never_moves_left(rest)
    return never_moves_left(a) and never_moves_left(b)
