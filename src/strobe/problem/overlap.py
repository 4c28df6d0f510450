"""Memory that tensors share: what a call writes must not be read at the same time."""

from __future__ import annotations

import torch


def overlaps_itself(t: torch.Tensor) -> bool:
    """Return whether two elements lie at one address. Axes are sorted by stride: each must step over all that lie
    within."""
    reach = 0
    for stride, size in sorted((abs(s), n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1):
        if stride <= reach:
            return t.numel() > 0 and int(_marks(t, t).sum()) < t.numel() * t.element_size()
        reach += stride * (size - 1)
    return False


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether some element of one is an element of the other."""
    if not a.numel() or not b.numel() or a.device.type == "meta" or not same_storage(a, b):
        return False
    (a0, a1), (b0, b1) = _addresses(a), _addresses(b)
    if a1 <= b0 or b1 <= a0:
        return False
    return bool((_marks(a, b) & _marks(b, a)).any())


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _addresses(t: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _marks(t: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """The bytes of the memory around both, True where `t` has an element."""
    (t0, t1), (b0, b1) = _addresses(t), _addresses(beside)
    start, size = min(t0, b0), t.element_size()
    marks = torch.zeros(max(t1, b1) - start, dtype=torch.bool, device=t.device)
    strides = (*(s * size for s in t.stride()), 1)
    marks.as_strided((*t.shape, size), strides, t0 - start).fill_(True)
    return marks
