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
from strobe.compat import flash_terms
from strobe.compat.patch import Patch
from strobe.probabilities import probabilities
from strobe.problem.arguments import Arguments
from strobe.variants.mask import Mask
from strobe.variants.user_function import traced_mask, traced_score

_original = _host.flex_attention
_MOST_PROBABILITIES = 1 << 24  # at a time


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
    `return_lse` or `return_aux` the LSE is returned as there. The largest scores, for which `return_aux` may ask, take a
    second pass over all pairs, in PyTorch. A key and a value of batch 1 are for all sequences of the query."""
    if query.dim() == 4 and key.dim() == 4 and query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"query has {query.shape[1]} heads and key {key.shape[1]}; pass enable_gqa=True to share heads of keys"
        )
    wants_maxima = getattr(return_aux, "max_scores", False)
    wants_lse = return_lse or wants_maxima or getattr(return_aux, "lse", False)
    score = None if score_mod is None else traced_score(score_mod, rows=True)
    of_rows = callable(block_mask) and not isinstance(block_mask, Mask) and not hasattr(block_mask, "kv_indices")
    mask = traced_mask(block_mask, rows=True) if of_rows else block_mask
    if block_mask is not None and key.shape[0] == value.shape[0] == 1:  # a pool of pages, say
        key, value = (t.expand(query.shape[0], -1, -1, -1) for t in (key, value))
    query, key, value = map(flash_terms.last_axis_contiguous, (query, key, value))
    a = Arguments(query, key, value, mask=mask, scale=scale, score=score, layout="bhsd", return_lse=wants_lse)
    found = attend(a)
    if return_aux is None:
        return found
    out, lse = found if wants_lse else (found, None)
    maxima = None if lse is None or not wants_maxima else _maxima(a, lse)
    return out, _host.AuxOutput(lse=lse if getattr(return_aux, "lse", False) else None, max_scores=maxima)


@torch.no_grad()
def _maxima(a: Arguments, lse: Any) -> torch.Tensor:
    """The largest score of each row: the logarithm of its largest probability, and its LSE."""
    batch, heads, len_q = a.q.shape[:3]
    rows = max(1, _MOST_PROBABILITIES // max(1, batch * heads * a.k.shape[2]))
    options = {"mask": a.mask, "scale": a.scale, "score": a.score, "layout": a.layout}
    largest = [
        probabilities(a.q, a.k, rows=slice(first, first + rows), **options).amax(-1) for first in range(0, len_q, rows)
    ]
    return torch.cat(largest, -1).log() + lse


def patched() -> Patch:
    """Replace `torch.nn.attention.flex_attention.flex_attention` by ours within the block."""
    return _patch


def _put(ours: bool) -> None:
    _host.flex_attention = flex_attention if ours else _original  # type: ignore[assignment]


_patch = Patch(_put)


def status() -> str | None:
    return "flex_attention is patched" if _patch.active else None
