"""FlexAttention's `BlockMask` as a mask of ours."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from strobe.variants.mask import Mask
from strobe.variants.user_function import mask_function

_agreeing: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()  # what `_agree` found for masks


def of_block_mask(mask: Any) -> Mask:
    """FlexAttention evaluates the function in the blocks that are listed as partial alone. `create_block_mask` lists those
    that its function tells, and so the function says all; `from_kv_blocks` takes any list."""
    partial = _listed(mask.kv_num_blocks, mask.kv_indices)
    counts = mask.full_kv_num_blocks
    whole = torch.zeros_like(partial) if counts is None else _listed(counts, mask.full_kv_indices)
    rows, keys = mask.BLOCK_SIZE
    batch, heads = (n > 1 for n in partial.shape[:2])
    of_pairs = mask.mask_mod
    if getattr(of_pairs, "__name__", "") == "noop_mask":  # made from blocks alone
        whole, of_pairs = whole | partial, None
    elif _agree(mask, by_function := mask_function(of_pairs, rows=True), whole, partial):
        return by_function

    def in_a_block(b: Any, h: Any, q: Any, k: Any) -> Any:
        place = b if batch else 0, h if heads else 0, q // rows, k // keys
        if of_pairs is None:
            return whole[place]
        seen = partial[place] & of_pairs(b, h, q, k)
        return seen if counts is None else whole[place] | seen

    return mask_function(in_a_block, rows=True)


def check_lengths(mask: Any, len_q: int, len_k: int) -> None:
    """A mask for other lengths has blocks for other rows and keys, unless it is one of no blocks: those that
    FlexAttention makes in the place of None are wider than any sequence."""
    lengths, wide = tuple(mask.seq_lengths), min(mask.BLOCK_SIZE) >= 1 << 30
    if lengths != (len_q, len_k) and not wide:
        raise ValueError(
            f"the BlockMask was created for {lengths[0]} queries and {lengths[1]} keys, got {len_q} and {len_k}"
        )


def _listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The blocks in a list, (batch, heads, blocks of rows, blocks of keys)."""
    used = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    return torch.zeros_like(used.int()).scatter_add_(-1, indices.long(), used.int()) > 0


@getattr(torch, "_disable_dynamo", torch.compiler.disable)
def _agree(mask: Any, function: Mask, whole: torch.Tensor, partial: torch.Tensor) -> bool:
    """Return whether blocks that are not listed hide every pair, and whole ones none. Looks at all pairs, once for a
    mask: that is what `create_block_mask` has done, and less than attention to them."""
    if mask not in _agreeing:
        (rows, keys), (len_q, len_k) = mask.BLOCK_SIZE, mask.seq_lengths
        batch, heads, count, columns = partial.shape
        wrong = torch.zeros((), dtype=torch.bool, device=partial.device)
        column = torch.arange(len_k, device=partial.device)
        for i in range(min(count, -(-len_q // rows))):
            row = torch.arange(i * rows, min((i + 1) * rows, len_q), device=partial.device)
            seen = function.block(row, column, len_q, len_k, batch=batch, heads=heads)
            padded = [torch.nn.functional.pad(t, (0, columns * keys - len_k)) for t in (seen, ~seen)]
            sees, hides = (t.unflatten(-1, (columns, keys)).any(-1).any(-2) for t in padded)
            wrong |= (sees & ~(whole | partial)[:, :, i] | hides & whole[:, :, i]).any()
        _agreeing[mask] = not wrong.item()
    return _agreeing[mask]
