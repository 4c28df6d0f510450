"""`Problem`: the frozen facts of one attention call.

A problem says what is to be computed, without tensors: it is what backends are asked about and what plans are made from.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from strobe.problem.arguments import GRADIENTS, PER_HEAD, Arguments, Layout, four_axes, layout_of_keys
from strobe.problem.checks import (
    check_dims,
    check_mask,
    check_out,
    check_pairs,
    check_per_head,
    check_qkv,
    check_score,
    check_sequences,
    check_state,
    checked_number,
    checked_scale,
    checked_tensor,
    lse_dtype,
    out_dtype,
)
from strobe.problem.page_checks import NO_GRADIENTS, check_paged
from strobe.variants.mask import Mask, full, used_keys
from strobe.variants.score import Score
from strobe.variants.unsupported import Unsupported as Unsupported

Strides = tuple[int, int, int]  # (batch, head, row) in elements; the last axis is contiguous


@dataclass(frozen=True)
class Pages:
    """Keys that lie in pages of a pool: a table says which pages a sequence has, `lengths` how many rows of them it uses
    and `starts` at which position the first one stands."""

    size: int  # rows of a page
    count: int  # in the pool
    width: int | None  # entries of a sequence's row of the table; None: one after the other, as `indptr` says
    starts: bool  # else every sequence begins at position 0


@dataclass(frozen=True)
class Rows:
    """The layout of rows in memory: those of queries, or those of keys and values."""

    heads: int
    length: int  # of the longest sequence; of paged keys, what a table has room for
    total: int  # of all sequences
    strides: tuple[Strides, ...]  # of q; of k and of v. Of pages the first is that from page to page
    varlen: bool = False  # sequences of different lengths, one after the other
    positions: bool = False  # they are parts of longer sequences
    pages: Pages | None = None  # keys alone


@dataclass(frozen=True)
class Load:
    """A tensor of which every logit reads entries, and where they lie: that of (sequence, head, query, key), or those that
    the score asks for."""

    name: str  # "score0" and so on: of the score; "bias"; "mask_tensor"
    dtype: torch.dtype
    strides: tuple[int, ...]  # four; 0 along axes that it does not have, or along which it is repeated. Captured ones:
    # also the lengths of their axes
    shared: bool = False  # several pairs of a query and a key, or heads, read the same entry
    negated: bool = False  # memory holds the negative of each number


@dataclass(frozen=True)
class State:
    """A result over other keys, in fp32, that the call's result is merged with: where its output and its LSE lie."""

    lse: tuple[int, int]  # (batch, head) strides; the merged LSE goes there
    out: Strides | None = None  # None: the call's own output, which is partial; else that is rounded


@dataclass(frozen=True)
class Problem:
    # ---- shape
    dtype: torch.dtype
    device: torch.device
    batch: int  # sequences
    dim: int  # of queries and keys
    dim_v: int
    q: Rows
    k: Rows
    # ---- what happens to a score
    scale: float
    score: Score
    mask: Mask
    dropout: float
    first_head: int  # of the query heads, as dropout counts them
    loads: tuple[Load, ...]  # tensors of the score, then the bias, then the mask
    per_head: frozenset[str]  # of arguments.PER_HEAD
    # ---- what is wanted
    gradients: tuple[str, ...]  # of arguments.GRADIENTS, and "score0" and so on; none: the output
    lse: bool
    partial: bool  # an output in fp32, to be merged with others
    state: State | None  # to be merged with
    deterministic: bool
    # Of a backward plan: parts of a group of query heads, each with dK and dV of its own, in fp32 if there are several.
    group_parts: int = 1
    invariant: bool = False  # the bits of a row depend on no other row, and not on how its keys lie in pages

    @property
    def has_bias(self) -> bool:
        return any(load.name == "bias" for load in self.loads)

    @property
    def has_mask_tensor(self) -> bool:
        return any(load.name == "mask_tensor" for load in self.loads)

    @property
    def captured(self) -> int:
        """Tensors of the score."""
        return len(self.loads) - self.has_bias - self.has_mask_tensor

    @property
    def learnt(self) -> tuple[int, ...]:
        """The numbers of those whose gradients are wanted."""
        return tuple(i for i in range(self.captured) if f"score{i}" in self.gradients)

    @functools.cached_property
    def logit(self) -> Score:
        """The score with the bias and the mask tensor in it, as the kernels compute it; its tensors are `loads`."""
        return self.score.with_pairs(self.has_bias, self.has_mask_tensor)

    @property
    def varlen(self) -> bool:
        return self.q.varlen or self.k.varlen

    @property
    def positions(self) -> bool:
        """Masks, scores and dropout count positions in longer sequences."""
        return self.q.positions or self.k.positions

    # ---- names in the letters of the paper
    @property
    def len_q(self) -> int:
        return self.q.length

    @property
    def len_k(self) -> int:
        return self.k.length

    @property
    def heads(self) -> int:
        return self.q.heads

    @property
    def heads_k(self) -> int:
        return self.k.heads

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.q.heads // self.k.heads if self.k.heads else 1

    @property
    def strides(self) -> tuple[Strides, Strides, Strides]:
        """The strides of q, k and v."""
        return self.q.strides[0], self.k.strides[0], self.k.strides[1]

    @property
    def lse_dtype(self) -> torch.dtype:
        return lse_dtype(self.dtype)

    @property
    def out_dtype(self) -> torch.dtype:
        return out_dtype(self.dtype, self.partial)

    @property
    def empty(self) -> bool:
        """No query has a key to look at, or there are no queries."""
        return 0 in (self.batch, self.heads, self.q.total, self.k.total, self.q.length, self.k.length)

    @property
    def direction(self) -> str:
        return "backward" if self.gradients else "forward"

    @property
    def summary(self) -> str:
        kind = ("varlen " if self.varlen else "") + ("paged " if self.k.pages is not None else "")
        kv = f", {self.heads_k} key heads" if self.heads_k != self.heads else ""
        dims = f"{self.dim}" if self.dim == self.dim_v else f"{self.dim}/{self.dim_v}"
        return (
            f"{kind}attention: batch {self.batch}, {self.heads} heads{kv}, {self.len_q} x {self.len_k}, dim {dims}, "
            f"{self.mask.name}, {str(self.dtype).removeprefix('torch.')} on {self.device}"
        )

    def backward(self, gradients: tuple[str, ...]) -> Problem:
        """The problem of computing these gradients."""
        return replace(self, gradients=gradients, lse=False, state=None)

    def pairs(self) -> int:
        """Visible (query, key) pairs of all heads. Mask tensors are counted as if everything were visible; varlen
        problems as if every sequence had the longest length."""
        return self.batch * self.heads * self.mask.area(self.len_q, self.len_k)

    def flops(self) -> int:
        """Multiplications and additions of the matrix products: two of a forward pass, five of a backward pass."""
        forward = 2 * (self.dim + self.dim_v) * self.pairs()
        return forward if not self.gradients else 2 * (3 * self.dim + 2 * self.dim_v) * self.pairs()

    def bytes(self) -> int:
        """The least a forward pass has to move: q, k, v read once, the output and the LSE written once."""
        width = self.dim + self.dim_v
        elements = self.heads * self.q.total * width + self.heads_k * self.k.total * width
        return elements * self.dtype.itemsize + self.heads * self.q.total * self.lse_dtype.itemsize

    @staticmethod
    def of(a: Arguments, needs_grad: bool = False) -> tuple[Problem, Layout]:
        """Check the arguments and say what they ask for. `needs_grad`: whether a backward pass may follow."""
        layout = check_qkv(a)
        if a.paged and needs_grad:
            raise Unsupported(NO_GRADIENTS)
        of_keys = layout_of_keys(a, layout)
        q, k, v = layout.inside(a.q), of_keys.inside(a.k), of_keys.inside(a.v)
        check_dims(a, q, k, v)
        if a.paged:
            batch, len_q, len_k = check_paged(a)
        else:
            batch, len_q, len_k = (q.shape[0], q.shape[2], k.shape[2]) if a.cu_q is None else check_sequences(a)
        heads, heads_k, dim, dim_v = q.shape[1], k.shape[1], q.shape[3], v.shape[3]
        pairs = (batch, heads, len_q, len_k)
        mask = check_mask(a, pairs)
        if a.paged:
            mask = mask & used_keys
        elif a.cu_q is None and a.positions is None and mask.hides_nothing(len_q, len_k):
            mask = full  # as a causal one does of a single query
        score = check_score(a, *pairs)
        if a.bias is not None:
            if not checked_tensor("bias", a.bias).dtype.is_floating_point:
                raise TypeError(f"bias must be floating point, got {a.bias.dtype}; booleans go in mask")
            check_pairs("bias", a, pairs)
        per_head = frozenset(name for name in PER_HEAD if getattr(a, name) is not None)
        for name in per_head:
            check_per_head(name, getattr(a, name), a.q, heads)
        scale = checked_scale(1.0 / math.sqrt(dim) if a.scale is None else a.scale, score, a.q.dtype)
        if not 0.0 <= checked_number("dropout", a.dropout) < 1.0:
            raise ValueError(f"dropout must be at least 0 and less than 1, got {a.dropout}")
        if a.seed is not None and (isinstance(a.seed, bool) or not isinstance(a.seed, int)):
            raise TypeError(f"seed must be an int, got {a.seed!r}")
        if a.out is not None:
            check_out(a, dim_v, needs_grad)
        if a.state_lse is not None or a.state_out is not None:
            check_state(a, layout)
        positions = a.positions is not None
        totals = q.shape[0] * q.shape[2], k.shape[0] * k.shape[2]
        keys = Rows(heads_k, len_k, totals[1], (k.stride()[:3], v.stride()[:3]), a.cu_k is not None, positions)  # type: ignore[arg-type]
        if a.paged:
            width = a.table.shape[1] if a.indptr is None else None
            pages = Pages(k.shape[2], k.shape[0], width, a.starts is not None)
            total = 0 if not pages.count else len_k if width is None else batch * len_k
            keys = replace(keys, total=total, positions=True, pages=pages)
        problem = Problem(
            dtype=a.q.dtype,
            device=a.q.device,
            batch=batch,
            dim=dim,
            dim_v=dim_v,
            q=Rows(heads, len_q, totals[0], (q.stride()[:3],), a.cu_q is not None, positions),  # type: ignore[arg-type]
            k=keys,
            scale=scale,
            score=score.structure,
            mask=mask,
            dropout=float(a.dropout),
            first_head=a.first_head if a.dropout else 0,
            loads=_loads(a, score, pairs),
            per_head=per_head,
            gradients=(),
            lse=bool(a.return_lse) or needs_grad,
            partial=bool(a.partial),
            state=None if a.state_lse is None else _state(a, layout),
            deterministic=bool(a.deterministic),
            invariant=bool(a.invariant),
        )
        return problem, layout


def _loads(a: Arguments, score: Score, pairs: tuple[int, int, int, int]) -> tuple[Load, ...]:
    """All of them as they are. Captured tensors have the strides and the lengths of their own axes."""
    loads = [
        Load(f"score{number}", t.dtype, captured_strides(t), shared=True, negated=t.is_neg())
        for number, t in enumerate(score.tensors)
    ]
    for name, t in (("bias", a.bias), ("mask_tensor", a.mask_tensor)):
        if t is not None:
            view = four_axes(t)
            assert view is not None
            strides, shared = view.expand(pairs).stride(), tuple(view.shape) != pairs
            loads.append(Load(name, t.dtype, strides, shared, negated=t.is_neg()))
    return tuple(loads)


def captured_strides(t: torch.Tensor) -> tuple[int, ...]:
    return (*_padded(t.stride()), *_padded(t.shape))


def _padded(axes: Sequence[int]) -> tuple[int, ...]:
    return (*axes, *(0,) * (4 - len(axes)))


def _state(a: Arguments, layout: Layout) -> State:
    out = None if a.state_out is None else layout.inside(a.state_out).stride()[:3]
    return State(layout.rows_inside(a.state_lse).stride()[:2], out)  # type: ignore[arg-type]


def supposed(
    device: torch.device,
    dtype: torch.dtype,
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    gradients: tuple[str, ...] = (),
    **arguments: Any,
) -> Problem:
    """The problem of a call with tensors of these shapes, contiguous, on a device that need not be there. Tuples among
    the arguments are shapes, too."""

    def made(shape: tuple[int, ...], of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    kinds = {"mask": torch.bool, **dict.fromkeys(("cu_q", "cu_k", "table", "indptr", "lengths", "starts"), torch.int32)}
    tensors = {n: made(s, kinds.get(n, dtype)) for n, s in arguments.items() if isinstance(s, tuple)}
    problem, _ = Problem.of(Arguments(made(q), made(k), made(v), **(arguments | tensors)), needs_grad=bool(gradients))
    problem = replace(problem, device=device)
    return problem.backward(gradients) if gradients else problem


def any_requires_grad(a: Arguments) -> bool:
    captured = a.score.tensors if isinstance(a.score, Score) else ()
    tensors = [*(getattr(a, name) for name in GRADIENTS), *captured]
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)
