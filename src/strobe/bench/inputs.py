"""The tensors of a case."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from strobe.bench.case import BenchCase


@dataclass
class Tensors:
    """(batch, heads, length, dim), contiguous."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor | None = None
    bias: torch.Tensor | None = None  # (1, heads, len_q, len_k)
    sinks: torch.Tensor | None = None  # (heads,)


def make_tensors(case: BenchCase, device: torch.device, seed: int) -> Tensors:
    """Normal numbers; the same for the same case and seed on one kind of device."""
    generator = torch.Generator(device).manual_seed(seed + zlib.crc32(case.label.encode()))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=case.torch_dtype, generator=generator)

    return Tensors(
        q=normal(case.batch, case.heads, case.len_q, case.dim),
        k=normal(case.batch, case.heads_k, case.len_k, case.dim),
        v=normal(case.batch, case.heads_k, case.len_k, case.value_dim),
        do=normal(case.batch, case.heads, case.len_q, case.value_dim) if case.direction != "forward" else None,
        bias=None if case.bias is None else normal(*case.bias).requires_grad_(case.learns_bias),
        sinks=normal(case.heads).float() if case.sinks else None,
    )
