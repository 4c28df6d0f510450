"""A forward and a backward below autograd, for callers who differentiate by themselves.

They attend piece by piece: flash-attn's kernels, PyTorch's operators, a rank of a ring. A backward takes the output and the
LSE of the whole, whatever part of the keys its call has.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from strobe.backends.backend import Gradients
from strobe.call import autograd
from strobe.call.bound_call import lookup
from strobe.problem.arguments import Arguments
from strobe.problem.resolve import completed


class Result(NamedTuple):
    out: torch.Tensor
    lse: Any  # None if the arguments did not ask for it
    seed: int | None  # of dropout: the caller's, or the one that was drawn


def forward(a: Arguments) -> Result:
    """The result of a call, which autograd does not see."""
    a = completed(a)
    with torch.no_grad(), autograd.without_autocast(a.q.device):
        if torch._C._are_functorch_transforms_active():
            out, lse = autograd.attention_in_transforms(a)
        else:
            out, lse = lookup(a).forward.run(a)
    return Result(out, lse, a.seed)


def backward(
    a: Arguments,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None = None,
    gradients: tuple[str, ...] = ("q", "k", "v"),
) -> Gradients:
    """These gradients (`arguments.gradient_names`) of a call. With dropout the arguments have the forward's seed."""
    a = completed(a)
    with torch.no_grad(), autograd.without_autocast(a.q.device):
        return lookup(a).backward(gradients, a, out, lse, dout, dlse)
