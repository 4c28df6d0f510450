"""Attention on NVIDIA GPUs: problem -> plan -> cubins -> launches on the current stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from strobe.backends.backend import Backend, Gradients, Pass
from strobe.cuda import summed_gradients
from strobe.cuda.launch import Launcher, Planned, address, allocator, compile_together, spills
from strobe.cuda.parts.plan import ALIGN, Machine, Plan
from strobe.cuda.plans import forward_sm90
from strobe.cuda.plans.backward_plan import Wanted, group_parts
from strobe.cuda.plans.families import FAMILIES, Family
from strobe.cuda.runtime import driver, jit
from strobe.problem import Problem, Strides
from strobe.problem.arguments import ROWS, Arguments, Layout
from strobe.variants.text import MOST_TENSORS

Planner = Callable[[Problem, Strides, Machine], Plan]
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


# ---- tensors as the kernels want them --------------------------------------------------------------------------------


def is_aligned(t: torch.Tensor) -> bool:
    """Whether its address and its strides but the last are multiples of what the kernels move at a time."""
    step = ALIGN // t.element_size()
    strides = (s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1)
    return t.data_ptr() % ALIGN == 0 and all(s % step == 0 for s in strides)


def aligned(t: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy if it is not aligned, or if its memory holds the negated numbers."""
    t = t.resolve_neg()
    return t if is_aligned(t) else t.clone(memory_format=torch.contiguous_format)


def in_step(t: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The tensor itself, or a copy if whole rows do not lead from one sequence to the next (`tensor_maps.buffer_rows`)."""
    batch, _, rows = inside_strides(t, layout)
    regular = t.shape[0] == 1 or layout.inside(t).shape[2] <= 1 or (rows > 0 and batch % rows == 0)
    return t if regular else t.clone(memory_format=torch.contiguous_format)


def inside_strides(t: torch.Tensor, layout: Layout) -> Strides:
    return layout.inside(t).stride()[:3]  # type: ignore[return-value]


def _contiguous(t: torch.Tensor) -> torch.Tensor:
    return t.resolve_neg().contiguous()


def _as_floats(t: torch.Tensor) -> torch.Tensor:
    return t.detach().resolve_neg().float().contiguous()


class Read(NamedTuple):
    """An argument that kernels read, in both directions."""

    given: Callable[[Arguments], Any]  # as the caller has it; None: the call has none
    form: Callable[[Any], Any]  # as kernels read it


def _score_tensor(number: int, a: Arguments) -> torch.Tensor | None:
    tensors = a.score_tensors
    return tensors[number] if number < len(tensors) else None


_FORMS: dict[str, Callable[[Any], Any]] = {
    "floats": _as_floats,
    "contiguous": _contiguous,
    "strided": lambda t: t.detach(),
    "unsigned": lambda seed: seed & ((1 << 64) - 1),
}
# The arguments besides q, k and v, by the name that plans have for them.
READ: dict[str, Read] = {
    **{name: Read(attrgetter(name), _FORMS[row.read]) for name, row in ROWS.items() if row.read is not None},
    **{f"score{i}": Read(functools.partial(_score_tensor, i), _FORMS["strided"]) for i in range(MOST_TENSORS)},
    "mask_tensor": Read(attrgetter("mask_tensor"), lambda t: t),
}


def read_by_kernels(a: Arguments) -> dict[str, Any]:
    """The arguments of READ that the call has."""
    return {name: read.form(t) for name, read in READ.items() if (t := read.given(a)) is not None}


def _addresses(names: Sequence[str], a: Arguments) -> list[int]:
    """The addresses of arguments of READ, as the caller has them; a seed is a number."""
    return [READ["seed"].form(a.seed) if name == "seed" else READ[name].given(a).data_ptr() for name in names]


def with_strides(problem: Problem, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Problem:
    """The problem with the strides that q, k and v have now."""
    of_keys = Layout.BSHD if problem.k.pages is not None else layout
    q, k, v = (inside_strides(tensors[n], of) for n, of in (("q", layout), ("k", of_keys), ("v", of_keys)))
    return replace(problem, q=replace(problem.q, strides=(q,)), k=replace(problem.k, strides=(k, v)))


def prepare(problem: Problem, layout: Layout, a: Arguments) -> tuple[dict[str, Any], Problem]:
    """The tensors of a forward plan by name, aligned, outputs allocated; and the problem with the strides they have."""
    x: dict[str, Any] = {"q": aligned(a.q), "k": aligned(a.k), "v": aligned(a.v)}
    if problem.k.positions and not problem.k.varlen and problem.k.pages is None:
        x |= {name: in_step(x[name], layout) for name in ("k", "v")}
    shape, rows = (*a.q.shape[:-1], problem.dim_v), layout.rows_shape(tuple(a.q.shape))
    x["o"] = torch.empty(shape, dtype=problem.out_dtype, device=a.q.device) if a.out is None else aligned(a.out)
    if a.state_lse is not None:
        x["lse"] = a.state_lse
    elif problem.lse:
        x["lse"] = torch.empty(rows, dtype=torch.float32, device=a.q.device)
    x |= read_by_kernels(a)
    problem = with_strides(problem, layout, x)
    if a.state_out is not None:
        assert problem.state is not None
        x["state"] = aligned(a.state_out)
        problem = replace(problem, state=replace(problem.state, out=inside_strides(x["state"], layout)))
    return x, problem


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
    strides of those that it does not know. Groups of heads are divided into parts for `sms` multiprocessors."""
    given = {"q": a.q, "k": a.k, "v": a.v, "o": out}
    x: dict[str, Any] = {n: aligned(t.detach().to(problem.dtype)) for n, t in given.items()}  # a merged `out` is fp32
    if problem.k.positions and not problem.k.varlen:
        x |= {name: in_step(x[name], layout) for name in ("k", "v")}
    d_o = dout.to(problem.dtype)
    x["d_o"] = aligned(d_o if d_o.stride(-1) == 1 else d_o.contiguous())
    x["lse"] = _contiguous(lse)  # the LSE of some rows of a shard has gaps
    if dlse is not None:
        x["dlse"] = _contiguous(dlse)
    wanted, device = problem.gradients, a.q.device
    if Wanted.of(problem).dq:
        x["dq"] = torch.empty(a.q.shape, dtype=problem.out_dtype, device=device)
    problem = replace(problem, group_parts=group_parts(problem, sms))
    if "k" in wanted or "v" in wanted:  # one kernel computes both
        for name, t in (("dk", a.k), ("dv", a.v)):
            shape, dtype = _room_for_parts(t, layout, problem)
            x[name] = torch.empty(shape, dtype=dtype, device=device)
    if "sinks" in wanted:
        x["dsink"] = torch.empty_like(x["lse"])
    x |= read_by_kernels(a)
    named = ("o", "d_o", "dq", "dk", "dv")
    strides: dict[str, Any] = {n: inside_strides(x[n], layout) for n in named if n in x}
    problem, more = summed_gradients.add_room(problem, a, x)
    return x, with_strides(problem, layout, x), strides | more


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


def gradients_of(problem: Problem, layout: Layout, x: Mapping[str, Any], a: Arguments) -> Gradients:
    """What was asked for, in the caller's layout and dtypes."""
    q, k, v = (x.get(f"d{n}") if n in problem.gradients else None for n in ("q", "k", "v"))
    sinks = _sum_of_rows(x["dsink"], layout, a) if "sinks" in problem.gradients else None
    bias, score = summed_gradients.results(problem, a, x)
    return Gradients(q, _sum_of_parts(k, layout, problem), _sum_of_parts(v, layout, problem), bias, sinks, score)


def _sum_of_rows(dsink: torch.Tensor, layout: Layout, a: Arguments) -> torch.Tensor:
    return layout.rows_inside(dsink).sum((0, 2)).to(a.sinks.dtype)


# ---- binding ---------------------------------------------------------------------------------------------------------
# A plan is made in the first call, from the tensors it sees: later calls have tensors of the same shapes, strides and
# alignment (`strobe.call.bound_call.signature`). Where no tensor had to be copied, later calls are launched at once, by a
# function that knows which tensors there are.


def _bind(family: Family, problem: Problem, layout: Layout) -> Pass:
    module = family.module(problem)
    return _bind_backward(module, problem, layout) if problem.gradients else _bind_forward(module.plan, problem, layout)


def _nothing_copied(given: Mapping[str, Any], used: Mapping[str, Any]) -> bool:
    """Whether the kernels read and write the caller's tensors themselves."""
    return all(address(t) == address(used.get(name)) for name, t in given.items())


def _given(a: Arguments) -> dict[str, Any]:
    """The arguments that kernels read, as the caller has them; a seed is a number."""
    read = {name: read.given(a) for name, read in READ.items() if name != "seed"}
    return {"q": a.q, "k": a.k, "v": a.v, **read}


def _bind_forward(planner: Planner, problem: Problem, layout: Layout) -> Pass:
    launcher: Launcher | None = None
    planned: Planned | None = None
    device = problem.device.index or 0

    def first(a: Arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
        nonlocal launcher, planned
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                return first(a)
        x, actual = prepare(problem, layout, a)
        if launcher is None:
            plan = planner(actual, inside_strides(x["o"], layout), machine_of(problem.device))
            if a.plan is not None and "work" in plan.workspace:
                planned = Planned(plan, device)
                plan = planned.rest
            launcher = Launcher(plan, device, (*x, *(planned.names if planned else ())))
            given = {**_given(a), "o": x["o"] if a.out is None else a.out, "state": a.state_out}
            if _nothing_copied(given, x):
                bound.run = _repeated(launcher, planned, device, a, x)
        launcher(*map(address, x.values()), *(planned.addresses(a) if planned else ()), blocks=a.blocks)
        out = x["o"] if a.out is None or x["o"] is a.out else a.out.copy_(x["o"])
        return out, x.get("lse")

    bound = Pass(first)
    return bound


def _repeated(launcher: Launcher, planned: Planned | None, device: int, a: Arguments, x: Mapping[str, Any]) -> Any:
    """The same call with other tensors, whose addresses come in the order of `x`: allocate, and launch."""
    arguments = [name for name in x if name in READ]  # they come after q, k, v, O and, perhaps, the LSE
    has_state = "state" in x
    new_out = allocator(x["o"].shape, x["o"].dtype)
    in_place = a.state_lse is not None
    new_lse = None if "lse" not in x or in_place else allocator(x["lse"].shape, x["lse"].dtype)
    get_device = torch._C._cuda_getDevice

    def run(a: Arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
        if get_device() != device:
            with torch.cuda.device(device):
                return run(a)
        out = new_out() if a.out is None else a.out
        found = [a.q.data_ptr(), a.k.data_ptr(), a.v.data_ptr(), out.data_ptr()]
        lse = new_lse() if new_lse is not None else a.state_lse
        if lse is not None:
            found.append(lse.data_ptr())
        if arguments:
            found += _addresses(arguments, a)
        if has_state:
            found.append(a.state_out.data_ptr())
        if planned is not None:
            found += planned.addresses(a)
        launcher(*found, blocks=a.blocks)
        return out, lse

    return run


def _bind_backward(module: Any, problem: Problem, layout: Layout) -> Pass:
    """A launcher for each set of strides of those tensors that the signature of the forward call does not know."""
    machine, device = machine_of(problem.device), problem.device.index or 0
    launchers: dict[Any, Launcher] = {}
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
        launcher = launchers.get(key)
        if launcher is None:
            plan = module.plan(actual, strides, machine)
            launcher = launchers[key] = Launcher(plan, device, tuple(x))
        launcher(*map(address, x.values()), blocks=a.blocks)
        sums = "dbias" in x or actual.learnt  # which begin with zeros
        if not sums and _nothing_copied({**_given(a), "o": out, "d_o": dout, "lse": lse, "dlse": dlse}, x):
            repeated[seen] = _repeated_backward(launcher, actual, layout, a, x)
        return gradients_of(problem, layout, x, a)

    return Pass(run)


def _repeated_backward(launcher: Launcher, problem: Problem, layout: Layout, a: Arguments, x: Mapping[str, Any]) -> Any:
    """The same call with other tensors, as `prepare_backward`, a launch and `gradients_of` would do it: allocate, and
    launch."""
    want_q, want_k, want_v, want_sinks = (name in problem.gradients for name in ("q", "k", "v", "sinks"))
    parts, new_dq = problem.group_parts, allocator(a.q.shape, problem.out_dtype)
    new_dk, new_dv = (allocator(*_room_for_parts(t, layout, problem)) for t in (a.k, a.v))
    arguments = [name for name in x if name in READ]

    def run(a: Arguments, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
        q, k, v = a[:3]
        dq = new_dq() if want_q else None
        dk, dv = (new_dk(), new_dv()) if want_k or want_v else (None, None)
        dsink = torch.empty_like(lse) if want_sinks else None
        tensors = (q, k, v, out, dout, lse, dlse, dq, dk, dv, dsink)  # in the order of `x`
        found = [t.data_ptr() for t in tensors if t is not None]
        if arguments:
            found += _addresses(arguments, a)
        launcher(*found, blocks=a.blocks)
        sinks = None if dsink is None else _sum_of_rows(dsink, layout, a)
        if parts > 1:
            dk, dv = _sum_of_parts(dk, layout, problem), _sum_of_parts(dv, layout, problem)
        return Gradients(dq, dk if want_k else None, dv if want_v else None, None, sinks)

    return run


# ---- the backends ----------------------------------------------------------------------------------------------------


def _plan(planner: Planner, problem: Problem) -> Plan:
    """With a contiguous output."""
    width, row = problem.dim_v, problem.heads * problem.dim_v
    return planner(problem, (problem.len_q * row, width, row), machine_of(problem.device))


def _details(plan: Plan) -> dict[str, object]:
    return {**plan.details, "in profilers": ", ".join(launch.kernel.entry for launch in plan.launches)}


def _backend(name: str, summary: str) -> Backend:
    family = FAMILIES[name]
    return Backend(
        name=name,
        summary=summary,
        limits=family.limits,
        machine=lambda device: missing(device, hopper=name == "sm90"),
        bind=functools.partial(_bind, family),
        details=lambda problem: _details(_plan(family.module(problem).plan, problem)),
        extra_bytes=lambda problem: _plan(family.module(problem).plan, problem).workspace_bytes,
        pages=True,
        invariant=True,
        merges=True,
        captured_gradients=True,
        rounds_states=lambda p: name == "sm90" and forward_sm90.splits_of(_plan(family.module(p).plan, p)) == 1,
    )


BACKENDS = {
    "sm90": _backend("sm90", "our CUDA kernels for Hopper: TMA, wgmma, warp specialisation"),
    "sm80": _backend("sm80", "our CUDA kernels for Ampere and later: mma.sync, ldmatrix, cp.async"),
}
