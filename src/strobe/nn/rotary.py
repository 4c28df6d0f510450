"""Rotary position embedding: pairs of dims are turned by an angle that grows with the position.

Pairs are (i, i + rotary_dim / 2), as Llama and GPT-NeoX have them, or (2 i, 2 i + 1), "interleaved", as GPT-J has them.
"""

from __future__ import annotations

import torch


def angles(
    positions: torch.Tensor, dim: int, base: float = 10000.0, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each (…, dim / 2) for positions of shape (…). The angles are computed in fp32: 16 bits cannot count
    positions."""
    if dim % 2 or dim < 2:
        raise ValueError(f"dim must be even and at least 2, got {dim}")
    return angles_of(positions, frequencies(dim, base, positions.device), dtype)


def frequencies(dim: int, base: float, device: torch.device | str | None) -> torch.Tensor:
    """Return the angle by which each pair turns from one position to the next, (dim / 2,)."""
    return base ** -(torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def angles_of(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`angles`, of these frequencies."""
    angle = positions.float()[..., None] * frequencies
    return angle.cos().to(dtype or torch.float32), angle.sin().to(dtype or torch.float32)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """The first rotary_dim of the last axis turned, the rest as it was. x is (…, length, heads, dim), cos and sin are
    (…, length, rotary_dim / 2). Products are taken in fp32, or in x's own dtype if that is wider."""
    half = cos.shape[-1]
    if sin.shape != cos.shape or 2 * half > x.shape[-1]:
        raise ValueError(
            f"cos and sin must have one shape, (…, rotary_dim / 2) with rotary_dim at most {x.shape[-1]}, the head dim; "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (t.unsqueeze(-2).to(wide) for t in (cos, sin))  # the same for all heads
    turned, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    if interleaved:
        a, b = turned.unflatten(-1, (half, 2)).unbind(-1)
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    rotated = rotated.to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated
