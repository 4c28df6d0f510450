"""`Problem`: the frozen facts of one attention call, and every check of its arguments.

`Problem` says what is to be computed, without tensors: it is what backends are asked about (`supports`), what plans are
made from and what caches are keyed by. `Inputs` holds the tensors, all in one order: (batch, heads, length, dim), as
views."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import torch

from strobe.mask import MAX_CONSTANTS, Mask, full

LAYOUTS = ("bshd", "bhsd")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Unsupported(RuntimeError):
    """A backend was named explicitly and cannot do what was asked; the message says why."""


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the LSE that goes with inputs of this type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Problem:
    dtype: torch.dtype
    device: torch.device
    batch: int  # sequences, for packed problems
    heads: int
    heads_k: int
    len_q: int  # longest sequence, for packed problems
    len_k: int
    dim: int  # of queries and keys
    dim_v: int
    mask: Mask
    scale: float
    softcap: float | None
    dropout: float
    has_mask_tensor: bool
    has_bias: bool
    has_sinks: bool
    packed: bool  # sequences of different lengths, one after the other ("varlen")
    total_q: int  # rows in all: batch * len_q unless packed
    total_k: int
    needs_grad: bool
    return_lse: bool
    deterministic: bool
    strides: tuple[tuple[int, ...], ...]  # (batch, head, row) of q, k, v in elements; the last axis is contiguous

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.heads_k

    @property
    def lse_dtype(self) -> torch.dtype:
        return lse_dtype(self.dtype)

    @property
    def empty(self) -> bool:
        """Nothing to compute: the output has no elements, or no query has a key to look at."""
        return 0 in (self.batch, self.heads, self.total_q, self.total_k, self.dim_v)

    def pairs(self) -> int:
        """Visible (query, key) pairs of all heads. Mask tensors are counted as if everything were visible; packed
        problems as if every sequence had the longest length."""
        return self.batch * self.heads * self.mask.area(self.len_q, self.len_k)

    def flops(self) -> int:
        """Multiplications and additions of the two matrix products of a forward pass."""
        return 2 * (self.dim + self.dim_v) * self.pairs()

    def bytes(self) -> int:
        """The least a forward pass has to move: q, k, v read once, the output and the LSE written once."""
        elements = self.heads * self.total_q * (self.dim + self.dim_v) + self.heads_k * self.total_k * (
            self.dim + self.dim_v
        )
        return elements * self.dtype.itemsize + self.heads * self.total_q * self.lse_dtype.itemsize


@dataclass
class Inputs:
    """The tensors of a call, (batch, heads, length, dim). Packed problems have batch 1 here and say with cu_q, cu_k
    where each sequence begins and ends."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None  # booleans broadcastable to (batch, heads, len_q, len_k), four axes
    bias: torch.Tensor | None = None  # the same, in numbers
    sinks: torch.Tensor | None = None  # (heads,)
    seed: int = 0
    cu_q: torch.Tensor | None = None
    cu_k: torch.Tensor | None = None


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


def _check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        _tensor(name, t)
        if t.dtype not in DTYPES:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise TypeError(f"{name} has dtype {t.dtype}; allowed are {allowed}")
        if t.layout != torch.strided:
            raise TypeError(f"{name} must be a dense (strided) tensor, got layout {t.layout}")
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {t.dtype}, q has {q.dtype}; all three must be the same")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device}, q is on {q.device}; all three must be on one device")
        if t.dim() != q.dim():
            raise ValueError(f"{name} has {t.dim()} axes, q has {q.dim()}; all three must have the same number")


def _check_dims(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """On views in (batch, heads, length, dim) order."""
    for axis, what in ((0, "batch size"), (1, "number of heads"), (2, "length")):
        if k.shape[axis] != v.shape[axis]:
            raise ValueError(f"k and v disagree in {what}: {k.shape[axis]} and {v.shape[axis]}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k disagree in batch size: {q.shape[0]} and {k.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k disagree in head dim: {q.shape[3]} and {k.shape[3]}")
    if q.shape[3] == 0:
        raise ValueError("the head dim of q and k is 0; it must be at least 1")
    heads, heads_k = q.shape[1], k.shape[1]
    if heads_k == 0 and heads != 0:
        raise ValueError(f"q has {heads} heads, k has none; at least one key head is needed")
    if heads_k and heads % heads_k:
        raise ValueError(f"q has {heads} heads, which is not a multiple of the {heads_k} heads of k and v")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.shape[3] > 1 and t.numel() and t.stride(3) != 1:
            raise ValueError(
                f"the last axis of {name} must be contiguous, its stride is {t.stride(3)}; call {name}.contiguous()"
            )


def _check_cu(name: str, cu: Any, like: torch.Tensor) -> torch.Tensor:
    _tensor(name, cu)
    if cu.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {cu.dtype}")
    if cu.dim() != 1 or cu.numel() < 1:
        raise ValueError(f"{name} must have shape (sequences + 1,), got {tuple(cu.shape)}")
    if cu.device != like.device:
        raise ValueError(f"{name} is on {cu.device}, q is on {like.device}")
    return cu.contiguous()


def _longest(name: str, max_name: str, cu: torch.Tensor, longest: Any, total: int) -> int:
    """The longest sequence. If it is given and `cu` lives on a GPU nothing is read back, so that the call never
    waits."""
    if longest is not None:
        if isinstance(longest, bool) or not isinstance(longest, numbers.Integral):
            raise TypeError(f"{max_name} must be an int, got {longest!r}")
        if longest < 0:
            raise ValueError(f"{max_name} must be at least 0, got {longest}")
        if cu.device.type != "cpu":
            return int(longest)
    ends = cu.tolist()
    lengths = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    if ends[0] != 0 or ends[-1] != total:
        raise ValueError(f"{name} must run from 0 to {total} (the rows there are), got {ends[0]} … {ends[-1]}")
    if any(n < 0 for n in lengths):
        at = next(i for i, n in enumerate(lengths) if n < 0)
        raise ValueError(
            f"{name} must not decrease, but {name}[{at}] = {ends[at]} and {name}[{at + 1}] = {ends[at + 1]}"
        )
    found = max(lengths, default=0)
    if longest is not None and longest < found:
        raise ValueError(f"{max_name} is {longest}, but the longest sequence in {name} has {found} rows")
    return found


def _broadcastable(name: str, t: torch.Tensor, q: torch.Tensor, want: tuple[int, int, int, int]) -> torch.Tensor:
    if t.device != q.device:
        raise ValueError(f"{name} is on {t.device}, q is on {q.device}")
    if t.dim() > 4:
        raise ValueError(f"{name} has {t.dim()} axes; at most 4 (batch, heads, len_q, len_k)")
    view = t[(None,) * (4 - t.dim())]
    if any(have not in (1, need) for have, need in zip(view.shape, want, strict=True)):
        shape = tuple(t.shape)
        raise ValueError(f"{name} has shape {shape}, which does not broadcast to (batch, heads, len_q, len_k) = {want}")
    return view


def _check_sinks(sinks: Any, q: torch.Tensor, heads: int) -> torch.Tensor:
    _tensor("sinks", sinks)
    if not sinks.dtype.is_floating_point:
        raise TypeError(f"sinks must be floating point, got {sinks.dtype}")
    if tuple(sinks.shape) != (heads,):
        raise ValueError(f"sinks must have shape (heads,) = ({heads},), got {tuple(sinks.shape)}")
    if sinks.device != q.device:
        raise ValueError(f"sinks is on {sinks.device}, q is on {q.device}")
    return sinks


def _check_out(out: Any, want: tuple[int, ...], q: torch.Tensor) -> None:
    _tensor("out", out)
    if tuple(out.shape) != want:
        raise ValueError(f"out has shape {tuple(out.shape)}, the result has {want}")
    if out.dtype != q.dtype:
        raise TypeError(f"out has dtype {out.dtype}, the inputs have {q.dtype}")
    if out.device != q.device:
        raise ValueError(f"out is on {out.device}, the inputs are on {q.device}")
    if out.requires_grad:
        raise ValueError("out requires grad; results are written into it in place, so pass out.detach() or no out")
    if out.numel() and out.shape[-1] > 1 and out.stride(-1) != 1:
        raise ValueError(f"the last axis of out must be contiguous, its stride is {out.stride(-1)}")
    if any(n > 1 and s == 0 for n, s in zip(out.shape, out.stride(), strict=True)):
        raise ValueError("out is an expanded tensor (a stride is 0): several results would share one element")


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu: tuple[Any, Any, Any, Any] | None = None,
    mask: Mask | torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    sinks: torch.Tensor | None = None,
    layout: str = "bshd",
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
) -> tuple[Problem, Inputs]:
    """Check everything and bring it into one form. `cu` = (cu_q, cu_k, max_q, max_k) for packed sequences."""
    _check_qkv(q, k, v)
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}, got {layout!r}")
    cu_q = cu_k = None
    if cu is None:
        if not 2 <= q.dim() <= 4:
            raise ValueError(f"q has {q.dim()} axes; allowed are 2 (length, dim), 3 and 4 ({', '.join(layout)})")
        views = [to_bhsd(t, layout) for t in (q, k, v)]
        batch, (len_q, len_k) = views[0].shape[0], (views[0].shape[2], views[1].shape[2])
    else:
        if q.dim() != 3:
            raise ValueError(f"q has {q.dim()} axes; packed sequences have 3 (total, heads, dim)")
        views = [t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
    _check_dims(*views)
    if cu is not None:
        cu_q, cu_k = _check_cu("cu_q", cu[0], q), _check_cu("cu_k", cu[1], q)
        if cu_q.shape != cu_k.shape:
            sequences = f"{cu_q.numel() - 1} and {cu_k.numel() - 1} sequences"
            raise ValueError(f"cu_q and cu_k describe {sequences}; they must be as many")
        batch = cu_q.numel() - 1
        len_q = _longest("cu_q", "max_q", cu_q, cu[2], q.shape[0])
        len_k = _longest("cu_k", "max_k", cu_k, cu[3], k.shape[0])

    heads, heads_k, dim, dim_v = views[0].shape[1], views[1].shape[1], views[0].shape[3], views[2].shape[3]
    want = (batch, heads, len_q, len_k)
    mask_tensor = None
    if isinstance(mask, torch.Tensor):
        if mask.dtype != torch.bool:
            raise TypeError(
                f"a mask tensor must be boolean (True may be attended), got {mask.dtype}; numbers to add go in bias"
            )
        mask_tensor, mask = _broadcastable("mask", mask, q, want), full
    elif mask is None:
        mask = full
    elif not isinstance(mask, Mask):
        allowed = "a strobe mask (strobe.causal, strobe.window(…), …), a boolean tensor or None"
        raise TypeError(f"mask must be {allowed}, got {mask!r}")
    if len(mask.constants) > MAX_CONSTANTS:
        raise ValueError(f"{mask!r} combines too many masks: {len(mask.constants)} constants, at most {MAX_CONSTANTS}")
    if bias is not None:
        if not _tensor("bias", bias).dtype.is_floating_point:
            raise TypeError(f"bias must be floating point, got {bias.dtype}; booleans go in mask")
        bias = _broadcastable("bias", bias, q, want)
    if sinks is not None:
        sinks = _check_sinks(sinks, q, heads)
    scale = 1.0 / math.sqrt(dim) if scale is None else _number("scale", scale)
    if softcap is not None and _number("softcap", softcap) <= 0:
        raise ValueError(f"softcap must be greater than 0, got {softcap}")
    if not 0.0 <= _number("dropout", dropout) < 1.0:
        raise ValueError(f"dropout must be at least 0 and less than 1, got {dropout}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed must be an int, got {seed!r}")
    if out is not None:
        _check_out(out, (*q.shape[:-1], dim_v), q)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, bias, sinks))
    if out is not None and needs_grad:
        raise ValueError(
            "out cannot be given while gradients are needed (in-place results are not differentiable); use torch.no_grad()"
        )

    problem = Problem(
        dtype=q.dtype,
        device=q.device,
        batch=batch,
        heads=heads,
        heads_k=heads_k,
        len_q=len_q,
        len_k=len_k,
        dim=dim,
        dim_v=dim_v,
        mask=mask,
        scale=scale,
        softcap=None if softcap is None else float(softcap),
        dropout=float(dropout),
        has_mask_tensor=mask_tensor is not None,
        has_bias=bias is not None,
        has_sinks=sinks is not None,
        packed=cu is not None,
        total_q=views[0].shape[0] * views[0].shape[2],
        total_k=views[1].shape[0] * views[1].shape[2],
        needs_grad=needs_grad,
        return_lse=return_lse,
        deterministic=deterministic,
        strides=tuple(t.stride()[:3] for t in views),
    )
    if dropout and seed is None:  # follows torch.manual_seed
        seed = int(torch.randint(1 << 62, ()).item())
    return problem, Inputs(views[0], views[1], views[2], mask_tensor, bias, sinks, seed or 0, cu_q, cu_k)


def to_bhsd(t: torch.Tensor, layout: str) -> torch.Tensor:
    """A view in (batch, heads, length, dim) order; missing leading axes are added."""
    if t.dim() == 2:
        return t[None, None]
    if t.dim() == 3:
        t = t[None]
    return t.transpose(1, 2) if layout == "bshd" else t


def from_bhsd(t: torch.Tensor, like: torch.Tensor, layout: str) -> torch.Tensor:
    """The inverse of to_bhsd, for a result that goes with the query `like`."""
    if like.dim() == 2:
        return t[0, 0]
    t = t.transpose(1, 2) if layout == "bshd" else t
    return t[0] if like.dim() == 3 else t
