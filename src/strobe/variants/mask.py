"""Masks, each defined once: query row `q` sees the keys `lo(q) <= k < hi(q)` for which a condition holds, too.

Neither end ever moves left as `q` grows. From these two integer expressions come the dense mask of the reference, the C++
text of the kernels, the range of key tiles to visit and which of them need no masking, and the exact count of visible
pairs. A condition is evaluated for each pair, and most masks have none. `q`, `k`, `len_q` and `len_k` are positions and
lengths in the whole sequence, of which a call may hold a part (`Positions`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch

from strobe.variants import intervals
from strobe.variants.expression import DIAGONAL, LEN_K, WORKING_DTYPE, Expr, Q, Value, on_device
from strobe.variants.intervals import END_OPERATIONS, END_VARIABLES, LARGEST, joined
from strobe.variants.text import Grammar, full_name, parse, parse_name

MAX_CONSTANTS = 32  # room for the numbers of a mask in the kernels' arguments
_A_TENSOR = (
    "a tensor becomes a part of a mask as a function that reads it: "
    "strobe.causal & strobe.mask_function(lambda b, h, q, k: tensor[b, h, q, k], rows=True)"
)


class Positions(NamedTuple):
    """The places of a call's rows and keys in the whole sequence: its queries are those from `offset_q` on of
    `len_q`."""

    offset_q: int
    len_q: int
    offset_k: int
    len_k: int


@dataclass(frozen=True, eq=False)
class Mask:
    """An interval of keys per query row, of which `None` leaves an end open, and what else a pair must satisfy: `rest`, a
    condition that reads `tensors`; None: nothing. Combine with `&`, `|` and `~`.

    The name is put together when someone asks for it, from a title and the `sizes` that stand for its `?`: where PyTorch
    traces, sizes may be symbols, which cannot be printed."""

    lo: Expr | None
    hi: Expr | None
    title: str
    sizes: tuple[Any, ...] = ()
    rest: Expr | None = None
    tensors: tuple[torch.Tensor, ...] = ()

    @functools.cached_property
    def name(self) -> str:
        return " & ".join(dict.fromkeys(full_name(self.title, self.sizes).split(" & ")))

    @property
    def interval(self) -> Mask:
        """The mask without its condition."""
        return self if self.rest is None else Mask(self.lo, self.hi, self.title, self.sizes)

    def __and__(self, other: Any) -> Mask:
        if isinstance(other, torch.Tensor):
            raise TypeError(_A_TENSOR)
        if not isinstance(other, Mask):
            return NotImplemented
        lo, hi = joined("max", self.lo, other.lo), joined("min", self.hi, other.hi)
        rest, tensors = _both("&", self, other)
        if self._hides_nothing or other._hides_nothing:
            title, sizes = (self.title, self.sizes) if other._hides_nothing else (other.title, other.sizes)
        else:
            title, sizes = f"{self.title} & {other.title}", self.sizes + other.sizes
        return Mask(lo, hi, title, sizes, rest, tensors)

    __rand__ = __and__

    def __or__(self, other: Any) -> Mask:
        if isinstance(other, torch.Tensor):
            raise TypeError(_A_TENSOR)
        if not isinstance(other, Mask):
            return NotImplemented
        condition, tensors = _both("|", self.as_condition(), other.as_condition())
        assert condition is not None
        title = f"{self._inner_title} or {other._inner_title}"
        return of_condition(condition, tensors, title, self.sizes + other.sizes)

    def __invert__(self) -> Mask:
        condition = self.as_condition().rest
        assert condition is not None
        return of_condition(intervals.negated(condition), self.tensors, f"not {self._inner_title}", self.sizes)

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} is neither true nor false. Masks combine with &, | and ~, not with `and`, `or` and `not`: "
            "strobe.window(5, 0) & strobe.causal"
        )

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"{self!r} is a mask, not a function: write mask={self!r}, and call nothing")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles no derived values: a hash of strings means nothing to another process."""
        return Mask, (self.lo, self.hi, self.title, self.sizes, self.rest, self.tensors)

    def __repr__(self) -> str:
        if self.rest is not None:
            return f"strobe.mask_function({self.name})"
        return " & ".join(f"strobe.{name}" for name in self.name.split(" & "))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask) or len(self.tensors) != len(other.tensors):
            return False
        same_tensors = all(a is b for a, b in zip(self.tensors, other.tensors, strict=True))
        return same_tensors and self.lo == other.lo and self.hi == other.hi and self.rest == other.rest

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.lo, self.hi, self.rest))

    def __hash__(self) -> int:
        return self._hash

    @property
    def _hides_nothing(self) -> bool:
        return self.lo is None and self.hi is None and self.rest is None

    @property
    def _inner_title(self) -> str:
        """The title as part of another, in which ` & ` stands between masks alone."""
        return self.title.replace(" & ", " and ")

    def as_condition(self) -> Mask:
        """Return the same mask, with its interval as a part of the condition."""
        condition = self.rest
        if condition is None or self.lo is not None or self.hi is not None:
            inside = intervals.condition_of((self.lo, self.hi))
            condition = inside if condition is None else Expr("&", (inside, condition))
        return Mask(None, None, self.title, self.sizes, condition, self.tensors)

    # ---- everything else is derived -------------------------------------------------------------------------------------

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
        self,
        len_q: int,
        len_k: int,
        batch: int | None = None,
        heads: int | None = None,
        *,
        device: torch.device | str = "cpu",
        at: Positions | None = None,
    ) -> torch.Tensor:
        """The mask as booleans, (len_q, len_k); True may be attended. With `batch` or `heads`, on which a mask function may
        depend, (batch, heads, len_q, len_k). For the reference and for small pictures."""
        rows, keys = torch.arange(len_q, device=device), torch.arange(len_k, device=device)
        return self.block(rows, keys, len_q, len_k, at, batch=batch, heads=heads)

    def block(
        self,
        rows: torch.Tensor,
        keys: torch.Tensor,
        len_q: int,
        len_k: int,
        at: Positions | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
    ) -> torch.Tensor:
        """The booleans of some rows and keys, (rows, keys) or (batch, heads, rows, keys)."""
        lo, hi = self.bounds(rows, len_q, len_k, at)
        seen = (lo[:, None] <= keys) & (keys < hi[:, None])
        if self.rest is not None:
            offset_q, whole_q, offset_k, whole_k = at or (0, len_q, 0, len_k)
            env: dict[Any, Any] = {"len_q": whole_q, "len_k": whole_k, WORKING_DTYPE: torch.float32}
            env |= {"q": rows[:, None] + offset_q, "k": keys + offset_k}
            for name, what, count, axes in (("h", "heads", heads, 2), ("b", "batch", batch, 3)):
                if count is None and name in self.rest.variables():
                    raise ValueError(f"{self!r} depends on {name}; give {what}")
                env[name] = torch.arange(count or 1, device=rows.device)[(..., *(None,) * axes)]
            env |= enumerate(t.to(rows.device) for t in self.tensors)
            seen = seen & self.rest.evaluate(env)
        return seen if batch is None and heads is None else seen.expand(batch or 1, heads or 1, len(rows), len(keys))

    def tiles(
        self, q0: int, q1: int, block_k: int, len_q: int, len_k: int, at: Positions | None = None
    ) -> tuple[int, int, int, int]:
        """Key tiles of the interval for the rows [q0, q1): (first, end, first_full, end_full). Tiles outside [first, end)
        are invisible to all of the rows; those in [first_full, end_full) lie wholly within the interval of each of them."""
        lo_first, hi_first = self.bounds(q0, len_q, len_k, at)
        lo_last, hi_last = self.bounds(q1 - 1, len_q, len_k, at)
        first, end = lo_first // block_k, -(-hi_last // block_k)
        end = max(first, end)
        first_full = min(max(-(-lo_last // block_k), first), end)
        end_full = min(max(hi_first // block_k, first_full), end)
        return first, end, first_full, end_full

    def area(self, len_q: int, len_k: int, at: Positions | None = None) -> int:
        """Return how many (query, key) pairs are visible: the exact work of one head."""
        if self.rest is not None:
            return int(self.dense(len_q, len_k, at=at).sum())
        if self.lo is None and self.hi is None:
            return len_q * len_k
        lo, hi = self.bounds(torch.arange(len_q, device="cpu"), len_q, len_k, at)
        return int((hi - lo).clamp(min=0).sum())

    def hides_nothing(self, len_q: int, len_k: int) -> bool:
        """Return whether every query sees every key, whatever the mask is called."""
        if self._hides_nothing or not len_q:
            return True
        first, last = self.bounds(0, len_q, len_k), self.bounds(len_q - 1, len_q, len_k)
        return self.rest is None and last[0] == 0 and first[1] == len_k  # neither end ever moves left

    @functools.cached_property
    def constants(self) -> tuple[int, ...]:
        """The numbers in the ends (window sizes, ...), in the order in which kernels refer to them."""
        constants: list[int] = []
        for end in (self.lo, self.hi):
            if end is not None:
                end.text(constants)
        return tuple(constants)

    def text(self) -> str:
        """Both ends and the name, as `parse_mask` reads them: how an interval travels where objects cannot."""
        assert self.rest is None, "a condition has no text of its own: it travels in a score"
        return f"{'' if self.lo is None else self.lo.text()};{'' if self.hi is None else self.hi.text()};{self.name}"

    def text_and_numbers(self) -> tuple[str, list[Any]]:
        """The text with a placeholder for each number, and the numbers, which may be symbols of a tracer."""
        assert self.rest is None
        numbers: list[Any] = []
        lo = "" if self.lo is None else self.lo.text(numbers)
        hi = "" if self.hi is None else self.hi.text(numbers)
        return f"{lo};{hi};{self.title}", [*numbers, *self.sizes]


def of_condition(condition: Expr, tensors: tuple[torch.Tensor, ...], title: str, sizes: tuple[Any, ...] = ()) -> Mask:
    """The mask of the pairs for which a condition holds: what it says of intervals becomes the ends."""
    (lo, hi), rest = intervals.split(condition)
    return Mask(lo, hi, title if rest is not None else f"mask_function({title})", sizes, rest, tensors)


def _both(op: str, a: Mask, b: Mask) -> tuple[Expr | None, tuple[torch.Tensor, ...]]:
    """Two conditions as one, and its tensors."""
    if a.rest is None or b.rest is None:
        return (a.rest, a.tensors) if b.rest is None else (b.rest, b.tensors)
    return Expr(op, (a.rest, b.rest.with_later_tensors(len(a.tensors)))), a.tensors + b.tensors


full = Mask(None, None, "full")
causal = Mask(None, DIAGONAL + 1, "causal")
causal_top_left = Mask(None, Q + 1, "causal_top_left")

# Only the keys of the whole sequence, from 0 to len_k as positions say it, not all that a buffer holds.
used_keys = Mask(Expr("literal", (0,)), LEN_K, "used")

_GRAMMAR = Grammar(END_VARIABLES, END_OPERATIONS, LARGEST)


@functools.lru_cache(maxsize=256)
def parse_mask(text: str, numbers: tuple[int, ...] = ()) -> Mask:
    """The interval mask that has this `text()`, or this text and these numbers."""
    if text.count(";") < 2:
        raise ValueError(f"{text!r:.80} is not the text of a mask: two expressions and a name, separated by ;")
    *ends, title = text.split(";", 2)
    values = iter(numbers)
    lo, hi = [parse(end, _GRAMMAR, values) if end else None for end in ends]
    for end in (lo, hi):
        if end is not None and not intervals.is_end(end):
            raise ValueError(
                f"{end.text()!r:.80} is no end of a mask: it may become less as q grows, or divides by what is not an "
                "integer greater than 0, or divides a quotient"
            )
    return Mask(lo, hi, parse_name(title, values))
