"""Symbols stand for values in a traced function: numbers, rows of a few numbers, and tensors that are not indexed to the end.

Each hands what is done to it to its `Tracer` (`tracer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from strobe.variants.expression import Expr
from strobe.variants.torch_names import BINARY, COMPARE

_TRUTH = "Python asks whether a value is true (if, and, or, not, min, max); use torch.where, &, |, ~, torch.minimum"
_NUMBER = "Python asks for a number; use torch functions, .int() or .float(), and a tensor for a list"


class Traced:
    """A value in a traced function. It writes down what is done to it."""

    __array_ufunc__ = None  # numpy's numbers leave `x * symbol` to us
    __hash__ = object.__hash__  # `==` is an operation

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    @classmethod  # functions of torch with one of these among their arguments come here, and so does `tensor[symbol]`
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.where:
            args = (args[1], args[0], *args[2:])
        return next(_traced((args, kwargs)))._tracer.call(func.__name__, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "where":  # its condition comes second, torch.where's comes first
            return lambda c, *other: self._tracer.call(name, (c, self, *other), {})
        return lambda *args, **kwargs: self._tracer.call(name, (self, *args), kwargs)

    def __bool__(self) -> bool:
        raise self._tracer.error(_TRUTH)


class Symbol(Traced):
    """A number."""

    shape, ndim, requires_grad = torch.Size(()), 0, False

    def __init__(self, tracer: Any, expr: Expr) -> None:
        super().__init__(tracer)
        self._expr, self.kind, self.device = expr, expr.kind, tracer.device
        self.dtype = (torch.bool, torch.int32, torch.int64, torch.float32)[expr.kind]

    def operand_like(self, x: Any) -> Symbol:
        """Another operand as a symbol."""
        return Symbol(self._tracer, self._tracer.operand(x))

    def entries(self, x: Any) -> list[Symbol]:
        """A tensor's numbers, each as a symbol."""
        return self._tracer.entries(x)


class Row(Traced):
    """A few numbers, which are computed one by one."""

    def __init__(self, tracer: Any, items: list[Symbol]) -> None:
        super().__init__(tracer)
        self.items = items

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and -len(self.items) <= index < len(self.items):
            return self.items[index]
        raise self._tracer.error(f"a row of {len(self.items)} numbers is indexed with {index!r}")


class Partial(Traced):
    """A captured tensor of which some axes are still to be indexed."""

    def __init__(self, tracer: Any, tensor: torch.Tensor, index: tuple[Expr, ...]) -> None:
        super().__init__(tracer)
        self._tensor, self._index = tensor, index

    def __getitem__(self, index: Any) -> Any:
        return self._tracer.load(self._tensor, self._index, index)

    @property
    def items(self) -> list[Symbol]:
        return self._tracer.entries(self._tensor, self._index)


def _operator(name: str) -> Callable:
    return lambda self, *others: self._tracer.call(name, (self, *others), {})


def _refused(what: str) -> Callable:
    def method(self: Symbol, *_: Any) -> Any:
        raise self._tracer.error(what)

    return method


for _name in (*BINARY, *("r" + name for name in BINARY), *COMPARE, "neg", "pos", "abs", "invert", "matmul", "rmatmul"):
    setattr(Traced, f"__{_name}__", _operator(f"__{_name}__"))
setattr(Symbol, "__getitem__", _operator("__getitem__"))  # noqa: B010
for _name in (
    "__int__",
    "__float__",
    "__index__",
    "item",
    "tolist",
    "__iter__",
    "__len__",
    "__contains__",
    "__setitem__",
):
    setattr(Traced, _name, _refused(_NUMBER))


def _traced(x: Any) -> Iterator[Traced]:
    if isinstance(x, Traced):
        yield x
    elif isinstance(x, (tuple, list, dict)):
        for item in x.values() if isinstance(x, dict) else x:
            yield from _traced(item)


class SymbolsAsTensors(TorchFunctionMode):
    """Lets the functions that make a tensor of anything take a symbol."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.as_tensor, torch.tensor, torch.asarray) or not args or not isinstance(args[0], Traced):
            return func(*args, **kwargs)
        dtype = kwargs.get("dtype", args[1] if len(args) > 1 else None)
        return args[0] if dtype is None else args[0].to(dtype)
