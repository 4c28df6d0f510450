"""flash-attn's functions for rotary position embedding, with gradients, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from strobe.compat import flash_terms
from strobe.nn.rotary import angles_of, frequencies, rotate
from strobe.problem.hints import InvalidArgument

_Offsets = int | torch.Tensor


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: _Offsets = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """x is (batch, length, heads, dim), or (total, heads, dim) with cu_seqlens; cos and sin are (positions,
    rotary_dim / 2). The positions of a sequence start at seqlen_offsets, an int or (batch,). With `inplace` the memory of
    x holds what is returned; go on with that, not with x: for autograd a leaf stays what it was."""
    cos, sin = _rows(x, cos, sin, seqlen_offsets, cu_seqlens)
    if not inplace:
        return rotate(x, cos, sin, interleaved)
    return _in_place(x, lambda t: _turn(t, cos, sin, interleaved))


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """cos and sin are (length, rotary_dim / 2) or (batch, length, rotary_dim / 2), a row for each of x."""
    return rotate(x, cos, sin, interleaved)


def apply_rotary_emb_qkv_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: _Offsets = 0,
    num_heads_q: int | None = None,
) -> torch.Tensor:
    """Rotates queries and keys in place. qkv is (batch, length, 3, heads, dim), or (batch, length, heads of q, k and v,
    dim) with num_heads_q."""
    if qkv.dim() == 4 and (num_heads_q is None or (qkv.shape[2] - num_heads_q) % 2):
        raise InvalidArgument(
            f"num_heads_q must leave as many heads of k as of v in {tuple(qkv.shape)}, got {num_heads_q}"
        )
    for_q = _rows(qkv, cos, sin, seqlen_offsets, None)
    for_k = _rows(qkv, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, seqlen_offsets, None)

    def turn(t: torch.Tensor) -> torch.Tensor:
        if t.dim() == 5:
            q, k = t[:, :, 0], t[:, :, 1]
        else:
            heads_k = (t.shape[2] - num_heads_q) // 2  # type: ignore[operator]
            q, k = t[:, :, :num_heads_q], t[:, :, num_heads_q : num_heads_q + heads_k]  # type: ignore[operator]
        _turn(q, *for_q, interleaved)
        _turn(k, *for_k, interleaved)
        return t

    return _in_place(qkv, turn)


def apply_rotary_emb_kv_(
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    seqlen_offsets: _Offsets = 0,
) -> torch.Tensor:
    """Rotates the keys of kv (batch, length, 2, heads, dim) in place."""
    cos, sin = _rows(kv, cos, sin, seqlen_offsets, None)

    def turn(t: torch.Tensor) -> torch.Tensor:
        _turn(t[:, :, 0], cos, sin, interleaved)
        return t

    return _in_place(kv, turn)


def _turn(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return t.copy_(rotate(t, cos, sin, interleaved))


def _in_place(t: torch.Tensor, turn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`turn(t)`, which writes into t. Autograd forbids writing into a leaf, or through a view of one. There the result
    is a function of the old t, and its numbers are copied into t without autograd's knowledge."""
    recorded = not (torch.is_grad_enabled() and t.requires_grad and _is_of_leaf(t))
    if recorded:
        return turn(t)
    turned = turn(t.clone())
    with torch.no_grad():
        t.copy_(turned)
    return turned


def _is_of_leaf(t: torch.Tensor) -> bool:
    if t._base is None:
        return t.is_leaf
    return torch.compiler.is_dynamo_compiling() or t._base.is_leaf  # the compiler does not know what a view is of


def _rows(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, offsets: _Offsets, cu: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for each row of x."""
    if not isinstance(offsets, torch.Tensor) or offsets.dim() == 0:
        offsets = flash_terms.integer("seqlen_offsets", offsets)
    if cu is None:
        length = x.shape[1]
        if not isinstance(offsets, torch.Tensor):
            if offsets < 0 or offsets + length > cos.shape[0]:
                raise InvalidArgument(
                    f"seqlen_offsets must be from 0 to {cos.shape[0] - length}: x has {length} rows and the tables have "
                    f"{cos.shape[0]}; got {offsets}"
                )
            return cos[offsets : offsets + length], sin[offsets : offsets + length]
        flash_terms.check_counts("seqlen_offsets", offsets, x.shape[0], 0, cos.shape[0] - length)
        return flash_terms.rotary_rows(cos, sin, offsets[:, None] + torch.arange(length, device=x.device))
    row = torch.arange(x.shape[0], device=x.device)
    sequence = torch.bucketize(row, cu[1:], right=True)
    at = row - cu[sequence] + (offsets[sequence] if isinstance(offsets, torch.Tensor) else offsets)
    return flash_terms.rotary_rows(cos, sin, at)


class RotaryEmbedding(torch.nn.Module):
    """Rotates queries and keys of (batch, length, 3, heads, dim), or queries and the keys of (batch, length, 2, heads,
    dim), in place. cos and sin are made for as many positions as were needed so far."""

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        if scale_base is not None:
            raise InvalidArgument(f"scale_base must be None: XPos is not supported, got {scale_base}")
        self.dim, self.base, self.interleaved, self.scale = dim, float(base), interleaved, None
        self.register_buffer("inv_freq", frequencies(dim, self.base, device), persistent=False)
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def _rows(self, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tables = self._tables
        if (
            tables is None
            or tables[0].shape[0] < length
            or tables[0].device != like.device
            or tables[0].dtype != like.dtype
            or (tables[0].is_inference() and not torch.is_inference_mode_enabled())  # training cannot save those
        ):
            turns = self.get_buffer("inv_freq").to(like.device)  # perhaps scaled by the user
            if turns.dtype != torch.float32:  # rounded with the module
                turns = frequencies(self.dim, self.base, like.device)
            self._tables = tables = angles_of(torch.arange(length, device=like.device), turns, like.dtype)
        return tables

    def forward(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor | None = None,
        seqlen_offset: _Offsets = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        if max_seqlen is None:
            if not isinstance(seqlen_offset, int):
                raise InvalidArgument("max_seqlen must be given with a tensor of offsets")
            max_seqlen = qkv.shape[1] + seqlen_offset
        cos, sin = self._rows(max_seqlen, qkv)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, None, None, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos, sin, self.interleaved, seqlen_offset)
