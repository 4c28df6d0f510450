"""`strobe.nn.Attention`: the attention block of today's language models, to use and to read."""

from __future__ import annotations

from typing import Any

import torch

from strobe.api import attention, attention_varlen
from strobe.nn import rotary
from strobe.variants.mask import Mask


class Attention(torch.nn.Module):
    """x (batch, length, dim) -> (batch, length, dim): project to heads, turn queries and keys by their positions, attend,
    project back. The projections are named as in Llama's checkpoints.

    heads, heads_k  heads of the queries, and of the keys and values, which may be fewer: then queries share them
    head_dim        dim / heads by default
    bias            whether the projections of q, k and v have one
    mask            what each query sees, if a call says nothing else: strobe.causal, strobe.window(left, right), …
    rotary_base     rotary position embedding with this base (10000.0 is common); None: no position embedding
    rotary_dim      how many dims of a head are turned; all by default
    interleaved     whether pairs of dims are neighbours, as in GPT-J, or half a head apart, as in Llama
    sinks           learn one more logit per head in the softmax's denominator
    softcap         scores become softcap * tanh(score / softcap)
    dropout         of attention weights, in training
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        heads_k: int | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        mask: Mask | None = None,
        rotary_base: float | None = None,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        sinks: bool = False,
        softcap: float | None = None,
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        heads_k = heads if heads_k is None else heads_k
        if heads < 1 or heads_k < 1 or heads % heads_k:
            raise ValueError(f"heads must be a multiple of heads_k, got {heads} and {heads_k}")
        if head_dim is None:
            if dim % heads:
                raise ValueError(f"dim must be a multiple of heads unless head_dim is given, got {dim} and {heads}")
            head_dim = dim // heads
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        if rotary_base is not None and (rotary_dim % 2 or not 2 <= rotary_dim <= head_dim):
            raise ValueError(f"rotary_dim must be even, from 2 to head_dim {head_dim}, got {rotary_dim}")
        self.heads, self.heads_k, self.head_dim = heads, heads_k, head_dim
        self.mask, self.softcap, self.dropout = mask, softcap, dropout
        self.rotary_base, self.rotary_dim, self.interleaved = rotary_base, rotary_dim, interleaved
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = torch.nn.Linear(dim, heads * head_dim, bias=bias, **options)
        self.k_proj = torch.nn.Linear(dim, heads_k * head_dim, bias=bias, **options)
        self.v_proj = torch.nn.Linear(dim, heads_k * head_dim, bias=bias, **options)
        self.o_proj = torch.nn.Linear(heads * head_dim, dim, bias=False, **options)
        self.sinks = torch.nn.Parameter(torch.zeros(heads, **options)) if sinks else None

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor | None = None,
        *,
        mask: Mask | torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        cu: torch.Tensor | None = None,
        longest: int | None = None,
    ) -> torch.Tensor:
        """`context` (batch, length_k, dim): attend to this instead of x. `mask`: instead of the module's. `positions`
        (…, length): of x, for the rotary embedding; 0, 1, 2, … by default.

        With `cu` (sequences + 1,), int32, x is (total, dim): sequences one after the other, which do not see each other;
        sequence i holds the rows cu[i] to cu[i+1], and the longest has `longest`."""
        if context is not None and (cu is not None or self.rotary_base is not None):
            raise ValueError(
                "context cannot be combined with cu, nor with a rotary embedding, which counts x's positions"
            )
        source = x if context is None else context
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))  # (…, length, heads, head_dim)
        k = self.k_proj(source).unflatten(-1, (self.heads_k, self.head_dim))
        v = self.v_proj(source).unflatten(-1, (self.heads_k, self.head_dim))
        if self.rotary_base is not None:
            positions = _counted(x.shape[-2], cu, x.device) if positions is None else positions
            cos, sin = rotary.angles(positions, self.rotary_dim, self.rotary_base)
            q, k = (rotary.rotate(t, cos, sin, self.interleaved) for t in (q, k))
        options: dict[str, Any] = {
            "mask": self.mask if mask is None else mask,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "dropout": self.dropout if self.training else 0.0,
        }
        if cu is None:
            out = attention(q, k, v, layout="bshd", **options)
        else:
            out = attention_varlen(q, k, v, cu, cu, max_q=longest, max_k=longest, **options)
        return self.o_proj(out.flatten(-2))

    def extra_repr(self) -> str:
        parts = [f"heads={self.heads}", f"heads_k={self.heads_k}", f"head_dim={self.head_dim}", f"mask={self.mask}"]
        parts += [f"rotary_base={self.rotary_base}"] if self.rotary_base is not None else []
        return ", ".join(parts)


def _counted(length: int, cu: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """0, 1, 2, …, from 0 again in each sequence."""
    row = torch.arange(length, device=device)
    if cu is None:
        return row
    sequence = torch.searchsorted(cu, row, right=True) - 1
    return row - cu[sequence]
