"""Attention on NVIDIA GPUs: problem -> plan -> cubins -> launches on the current stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from strobe.backends.backend import Backend, Gradients, Pass
from strobe.cuda.launch import Launcher, Planned, address, allocator, compile_together, spills
from strobe.cuda.parts.plan import Machine, Plan
from strobe.cuda.plans import forward_sm90
from strobe.cuda.plans.families import FAMILIES, Family
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
from strobe.problem import Problem, Strides
from strobe.problem.arguments import ALIGN, Arguments, Layout

Planner = Callable[[Problem, Strides, Machine], Plan]
_SMEM_OF_HOPPER = 227 << 10
_data_ptr = torch.Tensor.data_ptr


@functools.cache
def machine_of(device: torch.device) -> Machine:
    facts = torch.cuda.get_device_properties(device)
    hopper = (facts.major, facts.minor) == (9, 0)
    return Machine(
        arch=forward_sm90.ARCH if hopper else f"sm_{facts.major}{facts.minor}",
        sms=facts.multi_processor_count,
        l2_bytes=facts.L2_cache_size,
        smem_bytes=getattr(facts, "shared_memory_per_block_optin", _SMEM_OF_HOPPER),
        spills=functools.partial(spills, device.index or 0),
        compile=compile_together,
    )


@functools.cache
def missing(device: torch.device, hopper: bool) -> str | None:
    """Why the kernels cannot run here; None if they can."""
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


# ---- binding ---------------------------------------------------------------------------------------------------------
# A plan is made in the first call, from the tensors it sees: later calls have tensors of the same shapes, strides and
# alignment (`strobe.call.bound_call.signature`). Where no tensor had to be copied, later calls are launched at once, by a
# function that knows which tensors there are.


def _bind(family: Family, problem: Problem, layout: Layout) -> Pass:
    module = family.module(problem)
    return _bind_backward(module, problem, layout) if problem.gradients else _bind_forward(module.plan, problem, layout)


def _nothing_copied(of_call: Mapping[str, Any], prepared: Mapping[str, Any]) -> bool:
    """Whether the kernels read and write the caller's tensors themselves."""
    return all(address(t) == address(prepared.get(name)) for name, t in of_call.items())


def _inputs(a: Arguments) -> dict[str, Any]:
    """The tensors that kernels read, as the caller has them."""
    read = {name: read.of_call(a) for name, read in READ.items() if name != "seed"}
    return {"q": a.q, "k": a.k, "v": a.v, **read}


def _bind_forward(planner: Planner, problem: Problem, layout: Layout) -> Pass:
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
            plan = planner(actual, inside_strides(x["o"], layout), machine_of(problem.device))
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
    """The same call with other tensors: allocate, and launch."""
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


def _bind_backward(module: Any, problem: Problem, layout: Layout) -> Pass:
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
            launchers[key] = Launcher(module.plan(actual, strides, machine), device, slots.names), slots
        launcher, slots = launchers[key]
        launcher(*slots.addresses(x), blocks=a.blocks)
        sums = "dbias" in x or actual.learnt  # which begin with zeros
        if not sums and _nothing_copied({**_inputs(a), "o": out, "d_o": dout, "lse": lse, "dlse": dlse}, x):
            repeated[seen] = _repeated_backward(launcher, slots, actual, layout, a)
        return gradients_of(problem, layout, x, a)

    return Pass(run)


def _repeated_backward(launcher: Launcher, slots: Slots, problem: Problem, layout: Layout, a: Arguments) -> Any:
    """The same call with other tensors, as `prepare_backward`, a launch and `gradients_of` would do it: allocate, and
    launch."""
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


def _plan(planner: Planner, problem: Problem) -> Plan:
    """With a contiguous output."""
    width, row = problem.dim_v, problem.heads * problem.dim_v
    return planner(problem, (problem.len_q * row, width, row), machine_of(problem.device))


def _backend(name: str, summary: str) -> Backend:
    family = FAMILIES[name]
    return Backend(
        name=name,
        summary=summary,
        limits=family.limits,
        machine=lambda device: missing(device, hopper=name == "sm90"),
        bind=functools.partial(_bind, family),
        details=lambda problem: dict(_plan(family.module(problem).plan, problem).details),
        extra_bytes=lambda problem: _plan(family.module(problem).plan, problem).workspace_bytes,
        pages=name == "sm90",
        invariant=name == "sm90",
        merges=True,
        captured_gradients=True,
        rounds_states=lambda p: name == "sm90" and forward_sm90.splits_of(_plan(family.module(p).plan, p)) == 1,
    )


BACKENDS = {
    "sm90": _backend("sm90", "our CUDA kernels for Hopper: TMA, wgmma, warp specialisation"),
    "sm80": _backend("sm80", "our CUDA kernels for Ampere and later: mma.sync, ldmatrix, cp.async"),
}
