"""Inputs on which kernels have nothing to round until they divide. Scores are small integers, and with a scale of log 2
weights are powers of two and all sums exact in any order: outputs of different kernels, or of one kernel on different
machines, agree bit for bit."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from cases import Case, make
from emulator.emulate import forward
from oracle import checked

from strobe.variants.mask import causal
from strobe.variants.ready_made import window

CASES = [
    Case("e_64", 150, 300, batch=1, heads=4, dim=64),
    Case("e_64_causal", 200, 330, batch=2, heads=3, heads_k=1, dim=64, mask=causal),
    Case("e_96_window", 150, 300, batch=1, dim=96, mask=window(100, 10)),
    Case("e_128", 140, 400, batch=1, dim=128),
    Case("e_128_causal_sliced", 131, 259, dim=128, memory="sliced", mask=causal),
    Case("e_128_packed", 0, 0, dim=128, mask=causal, lengths=((128, 129), (0, 7), (3, 0), (257, 130), (1, 1))),
    Case("e_192_128", 130, 260, batch=1, dim=192, dim_v=128, mask=causal),
    Case("e_256", 130, 170, batch=1, dim=256),
]


def make_exact(case: Case, dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[Any, ...]:
    """Return, as `cases.make` does, (q, k, v, keyword arguments)."""
    q, k, v, kwargs = make(dataclasses.replace(case, scale=math.log(2)), dtype, device)
    generator = torch.Generator().manual_seed(7)

    def fill(t: torch.Tensor, largest: int, share: float = 1.0) -> None:
        integers = torch.randint(-largest, largest + 1, t.shape, generator=generator)
        t.copy_(integers * (torch.rand(t.shape, generator=generator) < share))

    fill(q, 1, share=8 / case.dim)  # some eight terms a score
    fill(k, 1)
    fill(v, 4)
    return q, k, v, kwargs


def emulate(
    kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), with heads before rows."""
    return forward(kernel, *checked(q, k, v, kwargs))
