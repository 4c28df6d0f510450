"""flash-attn 2's functions: dense and varlen, apart and packed into one tensor, and with a cache.

The names with an underscore are those that other libraries import (`kernels.py`). Beyond flash-attn these functions take
CPU tensors, fp32 and fp64, different head dims of keys and values, softcap together with dropout, and the LSE has a
gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from strobe.call.attend import attend
from strobe.compat import flash_attn_2_cuda as flash_attn_gpu, flash_terms, kvcache
from strobe.compat.flash_attn.kernels import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    _get_block_size_n,
    _wrapped_flash_attn_backward,
    _wrapped_flash_attn_forward,
    _wrapped_flash_attn_varlen_backward,
    _wrapped_flash_attn_varlen_forward,
    empty_rows_as_inf,
    maybe_contiguous,
    round_multiple,
)
from strobe.compat.flash_attn.probabilities import signed_scores
from strobe.problem.arguments import Arguments
from strobe.problem.hints import InvalidArgument, raises_as_hosts
from strobe.problem.resolve import with_seed

USE_TRITON_ROCM = False

Window = tuple[int, int]

__all__ = [
    "USE_TRITON_ROCM",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_gpu",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "maybe_contiguous",
    "round_multiple",
]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """q is (batch, len_q, heads, dim), k and v are (batch, len_k, heads_k, dim). The causal mask and the window are
    aligned with the last query and the last key; -1 leaves a side of the window open. Slopes are (heads,) or
    (batch, heads).

    Returns the output; with `return_attn_probs` (output, LSE (batch, heads, len_q), S_dmask). S_dmask holds the
    probabilities, not normalised, negative where dropout dropped them, in lengths rounded up to 128; it is empty without
    dropout."""
    return _run(
        q, k, v, None, None, None, None, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of keys and values in one tensor, (batch, len_k, 2, heads_k, dim)."""
    k, v = _unpacked("kv", kv, 5, 2)
    return _run(
        q, k, v, None, None, None, None, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of queries, keys and values in one tensor, (batch, length, 3, heads, dim)."""
    q, k, v = _unpacked("qkv", qkv, 5, 3)
    return _run(
        q, k, v, None, None, None, None, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """`flash_attn_func` of sequences of different lengths: q is (total_q, heads, dim), k and v (total_k, heads_k, dim),
    sequence i is the rows cu_seqlens[i] to cu_seqlens[i + 1]. The LSE is (heads, total_q). With `block_table` (sequences,
    width), k and v are pages (pages, page, heads_k, dim) and `cu_seqlens_k` says how many keys each sequence has; there is
    no gradient then."""
    return _run(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs, block_table,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of keys and values in one tensor, (total_k, 2, heads_k, dim)."""
    k, v = _unpacked("kv", kv, 4, 2)
    return _run(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of queries, keys and values in one tensor, (total, 3, heads, dim)."""
    q, k, v = _unpacked("qkv", qkv, 4, 3)
    return _run(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Queries (batch, len_q, heads, dim) against the first `cache_seqlens` rows of a cache (batch_cache, capacity,
    heads_k, dim). New keys and values k, v (batch, len_new, heads_k, dim) are written after them, in place, before
    attention; with `rotary_cos` and `rotary_sin` (positions, rotary_dim / 2) queries and new keys are rotated first.
    With `block_table` (batch, width) the cache is pages (pages, page, heads_k, dim). Has no backward. `num_splits` is
    the kernels' own choice here."""
    found = kvcache.attend(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
        softmax_scale, flash_terms.mask_of(bool(causal), *window_size), flash_terms.score_of(softcap, alibi_slopes),
        rotary_interleaved, return_softmax_lse, table=block_table,
    )  # fmt: skip
    return (found[0], empty_rows_as_inf(found[1])) if return_softmax_lse else found


def _unpacked(name: str, t: torch.Tensor, axes: int, parts: int) -> tuple[torch.Tensor, ...]:
    """Views; their gradients come back as one tensor."""
    if t.dim() != axes or t.shape[axes - 3] != parts:
        shape = ", ".join(
            [*("batch", "length", "total")[0 if axes == 5 else 2 :][: axes - 3], str(parts), "heads", "dim"]
        )
        raise InvalidArgument(f"{name} must have shape ({shape}), got {tuple(t.shape)}")
    return t.unbind(axes - 3)


@raises_as_hosts
def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    max_q: int | None,
    max_k: int | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    block_table: torch.Tensor | None = None,
) -> Any:
    dim_v, scale = v.shape[-1], flash_terms.scale_of(softmax_scale, q.shape[-1])
    dropout = flash_terms.number("dropout_p", dropout_p)
    q, k, v = map(flash_terms.last_axis_contiguous, (q, k, v))
    if block_table is None:  # else that would copy the cache
        q, k, v = flash_terms.padded(q, k, v)
    a = Arguments(
        q=q, k=k, v=v, cu_q=cu_q, cu_k=cu_k, max_q=flash_terms.longest("max_seqlen_q", max_q),
        max_k=flash_terms.longest("max_seqlen_k", max_k), mask=flash_terms.mask_of(bool(causal), *window_size), scale=scale,
        score=flash_terms.score_of(softcap, alibi_slopes), dropout=dropout, return_lse=return_attn_probs,
        deterministic=deterministic,
    )  # fmt: skip
    if return_attn_probs:
        a = with_seed(a)  # `signed_scores` drops the same weights
    if block_table is not None:
        a = flash_terms.in_pages(a, block_table, a.cu_k.diff())
    if not return_attn_probs:
        out = attend(a)
        return out if out.shape[-1] == dim_v else out[..., :dim_v]
    out, lse = attend(a)
    return out[..., :dim_v], empty_rows_as_inf(lse), signed_scores(a) if dropout else q.new_empty(0)
