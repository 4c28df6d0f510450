"""Running a call where nothing traces it: look it up, bind it if it is new, and run what was bound."""

from __future__ import annotations

from typing import Any

import torch

from strobe.call import autograd
from strobe.call.bound_call import bind, lookup
from strobe.problem.arguments import Arguments
from strobe.problem.checks import with_longest
from strobe.problem.page_checks import check_call
from strobe.variants.dropout import new_seed

_transforming = torch._C._are_functorch_transforms_active


def run(a: Arguments) -> Any:
    """The result of `strobe.attention` or, if there is a `cu_q`, `attention_varlen`."""
    if a.cu_q is not None or a.dropout:
        a = _completed(a)
    if _transforming():  # inside torch.func every call is differentiable, and shapes are not those of the memory
        out, lse = autograd.attention_in_transforms(bind(a, needs_grad=True), a)
    else:
        bound = lookup(a)
        if a.lengths is not None and a.lengths.is_cpu:
            check_call(a, bound.problem.mask)
        if bound.differentiable:
            return autograd.attention(bound, a)
        out, lse = bound.forward.run(a)
    return (out, lse) if a.return_lse else out


def _completed(a: Arguments) -> Arguments:
    """The arguments with the lengths of the longest sequences, and a seed that follows torch.manual_seed."""
    if a.cu_q is not None:
        a = with_longest(a)
    if a.dropout and a.seed is None:
        a = a._replace(seed=new_seed(a.q.device))
    return a


def cast_for_autocast(a: Arguments) -> Arguments:
    """q, k and v as autocast hands them to PyTorch's own attention: 64-bit tensors and tensors on other devices stay as
    they are."""
    dtype = torch.get_autocast_dtype(a.q.device.type)

    def cast(t: Any) -> Any:
        eligible = isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype != torch.float64
        return t.to(dtype) if eligible and t.device.type == a.q.device.type else t

    return a._replace(q=cast(a.q), k=cast(a.k), v=cast(a.v))
