"""What a backend is: a name, what it cannot do, and how it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from strobe.problem import Inputs, Problem


class Gradients(NamedTuple):
    """Of one attention call, each in its input's shape; `None` where the input does not need one."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


Forward = Callable[[Problem, Inputs, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor | None]]
Backward = Callable[[Problem, Inputs, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], Gradients]


def _nothing(problem: Problem) -> dict[str, object]:
    return {}


@dataclass(frozen=True)
class Backend:
    """`forward(problem, inputs, out)` returns (out, lse) in (batch, heads, len_q, dim_v) and (batch, heads, len_q)
    order, writing into `out` when it is given. `backward(problem, inputs, out, lse, dout, dlse)` is left to `tiled`
    when
    missing."""

    name: str
    summary: str
    supports: Callable[[Problem], str | None]  # None, or the reason why not; it also checks what the machine offers
    forward: Forward
    backward: Backward | None = None
    details: Callable[[Problem], dict[str, object]] = field(default=_nothing)  # tiles, threads, … for `explain`
    extra_bytes: Callable[[Problem], int] = field(default=lambda problem: 0)  # workspace beyond inputs, output and LSE
    automatic: bool = True  # may be chosen without being named
    # (problem, inputs, layout, return_lse) -> a function of (q, k, v) alone for further calls like this one; see
    # api.py, which asks for calls that need gradients on CPUs only
    repeat: Callable[[Problem, Inputs, str, bool], Callable[..., Any] | None] | None = None
