"""Attention as flash-attn describes it, written out once more with dense matrices, on its own: nothing of strobe."""

from __future__ import annotations

import torch


def attention(
    q: torch.Tensor,  # (batch, len_q, heads, dim)
    k: torch.Tensor,  # (batch, len_k, heads_k, dim)
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    chunk: int = 0,
    softcap: float = 0.0,
    slopes: torch.Tensor | None = None,
    first_key: int = 0,
    dropped: torch.Tensor | None = None,  # True where dropout drops, (batch, heads, len_q, len_k)
    dropout_p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, LSE, probabilities). Rows without a key: 0, +inf, 0."""
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    len_q, len_k = s.shape[-2:]
    row, key = torch.arange(len_q)[:, None] + len_k - len_q, torch.arange(len_k)
    if slopes is not None:
        slopes = slopes.to(s.dtype).expand(s.shape[0], s.shape[1])
        s = s - slopes[:, :, None, None] * (row - key).abs()
    left, right = window
    right = 0 if causal else right
    visible = key.expand(len_q, len_k) >= first_key
    if left >= 0:
        visible = visible & (key >= row - left)
    if right >= 0:
        visible = visible & (key <= row + right)
    if chunk:
        visible = visible & (key // chunk == row // chunk)
    s = s.masked_fill(~visible, -torch.inf)
    lse = s.logsumexp(-1)
    p = (s - torch.where(lse == -torch.inf, 0, lse)[..., None]).exp()
    kept = p if dropped is None else p.masked_fill(dropped, 0) / (1 - dropout_p)
    return torch.einsum("bhqk,bkhd->bqhd", kept, v), torch.where(lse == -torch.inf, torch.inf, lse), p
