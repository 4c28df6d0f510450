"""Context parallel attention as an attention function of transformers: what `strobe.compat.transformers` registers when it
is given a mesh.

    register(mesh)
    model.set_attn_implementation("strobe_context_parallel")
    model(input_ids=shard_of_tokens, position_ids=plan.position_ids(rank)[None], plan=plan)

A model gets this rank's tokens, with their positions, and the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from strobe.compat.transformers.model_mask import recognised
from strobe.distributed.api import attention
from strobe.distributed.shard_plan import ShardPlan
from strobe.problem import Unsupported
from strobe.variants.mask import Mask, causal, full
from strobe.variants.ready_made import window

NAME = "strobe_context_parallel"


def register(mesh: Any, plan: ShardPlan | None = None, method: str = "auto", name: str = NAME) -> None:
    """Makes `name` an attention implementation of transformers, with its mask function. Again replaces it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_function(mesh, plan, method))
    AttentionMaskInterface.register(name, no_mask)


def no_mask(
    *_: Any,
    attention_mask: torch.Tensor | None = None,
    mask_function: Callable[..., Any] | None = None,
    **_more: Any,
) -> None:
    """The mask function: layers say what they hide, plans say where documents end. Padding would need a third, and so would
    a function of the model's own. A tracer cannot look into one."""
    if mask_function is not None and not torch.compiler.is_compiling():
        rule = recognised(mask_function)
        if rule is None or rule.chunk:
            raise Unsupported(
                f"mask_function is {mask_function}, which says what neither layers nor a plan say; a sequence that is "
                "shared out takes causal and sliding-window masks, and documents"
            )
    if attention_mask is None:
        return
    if torch.compiler.is_compiling() or not bool(attention_mask.all()):
        shape = tuple(attention_mask.shape)
        raise Unsupported(
            f"attention_mask of shape {shape} hides tokens; pack documents with a plan instead of padding"
        )


def attention_function(
    mesh: Any, plan: ShardPlan | None = None, method: str = "auto"
) -> Callable[..., tuple[torch.Tensor, None]]:
    """An attention function for `AttentionInterface.register`. A `plan` that is passed to the model's forward takes
    precedence over the one given here; without any, ranks hold equal parts in their order. Masks come from the layer
    (causal, sliding window), never from a tensor: `no_mask` goes with it."""

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
            raise Unsupported("attention_mask is a tensor; a sequence that is shared out takes none, not even padding")
        if dropout:
            raise Unsupported(f"dropout is {dropout}; ranks would need one seed for it, so it must be 0")
        if getattr(getattr(module, "config", None), "attention_chunk_size", None):
            raise Unsupported("attention_chunk_size is set; which layers attend in chunks is not known here")
        if more.get("position_bias") is not None:
            raise Unsupported("position_bias is given; a bias of all positions is never made")
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
