"""A mask function for many calls of the same lengths. Kernels keep what they found out about its blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch

from strobe.variants.mask import Mask
from strobe.variants.user_function import traced_mask

_COMBINE = (
    "a block mask is made for one mask as a whole: combine first, as in "
    "strobe.block_mask(strobe.causal & strobe.mask_function(f), ...)"
)


class BlockMask:
    """The result of `block_mask`. Backends see its mask. `maps` belongs to the kernels: the bits of blocks that they
    computed, by device and `Plan.map_key`."""

    def __init__(self, mask: Mask, batch: int | None, heads: int | None, len_q: int, len_k: int) -> None:
        self.mask = mask
        self.batch, self.heads, self.len_q, self.len_k = batch, heads, len_q, len_k
        self.maps: dict[Any, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockMask, (self.mask, self.batch, self.heads, self.len_q, self.len_k)

    def __repr__(self) -> str:
        sizes = f"{self.batch}, {self.heads}, {self.len_q}, {self.len_k}"
        return f"strobe.block_mask({self.mask.name}, {sizes})"

    def check(self, batch: int, heads: int, len_q: int, len_k: int) -> None:
        """Raises ValueError unless it was made for a call of these sizes."""
        made_for = {"batch": self.batch, "heads": self.heads, "len_q": self.len_q, "len_k": self.len_k}
        for (name, size), of_call in zip(made_for.items(), (batch, heads, len_q, len_k), strict=True):
            if size is not None and size != of_call:
                raise ValueError(f"mask is a block mask for {name} {size}, the call has {of_call}; make one for it")

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(_COMBINE)

    __and__ = __rand__ = __or__ = __ror__ = __invert__ = _refuse


def block_mask(
    mask: Callable[..., Any] | Mask,
    batch: int | None,
    heads: int | None,
    len_q: int,
    len_k: int,
    *,
    device: torch.device | str | None = None,
) -> BlockMask:
    """A mask function, or a mask, for many calls: layers and steps in which it stays the same. Kernels find out once which
    blocks it hides, not in every call. `batch` and `heads` may be None if it does not depend on them. It holds copies of the
    tensors that the function reads, as they are now, on `device` or where they are."""
    for name, size, optional in (("batch", batch, 1), ("heads", heads, 1), ("len_q", len_q, 0), ("len_k", len_k, 0)):
        if size is None and optional:
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"block_mask: {name} must be {'None or ' * optional}a positive int, got {size!r}")
    if not isinstance(mask, Mask):
        if not callable(mask):
            raise TypeError(f"block_mask: mask must be a function (b, h, q, k) -> bool or a mask, got {mask!r}")
        mask = traced_mask(mask)
    names = frozenset() if mask.rest is None else mask.rest.variables()
    for name, variable, size in (("batch", "b", batch), ("heads", "h", heads)):
        if size is None and variable in names:
            raise ValueError(f"block_mask: {name} is None, but the function depends on {variable}; give their number")
    copies = tuple(t.detach().to(device or t.device, copy=True) for t in mask.tensors)
    return BlockMask(replace(mask, tensors=copies), batch, heads, len_q, len_k)
