"""A rung on tensors: on the emulator, or prepared for a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from strobe.cuda.backend import machine_of
from strobe.cuda.launch import Launcher
from strobe.cuda.parts.plan import Machine, Plan
from strobe.cuda.plans import backward_sm90, forward_sm90
from strobe.cuda.runtime import driver, jit
from strobe.emulator import Buffer, Counters, build, encode_tensor_map
from strobe.learn.ladder.rung import PARAMS, POINTERS, Rung, Shape
from strobe.problem import Problem, Strides
from strobe.problem.arguments import Arguments, Inputs
from strobe.variants.mask import causal, full


@dataclass
class Tensors:
    """[slices, length, dim] each, without gaps; the gradients and what they need only for a backward rung."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor
    workspace: torch.Tensor
    d_o: torch.Tensor | None = None
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None

    def addresses(self) -> dict[str, int]:
        return {name: t.data_ptr() for name in POINTERS if (t := getattr(self, name)) is not None}

    def results(self, rung: Rung) -> dict[str, torch.Tensor]:
        names = ("dq", "dk", "dv") if rung.backward else ("o", "lse")
        return {name: getattr(self, name) for name in names}


def problem_of(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Problem, Inputs]:
    """The slices as heads of one sequence."""
    mask = causal if shape.causal else full
    a = Arguments(q[None], k[None], v[None], mask=mask, scale=shape.scale, layout="bhsd", return_lse=True)
    problem, layout = Problem.of(a)
    return problem, Inputs.of(a, layout)


def make(rung: Rung, shape: Shape, device: torch.device | str = "cpu", seed: int = 0, gain: float = 1.0) -> Tensors:
    """Random inputs, the queries `gain` times as large, and outputs full of NaN: what a rung does not write shows."""
    generator = torch.Generator().manual_seed(seed)

    def random(length: int) -> torch.Tensor:
        drawn = torch.randn((shape.slices, length, shape.dim), generator=generator, dtype=torch.float32)
        return drawn.to(device=device, dtype=rung.dtype)

    def poisoned(like: torch.Tensor) -> torch.Tensor:
        return torch.full_like(like, torch.nan)

    q, k, v = random(shape.len_q) * gain, random(shape.len_k), random(shape.len_k)
    lse = torch.full((shape.slices, shape.len_q), torch.nan, device=device)
    workspace = torch.full((max(1, rung.workspace(shape)),), torch.nan, device=device)
    x = Tensors(q, k, v, poisoned(q), lse, workspace)
    if rung.backward:  # it is given what a forward pass left behind
        from strobe.backends import reference

        for i in range(shape.slices):
            o, row_lse = reference.attention(*problem_of(shape, q[i : i + 1], k[i : i + 1], v[i : i + 1]))
            x.o[i], x.lse[i] = o[0, 0], row_lse[0, 0]
        x.d_o, x.dq, x.dk, x.dv = random(shape.len_q), poisoned(q), poisoned(k), poisoned(v)
    return x


# ---- on the emulator -----------------------------------------------------------------------------------------------------


def emulate(rung: Rung, shape: Shape, x: Tensors, mode: str = "sync", seed: int = 0) -> Counters:
    """Runs it, and counts what all its kernels did together."""
    if rung.library:
        from strobe.emulator import backend

        plan, tensors = _library_plan(rung, shape, x, backend.MACHINES["sm90"])
        return backend.launch(plan, tensors, mode=mode, seed=seed)  # type: ignore[arg-type]
    program = build(rung.source(shape.dim), name=rung.name)
    addresses = x.addresses()
    written = ("o", "lse", "workspace") if not rung.backward else ("workspace", "dq", "dk", "dv")
    buffers = [
        Buffer(n, a, t.numel() * t.element_size(), n in written) for n, a in addresses.items() for t in [getattr(x, n)]
    ]
    maps = {name: encode_tensor_map(spec) for name, spec in rung.maps(shape, addresses).items()}
    counted = []
    for stage, grid in enumerate(rung.grids):
        params = bytes(PARAMS.pack(rung.values(shape, stage, addresses, maps)))
        launch = {"grid": grid(shape), "threads": rung.threads, "smem": rung.smem(shape.dim), "buffers": buffers}
        counted.append(program.run(params, **launch, mode=mode, seed=seed))  # type: ignore[arg-type]
    return Counters(**{f.name: sum(getattr(c, f.name) for c in counted) for f in fields(Counters)})


def _library_plan(rung: Rung, shape: Shape, x: Tensors, machine: Machine) -> tuple[Plan, dict[str, Any]]:
    """The library's plan for the tensors, and the tensors by the names that it uses."""
    problem, inputs = problem_of(shape, x.q, x.k, x.v)
    tensors: dict[str, Any] = {
        "q": inputs.q,
        "k": inputs.k,
        "v": inputs.v,
        "o": x.o[None],
        "lse": x.lse[None],
        "seed": 0,
    }
    if not rung.backward:
        return forward_sm90.plan(problem, {"o": _strides(tensors["o"])}, machine), tensors
    assert x.d_o is not None and x.dq is not None and x.dk is not None and x.dv is not None
    tensors |= {"d_o": x.d_o[None], "dq": x.dq[None], "dk": x.dk[None], "dv": x.dv[None]}
    strides = {name: _strides(tensors[name]) for name in ("o", "d_o", "dq", "dk", "dv")}
    return backward_sm90.plan(problem.backward(("q", "k", "v")), strides, machine), tensors


def _strides(t: torch.Tensor) -> Strides:
    """Return the strides of batch, head and row."""
    return t.stride()[:3]  # type: ignore[return-value]


# ---- on a GPU ------------------------------------------------------------------------------------------------------------


def cannot_run(rung: Rung, device: torch.device) -> str | None:
    """Return why this GPU cannot run it."""
    major, minor = torch.cuda.get_device_capability(device)
    if rung.hopper and (major, minor) != (9, 0):
        return f"compute capability {major}.{minor}; wgmma exists on 9.0 (Hopper) alone"
    if rung.element == "bf16" and major < 8:
        return f"compute capability {major}.{minor}; bf16 matrix units need 8.0 (Ampere) or later"
    return driver.available() or jit.compiler_missing()


def arch_of(rung: Rung, device: torch.device) -> str:
    return "sm_90a" if rung.hopper else "sm_{}{}".format(*torch.cuda.get_device_capability(device))


@functools.cache
def _loaded(rung: Rung, dim: int, arch: str) -> driver.Kernel:
    return driver.Kernel(jit.get(rung.source(dim), arch, name=rung.name).cubin, smem=rung.smem(dim))


class Call:
    """A rung that is compiled, loaded and ready for all tensors of one shape. Belongs to one thread."""

    def __init__(self, rung: Rung, shape: Shape, device: torch.device) -> None:
        self._device = device.index or 0
        # Tensor maps want an address when they are encoded. Each call moves them to its own.
        somewhere = dict.fromkeys(POINTERS, 1 << 30)
        maps = {name: spec.encode() for name, spec in rung.maps(shape, somewhere).items()}
        smem, function = rung.smem(shape.dim), _loaded(rung, shape.dim, arch_of(rung, device)).function(self._device)
        self._launches = []
        for stage, grid in enumerate(rung.grids):
            params = PARAMS.pack(rung.values(shape, stage, somewhere, maps))
            launch = driver.Launch(function, grid(shape), rung.threads, smem, params)
            slots = {name: driver.TensorMapSlot(launch.params, PARAMS.offsets[f"map_{name}"]) for name in maps}
            self._launches.append((launch, PARAMS.patcher(launch.params, *POINTERS), slots))

    def __call__(self, x: Tensors) -> None:
        """Launches its kernels once, on the current stream."""
        addresses = x.addresses()
        pointers = [addresses.get(name, 0) for name in POINTERS]
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        for launch, patch, slots in self._launches:
            patch(*pointers)
            for name, slot in slots.items():
                slot.point_to(addresses[name])
            launch.launch(stream)


def prepare(rung: Rung, shape: Shape, x: Tensors) -> Callable[[], None]:
    """Compiled and loaded: each call of the result launches it once on these tensors."""
    if rung.library:
        return _prepare_library_backward(rung, shape, x) if rung.backward else _prepare_library(shape, x)
    call = Call(rung, shape, x.q.device)
    return lambda: call(x)


def _prepare_library(shape: Shape, x: Tensors) -> Callable[[], None]:
    import strobe

    q, k, v, out = (t[None] for t in (x.q, x.k, x.v, x.o))
    mask = causal if shape.causal else None

    def library() -> None:
        _, lse = strobe.attention(
            q, k, v, mask=mask, scale=shape.scale, layout="bhsd", out=out, return_lse=True, backend="sm90"
        )
        x.lse = lse[0]

    return library


def _prepare_library_backward(rung: Rung, shape: Shape, x: Tensors) -> Callable[[], None]:
    """Prepare the backward from its plan: a call of the library would run the forward pass, too."""
    plan, tensors = _library_plan(rung, shape, x, machine_of(x.q.device))
    launcher = Launcher(plan, x.q.device.index or 0)
    in_order = [tensors.get(name, 0) for name in plan.tensors]  # 0: not there
    addresses = [t if isinstance(t, int) else t.data_ptr() for t in in_order]
    return lambda: launcher(*addresses)
