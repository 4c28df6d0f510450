"""A backend has a name, says what it cannot do, and is bound to a problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol

import torch

from strobe.problem import Problem
from strobe.problem.arguments import GRADIENTS, Arguments, Inputs, Layout, in_tensor_order


class Gradients(NamedTuple):
    """The gradients of one attention call, each in its input's shape; None for those that were not asked for."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    score: tuple[torch.Tensor | None, ...] | None = None  # one for each tensor that the score captures

    def in_tensor_order(self) -> tuple[torch.Tensor | None, ...]:
        """The gradients in the order of `tensors_of`; the last ones may be missing."""
        return in_tensor_order(self[:-1], self.score or ())


class Pass:
    """A bound pass. `run` is what calls it; a backend may put a faster function in its place once it has seen a call."""

    __slots__ = ("run",)

    def __init__(self, run: Any) -> None:
        self.run = run


class Forward(Protocol):
    """Bound to a problem and a layout: a function of the caller's tensors. It writes into `a.out` if that is given."""

    def __call__(self, a: Arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, lse), in the caller's layout."""


class Backward(Protocol):
    """Computes the gradients that the problem names; everything is in the caller's layout."""

    def __call__(
        self, a: Arguments, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Gradients: ...


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The features that some backends and kernels have and others lack."""

    pages: bool = False  # looks keys up in pages
    invariant: bool = False  # gives a row of a paged call the same bits whatever is beside it
    captured_gradients: bool = False  # computes the gradients of tensors that a score function captures
    merges: bool = False  # merges the result of a forward pass with a state
    partial: bool = True  # writes results in fp32, to be merged with others

    def __or__(self, other: Capabilities) -> Capabilities:
        return Capabilities(**{f.name: getattr(self, f.name) or getattr(other, f.name) for f in fields(self)})

    def lacks(self, problem: Problem) -> str | None:
        """Return the first feature that the problem asks for in vain; None if there is none."""
        if not self.captured_gradients and any(name not in GRADIENTS for name in problem.gradients):
            return "no gradients of tensors that a score function captures"
        if problem.k.pages is not None and not self.pages:
            return "no paged keys"
        if problem.invariant and not self.invariant:
            return "invariant=True; its bits depend on what is beside a row"
        if problem.state is not None and not self.merges:
            return "no merging with a state"
        return "no partial results" if problem.partial and not self.partial else None


def _nothing(problem: Problem) -> dict[str, object]:
    return {}


@dataclass(frozen=True)
class Backend:
    """`bind(problem, layout)` gives a `Pass` that runs a `Forward`, or a `Backward` if the problem asks for gradients. It
    is the only way to run a backend; it may compile, allocate and remember, so that what it gives is fast."""

    name: str
    summary: str
    limits: Callable[[Problem], str | None]  # why its code cannot do this, whatever the machine; None if it can
    bind: Callable[[Problem, Layout], Pass]
    machine: Callable[[torch.device], str | None] = field(default=lambda device: None)  # what is missing here
    details: Callable[[Problem], dict[str, object]] = field(default=_nothing)  # tiles, threads, … for `explain`
    extra_bytes: Callable[[Problem], int] = field(default=lambda problem: 0)  # besides inputs, output and LSE
    automatic: bool = True  # may be chosen without being named
    can: Capabilities = Capabilities()
    # Whether it can round a merged state into another tensor, and is faster so.
    rounds_states: Callable[[Problem], bool] = field(default=lambda problem: False)
    device_type: str = "cpu"  # of the tensors that it is there for

    def supports(self, problem: Problem) -> str | None:
        """None, or the reason why not."""
        state = problem.state
        if state is not None and not self.can_merge(problem):
            return "a state to merge with"
        reason = self.lacks(problem) or self.machine(problem.device)
        if reason is None and state is not None and state.out is not None and not self.rounds_states(problem):
            return "a state that is merged and rounded"
        return reason

    def lacks(self, problem: Problem) -> str | None:
        """Return why its code cannot do this, whatever the machine; None if it can."""
        return self.can.lacks(problem) or self.limits(problem)

    def can_merge(self, problem: Problem) -> bool:
        """Return whether it could merge the result of this problem, which it supports, with a state. An empty problem
        is not run; and with dropout, kernels scale all of the output at the end, which would scale the state too."""
        wide = problem.partial or (problem.state is not None and problem.state.out is not None)
        return self.can.merges and wide and not problem.dropout and not problem.empty


ViewsForward = Callable[[Problem, Inputs, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
ViewsBackward = Callable[[Problem, Inputs, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], Gradients]


def binder(forward: ViewsForward, backward: ViewsBackward | None = None) -> Callable[[Problem, Layout], Pass]:
    """`bind` for a backend that computes on (batch, heads, length, dim) views: forward(problem, inputs, out) and
    backward(problem, inputs, out, lse, dout, dlse)."""

    def bind(problem: Problem, layout: Layout) -> Pass:
        if problem.gradients:
            assert backward is not None
            return Pass(bind_backward(problem, layout, backward))

        def run(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
            out, lse = forward(problem, Inputs.of(a, layout), None if a.out is None else layout.inside(a.out))
            return layout.outside(out) if a.out is None else a.out, layout.rows_outside(lse)

        return Pass(run)

    return bind


def bind_backward(problem: Problem, layout: Layout, backward: ViewsBackward) -> Backward:
    def run(
        a: Arguments, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Gradients:
        rows = [None if t is None else layout.rows_inside(t) for t in (lse, dlse)]
        assert rows[0] is not None
        gradients = backward(problem, Inputs.of(a, layout), layout.inside(out), rows[0], layout.inside(dout), rows[1])
        q, k, v = (None if g is None else layout.outside(g) for g in gradients[:3])
        bias = None if gradients.bias is None else gradients.bias.view(a.bias.shape)
        return Gradients(q, k, v, bias, gradients.sinks, gradients.score)

    return run
