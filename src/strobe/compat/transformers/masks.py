"""The mask function of the implementation "strobe": from transformers' description of a mask to a `LayerMask`.

transformers describes a mask by a function of (batch, head, query, key). The usual ones are put together from a few
functions of `transformers.masking_utils`, which are recognised; whatever else comes is evaluated into booleans, by
transformers itself. A padding mask is looked at once per forward pass, as transformers' own mask functions do it; where
it cannot be read, under a tracer or while a CUDA graph is captured, booleans are the answer, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

from strobe.compat import flash_terms
from strobe.compat.transformers.layer_mask import LayerMask
from strobe.compat.transformers.model_mask import Rule, recognised

# Parts of models that call no attention function: what they do with eager attention's mask cannot be seen from outside.
_BY_THEMSELVES = frozenset({"gemma4_audio"})


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | LayerMask | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    **kwargs: Any,
) -> LayerMask | torch.Tensor | None:
    """transformers' interface for mask functions: queries stand at q_offset, keys at kv_offset; `attention_mask` (batch,
    tokens so far) is True where a token is; or it is a mask that is ready, of an earlier call."""
    if isinstance(attention_mask, LayerMask):
        return attention_mask
    if getattr(config, "model_type", None) in _BY_THEMSELVES:
        return masking_utils.eager_mask(
            batch_size, q_length, kv_length, q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function,
            attention_mask=attention_mask, dtype=dtype, allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            use_vmap=use_vmap, device=device,
        )  # fmt: skip
    traced = is_tracing(attention_mask)
    if traced:
        rule = _promised(mask_function, local_size, allow_is_causal_skip, allow_is_bidirectional_skip, config)
    else:
        rule = recognised(mask_function)
    shape = (batch_size, q_length, kv_length)
    lazy = None
    if rule is not None and rule.document_of is not None:
        if not rule.chunk and attention_mask is None and q_length == kv_length:
            lazy = LayerMask(rule.interval(), shape, device, document_of=rule.document_of)
    elif rule is not None and attention_mask is None:
        lazy = _without_padding(rule, shape, q_offset, kv_offset, device)
    elif rule is not None and attention_mask is not None and not traced:
        lazy = _with_padding(rule, shape, q_offset, kv_offset, attention_mask, device, dtype)
    if lazy is not None:
        return lazy
    booleans = masking_utils.sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    return LayerMask.of(booleans)


# ---- recognising a mask ----------------------------------------------------------------------------------------------


def _promised(
    function: Callable[..., Any], local_size: int | None, causal_skip: bool, bidirectional_skip: bool, config: Any
) -> Rule | None:
    """Return the rule that transformers' own flags promise of the function, where a tracer cannot look into it: as long
    as a mask may be skipped, it is nothing but causal, or nothing but bidirectional, within `local_size`."""
    if function is masking_utils.bidirectional_mask_function:
        return Rule(causal=False)  # some say a `local_size` and mean the size of the cache
    if causal_skip:
        if local_size is None:
            return Rule(causal=True)
        slides = local_size == getattr(config, "sliding_window", None) != getattr(config, "attention_chunk_size", None)
        return Rule(causal=True, left=local_size - 1) if slides else None
    if bidirectional_skip:
        return Rule(False) if local_size is None else Rule(False, local_size, local_size)
    return Rule(causal=True) if function is masking_utils.causal_mask_function else None


# ---- placing it in the buffers of keys -------------------------------------------------------------------------------


def _without_padding(rule: Rule, shape: tuple[int, int, int], q_offset: Any, kv_offset: Any, device: Any) -> LayerMask:
    batch, len_q, len_k = shape
    q_offset, kv_offset = (_as_int(n) for n in (q_offset, kv_offset))
    if isinstance(q_offset, int) and isinstance(kv_offset, int):
        end = q_offset + len_q - kv_offset  # the key after the one that is opposite the last query
        if rule.causal and end < len_k and not rule.chunk:
            return LayerMask(rule.interval(), shape, device, keys=end)  # of a cache that is not yet full
        anywhere = not rule.causal and rule.left < 0 and not rule.chunk
        if anywhere or (end == len_k and not (rule.chunk and kv_offset)):
            return LayerMask(rule.interval(), shape, device)
    positions = flash_terms.positions_of(batch, len_k, len_k, -kv_offset, torch.device(device), q_offset)
    return LayerMask(rule.interval(), shape, device, positions=positions)


def _as_int(n: Any) -> Any:
    """A number that lies on the CPU can be read without waiting."""
    if isinstance(n, torch.Tensor) and n.is_cpu and not is_tracing(n):
        return int(n)
    return n


def _with_padding(
    rule: Rule,
    shape: tuple[int, int, int],
    q_offset: Any,
    kv_offset: Any,
    attention_mask: torch.Tensor,
    device: Any,
    dtype: torch.dtype,
) -> LayerMask | None:
    """Tokens that lie next to each other, whatever is before and after them, are a matter of positions. None: booleans
    are better."""
    batch, len_q, len_k = shape
    kv_offset = int(kv_offset)
    padding = attention_mask[:, kv_offset : kv_offset + len_k].to(torch.bool)
    padding = torch.nn.functional.pad(padding, (0, len_k - padding.shape[1]))
    count, first = padding.sum(-1), padding.int().argmax(-1)
    end = len_k - padding.flip(-1).int().argmax(-1)
    together = ((end - first == count) | (count == 0)).all()
    everything, together = torch.stack((padding.all(), together)).tolist()  # the one look
    if everything and not rule.chunk:  # chunks start at the first token, which may lie before the keys of this call
        return _without_padding(rule, shape, q_offset, kv_offset, device)
    q_offset = _as_int(q_offset)
    if len_q == 1 and padding.is_cpu:
        return None  # a row of booleans per sequence: PyTorch's fused kernel takes them
    if together:
        origin = kv_offset + first if rule.first_token is None else rule.first_token  # positions count from here
        end = torch.where(count == 0, kv_offset + first, kv_offset + end)
        positions = flash_terms.positions_of(
            batch, end - origin, end - origin, origin - kv_offset, padding.device, q_offset - origin
        )
        return LayerMask(rule.interval(used=True), shape, device, positions=positions)
    if rule.chunk:
        return None
    positions = flash_terms.positions_of(batch, len_k, len_k, -kv_offset, padding.device, q_offset)
    return LayerMask(rule.interval(), shape, device, positions=positions, padding=padding, dtype=dtype)
