"""A problem through one kernel on the emulator, with outputs full of NaN before; optionally with a damaged source."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from strobe.cuda import jit
from strobe.cuda.plan import Plan, plan_sm80, plan_sm90
from strobe.emulator import backend
from strobe.problem import Inputs, Problem

KERNELS = ("sm80", "sm90")


def plan_of(
    kernel: str, problem: Problem, out_strides: tuple[int, int, int], sms: int = backend.MULTIPROCESSORS
) -> Plan:
    if kernel == "sm90":
        return plan_sm90(problem, out_strides, sms)
    return plan_sm80(problem, backend.ARCH, out_strides)


def poisoned_outputs(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, rows, _ = inputs.q.shape
    out = inputs.q.new_full((batch, rows, heads, problem.dim_v), torch.nan).transpose(1, 2)
    return out, torch.full((batch, heads, rows), torch.nan, dtype=torch.float32, device=out.device)


def with_source(plan: Plan, edit: Callable[[str], str]) -> Plan:
    """The same launch of a kernel whose flattened source went through `edit`."""
    variant = dataclasses.replace(plan.variant)
    variant.__dict__["source"] = edit(jit.flatten(plan.variant.source, "emu"))  # in place of the cached property
    return dataclasses.replace(plan, variant=variant)


def forward(
    kernel: str,
    problem: Problem,
    inputs: Inputs,
    *,
    mode: backend.Mode = "sync",
    seed: int = 0,
    sms: int = backend.MULTIPROCESSORS,
    edit: Callable[[str], str] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse)"""
    out, lse = poisoned_outputs(problem, inputs)
    plan = plan_of(kernel, problem, out.stride()[:3], sms)  # type: ignore[arg-type]
    if edit is not None:
        plan = with_source(plan, edit)
    tensors = {
        "q": inputs.q,
        "k": inputs.k,
        "v": inputs.v,
        "o": out,
        "lse": lse,
        "sinks": None if inputs.sinks is None else inputs.sinks.float(),
        "cu_q": inputs.cu_q,
        "cu_k": inputs.cu_k,
    }
    backend.launch(plan, tensors, mode=mode, seed=seed)
    return out, lse
