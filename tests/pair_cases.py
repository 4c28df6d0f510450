"""Calls with a tensor for each pair of a query and a key: biases, masks, and scores that capture tensors. Any backend is
compared with fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import strobe

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PairCase:
    len_q: int
    len_k: int
    bias: Callable[..., torch.Tensor] | None = None  # from (batch, heads, len_q, len_k)
    mask: Callable[..., Any] | None = None
    slopes: tuple[str, ...] = ()  # axes of ALiBi's slopes
    dim: int = 64
    batch: int = 2
    heads: int = 4
    heads_k: int = 2
    options: tuple[tuple[str, Any], ...] = ()
    lengths: tuple[tuple[int, int], ...] = ()  # varlen

    def tensors(self, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Tensors:
        generator = torch.Generator().manual_seed(self.len_q + 7 * self.len_k)
        total_q, total_k = (sum(n) for n in zip(*self.lengths, strict=True)) if self.lengths else (0, 0)
        lead_q, lead_k = (
            ((total_q,), (total_k,)) if self.lengths else ((self.batch, self.len_q), (self.batch, self.len_k))
        )
        shapes = {"q": (*lead_q, self.heads), "k": (*lead_k, self.heads_k), "v": (*lead_k, self.heads_k)}
        found = {n: torch.randn(*shape, self.dim, generator=generator).to(dtype) for n, shape in shapes.items()}
        pairs = len(self.lengths) or self.batch, self.heads, self.len_q, self.len_k
        if self.bias is not None:
            found["bias"] = self.bias(*pairs, generator)
        if self.mask is not None:
            found["mask"] = self.mask(*pairs, generator)
        if self.slopes:
            sizes = {"b": self.batch, "h": self.heads}
            found["slopes"] = 0.1 * torch.rand(*(sizes[a] for a in self.slopes), generator=generator)
        return {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in found.items()}


def results(case: PairCase, x: Tensors, backend: str | None) -> dict[str, torch.Tensor]:
    """The output, the LSE, and the gradients of q, k, v and the bias."""
    x = dict(x)
    leaves = {n: x[n].clone().requires_grad_() for n in ("q", "k", "v", "bias") if n in x}
    if "bias" in leaves:  # with the strides of the given one
        leaves["bias"] = x["bias"].detach().requires_grad_()
    options: dict[str, Any] = {n: t for n, t in (x | leaves).items() if n not in ("q", "k", "v", "slopes")}
    if "slopes" in x:
        options["score"] = strobe.alibi(x["slopes"])
    options |= dict(case.options)
    call = strobe.attention
    if case.lengths:
        call = strobe.attention_varlen
        for name, lengths in zip(("cu_q", "cu_k"), zip(*case.lengths, strict=True), strict=True):
            options[name] = (
                torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(x["q"].device)
            )
    out, lse = call(leaves["q"], leaves["k"], leaves["v"], backend=backend, return_lse=True, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.device)
    seen = torch.where(lse > -1e30, lse, 0)
    gradients = torch.autograd.grad((out.double() * weights).sum() + 0.1 * seen.double().sum(), list(leaves.values()))
    return {"out": out, "lse": lse, **dict(zip((f"d{n}" for n in leaves), gradients, strict=True))}


def check(case: PairCase, x: Tensors, backend: str | None, share: float = 0.02) -> None:
    found = results(case, x, backend)
    wide = {n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in x.items()}
    exact = results(case, wide, "tiled" if x["q"].device.type == "cpu" else None)
    for name, e in exact.items():
        f = found[name].double()
        seen = e > -1e30 if name == "lse" else torch.ones_like(e, dtype=torch.bool)
        assert (f[~seen] < -65000).all(), f"{name}: rows that see nothing"
        assert f.isfinite().logical_or(~seen).all(), f"{name} is not finite"
        worst = (f - e)[seen].abs().max() if seen.any() else torch.zeros(())
        assert worst <= share * e[seen].abs().max().clamp_min(0.05), (
            f"{name}: off by {worst}, largest {e[seen].abs().max()}"
        )


def dense(b: int, h: int, q: int, k: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(b, h, q, k, generator=g).bfloat16()


def by_head(b: int, h: int, q: int, k: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(h, q, k, generator=g)


def of_keys(b: int, h: int, q: int, k: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(b, 1, 1, k, generator=g).half()


def transposed(b: int, h: int, q: int, k: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(b, h, k, q, generator=g).bfloat16().transpose(2, 3)


def hidden(b: int, h: int, q: int, k: int, g: torch.Generator) -> torch.Tensor:
    """A bias that is -inf in places, and in a whole row."""
    found = torch.randn(b, h, q, k, generator=g).masked_fill(torch.rand(b, h, q, k, generator=g) > 0.6, -math.inf)
    found[0, 0, 3] = -math.inf
    return found


def far(b: int, h: int, q: int, k: int, g: torch.Generator) -> torch.Tensor:
    """A finite bias that hides keys, and in some rows all of them: there it counts as no bias at all, up to rounding."""
    found = torch.randn(b, h, q, k, generator=g)
    lowest = torch.finfo(torch.float32).min
    found[torch.rand(b, h, q, k, generator=g) > 0.5] = lowest
    found[:, 1:, 5:9] = lowest
    return found


def some(b: int, h: int, q: int, k: int, g: torch.Generator) -> torch.Tensor:
    """A mask that hides everything from the first rows, and the last keys from all."""
    found = torch.rand(b, 1, q, k, generator=g) > 0.4
    found[:, :, :2] = False
    found[..., k - k // 3 :] = False
    return found


CASES: dict[str, PairCase] = {
    "bias": PairCase(70, 150, dense),
    "bias_by_head": PairCase(40, 100, by_head),
    "bias_of_keys": PairCase(70, 90, of_keys, options=(("mask", strobe.causal),)),
    "bias_transposed": PairCase(33, 65, transposed, dim=128),
    "bias_hides": PairCase(40, 140, hidden),
    "bias_far": PairCase(40, 140, far),
    "bias_softcap_dropout": PairCase(40, 70, dense, options=(("softcap", 3.0), ("dropout", 0.2), ("seed", 5))),
    "bias_wide": PairCase(70, 100, dense, dim=256),
    "bias_varlen": PairCase(40, 60, by_head, lengths=((40, 60), (0, 3), (17, 33))),
    "bias_one_query": PairCase(1, 300, dense, heads=8, heads_k=1),
    "mask": PairCase(70, 150, mask=some),
    "mask_wide": PairCase(33, 70, mask=some, dim=192),
    "mask_and_bias": PairCase(40, 70, by_head, some, dim=96),
    "alibi": PairCase(70, 150, slopes=("h",), options=(("mask", strobe.causal),)),
    "alibi_by_batch": PairCase(40, 100, slopes=("b", "h"), dim=128),
    "alibi_and_bias": PairCase(9, 100, of_keys, slopes=("h",), options=(("mask", strobe.causal),)),
}
