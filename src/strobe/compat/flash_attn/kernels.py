"""The functions below flash-attn 2's public ones: a forward and a backward that autograd does not see.

Ring attention, Transformer Engine and others import these to run attention piece by piece: the backward takes the output
and the LSE of the whole, whatever keys it is given.
"""

from __future__ import annotations

from typing import Any

import torch

from strobe.call import piece
from strobe.compat import flash_terms
from strobe.compat.flash_attn.probabilities import keys_of_tile, signed_scores
from strobe.problem.arguments import Arguments
from strobe.problem.hints import InvalidArgument, raises_as_hosts

_Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def maybe_contiguous(x: Any) -> Any:
    return flash_terms.last_axis_contiguous(x)


def round_multiple(x: int, m: int) -> int:
    return -(-x // m) * m


def empty_rows_as_inf(lse: torch.Tensor) -> torch.Tensor:
    """flash-attn 2 gives the LSE +inf, not -inf, to a row that sees no key."""
    return torch.where(lse == -torch.inf, torch.inf, lse)


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys of a tile, by which S_dmask is unpacked."""
    if head_dim > 256:
        raise InvalidArgument(f"head_dim must be at most 256, got {head_dim}")
    return keys_of_tile(head_dim)


def _arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool = False,
) -> Arguments:
    q, k, v = (flash_terms.last_axis_contiguous(t).detach() for t in (q, k, v))
    mask, score = flash_terms.mask_of(bool(causal), left, right), flash_terms.score_of(softcap, alibi_slopes)
    return Arguments(
        q, k, v, mask=mask, scale=flash_terms.number("softmax_scale", softmax_scale), score=score, return_lse=True,
        dropout=flash_terms.number("dropout_p", dropout_p), deterministic=deterministic,
    )  # fmt: skip


def _packed(a: Arguments, cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: Any, max_k: Any) -> Arguments:
    max_q, max_k = flash_terms.longest("max_seqlen_q", max_q), flash_terms.longest("max_seqlen_k", max_k)
    return a._replace(cu_q=cu_q, cu_k=cu_k, max_q=max_q, max_k=max_k)


@raises_as_hosts
def _forward(a: Arguments, return_softmax: bool) -> _Four:
    """(out, LSE, S_dmask, rng_state); the state is the seed."""
    out, lse, seed = piece.forward(a)
    s_dmask = signed_scores(a._replace(seed=seed)) if return_softmax else a.q.new_empty(0)
    return (
        out,
        empty_rows_as_inf(lse),
        s_dmask,
        torch.tensor([seed or 0, 0]),
    )  # on the CPU: reading it waits for nothing


@raises_as_hosts
def _backward(
    a: Arguments,
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    gradients: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    rng_state: torch.Tensor | None,
) -> torch.Tensor:
    """Writes the gradients of q, k and v; returns rowsum(dout * out), (batch, heads, len_q) or (heads, total_q)."""
    if a.dropout:
        if rng_state is None:
            raise InvalidArgument("rng_state must be given with dropout: the forward returned it")
        a = a._replace(seed=int(rng_state[0]))
    lse = torch.where(lse == torch.inf, -torch.inf, lse.detach())
    return flash_terms.write_gradients(a, dout, out, lse, gradients)


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> _Four:
    options = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    return _forward(_arguments(q, k, v, *options), return_softmax)


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    options = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    a = _arguments(q, k, v, *options, deterministic)
    delta = _backward(a, dout, out, softmax_lse, (dq, dk, dv), rng_state)
    return torch.nn.functional.pad(delta, (0, round_multiple(delta.shape[-1], 128) - delta.shape[-1]))


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> _Four:
    """`leftpad_k` and `seqused_k`, (sequences,): the keys in use start there, and so many rows are filled. With
    `block_table`, k and v are pages."""
    options = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    a = _arguments(q, k, v, *options)
    a = _packed(a, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if block_table is not None:
        used = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        return _forward(flash_terms.in_pages(a, block_table, used, leftpad_k), False)
    return _forward(flash_terms.in_use(a, None, seqused_k, leftpad_k), return_softmax)


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    options = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    a = _arguments(q, k, v, *options, deterministic)
    a = _packed(a, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    delta = _backward(a, dout, out, softmax_lse, (dq, dk, dv), rng_state)
    return torch.nn.functional.pad(delta, (0, 128 * (cu_seqlens_q.numel() - 1)))


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
