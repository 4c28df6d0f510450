"""`run_kernel`: CUDA C++ of your own, or one of the lessons' kernels, on the GPU if there is one, else on the emulator."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from strobe.cuda.parts.params import Field, Struct
from strobe.cuda.runtime import driver, jit
from strobe.emulator import Buffer, Counters, build
from strobe.learn.cuda_cpp import launch, source as cuda_source
from strobe.learn.simulator import KernelError

KERNELS = Path(__file__).with_name("kernels")
_POINTERS = {torch.float32: "float", torch.int32: "int"}


@dataclass(frozen=True)
class Run:
    """A run of a kernel: where it ran and what is known of it. A GPU has a clock, the emulator counts."""

    where: str
    milliseconds: float | None = None
    counters: Counters | None = None

    def __str__(self) -> str:
        if self.counters is None:
            return f"on {self.where}: {self.milliseconds:.4f} ms"
        counted = {field.name.replace("_", " "): getattr(self.counters, field.name) for field in fields(self.counters)}
        return f"on the {self.where}: " + ", ".join(f"{count} {what}" for what, count in counted.items() if count)


def source(name: str) -> str:
    """The text of a kernel, to be read."""
    kernels = {path.stem: path for path in sorted(KERNELS.glob("*.cu"))}
    if name not in kernels:  # a name, not a path
        raise ValueError(f"name: {name!r}; the kernels are {', '.join(kernels)}")
    return kernels[name].read_text(encoding="utf-8")


def gpu() -> str | None:
    """None if kernels can be compiled for, and run on, a GPU here; else why not."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return driver.available() or jit.compiler_missing()


def params_of(text: str) -> Struct:
    """The kernel's `struct Params`, read from its source: the one place where it is written."""
    match = re.search(r"struct Params \{\n(.*?)\n\};", re.sub(r"//[^\n]*", "", text), re.DOTALL)
    if match is None:
        raise ValueError("the kernel has no `struct Params`")
    fields = []
    for declaration in match[1].split(";"):
        if not declaration.strip():
            continue
        ctype, _, names = re.sub(r"\s*\*\s*", "* ", declaration.strip()).rpartition("* ")
        if ctype:
            ctype += "*"
        else:
            ctype, names = declaration.split(maxsplit=1)
        fields += [Field(name.strip(), ctype) for name in names.split(",")]
    return Struct("Params", fields)


def run_kernel(
    name: str | None = None,
    *,
    source: str | None = None,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...] | None = None,
    threads: int | None = None,
    smem: int = 0,
    expected: dict[str, torch.Tensor] | None = None,
    **arguments: torch.Tensor | int | float,
) -> Run:
    """Launch a kernel with `grid` blocks of `block` threads, `kernel<<<grid, block, smem>>>(arguments)` in CUDA C++.

    `source` is ordinary CUDA C++ with one `__global__` function (or several, and `name` says which). Its parameters are
    given by name: tensors for pointers, numbers for the rest. `smem` is the size in bytes of an `extern __shared__`
    array. On the emulator, reads and writes out of bounds, reads of shared memory that nobody has written, divergent
    barriers, races and loops that do not end raise `KernelError`, which names thread and line; with `expected` (tensors
    by the name of the parameter), wrong results do as well.

    Without `source`, `name` is one of the lessons' kernels in strobe's own dialect (`strobe/learn/kernels`), which has
    `threads` threads a block and a `struct Params`, whose fields are the arguments.

    CPU tensors are copied to the GPU, and those that the kernel may write (pointers without const) are copied back: the
    results are in the tensors that were passed, on either kind of machine."""
    if source is not None:
        if block is None:
            raise TypeError("block is missing: how many threads has a block?")
        return _plain(cuda_source.parse(source, name), launch.config(grid, block, smem), arguments, expected or {})
    if name is None:
        raise TypeError("source or name is missing: which kernel?")
    if not isinstance(grid, int) or threads is None or block is not None or expected:
        raise TypeError(
            f"{name} is in strobe's dialect: grid and threads are numbers, and there is no block or expected"
        )
    return _dialect(name, grid, threads, smem, arguments)


def _plain(
    kernel: cuda_source.Kernel, how: launch.Config, arguments: dict[str, Any], expected: dict[str, torch.Tensor]
) -> Run:
    launch.check(kernel, how, arguments)
    if unknown := [name for name in expected if not isinstance(arguments.get(name), torch.Tensor)]:
        raise TypeError(f"expected: the kernel has no tensor {', '.join(unknown)}")
    writers: dict[str, launch.Writers] = {}
    if gpu() is None:
        ran = Run(torch.cuda.get_device_name(), milliseconds=launch.on_gpu(kernel, how, arguments))
    else:
        counters, writers = launch.on_emulator(kernel, how, arguments)
        ran = Run("emulator", counters=counters)
    for name, right in expected.items():
        if (problem := launch.wrong_elements(name, arguments[name], right, writers.get(name))) is not None:
            raise KernelError(problem)
    return ran


def _dialect(name: str, grid: int, threads: int, smem: int, arguments: dict[str, Any]) -> Run:
    text = source(name)
    struct = params_of(text)
    pointers = {f.name: f.ctype for f in struct.fields if f.ctype.endswith("*")}
    tensors: dict[str, torch.Tensor] = {}
    for argument, value in arguments.items():
        if isinstance(value, torch.Tensor) != (argument in pointers):
            wanted = "a tensor" if argument in pointers else "a number"
            raise TypeError(f"{argument} must be {wanted}, got {type(value).__name__}")
        if isinstance(value, torch.Tensor):
            _check(argument, value, pointers[argument])
            tensors[argument] = value
    run = _on_gpu if gpu() is None else _on_emulator
    return run(name, text, struct, grid, threads, smem, dict(arguments), tensors)


def _check(name: str, tensor: torch.Tensor, ctype: str) -> None:
    wanted = ctype.removeprefix("const ").removesuffix("*").strip()
    if _POINTERS.get(tensor.dtype) != wanted:
        raise TypeError(f"{name}: {tensor.dtype}; the kernel takes a pointer to {wanted}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: strides {tensor.stride()}; the lessons' kernels take contiguous tensors")


def _written(struct: Struct) -> set[str]:
    return {f.name for f in struct.fields if f.ctype.endswith("*") and not f.ctype.startswith("const")}


def _on_emulator(
    name: str,
    text: str,
    struct: Struct,
    grid: int,
    threads: int,
    smem: int,
    values: dict[str, Any],
    tensors: dict[str, torch.Tensor],
) -> Run:
    buffers = []
    for argument, tensor in tensors.items():
        values[argument] = tensor.data_ptr()
        size = tensor.numel() * tensor.element_size()
        buffers.append(Buffer(argument, tensor.data_ptr(), size, writable=argument in _written(struct)))
    program = build(jit.flatten(text, "emu", f"{name}.cu"), name=name, entry=name)
    counters = program.run(bytes(struct.pack(values)), grid=grid, threads=threads, smem=smem, buffers=buffers)
    return Run("emulator", counters=counters)


@functools.cache
def _loaded(name: str, text: str, arch: str, smem: int) -> driver.Kernel:
    return driver.Kernel(jit.get(jit.flatten(text), arch, name=name).cubin, name, smem)


def _on_gpu(
    name: str,
    text: str,
    struct: Struct,
    grid: int,
    threads: int,
    smem: int,
    values: dict[str, Any],
    tensors: dict[str, torch.Tensor],
) -> Run:
    checked = text + f'\nstatic_assert(sizeof(Params) == {struct.size}, "not the Params that the host sends");\n'
    copies = {argument: tensor.cuda() for argument, tensor in tensors.items()}  # the very tensor if it is there already
    values |= {argument: copy.data_ptr() for argument, copy in copies.items()}
    device = torch.cuda.current_device()
    torch.cuda.synchronize()
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    function = _loaded(name, checked, arch, smem).function(device)
    ready = driver.Launch(function, grid, threads, smem, struct.pack(values))
    stream = torch.cuda.current_stream()
    ready.launch(stream.cuda_stream)  # once, so that the clock sees no first time
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    ready.launch(stream.cuda_stream)
    end.record()
    torch.cuda.synchronize()
    for argument in _written(struct) & tensors.keys():
        if copies[argument] is not tensors[argument]:
            tensors[argument].copy_(copies[argument])
    return Run(torch.cuda.get_device_name(device), milliseconds=start.elapsed_time(end))
