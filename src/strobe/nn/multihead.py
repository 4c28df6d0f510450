"""`strobe.nn.MultiheadAttention`: torch.nn.MultiheadAttention, attending with strobe."""

from __future__ import annotations

import warnings

import torch
from torch.nn.functional import linear, pad

from strobe.api import attention
from strobe.problem import Unsupported
from strobe.variants.mask import Mask, causal_top_left

_Maybe = torch.Tensor | None


class MultiheadAttention(torch.nn.MultiheadAttention):
    """torch.nn.MultiheadAttention with its constructor, its parameters and its signature: checkpoints of either load into
    the other. Pass `need_weights=False`. The weights are the very matrix that strobe does not hold, so a call that asks
    for them, as PyTorch's default does, is left to PyTorch; a warning says so.

    A query that may see no key gets 0 before the last projection, where PyTorch has NaN."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: _Maybe = None,
        need_weights: bool = True,
        attn_mask: _Maybe = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, _Maybe]:
        """(batch, length, embed_dim) with batch_first, else (length, batch, embed_dim), or (length, embed_dim) without a
        batch. `key_padding_mask` (batch, length_k) and `attn_mask`, (length_q, length_k) or (batch * heads, length_q,
        length_k): booleans that are True where attention is not allowed, or numbers to add to the scores. `is_causal`:
        attn_mask is the causal mask, or missing."""
        if need_weights:
            warnings.warn(
                "need_weights=True: PyTorch computes this attention, with the whole matrix of weights; "
                "pass need_weights=False to use strobe",
                stacklevel=2,
            )
            return super().forward(
                query, key, value, key_padding_mask, True, attn_mask, average_attn_weights, is_causal
            )
        if query.is_nested or key.is_nested or value.is_nested:
            raise Unsupported("nested tensors are not built here; strobe.nn.Attention takes packed sequences")
        batched = query.dim() == 3
        if query.dim() not in (2, 3) or not key.dim() == value.dim() == query.dim():
            axes = f"{query.dim()}, {key.dim()}, {value.dim()}"
            raise ValueError(f"query, key and value must have 3 axes, or 2 without a batch; got {axes}")
        q, k, v = self._projected(query, key, value)  # laid out as they came, with (heads, head_dim) at the end
        if not batched:
            q, k, v = (t.unsqueeze(0) for t in (q, k, v))
        elif not self.batch_first:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        len_k = k.shape[1]
        for row_k, row_v in self._extra_rows(k, v):
            k, v = (torch.cat((t, row.expand(t.shape[0], 1, -1, -1)), 1) for t, row in ((k, row_k), (v, row_v)))
        mask, bias = self._mask_and_bias(q, len_k, k.shape[1] - len_k, key_padding_mask, attn_mask, is_causal)
        out = attention(q, k, v, mask=mask, bias=bias, dropout=self.dropout if self.training else 0.0, layout="bshd")
        out = self.out_proj(out.flatten(-2))  # (batch, length_q, embed_dim)
        if not batched:
            return out.squeeze(0), None
        return (out if self.batch_first else out.transpose(0, 1)), None

    def _projected(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self.in_proj_weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif query is key and key is value:  # one product
            whole = linear(query, self.in_proj_weight, self.in_proj_bias)
            return [t.unflatten(-1, (self.num_heads, self.head_dim)) for t in whole.chunk(3, dim=-1)]
        else:
            weights = self.in_proj_weight.chunk(3)
        projected = (linear(t, w, b) for t, w, b in zip((query, key, value), weights, biases, strict=True))
        return [t.unflatten(-1, (self.num_heads, self.head_dim)) for t in projected]

    def _extra_rows(self, k: torch.Tensor, v: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values behind the others, which every query sees: the learnt ones, and zeros."""
        rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self.bias_k is not None and self.bias_v is not None:
            shape = (1, 1, self.num_heads, self.head_dim)
            rows.append((self.bias_k.view(shape).to(k.dtype), self.bias_v.view(shape).to(v.dtype)))
        if self.add_zero_attn:
            rows.append((torch.zeros_like(k[:1, :1]), torch.zeros_like(v[:1, :1])))
        return rows

    def _mask_and_bias(
        self, q: torch.Tensor, len_k: int, extra: int, padding: _Maybe, attn_mask: _Maybe, is_causal: bool
    ) -> tuple[Mask | torch.Tensor | None, _Maybe]:
        """PyTorch's two masks in our terms: booleans, True where attention is allowed, and numbers to add."""
        batch, len_q = q.shape[:2]
        tensors = []
        if padding is not None:
            if padding.shape != (batch, len_k):
                raise ValueError(f"key_padding_mask must have shape {(batch, len_k)}, got {tuple(padding.shape)}")
            tensors.append(padding[:, None, None])
        causal = is_causal and not extra
        if causal:
            attn_mask = None  # it says the same
        elif is_causal and attn_mask is None:
            attn_mask = torch.ones(len_q, len_k, dtype=torch.bool, device=q.device).triu(1)
        if attn_mask is not None:
            shapes = ((len_q, len_k), (batch * self.num_heads, len_q, len_k))
            if attn_mask.shape not in shapes:
                raise ValueError(f"attn_mask must have shape {shapes[0]} or {shapes[1]}, got {tuple(attn_mask.shape)}")
            tensors.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (batch, self.num_heads)))
        forbidden, bias = None, None
        for t in tensors:
            t = pad(t, (0, extra)) if extra else t
            if t.dtype == torch.bool:
                forbidden = t if forbidden is None else forbidden | t
            else:
                bias = t if bias is None else bias + t
        if not causal:
            return (None if forbidden is None else ~forbidden), bias
        if forbidden is not None:  # beside a mask of ours booleans are numbers
            numbers = torch.zeros_like(forbidden, dtype=q.dtype).masked_fill(forbidden, -torch.inf)
            bias = numbers if bias is None else bias + numbers
        return causal_top_left, bias
