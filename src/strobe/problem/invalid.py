"""The error of functions that stand in for others' functions, which raise RuntimeErrors where ours are more precise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


class InvalidArgument(TypeError, ValueError, RuntimeError):
    """An argument that makes no sense. PyTorch's and flash-attn's kernels say so with a RuntimeError, and callers who try
    something else then catch that; ours are TypeErrors and ValueErrors. This is all of them."""


def raises_as_hosts(function: _Function) -> _Function:
    """The function, whose TypeErrors and ValueErrors are RuntimeErrors as well."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # which reports errors in its own way
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            if isinstance(error, RuntimeError):
                raise
            raise InvalidArgument(str(error)) from error

    return call  # type: ignore[return-value]
