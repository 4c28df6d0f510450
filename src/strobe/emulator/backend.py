"""`backend="emulator"`: the CUDA kernels on CPU tensors, through the same plans and arguments as on a GPU. For tests,
lessons and debuggers: thousands of times slower than anything else.

STROBE_EMULATE=sm90 runs the Hopper kernels instead of the Ampere ones, STROBE_EMULATOR_MODE=async lets copies land late.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
from typing import Any

import torch

from strobe.backends.backend import Backend, Gradients, Pass
from strobe.cuda.parts.architecture import SMEM_BYTES, generation
from strobe.cuda.parts.params import COUNTER, COUNTERS
from strobe.cuda.parts.plan import MAP, Machine, Plan
from strobe.cuda.plans.families import FAMILIES, Family
from strobe.cuda.tensors import gradients_of, inside_strides, prepare, prepare_backward
from strobe.emulator.compiler import build, compiler, how_to_install
from strobe.emulator.program import Buffer, Counters, Mode, mode_and_seed
from strobe.emulator.tensor_map import encode_tensor_map
from strobe.problem import Problem
from strobe.problem.arguments import Arguments, Layout
from strobe.problem.page_checks import check_call
from strobe.variants.block_mask import BlockMask


def _machine(family: Family) -> Machine:
    """The oldest GPU of a family. It has few multiprocessors, so that blocks go through several tiles."""
    architecture = family.architectures[0]
    arch = architecture.target(architecture.first)
    return Machine(arch, sms=3, l2_bytes=64 << 20, smem_bytes=SMEM_BYTES[generation(arch)])


MACHINES = {name: _machine(family) for name, family in FAMILIES.items()}


def _chosen() -> str:
    chosen = os.environ.get("STROBE_EMULATE", "sm80")
    if chosen not in FAMILIES:
        allowed = " and ".join(f'"{name}"' for name in sorted(FAMILIES))
        raise ValueError(f"STROBE_EMULATE is {chosen!r}; allowed are {allowed}")
    return chosen


def launch(
    plan: Plan,
    tensors: dict[str, Any],
    *,
    mode: Mode = "sync",
    seed: int = 0,
    workers: int | None = None,
    blocks: BlockMask | None = None,
) -> Counters:
    """Run a plan on CPU tensors, given by name. What its launches did is counted together. Which block takes which tile
    depends on the host's scheduler, unless there is one worker."""
    tensors = {**tensors, COUNTER: torch.zeros(COUNTERS, dtype=torch.int32)}
    for name, size in plan.workspace.items():
        tensors[name] = torch.full((-(-size // 4),), torch.nan)
    launches = plan.launches
    if blocks is not None and plan.map_key is not None:
        launches = launches[1:] if plan.map_key in blocks.maps else launches
        tensors[MAP] = blocks.maps.setdefault(plan.map_key, tensors[MAP])
    counted = [_launch_one(part, tensors, mode, seed, workers) for part in launches]
    return Counters(**{f.name: sum(getattr(c, f.name) for c in counted) for f in dataclasses.fields(Counters)})


def _launch_one(part: Any, tensors: dict[str, Any], mode: Mode, seed: int, workers: int | None) -> Counters:
    spec = part.kernel
    values, buffers, mapped = dict(part.values), [], {f"map_{name}" for name in part.maps}
    pointers = {f.name: f.ctype for f in spec.params.fields if f.is_address}
    for name in dict.fromkeys((*pointers, *part.maps)):
        t = tensors.get(name)
        if isinstance(t, int) or name == "seed":
            values[name] = t or 0
            continue
        if name in pointers:
            values[name] = 0 if t is None else t.data_ptr() + part.offsets.get(name, 0)
        if t is not None and t.numel():
            last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            written = not pointers.get(name, "").startswith("const")
            buffers.append(Buffer(name, t.data_ptr(), (last + 1) * t.element_size(), writable=written))
    for name, tensor_map in part.maps.items():
        tensor = tensors[name]
        assert tensor is not None
        address = tensor.data_ptr() + part.offsets.get(name, 0)
        values[f"map_{name}"] = encode_tensor_map(dataclasses.replace(tensor_map, address=address))
    assert mapped <= values.keys()
    program = build(spec.source, name=spec.name, entry=spec.entry)
    params = bytes(spec.params.pack(values))
    launched = {"grid": part.grid, "threads": spec.threads, "smem": spec.smem, "buffers": buffers}
    return program.run(params, **launched, mode=mode, seed=seed, workers=workers, together=part.together)


def _bind(problem: Problem, layout: Layout) -> Pass:
    return Pass(_bind_backward(problem, layout) if problem.gradients else _bind_forward(problem, layout))


def _bind_backward(problem: Problem, layout: Layout) -> Any:
    def run(a: Arguments, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
        machine = MACHINES[_chosen()]
        results = (out, lse, dout, dlse)
        tensors, actual, strides = prepare_backward(problem, layout, a, *results, machine.sms)
        mode, seed = mode_and_seed()
        plan = FAMILIES[_chosen()].planner(problem).plan(actual, strides, machine)
        launch(plan, tensors, mode=mode, seed=seed, blocks=a.blocks)
        return gradients_of(problem, layout, tensors, a)

    return run


def _bind_forward(problem: Problem, layout: Layout) -> Any:
    def run(a: Arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
        if a.paged:
            check_call(a, problem.mask)
        plain = a._replace(**{name: getattr(a, name).detach() for name in ("q", "k", "v")})
        x, actual = prepare(problem, layout, plain)
        chosen = _chosen()
        strides = {"o": inside_strides(x["o"], layout)}
        plan = FAMILIES[chosen].planner(problem).plan(actual, strides, MACHINES[chosen])
        mode, seed = mode_and_seed()
        launch(plan, x, mode=mode, seed=seed, blocks=a.blocks)
        if a.out is None:
            return x["o"], x.get("lse")
        return a.out if x["o"] is a.out else a.out.copy_(x["o"]), x.get("lse")

    return run


BACKENDS = {
    "emulator": Backend(
        name="emulator",
        summary="the CUDA kernels, emulated on the CPU",
        limits=lambda problem: FAMILIES[_chosen()].limits(problem),
        machine=lambda device: (
            f"tensors on {device.type}; the emulator runs on the CPU"
            if device.type != "cpu"
            else how_to_install()
            if compiler() is None
            else None
        ),
        bind=_bind,
        automatic=False,
        can=functools.reduce(
            operator.or_, (family.can for family in FAMILIES.values())
        ),  # `limits` asks the chosen one
        rounds_states=lambda problem: FAMILIES[_chosen()].rounds_states(problem, MACHINES[_chosen()]),
    )
}
