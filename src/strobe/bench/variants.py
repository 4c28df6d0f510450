"""Variants of attention as cases: users' functions of scores and masks, a mask of booleans, a bias that learns.

Functions are made for a case and a device, with the tensors that they read: the same for every provider, and for the exact
results that these are compared with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

BenchCase = Any  # that of case.py, which imports this module
LEARNT_BIAS, BOOLEANS = "learnt bias", "boolean mask"
BY_SEQUENCE = ("documents", BOOLEANS)  # whose mask depends on the sequence


class Functions(NamedTuple):
    """`score(s, b, h, q, k)` and `mask(b, h, q, k)`; None: there is none."""

    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    tensor: torch.Tensor | None = None  # what the mask reads, for those who are given booleans


def _random(case: BenchCase, device: torch.device, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(case.len_k)).to(device)


def _alibi(case: BenchCase, device: torch.device) -> Functions:
    slopes = 0.1 * _random(case, device, case.heads)
    return Functions(score=lambda s, b, h, q, k: s - slopes[h] * (q - k).abs())


def _tanh(case: BenchCase, device: torch.device) -> Functions:
    return Functions(score=lambda s, b, h, q, k: 20 * torch.tanh(s / 20))


def _relative_table(case: BenchCase, device: torch.device) -> Functions:
    n, table = case.len_k, 0.2 * _random(case, device, case.heads, 2 * case.len_k) - 0.1
    return Functions(score=lambda s, b, h, q, k: s + table[h, q - k + n])


def _decay(case: BenchCase, device: torch.device) -> Functions:
    return Functions(score=lambda s, b, h, q, k: s * torch.exp(-0.01 * (q - k).abs()))


def _documents(case: BenchCase, device: torch.device) -> Functions:
    """16 of different lengths."""
    ends = torch.randperm(case.len_k - 2, generator=torch.Generator().manual_seed(0))[:15] + 1
    one = torch.bucketize(torch.arange(case.len_k), ends.sort().values, right=True).int()
    ids = one.expand(case.batch, case.len_k).contiguous().to(device)
    return Functions(mask=lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q >= k))


def _prefix(case: BenchCase, device: torch.device) -> Functions:
    n = case.len_k // 8
    return Functions(mask=lambda b, h, q, k: (k < n) | (q >= k))


def _window(case: BenchCase, device: torch.device) -> Functions:
    n = case.len_k // 8
    return Functions(mask=lambda b, h, q, k: (q >= k) & (q - k < n))


def _neighbourhood(case: BenchCase, device: torch.device) -> Functions:
    """13 x 13 pixels around one's own."""
    width = 128 if case.len_k >= 4096 else 16
    return Functions(
        mask=lambda b, h, q, k: ((q // width - k // width).abs() <= 6) & ((q % width - k % width).abs() <= 6)
    )


def _booleans(case: BenchCase, device: torch.device) -> Functions:
    allowed = _random(case, device, case.batch, 1, case.len_q, case.len_k) > 0.3
    return Functions(mask=lambda b, h, q, k: allowed[b, 0, q, k], tensor=allowed)


_MAKERS: dict[str, Callable[[BenchCase, torch.device], Functions]] = {
    "alibi": _alibi,
    "tanh": _tanh,
    "relative table": _relative_table,
    "documents": _documents,
    "prefix": _prefix,
    "window": _window,
    "neighbourhood": _neighbourhood,
    "decay": _decay,
    BOOLEANS: _booleans,
    LEARNT_BIAS: lambda case, device: Functions(),
}
NAMES = tuple(_MAKERS)


@functools.lru_cache(maxsize=8)
def functions(case: BenchCase, device: torch.device) -> Functions:
    return Functions() if case.variant is None else _MAKERS[case.variant](case, device)


def visible(case: BenchCase, device: torch.device, batch: Any, heads: Any, rows: torch.Tensor) -> torch.Tensor | None:
    """Booleans of these rows and all keys, broadcastable to what the indices of sequences and heads are; None: the case's
    function hides nothing."""
    mask = functions(case, device).mask
    return None if mask is None else mask(batch, heads, rows[:, None], torch.arange(case.len_k, device=device))


def dense_mask(case: BenchCase, device: torch.device) -> torch.Tensor | None:
    """(batch or 1, 1, len_q, len_k)."""
    batch = torch.arange(case.batch, device=device)[:, None, None, None]
    mask = visible(case, device, batch, 0, torch.arange(case.len_q, device=device))
    return None if mask is None else mask.view(-1, 1, case.len_q, case.len_k)


@functools.lru_cache(maxsize=64)
def visible_share(case: BenchCase) -> float | None:
    """Return the share of all pairs that is visible; None: as the interval mask says. No function here depends on the
    head."""
    device = torch.device("cpu")
    if functions(case, device).mask is None:
        return None
    counts = [
        int(visible(case, device, batch, 0, rows).sum())  # type: ignore[union-attr]
        for batch in range(case.batch if case.variant in BY_SEQUENCE else 1)
        for rows in torch.arange(case.len_q).split(1024)
    ]
    sequences = len(counts) // -(-case.len_q // 1024)
    return sum(counts) / (sequences * case.len_q * case.len_k)


def with_slope(case: BenchCase, s: torch.Tensor, batch: int, heads: torch.Tensor, rows: torch.Tensor) -> Any:
    """Return what the score function makes of `s`, (heads, rows, keys), and its derivative; None: there is no
    function."""
    score = functions(case, s.device).score
    if score is None:
        return None
    keys = torch.arange(case.len_k, device=s.device)
    with torch.enable_grad():
        leaf = s.detach().requires_grad_()
        scores = score(leaf, batch, heads[:, None, None], rows[:, None], keys)
        (slope,) = torch.autograd.grad(scores.sum(), leaf)
    return scores.detach().to(s.dtype), slope
