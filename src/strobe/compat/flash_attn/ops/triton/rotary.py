"""flash-attn's kernel for rotary embedding, below autograd: callers write the backward with `conjugate`."""

from __future__ import annotations

import torch

from strobe.compat.flash_attn.layers.rotary import apply_rotary_emb


@torch.no_grad()
def apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> torch.Tensor:
    """`apply_rotary_emb` without a gradient; `conjugate` rotates back."""
    return apply_rotary_emb(
        x, cos, -sin if conjugate else sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen
    )
