"""A function that is traced once and kept must not keep what its tensors held in that moment.

Entries that the trace reads are read again in every call. What torch computes from a captured tensor while the function runs
is computed once: after a change of that tensor it would be stale, and a second backward pass through it would raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WAYS_OUT = (
    "compute with its entries (table[h] * 2), or pass the function itself as score= or mask=, traced in every call"
)


class NothingDerived(TorchDispatchMode):
    """Let operations of torch make tensors in this block, compute with those, and look at captured tensors in another
    way (views). An operation that reads or writes a captured tensor raises."""

    def __init__(self, error: Callable[[str], Exception]) -> None:
        super().__init__()
        self._error = error
        self._refused: Exception | None = None
        self._tensors: dict[int, torch.Tensor] = {}  # memory that was made in the block -> a tensor, which keeps it

    def is_captured(self, tensor: torch.Tensor) -> bool:
        return _memory(tensor) not in self._tensors

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if self._refused is not None:  # Python makes another error of one that is raised inside of `2 * table`
            raise self._refused from None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        captured = [t for t in _tensors((args, kwargs)) if self.is_captured(t)]
        is_new = func is torch.ops.aten.lift_fresh.default  # torch.tensor([1, 2]) has made it
        if captured and not is_new and not _is_view(func):
            name = func.__name__.split(".")[0]
            shape = tuple(captured[0].shape)
            self._refused = self._error(
                f"{name!r} of a captured tensor of shape {shape} would be computed once and kept, whatever the tensor "
                f"holds later; {_WAYS_OUT}"
            )
            raise self._refused
        result = func(*args, **kwargs)
        if is_new or not captured:
            self._tensors.update((_memory(t), t) for t in _tensors(result))
        return result


def _is_view(func: Any) -> bool:
    aliases = [returned.alias_info for returned in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (tuple, list, dict)):
        for item in x.values() if isinstance(x, dict) else x:
            yield from _tensors(item)
