"""Pack padded batches into sequences one after the other, and unpack them."""

from __future__ import annotations

import torch


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of x; the gradient of a row goes back to where it came from."""
    return x.index_select(0, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """The inverse: `first_axis_dim` rows, 0 where no value goes."""
    found = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return found.index_copy(0, indices.long(), values)  # transformers has indices in int32, which only reading takes


def index_first_axis_residual(x: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows, and x itself beside them."""
    return x.index_select(0, indices), x


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """hidden_states (batch, length, …), masks (batch, length), nonzero where a token is. Tokens of `unused_mask` keep
    their place but do not count as used.

    Returns the tokens (total, …), their indices in (batch * length), cu_seqlens (batch + 1,) int32, the length of the
    longest sequence, and the number of used tokens of each."""
    allocated = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = (allocated != 0).sum(-1, dtype=torch.int32)
    used = (attention_mask != 0).sum(-1, dtype=torch.int32)
    indices = allocated.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Several sequences in each row of a batch: the nonzero numbers of attention_mask_in_length (batch, length) are their
    lengths, one after the other. Returns tokens, indices, cu_seqlens and the longest length."""
    totals = attention_mask_in_length.sum(-1, keepdim=True)
    places = torch.arange(attention_mask_in_length.shape[-1], device=totals.device)
    indices = (places < totals).flatten().nonzero().flatten()
    flat = attention_mask_in_length.flatten()
    lengths = flat[flat.nonzero().flatten()]
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """(total, …) back to (batch, seqlen, …), 0 where there is no token."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
