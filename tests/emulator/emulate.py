"""A problem through one kernel on the emulator, with outputs full of NaN before; optionally with a damaged source."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from strobe.cuda.parts.kernel import TemplateKernel, TextKernel
from strobe.cuda.parts.plan import Launch, Plan
from strobe.cuda.plans import forward_sm80
from strobe.cuda.plans.families import FAMILIES
from strobe.cuda.runtime import jit
from strobe.emulator import backend
from strobe.emulator.program import Mode
from strobe.problem import Problem, Strides
from strobe.problem.arguments import Inputs

KERNELS = ("sm80", "sm90")
SMS = backend.MACHINES["sm90"].sms


def plan_of(kernel: str, problem: Problem, out_strides: Strides, sms: int = SMS, tile: Any = None) -> Plan:
    machine = dataclasses.replace(backend.MACHINES[kernel], sms=sms)
    takes_rows = isinstance(tile, forward_sm80.Tile)  # few queries go to another kernel otherwise
    planner = forward_sm80.PLANNER if takes_rows else FAMILIES[kernel].planner(problem)
    return planner.plan(problem, {"o": out_strides}, machine, tile)


def with_positions(problem: Problem, positions: Any) -> Problem:
    """Return the same problem of parts of longer sequences, if `positions` are given."""
    q, k = (dataclasses.replace(rows, positions=positions is not None) for rows in (problem.q, problem.k))
    return dataclasses.replace(problem, q=q, k=k)


def only(plan: Plan) -> Launch:
    (launch,) = plan.launches
    return launch


def member(plan: Plan, name: str) -> int | bool:
    """Return a member of the Config of a plan's only kernel."""
    kernel = only(plan).kernel
    assert isinstance(kernel, TemplateKernel)
    return kernel.member(name)


def poisoned_outputs(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, rows, _ = inputs.q.shape
    out = inputs.q.new_full((batch, rows, heads, problem.dim_v), torch.nan, dtype=problem.out_dtype).transpose(1, 2)
    return out, torch.full((batch, heads, rows), torch.nan, dtype=torch.float32, device=out.device)


def tensors_of(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> dict[str, Any]:
    names = ("q", "k", "v", "cu_q", "cu_k", "positions", "bias", "mask_tensor", "seed")
    sinks = None if inputs.sinks is None else inputs.sinks.float()
    return {name: getattr(inputs, name) for name in names} | {"sinks": sinks, "o": out, "lse": lse}


def with_source(plan: Plan, edit: Callable[[str], str]) -> Plan:
    """Return the same launches of kernels whose flattened sources went through `edit`."""

    def edited(launch: Launch) -> Launch:
        spec = launch.kernel
        text = edit(jit.flatten(spec.source, "emu"))
        kernel = TextKernel(spec.name, spec.arch, spec.params, spec.threads, spec.smem, text, spec.entry)
        return dataclasses.replace(launch, kernel=kernel)

    return dataclasses.replace(plan, launches=tuple(edited(launch) for launch in plan.launches))


def forward(
    kernel: str,
    problem: Problem,
    inputs: Inputs,
    *,
    mode: Mode = "sync",
    seed: int = 0,
    sms: int = SMS,
    edit: Callable[[str], str] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse)"""
    out, lse = poisoned_outputs(problem, inputs)
    plan = plan_of(kernel, problem, out.stride()[:3], sms)  # type: ignore[arg-type]
    if edit is not None:
        plan = with_source(plan, edit)
    backend.launch(plan, tensors_of(inputs, out, lse), mode=mode, seed=seed)
    return out, lse
