"""The planners of each backend, which of them plans a problem, and every kernel that calls ask for."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from strobe.backends.backend import Capabilities
from strobe.cuda.parts import terms
from strobe.cuda.parts.architecture import Architecture
from strobe.cuda.parts.element import ELEMENTS
from strobe.cuda.parts.kernel import TemplateKernel
from strobe.cuda.parts.plan import Machine, padded_dims
from strobe.cuda.plans import (
    backward_fp32_sm90,
    backward_sm80,
    backward_sm90,
    backward_wide_sm90,
    decode_sm80,
    forward_fp32_sm90,
    forward_sm80,
    forward_sm90,
    forward_wide_sm90,
)
from strobe.cuda.plans.planner import Planner
from strobe.problem import Problem


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, eq=False)
class Family:
    """The planners of one backend. The first that can plans a problem. If none can, the reason is that of the planner with
    the smallest head dims that hold those of the problem, or of the last."""

    summary: str
    planners: tuple[Planner, ...]

    @property
    def architectures(self) -> tuple[Architecture, ...]:
        return tuple(dict.fromkeys(planner.architecture for planner in self.planners))

    @property
    def can(self) -> Capabilities:
        """The features that one of its planners has."""
        return functools.reduce(operator.or_, (planner.can for planner in self.planners))

    def of_pass(self, gradients: bool) -> tuple[Planner, ...]:
        return tuple(planner for planner in self.planners if planner.gradients == gradients)

    def tuned(self, gradients: bool) -> tuple[Planner, ...]:
        """The planners of a pass whose tiles `strobe tune` sweeps."""
        return tuple(planner for planner in self.of_pass(gradients) if planner.tuning.kinds)

    def choose(self, problem: Problem) -> tuple[Planner, str | None]:
        """The planner of a problem, and why it cannot plan it; None if it can."""
        of_pass = self.of_pass(bool(problem.gradients))
        of_dtype = [planner for planner in of_pass if problem.dtype in planner.dtypes]
        if not of_dtype:
            taken = dict.fromkeys(name_of(dtype) for planner in of_pass for dtype in planner.dtypes)
            return of_pass[-1], f"{name_of(problem.dtype)} inputs; the kernels take {', '.join(taken)}"
        for planner in of_dtype:
            if planner.limits(problem) is None:
                return planner, None
        holding = [planner for planner in of_dtype if planner.shape_limits(problem) is None]
        told = min(holding, key=lambda p: sum(padded_dims(p.dims, problem.dim, problem.dim_v)), default=of_dtype[-1])
        return told, told.limits(problem)

    def planner(self, problem: Problem) -> Planner:
        return self.choose(problem)[0]

    def limits(self, problem: Problem) -> str | None:
        return self.choose(problem)[1]

    def rounds_states(self, problem: Problem, machine: Machine) -> bool:
        """Return whether its kernel can round a merged state into another tensor, and had better: it does not split the
        keys."""
        planner = self.planner(problem)
        return planner.rounds_states and planner.splits_of(problem, machine) == 1


FAMILIES = {
    "sm90": Family(
        "our CUDA kernels for Hopper: TMA, wgmma, warp specialisation",
        (
            forward_sm90.PLANNER,
            forward_wide_sm90.PLANNER,
            forward_fp32_sm90.PLANNER,
            backward_sm90.PLANNER,
            backward_wide_sm90.PLANNER,
            backward_fp32_sm90.PLANNER,
        ),
    ),
    "sm80": Family(
        "our CUDA kernels for Ampere and later: mma.sync, ldmatrix, cp.async",
        (decode_sm80.PLANNER, forward_sm80.PLANNER, backward_sm80.PLANNER),
    ),
}


def planners(arch: str) -> list[Planner]:
    """The planners whose kernels can be compiled for `arch`."""
    return [p for family in FAMILIES.values() for p in family.planners if p.architecture.has_target(arch)]


def largest_dim(arch: str) -> int:
    return max(dim for planner in planners(arch) for dim, _ in planner.dims)


def variants(arch: str, *, exhaustive: bool = False) -> Iterator[TemplateKernel]:
    """Yield the kernels to compile ahead of time, for studies and for tests. `exhaustive` adds every combination of
    features."""
    seen: set[TemplateKernel] = set()
    for planner in planners(arch):
        for kernel in planner.variants(arch, exhaustive=exhaustive):
            if kernel not in seen:
                seen.add(kernel)
                yield kernel


_INPUTS = {element.name: dtype for dtype, element in ELEMENTS.items()} | {terms.INPUTS: torch.float32}


def inputs_of(kernel: TemplateKernel) -> torch.dtype:
    """The dtype of q, k and v. Kernels that read another type than that say it."""
    return _INPUTS[kernel.facts.get("inputs", kernel.element)]


def serves(kernel: TemplateKernel, head_dim: int) -> bool:
    """Return whether calls whose keys have this head dim may run the kernel. Head dims are rounded up to those of kernels."""
    if "dim" not in kernel.facts:  # a small kernel beside the others
        return head_dim <= largest_dim(kernel.arch)
    of_dtype = [planner for planner in planners(kernel.arch) if inputs_of(kernel) in planner.dtypes]
    rounded = min((dim for planner in of_dtype for dim, _ in planner.dims if dim >= head_dim), default=0)
    return kernel.facts["dim"] == rounded
