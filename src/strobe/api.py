"""The public functions. Each makes `Arguments` of what it was passed, and hands them to `attend`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Never

import torch

from strobe.backends import dispatch
from strobe.call.attend import attend
from strobe.problem.arguments import DEFAULT_LAYOUT, Arguments
from strobe.problem.hints import shows_known_keywords, unknown_arguments
from strobe.problem.resolve import with_softcap
from strobe.variants.block_mask import BlockMask
from strobe.variants.mask import Mask
from strobe.variants.score import Score

# `Arguments(...)`, with the same checks of names. Calling a class puts keywords into a dict first: half a microsecond.
_arguments = functools.partial(Arguments.__new__, Arguments)


@shows_known_keywords
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *more: Never,
    mask: Mask | BlockMask | Callable[..., Any] | torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    score: Score | Callable[..., Any] | None = None,
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    sinks: torch.Tensor | None = None,
    layout: str = DEFAULT_LAYOUT,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    **wrong: Never,
) -> Any:
    """softmax(scale * q k^T) v, exactly, without the matrix of scores.

    q is (batch, len_q, heads, dim), k and v (batch, len_k, heads_k, dim or dim_v); `layout="bhsd"` takes PyTorch's
    order. One head is (len, dim). Without a batch, `layout=` must say which axis is the heads: (len, heads, dim) is "bshd" and
    (heads, len, dim) "bhsd". Fewer key heads than query heads are grouped.

    mask           strobe.causal, strobe.window(left, right), …; a function (b, h, q, k) of positions that returns a bool,
                   combined with them by `&`, `|` and `~` (`strobe.mask_function`), for many calls `strobe.block_mask`; or
                   booleans broadcastable to (batch, heads, len_q, len_k), True where attention is allowed
    scale          1/sqrt(dim) by default
    softcap        scores become softcap * tanh(score / softcap)
    score          what else happens to a score: strobe.alibi(slopes), or a function (score, b, h, q, k) that returns
                   another one and may read tensors at computed places (`strobe.score_function`)
    bias           added to the scores, broadcastable to (batch, heads, len_q, len_k)
    dropout, seed  drops attention weights; the same seed drops the same ones on every backend. Without a seed one is
                   drawn from torch's generator
    sinks          (heads,): one more logit per head in the softmax's denominator, without a value
    out            write the result here (no gradients then)
    return_lse     also return the logarithm of the softmax's denominator, (batch, heads, len_q), natural log,
                   differentiable
    deterministic  only bit-for-bit reproducible algorithms, backward included; on a CPU, the same bits are promised for
                   the same number of PyTorch's threads
    backend        run this one or raise `strobe.Unsupported`; `strobe.explain` says which run what

    A query that sees no key gets output 0, LSE -inf and gradients 0. Under `torch.autocast` q, k and v are cast to its
    dtype, as PyTorch's own attention does it.
    """
    if more or wrong:
        raise unknown_arguments(attention, more, wrong)
    if softcap is not None:
        score = with_softcap(score, softcap)
    a = _arguments(
        q, k, v, mask=mask, scale=scale, score=score, bias=bias, dropout=dropout, seed=seed, sinks=sinks,
        layout=layout, out=out, return_lse=return_lse, deterministic=deterministic, backend=backend,
    )  # fmt: skip
    return attend(a)


@shows_known_keywords
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    *more: Never,
    max_q: int | None = None,
    max_k: int | None = None,
    mask: Mask | BlockMask | Callable[..., Any] | torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    score: Score | Callable[..., Any] | None = None,
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    **wrong: Never,
) -> Any:
    """`attention` for sequences of different lengths packed one after the other: q is (total_q, heads, dim), k and v are
    (total_k, heads_k, dim). Sequence i holds the rows cu_q[i] to cu_q[i+1] and the keys cu_k[i] to cu_k[i+1] (int32,
    starting with 0; lengths 0 are fine). With `max_q` and `max_k` given, the call never waits for the GPU, and `cu_q`,
    `cu_k` are taken on trust there. A mask tensor or bias is broadcastable to (sequences, heads, max_q, max_k). The LSE
    is (heads, total_q)."""
    if more or wrong:
        raise unknown_arguments(attention_varlen, more, wrong)
    if cu_q is None or cu_k is None:
        raise TypeError(f"{'cu_q' if cu_q is None else 'cu_k'} must be a torch.Tensor, got NoneType")
    if softcap is not None:
        score = with_softcap(score, softcap)
    a = _arguments(
        q, k, v, cu_q=cu_q, cu_k=cu_k, max_q=max_q, max_k=max_k, mask=mask, scale=scale, score=score, bias=bias,
        dropout=dropout, seed=seed, sinks=sinks, out=out, return_lse=return_lse, deterministic=deterministic,
        backend=backend,
    )  # fmt: skip
    return attend(a)


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
