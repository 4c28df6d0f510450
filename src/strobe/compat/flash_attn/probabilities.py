"""S_dmask: the matrix of attention probabilities, with the sign of what dropout did, in the scaling of flash-attn 2. It is
as large as attention's memory was before FlashAttention: for tests and small pictures."""

from __future__ import annotations

import itertools

import torch

from strobe.call import piece
from strobe.problem.arguments import Arguments
from strobe.variants import dropout


def keys_of_tile(head_dim: int) -> int:
    """Keys of a tile of flash-attn 2, as far as S_dmask is concerned: ours does not depend on our own tiles."""
    return 128 if head_dim <= 64 else 64


def signed_scores(a: Arguments) -> torch.Tensor:
    """(batch, heads, len_q, len_k), the lengths of the longest sequences rounded up to 128. Entries are exp(score - m),
    negative where dropout dropped them, 0 outside. m is the largest score of the row so far, when tiles of keys are
    visited from the last to the first: flash-attn 2 shows its tiles before it divides by the sum of a row."""
    p = _probabilities(a)
    tiles = p.unflatten(-1, (-1, keys_of_tile(a.q.shape[-1])))
    largest = tiles.amax(-1).flip(-1).cummax(-1).values.flip(-1)  # exp(m - lse)
    found = torch.where(tiles > 0, tiles / largest[..., None], 0).flatten(-2)
    if not a.dropout:
        return found
    batch, heads, rows, keys = map(range, p.shape)
    kept = dropout.keep(a.seed, batch, heads, rows, keys, a.dropout, p.device)
    return torch.where(kept, found, -found)


def _probabilities(a: Arguments) -> torch.Tensor:
    """Return the probabilities without dropout: a row sums to 1."""
    q, k, v = (t.detach() for t in (a.q, a.k, a.v))
    heads, len_q, len_k = q.shape[-2], _longest(a.cu_q, a.max_q, q), _longest(a.cu_k, a.max_k, k)
    batch = q.shape[0] if a.cu_q is None else a.cu_q.numel() - 1
    found = q.new_zeros((batch, heads, _round(len_q), _round(len_k)))
    ends_q, ends_k = (None if cu is None else cu.tolist() for cu in (a.cu_q, a.cu_k))
    # Attention to rows of the identity matrix returns the probabilities themselves.
    if ends_q is None or ends_k is None:
        one_hot = torch.eye(len_k, dtype=v.dtype, device=v.device)
        values = one_hot[:, None].expand(batch, len_k, v.shape[-2], len_k)
    else:
        keys = torch.cat([torch.arange(n - m, device=v.device) for m, n in itertools.pairwise(ends_k)])
        one_hot = torch.nn.functional.one_hot(keys, len_k).to(v.dtype)
        values = one_hot[:, None].expand(-1, v.shape[-2], len_k)
    p = piece.forward(a._replace(q=q, k=k, v=values, dropout=0.0, seed=None, return_lse=False, out=None)).out
    if ends_q is None:
        found[:, :, :len_q, :len_k] = p.transpose(1, 2)
    else:
        for i, (start, stop) in enumerate(itertools.pairwise(ends_q)):
            found[i, :, : stop - start, :len_k] = p[start:stop].transpose(0, 1)
    return found


def _longest(cu: torch.Tensor | None, longest: int | None, t: torch.Tensor) -> int:
    if cu is None:
        return t.shape[1]
    if longest is not None:
        return longest
    return int(cu.diff().max()) if cu.numel() > 1 else 0


def _round(n: int) -> int:
    return -(-n // 128) * 128
