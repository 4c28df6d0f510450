"""FlashAttention 3's functions, run by strobe, on any device: `from strobe.compat.flash_attn_interface import …`.

`strobe.compat.install()` makes `import flash_attn_interface` find this module. Arguments that only advise the kernels
(`num_splits`, `pack_gqa`, `sm_margin`, `scheduler_metadata`) are taken and left to our kernels, which choose for
themselves. `attention_chunk` and `qv` have gradients here.
"""

from __future__ import annotations

from typing import Any

import torch

from strobe.call import piece
from strobe.call.attend import attend
from strobe.compat import flash_terms, kvcache
from strobe.merging import merge
from strobe.problem.arguments import Arguments
from strobe.problem.hints import InvalidArgument, raises_as_hosts

_Maybe = torch.Tensor | None
Window = tuple[int, int]

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: _Maybe = None,
    q_descale: _Maybe = None,
    k_descale: _Maybe = None,
    v_descale: _Maybe = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """q is (batch, len_q, heads, dim), k and v are (batch, len_k, heads_k, dim or dim_v). `qv` (batch, len_q, heads,
    dim_v) adds qv vᵀ to the scores; the scale is then 1/sqrt(dim + dim_v). Returns the output; with `return_attn_probs`
    (output, LSE (batch, heads, len_q))."""
    _refuse_fp8(q_descale, k_descale, v_descale)
    a = _arguments(q, k, v, qv, softmax_scale, causal, window_size, attention_chunk, softcap)
    return _run(a._replace(deterministic=deterministic, return_lse=return_attn_probs), v.shape[-1])


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: _Maybe = None,
    k_descale: _Maybe = None,
    v_descale: _Maybe = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of one tensor: (batch, length, 3, heads, dim), or (batch, length, heads of q, k and v, dim) with
    `num_heads_q`."""
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif qkv.dim() == 4 and num_heads_q is not None and (qkv.shape[2] - num_heads_q) % 2 == 0:
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads_k, heads_k], dim=2)
    else:
        allowed = "(batch, length, 3, heads, dim), or (batch, length, num_heads_q + 2 heads_k, dim) with num_heads_q"
        raise InvalidArgument(f"qkv must have shape {allowed}; got {tuple(qkv.shape)}, num_heads_q = {num_heads_q}")
    _refuse_fp8(q_descale, k_descale, v_descale)
    a = _arguments(q, k, v, None, softmax_scale, causal, window_size, attention_chunk, softcap)
    return _run(a._replace(deterministic=deterministic, return_lse=return_attn_probs), v.shape[-1])


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: _Maybe = None,
    seqused_k: _Maybe = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: _Maybe = None,
    q_descale: _Maybe = None,
    k_descale: _Maybe = None,
    v_descale: _Maybe = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Sequences one after the other: q is (total_q, heads, dim), k and v (total_k, heads_k, dim). With `seqused_q` and
    `seqused_k` (sequences,) only the first rows of each are in use; other rows of the output are 0, and send no gradient.
    The LSE is (heads, total_q)."""
    _refuse_fp8(q_descale, k_descale, v_descale)
    a = _arguments(q, k, v, qv, softmax_scale, causal, window_size, attention_chunk, softcap)
    a = a._replace(
        cu_q=cu_seqlens_q, cu_k=cu_seqlens_k, max_q=flash_terms.longest("max_seqlen_q", max_seqlen_q),
        max_k=flash_terms.longest("max_seqlen_k", max_seqlen_k), deterministic=deterministic, return_lse=return_attn_probs,
    )  # fmt: skip
    return _run(flash_terms.in_use(a, seqused_q, seqused_k), v.shape[-1])


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: _Maybe = None,
    v: _Maybe = None,
    qv: _Maybe = None,
    rotary_cos: _Maybe = None,
    rotary_sin: _Maybe = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: _Maybe = None,
    cache_leftpad: _Maybe = None,
    page_table: _Maybe = None,
    cu_seqlens_q: _Maybe = None,
    cu_seqlens_k_new: _Maybe = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: _Maybe = None,
    q_descale: _Maybe = None,
    k_descale: _Maybe = None,
    v_descale: _Maybe = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: _Maybe = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Queries against the first `cache_seqlens` rows of a cache (batch_cache, capacity, heads_k, dim), to which k and v
    are appended in place. Queries are (batch, len_q, heads, dim), or (total_q, heads, dim) with `cu_seqlens_q`. `qv` is
    as in `flash_attn_func`; it copies the cache. With `page_table` (batch, width) the cache is pages (pages, page, heads_k,
    dim); `cache_batch_idx` then picks rows of the table. Returns the output; with `return_softmax_lse` (output, LSE,
    None, None): there are no partial results to show."""
    _refuse_fp8(q_descale, k_descale, v_descale)
    found = kvcache.attend(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
        softmax_scale, flash_terms.mask_of(bool(causal), *window_size, attention_chunk), flash_terms.score_of(softcap, None),
        rotary_interleaved, return_softmax_lse, cu_q=cu_seqlens_q, max_q=max_seqlen_q, cu_new=cu_seqlens_k_new,
        rotary_seqlens=rotary_seqlens, qv=qv, table=page_table,
    )  # fmt: skip
    return (*found, None, None) if return_softmax_lse else found


def flash_attn_combine(
    out_partial: torch.Tensor, lse_partial: torch.Tensor, out: _Maybe = None, out_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention over parts of the keys: outputs (parts, batch, length, heads, dim) and LSE (parts, batch, length,
    heads), both in fp32. Returns (output, LSE)."""
    if out_partial.shape[:-1] != lse_partial.shape:
        raise InvalidArgument(
            f"lse_partial must have the shape of out_partial without its last axis, {tuple(out_partial.shape[:-1])}; "
            f"got {tuple(lse_partial.shape)}"
        )
    merged, lse = merge(out_partial, lse_partial.mT, out=out)
    return merged if out is not None else merged.to(out_partial.dtype if out_dtype is None else out_dtype), lse.mT


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: _Maybe = None,
    cu_seqlens_k_new: _Maybe = None,
    cache_leftpad: _Maybe = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """Return a tensor to pass as `scheduler_metadata`. It is empty: our kernels need no plan made beforehand."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


# ---- names that other libraries import -------------------------------------------------------------------------------


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_new: _Maybe = None,
    v_new: _Maybe = None,
    qv: _Maybe = None,
    out_: _Maybe = None,
    cu_seqlens_q: _Maybe = None,
    cu_seqlens_k: _Maybe = None,
    cu_seqlens_k_new: _Maybe = None,
    seqused_q: _Maybe = None,
    seqused_k: _Maybe = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: _Maybe = None,
    kv_batch_idx: _Maybe = None,
    leftpad_k: _Maybe = None,
    rotary_cos: _Maybe = None,
    rotary_sin: _Maybe = None,
    seqlens_rotary: _Maybe = None,
    q_descale: _Maybe = None,
    k_descale: _Maybe = None,
    v_descale: _Maybe = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: _Maybe = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, LSE, empty, empty), which autograd does not see. With `k_new`, `kv_batch_idx`, `leftpad_k` or `page_table`, k and
    v are a cache of which `seqused_k` rows are in use, as `flash_attn_with_kvcache` has it."""
    _refuse_fp8(q_descale, k_descale, v_descale)
    if any(t is not None for t in (k_new, v_new, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, page_table)):
        why = "with a cache it is not built"
        flash_terms.refuse(cu_seqlens_k=(cu_seqlens_k, why), seqused_q=(seqused_q, why))
        out, lse, *_ = flash_attn_with_kvcache(
            q, k, v, k_new, v_new, qv, rotary_cos, rotary_sin, seqused_k, kv_batch_idx, leftpad_k, page_table, cu_seqlens_q,
            cu_seqlens_k_new, max_seqlen_q, seqlens_rotary, None, None, None, softmax_scale, causal,
            (window_size_left, window_size_right), attention_chunk, softcap, rotary_interleaved, return_softmax_lse=True,
        )  # fmt: skip
        nothing = out.new_empty(0)
        return out if out_ is None else out_.copy_(out), lse, nothing, nothing
    window = (window_size_left, window_size_right)
    with torch.no_grad():
        a = _arguments(q, k, v, qv, softmax_scale, causal, window, attention_chunk, softcap)
        a = a._replace(
            cu_q=cu_seqlens_q, cu_k=cu_seqlens_k, max_q=flash_terms.longest("max_seqlen_q", max_seqlen_q),
            max_k=flash_terms.longest("max_seqlen_k", max_seqlen_k), return_lse=True,
        )  # fmt: skip
        out, lse, _ = piece.forward(flash_terms.in_use(a, seqused_q, seqused_k))
    nothing = out.new_empty(0)
    return out if out_ is None else out_.copy_(out), lse, nothing, nothing


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: _Maybe = None,
    cu_seqlens_k: _Maybe = None,
    sequed_q: _Maybe = None,
    sequed_k: _Maybe = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: _Maybe = None,
    dk: _Maybe = None,
    dv: _Maybe = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> torch.Tensor:
    """Writes the gradients into dq, dk and dv; returns rowsum(dout * out), (batch, heads, len_q) or (heads, total_q)."""
    with torch.no_grad():
        window = (window_size_left, window_size_right)
        a = _arguments(q, k, v, None, softmax_scale, is_causal, window, 0, softcap)
        a = a._replace(
            q=a.q.detach(), k=a.k.detach(), v=a.v.detach(), cu_q=cu_seqlens_q, cu_k=cu_seqlens_k,
            max_q=flash_terms.longest("max_seqlen_q", max_seqlen_q), return_lse=True, deterministic=deterministic,
            max_k=flash_terms.longest("max_seqlen_k", max_seqlen_k),
        )  # fmt: skip
        a = flash_terms.in_use(a, sequed_q, sequed_k)
        return flash_terms.write_gradients(a, dout, out, softmax_lse, (dq, dk, dv))


def maybe_contiguous(x: Any) -> Any:
    return flash_terms.last_axis_contiguous(x)


def _refuse_fp8(q: _Maybe, k: _Maybe, v: _Maybe) -> None:
    flash_terms.refuse(
        q_descale=(q, flash_terms.NO_FP8), k_descale=(k, flash_terms.NO_FP8), v_descale=(v, flash_terms.NO_FP8)
    )


def _arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: _Maybe,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    attention_chunk: int,
    softcap: float,
) -> Arguments:
    if qv is not None:  # (q, qv) · (k, v)
        q, k = torch.cat((q, qv), dim=-1), torch.cat((k, v), dim=-1)
    scale = flash_terms.scale_of(softmax_scale, q.shape[-1])
    q, k, v = map(flash_terms.last_axis_contiguous, (q, k, v))
    mask = flash_terms.mask_of(bool(causal), *window_size, attention_chunk)
    return Arguments(q, k, v, mask=mask, scale=scale, score=flash_terms.score_of(softcap, None))


@raises_as_hosts
def _run(a: Arguments, dim_v: int) -> Any:
    q, k, v = flash_terms.padded(a.q, a.k, a.v)
    found = attend(a._replace(q=q, k=k, v=v))
    out, *lse = found if a.return_lse else (found,)
    out = out if out.shape[-1] == dim_v else out[..., :dim_v]
    return (out, *lse) if lse else out
