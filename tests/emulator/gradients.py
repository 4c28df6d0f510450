"""Gradients by the backward kernels on the emulator, with gradients full of NaN before; optionally with a damaged
source."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import oracle
import tolerance
import torch
from cases import Case
from emulator.mutation import Mismatch, replaced
from oracle import prepare

from strobe.backends.backend import Gradients
from strobe.backends.tiled import forward as tiled
from strobe.cuda.parts.kernel import TextKernel
from strobe.cuda.parts.plan import Launch, Machine, Plan
from strobe.cuda.plans.families import FAMILIES
from strobe.cuda.runtime import jit
from strobe.cuda.tensors import gradients_of, prepare_backward
from strobe.emulator import EmulatorError, backend
from strobe.emulator.program import Mode
from strobe.problem import Problem
from strobe.problem.arguments import Inputs, layout_of


@dataclass(frozen=True)
class Mutation:
    """One thing wrong with a kernel: a replacement in its flattened source."""

    name: str
    old: str
    new: str
    case: Case
    tile: Any = None
    turns: bool = False  # deterministic sums

    def __str__(self) -> str:
        return self.name

    def applied(self, plan: Plan) -> Plan:
        """Apply the mutation to the kernels of a plan that have what is replaced."""
        texts = [jit.flatten(launch.kernel.source, "emu") for launch in plan.launches]
        if not any(self.old in text for text in texts):
            raise Mismatch(f"mutation {self}: no kernel of the plan has its text:\n{self.old}")

        def damaged(launch: Launch, text: str) -> Launch:
            if self.old not in text:
                return launch
            spec = launch.kernel
            edited = replaced(str(self), text, self.old, self.new)
            kernel = TextKernel(spec.name, spec.arch, spec.params, spec.threads, spec.smem, edited, spec.entry)
            return dataclasses.replace(launch, kernel=kernel)

        return dataclasses.replace(plan, launches=tuple(map(damaged, plan.launches, texts)))


def gradients(
    family: str,
    p: Problem,
    inputs: Inputs,
    tile: Any = None,
    mode: Mode = "async",
    *,
    seed: int = 0,
    machine: Machine | None = None,
    mutation: Mutation | None = None,
    wanted: tuple[str, ...] | None = None,
    forward: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Gradients:
    """`forward`: O and the LSE, if they have been computed already."""
    plan, tensors, finish = planned(family, p, inputs, tile, machine, mutation, wanted, forward)
    workers = 1 if mutation else None  # so that what a seed finds does not depend on the host
    backend.launch(plan, tensors, mode=mode, seed=seed, workers=workers)
    return finish()


def planned(
    family: str,
    p: Problem,
    inputs: Inputs,
    tile: Any = None,
    machine: Machine | None = None,
    mutation: Mutation | None = None,
    wanted: tuple[str, ...] | None = None,
    forward: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[Plan, dict[str, Any], Callable[[], Gradients]]:
    """A plan, its tensors, and what makes gradients of these once the plan has run."""
    found = wanted or tuple(n for n in ("q", "k", "v", "sinks") if getattr(inputs, n) is not None)
    out, lse = forward or tiled.forward(p, inputs)
    dout, dlse = oracle.cotangents(p, inputs)
    a = oracle.arguments(p, inputs, positions=inputs.positions)
    layout = layout_of(a)
    results = (layout.outside(out), layout.rows_outside(lse), layout.outside(dout), layout.rows_outside(dlse))
    asked = p.backward(found)
    assert FAMILIES[family].limits(asked) is None
    machine = machine or backend.MACHINES[family]
    tensors, actual, strides = prepare_backward(asked, layout, a, *results, machine.sms)
    for name in ("dq", "dk", "dv", "dsink"):
        if name in tensors:
            tensors[name].fill_(torch.nan)
    plan = FAMILIES[family].planner(asked).plan(actual, strides, machine, tile)

    def finish() -> Gradients:
        g = gradients_of(asked, layout, tensors, a)
        return Gradients(*(None if t is None else layout.inside(t) for t in g[:3]), *g[3:])

    return mutation.applied(plan) if mutation else plan, tensors, finish


def check(p: Problem, inputs: Inputs, found: Gradients, exact: list[torch.Tensor], same: list[torch.Tensor]) -> None:
    _, lse = tiled.forward(p, inputs)
    dout, _ = oracle.cotangents(p, inputs)
    names = [n for n in oracle.LEAVES if getattr(inputs, n) is not None]
    for name, e, s in zip(names, exact, same, strict=True):
        g = getattr(found, name)
        if g is not None:
            floor = tolerance.gradient_floor(name, p, inputs, lse, dout, e)
            tolerance.check(f"d{name}", g, e, s, tolerance.GRADIENTS, floor)


def check_case(family: str, case: Case, tile: Any = None, dtype: torch.dtype = torch.bfloat16, **how: Any) -> None:
    p, inputs = prepare(case, dtype)
    check(p, inputs, gradients(family, p, inputs, tile, **how), *oracle.expected_gradients(case, dtype))


def check_deterministic(
    family: str, case: Case, tile: Any = None, seeds: tuple[int, ...] = (1, 2, 3), machine: Machine | None = None
) -> None:
    """Check that bits are the same, whatever the order of threads and blocks. Results are in fp32: rounding would hide
    another order."""
    p, inputs = prepare(case, torch.bfloat16)
    p = replace(p, deterministic=True)
    forward = tiled.forward(p, inputs)  # once, so that the kernels alone are compared
    rounded = gradients(family, p, inputs, tile, forward=forward, machine=machine)
    check(p, inputs, rounded, *oracle.expected_gradients(case, torch.bfloat16))
    p = replace(p, partial=True)
    first, *others = (
        gradients(family, p, inputs, tile, seed=seed, forward=forward, machine=machine) for seed in (0, *seeds)
    )
    assert all(torch.equal(x, y) for other in others for x, y in zip(first[:3], other[:3], strict=True))


def check_fp32(family: str, case: Case, tile: Any = None) -> None:
    """Gradients that are merged with others: rounded, they are those that come rounded."""
    p, inputs = prepare(case, torch.bfloat16)
    p = replace(p, deterministic=True)
    forward = tiled.forward(p, inputs)
    rounded = gradients(family, p, inputs, tile, forward=forward)
    wide = gradients(family, replace(p, partial=True), inputs, tile, forward=forward)
    for name in ("q", "k", "v"):
        exact, expected = getattr(wide, name), getattr(rounded, name)
        assert exact.dtype == torch.float32 and not torch.equal(exact, expected.float())
        assert torch.equal(exact.bfloat16(), expected), name


def check_fits(family: str, mutation: Mutation) -> None:
    """Raises Mismatch unless the kernels of the mutation's case have what it replaces."""
    p, inputs = prepare(mutation.case, torch.bfloat16)
    planned(family, replace(p, deterministic=mutation.turns), inputs, mutation.tile, mutation=mutation)


def finding(family: str, mutation: Mutation, seed: int) -> str | None:
    """Return what the emulator or the numbers say of a damaged kernel; None if nothing."""
    p, inputs = prepare(mutation.case, torch.bfloat16)
    p = replace(p, deterministic=mutation.turns)
    try:
        found = gradients(family, p, inputs, mutation.tile, seed=seed, mutation=mutation)
        check(p, inputs, found, *oracle.expected_gradients(mutation.case, torch.bfloat16))
    except (EmulatorError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return None
