"""Context parallel attention as an attention function of transformers: what `strobe.compat.transformers` registers when it
is given a mesh.

A model then gets this rank's tokens, with their positions, and the plan:

    model(input_ids=shard_of_tokens, position_ids=plan.position_ids(rank)[None], plan=plan)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from strobe.distributed.api import attention
from strobe.distributed.plan import ShardPlan
from strobe.mask import Mask, causal, full, window


def attention_function(
    mesh: Any, plan: ShardPlan | None = None, method: str = "auto"
) -> Callable[..., tuple[torch.Tensor, None]]:
    """An attention function for `AttentionInterface.register`. A `plan` that is passed to the model's forward takes
    precedence over the one given here; without any, ranks hold equal parts in their order. Masks come from the layer
    (causal, sliding window), never from a tensor: register a mask function that returns None."""

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,  # (batch, heads, rows, dim)
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: torch.Tensor | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        if attention_mask is not None:
            shape = getattr(attention_mask, "shape", None)
            raise ValueError(
                f"attention_mask has shape {shape}; a sequence that is shared out takes none, not even padding"
            )
        if dropout:
            raise ValueError(
                f"dropout is {dropout}; a sequence that is shared out needs a seed for it, so it must be 0"
            )
        out = attention(
            query, key, value, mesh=mesh, plan=more.get("plan") or plan, method=method,
            mask=_mask(module, is_causal, sliding_window), scale=scaling, softcap=softcap, sinks=s_aux, layout="bhsd",
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    return attend


def _mask(module: torch.nn.Module, is_causal: bool | None, sliding_window: int | None) -> Mask:
    """A sliding window counts the keys that a query sees, itself included."""
    causal_layer = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not sliding_window:
        return causal if causal_layer else full
    return window(sliding_window - 1, 0 if causal_layer else sliding_window - 1)
