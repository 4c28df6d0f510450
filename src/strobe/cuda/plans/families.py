"""The kernels of each family of architectures, which of them serves a problem, and every variant that calls ask for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from strobe.cuda.parts.kernel import TemplateKernel
from strobe.cuda.parts.plan import ELEMENTS, MAX_DIM, MAX_DIM_SM90
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
from strobe.problem import Problem


@dataclass(frozen=True)
class Family:
    """Modules that hold kernels. Each has `limits(problem)`, `plan(…)`, `variants(arch)` and DIMS, its head dims."""

    forward: tuple[ModuleType, ...]  # the first that can runs
    backward: tuple[ModuleType, ...]
    forward_fp32: tuple[ModuleType, ...] = ()  # of fp32 inputs, if they have kernels of their own
    backward_fp32: tuple[ModuleType, ...] = ()

    def module(self, problem: Problem) -> Any:
        """The one that serves a problem; its limits say if it does not."""
        candidates = self.backward if problem.gradients else self.forward
        if problem.dtype == torch.float32:
            candidates = (self.backward_fp32 if problem.gradients else self.forward_fp32) or candidates
        return next((m for m in candidates if m.limits(problem) is None), candidates[-1] if candidates else None)

    def limits(self, problem: Problem) -> str | None:
        module = self.module(problem)
        return "no backward kernel" if module is None else module.limits(problem)


FAMILIES = {
    "sm90": Family(
        (forward_sm90, forward_wide_sm90),
        (backward_sm90, backward_wide_sm90),
        (forward_fp32_sm90,),
        (backward_fp32_sm90,),
    ),
    "sm80": Family((decode_sm80, forward_sm80), (backward_sm80,)),
}


_FP32 = {module for family in FAMILIES.values() for module in (*family.forward_fp32, *family.backward_fp32)}


def modules(arch: str) -> list[ModuleType]:
    """Hopper's own kernels have the architecture "sm_90a"."""
    family = FAMILIES["sm90" if arch == forward_sm90.ARCH else "sm80"]
    return [*family.forward, *family.backward, *family.forward_fp32, *family.backward_fp32]


def largest_dim(arch: str) -> int:
    return MAX_DIM_SM90 if arch == forward_sm90.ARCH else MAX_DIM


def variants(arch: str, *, exhaustive: bool = False) -> Iterator[TemplateKernel]:
    """For compiling ahead of time, for studies and for tests. `exhaustive` adds every combination of features."""
    for module in modules(arch):
        yield from module.variants(arch, exhaustive=exhaustive)


def inputs_of(kernel: TemplateKernel) -> str:
    """Their dtype."""
    if kernel.facts.get("fp32", False):
        return "float32"
    return next(str(dtype).removeprefix("torch.") for dtype, name in ELEMENTS.items() if name == kernel.element)


def serves(kernel: TemplateKernel, head_dim: int) -> bool:
    """Kernels are made for rounded-up head dims: 72 is served by the next larger one."""
    facts = kernel.facts
    if "dim" not in facts:  # a small kernel beside the others
        return head_dim <= largest_dim(kernel.arch)
    of_dtype = [m for m in modules(kernel.arch) if (m in _FP32) == facts.get("fp32", False)]
    dims = sorted({d for module in of_dtype for d, dv in module.DIMS if d == dv or d > MAX_DIM})
    has_values = head_dim <= facts["dim_v"] or facts["dim"] > MAX_DIM  # those by parts of the columns
    return next((d for d in dims if d >= head_dim), None) == facts["dim"] and has_values
