"""The arguments of a call as the rest of the library sees them: functions traced, a softcap as a score, what was left open
filled in."""

from __future__ import annotations

import functools
from typing import Any

import torch

from strobe.problem.arguments import Arguments, layout_of
from strobe.problem.checks import checked_number, with_longest
from strobe.variants.block_mask import BlockMask
from strobe.variants.dropout import new_seed
from strobe.variants.flex_mask import check_lengths, of_block_mask
from strobe.variants.mask import Mask, full
from strobe.variants.score import DerivedScore, Score, identity, softcap as softcap_score
from strobe.variants.user_function import traced_mask, traced_score

_is_compiling = torch.compiler.is_dynamo_compiling


def with_softcap(score: Any, softcap: float | None) -> Any:
    """The score of a call that was passed this score and this softcap, of which one must be None."""
    if softcap is None:
        return score
    if score is not None:
        raise ValueError("softcap and score cannot be given together: a softcap is a score of its own")
    if _is_compiling() or isinstance(softcap, torch.SymFloat):  # symbols have no hash
        return softcap_score(torch.sym_float(softcap))
    return _checked_softcap(softcap if softcap.__class__ is float else checked_number("softcap", softcap))


@functools.lru_cache(maxsize=64)
def _checked_softcap(cap: float) -> Score:
    if checked_number("softcap", cap) <= 0:
        raise ValueError(f"softcap must be greater than 0, got {cap}")
    return softcap_score(cap)


def resolved(a: Arguments) -> Arguments:
    """The arguments with functions traced; the score also hides what a mask function hides beside its interval."""
    mask, score = a.mask, a.score
    if score is not None and not isinstance(score, Score) and callable(score):
        score = traced_score(score)
        a = a._replace(score=score)
    if isinstance(score, DerivedScore):
        score = score.current()
        a = a._replace(score=score)
    if isinstance(mask, BlockMask):
        if sizes := _sizes(a, "block mask"):
            mask.check(*sizes)
        a, mask = a._replace(blocks=mask), mask.mask
    if not isinstance(mask, Mask):
        is_plain = mask is None or isinstance(mask, torch.Tensor)
        if is_plain or not (callable(mask) or hasattr(mask, "kv_indices")):
            return a
        mask = _of_flex(mask, a) if hasattr(mask, "kv_indices") else traced_mask(mask)
    interval = None if mask.interval == full else mask.interval
    if mask.rest is None:
        return a._replace(mask=interval)
    return a._replace(mask=interval, score=(identity if score is None else score).hiding(mask))


def completed(a: Arguments) -> Arguments:
    """The arguments with the lengths of the longest sequences and, for dropout, a seed."""
    return with_seed(with_longest(a) if a.cu_q is not None else a)


def with_seed(a: Arguments) -> Arguments:
    """The arguments with a seed that follows torch.manual_seed, if there is dropout and the caller gave none."""
    return a._replace(seed=new_seed(a.q.device)) if a.dropout and a.seed is None else a


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
