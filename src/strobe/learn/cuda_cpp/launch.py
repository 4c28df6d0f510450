"""Runs a learner's kernel: on the GPU through NVRTC, or on the emulator, where mistakes are named by line."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import operator
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from strobe.cuda.runtime import jit
from strobe.emulator import Buffer, Counters, EmulatorError, FrameError, Program, build
from strobe.learn.cuda_cpp.source import FILE, FRAME_BYTES, TYPES, Kernel, Parameter, emulated
from strobe.learn.simulator import Dim3, KernelError

_DTYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "__half",
    torch.int32: "int",
    torch.int64: "long long",
    torch.uint8: "unsigned char",
    torch.bool: "bool",
}
_MOST_THREADS, _STATIC_SMEM = 1024, 48 << 10  # of a block
_SHOWN = 3  # wrong elements
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Config:
    grid: Dim3
    block: Dim3
    smem: int  # bytes of `extern __shared__` memory


@dataclass(frozen=True)
class Writers:
    """The last writer of each element of a tensor: (block, thread, line); None if nobody wrote it."""

    packed: torch.Tensor
    block: Dim3

    def __getitem__(self, element: int) -> str | None:
        writer = int(self.packed[element])
        if not writer:
            return None
        thread, line = writer >> 16 & 0xFFFF, writer & 0xFFFF
        return f"thread {self.block.named(self.block.at(thread))} of block {(writer >> 32) - 1}, line {line}"


def config(grid: int | tuple[int, ...], block: int | tuple[int, ...], smem: int) -> Config:
    blocks, threads = (Dim3(size) if isinstance(size, int) else Dim3(*size) for size in (grid, block))
    for name, size in (("grid", blocks), ("block", threads)):
        if min(size) < 1:
            raise ValueError(f"{name}: {tuple(size)}; sizes are at least 1")
    if threads.size > _MOST_THREADS:
        raise ValueError(f"block: {tuple(threads)} has {threads.size} threads; a block has at most {_MOST_THREADS}")
    return Config(blocks, threads, smem)


def check(kernel: Kernel, how: Config, arguments: Mapping[str, Any]) -> None:
    """Every parameter has a fitting argument, and there is no other."""
    if kernel.extern_shared and how.smem == 0:
        raise ValueError(f"smem: 0; {kernel.name} has an `extern __shared__` array, and smem is its size in bytes")
    listed = f"{kernel.name}({', '.join(map(str, kernel.parameters))})"
    names = [parameter.name for parameter in kernel.parameters]
    if missing := [name for name in names if name not in arguments]:
        raise TypeError(f"{', '.join(missing)} missing: the kernel is {listed}")
    if unknown := [name for name in arguments if name not in names]:
        raise TypeError(f"{', '.join(unknown)}: no such parameter; the kernel is {listed}")
    for parameter in kernel.parameters:
        value = arguments[parameter.name]
        if isinstance(value, torch.Tensor) != parameter.pointer:
            wanted = "a tensor" if parameter.pointer else "a number"
            raise TypeError(f"{parameter.name} must be {wanted}, got {type(value).__name__}: {listed}")
        if parameter.pointer:
            _check_tensor(parameter, value)
        else:
            _number(parameter, value)


def _check_tensor(parameter: Parameter, tensor: torch.Tensor) -> None:
    element = _DTYPES.get(tensor.dtype)
    if element != parameter.ctype:
        fitting = next(
            (str(dtype) for dtype, ctype in _DTYPES.items() if ctype == parameter.ctype), "no dtype of torch"
        )
        raise TypeError(f"{parameter.name}: {tensor.dtype}, but the kernel takes {parameter}; {fitting} fits")
    if not tensor.is_contiguous():
        raise ValueError(f"{parameter.name}: strides {tensor.stride()}; the lessons' kernels take contiguous tensors")


# ---- on the emulator -------------------------------------------------------------------------------------------------


def on_emulator(kernel: Kernel, how: Config, arguments: Mapping[str, Any]) -> tuple[Counters, dict[str, Writers]]:
    """Threads run in random order, one block after the other; the first mistake ends the run."""
    stop = ctypes.c_uint32(0)
    number = next(_numbers) & 0xFFFFFFFF
    packed = struct.pack("<8IQ", *how.grid, *how.block, how.block.size, number, ctypes.addressof(stop))
    buffers, writers = [], {}
    keep = []  # alive until the kernel has run
    for parameter in kernel.parameters:
        value = arguments[parameter.name]
        if not parameter.pointer:
            packed += struct.pack(f"<{TYPES[parameter.ctype]}", _number(parameter, value))
            continue
        nbytes = value.numel() * value.element_size()
        watched = (0, 0)
        if not parameter.const:
            last, epoch = torch.zeros(value.numel(), dtype=torch.int64), torch.zeros(value.numel(), dtype=torch.int32)
            writers[parameter.name] = Writers(last, how.block)
            keep += [last, epoch]
            watched = (last.data_ptr(), epoch.data_ptr())
        packed += struct.pack("<4Q", value.data_ptr(), nbytes, *watched)
        buffers.append(Buffer(parameter.name, value.data_ptr(), nbytes, writable=not parameter.const))
    threads = -(-how.block.size // 32) * 32
    program = _built(kernel)
    try:
        with ThreadPoolExecutor(1) as pool:  # Python hears Ctrl-C in this thread, while the kernel runs in another
            try:
                running = pool.submit(
                    program.run,
                    packed,
                    grid=how.grid.size,
                    threads=threads,
                    smem=_STATIC_SMEM + how.smem,
                    buffers=buffers,
                    mode="async",
                    workers=1,
                )
                counters = running.result()
            finally:
                stop.value = 1  # if it still runs, because of an interrupt
    except EmulatorError as error:
        raise KernelError(_explained(kernel, how, arguments, str(error))) from None
    return counters, writers


def _built(kernel: Kernel) -> Program:
    text = jit.flatten(emulated(kernel), "emu", "lesson.cuh")
    try:
        return build(text, name=kernel.name, frame_limit=(FILE, FRAME_BYTES))
    except FrameError as error:
        line = kernel.text.splitlines()[error.line - 1].strip()
        takes = "has an array whose size is known only at run time"
        if error.bytes is not None:
            takes = f"has {error.bytes:,} bytes of local variables; on the emulator {FRAME_BYTES:,} are allowed"
        raise KernelError(f"a function of {kernel.name} {takes}\n  line {error.line}: {line}") from None
    except RuntimeError as error:
        raise _compile_error(kernel, str(error), rf"{re.escape(FILE)}:(\d+)(?::\d+)?: error: (.*)") from None


_RANGES = {"int": (-(2**31), 2**31 - 1), "unsigned": (0, 2**32 - 1), "bool": (0, 1), "unsigned char": (0, 255)}


def _number(parameter: Parameter, value: Any) -> Any:
    """Return the value as the kernel takes it: a number that would change on the way is refused."""
    try:
        if TYPES[parameter.ctype] == "d":
            return float(value + 0)  # not a string
        whole = operator.index(value)
    except TypeError:
        raise TypeError(f"{parameter.name}: {value!r}, but the kernel takes {parameter}") from None
    least, most = _RANGES.get(parameter.ctype, (-(2**63), 2**63 - 1))
    if not least <= whole <= most:
        raise ValueError(f"{parameter.name}: {value}; {parameter.ctype} holds {least} to {most}")
    return whole


def _compile_error(kernel: Kernel, log: str, pattern: str) -> KernelError:
    """The compiler's words about the learner's lines, without those about ours."""
    lines = kernel.text.splitlines()
    promised = re.findall(r"error: static assertion failed(?: due to requirement [^:]*)?: (.*)", log)
    asked = re.findall(rf"{re.escape(FILE)}:(\d+):\d+:\s+(?:required from here|note: in instantiation)", log)
    said = [*re.findall(pattern, log), *((line, promised[0]) for line in asked if promised)]
    messages = [
        f"line {line}: {what}\n    {lines[int(line) - 1].strip()}"
        for line, what in dict.fromkeys(said)
        if int(line) <= len(lines)
    ]
    return KernelError(f"{kernel.name} does not compile\n" + ("\n".join(messages[:_SHOWN]) or log))


def _explained(kernel: Kernel, how: Config, arguments: Mapping[str, Any], report: str) -> str:
    """The emulator's report in a learner's words: elements, CUDA's coordinates, and the text of the lines it names."""
    lines = kernel.text.splitlines()

    def line(number: str) -> str:
        exists = 0 < int(number) <= len(lines)
        return f"line {number}: {lines[int(number) - 1].strip()}" if exists else "an unknown line"

    def thread(index: str) -> str:
        return f"thread {how.block.named(how.block.at(int(index)))}"

    def block(index: str) -> str:
        return f"block {how.grid.named(how.grid.at(int(index)))}"

    if match := re.search(r"deadlock in block (\d+)", report):
        return f"divergent barrier in {block(match[1])} of {kernel.name}:\n" + "\n".join(_waiting(report, how, line))
    text = re.sub(r"\n  \(\w+ mode, seed \d+\)$", "", report)
    text = re.sub(
        r"block (\d+), (thread) (\d+) \(warp \d+, lane \d+\)", lambda m: f"{thread(m[3])} of {block(m[1])}", text
    )
    text = re.sub(r"thread (\d+) \(warp \d+, lane \d+\)", lambda m: thread(m[1]), text)
    text = re.sub(rf"at {re.escape(FILE)}:(\d+)", lambda m: line(m[1]), text)
    text = re.sub(r"shared memory: (read of )?shared memory at offset \w+ (that|is)", _race, text)
    text = text.replace(" (missing wait or barrier)", "")
    return re.sub(
        r"(?:global memory: )?(read|write) of \d+ bytes of global memory out of bounds: (.*)",
        lambda m: _out_of_bounds(m, arguments),
        text,
    )


def _race(match: re.Match[str]) -> str:
    return f"race: {'reads ' if match[1] else ''}shared memory {match[2]}"


def _out_of_bounds(match: re.Match[str], arguments: Mapping[str, Any]) -> str:
    """Bytes behind or before a buffer, as an index."""
    where = re.match(r"(\d+) bytes (past the end|before the start) of `(\w+)`", match[2])
    if where is None or where[3] not in arguments:
        return match[0]
    tensor = arguments[where[3]]
    size, away = tensor.element_size(), int(where[1])
    index = tensor.numel() + away // size if where[2].startswith("past") else -(away // size)
    return f"{match[1]}s {where[3]}[{index}], which is out of bounds: {where[3]} has {tensor.numel()} elements"


def _waiting(report: str, how: Config, line: Callable[[str], str]) -> Iterator[str]:
    """Say who waits at which barrier, and who does not come. The threads that only fill the last warp are left out."""
    for listed, what in re.findall(r"\n  (?:threads?|warps?) ([\d, -]+)[^:\n]*: ([^\n]*)", report):
        warps = f"warp {listed}" in report or f"warps {listed}" in report
        spans = [[int(x) * (32 if warps else 1) for x in part.split("-")] for part in listed.split(",")]
        ends = [(span[0], span[-1] + (31 if warps else 0)) for span in spans]
        threads = [t for first, last in ends for t in range(first, last + 1) if t < how.block.size]
        if not threads:
            continue
        names = ", ".join(how.block.named(how.block.at(t)) for t in threads[:3]) + (", …" if len(threads) > 3 else "")
        barrier = re.search(rf"at {re.escape(FILE)}:(\d+)", what)
        yield f"  {len(threads)} of {how.block.size} threads ({names}) " + (
            f"wait in {line(barrier[1])}" if barrier else "have ended"
        )
    warp = re.search(r"(__(?:shfl|ballot|syncwarp)\w*) at", report)
    yield (
        f"Every lane in the mask must reach the same {warp[1]}()."
        if warp
        else "Every thread of a block must reach the same __syncthreads()."
    )


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def on_gpu(kernel: Kernel, how: Config, arguments: Mapping[str, Any]) -> float:
    """Milliseconds of the second launch; results are in the tensors that were passed."""
    from strobe.learn.plain_launch import launch

    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    stream = torch.cuda.current_stream().cuda_stream

    def prepared() -> tuple[dict[str, torch.Tensor], list[tuple[str, Any, bool]]]:
        copies = {name: value.clone() if value.is_cuda else value.cuda() for name, value in tensors.items()}
        values = []
        for p in kernel.parameters:
            value = copies[p.name].data_ptr() if p.pointer else _number(p, arguments[p.name])
            values.append((p.ctype, value, p.pointer))
        return copies, values

    first, (results, values) = prepared(), prepared()  # torch makes the device's context, which a function belongs to
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    function = _loaded(kernel, arch, how.smem).function(torch.cuda.current_device())
    launch(function, how.grid, how.block, how.smem, first[1], stream)  # so that the clock sees no first time
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    launch(function, how.grid, how.block, how.smem, values, stream)
    end.record()
    torch.cuda.synchronize()
    for parameter in kernel.parameters:
        if parameter.pointer and not parameter.const:
            tensors[parameter.name].copy_(results[parameter.name])
    return start.elapsed_time(end)


@functools.cache
def _loaded(kernel: Kernel, arch: str, smem: int) -> Any:
    from strobe.cuda.runtime import driver

    try:
        cubin = jit.get(for_nvrtc(kernel), arch, name=kernel.name).cubin
    except jit.CompileError as error:
        raise _compile_error(kernel, str(error), r"kernel\.cu\((\d+)\): error: (.*)") from None
    return driver.Kernel(cubin, kernel.name, smem)


_FOR_NVRTC = f'#define INFINITY __int_as_float(0x7f800000)\n#line 1 "{FILE}"\n'  # nvcc has it from math.h


def for_nvrtc(kernel: Kernel) -> str:
    """The learner's text; the kernel keeps its plain name, and lines keep their numbers."""
    text = re.sub(r"^[ \t]*#[ \t]*include[^\n]*", "", kernel.text, flags=re.MULTILINE)
    uses_half = re.search(r"\b(?:__half|half)\b", text)
    half = Path(__file__).with_name("half.cuh").read_text(encoding="utf-8") if uses_half else ""
    return half + _FOR_NVRTC + re.sub(r'(?<!extern "C" )__global__(?=[^;{]*\bvoid\b)', 'extern "C" __global__', text)


# ---- results ---------------------------------------------------------------------------------------------------------


def wrong_elements(
    name: str, tensor: torch.Tensor, expected: torch.Tensor, writers: Writers | None, tolerance: float = 1e-4
) -> str | None:
    """Return which elements are wrong, what they should be and, from the emulator, who wrote them; None if all are
    right."""
    if tensor.shape != expected.shape:
        return f"expected {name} has shape {tuple(expected.shape)}, the tensor {tuple(tensor.shape)}"
    if tensor.dtype == torch.float16:
        tolerance = max(tolerance, 2e-3)  # two bits of eleven
    close = torch.isclose(tensor.cpu().double(), expected.cpu().double(), rtol=tolerance, atol=tolerance)
    wrong = (~close).nonzero().tolist()
    if not wrong:
        return None
    lines = [f"{len(wrong)} of {tensor.numel()} elements of {name} are wrong:"]
    for index in wrong[:_SHOWN]:
        element = sum(i * stride for i, stride in zip(index, tensor.stride(), strict=True))
        writer = writers[element] if writers else None
        by = "" if writers is None else f" (written by {writer})" if writer else " (nobody wrote it)"
        value, right = tensor[tuple(index)].item(), expected[tuple(index)].item()
        lines.append(f"  {name}[{', '.join(map(str, index))}] is {_shown(value)}, it should be {_shown(right)}{by}")
    more = len(wrong) - _SHOWN
    return "\n".join(lines + ([f"  … and {more} more"] if more > 0 else []))


def _shown(value: float) -> str:
    return "NaN" if isinstance(value, float) and math.isnan(value) else f"{value:.6g}"
