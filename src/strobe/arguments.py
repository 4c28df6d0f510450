"""The argument list of `strobe.attention` and `attention_varlen`, once, and the layouts in which tensors are passed.

`Arguments` holds what a caller passed, unchecked. `problem.py` checks it; everything else hands it on as one object.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from strobe.score import Score


class Arguments(NamedTuple):
    """One call, as it was made; `strobe.attention` documents the arguments. Without `cu_q` and `cu_k` it is a dense one."""

    q: Any
    k: Any
    v: Any
    cu_q: Any = None
    cu_k: Any = None
    max_q: Any = None
    max_k: Any = None
    mask: Any = None
    scale: Any = None
    softcap: Any = None
    score: Any = None
    bias: Any = None
    dropout: Any = 0.0
    seed: Any = None
    sinks: Any = None
    layout: Any = "bshd"
    out: Any = None
    return_lse: Any = False
    deterministic: Any = False
    backend: Any = None
    # ---- internal, for shards and chunks
    positions: Any = None  # (sequences, 4) int32, the fields of `mask.Positions`
    partial: Any = False  # the output is in fp32
    first_head: Any = 0  # index of the first query head among those of the whole, for dropout
    earlier_lse: Any = None  # the LSE of a finite result over other keys in `out`: the call merges into both
    earlier_out: Any = None  # where that result is instead; `out` gets the merged one, in the dtype of q

    def mask_tensor(self) -> torch.Tensor | None:
        return self.mask if isinstance(self.mask, torch.Tensor) else None

    def score_tensors(self) -> tuple[torch.Tensor, ...]:
        return () if self.score is None else self.score.tensors


TENSORS = ("q", "k", "v", "bias", "sinks", "mask", "cu_q", "cu_k", "positions")  # those of a score follow


def tensors_of(a: Arguments) -> tuple[torch.Tensor | None, ...]:
    """In the order of TENSORS; q, k and v alone if there are no others, since each costs autograd time."""
    mask = a.mask if isinstance(a.mask, torch.Tensor) else None
    of_score = () if a.score is None else a.score.tensors
    if a.bias is a.sinks is mask is a.cu_q is a.positions is None and not of_score:
        return a[:3]
    return *a[:3], a.bias, a.sinks, mask, a.cu_q, a.cu_k, a.positions, *of_score


def with_tensors(a: Arguments, seed: int | None, tensors: Sequence[Any]) -> Arguments:
    """The arguments with other tensors, given as by `tensors_of`; without an `out`, and with the LSE."""
    q, k, v, *others = tensors
    bias, sinks, mask, cu_q, cu_k, positions, *of_score = others or _NO_OTHERS
    score = a.score.with_tensors(of_score) if of_score else a.score
    return Arguments(
        q, k, v, cu_q, cu_k, a.max_q, a.max_k, a.mask if mask is None else mask, a.scale, a.softcap, score, bias,
        a.dropout, seed, sinks, a.layout, None, True, a.deterministic, a.backend, positions, a.partial, a.first_head,
    )  # fmt: skip


_NO_OTHERS = (None,) * 6


def without_tensors(a: Arguments) -> Arguments:
    mask = None if isinstance(a.mask, torch.Tensor) else a.mask
    score = a.score.structure if isinstance(a.score, Score) else a.score
    return with_tensors(a._replace(mask=mask, score=score), None, (None,) * 3)


class Layout(enum.Enum):
    """The order of the axes of q, k, v and out as the caller has them. Backends see (batch, heads, length, dim), by
    views; the LSE is (batch, heads, length), without the axes that the caller leaves out."""

    BSHD = "bshd"
    BHSD = "bhsd"
    SHD = "shd"
    HSD = "hsd"
    SD = "sd"
    VARLEN = "thd"  # sequences one after the other

    def inside(self, t: torch.Tensor) -> torch.Tensor:
        """A view in (batch, heads, length, dim) order."""
        if self is Layout.BSHD:
            return t.transpose(1, 2)
        if self is Layout.BHSD:
            return t
        if self is Layout.SD:
            return t[None, None]
        return t[None] if self is Layout.HSD else t.transpose(0, 1)[None]

    def outside(self, t: torch.Tensor) -> torch.Tensor:
        """The inverse of `inside`."""
        if self is Layout.BSHD:
            return t.transpose(1, 2)
        if self is Layout.BHSD:
            return t
        if self is Layout.SD:
            return t[0, 0]
        return t[0] if self is Layout.HSD else t[0].transpose(0, 1)

    def rows_inside(self, t: torch.Tensor) -> torch.Tensor:
        """An LSE, or what is shaped like one, as (batch, heads, length)."""
        missing = 4 - len(self.value)
        return t[(None,) * missing] if missing else t

    def rows_outside(self, t: torch.Tensor) -> torch.Tensor:
        missing = 4 - len(self.value)
        return t[(0,) * missing] if missing else t

    def rows_shape(self, q: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the LSE that goes with queries of this shape."""
        if self is Layout.BSHD:
            return q[0], q[2], q[1]
        return (q[1], q[0]) if self in (Layout.SHD, Layout.VARLEN) else q[:-1]


LAYOUTS = ("bshd", "bhsd")
_BY_AXES = {
    ("bshd", 4): Layout.BSHD,
    ("bshd", 3): Layout.SHD,
    ("bhsd", 4): Layout.BHSD,
    ("bhsd", 3): Layout.HSD,
    ("bshd", 2): Layout.SD,
    ("bhsd", 2): Layout.SD,
}


def layout_of(a: Arguments) -> Layout:
    """Of arguments whose `layout` and number of axes have been checked."""
    return Layout.VARLEN if a.cu_q is not None else _BY_AXES[a.layout, a.q.dim()]


class Inputs(NamedTuple):
    """The tensors of a call in the form of the backends: (batch, heads, length, dim). Varlen problems have batch 1 here
    and say with cu_q, cu_k where each sequence begins and ends."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None  # booleans broadcastable to (batch, heads, len_q, len_k), four axes
    bias: torch.Tensor | None = None  # the same, in numbers
    sinks: torch.Tensor | None = None  # (heads,)
    cu_q: torch.Tensor | None = None
    cu_k: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    score_tensors: tuple[torch.Tensor, ...] = ()
    seed: int = 0

    @staticmethod
    def of(a: Arguments, layout: Layout) -> Inputs:
        """Views; the arguments have been checked."""
        return Inputs(
            layout.inside(a.q),
            layout.inside(a.k),
            layout.inside(a.v),
            four_axes(a.mask_tensor()),
            four_axes(a.bias),
            a.sinks,
            a.cu_q,
            a.cu_k,
            a.positions,
            a.score_tensors(),
            a.seed or 0,
        )


def four_axes(t: torch.Tensor | None) -> torch.Tensor | None:
    return t if t is None or t.dim() == 4 else t[(None,) * (4 - t.dim())]
