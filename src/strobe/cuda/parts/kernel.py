"""A kernel as it is compiled: everything that changes code, and the source that it prints.

The seam between host and device is a generated file of some twenty lines: configuration, shared memory, mask, score,
argument struct, and a `__global__` function that calls a template. Two calls with equal specs share a cubin.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from strobe.cuda.parts import wgmma
from strobe.cuda.parts.params import Struct
from strobe.cuda.parts.shared_memory import SharedMemory
from strobe.cuda.runtime.jit import ENTRY

PREFIX = "strobe_"  # of the names of all other kernels


@dataclass(frozen=True)
class KernelSpec:
    """`source` is what is compiled; `entry` is the name of the kernel in it, which profilers show; `name` is for people."""

    name: str = field(compare=False)  # masks that print the same text may have other names
    arch: str
    params: Struct  # its text names the types of what pointers point to
    threads: int
    smem: int  # dynamic shared memory, bytes

    entry = ENTRY

    @property
    def source(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True)
class TextKernel(KernelSpec):
    """A kernel whose text is written already."""

    text: str
    entry: str = ENTRY  # type: ignore[misc]

    @property
    def source(self) -> str:
        return self.text


@dataclass(frozen=True)
class TemplateKernel(KernelSpec):
    """An instance of the template `strobe::<template>` in strobe/kernels/<header>.cuh."""

    header: str
    template: str
    element: str  # the C++ type of q, k and v
    config: tuple[tuple[str, int | bool | str], ...]  # members of Config: numbers, flags, and types by name
    memory: SharedMemory = field(compare=False)  # its layout; `source` has the offsets
    types: tuple[tuple[str, str], ...]  # the template's further arguments: (name, text), as Mask and Score print them
    label: str = ""  # the end of `entry`: the features, if the template has any
    blocks_per_sm: int = 1
    products: tuple[tuple[int, str, int], ...] = ()  # of wgmma: (N, form, steps of a chain; 0: a single product)
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)  # for tables
    accumulators: tuple[
        tuple[int, int], ...
    ] = ()  # (N, steps): chains whose result lives in registers that PTX declares

    def member(self, name: str) -> int | bool | str:
        """A member of Config."""
        return dict(self.config)[name]

    @property
    def entry(self) -> str:  # type: ignore[override]
        return f"{PREFIX}{self.template}{self.label and '_'}{self.label}"

    @functools.cached_property
    def source(self) -> str:  # type: ignore[override]
        types = "".join(f"  using {k} = {v};\n" for k, v in self.config if isinstance(v, str))
        numbers = [f"{k} = {v}" for k, v in self.config if not isinstance(v, (bool, str))]
        flags = [f"{k} = {str(v).lower()}" for k, v in self.config if isinstance(v, bool)]
        arguments = ", ".join(f"strobe::{name}" for name in ("Config", *(name for name, _ in self.types)))
        return (
            f"// {self.template} for {self.arch}\n"
            f"#include <strobe/kernels/{self.header}.cuh>\n"
            f"{self._wgmma()}"
            "namespace strobe {\n"
            "struct Config {\n"
            f"  using Element = {self.element};\n"
            f"{types}{_constants('int', numbers)}{_constants('bool', flags)}{self.memory.cpp()}"
            "};\n"
            f"{''.join(text for _, text in self.types)}"
            f"{self.params.cpp()}"
            "}  // namespace strobe\n"
            f"STROBE_KERNEL({self.threads}, {self.blocks_per_sm}) {self.entry}(STROBE_GRID_CONSTANT strobe::Params p) {{\n"
            f"  strobe::{self.template}<{arguments}>(p);\n"
            "}\n"
        )

    def _wgmma(self) -> str:
        shapes = wgmma.shapes(
            self.element, [(n, [(form, steps) if steps else form]) for n, form, steps in self.products]
        )
        sums = [wgmma.accumulators(self.element, n, steps) for n, steps in self.accumulators]
        return f"{shapes if self.products else ''}{''.join(sums)}"


_NO_MEMORY = SharedMemory([])


def template_kernel(
    template: str,
    what: str,
    *,
    arch: str,
    params: Struct,
    threads: int,
    element: str,
    config: Mapping[str, int | bool | str],
    memory: SharedMemory = _NO_MEMORY,
    header: str = "",
    types: tuple[tuple[str, str], ...] = (),
    label: str = "",
    blocks_per_sm: int = 1,
    products: Iterable[tuple[int, str, int]] = (),
    accumulators: Iterable[tuple[int, int]] = (),
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> TemplateKernel:
    """The kernel `template`[`what`]. `header`: the file of the template, if that has another name."""
    return TemplateKernel(
        name=f"{template}[{what}]",
        arch=arch,
        params=params,
        threads=threads,
        smem=memory.size,
        header=header or template,
        template=template,
        element=element,
        config=tuple(config.items()),
        memory=memory,
        types=types,
        label=label,
        blocks_per_sm=blocks_per_sm,
        products=tuple(products),
        accumulators=tuple(accumulators),
        facts=facts,
    )


def flags(**switches: bool) -> str:
    """The names of the switches that are on, each after a space: the end of a kernel's name."""
    return "".join(f" {name}" for name, on in switches.items() if on)


def _constants(kind: str, members: list[str]) -> str:
    return f"  static constexpr {kind} {', '.join(members)};\n" if members else ""
