"""`Problem`: the frozen facts of one attention call, and every check of its arguments.

A problem says what is to be computed, without tensors: it is what backends are asked about and what plans are made from.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, replace
from typing import Any

import torch

from strobe.arguments import LAYOUTS, Arguments, Layout, four_axes, layout_of
from strobe.mask import MAX_CONSTANTS, Mask, full
from strobe.score import Score, identity, softcap

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GRADIENTS = ("q", "k", "v", "bias", "sinks")  # what can have one
Strides = tuple[int, int, int]  # (batch, head, row) in elements; the last axis is contiguous


class Unsupported(RuntimeError):
    """A backend was named explicitly and cannot do what was asked; the message says why."""


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the LSE that goes with inputs of this type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Rows:
    """Where rows lie in memory: those of queries, or those of keys and values."""

    heads: int
    length: int  # of the longest sequence
    total: int  # of all sequences
    strides: tuple[Strides, ...]  # of q; of k and of v


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
    varlen: bool  # sequences of different lengths, one after the other
    positions: bool  # rows and keys are parts of longer sequences
    # ---- what happens to a score
    scale: float
    score: Score
    mask: Mask
    dropout: float
    has_mask_tensor: bool
    has_bias: bool
    has_sinks: bool
    # ---- what is wanted
    gradients: tuple[str, ...]  # of GRADIENTS; none: the output
    lse: bool
    partial: bool  # an output in fp32, to be merged with others
    deterministic: bool

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
        """Of q, k and v."""
        return self.q.strides[0], self.k.strides[0], self.k.strides[1]

    @property
    def lse_dtype(self) -> torch.dtype:
        return lse_dtype(self.dtype)

    @property
    def out_dtype(self) -> torch.dtype:
        return self.lse_dtype if self.partial else self.dtype

    @property
    def empty(self) -> bool:
        """No query has a key to look at, or there are no queries."""
        return 0 in (self.batch, self.heads, self.q.total, self.k.total, self.q.length, self.k.length)

    @property
    def direction(self) -> str:
        return "backward" if self.gradients else "forward"

    def backward(self, gradients: tuple[str, ...]) -> Problem:
        """The problem of computing these gradients."""
        return replace(self, gradients=gradients, lse=False)

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
        layout = _check_qkv(a)
        q, k, v = (layout.inside(t) for t in (a.q, a.k, a.v))
        _check_dims(q, k, v)
        batch, len_q, len_k = (q.shape[0], q.shape[2], k.shape[2]) if a.cu_q is None else _check_sequences(a)
        heads, heads_k, dim, dim_v = q.shape[1], k.shape[1], q.shape[3], v.shape[3]
        pairs = (batch, heads, len_q, len_k)
        mask = _check_mask(a.mask, a.q, pairs)
        if a.cu_q is None and a.positions is None and mask.hides_nothing(len_q, len_k):
            mask = full  # as a causal one does of a single query
        score = _check_score(a, batch, heads)
        if a.bias is not None:
            if not _tensor("bias", a.bias).dtype.is_floating_point:
                raise TypeError(f"bias must be floating point, got {a.bias.dtype}; booleans go in mask")
            _check_pairs("bias", a.bias, a.q, pairs)
        if a.sinks is not None:
            _check_sinks(a.sinks, a.q, heads)
        scale = 1.0 / math.sqrt(dim) if a.scale is None else _number("scale", a.scale)
        if not 0.0 <= _number("dropout", a.dropout) < 1.0:
            raise ValueError(f"dropout must be at least 0 and less than 1, got {a.dropout}")
        if a.seed is not None and (isinstance(a.seed, bool) or not isinstance(a.seed, int)):
            raise TypeError(f"seed must be an int, got {a.seed!r}")
        if a.out is not None:
            _check_out(a, dim_v, needs_grad)
        totals = q.shape[0] * q.shape[2], k.shape[0] * k.shape[2]
        problem = Problem(
            dtype=a.q.dtype,
            device=a.q.device,
            batch=batch,
            dim=dim,
            dim_v=dim_v,
            q=Rows(heads, len_q, totals[0], (q.stride()[:3],)),  # type: ignore[arg-type]
            k=Rows(heads_k, len_k, totals[1], (k.stride()[:3], v.stride()[:3])),  # type: ignore[arg-type]
            varlen=a.cu_q is not None,
            positions=a.positions is not None,
            scale=scale,
            score=score.structure,
            mask=mask,
            dropout=float(a.dropout),
            has_mask_tensor=isinstance(a.mask, torch.Tensor),
            has_bias=a.bias is not None,
            has_sinks=a.sinks is not None,
            gradients=(),
            lse=bool(a.return_lse) or needs_grad,
            partial=bool(a.partial),
            deterministic=bool(a.deterministic),
        )
        return problem, layout


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

    kinds = {"mask": torch.bool, "cu_q": torch.int32, "cu_k": torch.int32}
    tensors = {n: made(s, kinds.get(n, dtype)) for n, s in arguments.items() if isinstance(s, tuple)}
    problem, _ = Problem.of(Arguments(made(q), made(k), made(v), **(arguments | tensors)), needs_grad=bool(gradients))
    problem = replace(problem, device=device)
    return problem.backward(gradients) if gradients else problem


def any_requires_grad(a: Arguments) -> bool:
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in (a.q, a.k, a.v, a.bias, a.sinks))


def _tensor(name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    return value


def _check_qkv(a: Arguments) -> Layout:
    for name, t in (("q", a.q), ("k", a.k), ("v", a.v)):
        _tensor(name, t)
        if t.dtype not in DTYPES:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise TypeError(f"{name} has dtype {t.dtype}; allowed are {allowed}")
        if t.layout != torch.strided:
            raise TypeError(f"{name} must be a dense (strided) tensor, got layout {t.layout}")
    for name, t in (("k", a.k), ("v", a.v)):
        if t.dtype != a.q.dtype:
            raise TypeError(f"{name} has dtype {t.dtype}, q has {a.q.dtype}; all three must be the same")
        if t.device != a.q.device:
            raise ValueError(f"{name} is on {t.device}, q is on {a.q.device}; all three must be on one device")
        if t.dim() != a.q.dim():
            raise ValueError(f"{name} has {t.dim()} axes, q has {a.q.dim()}; all three must have the same number")
    if a.layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}, got {a.layout!r}")
    if a.cu_q is not None or a.cu_k is not None:
        if a.q.dim() != 3:
            raise ValueError(f"q has {a.q.dim()} axes; packed sequences have 3 (total, heads, dim)")
    elif not 2 <= a.q.dim() <= 4:
        raise ValueError(f"q has {a.q.dim()} axes; allowed are 2 (length, dim), 3 and 4 ({', '.join(a.layout)})")
    return layout_of(a)


def _check_dims(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """On views in (batch, heads, length, dim) order."""
    check_shapes(q.shape, k.shape, v.shape)
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.shape[3] > 1 and t.numel() and t.stride(3) != 1:
            raise ValueError(
                f"the last axis of {name} must be contiguous, its stride is {t.stride(3)}; call {name}.contiguous()"
            )


def check_shapes(q: torch.Size, k: torch.Size, v: torch.Size) -> None:
    """(batch, heads, length, dim) each."""
    for axis, what in ((0, "batch size"), (1, "number of heads"), (2, "length")):
        if k[axis] != v[axis]:
            raise ValueError(f"k and v disagree in {what}: {k[axis]} and {v[axis]}")
    if q[0] != k[0]:
        raise ValueError(f"q and k disagree in batch size: {q[0]} and {k[0]}")
    if q[3] != k[3]:
        raise ValueError(f"q and k disagree in head dim: {q[3]} and {k[3]}")
    if q[3] == 0:
        raise ValueError("the head dim of q and k is 0; it must be at least 1")
    heads, heads_k = q[1], k[1]
    if heads_k == 0 and heads != 0:
        raise ValueError(f"q has {heads} heads, k has none; at least one key head is needed")
    if heads_k and heads % heads_k:
        raise ValueError(f"q has {heads} heads, which is not a multiple of the {heads_k} heads of k and v")


# ---- varlen ----------------------------------------------------------------------------------------------------------


def with_longest(a: Arguments) -> Arguments:
    """Varlen arguments with `max_q` and `max_k` filled in. Where they are given and `cu` lives on a GPU nothing is read
    back, so that the call never waits; elsewhere the contents of `cu` are checked at every call."""
    if a.max_q is not None and a.max_k is not None and isinstance(a.cu_q, torch.Tensor) and not a.cu_q.is_cpu:
        return a
    for name, cu in (("cu_q", a.cu_q), ("cu_k", a.cu_k)):
        _check_cu(name, cu, _tensor("q", a.q))
    _check_qkv(a)
    return a._replace(
        max_q=_longest("cu_q", "max_q", a.cu_q, a.max_q, a.q.shape[0]),
        max_k=_longest("cu_k", "max_k", a.cu_k, a.max_k, a.k.shape[0]),
    )


def _check_sequences(a: Arguments) -> tuple[int, int, int]:
    """(sequences, longest queries, longest keys)."""
    _check_cu("cu_q", a.cu_q, a.q)
    _check_cu("cu_k", a.cu_k, a.q)
    if a.cu_q.shape != a.cu_k.shape:
        sequences = f"{a.cu_q.numel() - 1} and {a.cu_k.numel() - 1} sequences"
        raise ValueError(f"cu_q and cu_k describe {sequences}; they must be as many")
    for name, longest in (("max_q", a.max_q), ("max_k", a.max_k)):
        _check_longest(name, longest)
    return a.cu_q.numel() - 1, int(a.max_q), int(a.max_k)


def _check_cu(name: str, cu: Any, like: torch.Tensor) -> None:
    _tensor(name, cu)
    if cu.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {cu.dtype}")
    if cu.dim() != 1 or cu.numel() < 1:
        raise ValueError(f"{name} must have shape (sequences + 1,), got {tuple(cu.shape)}")
    if cu.device != like.device:
        raise ValueError(f"{name} is on {cu.device}, q is on {like.device}")


def _check_longest(name: str, longest: Any) -> None:
    if isinstance(longest, bool) or not isinstance(longest, numbers.Integral):
        raise TypeError(f"{name} must be an int, got {longest!r}")
    if longest < 0:
        raise ValueError(f"{name} must be at least 0, got {longest}")


def _longest(name: str, max_name: str, cu: torch.Tensor, longest: Any, total: int) -> int:
    """The length of the longest sequence; one that is given may be larger."""
    if longest is not None:
        _check_longest(max_name, longest)
        if not cu.is_cpu:
            return int(longest)
    ends = cu.tolist()
    if ends[0] != 0 or ends[-1] != total:
        raise ValueError(f"{name} must run from 0 to {total} (the rows there are), got {ends[0]} … {ends[-1]}")
    found = 0
    for i, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        if end < start:
            raise ValueError(f"{name} must not decrease, but {name}[{i}] = {start} and {name}[{i + 1}] = {end}")
        found = max(found, end - start)
    if longest is not None and longest < found:
        raise ValueError(f"{max_name} is {longest}, but the longest sequence in {name} has {found} rows")
    return found


# ---- what happens to a score -----------------------------------------------------------------------------------------


def _check_mask(mask: Any, q: torch.Tensor, pairs: tuple[int, int, int, int]) -> Mask:
    """The interval mask; `full` beside a mask tensor."""
    if mask is None:
        return full
    if isinstance(mask, torch.Tensor):
        if mask.dtype != torch.bool:
            raise TypeError(
                f"a mask tensor must be boolean (True may be attended), got {mask.dtype}; numbers to add go in bias"
            )
        _check_pairs("mask", mask, q, pairs)
        return full
    if not isinstance(mask, Mask):
        allowed = "a strobe mask (strobe.causal, strobe.window(…), …), a boolean tensor or None"
        raise TypeError(f"mask must be {allowed}, got {mask!r}")
    if len(mask.constants) > MAX_CONSTANTS:
        raise ValueError(f"{mask!r} combines too many masks: {len(mask.constants)} constants, at most {MAX_CONSTANTS}")
    return mask


def _check_score(a: Arguments, batch: int, heads: int) -> Score:
    if a.softcap is not None:
        cap = _number("softcap", a.softcap)
        if cap <= 0:
            raise ValueError(f"softcap must be greater than 0, got {a.softcap}")
        if a.score is not None:
            raise ValueError("softcap and score cannot be given together: a softcap is a score of its own")
        return softcap(cap)
    if a.score is None:
        return identity
    if not isinstance(a.score, Score):
        raise TypeError(f"score must be a strobe.Score (strobe.alibi(slopes), …) or None, got {a.score!r}")
    for t in a.score.tensors:
        if t.device != a.q.device:
            raise ValueError(f"a tensor of {a.score!r} is on {t.device}, q is on {a.q.device}")
        if tuple(t.shape) not in ((heads,), (batch, heads)):
            allowed = f"(heads,) = ({heads},) or (batch, heads) = ({batch}, {heads})"
            raise ValueError(f"a tensor of {a.score!r} has shape {tuple(t.shape)}; allowed are {allowed}")
    return a.score


def _check_pairs(name: str, t: torch.Tensor, q: torch.Tensor, want: tuple[int, int, int, int]) -> None:
    if t.device != q.device:
        raise ValueError(f"{name} is on {t.device}, q is on {q.device}")
    if t.dim() > 4:
        raise ValueError(f"{name} has {t.dim()} axes; at most 4 (batch, heads, len_q, len_k)")
    view = four_axes(t)
    assert view is not None
    if any(have not in (1, need) for have, need in zip(view.shape, want, strict=True)):
        shape = tuple(t.shape)
        raise ValueError(f"{name} has shape {shape}, which does not broadcast to (batch, heads, len_q, len_k) = {want}")


def _check_sinks(sinks: Any, q: torch.Tensor, heads: int) -> None:
    _tensor("sinks", sinks)
    if not sinks.dtype.is_floating_point:
        raise TypeError(f"sinks must be floating point, got {sinks.dtype}")
    if tuple(sinks.shape) != (heads,):
        raise ValueError(f"sinks must have shape (heads,) = ({heads},), got {tuple(sinks.shape)}")
    if sinks.device != q.device:
        raise ValueError(f"sinks is on {sinks.device}, q is on {q.device}")


# ---- out -------------------------------------------------------------------------------------------------------------


def _check_out(a: Arguments, dim_v: int, needs_grad: bool) -> None:
    out = _tensor("out", a.out)
    want = (*a.q.shape[:-1], dim_v)
    dtype = lse_dtype(a.q.dtype) if a.partial else a.q.dtype
    if tuple(out.shape) != want:
        raise ValueError(f"out has shape {tuple(out.shape)}, the result has {want}")
    if out.dtype != dtype:
        raise TypeError(f"out has dtype {out.dtype}, the inputs have {dtype}")
    if out.device != a.q.device:
        raise ValueError(f"out is on {out.device}, the inputs are on {a.q.device}")
    if out.requires_grad:
        raise ValueError("out requires grad; results are written into it in place, so pass out.detach() or no out")
    if needs_grad:
        raise ValueError(
            "out cannot be given while gradients are needed (in-place results are not differentiable); "
            "use torch.no_grad()"
        )
    if out.numel() and out.shape[-1] > 1 and out.stride(-1) != 1:
        raise ValueError(f"the last axis of out must be contiguous, its stride is {out.stride(-1)}")
    if overlaps_itself(out):
        raise ValueError(f"out has strides {out.stride()}: several of its elements share memory")
    for name, t in (("q", a.q), ("k", a.k), ("v", a.v), ("bias", a.bias), ("mask", a.mask), ("sinks", a.sinks)):
        if isinstance(t, torch.Tensor) and not _same_view(t, out, name) and share_memory(t, out):
            raise ValueError(f"out shares memory with {name}, which is read while out is written")


def _same_view(t: torch.Tensor, out: torch.Tensor, name: str) -> bool:
    """Queries may be replaced by their results: whoever writes a row has read it before."""
    return name == "q" and t.data_ptr() == out.data_ptr() and t.shape == out.shape and t.stride() == out.stride()


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether two elements lie at one address. Axes are sorted by stride: each must step over all that lie within."""
    reach = 0
    for stride, size in sorted((abs(s), n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1):
        if stride <= reach:
            return t.numel() > 0 and int(_marks(t, t).sum()) < t.numel() * t.element_size()
        reach += stride * (size - 1)
    return False


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether some element of one is an element of the other."""
    if not a.numel() or not b.numel() or a.device.type == "meta" or not same_storage(a, b):
        return False
    (a0, a1), (b0, b1) = _addresses(a), _addresses(b)
    if a1 <= b0 or b1 <= a0:
        return False
    return bool((_marks(a, b) & _marks(b, a)).any())


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _addresses(t: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _marks(t: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """The bytes of the memory around both, True where `t` has an element."""
    (t0, t1), (b0, b1) = _addresses(t), _addresses(beside)
    start, size = min(t0, b0), t.element_size()
    marks = torch.zeros(max(t1, b1) - start, dtype=torch.bool, device=t.device)
    strides = (*(s * size for s in t.stride()), 1)
    marks.as_strided((*t.shape, size), strides, t0 - start).fill_(True)
    return marks
