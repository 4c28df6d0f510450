"""The public functions. Each checks its arguments once (`problem.check`), asks `dispatch` for a backend and runs it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from strobe import autograd, compiled, mask as masks
from strobe.backends import dispatch
from strobe.backends.backend import Backend
from strobe.mask import Mask
from strobe.problem import Inputs, Problem, check, from_bhsd, to_bhsd


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
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
    backend: str | None = None,
) -> Any:
    """softmax(scale * q k^T) v, exactly, without the matrix of scores.

    q is (batch, len_q, heads, dim), k and v (batch, len_k, heads_k, dim or dim_v); `layout="bhsd"` takes PyTorch's
    order. Leading axes may be missing: (len, dim) works. Fewer key heads than query heads are grouped.

    mask           strobe.causal, strobe.window(left, right), …, combined with `&`; or booleans broadcastable to
                   (batch, heads, len_q, len_k), True where attention is allowed
    scale          1/sqrt(dim) by default
    softcap        scores become softcap * tanh(score / softcap)
    bias           added to the scores, broadcastable to (batch, heads, len_q, len_k)
    dropout, seed  drops attention weights; the same seed drops the same ones on every backend. Without a seed one is
    drawn
                   from torch's generator
    sinks          (heads,): one more logit per head in the softmax's denominator, without a value
    out            write the result here (no gradients then)
    return_lse     also return the logarithm of the softmax's denominator, (batch, heads, len_q), natural log,
    differentiable
    deterministic  only bit-for-bit reproducible algorithms, backward included
    backend        run this one or raise `strobe.Unsupported`; `strobe.explain` says which run what

    A query that sees no key gets output 0, LSE -inf and gradients 0.
    """
    if _is_compiling() or (q.__class__ not in _REAL and compiled.is_traced(q)):
        return compiled.attention(
            None,
            q,
            k,
            v,
            mask=mask,
            scale=scale,
            softcap=softcap,
            bias=bias,
            dropout=dropout,
            seed=seed,
            sinks=sinks,
            layout=layout,
            out=out,
            return_lse=return_lse,
            deterministic=deterministic,
            backend=backend,
        )
    key = repeat = None
    if (
        bias is None
        and sinks is None
        and out is None
        and seed is None
        and dropout.__class__ in _NUMBERS
        and not dropout
    ):
        try:  # what follows decides how fast small problems are on a CPU, hence no function calls
            if q.is_cpu and k.is_cpu and v.is_cpu and q.is_contiguous() and k.is_contiguous() and v.is_contiguous():
                key = (
                    q.shape,
                    k.shape,
                    v.shape,
                    q.dtype,
                    k.dtype,
                    v.dtype,
                    _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
                    mask,
                    scale,
                    softcap,
                    layout,
                    return_lse,
                    deterministic,
                    backend,
                )
                repeat = _repeats_on_cpu.get(key)
            else:
                key = _strided_key(q, k, v, (mask, scale, softcap, layout, return_lse, deterministic, backend))
                repeat = None if key is None else _repeats_of(q).get(key)
        except (AttributeError, TypeError, RuntimeError):
            key = None  # not tensors, without strides, or an option that cannot be hashed: `check` will say so
        if (
            repeat is not None and scale.__class__ is not bool and softcap.__class__ is not bool
        ):  # True would pass for 1
            try:
                return repeat(q, k, v)
            except NotImplementedError:
                key = None  # an opaque tensor, which looks contiguous: as above
    problem, inputs = check(
        q,
        k,
        v,
        mask=mask,
        scale=scale,
        softcap=softcap,
        bias=bias,
        dropout=dropout,
        seed=seed,
        sinks=sinks,
        layout=layout,
        out=out,
        return_lse=return_lse,
        deterministic=deterministic,
    )
    chosen = dispatch.choose(problem, backend)
    o, lse = _run(chosen, problem, inputs, None if out is None else to_bhsd(out, layout), layout)
    if key is not None and q.dim() == 4 and not problem.empty and not problem.has_mask_tensor:
        if chosen.repeat is not None:
            repeat = chosen.repeat(problem, inputs, layout, return_lse)
        if repeat is None and problem.device.type == "cpu":
            repeat = functools.partial(_attend_again, chosen, problem, layout, return_lse)
        if repeat is not None:
            _remember(_repeats_of(q), key, repeat)
    result = out if out is not None else from_bhsd(o, q, layout)
    if not return_lse:
        return result
    return result, (lse if q.dim() == 4 else lse[0] if q.dim() == 3 else lse[0, 0])


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    *,
    max_q: int | None = None,
    max_k: int | None = None,
    mask: Mask | torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> Any:
    """`attention` for sequences of different lengths packed one after the other: q is (total_q, heads, dim), k and v
    are (total_k, heads_k, dim). Sequence i holds the rows cu_q[i] to cu_q[i+1] and the keys cu_k[i] to cu_k[i+1]
    (int32, starting with 0; lengths 0 are fine). With `max_q` and `max_k` given, the call never waits for the GPU, and
    `cu_q`, `cu_k` are taken on trust there. A mask tensor or bias is broadcastable to (sequences, heads, max_q, max_k).
    The LSE
    is
    (heads,
    total_q)."""
    if _is_compiling() or (q.__class__ not in _REAL and compiled.is_traced(q)):
        return compiled.attention(
            (cu_q, cu_k, max_q, max_k),
            q,
            k,
            v,
            mask=mask,
            scale=scale,
            softcap=softcap,
            bias=bias,
            dropout=dropout,
            seed=seed,
            sinks=sinks,
            out=out,
            return_lse=return_lse,
            deterministic=deterministic,
            backend=backend,
        )
    problem, inputs = check(
        q,
        k,
        v,
        cu=(cu_q, cu_k, max_q, max_k),
        mask=mask,
        scale=scale,
        softcap=softcap,
        bias=bias,
        dropout=dropout,
        seed=seed,
        sinks=sinks,
        out=out,
        return_lse=return_lse,
        deterministic=deterministic,
    )
    o, lse = _run(
        dispatch.choose(problem, backend),
        problem,
        inputs,
        None if out is None else out.transpose(0, 1).unsqueeze(0),
        "bshd",
    )
    result = out if out is not None else o[0].transpose(0, 1)
    return (result, lse[0]) if return_lse else result


def _run(
    backend: Backend, problem: Problem, inputs: Inputs, out: torch.Tensor | None, layout: str
) -> tuple[torch.Tensor, Any]:
    """(out, lse) in (batch, heads, length, …) order. On a GPU the memory of a fresh output has the caller's layout."""
    if problem.empty:
        return _nothing_to_attend(problem, inputs, out)
    if problem.needs_grad:
        return autograd.attention(backend, problem, inputs)
    if out is None and problem.device.type == "cuda":  # on CPUs backends return the memory they computed in
        batch, heads, rows, _ = inputs.q.shape
        if layout == "bshd":
            out = inputs.q.new_empty(batch, rows, heads, problem.dim_v).transpose(1, 2)
        else:
            out = inputs.q.new_empty(batch, heads, rows, problem.dim_v)
    with torch.no_grad():
        return backend.forward(problem, inputs, out)


def _nothing_to_attend(problem: Problem, inputs: Inputs, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, rows, _ = inputs.q.shape
    o = inputs.q.new_zeros(batch, heads, rows, problem.dim_v) if out is None else out.zero_()
    lse = torch.full((batch, heads, rows), float("-inf"), dtype=problem.lse_dtype, device=problem.device)
    if inputs.sinks is not None:
        lse = inputs.sinks.to(problem.lse_dtype)[None, :, None].expand(batch, heads, rows).clone()
    if problem.needs_grad and out is None:  # zeros, but attached to the graph
        o = o + 0 * sum(t.sum() for t in (inputs.q, inputs.k, inputs.v) if t.requires_grad)
    return o, lse


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """A drop-in for torch.nn.functional.scaled_dot_product_attention: its signature, its (batch, heads, length, dim)
    layout, its causal mask aligned to the top left."""
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask must be None when is_causal is True")
    if query.dim() < 2 or key.dim() != query.dim() or value.dim() != query.dim():
        axes = f"{query.dim()}, {key.dim()}, {value.dim()}"
        raise ValueError(f"query, key and value must have the same number of axes, at least 2; got {axes}")
    if query.dim() > 2 and query.shape[-3] != key.shape[-3] and not enable_gqa:
        raise ValueError(
            f"query has {query.shape[-3]} heads, key has {key.shape[-3]}; pass enable_gqa=True to group them"
        )
    q, k, v, lead = query, key, value, query.shape[:-3]
    if query.dim() > 4 or not key.shape[:-3] == value.shape[:-3] == lead:
        lead = torch.broadcast_shapes(lead, key.shape[:-3], value.shape[:-3])
        q, k, v = (t.expand(*lead, *t.shape[-3:]).reshape(-1, *t.shape[-3:]) for t in (query, key, value))
    mask: Mask | torch.Tensor | None = masks.causal_top_left if is_causal else None
    bias = None
    if attn_mask is not None:
        if attn_mask.dim() > 4:
            attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-3:]).reshape(-1, *attn_mask.shape[-3:])
        if attn_mask.dtype == torch.bool:
            mask = attn_mask
        else:
            bias = attn_mask
    out = attention(q, k, v, mask=mask, bias=bias, dropout=dropout_p, scale=scale, layout="bhsd")
    return out if query.dim() <= 4 else out.reshape(*lead, *out.shape[-3:])


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor) -> None:
    """softmax(q k^T / sqrt(d)) v of plain (n, d) matrices, written into `output`."""
    for name, t in (("q", q), ("k", k), ("v", v), ("output", output)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.dim() != 2:
            raise ValueError(f"{name} must have 2 axes (n, d), got shape {tuple(t.shape)}")
    with torch.no_grad():
        attention(q, k, v, out=output)


def backends() -> dict[str, str]:
    """The backends there are, fastest first, with a line about each. `strobe.explain` tells which would run a
    problem."""
    return {name: dispatch.get(name).summary for name in dispatch.NAMES}


# ---- calls that look like an earlier one
# ----------------------------------------------------------------------------------- Checking arguments in Python costs
# more than launching a kernel. A checked call becomes a function of the tensors alone, made by the backend's `repeat`
# where it has one; the next call with the same shapes, strides and options goes straight there.

_Repeats = dict[Any, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]]
_repeats_on_cpu: _Repeats = {}
_local = threading.local()  # on GPUs plans hold mutable launch buffers, so each thread has its own
_MOST_REPEATS = 1024
_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_dynamo_compiling
_REAL = (torch.Tensor, torch.nn.Parameter)
_NUMBERS = (float, int)  # no bool, which is refused as a number


def _repeats_of(q: torch.Tensor) -> _Repeats:
    if q.is_cpu:
        return _repeats_on_cpu
    try:
        return _local.repeats
    except AttributeError:
        _local.repeats = {}
        return _local.repeats


def _remember(repeats: _Repeats, key: Any, repeat: Callable[..., Any]) -> None:
    if len(repeats) >= _MOST_REPEATS:
        repeats.clear()
    repeats[key] = repeat


def _strided_key(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: tuple[Any, ...]) -> Any:
    """Everything a checked call depends on but the addresses; None if such a call cannot be repeated."""
    needs_grad = _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if q.is_cuda and (needs_grad or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15):
        return None
    return (
        q.shape,
        q.stride(),
        k.shape,
        k.stride(),
        v.shape,
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        needs_grad,
        options,
    )


def _attend_again(
    backend: Backend, problem: Problem, layout: str, return_lse: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Any:
    inputs = Inputs(to_bhsd(q, layout), to_bhsd(k, layout), to_bhsd(v, layout))
    attended = (
        autograd.attention(backend, problem, inputs) if problem.needs_grad else backend.forward(problem, inputs, None)
    )
    result = from_bhsd(attended[0], q, layout)
    return (result, attended[1]) if return_lse else result
