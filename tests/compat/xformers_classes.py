"""xformers' classes of biases as far as `strobe.compat.xformers` looks at them: names and attributes. xformers is seldom
installed; where it is, the tests take its own classes as well."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class SeqInfo:
    seqstart: torch.Tensor
    max_seqlen: int
    seqstart_py: list[int]


@dataclass
class KeysInfo(SeqInfo):
    """The lengths of padded and gappy keys: `seqlen` of them are in use."""

    seqlen: torch.Tensor
    seqlen_py: list[int]


def rows(lengths: Sequence[int]) -> SeqInfo:
    starts = list(itertools.accumulate(lengths, initial=0))
    return SeqInfo(torch.tensor(starts, dtype=torch.int32), max(lengths), starts)


def keys(starts: Sequence[int], lengths: Sequence[int]) -> KeysInfo:
    used = torch.tensor(lengths, dtype=torch.int32)
    return KeysInfo(torch.tensor(starts, dtype=torch.int32), max(lengths), list(starts), used, list(lengths))


class LowerTriangularMask(torch.Tensor):
    """A tensor without numbers, around another one, as in xformers: its compiled graphs take such tensors apart."""

    _subtensor: torch.Tensor

    @staticmethod
    def __new__(cls, *, _subtensor: torch.Tensor | None = None) -> Any:
        return _around(cls, torch.empty(0) if _subtensor is None else _subtensor, ())

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}()"

    def __tensor_flatten__(self) -> Any:
        return ["_subtensor"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> Any:
        return cls(_subtensor=inner["_subtensor"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.detach, torch.ops.aten.clone):
            return cls(_subtensor=func(args[0]._subtensor))
        return NotImplemented


class LowerTriangularFromBottomRightMask:
    pass


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    @staticmethod
    def __new__(cls, bias: torch.Tensor) -> Any:
        return _around(cls, bias, bias.shape)


def _around(cls: type, inner: torch.Tensor, shape: Sequence[int]) -> Any:
    options = {"dtype": inner.dtype, "device": inner.device, "requires_grad": inner.requires_grad}
    outer = torch.Tensor._make_wrapper_subclass(cls, shape, **options)  # type: ignore[attr-defined]
    outer._subtensor = inner
    return outer


torch._dynamo.allow_in_graph(LowerTriangularMask)
torch._dynamo.allow_in_graph(LowerTriangularMaskWithTensorBias)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask:
    _window_size: int


@dataclass
class LocalAttentionFromBottomRightMask:
    window_left: int
    window_right: int


@dataclass
class BlockDiagonalMask:
    q_seqinfo: Any
    k_seqinfo: Any

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int]) -> Any:
        return cls(rows(q_seqlen), rows(kv_seqlen))

    def make_causal(self) -> Any:
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo)

    def make_causal_from_bottomright(self) -> Any:
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo)

    def make_local_attention(self, window_size: int) -> Any:
        return BlockDiagonalCausalLocalAttentionMask(self.q_seqinfo, self.k_seqinfo, window_size)

    def make_local_attention_from_bottomright(self, window_size: int) -> Any:
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, window_size)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    pass


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    pass


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    _window_size: int = 0


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    _window_size: int = 0


@dataclass
class BlockDiagonalPaddedKeysMask:
    q_seqinfo: Any
    k_seqinfo: Any

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int]) -> Any:
        starts = range(0, kv_padding * len(kv_seqlen) + 1, kv_padding)
        return cls(rows(q_seqlen), keys(starts, kv_seqlen))


class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    pass


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    window_left: int
    window_right: int

    @classmethod
    def from_seqlens_local(cls, q: Sequence[int], padding: int, k: Sequence[int], left: int, right: int) -> Any:
        plain = BlockDiagonalPaddedKeysMask.from_seqlens(q, padding, k)
        return cls(plain.q_seqinfo, plain.k_seqinfo, left, right)


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    _window_size: int

    @classmethod
    def from_seqlens_local(cls, q: Sequence[int], padding: int, k: Sequence[int], size: int) -> Any:
        plain = BlockDiagonalPaddedKeysMask.from_seqlens(q, padding, k)
        return cls(plain.q_seqinfo, plain.k_seqinfo, size)


@dataclass
class BlockDiagonalGappyKeysMask:
    q_seqinfo: Any
    k_seqinfo: Any

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqstarts: Sequence[int], kv_seqlen: Sequence[int]) -> Any:
        return cls(rows(q_seqlen), keys(kv_seqstarts, kv_seqlen))


class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    pass


class PagedBlockDiagonalPaddedKeysMask:
    pass
