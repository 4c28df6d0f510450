"""flash-attn's functions for rotary position embedding, with gradients, on any device."""

from __future__ import annotations

from typing import Any

import torch

from strobe.nn.rotary import angles, rotate

_Offsets = int | torch.Tensor


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: _Offsets = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """x is (batch, length, heads, dim), or (total, heads, dim) with cu_seqlens; cos and sin are (positions,
    rotary_dim / 2). The positions of a sequence start at seqlen_offsets, an int or (batch,)."""
    cos, sin = _rows(x, cos, sin, seqlen_offsets, cu_seqlens)
    turned = rotate(x, cos, sin, interleaved)
    return x.copy_(turned) if inplace else turned


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """cos and sin are (length, rotary_dim / 2) or (batch, length, rotary_dim / 2), a row for each of x."""
    return rotate(x, cos, sin, interleaved)


def apply_rotary_emb_qkv_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: _Offsets = 0,
    num_heads_q: int | None = None,
) -> torch.Tensor:
    """Turns queries and keys in place. qkv is (batch, length, 3, heads, dim), or (batch, length, heads of q, k and v,
    dim) with num_heads_q."""
    if qkv.dim() == 5:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    else:
        if num_heads_q is None or (qkv.shape[2] - num_heads_q) % 2:
            raise ValueError(
                f"num_heads_q must leave as many heads of k as of v in {tuple(qkv.shape)}, got {num_heads_q}"
            )
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads_k]
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    apply_rotary_emb(
        k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, interleaved, True, seqlen_offsets
    )
    return qkv


def apply_rotary_emb_kv_(
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    seqlen_offsets: _Offsets = 0,
) -> torch.Tensor:
    """Turns the keys of kv (batch, length, 2, heads, dim) in place."""
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


def _rows(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, offsets: _Offsets, cu: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each row of x."""
    if cu is None:
        length = x.shape[1]
        if isinstance(offsets, int):
            return cos[offsets : offsets + length], sin[offsets : offsets + length]
        at = offsets[:, None] + torch.arange(length, device=x.device)
        return cos[at], sin[at]
    row = torch.arange(x.shape[0], device=x.device)
    sequence = torch.bucketize(row, cu[1:], right=True)
    at = row - cu[sequence] + (offsets if isinstance(offsets, int) else offsets[sequence])
    return cos[at], sin[at]


class RotaryEmbedding(torch.nn.Module):
    """Turns queries and keys of (batch, length, 3, heads, dim), or queries and the keys of (batch, length, 2, heads, dim),
    in place. cos and sin are made as far as they were needed."""

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        if scale_base is not None:
            raise ValueError(f"scale_base must be None: XPos is not supported, got {scale_base}")
        self.dim, self.base, self.interleaved, self.scale = dim, float(base), interleaved, None
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        self.register_buffer("inv_freq", self.base**-exponents, persistent=False)
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def _rows(self, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tables = self._tables
        if (
            tables is None
            or tables[0].shape[0] < length
            or tables[0].device != like.device
            or tables[0].dtype != like.dtype
        ):
            tables = angles(torch.arange(length, device=like.device), self.dim, self.base, like.dtype)
            self._tables = tables
        return tables

    def forward(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor | None = None,
        seqlen_offset: _Offsets = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        if max_seqlen is None:
            if not isinstance(seqlen_offset, int):
                raise ValueError("max_seqlen must be given with a tensor of offsets")
            max_seqlen = qkv.shape[1] + seqlen_offset
        cos, sin = self._rows(max_seqlen, qkv)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, None, None, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos, sin, self.interleaved, seqlen_offset)
