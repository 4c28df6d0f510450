"""Small Q, K and V that a browser can make as well."""

from __future__ import annotations

import torch


def sample(n: int, d: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V from a recipe in integers that any language can repeat: multiples of 1/64 in [-2, 2), so that scores
    over √d are moderate. float64."""
    return tuple(
        torch.tensor([[_hashed(i * d + j, 3 * seed + which) for j in range(d)] for i in range(n)], dtype=torch.float64)
        for which in range(3)
    )  # type: ignore[return-value]


def _hashed(index: int, stream: int) -> float:
    h = ((index + 1) * 0x9E3779B1 + stream * 0x7F4A7C15) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return ((h >> 16) & 0xFF) / 64 - 2
