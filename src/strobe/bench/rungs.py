"""The rungs of the ladder as providers, beside the library and its peers. They are measured only when they are asked
for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

import strobe
from strobe.bench.case import BenchCase
from strobe.bench.inputs import Tensors
from strobe.bench.provider import Forward, Prepare, Prepared, Provider, Refusal, lacking
from strobe.learn.ladder import exact, execute, rungs
from strobe.learn.ladder.measure import GPU_SHAPE
from strobe.learn.ladder.rung import Rung, Shape

_MOST_BLOCKS = 2**31 - 1
_MULTIPROCESSORS = 132  # of the GPU that predictions speak of
_FIRST_FLOPS = 1e12  # a second, as the first rung says of itself
_PATIENCE_S = 1.0  # a call that is expected to take longer waits until its rung is named


def name_of(rung: Rung) -> str:
    """As in "ladder-05-queries-outside", of which "ladder-05" is a prefix."""
    return f"ladder-{Path(rung.file).stem.replace('_', '-')}"


def shape_of(case: BenchCase) -> Shape:
    """Raises ValueError for a head dim that no rung is made for."""
    return Shape(case.batch * case.heads, case.len_q, case.len_k, case.dim, case.causal)


# ---- what a rung cannot do
# -----------------------------------------------------------------------------------------------


_GPU_ONLY = (
    "runs on an NVIDIA GPU only: the emulator is too slow to be timed; `strobe ladder` counts what a rung does there"
)


def _machine_lacks(rung: Rung, device: torch.device, dim: int) -> str | None:
    limit = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 227 << 10)
    if rung.smem(dim) > limit:
        return f"needs {rung.smem(dim)} bytes of shared memory, a block has {limit}"
    return execute.cannot_run(rung, device)


def cannot(rung: Rung, case: BenchCase, device: torch.device) -> str | None:
    """Why the rung does not run the case on this device; None if it does."""
    if device.type != "cuda":
        return _GPU_ONLY
    reason = lacking(
        case,
        softcap="no softcap",
        sinks="no sinks",
        bias="no bias",
        window="no windows: a rung knows full and causal masks",
        unequal=f"head dims {case.dim} and {case.value_dim}; a rung has one for keys and values",
    )
    if reason is not None:
        return reason
    try:
        shape = shape_of(case)
    except ValueError as error:
        return str(error)
    if case.heads_k != case.heads:
        return f"{case.heads_k} key heads for {case.heads} query heads; a rung takes as many of both"
    if case.torch_dtype != rung.dtype:
        return f"{case.dtype} inputs; the rung takes {str(rung.dtype).removeprefix('torch.')}"
    if rung.backward and case.direction == "forward":
        return "a backward pass; see --pass"
    if (blocks := max((grid(shape) for grid in rung.grids), default=1)) > _MOST_BLOCKS:
        return f"{blocks} blocks; a launch has at most {_MOST_BLOCKS}"
    return _machine_lacks(rung, device, case.dim)


def expected_s(rung: Rung, shape: Shape) -> float:
    """Of one call, if every prediction up to this rung is right: they speak of 16 heads, which leave a grid with a
    block for each head mostly idle. Hidden pairs count, for the slow rungs compute them."""
    speed, step = _FIRST_FLOPS, rung
    while (before := rungs.before(step)) is not None:
        speed, step = speed * step.predicted, before
    busy = _busy(rung, shape) / _busy(rung, GPU_SHAPE)
    return dataclasses.replace(shape, causal=False).flops(rung.backward) / (speed * busy)


def _busy(rung: Rung, shape: Shape) -> int:
    """Multiprocessors that have something to do in each of its kernels."""
    return min((min(grid(shape), _MULTIPROCESSORS) for grid in rung.grids), default=_MULTIPROCESSORS)


# ---- calls
# ---------------------------------------------------------------------------------------------------------------


def _launch(call: Any, rung: Rung, shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> execute.Tensors:
    """New outputs for every call, as every provider makes them."""
    lse = torch.empty(shape.slices, shape.len_q, dtype=torch.float32, device=q.device)
    x = execute.Tensors(q, k, v, torch.empty_like(q), lse, _workspace(rung, shape, q.device))
    call(x)
    return x


def _workspace(rung: Rung, shape: Shape, device: torch.device) -> torch.Tensor:
    return torch.empty(max(1, rung.workspace(shape)), dtype=torch.float32, device=device)


class _Gradients(torch.autograd.Function):
    """Forward by the rung whose gradient a backward rung is, backward by that rung."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward: Any, backward: Any
    ) -> torch.Tensor:
        x = forward(q, k, v)
        ctx.save_for_backward(q, k, v, x.o, x.lse)
        ctx.launch = backward
        return x.o

    @staticmethod
    def backward(ctx: Any, d_o: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return (*ctx.launch(*ctx.saved_tensors, d_o.contiguous()), None, None)


def _differentiable(rung: Rung, shape: Shape, device: torch.device) -> Prepared:
    base = rungs.get(rung.forward)
    if rung.library:
        return Prepared(_forward(base, shape, device), note="the kernels of strobe-sm90")
    forward_call, backward_call = execute.Call(base, shape, device), execute.Call(rung, shape, device)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> execute.Tensors:
        return _launch(forward_call, base, shape, q, k, v)

    def backward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, d_o: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        backward_call(execute.Tensors(q, k, v, o, lse, _workspace(rung, shape, device), d_o, dq, dk, dv))
        return dq, dk, dv

    return Prepared(
        lambda q, k, v: _Gradients.apply(q, k, v, forward, backward),
        note=f"the forward pass is that of {name_of(base)}",
    )


def _forward(rung: Rung, shape: Shape, device: torch.device) -> Forward:
    if rung.library:
        mask = strobe.causal if shape.causal else strobe.full
        return lambda q, k, v: strobe.attention(q, k, v, mask=mask, layout="bhsd", backend="sm90")
    call = execute.Call(rung, shape, device)
    return lambda q, k, v: _launch(call, rung, shape, q, k, v).o


def _prepare(rung: Rung) -> Prepare:
    def prepare(case: BenchCase, x: Tensors) -> Prepared:
        device = x.q.device
        if (reason := cannot(rung, case, device)) is not None:
            raise Refusal("unsupported", reason)
        shape = shape_of(case)
        if rung.backward:
            return _differentiable(rung, shape, device)
        return Prepared(_forward(rung, shape, device), note="the kernel of strobe-sm90" if rung.library else None)

    return prepare


def _provider(rung: Rung) -> Provider:
    def slow(case: BenchCase, device: torch.device) -> str | None:
        seconds = expected_s(rung, shape_of(case))
        if seconds <= _PATIENCE_S:
            return None
        return (
            f"about {seconds:.1f} s a call, if its prediction holds; --provider {name_of(rung)} times it all the same"
        )

    return Provider(
        name_of(rung),
        "ladder",
        rung.title,
        _prepare(rung),
        matrices=lambda case: 4 * rung.workspace(shape_of(case)),
        kernels="^kernel$",
        differentiable=rung.backward,
        cannot=lambda case, device: cannot(rung, case, device),
        skipped=slow,
        roundings=lambda case: exact.roundings(rung, case.len_k) if rung.dtype == torch.float32 else 0.0,
        device="cuda",
    )


def providers() -> list[Provider]:
    return [_provider(rung) for rung in rungs.RUNGS]
