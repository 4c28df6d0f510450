"""`LayerMask`: what the queries of a layer may look at, mostly without the length × length booleans.

transformers makes a mask once per forward pass and hands it to every layer. Ours says it in the library's terms: an
interval mask, where the sequences begin and end in their buffers, which keys are padding, which tokens belong together.
A mask that cannot be said like that holds booleans.

A model may also compute with its mask. What means the same for booleans as for numbers that are added to scores (a slice,
a mask as a condition) is done, with booleans. Everything else raises: a layer that adds its mask to the scores, as layers
with attention of their own do, would hide nothing by adding booleans.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from strobe.problem import Unsupported
from strobe.variants.mask import Mask, Positions, full

# Where a mask is a condition: the argument's place (a method's own tensor is at 0) and keyword.
_CONDITIONS: dict[Any, tuple[int, str]] = {
    torch.where: (0, "condition"),
    torch.Tensor.where: (1, "condition"),
    torch.masked_fill: (1, "mask"),
    torch.Tensor.masked_fill: (1, "mask"),
    torch.Tensor.masked_fill_: (1, "mask"),
    torch.masked_select: (1, "mask"),
    torch.Tensor.masked_select: (1, "mask"),
    torch.Tensor.__getitem__: (1, ""),
    torch.Tensor.__setitem__: (1, ""),
}
# What may be done with a mask itself, by name: other shapes, the logic that numbers do not have. Not `bool`, which is True
# where a key may be seen, but where it is hidden if numbers are added; and no `any` or `logical_not`, for the same reason.
_SHAPES_AND_LOGIC = frozenset(
    """__getitem__ expand expand_as broadcast_to unsqueeze squeeze view reshape flatten unflatten permute transpose movedim
    repeat repeat_interleave tile contiguous clone detach chunk split narrow select index_select gather flip roll
    cat concat concatenate stack cpu cuda cumsum bitwise_and bitwise_or bitwise_xor bitwise_not
    __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __invert__""".split()  # noqa: SIM905
)
_OF_ITS_SHAPE = frozenset(
    """zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full stride is_floating_point is_complex
    is_contiguous get_device element_size""".split()  # noqa: SIM905
)


class Documents(NamedTuple):
    """Sequences packed into the rows of a batch, (batch * length) tokens in all."""

    cu: torch.Tensor  # (sequences + 1,) int32
    longest: int


class LayerMask:
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
        self.positions = positions  # (batch, 4), see `strobe.variants.mask.Positions`
        # (batch, len_k), True where a key may be seen; None if `mask` and `positions` say it all
        self.padding = padding
        self.bias = None  # the same, to be added
        if padding is not None:
            nothing = torch.zeros((), dtype=dtype, device=padding.device)
            self.bias = torch.where(padding, nothing, -torch.inf)[:, None, None, :keys]
        self.document_of = document_of  # (batch, len_q), a number for each token
        self._documents: Documents | None = None
        self.booleans: torch.Tensor | None = None
        self._shape = torch.Size((shape[0], 1, shape[1], shape[2]))
        self.device = torch.device(device)

    @classmethod
    def of(cls, booleans: torch.Tensor) -> LayerMask:
        """A mask that is these booleans, True where a key may be seen, and nothing else."""
        made = cls(full, (0, 0, 0), booleans.device)
        made.booleans, made._shape = booleans, booleans.shape
        return made

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def ndim(self) -> int:
        return len(self._shape)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bool

    def dim(self) -> int:
        return len(self._shape)

    def size(self, axis: int | None = None) -> Any:
        return self._shape if axis is None else self._shape[axis]

    def numel(self) -> int:
        return self._shape.numel()

    def __repr__(self) -> str:
        said = repr(self.mask) if self.booleans is None else "booleans"
        return f"LayerMask({said}, shape={tuple(self._shape)})"

    __str__ = __repr__

    def shows_all(self) -> bool:
        """No key is hidden from any query. Eager attention has no mask then, or one zero that is added to every score: it
        shows as many keys as there are."""
        says_more = (self.keys, self.positions, self.padding, self.document_of, self.booleans)
        if any(x is not None for x in says_more):
            return False
        return self.mask == full or (self._shape[2:] == (1, 1) and self.mask.hides_nothing(1, 1))

    def documents(self) -> Documents | None:
        """Return where the packed sequences begin; found when a layer asks first."""
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
        if self.booleans is not None:
            return self.booleans
        batch, _, len_q, len_k = self._shape
        keys = len_k if self.keys is None else self.keys
        at = [None] * batch if self.positions is None else [Positions(*p) for p in self.positions.tolist()]
        dense = torch.zeros((batch, 1, len_q, len_k), dtype=torch.bool, device=self.device)
        for i, positions in enumerate(at):
            dense[i, 0, :, :keys] = self.mask.dense(len_q, keys, device=self.device, at=positions)
        if self.padding is not None:
            dense &= self.padding[:, None, None, :]
        if self.document_of is not None:
            dense &= (self.document_of[:, :, None] == self.document_of[:, None, :])[:, None]
        return dense

    def to_dense(self) -> torch.Tensor:
        return self.dense()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move the mask to another device, where it is the same; in another dtype, or as booleans of whatever it was,
        it is refused."""
        target = torch.empty(0, dtype=torch.bool, device=self.device).to(*args, **kwargs)
        if target.dtype != torch.bool or torch.bool in (*args, kwargs.get("dtype")):
            return _computed(torch.Tensor.to, (self, *args), kwargs)
        if target.device == self.device:
            return self
        moved = object.__new__(LayerMask)
        moved.__dict__ = {
            n: v.to(target.device) if isinstance(v, torch.Tensor) else v for n, v in self.__dict__.items()
        }
        moved.device, moved._documents = target.device, None
        return moved

    # ---- for those who compute with it -----------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        function = getattr(torch.Tensor, name)
        return functools.partial(_method, function, self) if callable(function) else getattr(self.dense(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(function, args, kwargs or {})

    def __getitem__(self, index: Any) -> Any:
        return _computed(torch.Tensor.__getitem__, (self, index), {})

    def __eq__(self, other: object) -> Any:
        if other is None or isinstance(other, LayerMask):
            return self is other
        return _computed(torch.Tensor.__eq__, (self, other), {})

    __hash__ = object.__hash__


def _method(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _computed(function, args, kwargs)


def _operator(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: _computed(function, args, {})


for _name in """__and__ __rand__ __or__ __ror__ __xor__ __rxor__ __invert__ __setitem__ __lt__ __le__ __gt__ __ge__
    __neg__ __abs__ __float__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__
    __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __matmul__ __rmatmul__""".split():  # noqa: SIM905
    setattr(LayerMask, _name, _operator(getattr(torch.Tensor, _name)))


def _computed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function makes of masks among its arguments, if it means the same for booleans as for numbers to
    add."""
    name = function.__name__
    if name in _OF_ITS_SHAPE or _is_condition(function, args, kwargs):
        return function(*map(_plain, args), **{n: _plain(x) for n, x in kwargs.items()})
    if name in _SHAPES_AND_LOGIC:
        result = function(*map(_plain, args), **{n: _plain(x) for n, x in kwargs.items()})
        parts = list(result) if isinstance(result, (list, tuple)) else [result]
        if not any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in parts):
            return type(result)(map(_again, result)) if isinstance(result, (list, tuple)) else _again(result)
    raise Unsupported(
        f"the model computes with its attention mask ({name}): strobe's masks are booleans, and it expects numbers that are "
        'added to scores; load the model with attn_implementation="eager"'
    )


def _is_condition(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    place, keyword = _CONDITIONS.get(function, (-1, ""))
    others = [x for i, x in enumerate(args) if i != place] + [x for n, x in kwargs.items() if n != keyword]
    return place >= 0 and not any(isinstance(x, LayerMask) for x in others)


def _plain(x: Any) -> Any:
    if isinstance(x, LayerMask):
        return x.dense()
    return type(x)(map(_plain, x)) if type(x) in (list, tuple) else x


def _again(x: Any) -> Any:
    """Booleans that were made of a mask are a mask: they must not be added, either."""
    return LayerMask.of(x) if isinstance(x, torch.Tensor) and x.dtype == torch.bool and x.dim() else x
