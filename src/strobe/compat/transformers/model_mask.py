"""transformers' description of a mask, a function of (batch, head, query, key): the usual ones are conjunctions of a few
functions of `transformers.masking_utils`, which are recognised by their names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from strobe.variants.mask import Mask, causal, full, used_keys
from strobe.variants.ready_made import chunked, window


class Rule(NamedTuple):
    """A rule says which keys a query sees, as far as positions decide it."""

    causal: bool
    left: int = -1  # keys before the query; negative: any number
    right: int = -1
    chunk: int = 0
    first_token: torch.Tensor | None = None  # (batch,): where chunks start
    document_of: torch.Tensor | None = None  # (batch, length)

    def interval(self, used: bool = False) -> Mask:
        made = _interval.__wrapped__ if torch.compiler.is_dynamo_compiling() else _interval
        return made(self.causal, self.left, self.right, self.chunk, used)


@functools.lru_cache(maxsize=256)
def _interval(is_causal: bool, left: int, right: int, chunk: int, used: bool) -> Mask:
    """One object for equal masks: a call is found faster by it."""
    mask = causal if is_causal else full
    if left >= 0 or right >= 0:
        mask = mask & window(None if left < 0 else left, None if right < 0 else right)
    if chunk:
        mask = mask & chunked(chunk)
    return mask & used_keys if used else mask


def recognised(function: Callable[..., Any]) -> Rule | None:
    """None: it says something else."""
    rule = Rule(causal=False)
    for leaf, captured in _leaves(function):
        if leaf == "causal_mask_function":
            rule = rule._replace(causal=True)
        elif leaf == "bidirectional_mask_function":
            pass
        elif leaf == "sliding_window_overlay":
            if not _is_size(captured["sliding_window"]) or rule.left >= 0:
                return None
            rule = rule._replace(left=captured["sliding_window"] - 1)
        elif leaf == "sliding_window_bidirectional_overlay":
            if not _is_size(captured["sliding_window"]) or rule.left >= 0:
                return None
            rule = rule._replace(left=captured["sliding_window"], right=captured["sliding_window"])
        elif leaf == "chunked_overlay":
            if not _is_size(captured["chunk_size"]) or rule.chunk:
                return None
            rule = rule._replace(chunk=captured["chunk_size"], first_token=captured["left_padding"])
        elif leaf == "packed_sequence_mask_function":
            if rule.document_of is not None:
                return None
            rule = rule._replace(document_of=captured["packed_sequence_mask"])
        else:
            return None
    return rule


def _is_size(x: Any) -> bool:
    return type(x) is int and x >= 1


def _leaves(function: Callable[..., Any]) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """The functions of transformers whose conjunction this is, by name, with what they captured; None for others."""
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        yield None, {}
        return
    name = function.__qualname__.split(".")[0]
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    captured = dict(zip(code.co_freevars, (c.cell_contents for c in cells), strict=True)) if code is not None else {}
    if name != "and_masks":
        yield name, captured
        return
    for part in captured.get("mask_functions", (None,)):
        yield from _leaves(part)
