"""Attention problems as data, shared by the tests of every backend, the benchmark's suites and `strobe tune`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from strobe.problem import Problem, supposed
from strobe.problem.resolve import with_softcap
from strobe.variants import mask as masks
from strobe.variants.mask import Mask, full
from strobe.variants.ready_made import chunked, prefix, window


@dataclass(frozen=True)
class Case:
    name: str
    len_q: int
    len_k: int
    batch: int = 2
    heads: int = 2
    heads_k: int = 2
    dim: int = 32
    dim_v: int | None = None  # as `dim`
    mask: Mask = full
    mask_tensor: tuple[int, ...] | None = None  # shape: (batch, heads, len_q, len_k), or 1
    bias: tuple[int, ...] | None = None  # shape, the same
    softcap: float | None = None
    sinks: bool = False
    dropout: float = 0.0
    scale: float | None = None  # 1 / sqrt(dim)
    scores: str = "normal"  # "huge", "low": around +-1000; "rising", "falling": each key beats, or loses to, all before
    memory: str = "dense"  # or "sliced": a part of a larger tensor, the rest of which is NaN
    lengths: tuple[tuple[int, int], ...] | None = None  # varlen: (len_q, len_k) of each sequence

    def __str__(self) -> str:
        return self.name

    @property
    def interval(self) -> bool:
        """The mask is an interval of keys, and nothing else touches a score."""
        other = self.mask_tensor or self.bias or self.softcap or self.sinks or self.dropout
        return not other

    @property
    def value_dim(self) -> int:
        return self.dim if self.dim_v is None else self.dim_v

    @property
    def softmax_scale(self) -> float:
        return self.dim**-0.5 if self.scale is None else self.scale

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.heads_k

    def rows(self) -> tuple[int, int]:
        """Return the rows of q and of k: lengths, or the totals of a varlen problem."""
        if self.lengths is None:
            return self.len_q, self.len_k
        total_q, total_k = (sum(n) for n in zip(*self.lengths, strict=True))
        return total_q, total_k

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of q, k and v: (batch, length, heads, dim), or (total, heads, dim) for varlen."""
        leading = () if self.lengths is not None else (self.batch,)
        rows_q, rows_k = self.rows()
        return (
            (*leading, rows_q, self.heads, self.dim),
            (*leading, rows_k, self.heads_k, self.dim),
            (*leading, rows_k, self.heads_k, self.value_dim),
        )

    def score_elements(self) -> int:
        """Return the size of the matrix that standard attention stores."""
        return self.batch * self.heads * self.len_q * self.len_k

    def tensor_elements(self) -> int:
        """Return the size of q, k, v and o together: what any attention has to hold."""
        rows_q, rows_k = (self.batch * n for n in (self.len_q, self.len_k))
        return (self.heads * rows_q + self.heads_k * rows_k) * (self.dim + self.value_dim)


def problem_of(case: Case, dtype: torch.dtype, device: torch.device) -> Problem:
    """Return the problem that the library makes of a case, without its tensors; the device need not be there."""
    options: dict[str, Any] = {
        "mask": case.mask if case.mask_tensor is None else case.mask_tensor,
        "score": with_softcap(None, case.softcap),
        "scale": case.scale,
        "dropout": case.dropout,
    }
    if case.bias is not None:
        options["bias"] = case.bias
    if case.sinks:
        options["sinks"] = (case.heads,)
    if case.lengths is not None:
        ends = (len(case.lengths) + 1,)
        longest_q, longest_k = (max(n) for n in zip(*case.lengths, strict=True))
        options |= {"cu_q": ends, "cu_k": ends, "max_q": longest_q, "max_k": longest_k}
    q, k, v = case.shapes()
    return supposed(device, dtype, q, k, v, **options)


_PLAIN = {mask.name: mask for mask in (masks.full, masks.causal, masks.causal_top_left)}
_MAKERS: dict[str, Any] = {"window": window, "prefix": prefix, "chunked": chunked}


def mask_of(text: str) -> Mask:
    """Return the mask of this name, as results files have it: "causal", "window(4095, 0)". Raises ValueError for
    anything else."""
    mask = full
    for part in text.split(" & "):
        maker, _, numbers = part.removesuffix(")").partition("(")
        try:
            mask = mask & (_PLAIN[part] if part in _PLAIN else _MAKERS[maker](*map(_side, numbers.split(","))))
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"mask must be one of {', '.join((*_PLAIN, *_MAKERS))}, got {text!r}") from None
    return mask


def _side(text: str) -> int | None:
    return None if text.strip() == "None" else int(text)
