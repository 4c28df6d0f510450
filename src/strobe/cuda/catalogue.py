"""Every kernel that calls ask for, by architecture: for compiling ahead of time, for studies and for tests."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from strobe.cuda import forward_sm80, forward_sm90
from strobe.cuda.kernel import TemplateKernel


def modules(arch: str) -> list[ModuleType]:
    """One for each kernel. Hopper's own have the architecture "sm_90a"."""
    return [forward_sm90] if arch == forward_sm90.ARCH else [forward_sm80]


def variants(arch: str, *, exhaustive: bool = False) -> Iterator[TemplateKernel]:
    """`exhaustive` adds every combination of features to the common ones."""
    for module in modules(arch):
        yield from module.variants(arch, exhaustive=exhaustive)


def serves(kernel: TemplateKernel, head_dim: int) -> bool:
    """Kernels are made for rounded-up head dims: 72 is served by the next larger one."""
    dims = sorted(d for module in modules(kernel.arch) for d, dv in module.DIMS if d == dv)
    return next((d for d in dims if d >= head_dim), None) == kernel.member("kDim") and head_dim <= kernel.member(
        "kDimV"
    )
