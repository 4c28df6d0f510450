"""The cases on which every backend is tested, and their tensors."""

from __future__ import annotations

from typing import Any

import torch

from strobe.measure.cases import Case
from strobe.variants.mask import causal, causal_top_left, full
from strobe.variants.ready_made import chunked, prefix, window

CASES = [
    Case("plain", 64, 64),
    Case("causal", 64, 64, mask=causal),
    Case("ragged", 67, 131),
    Case("ragged_causal", 67, 131, mask=causal),
    Case("more_queries_causal", 131, 67, mask=causal),
    Case("top_left", 67, 131, mask=causal_top_left),
    Case("top_left_more_queries", 131, 67, mask=causal_top_left),
    Case("one_query", 1, 97),
    Case("one_query_causal", 1, 97, mask=causal, heads=8, heads_k=1),
    Case("one_key", 33, 1),
    Case("one_pair", 1, 1, batch=1, heads=1, heads_k=1),
    Case("no_keys", 5, 0),
    Case("no_keys_sinks", 5, 0, sinks=True),
    Case("no_queries", 0, 5),
    Case("no_batch", 5, 5, batch=0),
    Case("group_3", 50, 70, heads=6, heads_k=2, mask=causal),
    Case("group_8", 33, 70, heads=8, heads_k=1),
    Case("dim_8", 40, 40, dim=8),
    Case("dim_odd", 40, 40, dim=33),
    Case("dim_80", 40, 56, dim=80, mask=causal),
    Case("dim_256", 33, 65, batch=1, dim=256),
    Case("dim_v_smaller", 40, 56, dim=48, dim_v=16),
    Case("dim_v_larger", 40, 56, dim=16, dim_v=64, mask=causal),
    Case("window", 90, 90, mask=window(16, 0)),
    Case("window_both", 70, 110, mask=window(9, 5)),
    Case("window_causal", 70, 110, mask=window(20, None) & causal),
    Case("prefix", 70, 70, mask=prefix(25)),
    Case("chunked_causal", 70, 70, mask=chunked(16) & causal),
    Case("empty_rows", 90, 20, mask=causal),
    Case("empty_rows_window", 60, 40, mask=window(3, 2)),
    Case("huge", 48, 80, scores="huge"),
    Case("rising", 48, 200, scores="rising"),
    Case("rising_causal", 100, 100, scores="rising", mask=causal),
    Case("scale_negative", 40, 40, scale=-0.2),
    Case("scale_zero", 40, 40, scale=0.0),
    Case("sliced", 40, 56, memory="sliced", mask=causal),
    Case("sliced_group", 40, 56, memory="sliced", heads=6, heads_k=2),
    Case("mask_tensor", 40, 56, mask_tensor=(2, 2, 40, 56)),
    Case("mask_padding", 40, 56, mask_tensor=(2, 1, 1, 56)),
    Case("mask_group", 40, 56, heads=4, mask_tensor=(1, 4, 40, 56)),
    Case("bias", 40, 56, bias=(2, 2, 40, 56)),
    Case("bias_heads", 40, 56, heads=4, bias=(1, 4, 1, 56)),
    Case("bias_rows_causal", 40, 56, bias=(1, 1, 40, 56), mask=causal),
    Case("softcap", 40, 56, softcap=1.5),
    Case("softcap_huge", 40, 56, softcap=20.0, scores="huge"),
    Case("sinks", 40, 56, sinks=True, mask=causal),
    Case("sinks_empty_rows", 56, 40, sinks=True, mask=causal),
    Case("dropout", 40, 56, dropout=0.3),
    Case("everything", 45, 77, heads=6, dim=24, dim_v=40, mask=causal & window(30, None), bias=(1, 6, 45, 77), softcap=3.0,
         sinks=True, dropout=0.25),
    Case("packed", 0, 0, lengths=((5, 5), (40, 40), (0, 0), (17, 17), (1, 1))),
    Case("packed_causal", 0, 0, heads=4, mask=causal, lengths=((5, 9), (40, 12), (0, 7), (3, 0), (33, 65))),
    Case("packed_everything", 0, 0, heads=4, mask=window(8, 2), lengths=((5, 9), (40, 12), (0, 7), (3, 0), (33, 65)),
         bias=(5, 4, 40, 65), softcap=2.0, sinks=True, dropout=0.2),
    Case("packed_mask_tensor", 0, 0, lengths=((5, 9), (20, 12)), mask_tensor=(2, 1, 20, 12)),
]  # fmt: skip


def _placed(case: Case, t: torch.Tensor, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Place the tensor in memory as the case asks. Every slice of a larger tensor begins at an element that is a
    multiple of 8."""
    t = t.to(device=device, dtype=dtype)
    if case.memory == "dense":
        return t
    larger = (*t.shape[:-3], t.shape[-3] + 7, t.shape[-2] + 1, t.shape[-1] + 8)
    around = torch.full(larger, torch.nan, dtype=dtype, device=device)
    inside = around[..., 3:-4, :-1, :-8]
    return inside.copy_(t)


def make(
    case: Case, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """(q, k, v, keyword arguments of strobe.attention), (batch, length, heads, dim). Packed cases give (total, heads,
    dim) and have `cu_q` and `cu_k` among the keywords: those of strobe.attention_varlen."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in case.shapes())
    if case.scores in ("huge", "low"):  # all of one sign, so that none of the numbers that a softmax subtracts is small
        q, k = q.abs().add_(1), k.abs().add_(1)
        q *= (1000 if case.scores == "huge" else -1000) / (case.softmax_scale * (q.mean() ** 2 * case.dim).item())
    elif case.scores in ("rising", "falling"):
        q = q.abs().add_(0.5)
        ends = (-3, 3) if case.scores == "rising" else (3, -3)
        k = torch.linspace(*ends, k.shape[-3], dtype=torch.float64)[:, None, None].expand_as(k) + 0.1 * k

    kwargs: dict[str, Any] = {}
    if case.mask_tensor is not None:
        kwargs["mask"] = (torch.rand(case.mask_tensor, generator=generator) > 0.4).to(device)
    elif case.mask != full:
        kwargs["mask"] = case.mask
    if case.bias is not None:
        kwargs["bias"] = torch.randn(case.bias, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)
    if case.sinks:
        kwargs["sinks"] = torch.randn(case.heads, generator=generator, dtype=torch.float64).to(
            device=device, dtype=dtype
        )
    for name in ("softcap", "scale"):
        if getattr(case, name) is not None:
            kwargs[name] = getattr(case, name)
    if case.dropout:
        kwargs |= {"dropout": case.dropout, "seed": 1234567890123 + seed}
    if case.lengths is not None:
        for name, lengths in zip(("cu_q", "cu_k"), zip(*case.lengths, strict=True), strict=True):
            kwargs[name] = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
    return (*(_placed(case, t, dtype, device) for t in (q, k, v)), kwargs)
