"""`attend`, the one way from the arguments of a call to its result.

Every door comes through here: `strobe.attention`, `attention_varlen` and `attention_paged`, `strobe.sdpa`, the plug-ins, and
`strobe.distributed` where one rank holds everything. What stands below autograd takes `piece.py` instead.
"""

from __future__ import annotations

import sys
from types import NoneType
from typing import Any

import torch

from strobe.call import autograd, traced
from strobe.call.bound_call import lookup, remembered, signature
from strobe.problem.arguments import PLAIN, Arguments
from strobe.problem.resolve import completed, resolved
from strobe.variants.mask import Mask
from strobe.variants.score import Score

_PLAIN_MASKS, _PLAIN_SCORES = (NoneType, Mask, *PLAIN), (NoneType, Score)
# As names of this module: a repeated call asks each of them.
_is_compiling = torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._is_tracing
_autocasting = torch._C._is_any_autocast_enabled
_transforming = torch._C._are_functorch_transforms_active


def attend(a: Arguments) -> Any:
    """The output, or (output, LSE) if `a.return_lse`."""
    mask = a.mask
    has_condition = mask.__class__ is Mask and mask.rest is not None
    if has_condition or mask.__class__ not in _PLAIN_MASKS or a.score.__class__ not in _PLAIN_SCORES:
        a = resolved(a)
    q = a.q
    if q.__class__ not in PLAIN or a.k.__class__ not in PLAIN or a.v.__class__ not in PLAIN:
        refuse_sharded(a)
        if traced.is_traced(q):
            return traced.attention(a)
    if _is_compiling():
        return traced.attention(a) if traced.is_expressible(a) else _uncompiled(a)
    if _dispatch_modes() or _tracing():
        return traced.attention(a)
    if _autocasting() and (cast := autograd.cast_for_autocast(a)) is not a:
        with autograd.without_autocast(q.device):
            return attend(cast)
    if a.cu_q is not None or a.dropout:
        a = completed(a)
    if _transforming():  # inside torch.func every call is differentiable, and shapes are not those of the memory
        out, lse = autograd.attention_in_transforms(a)
        return (out, lse) if a.return_lse else out
    try:
        bound = remembered.calls.get(signature(a))
    except (RuntimeError, TypeError):  # without strides, or not to be hashed: the checks say what is wrong
        bound = None
    if bound is None:  # the first call of its kind, or one that is not remembered
        bound = lookup(a)
    if bound.differentiable:
        return autograd.attention(bound, a)
    out, lse = bound.forward.run(a)
    return (out, lse) if a.return_lse else out


@getattr(torch, "_disable_dynamo", torch.compiler.disable)  # `_disable_dynamo` loads the compiler when it is needed
def _uncompiled(a: Arguments) -> Any:
    """Breaks the graph of a compiled function."""
    return attend(a)


def is_sharded(t: Any) -> bool:
    """Return whether it is a DTensor. There is none unless the caller has imported their module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def refuse_sharded(a: Arguments) -> None:
    """Raises for a DTensor: kernels read memory, and a DTensor stands for that of several ranks."""
    for name, t in (("q", a.q), ("k", a.k), ("v", a.v)):
        if is_sharded(t):
            way_out = "call it on local tensors (to_local()), or strobe.sdpa, which takes DTensors"
            raise TypeError(f"{name} is a DTensor with placements {tuple(t.placements)}; {way_out}")
