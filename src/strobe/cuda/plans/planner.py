"""A planner says what its kernels can do, and plans their launches. Each module of kernels has one; backends, tables of
support, `strobe compile` and the emulator ask it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from strobe.backends.backend import Capabilities
from strobe.cuda.parts.architecture import Architecture
from strobe.cuda.parts.element import ELEMENTS, Element
from strobe.cuda.parts.features import Features
from strobe.cuda.parts.kernel import TemplateKernel
from strobe.cuda.parts.plan import Dims, Machine, Plan
from strobe.cuda.parts.scores import Scores
from strobe.problem import Problem, Strides


class MakePlan(Protocol):
    """`strides`: of o; in a backward pass also of d_o and of the gradients. `tile`: instead of the one that is chosen."""

    def __call__(
        self, problem: Problem, strides: Mapping[str, Strides], machine: Machine, tile: Any = None
    ) -> Plan: ...


class ListVariants(Protocol):
    """The kernels that calls ask for. `exhaustive` adds every combination of features."""

    def __call__(self, arch: str, *, exhaustive: bool = False) -> Iterator[TemplateKernel]: ...


def _nothing(problem: Problem) -> None:
    return None


def _no_tiles(features: Features, arch: str) -> list[Any]:
    return []


class Tuning(NamedTuple):
    """The tiles that `strobe tune` sweeps."""

    kinds: tuple[str, ...] = ()  # of kernels that may want tiles of their own
    dims: Sequence[Dims] = ()
    candidates: Callable[[Features, str], list[Any]] = _no_tiles  # the first is in use


@dataclass(frozen=True, eq=False, kw_only=True)
class Planner:
    """The record of what the kernels of one module can do, and how their launches are planned. Nothing else says it."""

    name: str
    architecture: Architecture
    gradients: bool = False  # its kernels compute the backward pass
    dtypes: Mapping[torch.dtype, Element] = field(default_factory=lambda: ELEMENTS)  # of inputs, and what kernels read
    dims: list[Dims]  # of calls that fill a kernel's head dims; other calls are padded
    scope: str = ""  # how reasons tell these kernels from those of other planners
    can: Capabilities
    splits: Callable[[Problem, Machine], int] | None = None  # of the keys of a tile; None: they are never split
    packed_heads: int = 0  # heads of a group that are rows of one tile, by the kernel itself: divisors of this number
    rounds_states: bool = False  # a merged state may go to another tensor, rounded
    further_limits: Callable[[Problem], str | None] = _nothing  # what the fields do not say
    plan: MakePlan
    variants: ListVariants
    tuning: Tuning = Tuning()

    def limits(self, problem: Problem) -> str | None:
        """Return why it cannot plan this problem; None if it can."""
        if bool(problem.gradients) != self.gradients:
            return f"no {'backward' if problem.gradients else 'forward'} kernel"
        if (reason := self.shape_limits(problem)) is not None:
            return reason
        if (reason := self.can.lacks(problem)) is not None:
            return f"{reason} {self.scope}".rstrip()
        return Scores.limits(problem) or self.further_limits(problem)

    def shape_limits(self, problem: Problem) -> str | None:
        """Return why its kernels do not hold tiles of this dtype and these head dims; None if they do."""
        if problem.dtype not in self.dtypes:
            return f"{str(problem.dtype).removeprefix('torch.')} inputs"
        inputs = "" if self.dtypes is ELEMENTS else f" {self.scope}"
        step, largest = self.chunk, [max(sizes) for sizes in zip(*self.dims, strict=True)]
        for name, dim, most in zip(("head dim", "value head dim"), (problem.dim, problem.dim_v), largest, strict=True):
            if dim % step or not 0 < dim <= most:
                return f"{name} {dim}; the kernels take multiples of {step} up to {most}{inputs}"
        if not any(problem.dim <= dim and problem.dim_v <= dim_v for dim, dim_v in self.dims):
            pairs = ", ".join(f"{dim}/{dim_v}" for dim, dim_v in self.dims)
            return f"head dims {problem.dim}/{problem.dim_v}; the kernels take up to {pairs}"
        return None

    @property
    def chunk(self) -> int:
        """Numbers that one copy moves: head dims are multiples."""
        return min(element.chunk for element in self.dtypes.values())

    def splits_of(self, problem: Problem, machine: Machine) -> int:
        return 1 if self.splits is None else self.splits(problem, machine)
