"""Functions among the arguments of a call: what the rest of the library sees in their place."""

from __future__ import annotations

from typing import Any

import torch

from strobe.problem.arguments import Arguments, layout_of
from strobe.variants.block_mask import BlockMask
from strobe.variants.flex_mask import check_lengths, of_block_mask
from strobe.variants.mask import Mask, full
from strobe.variants.score import Score, identity, softcap
from strobe.variants.user_function import mask_function, score_function


def resolved(a: Arguments) -> Arguments:
    """The arguments with functions traced, and with what is left of a mask function beside its interval in the score."""
    mask, score = a.mask, a.score
    if score is not None and not isinstance(score, Score) and callable(score):
        a = a._replace(score=score_function(score))
    if isinstance(mask, BlockMask):
        if sizes := _sizes(a, "block mask"):
            mask.check(*sizes)
        a, mask = a._replace(blocks=mask), mask.mask
    if not isinstance(mask, Mask):
        known = mask is None or isinstance(mask, torch.Tensor)
        if known or not (callable(mask) or hasattr(mask, "kv_indices")):
            return a
        mask = _of_flex(mask, a) if hasattr(mask, "kv_indices") else mask_function(mask)
    interval = None if mask.interval == full else mask.interval
    if mask.rest is None:
        return a._replace(mask=interval)
    if a.score is not None and a.softcap is not None:
        return a._replace(mask=interval)  # refused by the checks
    base = a.score if a.score is not None else identity if a.softcap is None else softcap(a.softcap)
    return a._replace(mask=interval, softcap=None, score=base.hiding(mask))


def _of_flex(mask: Any, a: Arguments) -> Mask:
    if sizes := _sizes(a, "BlockMask"):
        check_lengths(mask, *sizes[2:])
    return of_block_mask(mask)


def _sizes(a: Arguments, kind: str) -> tuple[int, int, int, int] | None:
    """Batch, heads, len_q and len_k of a call with a mask of this kind; None: the checks say what is wrong."""
    if a.cu_q is not None or a.paged:
        raise ValueError(f"mask is a {kind}, and this call has sequences of different lengths; pass its function")
    try:
        layout = layout_of(a)
    except (AttributeError, KeyError):
        return None
    q, k = layout.inside(a.q).shape, layout.inside(a.k).shape
    return q[0], q[1], q[2], k[2]
