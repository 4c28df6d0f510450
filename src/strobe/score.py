"""What happens to a score before the softmax: s = scale * q.k, then softcap * tanh(s / softcap), then + bias.

One definition for the torch backends and the kernels. Masking follows, and is `mask.py`'s business.
"""

from __future__ import annotations

import math

import torch

LOG2E = math.log2(math.e)


def softcapped(s: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return s if softcap is None else softcap * torch.tanh(s / softcap)


def softcap_slope(capped: torch.Tensor, softcap: float) -> torch.Tensor:
    """d softcapped / d s, from the value itself: 1 - tanh^2."""
    return 1 - (capped / softcap) ** 2


def kernel_constants(scale: float, softcap: float | None) -> tuple[float, float]:
    """(before, after): the kernels compute exp2(after * f(before * q.k)) with f = tanh when capped, else the identity,
    so that an exponential costs one FMA and one EX2."""
    return (1.0, scale * LOG2E) if softcap is None else (scale / softcap, softcap * LOG2E)
