"""`strobe tune --pass backward` times the tiles of the backward kernels, delta and the rounding of dQ included."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import strobe
from strobe.bench.case import BenchCase
from strobe.bench.exactness import Judge
from strobe.bench.inputs import Tensors, make_tensors
from strobe.bench.provider import from_layout, to_layout
from strobe.cuda.launch import Launcher, addresses_of
from strobe.cuda.parts.features import Features
from strobe.cuda.parts.plan import Machine, Plan, padded_dims
from strobe.cuda.plans.backward_plan import KINDS
from strobe.cuda.plans.families import FAMILIES
from strobe.cuda.plans.planner import Planner
from strobe.measure.stopwatch import Call
from strobe.measure.sustained import SustainedCall
from strobe.problem import Problem
from strobe.tools.tune import CUDNN, HIDDEN, SOFTCAP, TOKENS, Calls, Subject
from strobe.variants.mask import causal, full

_META = torch.device("meta")  # plans need no tensors


@dataclass(frozen=True, kw_only=True)
class BackwardCase(BenchCase):
    kind: str  # "backward sm_90a": one of KINDS, and whose kernels
    family: str  # of families.FAMILIES

    @property
    def tuned_flops(self) -> int:
        return self.flops(_META)

    @property
    def wanted(self) -> Problem:
        return self.problem(_META).backward(("q", "k", "v"))

    @property
    def planner(self) -> Planner:
        return FAMILIES[self.family].planner(self.wanted)

    def features(self) -> Features:
        return Features.of(self.wanted, padded_dims(self.planner.dims, self.dim, self.value_dim))

    def plan(self, tile: Any, machine: Machine) -> Plan:
        """(batch, length, heads, dim), contiguous."""
        q, k, v = self.wanted.strides
        o = (self.len_q * self.heads * self.value_dim, self.value_dim, self.heads * self.value_dim)
        return self.planner.plan(self.wanted, {"o": o, "d_o": o, "dq": q, "dk": k, "dv": v}, machine, tile)


def kinds(family: str, arch: str) -> tuple[str, ...]:
    """Return the kinds as they stand in the file: a tile belongs to an architecture."""
    tuned = FAMILIES[family].tuned(gradients=True)
    names = (f"{kind} {p.architecture.tiles_of(arch)}" for p in tuned for kind in p.tuning.kinds)
    return tuple(dict.fromkeys(names))


def cases(family: str, dim: int, dim_v: int, kind: str, lengths: Sequence[int]) -> list[BackwardCase]:
    softcap = SOFTCAP if kind.split()[0] == KINDS[1] else None
    heads = max(1, HIDDEN // dim)
    return [
        BackwardCase(
            name=f"{mask.name}, {length}",
            suite="tune",
            direction="backward",
            batch=max(1, TOKENS // length),
            heads=heads,
            heads_k=heads,
            len_q=length,
            len_k=length,
            dim=dim,
            dim_v=dim_v,
            mask=mask,
            softcap=softcap,
            kind=kind,
            family=family,
        )
        for length in dict.fromkeys(lengths)
        for mask in (full, causal)
    ]


def candidates(family: str, arch: str, dim: int, dim_v: int, kind: str) -> list[Any]:
    """Every tile that fits, by the rules of the planner; the first is in use."""
    case = cases(family, dim, dim_v, kind, [128])[0]
    return case.planner.tuning.candidates(case.features(), arch)


def on_gpu(plan: Plan, tensors: dict[str, Any]) -> Call:
    """The plan's launches, on tensors that stay where they are."""
    return functools.partial(Launcher(plan, tensors["q"].device.index or 0), *addresses_of(plan, tensors))


def calls(
    tiles: list[Any],
    case: BackwardCase,
    device: torch.device,
    machine: Machine,
    ready: Callable[[Plan, dict[str, Any]], Call] = on_gpu,
) -> Calls:
    """Each tile's call. Its gradients are judged first, by the rule that every provider of the benchmark has to keep."""
    x = make_tensors(case, device, seed=0)
    judge, tensors = Judge(case, x), kernel_tensors(case, x)
    timed: dict[str, SustainedCall] = {}
    wrong: dict[str, str] = {}
    for tile in tiles:
        call = ready(case.plan(tile, machine), tensors)
        for name in ("dq", "dk", "dv"):
            tensors[name].fill_(torch.nan)
        call()
        verdict = judge.judge(None, tuple(from_layout(tensors[name], "bshd") for name in ("dq", "dk", "dv")))
        if verdict.passed:
            timed[str(tile)] = SustainedCall(call)
        else:
            wrong[str(tile)] = f"wrong: {case}, {verdict}"
    if case.softcap is None and device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # it does not take every head dim
            timed[CUDNN] = SustainedCall(_cudnn(case, x))
    return timed, wrong


def kernel_tensors(case: BackwardCase, x: Tensors) -> dict[str, Any]:
    """Return the tensors that the plans read and write, by name."""
    assert x.do is not None
    q, k, v, do = (to_layout(t, "bshd") for t in (x.q, x.k, x.v, x.do))
    with torch.no_grad():
        out, lse = strobe.attention(q, k, v, mask=case.mask, softcap=case.softcap, return_lse=True)
    gradients = {f"d{name}": torch.empty_like(t) for name, t in (("q", q), ("k", k), ("v", v))}
    return {"q": q, "k": k, "v": v, "o": out, "d_o": do, "lse": lse, "seed": 0, **gradients}


def _cudnn(case: BackwardCase, x: Tensors) -> Call:
    inputs = q, k, v = tuple(t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), torch.enable_grad():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=case.mask == causal)
    call = functools.partial(torch.autograd.grad, out, inputs, x.do, retain_graph=True)
    call()  # makes its plan
    return call


def subject(family: str, arch: str) -> Subject:
    """The backward kernels of a family on an architecture."""
    tuned = FAMILIES[family].tuned(gradients=True)
    return Subject(
        [dims for planner in tuned for dims in planner.tuning.dims],
        kinds(family, arch),
        functools.partial(cases, family),
        functools.partial(candidates, family, arch),
        calls,
    )
