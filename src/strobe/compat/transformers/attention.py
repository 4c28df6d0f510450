"""The attention function of the implementation "strobe", called by every layer of a model."""

from __future__ import annotations

from typing import Any

import torch

from strobe.call.attend import attend
from strobe.compat.transformers import in_place, paged
from strobe.compat.transformers.layer_mask import LayerMask
from strobe.problem import Unsupported
from strobe.problem.arguments import Arguments
from strobe.problem.resolve import with_softcap
from strobe.variants.mask import Mask, causal, causal_top_left, full
from strobe.variants.ready_made import window

_Maybe = torch.Tensor | None
# Keywords that models pass to their attention functions although they say nothing about attention. These, and whatever
# is None, are ignored. A keyword that is not here may be one that hides keys (`indices`, `block_indices`), so it
# raises.
_SAY_NOTHING = frozenset(
    """position_ids cache_position use_cache past_key_values past_key_value cache_params seq_idx position_embeddings
    input_ids inputs_embeds token_type_ids mm_token_type_ids pixel_values input_values interpolate_pos_encoding
    encoder_hidden_states encoder_outputs transformer_hidden_states decoder_input_ids decoder_inputs_embeds
    decoder_position_ids labels num_items_in_batch logits_to_keep output_hidden_states output_router_logits return_dict
    output_attentions cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k max_seqlen_q max_seqlen_k
    read_index write_index block_table logits_indices logits_processor_args""".split()  # noqa: SIM905
)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # (batch, heads, len_q, dim)
    key: torch.Tensor,  # (batch, heads_k, len_k, dim)
    value: torch.Tensor,
    attention_mask: LayerMask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: _Maybe = None,
    position_bias: _Maybe = None,
    cache: Any = None,
    deterministic: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """((batch, len_q, heads, dim), None). `sliding_window` counts the keys that a query sees, itself included; `s_aux`
    (heads,) are sinks; `position_bias`, broadcastable to (batch, heads, len_q, len_k), is added to the scores."""
    if kwargs.get("output_attentions"):
        raise Unsupported(
            'output_attentions=True: strobe never holds the attention weights; load the model with attn_implementation="eager"'
        )
    for name, given in kwargs.items():
        if given is not None and name not in _SAY_NOTHING:
            raise Unsupported(
                f"{type(module).__name__} passes {name}= to its attention function, which strobe does not know; load the model "
                'with attn_implementation="eager"'
            )
    deterministic, score = bool(deterministic), with_softcap(None, softcap)
    query, key, value = _rows_together(query), _rows_together(key), _rows_together(value)
    if cache is not None and not paged.is_paged(cache):
        cache = None
    described = cache is not None or kwargs.get("cu_seq_lens_q") is not None
    if described and cache is None and isinstance(attention_mask, LayerMask) and attention_mask.booleans is not None:
        # Under a tracer masks are not looked into: the booleans already separate the sequences, or are made to here.
        attention_mask = LayerMask.of(attention_mask.booleans & paged.together(query, key, kwargs))
        described = False
    if described:
        if position_bias is not None or (cache is None and _says_more(attention_mask)):
            raise Unsupported(
                "padding, mask tensors and position_bias cannot be combined with packed sequences (cu_seq_lens_q)"
            )
        if isinstance(attention_mask, LayerMask) and cache is None:
            mask = attention_mask.mask
        else:
            mask = _mask_of(module, True if cache is not None else is_causal, sliding_window)
        a = Arguments(
            q=query, k=key, v=value, mask=mask, scale=scaling, score=score, dropout=dropout,
            sinks=s_aux, deterministic=deterministic,
        )  # fmt: skip
        index: Any = getattr(module, "layer_idx", None)
        out = None
        if cache is not None:
            out = in_place.attend(paged.packed(a, sliding_window, kwargs), cache, index, kwargs)
        if out is None:
            if cache is not None:
                a = paged.updated(a, cache, index, kwargs)
            out = attend(paged.packed(a, sliding_window, kwargs))
        return out.unflatten(0, (query.shape[0], -1)).contiguous(), None

    if query.shape[0] != key.shape[0]:  # one sequence for all, as PyTorch's matrix products have it
        rows = max(query.shape[0], key.shape[0])
        query, key, value = (t.expand(rows, -1, -1, -1) for t in (query, key, value))
    bias, positions, documents = position_bias, None, None
    chosen: Any = None  # a mask of ours, or booleans
    if attention_mask is None:
        if query.shape[2] > 1:
            chosen = _mask_of_none(module, is_causal, sliding_window, query.shape[2], key.shape[2])
    elif isinstance(attention_mask, LayerMask) and attention_mask.shows_all():
        chosen = full
    elif isinstance(attention_mask, LayerMask) and attention_mask.booleans is None:
        _check_lengths(module, attention_mask, query, key)
        chosen, positions = attention_mask.mask, attention_mask.positions
        if attention_mask.keys is not None:
            key, value = key[:, :, : attention_mask.keys], value[:, :, : attention_mask.keys]
            bias = None if bias is None else bias[..., : attention_mask.keys]
        if attention_mask.bias is not None:
            bias = attention_mask.bias if bias is None else bias + attention_mask.bias
        documents = attention_mask.documents()
    else:
        if isinstance(attention_mask, LayerMask):
            _check_lengths(module, attention_mask, query, key)
            attention_mask = attention_mask.dense()
        chosen, bias = _given(attention_mask, bias, key.shape[2])
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if documents is None:
        a = Arguments(
            q=q, k=k, v=v, mask=chosen, scale=scaling, score=score, bias=bias, dropout=dropout, sinks=s_aux,
            deterministic=deterministic, positions=positions,
        )  # fmt: skip
        return attend(a).contiguous(), None
    if bias is not None:
        raise Unsupported("position_bias cannot be combined with packed sequences (position_ids that start again)")
    cu, longest = documents
    a = Arguments(
        q=q.flatten(0, 1), k=k.flatten(0, 1), v=v.flatten(0, 1), cu_q=cu, cu_k=cu, max_q=longest, max_k=longest,
        mask=chosen, scale=scaling, score=score, dropout=dropout, sinks=s_aux, deterministic=deterministic,
    )  # fmt: skip
    out = attend(a)
    return out.unflatten(0, q.shape[:2]).contiguous(), None


def _says_more(attention_mask: LayerMask | torch.Tensor | None) -> bool:
    """Return whether it says more than which keys a query sees by position."""
    if not isinstance(attention_mask, LayerMask):
        return attention_mask is not None
    return any(t is not None for t in (attention_mask.padding, attention_mask.positions, attention_mask.booleans))


def _check_lengths(module: Any, mask: LayerMask, query: torch.Tensor, key: torch.Tensor) -> None:
    """A model that adds keys of its own after the mask was made says nothing about who sees them."""
    if mask.dim() == 4 and mask.shape[2:] != (query.shape[2], key.shape[2]):
        raise Unsupported(
            f"{type(module).__name__} has {query.shape[2]} queries and {key.shape[2]} keys, but its attention mask was made "
            f'for {mask.shape[2]} and {mask.shape[3]}; load the model with attn_implementation="eager"'
        )


def _rows_together(t: torch.Tensor) -> torch.Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _mask_of_none(module: Any, is_causal: bool | None, sliding_window: int | None, len_q: int, len_k: int) -> Mask:
    """The mask of a layer that was given none. A causal layer with more keys than queries is aligned with the first
    key, as in PyTorch: later keys are room for tokens to come. A layer that is not causal sees everything, as with
    eager attention: its cache has kept the keys of the window."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        return full
    if len_q == len_k:
        return _mask_of(module, True, sliding_window)
    if sliding_window is not None and sliding_window < len_k:
        raise Unsupported(
            f"{type(module).__name__} has a sliding_window of {sliding_window}, {len_q} queries, {len_k} keys and no attention "
            "mask; without one as many keys as queries are needed"
        )
    return causal_top_left


def _mask_of(module: Any, is_causal: bool | None, sliding_window: int | None) -> Mask:
    """The mask that a layer describes by its attributes and arguments."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    mask = causal if is_causal else full
    if sliding_window is None:
        return mask
    return mask & window(sliding_window - 1, None if is_causal else sliding_window - 1)


def _given(mask: torch.Tensor, bias: _Maybe, len_k: int) -> tuple[_Maybe, _Maybe]:
    """(mask, bias) of a tensor: booleans or numbers to add, broadcastable to (batch, heads, len_q, len_k)."""
    if mask.dim() != 4:
        raise Unsupported(
            f"attention_mask has shape {tuple(mask.shape)}; allowed are 4 axes (batch, heads, len_q, len_k)"
        )
    if mask.shape[-1] > len_k:
        mask = mask[..., :len_k]
    if bias is not None and bias.shape[-1] > len_k:
        bias = bias[..., :len_k]
    if mask.dtype == torch.bool:
        return mask, bias
    return None, mask if bias is None else bias + mask
