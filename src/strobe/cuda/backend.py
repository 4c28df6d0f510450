"""Attention on NVIDIA GPUs: problem -> plan -> cubins -> launches on the current stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from strobe.arguments import Arguments, Layout
from strobe.backends.backend import Backend, Gradients
from strobe.cuda import driver, forward_sm90, jit
from strobe.cuda.backward_plan import TENSORS, group_parts
from strobe.cuda.families import FAMILIES, Family
from strobe.cuda.launch import Launcher, address, allocator
from strobe.cuda.plan import ALIGN, Machine, Plan
from strobe.problem import Problem, Strides

Planner = Callable[[Problem, Strides, Machine], Plan]
_NOTHING = (0, 0, 0, 0, 0)  # `_rest` of a call that has none of them
_SMEM_OF_HOPPER = 227 << 10


@functools.cache
def machine_of(device: torch.device) -> Machine:
    facts = torch.cuda.get_device_properties(device)
    hopper = (facts.major, facts.minor) == (9, 0)
    return Machine(
        arch=forward_sm90.ARCH if hopper else f"sm_{facts.major}{facts.minor}",
        sms=facts.multi_processor_count,
        l2_bytes=facts.L2_cache_size,
        smem_bytes=getattr(facts, "shared_memory_per_block_optin", _SMEM_OF_HOPPER),
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


# ---- tensors as the kernels want them --------------------------------------------------------------------------------


def is_aligned(t: torch.Tensor) -> bool:
    """Whether its address and its strides but the last are multiples of what the kernels move at a time."""
    step = ALIGN // t.element_size()
    strides = (s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1)
    return t.data_ptr() % ALIGN == 0 and all(s % step == 0 for s in strides)


def aligned(t: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy if it is not aligned."""
    return t if is_aligned(t) else t.clone(memory_format=torch.contiguous_format)


def in_step(t: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The tensor itself, or a copy if whole rows do not lead from one sequence to the next (`tensor_maps.buffer_rows`)."""
    batch, _, rows = inside_strides(t, layout)
    regular = t.shape[0] == 1 or layout.inside(t).shape[2] <= 1 or (rows > 0 and batch % rows == 0)
    return t if regular else t.clone(memory_format=torch.contiguous_format)


def inside_strides(t: torch.Tensor, layout: Layout) -> Strides:
    return layout.inside(t).stride()[:3]  # type: ignore[return-value]


def fp32_contiguous(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.detach().float().contiguous()


@dataclass(frozen=True)
class Tensors:
    """What the kernels of a call read and write."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor | None
    sinks: torch.Tensor | None
    cu_q: torch.Tensor | None
    cu_k: torch.Tensor | None
    positions: torch.Tensor | None
    seed: int
    earlier: torch.Tensor | None


def seed_of(a: Arguments) -> int:
    """64 bits, which the kernels take for unsigned."""
    return 0 if a.seed is None else a.seed & ((1 << 64) - 1)


def prepare(problem: Problem, layout: Layout, a: Arguments) -> tuple[Tensors, Problem]:
    """Aligned tensors, outputs allocated; and the problem with the strides that they have."""
    q, k, v = aligned(a.q), aligned(a.k), aligned(a.v)
    if problem.positions and not problem.varlen:
        k, v = in_step(k, layout), in_step(v, layout)
    if a.out is None:
        o = torch.empty((*q.shape[:-1], problem.dim_v), dtype=problem.out_dtype, device=q.device)
    else:
        o = aligned(a.out)
    lse = a.earlier_lse
    if lse is None and problem.lse:
        lse = torch.empty(layout.rows_shape(tuple(q.shape)), dtype=torch.float32, device=q.device)
    cu_q, cu_k, positions = (None if t is None else t.contiguous() for t in (a.cu_q, a.cu_k, a.positions))
    strides = [inside_strides(t, layout) for t in (q, k, v)]
    rows, keys = replace(problem.q, strides=(strides[0],)), replace(problem.k, strides=tuple(strides[1:]))
    earlier = None if a.earlier_out is None else aligned(a.earlier_out)
    of_earlier = None if earlier is None else inside_strides(earlier, layout)
    tensors = Tensors(q, k, v, o, lse, fp32_contiguous(a.sinks), cu_q, cu_k, positions, seed_of(a), earlier)
    return tensors, replace(problem, q=rows, k=keys, earlier_out=of_earlier)


def prepare_backward(
    problem: Problem,
    layout: Layout,
    a: Arguments,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: Any,
    sms: int,
) -> tuple[dict[str, Any], Problem, dict[str, Strides]]:
    """The tensors of a backward plan by name, gradients allocated; the problem with the strides that they have, and the
    strides of those that it does not know. `sms`: for so many multiprocessors groups of heads are divided into parts."""
    q, k, v, o = (aligned(t.detach().to(problem.dtype)) for t in (a.q, a.k, a.v, out))  # a merged `out` is fp32
    d_o = dout.to(problem.dtype)
    d_o = aligned(d_o if d_o.stride(-1) == 1 else d_o.contiguous())
    wanted = problem.gradients
    lse = lse.contiguous()  # the LSE of some rows of a shard has gaps
    tensors: dict[str, Any] = {"q": q, "k": k, "v": v, "o": o, "d_o": d_o, "lse": lse}
    tensors["dlse"] = None if dlse is None else dlse.contiguous()
    tensors["dq"] = torch.empty(q.shape, dtype=problem.out_dtype, device=q.device) if "q" in wanted else None
    both = "k" in wanted or "v" in wanted  # one kernel computes both
    problem = replace(problem, group_parts=group_parts(problem, sms))
    for name, t in (("dk", k), ("dv", v)):
        shape, dtype = _room_for_parts(t, layout, problem)
        tensors[name] = torch.empty(shape, dtype=dtype, device=q.device) if both else None
    tensors["dsink"] = torch.empty_like(lse) if "sinks" in wanted else None
    tensors["sinks"] = fp32_contiguous(a.sinks)
    for name in ("cu_q", "cu_k", "positions"):
        t = getattr(a, name)
        tensors[name] = None if t is None else t.contiguous()
    tensors["seed"] = seed_of(a)
    named = ("q", "k", "v", "o", "d_o", "dq", "dk", "dv")
    strides = {n: inside_strides(tensors[n], layout) for n in named if tensors[n] is not None}
    rows, keys = replace(problem.q, strides=(strides["q"],)), replace(problem.k, strides=(strides["k"], strides["v"]))
    return tensors, replace(problem, q=rows, k=keys), strides


def _room_for_parts(t: torch.Tensor, layout: Layout, problem: Problem) -> tuple[torch.Size, torch.dtype]:
    """Shape and dtype of dK or dV, which is like `t`: one for each part of a group of query heads."""
    shape, parts = t.shape, problem.group_parts
    if parts == 1:
        return shape, problem.out_dtype
    heads = layout.value.index("h")
    return torch.Size((*shape[:heads], shape[heads] * parts, *shape[heads + 1 :])), torch.float32


def _sum_of_parts(t: torch.Tensor | None, layout: Layout, problem: Problem) -> torch.Tensor | None:
    """dK or dV of all parts together, if there are several."""
    heads = layout.value.find("h")
    if t is None or heads < 0 or t.shape[heads] == problem.heads_k:
        return t
    return t.unflatten(heads, (problem.heads_k, -1)).sum(heads + 1).to(problem.out_dtype)


def gradients_of(problem: Problem, layout: Layout, tensors: dict[str, Any], a: Arguments) -> Gradients:
    """What was asked for, in the caller's layout and dtypes."""
    found = {n: tensors[f"d{n}"] if n in problem.gradients else None for n in ("q", "k", "v")}
    dk, dv = (_sum_of_parts(found[n], layout, problem) for n in ("k", "v"))
    sinks = _sum_of_rows(tensors["dsink"], layout, a) if "sinks" in problem.gradients else None
    return Gradients(found["q"], dk, dv, None, sinks)


def _sum_of_rows(dsink: torch.Tensor, layout: Layout, a: Arguments) -> torch.Tensor:
    return layout.rows_inside(dsink).sum((0, 2)).to(a.sinks.dtype)


# ---- binding ---------------------------------------------------------------------------------------------------------


def _bind(family: Family, problem: Problem, layout: Layout) -> Any:
    module = family.module(problem)
    return _bind_backward(module, problem, layout) if problem.gradients else _bind_forward(module.plan, problem, layout)


def _bind_backward(module: Any, problem: Problem, layout: Layout) -> Any:
    """A launcher for each set of strides of those tensors that the signature of the forward call does not know. Where
    no tensor of the first call had to be copied, later ones like it are launched at once."""
    machine, device = machine_of(problem.device), problem.device.index or 0
    launchers: dict[Any, Launcher] = {}
    repeated: dict[Any, Any] = {}

    def run(a: Arguments, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                return run(a, out, lse, dout, dlse)
        seen = (
            out.is_contiguous() or out.stride(), out.dtype, lse.is_contiguous() or lse.stride(),
            dout.is_contiguous() or dout.stride(), dout.dtype, dlse is None or dlse.is_contiguous(),
        )  # fmt: skip
        again = repeated.get(seen)
        if again is not None and not (out.data_ptr() | dout.data_ptr()) & (ALIGN - 1):
            return again(a, out, lse, dout, dlse)
        tensors, actual, strides = prepare_backward(problem, layout, a, out, lse, dout, dlse, machine.sms)
        key = tuple(strides.values())
        launcher = launchers.get(key)
        if launcher is None:
            plan = module.plan(actual, strides, machine)
            launcher = launchers[key] = Launcher(plan, device)
        launcher(*[address(tensors[name]) for name in TENSORS])
        given = {"q": a.q, "k": a.k, "v": a.v, "o": out, "d_o": dout, "lse": lse, "dlse": dlse, "sinks": a.sinks}
        given |= {"cu_q": a.cu_q, "cu_k": a.cu_k, "positions": a.positions}
        if _nothing_copied(given.values(), (tensors[name] for name in given)):
            repeated[seen] = _repeated_backward(launcher, actual, layout, a)
        return gradients_of(problem, layout, tensors, a)

    return run


def _repeated_backward(launcher: Launcher, problem: Problem, layout: Layout, a: Arguments) -> Any:
    """The same call with other tensors, as `prepare_backward`, a launch and `gradients_of` would do it. Nothing has to be
    copied: allocate, and launch."""
    want_q, want_k, want_v, want_sinks = (name in problem.gradients for name in ("q", "k", "v", "sinks"))
    parts, plain, new_dq = problem.group_parts, _is_plain(a), allocator(a.q.shape, problem.out_dtype)
    new_dk, new_dv = (allocator(*_room_for_parts(t, layout, problem)) for t in (a.k, a.v))

    def run(a: Arguments, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
        q, k, v = a[:3]
        dq = new_dq() if want_q else None
        dk, dv = (new_dk(), new_dv()) if want_k or want_v else (None, None)
        dsink = torch.empty_like(lse) if want_sinks else None
        launcher(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            dout.data_ptr(),
            lse.data_ptr(),
            0 if dlse is None else dlse.data_ptr(),
            0 if dq is None else dq.data_ptr(),
            0 if dk is None else dk.data_ptr(),
            0 if dv is None else dv.data_ptr(),
            0 if dsink is None else dsink.data_ptr(),
            *(_NOTHING if plain else _rest(a)),
        )
        sinks = None if dsink is None else _sum_of_rows(dsink, layout, a)
        if parts > 1:
            dk, dv = _sum_of_parts(dk, layout, problem), _sum_of_parts(dv, layout, problem)
        return Gradients(dq, dk if want_k else None, dv if want_v else None, None, sinks)

    return run


def _bind_forward(planner: Planner, problem: Problem, layout: Layout) -> Any:
    """The plan is made in the first call, from the tensors it sees: whoever calls again has tensors of the same shapes,
    strides and alignment (`strobe.bound_call.signature`)."""
    launcher: Launcher | None = None
    again: Any = None
    device = problem.device.index or 0

    def run(a: Arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
        nonlocal launcher, again
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                return run(a)
        if again is not None:
            return again(a)
        x, actual = prepare(problem, layout, a)
        if launcher is None:
            plan = planner(actual, inside_strides(x.o, layout), machine_of(problem.device))
            launcher = Launcher(plan, device)
            out = x.o if a.out is None else a.out
            given = (a.q, a.k, a.v, out, a.sinks, a.cu_q, a.cu_k, a.positions, a.earlier_out)
            if _nothing_copied(given, (x.q, x.k, x.v, x.o, x.sinks, x.cu_q, x.cu_k, x.positions, x.earlier)):
                again = _repeated(launcher, a, x) if a.earlier_lse is None else _merged_again(launcher)
        tensors = (x.q, x.k, x.v, x.o, x.lse, x.sinks, x.cu_q, x.cu_k, x.positions, x.seed)
        launcher(*map(address, tensors if x.earlier is None else (*tensors, x.earlier)))
        if a.out is None:
            return x.o, x.lse
        return a.out if x.o is a.out else a.out.copy_(x.o), x.lse

    return run


def _repeated(launcher: Launcher, a: Arguments, x: Tensors) -> Any:
    """The same call with other tensors. Nothing has to be copied: allocate, and launch."""
    plain, new_out = _is_plain(a), allocator(x.o.shape, x.o.dtype)
    new_lse = None if x.lse is None else allocator(x.lse.shape, x.lse.dtype)

    def run(a: Arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v = a[:3]
        out = new_out() if a.out is None else a.out
        lse = None if new_lse is None else new_lse()
        rest = _NOTHING if plain else _rest(a)
        to = 0 if lse is None else lse.data_ptr()
        launcher(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), to, *rest)
        return out, lse

    return run


def _nothing_copied(given: Iterable[Any], used: Iterable[Any]) -> bool:
    """Whether the kernels read and write the caller's tensors themselves."""
    return all(address(t) == address(u) for t, u in zip(given, used, strict=True))


def _is_plain(a: Arguments) -> bool:
    return a.seed is None and a.sinks is None and a.cu_q is None and a.positions is None


def _rest(a: Arguments) -> tuple[int, ...]:
    """Addresses of sinks, cu_q, cu_k and positions, 0 for those that are not there; and the seed."""
    sinks, cu_q, cu_k, positions = a.sinks, a.cu_q, a.cu_k, a.positions
    return (
        0 if sinks is None else sinks.data_ptr(),
        0 if cu_q is None else cu_q.data_ptr(),
        0 if cu_k is None else cu_k.data_ptr(),
        0 if positions is None else positions.data_ptr(),
        seed_of(a),
    )


def _merged_again(launcher: Launcher) -> Any:
    """As `_repeated`, for a call that merges into an earlier result: nothing has to be allocated either."""

    def run(a: Arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
        tensors = (a.q, a.k, a.v, a.out, a.earlier_lse, a.sinks, a.cu_q, a.cu_k, a.positions, seed_of(a))
        launcher(*map(address, tensors if a.earlier_out is None else (*tensors, a.earlier_out)))
        return a.out, a.earlier_lse

    return run


# ---- the backends ----------------------------------------------------------------------------------------------------


def _plan(planner: Planner, problem: Problem) -> Plan:
    """With a contiguous output."""
    width = problem.dim_v
    return planner(
        problem, (problem.len_q * problem.heads * width, width, problem.heads * width), machine_of(problem.device)
    )


def _backend(name: str, summary: str) -> Backend:
    family = FAMILIES[name]
    return Backend(
        name=name,
        summary=summary,
        limits=family.limits,
        machine=lambda device: missing(device, hopper=name == "sm90"),
        bind=functools.partial(_bind, family),
        details=lambda problem: dict(_plan(family.forward.plan, problem).details),
        extra_bytes=lambda problem: _plan(family.forward.plan, problem).workspace_bytes,
        merges=True,
        finishes=lambda problem: name == "sm90" and forward_sm90.splits_of(_plan(family.forward.plan, problem)) == 1,
    )


BACKENDS = {
    "sm90": _backend("sm90", "our CUDA kernels for Hopper: TMA, wgmma, warp specialisation"),
    "sm80": _backend("sm80", "our CUDA kernels for Ampere and later: mma.sync, ldmatrix, cp.async"),
}
