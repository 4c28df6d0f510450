"""Attention on NVIDIA GPUs: problem -> plan -> cubins -> launches on the current stream."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from strobe.backends.backend import Backend, Gradients, Pass
from strobe.cuda.launch import Launcher, Planned, address, allocator, compile_together, spills
from strobe.cuda.parts.architecture import SMEM_BYTES, Architecture, target
from strobe.cuda.parts.plan import Machine, Plan
from strobe.cuda.plans.families import FAMILIES, Family
from strobe.cuda.plans.planner import MakePlan
from strobe.cuda.runtime import driver, jit
from strobe.cuda.tensors import (
    READ,
    Slots,
    gradients_of,
    inside_strides,
    prepare,
    prepare_backward,
    room_for_parts,
    sum_of_parts,
    sum_of_rows,
)
from strobe.problem import Problem
from strobe.problem.arguments import ALIGN, Arguments, Layout

_data_ptr = torch.Tensor.data_ptr


@functools.cache
def machine_of(device: torch.device) -> Machine:
    facts = torch.cuda.get_device_properties(device)
    return Machine(
        arch=target((facts.major, facts.minor)),
        sms=facts.multi_processor_count,
        l2_bytes=facts.L2_cache_size,
        smem_bytes=getattr(facts, "shared_memory_per_block_optin", SMEM_BYTES["sm_90"]),
        spills=functools.partial(spills, device.index or 0),
        compile=compile_together,
    )


@functools.cache
def missing(device: torch.device, *architectures: Architecture) -> str | None:
    """Return why kernels for one of these architectures cannot run here; None if they can."""
    if device.type != "cuda":
        return f"tensors on {device.type}; the kernels run on NVIDIA GPUs"
    if torch.version.hip is not None:
        return "this build of PyTorch is for AMD GPUs"
    if not torch.cuda.is_available():
        return "PyTorch sees no NVIDIA GPU"
    capability = torch.cuda.get_device_capability(device)
    refused = [architecture.refuses(capability) for architecture in architectures]
    return refused[-1] if all(refused) else driver.available() or jit.compiler_missing()


# ---- binding ---------------------------------------------------------------------------------------------------------
# A plan is made in the first call, from the tensors it sees: later calls have tensors of the same shapes, strides and
# alignment (`strobe.call.bound_call.signature`). Where no tensor had to be copied, later calls are launched at once, by a
# function that knows which tensors there are.


def _bind(family: Family, problem: Problem, layout: Layout) -> Pass:
    make_plan = family.planner(problem).plan
    return (_bind_backward if problem.gradients else _bind_forward)(make_plan, problem, layout)


def _nothing_copied(of_call: Mapping[str, Any], prepared: Mapping[str, Any]) -> bool:
    """Return whether the kernels read and write the caller's tensors themselves."""
    return all(address(t) == address(prepared.get(name)) for name, t in of_call.items())


def _inputs(a: Arguments) -> dict[str, Any]:
    """The tensors that kernels read, as the caller has them."""
    read = {name: read.of_call(a) for name, read in READ.items() if name != "seed"}
    return {"q": a.q, "k": a.k, "v": a.v, **read}


def _bind_forward(make_plan: MakePlan, problem: Problem, layout: Layout) -> Pass:
    launcher: Launcher | None = None
    planned: Planned | None = None
    slots: Slots | None = None
    device = problem.device.index or 0

    def first(a: Arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
        nonlocal launcher, planned, slots
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                return first(a)
        x, actual = prepare(problem, layout, a)
        if launcher is None or slots is None:
            plan = make_plan(actual, {"o": inside_strides(x["o"], layout)}, machine_of(problem.device))
            if a.plan is not None and "work" in plan.workspace:
                planned = Planned(plan, device)
                plan = planned.rest
            slots = Slots(x)
            launcher = Launcher(plan, device, (*slots.names, *(planned.names if planned else ())))
            of_call = {**_inputs(a), "o": x["o"] if a.out is None else a.out, "state": a.state_out}
            if _nothing_copied(of_call, x):
                bound.run = _repeated(launcher, slots, planned, device, a, x)
        launcher(*slots.addresses(x), *(planned.addresses(a) if planned else ()), blocks=a.blocks)
        out = x["o"] if a.out is None or x["o"] is a.out else a.out.copy_(x["o"])
        return out, x.get("lse")

    bound = Pass(first)
    return bound


def _repeated(
    launcher: Launcher, slots: Slots, planned: Planned | None, device: int, a: Arguments, x: Mapping[str, Any]
) -> Any:
    """Repeat the same call with other tensors: allocate, and launch."""
    has_lse, has_state = "lse" in x, "state" in x
    order = ("q", "k", "v", "o", *("lse",) * has_lse, *("state",) * has_state)  # of the addresses below
    assert slots.tensors == order, f"prepared are {slots.tensors}, a repeated call passes {order}"
    reads = slots.addresses_read if slots.read else None
    new_out = allocator(x["o"].shape, x["o"].dtype)
    in_place = a.state_lse is not None
    new_lse = None if in_place or not has_lse else allocator(x["lse"].shape, x["lse"].dtype)
    get_device = torch._C._cuda_getDevice

    def run(a: Arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
        if get_device() != device:
            with torch.cuda.device(device):
                return run(a)
        out = new_out() if a.out is None else a.out
        lse = new_lse() if new_lse is not None else a.state_lse
        addresses = [a.q.data_ptr(), a.k.data_ptr(), a.v.data_ptr(), out.data_ptr()]
        if lse is not None:
            addresses.append(lse.data_ptr())
        if has_state:
            addresses.append(a.state_out.data_ptr())
        if reads is not None:
            addresses += reads(a)
        if planned is not None:
            addresses += planned.addresses(a)
        launcher(*addresses, blocks=a.blocks)
        return out, lse

    return run


def _bind_backward(make_plan: MakePlan, problem: Problem, layout: Layout) -> Pass:
    """A launcher for each set of strides of those tensors that the signature of the forward call does not know."""
    machine, device = machine_of(problem.device), problem.device.index or 0
    launchers: dict[Any, tuple[Launcher, Slots]] = {}
    repeated: dict[Any, Any] = {}

    def run(a: Arguments, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                return run(a, out, lse, dout, dlse)
        seen = (
            out.is_contiguous() or out.stride(), out.dtype, lse.is_contiguous() or lse.stride(),
            dout.is_contiguous() or dout.stride(), dout.dtype, dout.is_neg(),
            dlse is None or (dlse.is_contiguous(), dlse.is_neg()),
        )  # fmt: skip
        again = repeated.get(seen)
        if again is not None and not (out.data_ptr() | dout.data_ptr()) & (ALIGN - 1):
            return again(a, out, lse, dout, dlse)
        x, actual, strides = prepare_backward(problem, layout, a, out, lse, dout, dlse, machine.sms)
        key = (dlse is None, *strides.values(), actual.strides)
        if key not in launchers:
            slots = Slots(x)
            launchers[key] = Launcher(make_plan(actual, strides, machine), device, slots.names), slots
        launcher, slots = launchers[key]
        launcher(*slots.addresses(x), blocks=a.blocks)
        sums = "dbias" in x or actual.learnt  # which begin with zeros
        if not sums and _nothing_copied({**_inputs(a), "o": out, "d_o": dout, "lse": lse, "dlse": dlse}, x):
            repeated[seen] = _repeated_backward(launcher, slots, actual, layout, a)
        return gradients_of(problem, layout, x, a)

    return Pass(run)


def _repeated_backward(launcher: Launcher, slots: Slots, problem: Problem, layout: Layout, a: Arguments) -> Any:
    """Repeat the same call with other tensors, as `prepare_backward`, a launch and `gradients_of` would do it:
    allocate, and launch."""
    want_q, want_k, want_v, want_sinks = (name in problem.gradients for name in ("q", "k", "v", "sinks"))
    parts, new_dq = problem.group_parts, allocator(a.q.shape, problem.out_dtype)
    new_dk, new_dv = (allocator(*room_for_parts(t, layout, problem)) for t in (a.k, a.v))
    pick, reads = slots.pick, slots.addresses_read if slots.read else None

    def run(a: Arguments, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
        dq = new_dq() if want_q else None
        dk, dv = (new_dk(), new_dv()) if want_k or want_v else (None, None)
        dsink = torch.empty_like(lse) if want_sinks else None
        tensors = {
            "q": a.q, "k": a.k, "v": a.v, "o": out, "d_o": dout, "lse": lse, "dlse": dlse, "dq": dq, "dk": dk, "dv": dv,
            "dsink": dsink,
        }  # fmt: skip
        addresses = [*map(_data_ptr, pick(tensors))]
        if reads is not None:
            addresses += reads(a)
        launcher(*addresses, blocks=a.blocks)
        sinks = None if dsink is None else sum_of_rows(dsink, layout, a)
        if parts > 1:
            dk, dv = sum_of_parts(dk, layout, problem), sum_of_parts(dv, layout, problem)
        return Gradients(dq, dk if want_k else None, dv if want_v else None, None, sinks)

    return run


# ---- the backends ----------------------------------------------------------------------------------------------------


def _plan(family: Family, problem: Problem) -> Plan:
    """The plan of a forward pass with a contiguous output."""
    width, row = problem.dim_v, problem.heads * problem.dim_v
    strides = {"o": (problem.len_q * row, width, row)}
    return family.planner(problem).plan(problem, strides, machine_of(problem.device))


def _details(plan: Plan) -> dict[str, object]:
    return {**plan.details, "in profilers": ", ".join(launch.kernel.entry for launch in plan.launches)}


def _backend(name: str, family: Family) -> Backend:
    return Backend(
        name=name,
        summary=family.summary,
        limits=family.limits,
        machine=lambda device: missing(device, *family.architectures),
        bind=functools.partial(_bind, family),
        details=lambda problem: _details(_plan(family, problem)),
        extra_bytes=lambda problem: _plan(family, problem).workspace_bytes,
        can=family.can,
        rounds_states=lambda problem: family.rounds_states(problem, machine_of(problem.device)),
        device_type="cuda",
    )


BACKENDS = {name: _backend(name, family) for name, family in FAMILIES.items()}
