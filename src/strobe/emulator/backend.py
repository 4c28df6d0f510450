"""`backend="emulator"`: the CUDA kernels on CPU tensors, through the same plan and the same arguments as on a GPU. For
tests, lessons and debuggers: thousands of times slower than anything else.

STROBE_EMULATE=sm90 runs the Hopper kernel instead of the Ampere one, STROBE_EMULATOR_MODE=async lets copies land late.
"""

from __future__ import annotations

import dataclasses
import os

import torch

from strobe.backends.backend import Backend
from strobe.cuda.backend import aligned, allocate_lse, feature_limits, sm90_limits
from strobe.cuda.plan import PART_COUNTERS, Plan, Strides, plan_sm80, plan_sm90
from strobe.emulator.compiler import build, compiler, how_to_install
from strobe.emulator.program import Buffer, Counters, Mode, mode_and_seed
from strobe.emulator.tensor_map import encode_tensor_map
from strobe.problem import Inputs, Problem

ARCH = "sm_80"
MULTIPROCESSORS = 3  # of the emulated Hopper: few, so that blocks go through several tiles
_WRITABLE = ("o", "lse", "counter", "partial")


def _kernel() -> str:
    chosen = os.environ.get("STROBE_EMULATE", "sm80")
    if chosen not in ("sm80", "sm90"):
        raise ValueError(f'STROBE_EMULATE is {chosen!r}; allowed are "sm80" and "sm90"')
    return chosen


def _supports(problem: Problem) -> str | None:
    if problem.device.type != "cpu":
        return f"tensors on {problem.device.type}; the emulator runs on the CPU"
    reason = feature_limits(problem) or (sm90_limits(problem) if _kernel() == "sm90" else None)
    return reason or (how_to_install() if compiler() is None else None)


def plan(problem: Problem, out_strides: Strides) -> Plan:
    if _kernel() == "sm90":
        return plan_sm90(problem, out_strides, MULTIPROCESSORS)
    return plan_sm80(problem, ARCH, out_strides)


def launch(plan: Plan, tensors: dict[str, torch.Tensor | None], *, mode: Mode = "sync", seed: int = 0) -> Counters:
    """Run a plan on CPU tensors, given by the name of the pointer in the kernel's arguments."""
    values = dict(plan.values)
    buffers = []
    tensors = tensors | {"counter": torch.zeros(1 + PART_COUNTERS, dtype=torch.int32)}
    if plan.workspace:
        tensors["partial"] = torch.full((plan.workspace,), torch.nan)
    for name, t in tensors.items():
        if t is not None:
            values[name] = t.data_ptr()
            last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            buffers.append(Buffer(name, t.data_ptr(), (last + 1) * t.element_size(), writable=name in _WRITABLE))
    for name, spec in plan.maps.items():
        tensor = tensors[name]
        assert tensor is not None
        values[f"map_{name}"] = encode_tensor_map(dataclasses.replace(spec, address=tensor.data_ptr()))
    variant = plan.variant
    program = build(variant.source, name=variant.name)
    params = bytes(variant.params.pack(values))
    return program.run(
        params, grid=plan.grid, threads=variant.threads, smem=variant.smem, buffers=buffers, mode=mode, seed=seed
    )


def _forward(problem: Problem, inputs: Inputs, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    if out is None:
        batch, heads, rows, _ = inputs.q.shape
        out = inputs.q.new_empty(batch, rows, heads, problem.dim_v).transpose(1, 2)
    q, k, v, o = (aligned(t.detach()) for t in (inputs.q, inputs.k, inputs.v, out))
    lse = allocate_lse(problem, inputs)
    sinks = None if inputs.sinks is None else inputs.sinks.detach().float().contiguous()
    tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "sinks": sinks, "cu_q": inputs.cu_q, "cu_k": inputs.cu_k}
    problem = dataclasses.replace(problem, strides=tuple(t.stride()[:3] for t in (q, k, v)))
    mode, seed = mode_and_seed()
    launch(plan(problem, o.stride()[:3]), tensors, mode=mode, seed=seed)
    if o is not out:
        out.copy_(o)
    return out, lse


BACKENDS = {
    "emulator": Backend(
        name="emulator",
        summary="the CUDA kernels, emulated on the CPU",
        supports=_supports,
        forward=_forward,
        automatic=False,
    )
}
