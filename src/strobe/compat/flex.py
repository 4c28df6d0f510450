"""strobe under torch.nn.attention.flex_attention: the same signature, `score_mod` and `block_mask`, in strobe's kernels.

`flex_attention` takes what PyTorch's takes. `with patched():` sends every call of PyTorch's there, in code that calls it as
`torch.nn.attention.flex_attention.flex_attention`. Query indices count rows from 0, as there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention as _host

from strobe.call.attend import attend
from strobe.compat.patch import Patch
from strobe.problem.arguments import Arguments
from strobe.variants.mask import Mask
from strobe.variants.user_function import mask_function, score_function

_original = _host.flex_attention


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """(batch, heads, length, dim) tensors. `kernel_options` choose among PyTorch's kernels and change nothing here. With
    `return_lse` or `return_aux` the LSE is returned as there; `return_aux` has no maxima here."""
    if query.dim() == 4 and key.dim() == 4 and query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"query has {query.shape[1]} heads and key {key.shape[1]}; pass enable_gqa=True to share heads of keys"
        )
    if return_aux is not None and getattr(return_aux, "max_scores", False):
        raise ValueError("return_aux: strobe keeps no maxima of scores; ask for lse alone")
    wants_lse = return_lse or (return_aux is not None and getattr(return_aux, "lse", False))
    score = None if score_mod is None else score_function(score_mod, rows=True)
    of_rows = callable(block_mask) and not isinstance(block_mask, Mask) and not hasattr(block_mask, "kv_indices")
    mask = mask_function(block_mask, rows=True) if of_rows else block_mask
    a = Arguments(query, key, value, mask=mask, scale=scale, score=score, layout="bhsd", return_lse=wants_lse)
    found = attend(a)
    if return_aux is not None:
        out, lse = found if wants_lse else (found, None)
        return out, _host.AuxOutput(lse=lse)
    return found


def patched() -> Patch:
    """Replace `torch.nn.attention.flex_attention.flex_attention` by ours within the block."""
    return _patch


def _put(ours: bool) -> None:
    _host.flex_attention = flex_attention if ours else _original  # type: ignore[assignment]


_patch = Patch(_put)


def status() -> str | None:
    return "flex_attention is patched" if _patch.active else None
