"""What a backend is: a name, what it cannot do, and how it is bound to a problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from strobe.arguments import Arguments, Inputs, Layout
from strobe.problem import Problem


class Gradients(NamedTuple):
    """Of one attention call, each in its input's shape; `None` where none is wanted."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


class Forward(Protocol):
    """Bound to a problem and a layout: a function of the caller's tensors. It writes into `a.out` if that is given."""

    def __call__(self, a: Arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, lse), in the caller's layout."""


class Backward(Protocol):
    """The same for the gradients that the problem names; everything is in the caller's layout."""

    def __call__(
        self, a: Arguments, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Gradients: ...


def _nothing(problem: Problem) -> dict[str, object]:
    return {}


@dataclass(frozen=True)
class Backend:
    """`bind(problem, layout)` gives a `Forward`, or a `Backward` if the problem asks for gradients. It is the only way
    to run a backend; it may compile, allocate and remember, so that what it gives is fast."""

    name: str
    summary: str
    limits: Callable[[Problem], str | None]  # why its code cannot do this, whatever the machine; None if it can
    bind: Callable[[Problem, Layout], Any]
    machine: Callable[[torch.device], str | None] = field(default=lambda device: None)  # what is missing here
    details: Callable[[Problem], dict[str, object]] = field(default=_nothing)  # tiles, threads, … for `explain`
    extra_bytes: Callable[[Problem], int] = field(default=lambda problem: 0)  # besides inputs, output and LSE
    automatic: bool = True  # may be chosen without being named
    merges: bool = False  # its forward pass takes an `earlier_lse`
    # Whether it takes an `earlier_out`, too, and had better for a problem that it could merge.
    finishes: Callable[[Problem], bool] = field(default=lambda problem: False)

    def supports(self, problem: Problem) -> str | None:
        """None, or the reason why not."""
        if problem.earlier_lse is not None and not self.can_merge(problem):
            return "an earlier result to merge into"
        reason = self.limits(problem) or self.machine(problem.device)
        if reason is None and problem.earlier_out is not None and not self.finishes(problem):
            return "an earlier result that is merged and rounded"
        return reason

    def can_merge(self, problem: Problem) -> bool:
        """Whether it could merge the result of this problem, which it supports, into an earlier one. An empty problem
        is not run; and with dropout, kernels scale all of the output at the end, which would scale an earlier one too."""
        wide = problem.partial or problem.earlier_out is not None
        return self.merges and wide and not problem.dropout and not problem.empty


ViewsForward = Callable[[Problem, Inputs, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
ViewsBackward = Callable[[Problem, Inputs, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], Gradients]


def binder(forward: ViewsForward, backward: ViewsBackward | None = None) -> Callable[[Problem, Layout], Any]:
    """`bind` for a backend that computes on (batch, heads, length, dim) views: forward(problem, inputs, out) and
    backward(problem, inputs, out, lse, dout, dlse)."""

    def bind(problem: Problem, layout: Layout) -> Any:
        if problem.gradients:
            assert backward is not None
            return bind_backward(problem, layout, backward)

        def run(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
            out, lse = forward(problem, Inputs.of(a, layout), None if a.out is None else layout.inside(a.out))
            return layout.outside(out) if a.out is None else a.out, layout.rows_outside(lse)

        return run

    return bind


def bind_backward(problem: Problem, layout: Layout, backward: ViewsBackward) -> Backward:
    def run(
        a: Arguments, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Gradients:
        rows = [None if t is None else layout.rows_inside(t) for t in (lse, dlse)]
        assert rows[0] is not None
        found = backward(problem, Inputs.of(a, layout), layout.inside(out), rows[0], layout.inside(dout), rows[1])
        q, k, v = (None if g is None else layout.outside(g) for g in found[:3])
        return Gradients(q, k, v, None if found.bias is None else found.bias.view(a.bias.shape), found.sinks)

    return run
