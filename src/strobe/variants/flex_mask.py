"""FlexAttention's `BlockMask` as a mask of ours."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from strobe.variants.mask import Mask
from strobe.variants.user_function import traced_mask


class _Verdict(NamedTuple):
    """What `_agree` found for a mask, its function and its lists of blocks, whose tensors had these versions."""

    function: Mask
    lists: tuple[Any, ...]
    versions: tuple[int, ...]
    agree: bool

    def is_of(self, function: Mask, lists: tuple[Any, ...], versions: tuple[int, ...]) -> bool:
        same = (a is b if isinstance(a, torch.Tensor) else a == b for a, b in zip(self.lists, lists, strict=True))
        return (self.function, self.versions) == (function, versions) and all(same)


_verdicts: weakref.WeakKeyDictionary[Any, _Verdict] = weakref.WeakKeyDictionary()


def of_block_mask(mask: Any) -> Mask:
    """FlexAttention evaluates the function in the blocks that are listed as partial alone. `create_block_mask` lists those
    that its function tells, and so the function says all; `from_kv_blocks` takes any list."""
    partial = _listed(mask.kv_num_blocks, mask.kv_indices)
    counts = mask.full_kv_num_blocks
    whole = torch.zeros_like(partial) if counts is None else _listed(counts, mask.full_kv_indices)
    rows, keys = mask.BLOCK_SIZE
    batch, heads = (n > 1 for n in partial.shape[:2])
    of_pairs = mask.mask_mod
    if _is_noop(of_pairs):  # made from blocks alone
        whole, of_pairs = whole | partial, None
    elif _agree(mask, found := traced_mask(of_pairs, rows=True), whole, partial):
        return found

    def in_a_block(b: Any, h: Any, q: Any, k: Any) -> Any:
        place = b if batch else 0, h if heads else 0, q // rows, k // keys
        if of_pairs is None:
            return whole[place]
        seen = partial[place] & of_pairs(b, h, q, k)
        return seen if counts is None else whole[place] | seen

    return traced_mask(in_a_block, rows=True)


def check_lengths(mask: Any, len_q: int, len_k: int) -> None:
    """A mask for other lengths has blocks for other rows and keys, unless it is one of no blocks: those that
    FlexAttention makes in the place of None are wider than any sequence."""
    lengths, wide = tuple(mask.seq_lengths), min(mask.BLOCK_SIZE) >= 1 << 30
    if lengths != (len_q, len_k) and not wide:
        raise ValueError(
            f"the BlockMask was created for {lengths[0]} queries and {lengths[1]} keys, got {len_q} and {len_k}"
        )


def _is_noop(function: Any) -> bool:
    """Whether it is FlexAttention's own function that hides nothing."""
    return (getattr(function, "__module__", ""), getattr(function, "__name__", "")) == (
        "torch.nn.attention.flex_attention",
        "noop_mask",
    )


def _listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The blocks in a list, (batch, heads, blocks of rows, blocks of keys). Entries beyond the count may hold anything."""
    used = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    return torch.zeros_like(used.int()).scatter_add_(-1, torch.where(used, indices, 0).long(), used.int()) > 0


@getattr(torch, "_disable_dynamo", torch.compiler.disable)
def _agree(mask: Any, function: Mask, whole: torch.Tensor, partial: torch.Tensor) -> bool:
    """Whether blocks that are not listed hide every pair, and whole ones none. Looks at all pairs, which is what
    `create_block_mask` has done, and less than attention to them: once for a mask, until its function or one of its
    tensors is another one or has changed in place."""
    blocks = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    lists = (*blocks, tuple(mask.BLOCK_SIZE), tuple(mask.seq_lengths))
    try:
        versions = tuple(t._version for t in (*lists, *function.tensors) if isinstance(t, torch.Tensor))
    except RuntimeError:  # tensors of inference mode do not count their changes
        return _blocks_agree(mask, function, whole, partial)
    known = _verdicts.get(mask)
    if known is None or not known.is_of(function, lists, versions):
        known = _Verdict(function, lists, versions, _blocks_agree(mask, function, whole, partial))
        _verdicts[mask] = known
    return known.agree


def _blocks_agree(mask: Any, function: Mask, whole: torch.Tensor, partial: torch.Tensor) -> bool:
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
    return not wrong.item()
