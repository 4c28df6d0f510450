"""The table of arguments of `strobe.attention`, `attention_varlen` and `attention_paged`, and the layouts of tensors.

`Arguments` holds what a caller passed, unchecked. Each argument is one row of it. Everything that lists arguments is derived
from the rows: which tensors autograd sees, the key under which a bound call is remembered (`bound_call.py`), the schema of the
traced operation (`traced.py`), and the views that backends get (`Inputs`). `problem.py` checks them.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch

from strobe.variants.score import Score

PLAIN = (torch.Tensor, torch.nn.Parameter)  # others may have no memory, or mean something else


def tensor_facts(t: torch.Tensor) -> tuple[Any, ...]:
    """What a call that was prepared for a plain tensor depends on, but for its address and contents."""
    return t.__class__, t.shape, t.is_contiguous() or t.stride(), t.dtype, t.device, t.is_neg()


class Row(NamedTuple):
    """What is known of an argument besides its name and default."""

    schema: str | None = None  # its type as an argument of torch.ops.strobe.attention; None: it cannot be traced
    tensor: bool = False  # if it is given
    gradient: bool = False  # it may have one
    view: str | None = (
        None  # how backends see it: "rows" (batch, heads, length, dim), "pairs" (with four axes), or as it is
    )
    written: bool = False  # the result goes there, so autograd never sees it
    forward: bool = False  # of calls that have no gradients, so autograd never sees it
    per_head: bool = False  # one number for each query head
    read: str | None = None  # the form in which kernels read it: "floats", "contiguous", "strided" or "unsigned"


_Rows = Annotated[Any, Row("Tensor", tensor=True, gradient=True, view="rows")]
_Offsets = Annotated[Any, Row("Tensor?", tensor=True, read="contiguous")]
_Paged = Annotated[Any, Row("Tensor?", tensor=True, forward=True, read="contiguous")]
_Written = Annotated[Any, Row(tensor=True, written=True)]


class Arguments(NamedTuple):
    """One call, as it was made; `strobe.attention` documents the arguments. Without `cu_q` and `cu_k` it is a dense one."""

    q: _Rows
    k: _Rows
    v: _Rows
    cu_q: _Offsets = None
    cu_k: _Offsets = None
    max_q: Annotated[Any, Row("SymInt?")] = None
    max_k: Annotated[Any, Row("SymInt?")] = None
    mask: Annotated[Any, Row("Tensor?", tensor=True, view="pairs")] = None  # or a `Mask`, which travels as a text
    scale: Annotated[Any, Row("float?")] = None
    softcap: Annotated[Any, Row()] = None  # travels as a score
    score: Annotated[Any, Row("str")] = None  # its tensors travel apart
    bias: Annotated[Any, Row("Tensor?", tensor=True, gradient=True, view="pairs", read="strided")] = None
    dropout: Annotated[Any, Row("float")] = 0.0
    seed: Annotated[Any, Row("SymInt", read="unsigned")] = None
    sinks: Annotated[Any, Row("Tensor?", tensor=True, gradient=True, per_head=True, read="floats")] = None
    layout: Annotated[Any, Row("str")] = "bshd"
    out: _Written = None
    return_lse: Annotated[Any, Row()] = False
    deterministic: Annotated[Any, Row("bool")] = False
    backend: Annotated[Any, Row("str?")] = None
    # ---- internal, for shards and chunks
    positions: _Offsets = None  # (sequences, 4) int32, the fields of `mask.Positions`
    partial: Annotated[Any, Row()] = False  # the output is in fp32
    first_head: Annotated[Any, Row()] = 0  # index of the first query head among those of the whole, for dropout
    state_lse: _Written = (
        None  # the LSE of a state, a finite result over other keys in `out`: the call merges into both
    )
    state_out: _Written = None  # where the state's output is instead; `out` gets the merged one, in the dtype of q
    # ---- paged keys: k and v are a pool of pages, (pages, page, heads_k, dim); `strobe.attention_paged` documents the rest
    table: _Paged = None  # (sequences, width) int32; with `indptr` the entries of all sequences, one after the other
    indptr: _Paged = None  # (sequences + 1,) int32
    lengths: _Paged = None  # (sequences,) int32: the call is a paged one if it is given
    starts: _Paged = None  # (sequences,) int32
    plan: Annotated[Any, Row()] = None  # a `strobe.paged.Plan`
    invariant: Annotated[Any, Row("bool")] = False  # the same bits for a row whatever is beside it
    # ---- internal
    blocks: Annotated[Any, Row()] = None  # the `BlockMask` that the mask came from, which keeps maps for kernels

    @property
    def mask_tensor(self) -> torch.Tensor | None:
        return self.mask if isinstance(self.mask, torch.Tensor) else None

    @property
    def paged(self) -> bool:
        return self.lengths is not None

    @property
    def score_tensors(self) -> tuple[torch.Tensor, ...]:
        return () if self.score is None else self.score.tensors


ROWS: dict[str, Row] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Arguments, include_extras=True).items()
}
PER_HEAD = tuple(name for name, row in ROWS.items() if row.per_head)
GRADIENTS = tuple(name for name, row in ROWS.items() if row.gradient)  # what can have one: q, k, v first
TENSORS = GRADIENTS + tuple(
    n for n, row in ROWS.items() if row.tensor and not (row.gradient or row.written or row.forward)
)  # that autograd sees
_PLACES = [Arguments._fields.index(name) for name in TENSORS]
_SCORE, _SEED, _BLOCKS = map(Arguments._fields.index, ("score", "seed", "blocks"))
_others = operator.attrgetter(*("mask_tensor" if n == "mask" else n for n in TENSORS[3:]))  # besides q, k and v


def tensors_of(a: Arguments) -> tuple[torch.Tensor | None, ...]:
    """In the order of TENSORS, those of a score behind them; q, k and v alone if there are no others, since each costs
    autograd time."""
    others, of_score = _others(a), a.score_tensors
    for t in others:
        if t is not None:
            return *a[:3], *others, *of_score
    return (*a[:3], *others, *of_score) if of_score else a[:3]


def gradient_names(needs: Sequence[bool]) -> tuple[str, ...]:
    """Of the tensors of `tensors_of` that need a gradient; those of a score are "score0" and so on."""
    known = len(TENSORS)
    return tuple(TENSORS[i] if i < known else f"score{i - known}" for i, need in enumerate(needs) if need)


def behind_tensors(of_gradients: Sequence[Any], of_score: Sequence[Any]) -> tuple[Any, ...]:
    """In the order of `tensors_of`: something for each of GRADIENTS, and for each tensor of a score."""
    return (*of_gradients, *(None,) * (len(TENSORS) - len(GRADIENTS)), *of_score) if of_score else tuple(of_gradients)


def without_tensors(a: Arguments) -> Arguments:
    """What a call is besides its tensors and seed; nothing is written to, and the LSE is returned."""
    none = {name: None for name, row in ROWS.items() if row.tensor and isinstance(getattr(a, name), torch.Tensor)}
    score = a.score.structure if isinstance(a.score, Score) else a.score
    return a._replace(**none, score=score, seed=None, return_lse=True, blocks=None, plan=None)


def with_tensors(a: Arguments, seed: int | None, tensors: Sequence[Any], blocks: Any = None) -> Arguments:
    """Arguments `without_tensors`, with tensors that are given as by `tensors_of`."""
    found = list(a)  # replacing by name takes five times as long
    for place, t in zip(_PLACES, tensors, strict=False):
        if t is not None:
            found[place] = t
    if of_score := tensors[len(TENSORS) :]:
        found[_SCORE] = a.score.with_tensors(of_score)
    found[_SEED], found[_BLOCKS] = seed, blocks
    return Arguments._make(found)


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
# The layout of a caller who gives none: equal to "bshd", but an object of its own, so that `is` tells that none was given.
DEFAULT_LAYOUT = "".join(LAYOUTS[0])
_BY_AXES = {
    ("bshd", 4): Layout.BSHD,
    ("bshd", 3): Layout.SHD,
    ("bhsd", 4): Layout.BHSD,
    ("bhsd", 3): Layout.HSD,
    ("bshd", 2): Layout.SD,
    ("bhsd", 2): Layout.SD,
}


def layout_of_keys(a: Arguments, layout: Layout) -> Layout:
    """Of k and v, where q has this one. A pool of pages has the axes of a batch of short sequences."""
    return Layout.BSHD if a.paged else layout


def layout_of(a: Arguments) -> Layout:
    """Of arguments whose `layout` and number of axes have been checked."""
    return Layout.VARLEN if a.cu_q is not None else _BY_AXES[a.layout, a.q.dim()]


class Inputs(Arguments):
    """The arguments as backends see them: q, k and v (batch, heads, length, dim), mask tensors and biases with four axes
    that are broadcastable to (batch, heads, len_q, len_k), no mask but a tensor, a seed in any case. Varlen problems have
    batch 1 here and say with cu_q, cu_k where each sequence begins and ends. Paged k and v are (pages, heads, page, dim)."""

    __slots__ = ()

    @staticmethod
    def of(a: Arguments, layout: Layout) -> Inputs:
        """Views; the arguments have been checked."""
        found = a._replace(mask=a.mask_tensor, seed=a.seed or 0)
        views = {name: _view(getattr(found, name), row.view, layout) for name, row in ROWS.items() if row.view}
        if a.paged:
            views |= {"k": layout_of_keys(a, layout).inside(a.k), "v": layout_of_keys(a, layout).inside(a.v)}
        return Inputs(*found._replace(**views))


def _view(t: torch.Tensor | None, view: str | None, layout: Layout) -> torch.Tensor | None:
    if t is None:
        return None
    return layout.inside(t) if view == "rows" else four_axes(t)


def four_axes(t: torch.Tensor | None) -> torch.Tensor | None:
    return t if t is None or t.dim() == 4 else t[(None,) * (4 - t.dim())]
