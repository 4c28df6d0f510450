"""Attention on NVIDIA GPUs: problem -> plan -> cubin -> launch on the current stream."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from strobe.backends.backend import Backend
from strobe.cuda import driver, jit
from strobe.cuda.plan import ELEMENTS, PART_COUNTERS, POINTERS, Plan, Strides, Variant, plan_sm80, plan_sm90
from strobe.cuda.tiles import MAX_DIM
from strobe.problem import Inputs, Problem

_ALIGN = 16  # bytes: what one asynchronous copy moves


def feature_limits(problem: Problem) -> str | None:
    """Why the kernels cannot compute this on any GPU; None if they can."""
    if problem.dtype not in ELEMENTS:
        return f"{str(problem.dtype).removeprefix('torch.')} inputs; the kernels take bfloat16 and float16"
    for name, dim in (("head dim", problem.dim), ("value head dim", problem.dim_v)):
        if dim % 8 or dim > MAX_DIM:
            return f"{name} {dim}; the kernels take multiples of 8 up to {MAX_DIM}"
    if problem.has_mask_tensor:
        return "a mask tensor; the kernels take interval masks (strobe.causal, strobe.window, …)"
    if problem.has_bias:
        return "a bias; the kernels have none"
    if problem.dropout:
        return "dropout; the kernels have none"
    if problem.scale <= 0:
        return f"scale {problem.scale}; the kernels' running maximum needs a scale greater than 0"
    return None


def sm90_limits(problem: Problem) -> str | None:
    """What the Hopper kernel leaves to the others, besides `feature_limits`."""
    lengths = (problem.len_q, problem.len_k, problem.len_k)
    heads = (problem.heads, problem.heads_k, problem.heads_k)
    sizes = zip(problem.strides, heads, lengths, strict=True)
    if any((head == 0 and n > 1) or (row == 0 and length > 1) for (_, head, row), n, length in sizes):
        return "an expanded tensor (a stride is 0); bulk copies need memory that is there"
    return None


@functools.cache
def _machine_limits(device: torch.device, hopper: bool) -> str | None:
    if device.type != "cuda":
        return f"tensors on {device.type}; the kernels run on NVIDIA GPUs"
    if torch.version.hip is not None:
        return "this build of PyTorch is for AMD GPUs"
    if not torch.cuda.is_available():
        return "PyTorch sees no NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if hopper and (major, minor) != (9, 0):
        return f"compute capability {major}.{minor}; wgmma exists on 9.0 (Hopper) alone"
    if major < 8:
        return f"compute capability {major}.{minor}; the kernels need 8.0 (Ampere) or later"
    return driver.available() or jit.compiler_missing()


def hopper_missing(device: torch.device) -> str | None:
    """Why the Hopper kernel cannot run here; None if it can."""
    return _machine_limits(device, True)


def _supports_sm80(problem: Problem) -> str | None:
    return feature_limits(problem) or _machine_limits(problem.device, False)


def _supports_sm90(problem: Problem) -> str | None:
    return feature_limits(problem) or sm90_limits(problem) or _machine_limits(problem.device, True)


def _plan_sm80(problem: Problem, out_strides: Strides) -> Plan:
    major, minor = torch.cuda.get_device_capability(problem.device)
    return plan_sm80(problem, f"sm_{major}{minor}", out_strides)


def _plan_sm90(problem: Problem, out_strides: Strides) -> Plan:
    return plan_sm90(problem, out_strides, torch.cuda.get_device_properties(problem.device).multi_processor_count)


@functools.cache
def kernel(variant: Variant) -> driver.Kernel:
    """Compiled or taken from the cache, and loaded."""
    artifact = jit.get(variant.source, variant.arch, name=variant.name)
    return driver.Kernel(artifact.cubin, smem=variant.smem)


def aligned(t: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy if its address or strides are not multiples of what the kernels move at a time."""
    step = _ALIGN // t.element_size()
    if t.data_ptr() % _ALIGN == 0 and all(
        s % step == 0 for n, s in zip(t.shape[:3], t.stride()[:3], strict=True) if n > 1
    ):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def allocate_lse(problem: Problem, inputs: Inputs) -> torch.Tensor | None:
    if not (problem.return_lse or problem.needs_grad):
        return None
    return torch.empty(inputs.q.shape[:3], dtype=torch.float32, device=problem.device)


class Call:
    """A prepared launch for all calls that differ in nothing but addresses. Belongs to one thread."""

    def __init__(self, plan: Plan, device: int) -> None:
        variant = plan.variant
        # Tensor maps want an address when they are encoded; each call moves them to its own.
        somewhere = 1 << 30
        maps = {f"map_{t}": dataclasses.replace(spec, address=somewhere).encode() for t, spec in plan.maps.items()}
        params = variant.params.pack(plan.values | maps)
        with torch.cuda.device(device):
            function = kernel(variant).function(device)
        self._launch = launch = driver.Launch(function, plan.grid, variant.threads, variant.smem, params)
        self._patch = variant.params.patcher(*POINTERS)
        slots = (variant.params.offsets[f"map_{t}"] for t in plan.maps)  # q, k, v, o: in the order of the addresses
        self._maps = [driver.TensorMapSlot(launch.params, offset) for offset in slots]
        self._device, self._workspace = device, plan.workspace

    def __call__(self, *addresses: int) -> None:
        """The addresses of q, k, v, o, lse, sinks, cu_q, cu_k; 0 for what is not there."""
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                return self(*addresses)
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        counter, _alive = _counter(self._device, stream) if self._maps else (0, None)
        workspace = torch.empty(self._workspace, dtype=torch.float32, device=self._device) if self._workspace else None
        self._patch(self._launch.params, *addresses, counter, _address(workspace))
        for slot, address in zip(self._maps, addresses, strict=False):
            slot.point_to(address)
        self._launch.launch(stream)


_COUNTER_BYTES = 4 * (1 + PART_COUNTERS)
_RESERVE = 1024  # counters, 4 MB: one for every stream, and for every stream of every captured graph
_counters: dict[tuple[int, ...], int] = {}
_spare: dict[int, list[int]] = {}


def _counter(device: int, stream: int) -> tuple[int, torch.Tensor | None]:
    """The address of zeros that a launch on this stream may count with, and what has to live until it is under way.
    Launches on a stream run one after the other and leave them zero, so all of them can use the same. A graph may be
    replayed beside anything: in a capture, each stream gets zeros of its own, which its first launch sets. Nothing can
    be allocated then, so they come from a reserve, and, if that is used up, from the graph's memory, to be set for this
    launch alone. The reserve is no memory of torch's, who would miss it in pools that it manages for others; nor do the
    zeros come from `torch.zeros`, whose kernel would have to be loaded in the first call of a process."""
    capturing = torch._C._cuda_isCurrentStreamCapturing()
    key = (device, stream, driver.capture_id(stream)) if capturing else (device, stream)
    found = _counters.get(key)
    if found is not None:
        return found, None
    spare = _spare.setdefault(device, [])
    if not spare and capturing:
        memory = torch.empty(_COUNTER_BYTES, dtype=torch.uint8, device=device)
        driver.zero(memory.data_ptr(), _COUNTER_BYTES, stream)
        return memory.data_ptr(), memory
    if not spare:
        reserve = driver.allocate(_RESERVE * _COUNTER_BYTES)
        spare += range(reserve, reserve + _RESERVE * _COUNTER_BYTES, _COUNTER_BYTES)
    found = _counters[key] = spare.pop()
    driver.zero(found, _COUNTER_BYTES, stream)
    return found, None


_local = threading.local()
Planner = Callable[[Problem, Strides], Plan]


def _call(planner: Planner, problem: Problem, out_strides: Strides) -> Call:
    calls: dict[Any, Call] = _local.__dict__.setdefault("calls", {})
    key = planner, problem, out_strides
    found = calls.get(key)
    if found is None:
        if len(calls) >= 1024:
            calls.clear()
        found = calls[key] = Call(planner(problem, out_strides), problem.device.index or 0)
    return found


def _address(t: torch.Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _forward(
    planner: Planner, problem: Problem, inputs: Inputs, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    q, k, v = (aligned(t) for t in (inputs.q, inputs.k, inputs.v))
    strides = tuple(t.stride()[:3] for t in (q, k, v))
    if strides != problem.strides:
        problem = dataclasses.replace(problem, strides=strides)
    if out is None:
        batch, heads, rows, _ = q.shape
        out = q.new_empty(batch, rows, heads, problem.dim_v).transpose(1, 2)
    o = aligned(out)  # if it must be a copy, the result is copied back below
    lse = allocate_lse(problem, inputs)
    sinks = None if inputs.sinks is None else inputs.sinks.detach().float().contiguous()
    call = _call(planner, problem, o.stride()[:3])
    call(*map(_address, (q, k, v, o, lse, sinks, inputs.cu_q, inputs.cu_k)))
    if o is not out:
        out.copy_(o)
    return out, lse


def _repeat(
    planner: Planner, problem: Problem, inputs: Inputs, layout: str, return_lse: bool
) -> Callable[..., Any] | None:
    """`_forward` for further dense calls with the same shapes and options, with the Python left out."""
    if problem.packed or any(aligned(t) is not t for t in (inputs.q, inputs.k, inputs.v)):
        return None
    batch, heads, rows, _ = inputs.q.shape
    columns, dtype, device = problem.dim_v, problem.dtype, problem.device
    if layout == "bshd":
        shape, out_strides = (batch, rows, heads, columns), (rows * heads * columns, columns, heads * columns)
    else:
        shape, out_strides = (batch, heads, rows, columns), (heads * rows * columns, rows * columns, columns)
    call, empty = _call(planner, problem, out_strides), torch.empty

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        out = empty(shape, dtype=dtype, device=device)
        if not return_lse:
            call(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), 0, 0, 0, 0)
            return out
        lse = empty((batch, heads, rows), dtype=torch.float32, device=device)
        call(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), 0, 0, 0)
        return out, lse

    return run


def _plan(planner: Planner, problem: Problem) -> Plan:
    """With a contiguous output."""
    return planner(
        problem, (problem.len_q * problem.heads * problem.dim_v, problem.dim_v, problem.heads * problem.dim_v)
    )


def _backend(name: str, summary: str, supports: Callable[[Problem], str | None], planner: Planner) -> Backend:
    return Backend(
        name=name,
        summary=summary,
        supports=supports,
        forward=functools.partial(_forward, planner),
        details=lambda problem: _plan(planner, problem).describe(),
        extra_bytes=lambda problem: 4 * _plan(planner, problem).workspace,
        repeat=functools.partial(_repeat, planner),
    )


BACKENDS = {
    "sm90": _backend("sm90", "our CUDA kernel for Hopper: TMA, wgmma, warp specialisation", _supports_sm90, _plan_sm90),
    "sm80": _backend(
        "sm80", "our CUDA kernel for Ampere and later: mma.sync, ldmatrix, cp.async", _supports_sm80, _plan_sm80
    ),
}
