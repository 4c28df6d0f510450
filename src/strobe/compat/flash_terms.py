"""The terms in which flash-attn describes attention, in ours: windows, chunks, soft caps, slopes, lengths in use."""

from __future__ import annotations

import functools
from typing import Any

import torch

from strobe.expression import Expr
from strobe.mask import Mask, causal, chunked, full, window
from strobe.problem import Unsupported
from strobe.score import Score, alibi, softcap

_S = Expr("var", ("s",))


def mask_of(is_causal: bool, left: int, right: int, chunk: int = 0) -> Mask:
    """A window counts from the diagonal that ends at the last query and the last key; negative is unbounded. `chunk`:
    keys of the same chunk alone; 0: any."""
    made = _made if torch.compiler.is_dynamo_compiling() else _remembered  # the compiler looks through caches and warns
    return made(is_causal, left, right, chunk)


def _made(is_causal: bool, left: int, right: int, chunk: int) -> Mask:
    if is_causal:
        right = 0
    if left < 0 and right < 0:
        mask = full
    elif left < 0 and right == 0:
        mask = causal
    else:
        mask = window(None if left < 0 else left, None if right < 0 else right)
    return mask & chunked(chunk) if chunk else mask


_remembered = functools.lru_cache(maxsize=256)(_made)


def score_of(cap: float, slopes: torch.Tensor | None) -> Score | None:
    """The cap comes first, then the slopes."""
    if slopes is None:
        return softcap(float(cap)) if cap else None
    biased = alibi(slopes.detach().float())
    if not cap:
        return biased
    capped = softcap(float(cap))
    return Score(biased.expr.replaced(_S, capped.expr), f"{capped.name} with alibi", biased.tensors)


def last_axis_contiguous(t: Any) -> Any:
    return t if t is None or t.stride(-1) == 1 or t.shape[-1] < 2 else t.contiguous()


def padded(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Head dims as the CUDA kernels have them, multiples of 8. Zeros change no score and add columns of 0 to the output;
    whoever pads gives a scale and cuts the output."""
    if not tensors[0].is_cuda:
        return tensors
    return tuple(torch.nn.functional.pad(t, (0, -t.shape[-1] % 8)) if t.shape[-1] % 8 else t for t in tensors)


def positions_of(
    batch: int, len_q: Any, len_k: Any, first_key: Any, device: torch.device, row: Any = 0
) -> torch.Tensor:
    """`positions` of sequences whose keys in use are the `len_k` from `first_key` on. The first query of the call stands
    at `row` of `len_q`. Each is an int or a tensor (batch,)."""
    found = torch.empty((batch, 4), dtype=torch.int32, device=device)
    for column, value in enumerate((row, len_q, 0, len_k)):
        found[:, column] = value
    found[:, 2].sub_(first_key)
    return found


def refuse(**arguments: Any) -> None:
    """For what is not built: `name=(value, why)`."""
    for name, (value, why) in arguments.items():
        if value is not None:
            raise Unsupported(f"{name} was given, but {why}")


NO_PAGES = "paged keys are not built yet; pass contiguous keys and values"
NO_FP8 = "there are no 8-bit kernels yet; pass float16 or bfloat16 without descale factors"
