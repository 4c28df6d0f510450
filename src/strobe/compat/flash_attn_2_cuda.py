"""flash-attn 2's compiled extension, as libraries that skip its Python functions call it: positional arguments, results
as lists."""

from __future__ import annotations

from typing import Any

import torch

from strobe.compat import flash_terms, kvcache
from strobe.compat.flash_attn import kernels

_Maybe = torch.Tensor | None


def fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: _Maybe,
    alibi_slopes: _Maybe,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    generator: Any = None,
) -> list[torch.Tensor]:
    """[out, LSE, S_dmask, rng_state]"""
    flash_terms.refuse(generator=(generator, flash_terms.NO_GENERATOR))
    options = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    found = kernels._flash_attn_forward(q, k, v, *options, return_softmax)
    return _into(out, found)


def varlen_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: _Maybe,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_k: _Maybe,
    leftpad_k: _Maybe,
    block_table: _Maybe,
    alibi_slopes: _Maybe,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    zero_tensors: bool,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    generator: Any = None,
) -> list[torch.Tensor]:
    """[out, LSE, S_dmask, rng_state]"""
    flash_terms.refuse(generator=(generator, flash_terms.NO_GENERATOR))
    found = kernels._flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, alibi_slopes, return_softmax, block_table, leftpad_k, seqused_k,
    )  # fmt: skip
    return _into(out, found)


def bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: _Maybe,
    dk: _Maybe,
    dv: _Maybe,
    alibi_slopes: _Maybe,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    generator: Any = None,
    rng_state: _Maybe = None,
) -> list[torch.Tensor]:
    """[dq, dk, dv, rowsum(dout * out)]"""
    flash_terms.refuse(generator=(generator, flash_terms.NO_GENERATOR))
    dq, dk, dv = _allocated((dq, q), (dk, k), (dv, v))
    options = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    delta = kernels._flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, *options, deterministic, rng_state
    )
    return [dq, dk, dv, delta]


def varlen_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: _Maybe,
    dk: _Maybe,
    dv: _Maybe,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    alibi_slopes: _Maybe,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    zero_tensors: bool,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    generator: Any = None,
    rng_state: _Maybe = None,
) -> list[torch.Tensor]:
    """[dq, dk, dv, rowsum(dout * out)]"""
    flash_terms.refuse(generator=(generator, flash_terms.NO_GENERATOR))
    dq, dk, dv = _allocated((dq, q), (dk, k), (dv, v))
    delta = kernels._flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state,
    )  # fmt: skip
    return [dq, dk, dv, delta]


def fwd_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: _Maybe,
    v: _Maybe,
    cache_seqlens: _Maybe,
    rotary_cos: _Maybe,
    rotary_sin: _Maybe,
    cache_batch_idx: _Maybe,
    cache_leftpad: _Maybe,
    block_table: _Maybe,
    alibi_slopes: _Maybe,
    out: _Maybe,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    rotary_interleaved: bool,
    num_splits: int,
) -> list[torch.Tensor]:
    """[out, LSE]"""
    found, lse = kvcache.attend(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, softmax_scale,
        flash_terms.mask_of(bool(causal), window_size_left, window_size_right), flash_terms.score_of(softcap, alibi_slopes),
        rotary_interleaved, True, table=block_table,
    )  # fmt: skip
    return _into(out, (found, kernels.empty_rows_as_inf(lse)))


def _into(out: _Maybe, found: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return list(found) if out is None else [out.copy_(found[0]), *found[1:]]


def _allocated(*pairs: tuple[_Maybe, torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_like(like) if t is None else t for t, like in pairs]
