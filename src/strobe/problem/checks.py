"""Checks of the arguments of a call, one by one. `Problem.of` calls all of them, in order, and says what is asked for.

An error names the argument, its value and what is allowed.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from strobe.problem.arguments import DEFAULT_LAYOUT, LAYOUTS, TENSORS, Arguments, Layout, four_axes, layout_of
from strobe.problem.overlap import overlaps_itself, share_memory
from strobe.variants.expression import DIAGONAL, B, H, K, Q
from strobe.variants.mask import MAX_CONSTANTS, Mask, full
from strobe.variants.score import LOG2E, Score, identity

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the LSE for inputs of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def out_dtype(dtype: torch.dtype, partial: bool = False) -> torch.dtype:
    """The dtype of the output for inputs of this dtype; a partial one is to be merged with others."""
    return lse_dtype(dtype) if partial else dtype


def checked_tensor(name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    return value


def checked_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    return value


def checked_scale(value: Any, score: Score, dtype: torch.dtype) -> float:
    """Checks that scale * score factors * log2(e) does not overflow the dtype of the scores."""
    scale = checked_number("scale", value)
    form, wide = score.kernel_form(scale), lse_dtype(dtype)
    most = torch.finfo(wide).max
    if abs(form.before) > most or abs(form.after) * LOG2E > most:
        allowed = f"scores are {str(wide).removeprefix('torch.')}, and scale times log2(e) must be at most {most:.3g}"
        raise ValueError(f"scale is {scale}, too large with {score!r}: {allowed}")
    return scale


def check_qkv(a: Arguments) -> Layout:
    for name, t in (("q", a.q), ("k", a.k), ("v", a.v)):
        checked_tensor(name, t)
        if t.is_nested:
            way_out = "strobe.sdpa takes jagged ones, and strobe.attention_varlen their values() and offsets()"
            raise TypeError(f"{name} is a nested tensor; {way_out}")
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
        if a.paged:
            if t.dim() != 4:
                raise ValueError(f"{name} has {t.dim()} axes; a pool of pages has 4 (pages, page, heads_k, dim)")
        elif t.dim() != a.q.dim():
            raise ValueError(f"{name} has {t.dim()} axes, q has {a.q.dim()}; all three must have the same number")
    if a.layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}, got {a.layout!r}")
    if a.cu_q is not None or a.cu_k is not None:
        if a.q.dim() != 3:
            raise ValueError(f"q has {a.q.dim()} axes; packed sequences have 3 (total, heads, dim)")
    elif not 2 <= a.q.dim() <= 4:
        raise ValueError(f"q has {a.q.dim()} axes; allowed are 2 (length, dim), 3 and 4 ({', '.join(a.layout)})")
    return layout_of(a)


def check_dims(a: Arguments, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Check shapes and strides of views in (batch, heads, length, dim) order."""
    try:
        check_shapes(q.shape, k.shape, v.shape, a.paged)
    except ValueError as error:
        raise ValueError(f"{error}{_or_bhsd(a)}") from None
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.shape[3] > 1 and t.numel() and t.stride(3) != 1:
            raise ValueError(
                f"the last axis of {name} must be contiguous, its stride is {t.stride(3)}; call {name}.contiguous()"
            )


def check_shapes(q: torch.Size, k: torch.Size, v: torch.Size, paged: bool = False) -> None:
    """(batch, heads, length, dim) each; of pages (pages, heads, page, dim)."""
    names = (
        ("number of pages", "number of heads", "page size") if paged else ("batch size", "number of heads", "length")
    )
    for axis, what in enumerate(names):
        if k[axis] != v[axis]:
            raise ValueError(f"k and v disagree in {what}: {k[axis]} and {v[axis]}")
    if q[0] != k[0] and not paged:
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


def _or_bhsd(a: Arguments, name: str | None = None) -> str:
    """The end of an error about shapes. It offers PyTorch's order of axes if no layout was given and that order fits: q, k
    and v, and the mask or the bias of this name."""
    if a.layout is not DEFAULT_LAYOUT or a.q.dim() != 4:
        return ""
    q, k, v = a.q.shape, a.k.shape, a.v.shape
    try:
        check_shapes(q, k, v)
    except ValueError:
        return ""
    if name is not None and not _broadcasts(getattr(a, name), (q[0], q[1], q[2], k[2])):
        return ""
    return '; if q, k and v are (batch, heads, length, dim), pass layout="bhsd"'


# ---- varlen ----------------------------------------------------------------------------------------------------------


def with_longest(a: Arguments) -> Arguments:
    """Varlen arguments with `max_q` and `max_k` filled in. Where they are given and `cu` lives on a GPU nothing is read
    back, so that the call never waits; elsewhere the contents of `cu` are checked at every call. Paged keys have tables
    instead of `cu_k`."""
    if a.paged:
        if a.max_q is not None and isinstance(a.cu_q, torch.Tensor) and not a.cu_q.is_cpu:
            return a
        _check_cu("cu_q", a.cu_q, checked_tensor("q", a.q))
        return a._replace(max_q=_longest("cu_q", "max_q", a.cu_q, a.max_q, a.q.shape[0]))
    if a.max_q is not None and a.max_k is not None and isinstance(a.cu_q, torch.Tensor) and not a.cu_q.is_cpu:
        return a
    for name, cu in (("cu_q", a.cu_q), ("cu_k", a.cu_k)):
        _check_cu(name, cu, checked_tensor("q", a.q))
    check_qkv(a)
    return a._replace(
        max_q=_longest("cu_q", "max_q", a.cu_q, a.max_q, a.q.shape[0]),
        max_k=_longest("cu_k", "max_k", a.cu_k, a.max_k, a.k.shape[0]),
    )


def check_queries(a: Arguments) -> tuple[int, int]:
    """(sequences, longest queries) of packed queries whose keys are not packed."""
    _check_cu("cu_q", a.cu_q, a.q)
    _check_longest("max_q", a.max_q)
    return a.cu_q.numel() - 1, int(a.max_q)


def check_sequences(a: Arguments) -> tuple[int, int, int]:
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
    checked_tensor(name, cu)
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
    most = 0
    for i, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        if end < start:
            raise ValueError(f"{name} must not decrease, but {name}[{i}] = {start} and {name}[{i + 1}] = {end}")
        most = max(most, end - start)
    if longest is not None and longest < most:
        raise ValueError(f"{max_name} is {longest}, but the longest sequence in {name} has {most} rows")
    return most


# ---- what happens to a score -----------------------------------------------------------------------------------------


def check_mask(a: Arguments, pairs: tuple[int, int, int, int]) -> Mask:
    """The interval mask; `full` beside a mask tensor."""
    mask = a.mask
    if mask is None:
        return full
    if isinstance(mask, torch.Tensor):
        if mask.dtype != torch.bool:
            raise TypeError(
                f"a mask tensor must be boolean (True may be attended), got {mask.dtype}; numbers to add go in bias"
            )
        check_pairs("mask", a, pairs)
        return full
    if not isinstance(mask, Mask):
        allowed = (
            "a strobe mask (strobe.causal, strobe.window(…), …), a function (b, h, q, k), a boolean tensor or None"
        )
        raise TypeError(f"mask must be {allowed}, got {mask!r}")
    assert mask.rest is None, "conditions belong to the score: see `resolved`"
    if len(mask.constants) > MAX_CONSTANTS:
        raise ValueError(f"{mask!r} combines too many masks: {len(mask.constants)} constants, at most {MAX_CONSTANTS}")
    return mask


def check_score(a: Arguments, batch: int, heads: int, len_q: int, len_k: int) -> Score:
    if a.score is None:
        return identity
    if not isinstance(a.score, Score):
        raise TypeError(
            f"score must be a strobe.Score (strobe.alibi(slopes), …), a function (s, b, h, q, k) or None, got {a.score!r}"
        )
    for t in a.score.tensors:
        if t.device != a.q.device:
            raise ValueError(f"a tensor of {a.score!r} is on {t.device}, q is on {a.q.device}")
    sizes = {B: (batch, "sequences"), H: (heads, "heads")}
    if a.cu_q is None and a.positions is None and not a.paged:  # else lengths are at most so long
        sizes |= {Q: (len_q, "queries"), DIAGONAL: (len_k, "positions"), K: (len_k, "keys")}
    for load in a.score.expr.loads():
        shape = tuple(a.score.tensors[load.args[0]].shape)
        for axis, index in enumerate(load.operands):
            count, what = sizes.get(index, (0, ""))
            if count > shape[axis] or (count and a.score.title == "alibi" and count != shape[axis]):
                raise ValueError(f"a tensor of {a.score!r} has shape {shape}; axis {axis} is for {count} {what}")
            if not shape[axis]:
                raise ValueError(f"a tensor of {a.score!r} has shape {shape}, without an entry")
            if index == DIAGONAL and index in sizes and len_q > len_k:
                raise ValueError(
                    f"a tensor of {a.score!r} is indexed with q, a position that begins at {len_k - len_q}, since there are "
                    f"{len_q} queries and {len_k} keys; rows=True counts query rows from 0: strobe.mask_function(f, rows=True)"
                )
    return a.score


def check_pairs(name: str, a: Arguments, want: tuple[int, int, int, int]) -> None:
    """The argument of this name, a mask or a bias, has or shares an entry for each pair of a query and a key."""
    t: torch.Tensor = getattr(a, name)
    if t.device != a.q.device:
        raise ValueError(f"{name} is on {t.device}, q is on {a.q.device}")
    if t.dim() > 4:
        raise ValueError(f"{name} has {t.dim()} axes; at most 4 (batch, heads, len_q, len_k)")
    if not _broadcasts(t, want):
        problem = (
            f"{name} has shape {tuple(t.shape)}, which does not broadcast to (batch, heads, len_q, len_k) = {want}"
        )
        raise ValueError(f"{problem}{_of_keys(name, t, want) or _or_bhsd(a, name)}")


def _broadcasts(t: torch.Tensor, want: Sequence[int]) -> bool:
    view = four_axes(t)
    assert view is not None
    return all(have in (1, need) for have, need in zip(view.shape, want, strict=True))


def _of_keys(name: str, t: torch.Tensor, want: tuple[int, int, int, int]) -> str:
    """The end of an error about a mask that has a row for each sequence, as padding masks have."""
    if tuple(t.shape) != (want[0], want[3]):
        return ""
    return f"; if it is (batch, keys), pass {name}[:, None, None, :]"


def check_per_head(name: str, t: Any, q: torch.Tensor, heads: int) -> None:
    checked_tensor(name, t)
    if not t.dtype.is_floating_point:
        raise TypeError(f"{name} must be floating point, got {t.dtype}")
    if tuple(t.shape) != (heads,):
        raise ValueError(f"{name} must have shape (heads,) = ({heads},), got {tuple(t.shape)}")
    if t.device != q.device:
        raise ValueError(f"{name} is on {t.device}, q is on {q.device}")


# ---- out -------------------------------------------------------------------------------------------------------------


def check_out(a: Arguments, dim_v: int, needs_grad: bool) -> None:
    out = checked_tensor("out", a.out)
    want = (*a.q.shape[:-1], dim_v)
    dtype = out_dtype(a.q.dtype, a.partial)
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
    for name in (*TENSORS, "state_out"):
        t = getattr(a, name)
        if isinstance(t, torch.Tensor) and not _same_view(t, out, name) and share_memory(t, out):
            raise ValueError(f"out shares memory with {name}, which is read while out is written")


def check_state(a: Arguments, layout: Layout) -> None:
    """Checks `state_out`, if there is one, and the LSE of the state whose output `out` or `state_out` holds."""
    lse, want = checked_tensor("state_lse", a.state_lse), layout.rows_shape(tuple(a.q.shape))
    wide = a.out
    if a.state_out is not None:
        wide = checked_tensor("state_out", a.state_out)
        if a.out is None or a.partial:
            raise ValueError(f"state_out goes with a rounded out, got out={a.out!r} and partial={a.partial!r}")
        if wide.shape != a.out.shape or wide.dtype != lse_dtype(a.q.dtype) or wide.device != a.out.device:
            got = f"{wide.dtype} of shape {tuple(wide.shape)} on {wide.device}"
            raise ValueError(f"state_out is {got}, out has shape {tuple(a.out.shape)} on {a.out.device}")
        if wide.shape[-1] > 1 and wide.stride(-1) != 1:
            raise ValueError(f"the last axis of state_out must be contiguous, its stride is {wide.stride(-1)}")
    elif wide is None or not a.partial:
        raise ValueError(f"state_lse goes with a partial out, got out={a.out!r} and partial={a.partial!r}")
    if tuple(lse.shape) != want:
        raise ValueError(f"state_lse has shape {tuple(lse.shape)}, the LSE has {want}")
    if lse.dtype != wide.dtype or lse.device != wide.device:
        raise ValueError(f"state_lse is {lse.dtype} on {lse.device}, out is {wide.dtype} on {wide.device}")
    if lse.shape[-1] > 1 and lse.stride(-1) != 1:
        raise ValueError(f"the last axis of state_lse must be contiguous, its stride is {lse.stride(-1)}")
    if overlaps_itself(lse):
        raise ValueError(f"state_lse has strides {lse.stride()}: several of its elements share memory")


def _same_view(t: torch.Tensor, out: torch.Tensor, name: str) -> bool:
    """Return whether `out` is the queries themselves: results may replace them, since a row is read before it is
    written."""
    return name == "q" and t.data_ptr() == out.data_ptr() and t.shape == out.shape and t.stride() == out.stride()
