"""The table of arguments of `strobe.attention`, `attention_varlen` and `attention_paged`, and the layouts of tensors.

`Arguments` holds what a caller passed, unchecked. Each argument is one row of it. Everything that lists arguments is derived
from the rows: the tensors that autograd sees, the key under which a bound call is remembered (`call/bound_call.py`), the
schema of the traced operation (`call/traced.py`), and the views that backends get (`Inputs`). `Problem.of` checks them.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch

from strobe.variants.score import Score

PLAIN = (torch.Tensor, torch.nn.Parameter)  # others may have no memory, or mean something else


def tensor_facts(t: torch.Tensor) -> tuple[Any, ...]:
    """Return the facts on which a call that was prepared for a plain tensor depends, besides its address and
    contents."""
    return t.__class__, t.shape, t.is_contiguous() or t.stride(), t.dtype, t.device, t.is_neg()


# Bytes that one asynchronous copy moves. Kernels want addresses and strides that are multiples of it, so a bound call
# depends on which tensors have them (`bound_call.signature`), and a plan on the tensors that were copied for it.
ALIGN = 16


class Row(NamedTuple):
    """A row of the table: facts about an argument besides its name and default."""

    # The type as an argument of torch.ops.strobe.attention; None: the argument cannot be traced.
    schema: str | None = None
    # The argument is a tensor, or None.
    tensor: bool = False
    # It may have a gradient.
    gradient: bool = False
    # How backends see it: "rows" (batch, heads, length, dim), "pairs" (with four axes), or, if None, as it is.
    view: str | None = None
    # The result goes there, so autograd never sees it.
    written: bool = False
    # Calls that have it have no gradients, so autograd never sees it.
    forward: bool = False
    # It has one number for each query head.
    per_head: bool = False
    # The form in which kernels read it: "floats", "contiguous", "strided" or "unsigned".
    read: str | None = None


_Rows = Annotated[Any, Row("Tensor", tensor=True, gradient=True, view="rows")]
_Offsets = Annotated[Any, Row("Tensor?", tensor=True, read="contiguous")]
_Paged = Annotated[Any, Row("Tensor?", tensor=True, forward=True, read="contiguous")]
_Written = Annotated[Any, Row(tensor=True, written=True)]


class Arguments(NamedTuple):
    """One call, as it was made; `strobe.attention` documents the arguments. Without `cu_q` and `cu_k` it is a dense one. A
    softcap is a score (`resolve.with_softcap`)."""

    q: _Rows
    k: _Rows
    v: _Rows
    cu_q: _Offsets = None
    cu_k: _Offsets = None
    max_q: Annotated[Any, Row("SymInt?")] = None
    max_k: Annotated[Any, Row("SymInt?")] = None
    # A `Mask`, which is traced as a text, or a tensor.
    mask: Annotated[Any, Row("Tensor?", tensor=True, view="pairs")] = None
    scale: Annotated[Any, Row("float?")] = None
    # A `Score`, which is traced as a text; its tensors are traced apart.
    score: Annotated[Any, Row("str")] = None
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
    # (sequences, 4) int32, the fields of `mask.Positions`.
    positions: _Offsets = None
    # The output is in fp32.
    partial: Annotated[Any, Row()] = False
    # The index of the first query head among those of the whole, for dropout.
    first_head: Annotated[Any, Row()] = 0
    # The LSE of a state, a finite result over other keys whose output is in `out`: the call merges into both.
    state_lse: _Written = None
    # The output of the state if it is not in `out`, which then gets the merged one in the dtype of q.
    state_out: _Written = None

    # ---- paged keys: k and v are a pool of pages, (pages, page, heads_k, dim); `strobe.attention_paged` documents the rest
    # (sequences, width) int32; with `indptr` the entries of all sequences, one after the other.
    table: _Paged = None
    # (sequences + 1,) int32.
    indptr: _Paged = None
    # (sequences,) int32: the call is a paged one if it has them.
    lengths: _Paged = None
    # (sequences,) int32.
    starts: _Paged = None
    # A `strobe.paged.Plan`.
    plan: Annotated[Any, Row()] = None
    # The bits of a row are the same whatever is beside it.
    invariant: Annotated[Any, Row("bool")] = False

    # ---- internal
    # The `BlockMask` that the mask came from, which keeps maps for kernels.
    blocks: Annotated[Any, Row()] = None

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
# The arguments that can have a gradient: q, k, v first.
GRADIENTS = tuple(name for name, row in ROWS.items() if row.gradient)
# The tensors that autograd sees.
TENSORS = GRADIENTS + tuple(
    n for n, row in ROWS.items() if row.tensor and not (row.gradient or row.written or row.forward)
)
_PLACES = [Arguments._fields.index(name) for name in TENSORS]
_SCORE, _SEED, _BLOCKS = map(Arguments._fields.index, ("score", "seed", "blocks"))
_others = operator.attrgetter(*("mask_tensor" if n == "mask" else n for n in TENSORS[3:]))  # besides q, k and v


def tensors_of(a: Arguments) -> tuple[torch.Tensor | None, ...]:
    """The tensors that autograd sees, in the order of TENSORS, and behind them those of a score; q, k and v alone if there
    are no others, since each costs autograd time."""
    others, of_score = _others(a), a.score_tensors
    for t in others:
        if t is not None:
            return *a[:3], *others, *of_score
    return (*a[:3], *others, *of_score) if of_score else a[:3]


@functools.lru_cache(maxsize=256)
def gradient_names(needs: tuple[bool, ...]) -> tuple[str, ...]:
    """The names of the tensors of `tensors_of` that need a gradient; those of a score are "score0" and so on. The last ones
    may be missing in `needs`."""
    first = len(TENSORS)
    return tuple(TENSORS[i] if i < first else f"score{i - first}" for i, need in enumerate(needs) if need)


def in_tensor_order(gradients: Sequence[Any], of_score: Sequence[Any]) -> tuple[Any, ...]:
    """Pads values for GRADIENTS, and for the tensors of a score, with None to the order of `tensors_of`."""
    return (*gradients, *(None,) * (len(TENSORS) - len(GRADIENTS)), *of_score) if of_score else tuple(gradients)


def without_tensors(a: Arguments) -> Arguments:
    """The call without its tensors and its seed; it writes to nothing, and returns the LSE."""
    none = {name: None for name, row in ROWS.items() if row.tensor and isinstance(getattr(a, name), torch.Tensor)}
    score = a.score.structure if isinstance(a.score, Score) else a.score
    return a._replace(**none, score=score, seed=None, return_lse=True, blocks=None, plan=None)


def with_tensors(a: Arguments, seed: int | None, tensors: Sequence[Any], blocks: Any = None) -> Arguments:
    """Arguments that were made `without_tensors`, with tensors in the order of `tensors_of`."""
    values = list(a)  # replacing by name takes five times as long
    for place, t in zip(_PLACES, tensors, strict=False):
        if t is not None:
            values[place] = t
    if of_score := tensors[len(TENSORS) :]:
        values[_SCORE] = a.score.with_tensors(of_score)
    values[_SEED], values[_BLOCKS] = seed, blocks
    return Arguments._make(values)


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
# The layout of a caller who gives none: equal to "bshd", but another object, so that `is` tells that none was given. Its
# class is str, since PyTorch's tracers take no other.
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
    """The layout of k and v, where q has this one. A pool of pages has the axes of a batch of short sequences."""
    return Layout.BSHD if a.paged else layout


def layout_of(a: Arguments) -> Layout:
    """The layout of arguments whose `layout` and number of axes have been checked."""
    return Layout.VARLEN if a.cu_q is not None else _BY_AXES[a.layout, a.q.dim()]


class Inputs(Arguments):
    """The arguments as backends see them: q, k and v (batch, heads, length, dim), mask tensors and biases with four axes
    that are broadcastable to (batch, heads, len_q, len_k), no mask but a tensor, a seed in any case. Varlen problems have
    batch 1 here and say with cu_q, cu_k where each sequence begins and ends. Paged k and v are (pages, heads, page, dim)."""

    __slots__ = ()

    @staticmethod
    def of(a: Arguments, layout: Layout) -> Inputs:
        """Views; the arguments have been checked."""
        inputs = a._replace(mask=a.mask_tensor, seed=a.seed or 0)
        views = {name: _view(getattr(inputs, name), row.view, layout) for name, row in ROWS.items() if row.view}
        if a.paged:
            views |= {"k": layout_of_keys(a, layout).inside(a.k), "v": layout_of_keys(a, layout).inside(a.v)}
        return Inputs(*inputs._replace(**views))


def _view(t: torch.Tensor | None, view: str | None, layout: Layout) -> torch.Tensor | None:
    if t is None:
        return None
    return layout.inside(t) if view == "rows" else four_axes(t)


def four_axes(t: torch.Tensor | None) -> torch.Tensor | None:
    return t if t is None or t.dim() == 4 else t[(None,) * (4 - t.dim())]
