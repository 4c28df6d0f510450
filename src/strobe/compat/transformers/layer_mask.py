"""`LayerMask`: what the queries of a layer may look at, without the length × length booleans.

transformers makes a mask once per forward pass and hands it to every layer. Ours says it in the library's terms: an
interval mask, where the sequences begin and end in their buffers, which keys are padding, which tokens belong together.
A model that does not just hand it on but computes with it (slices it, adds to it) gets the booleans after all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask

from strobe.mask import Mask, Positions


class Documents(NamedTuple):
    """Sequences packed into the rows of a batch, (batch * length) tokens in all."""

    cu: torch.Tensor  # (sequences + 1,) int32
    longest: int


class LayerMask(BlockMask):
    """A `BlockMask` by inheritance alone: that is the one type besides tensors that transformers takes for a mask that is
    ready. It has no blocks."""

    def __init__(
        self,
        mask: Mask,
        shape: tuple[int, int, int],  # batch, len_q, len_k
        device: Any,
        *,
        keys: int | None = None,
        positions: torch.Tensor | None = None,
        padding: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        document_of: torch.Tensor | None = None,
    ) -> None:
        self.mask = mask
        self.keys = keys  # nobody sees the keys from here on; None: all may be seen
        self.positions = positions  # (batch, 4), see `strobe.mask.Positions`
        self.padding = (
            padding  # (batch, len_k), True where a key may be seen; None if `mask` and `positions` say it all
        )
        self.bias = None  # the same, to be added
        if padding is not None:
            nothing = torch.zeros((), dtype=dtype, device=padding.device)
            self.bias = torch.where(padding, nothing, -torch.inf)[:, None, None, :keys]
        self.document_of = document_of  # (batch, len_q), a number for each token
        self._documents: Documents | None = None
        self._shape = (shape[0], 1, shape[1], shape[2])
        self.device = torch.device(device)

    @property
    def shape(self) -> Any:
        return torch.Size(self._shape)

    @property
    def ndim(self) -> int:
        return 4

    @property
    def dtype(self) -> torch.dtype:
        return torch.bool

    def dim(self) -> int:
        return 4

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self._shape[axis]

    def numel(self) -> int:
        return self.shape.numel()

    def __repr__(self) -> str:
        return f"LayerMask({self.mask!r}, shape={tuple(self._shape)})"

    __str__ = __repr__

    def documents(self) -> Documents | None:
        """Where the packed sequences begin; found when a layer asks first."""
        if self.document_of is None:
            return None
        if self._documents is None:
            of = self.document_of
            starts = torch.ones(of.shape, dtype=torch.bool, device=of.device)
            starts[:, 1:] = of[:, 1:] != of[:, :-1]  # the rows of a batch are never one sequence
            first = starts.flatten().nonzero().flatten().to(torch.int32)
            cu = torch.cat((first, first.new_full((1,), of.numel())))
            self._documents = Documents(cu, int(cu.diff().max()))
        return self._documents

    def dense(self) -> torch.Tensor:
        """The booleans, (batch, 1, len_q, len_k)."""
        batch, _, len_q, len_k = self._shape
        keys = len_k if self.keys is None else self.keys
        at = [None] * batch if self.positions is None else [Positions(*p) for p in self.positions.tolist()]
        found = torch.zeros((batch, 1, len_q, len_k), dtype=torch.bool, device=self.device)
        for i, positions in enumerate(at):
            found[i, 0, :, :keys] = self.mask.dense(len_q, keys, self.device, positions)
        if self.padding is not None:
            found &= self.padding[:, None, None, :]
        if self.document_of is not None:
            found &= (self.document_of[:, :, None] == self.document_of[:, None, :])[:, None]
        return found

    def to_dense(self) -> torch.Tensor:
        return self.dense()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """On another device it is the same; in another dtype it is a tensor."""
        target = torch.empty(0, dtype=torch.bool, device=self.device).to(*args, **kwargs)
        if target.dtype != torch.bool:
            return self.dense().to(*args, **kwargs)
        if target.device == self.device:
            return self
        moved = object.__new__(LayerMask)
        moved.__dict__ = {
            n: v.to(target.device) if isinstance(v, torch.Tensor) else v for n, v in self.__dict__.items()
        }
        moved.device, moved._documents = target.device, None
        return moved

    # ---- for those who compute with it -----------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        return self.dense()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(x: Any) -> Any:
            if isinstance(x, LayerMask):
                return x.dense()
            return type(x)(map(plain, x)) if isinstance(x, (list, tuple)) else x

        return function(*map(plain, args), **{name: plain(x) for name, x in (kwargs or {}).items()})

    def __and__(self, other: Any) -> Any:
        return self.dense() & other

    def __or__(self, other: Any) -> Any:
        return self.dense() | other

    def __invert__(self) -> torch.Tensor:
        return ~self.dense()

    def __eq__(self, other: object) -> Any:
        return self is other if other is None or isinstance(other, LayerMask) else self.dense() == other

    __hash__ = object.__hash__
