"""PyTorch's flash operators, `aten::_flash_attention_forward` and its kin, run by strobe.

SDPA's flash backend, `varlen_attn`, jagged tensors and context parallelism all end in these operators. They stand below
autograd, which calls the backward ones with what the forward ones returned. Causal masks are aligned to the bottom right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from strobe.call import piece
from strobe.compat import flash_terms
from strobe.problem import Unsupported
from strobe.problem.arguments import Arguments
from strobe.problem.hints import raises_as_hosts

_Maybe = torch.Tensor | None
_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def library(key: str) -> torch.library.Library:
    """The operators for tensors of one dispatch key, "CUDA" or "CPU", for as long as the library lives."""
    made = torch.library.Library("aten", "IMPL", key)
    for name, function in _OPERATORS.items():
        if hasattr(torch.ops.aten, name):  # the one that writes in place is younger than the others
            made.impl(name, raises_as_hosts(function), key)
    return made


# ---- the operators ---------------------------------------------------------------------------------------------------


def _dense_forward(
    query: torch.Tensor,  # (batch, heads, len_q, dim)
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """(out, LSE, None, None, len_q, len_k, rng_state, unused, debug_mask)"""
    a = _arguments(query, key, value, dropout_p, is_causal, scale, layout="bhsd")
    out, lse, *rest = _forward(a, return_debug_mask)
    return out, lse, None, None, query.shape[2], key.shape[2], *rest


def _dense_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: _Maybe,
    cum_seq_k: _Maybe,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> _Three:
    a = _arguments(query, key, value, dropout_p, is_causal, scale, layout="bhsd")
    return _backward(a, grad_out, out, logsumexp, philox_seed)


def _flash_forward(
    query: torch.Tensor,  # (batch, len_q, heads, dim) or, with cum_seq_q, (total_q, heads, dim)
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: _Maybe,
    cum_seq_k: _Maybe,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: _Maybe = None,
    alibi_slopes: _Maybe = None,
    block_table: _Maybe = None,
    num_splits: int | None = None,
    out: _Maybe = None,
) -> tuple[torch.Tensor, ...]:
    """(out, LSE, rng_state, unused, debug_mask). `seqused_k`, (sequences,): so many of the keys are in use. With
    `block_table` (sequences, width), keys and values are pages. `num_splits` is a hint that we do not need: but for pages no
    result of ours depends on what else is in the batch."""
    a = _arguments(query, key, value, dropout_p, is_causal, scale, window_size_left, window_size_right, alibi_slopes)
    if block_table is not None:
        if seqused_k is None and cum_seq_k is None:
            raise Unsupported("block_table was given, but neither seqused_k nor cum_seq_k says how many keys there are")
        used = seqused_k if cum_seq_k is None or seqused_k is not None else cum_seq_k.diff()
        a = a._replace(cu_q=cum_seq_q, max_q=None if cum_seq_q is None else max_q, out=out)
        return _forward(flash_terms.in_pages(a, block_table, used), return_debug_mask)
    a = _with_sequences(a, cum_seq_q, cum_seq_k, max_q, max_k)
    return _forward(flash_terms.in_use(a, None, seqused_k)._replace(out=out), return_debug_mask)


def _flash_forward_in_place(out: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """The LSE; the output is written into `out`."""
    return _flash_forward(*arguments, **options, out=out)[1]


def _flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: _Maybe,
    cum_seq_k: _Maybe,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> _Three:
    a = _arguments(query, key, value, dropout_p, is_causal, scale, window_size_left, window_size_right)
    a = _with_sequences(a, cum_seq_q, cum_seq_k, max_q, max_k)
    return _backward(a, grad_out, out, logsumexp, rng_state)


_OPERATORS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _dense_forward,
    "_scaled_dot_product_flash_attention_backward": _dense_backward,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_forward_in_place,
    "_flash_attention_backward": _flash_backward,
}


# ---- in our terms ----------------------------------------------------------------------------------------------------


def _arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    left: int | None = None,
    right: int | None = None,
    slopes: _Maybe = None,
    layout: str = "bshd",
) -> Arguments:
    q, k, v = (flash_terms.last_axis_contiguous(t) for t in (q, k, v))
    mask = flash_terms.mask_of(is_causal, -1 if left is None else left, -1 if right is None else right)
    return Arguments(
        q, k, v, mask=mask, scale=scale, score=flash_terms.score_of(0.0, slopes), dropout=dropout, layout=layout,
        return_lse=True, deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


def _with_sequences(a: Arguments, cu_q: _Maybe, cu_k: _Maybe, max_q: int, max_k: int) -> Arguments:
    if (cu_q is None) != (cu_k is None):
        raise Unsupported(f"{'cum_seq_q' if cu_q is None else 'cum_seq_k'} is missing; give both or neither")
    return a if cu_q is None else a._replace(cu_q=cu_q, cu_k=cu_k, max_q=max_q, max_k=max_k)


def _forward(a: Arguments, return_debug_mask: bool) -> tuple[torch.Tensor, ...]:
    """(out, LSE, rng_state, unused, debug_mask), laid out in memory as PyTorch's tracers expect it."""
    if return_debug_mask:
        raise Unsupported("return_debug_mask=True: strobe never holds the attention weights")
    out, lse, seed = piece.forward(a)
    if seed is None:
        state = torch.empty(2, dtype=torch.uint64, device=a.q.device)
    else:  # on the CPU: reading the seed in the backward pass waits for nothing
        state = torch.tensor([seed, 0], dtype=torch.uint64)
    out = out if a.out is not None else _like(out, a.q)
    unused = torch.empty((), dtype=torch.uint64, device=a.q.device)
    return out, lse, state, unused, a.q.new_empty(0)


def _backward(
    a: Arguments, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, rng_state: torch.Tensor
) -> _Three:
    """Gradients from the output and the LSE of the whole, whatever part of the keys the call has."""
    if a.dropout:
        a = a._replace(seed=int(rng_state[0]))
    dout, out = (flash_terms.last_axis_contiguous(t) for t in (dout, out))
    gradients = piece.backward(a, out, lse, dout)
    return _like(gradients.q, a.q), _like(gradients.k, a.k), _like(gradients.v, a.v)


def _like(found: Any, t: torch.Tensor) -> torch.Tensor:
    """`found` with the strides that `torch.empty_like(t)` has. Compiled code relies on them."""
    if found.is_contiguous() and t.is_contiguous():
        return found
    expected = torch.empty_like(t)
    return found if found.stride() == expected.stride() else expected.copy_(found)
