"""Masks, each defined once: query row `q` sees the keys `lo(q) <= k < hi(q)`, and neither end ever moves left as `q`
grows.

From these two integer expressions come the dense mask of the reference, the C++ text of the kernels, the range of key
tiles to visit and which of them need no masking, and the exact count of visible pairs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

Value = Any  # an int, or an integer tensor evaluated element by element

_UNBOUNDED = 1 << 30  # larger constants are clamped so that 32-bit arithmetic in the kernels cannot overflow

_OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,  # operands are kept non-negative, so C++ agrees
    "min": lambda a, b: _minmax(a, b, min, torch.minimum),
    "max": lambda a, b: _minmax(a, b, max, torch.maximum),
}


def _minmax(a: Value, b: Value, of_ints: Any, of_tensors: Any) -> Value:
    if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
        return of_ints(a, b)
    like = a if isinstance(a, torch.Tensor) else b
    return of_tensors(torch.as_tensor(a, device=like.device), torch.as_tensor(b, device=like.device))


@dataclass(frozen=True)
class Expr:
    """A small integer expression over `q`, `len_q`, `len_k` and constants."""

    op: str  # "var", "const" or a key of _OPERATIONS
    args: tuple[Any, ...]

    @staticmethod
    def of(x: Expr | int) -> Expr:
        return x if isinstance(x, Expr) else Expr("const", (min(x, _UNBOUNDED),))

    def __add__(self, other: Expr | int) -> Expr:
        return Expr("+", (self, Expr.of(other)))

    def __sub__(self, other: Expr | int) -> Expr:
        return Expr("-", (self, Expr.of(other)))

    def __mul__(self, other: Expr | int) -> Expr:
        return Expr("*", (self, Expr.of(other)))

    def __floordiv__(self, other: Expr | int) -> Expr:
        return Expr("/", (self, Expr.of(other)))

    def evaluate(self, env: Mapping[str, Value]) -> Value:
        if self.op == "var":
            return env[self.args[0]]
        if self.op == "const":
            return self.args[0]
        return _OPERATIONS[self.op](*(a.evaluate(env) for a in self.args))

    def cpp(self, constants: list[int]) -> str:
        """C++ text. Constants become fields `c[i]` of the arguments, so that a new window size needs no new kernel."""
        if self.op == "var":
            return self.args[0]
        if self.op == "const":
            constants.append(self.args[0])
            return f"c[{len(constants) - 1}]"
        a, b = (arg.cpp(constants) for arg in self.args)
        return f"{self.op}({a}, {b})" if self.op in ("min", "max") else f"({a} {self.op} {b})"


def _join(op: str, a: Expr | None, b: Expr | None) -> Expr | None:
    if a is None or b is None or a == b:
        return a if b is None else b
    return Expr(op, (a, b))


@dataclass(frozen=True, eq=False)
class Mask:
    """An interval of keys per query row; `None` leaves that end open. Combine with `&`."""

    lo: Expr | None
    hi: Expr | None
    name: str

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        names = [m.name for m in (self, other) if m != full] or ["full"]
        return Mask(_join("max", self.lo, other.lo), _join("min", self.hi, other.hi), " & ".join(dict.fromkeys(names)))

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

    # ---- everything else is derived from the two ends
    # -------------------------------------------------------------------

    def bounds(self, rows: Value, len_q: int, len_k: int) -> tuple[Value, Value]:
        """(lo, hi) of one row or a tensor of rows, clipped to the keys there are; nothing is visible where hi <= lo."""
        env = {"q": rows, "len_q": len_q, "len_k": len_k}
        ends = []
        for expr, default in ((self.lo, 0), (self.hi, len_k)):
            end = default if expr is None else expr.evaluate(env)
            if isinstance(rows, torch.Tensor):
                end = torch.as_tensor(end, dtype=rows.dtype, device=rows.device).clamp(0, len_k).expand_as(rows)
            else:
                end = min(max(end, 0), len_k)
            ends.append(end)
        return ends[0], ends[1]

    def dense(self, len_q: int, len_k: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """The mask as booleans, (len_q, len_k); True may be attended. For the reference and for small pictures."""
        return self.block(torch.arange(len_q, device=device), torch.arange(len_k, device=device), len_q, len_k)

    def block(self, rows: torch.Tensor, keys: torch.Tensor, len_q: int, len_k: int) -> torch.Tensor:
        """The booleans of the given rows and keys, (rows, keys)."""
        lo, hi = self.bounds(rows, len_q, len_k)
        return (lo[:, None] <= keys) & (keys < hi[:, None])

    def tiles(self, q0: int, q1: int, block_k: int, len_q: int, len_k: int) -> tuple[int, int, int, int]:
        """Key tiles for the rows [q0, q1): (first, end, first_full, end_full). Tiles outside [first, end) are invisible
        to all of the rows; those in [first_full, end_full) are wholly visible to each of them and need no masking."""
        (lo_first, hi_first), (lo_last, hi_last) = self.bounds(q0, len_q, len_k), self.bounds(q1 - 1, len_q, len_k)
        first, end = lo_first // block_k, -(-hi_last // block_k)
        end = max(first, end)
        first_full = min(max(-(-lo_last // block_k), first), end)
        end_full = min(max(hi_first // block_k, first_full), end)
        return first, end, first_full, end_full

    def area(self, len_q: int, len_k: int) -> int:
        """How many (query, key) pairs are visible: the exact work of one head."""
        if self.lo is None and self.hi is None:
            return len_q * len_k
        lo, hi = self.bounds(torch.arange(len_q), len_q, len_k)
        return int((hi - lo).clamp(min=0).sum())

    @functools.cached_property
    def constants(self) -> tuple[int, ...]:
        """The numbers in the mask (window sizes, ...), in the order in which `cpp` refers to them."""
        constants: list[int] = []
        for expr in (self.lo, self.hi):
            if expr is not None:
                expr.cpp(constants)
        return tuple(constants)

    @functools.cached_property
    def cpp(self) -> str:
        """`struct Mask` for the kernels. Two masks of the same shape print the same text, whatever their constants."""
        constants: list[int] = []
        lo, hi = (None if expr is None else expr.cpp(constants) for expr in (self.lo, self.hi))
        return (
            "struct Mask {\n"
            f"  static constexpr bool kHasLo = {str(lo is not None).lower()}, kHasHi = {str(hi is not None).lower()};\n"
            "  int len_q, len_k;\n"
            "  const int* c;\n"
            f"  STROBE_DEVICE int lo(int q) const {{ return {'max(0, min(len_k, ' + lo + '))' if lo else '0'}; }}\n"
            f"  STROBE_DEVICE int hi(int q) const {{ return {'max(0, min(len_k, ' + hi + '))' if hi else 'len_k'}; }}\n"
            "};\n"
        )


MAX_CONSTANTS = 16  # room for them in the kernels' arguments

_q, _len_q, _len_k = (Expr("var", (name,)) for name in ("q", "len_q", "len_k"))
_diag = _q + (_len_k - _len_q)  # the key that stands opposite query q when the last query is aligned with the last key


def _size(value: object, what: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{what} must be at least {least}, got {value}")
    return value


full = Mask(None, None, "full")
causal = Mask(None, _diag + 1, "causal")
causal_top_left = Mask(None, _q + 1, "causal_top_left")


def window(left: int | None, right: int | None) -> Mask:
    """Keys from `left` before the diagonal to `right` after it, both included; `None` leaves that side open."""
    return Mask(
        None if left is None else _diag - _size(left, "window(left, right): left", 0),
        None if right is None else _diag + (min(_size(right, "window(left, right): right", 0), _UNBOUNDED) + 1),
        f"window({left}, {right})",
    )


def prefix(n: int) -> Mask:
    """Causal, but the first `n` keys are visible to every query."""
    first = Expr.of(_size(n, "prefix(n): n", 0))
    return Mask(None, Expr("max", (_diag + 1, first)), f"prefix({n})")


def chunked(n: int) -> Mask:
    """Queries see the keys of their own chunk of `n` positions. Queries before the first key count as chunk 0."""
    chunk = Expr("max", (_diag, Expr.of(0))) // _size(n, "chunked(n): n", 1)
    return Mask(chunk * n, (chunk + 1) * n, f"chunked({n})")


_PLAIN = {mask.name: mask for mask in (full, causal, causal_top_left)}
_MAKERS: dict[str, Any] = {"window": window, "prefix": prefix, "chunked": chunked}


@functools.lru_cache(maxsize=256)
def named(name: str) -> Mask:
    """The mask that has this `name`."""
    found = full
    for part in name.split(" & "):
        maker, _, numbers = part.removesuffix(")").partition("(")
        if part in _PLAIN:
            found = found & _PLAIN[part]
        elif maker in _MAKERS:
            found = found & _MAKERS[maker](*(None if n == "None" else int(n) for n in numbers.split(", ")))
        else:
            raise ValueError(f"{name!r} is not the name of a mask: {part!r} is unknown")
    return found
