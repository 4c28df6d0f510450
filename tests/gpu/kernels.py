"""The tests on GPUs share the kernels of this machine, compiled beforehand and side by side, and the reference
there."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import tolerance
import torch
from cases import Case, make
from oracle import prepare

import strobe
from strobe.backends import dispatch, reference
from strobe.cuda.backend import machine_of
from strobe.cuda.parts.plan import Plan
from strobe.cuda.plans.backward_plan import group_parts
from strobe.cuda.plans.families import FAMILIES
from strobe.cuda.runtime import jit
from strobe.problem import Problem, Rows
from strobe.problem.arguments import Inputs

DTYPES = (torch.bfloat16, torch.float16)
KERNELS = ("sm80", "sm90")


def hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def kernels_here() -> list[str]:
    return [kernel for kernel in KERNELS if kernel != "sm90" or hopper()]


def fastest() -> str:
    return kernels_here()[-1]


def compile_together(problems: Iterable[tuple[str, Problem]]) -> None:
    """Variants one by one would take minutes; NVRTC runs in as many threads as there are."""
    specs = set()
    for kernel, problem in problems:
        if not problem.empty and dispatch.get(kernel).supports(problem) is None:
            specs |= {launch.kernel for launch in plan_of(kernel, problem).launches}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda spec: jit.get(spec.source, spec.arch, name=spec.name), specs))


def plan_of(kernel: str, problem: Problem) -> Plan:
    """Plan with outputs, or gradients, that are contiguous."""

    def contiguous(rows: Rows, dim: int) -> tuple[int, int, int]:
        length = rows.total if problem.varlen else rows.length
        return length * rows.heads * dim, dim, rows.heads * dim

    make_plan, machine = FAMILIES[kernel].planner(problem).plan, machine_of(problem.device)
    if problem.gradients:
        problem = replace(problem, group_parts=group_parts(problem, machine.sms))
    out = contiguous(problem.q, problem.dim_v)
    if not problem.gradients:
        return make_plan(problem, {"o": out}, machine)
    dims = {"dk": problem.dim, "dv": problem.dim_v}
    strides = {"o": out, "d_o": out, "dq": contiguous(problem.q, problem.dim)}
    strides |= {name: contiguous(problem.k, dim) for name, dim in dims.items()}
    strides |= {f"d{load.name}": load.strides for load in problem.loads if load.name in problem.gradients}
    return make_plan(problem, strides, machine)


def attend(case: Case, dtype: torch.dtype, kernel: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in (batch, heads, …) order, through the public call, written over NaN."""
    q, k, v, kwargs = make(case, dtype, "cuda")
    dim_v = v.shape[-1]
    out = q.new_full((*q.shape[:-1], dim_v), torch.nan)
    leave_nan_behind(q.shape[:-1].numel())
    call = strobe.attention if case.lengths is None else strobe.attention_varlen
    result, lse = call(q, k, v, **kwargs, out=out, return_lse=True, backend=kernel)
    assert result is out
    if case.lengths is not None:
        out, lse = out[None], lse[None]
    return out.transpose(1, 2), lse


def leave_nan_behind(count: int) -> None:
    """Memory that the allocator will hand out next for `count` floats (the LSE) holds NaN."""
    del_me = [torch.full((count,), torch.nan, device="cuda") for _ in range(2)]
    del del_me


def references(
    problem: Problem, inputs: Inputs
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """(exact, same dtype), each (out, lse): as oracle.expected, on the inputs' device."""
    exact = reference.attention(problem, inputs)
    same, _ = reference.attention(problem, inputs, problem.dtype)
    return exact, (same, reference.attention(problem, inputs, problem.lse_dtype)[1])


def check(
    out: torch.Tensor,
    lse: torch.Tensor,
    expected: tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    (exact, exact_lse), (same, same_lse) = expected
    tolerance.check("out", out, exact, same)
    # Tensor cores keep fewer bits below the last one than an FMA does: scores around 1000 are a few roundings off, more
    # than fp32 arithmetic in the reference would be.
    tolerance.check("lse", lse, exact_lse, same_lse, floor=4 * tolerance.lse_floor(same_lse))


def problem_of(case: Case, dtype: torch.dtype) -> Problem:
    return prepare(case, dtype, "cuda")[0]


def check_repeats(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The Hopper kernels give the same bits at other addresses, and in a captured graph."""

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return strobe.attention(*tensors, mask=strobe.causal, backend="sm90")

    first, copies = run(q, k, v), [t.clone() for t in (q, k, v)]
    assert torch.equal(run(*copies), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*copies)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, first)
