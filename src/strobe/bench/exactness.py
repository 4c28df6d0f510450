"""Every provider against float64, before it is timed: a few rows of the score matrix at a time, on a few heads where
there are many. The rule is that of `measure.tolerance`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from strobe.bench import variants
from strobe.bench.case import BenchCase
from strobe.bench.inputs import Tensors
from strobe.measure.tolerance import FORWARD, GRADIENTS, Verdict, compare, gradient_floor, summation_floor
from strobe.problem.arguments import Inputs
from strobe.variants.score import softcap

_BLOCK_ELEMENTS = 1 << 24  # of scores at a time
_FLOP_BUDGET = {"cuda": 3e11, "cpu": 4e9}  # of one reference


@dataclass(frozen=True)
class Unit:
    """Query heads of one sequence that share a key head."""

    batch: int
    heads: slice
    head_k: int


Parts = dict[str, list[torch.Tensor]]  # "out", "lse", "dq", "dk", "dv", "dbias" -> one tensor per unit


def units_of(case: BenchCase, device: torch.device) -> list[Unit]:
    """Evenly spread, first and last included, as many as the budget allows. Gradients of keys need all heads of a
    group."""
    wide = case.group if case.direction != "forward" else 1
    per_head = 2 * (case.dim + case.value_dim) * case.len_q * case.len_k * (1 if case.direction == "forward" else 3.5)
    every = [
        Unit(b, slice(h, h + wide), h // case.group) for b in range(case.batch) for h in range(0, case.heads, wide)
    ]
    most = max(1, min(len(every), int(_FLOP_BUDGET.get(device.type, 4e9) / (per_head * wide)), 64))
    if most == 1:
        return every[-1:]
    return [every[round(i * (len(every) - 1) / (most - 1))] for i in range(most)]


def compute(case: BenchCase, x: Tensors, units: list[Unit], dtype: torch.dtype) -> Parts:
    """Textbook attention in `dtype`, and its gradients if the case has any."""
    parts: Parts = {}
    for unit in units:
        for name, value in _one(case, x, unit, dtype).items():
            parts.setdefault(name, []).append(value)
    return parts


def _one(case: BenchCase, x: Tensors, unit: Unit, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    q = x.q[unit.batch, unit.heads].to(dtype)  # (group, len_q, dim)
    k, v = (t[unit.batch, unit.head_k].to(dtype) for t in (x.k, x.v))  # (len_k, dim)
    keys = torch.arange(case.len_k, device=q.device)
    outs, lses, dqs, dbias = [], [], [], []
    heads = torch.arange(case.heads, device=q.device)[unit.heads]
    # Blocks of rows are added up in fp32 at least, as one matrix product would.
    dk, dv = (torch.zeros_like(t, dtype=torch.promote_types(dtype, torch.float32)) for t in (k, v))
    step = max(1, _BLOCK_ELEMENTS // (case.len_k * q.shape[0]))
    for start in range(0, case.len_q, step):
        rows = torch.arange(start, min(start + step, case.len_q), device=q.device)
        qi = q[:, rows]
        s = qi @ k.mT * case.softmax_scale
        if case.softcap is not None:
            s = softcap(case.softcap).expr.evaluate({"s": s})
        capped, scored = s, variants.with_slope(case, s, unit.batch, heads, rows)
        s = s if scored is None else scored[0]
        if x.bias is not None:
            s = s + x.bias.detach()[unit.batch % len(x.bias), unit.heads, rows].to(dtype)
        s = s.masked_fill(~case.mask.block(rows, keys, case.len_q, case.len_k), -torch.inf)
        if (seen := variants.visible(case, q.device, unit.batch, heads[:, None, None], rows)) is not None:
            s = s.masked_fill(~seen, -torch.inf)
        if x.sinks is not None:
            s = torch.cat([s, x.sinks[unit.heads].to(dtype)[:, None, None].expand(-1, len(rows), 1)], -1)
        p = torch.softmax(s, -1)[..., : case.len_k]
        o = p @ v
        outs.append(o)
        lses.append(torch.logsumexp(s, -1))
        if case.direction == "forward":
            continue
        assert x.do is not None
        do = x.do[unit.batch, unit.heads, rows].to(dtype)
        dlogits = p * (do @ v.mT - (do * o).sum(-1, keepdim=True))
        if case.learns_bias:
            dbias.append(dlogits)
        ds = dlogits * case.softmax_scale
        if case.softcap is not None:
            ds = ds * (1 - (capped / case.softcap) ** 2)
        if scored is not None:
            ds = ds * scored[1]
        dqs.append(ds @ k)
        dk += (ds.mT @ qi).sum(0)
        dv += (p.mT @ do).sum(0)
    results = {"out": torch.cat(outs, 1)}
    if case.direction == "forward":
        return results
    if case.learns_bias:
        results["dbias"] = torch.cat(dbias, 1)
    return results | {"lse": torch.cat(lses, 1), "dq": torch.cat(dqs, 1), "dk": dk.to(dtype), "dv": dv.to(dtype)}


class Judge:
    """Holds what is exact, and what PyTorch finds in the same dtype, for one case."""

    def __init__(self, case: BenchCase, tensors: Tensors) -> None:
        self.case, self.units = case, units_of(case, tensors.q.device)
        self._exact = compute(case, tensors, self.units, torch.float64)
        self._same_dtype = compute(case, tensors, self.units, case.torch_dtype)
        self._floors = {name: self._floor(name, tensors) for name in self._exact if name.startswith("d")}

    def _floor(self, name: str, x: Tensors) -> float:
        """Return the floor of a gradient: what a backward pass cannot know."""
        assert x.do is not None
        problem = self.case.problem(x.q.device)
        floors = []
        for i, unit in enumerate(self.units):
            q, do = (t[unit.batch, unit.heads][None] for t in (x.q, x.do))
            k, v = (t[unit.batch, unit.head_k][None, None] for t in (x.k, x.v))
            lse = self._exact["lse"][i].to(problem.lse_dtype)
            floors.append(gradient_floor(name[1:], problem, Inputs(q, k, v), lse, do, self._exact[name][i]))
        return max(floors)

    @property
    def checked(self) -> str:
        heads = sum(len(range(*u.heads.indices(self.case.heads))) for u in self.units)
        every = self.case.batch * self.case.heads
        return "every head" if heads == every else f"{heads} of {every} heads"

    def judge(
        self, out: torch.Tensor | None, gradients: tuple[torch.Tensor, ...] | None, roundings: float = 0.0
    ) -> Verdict:
        """The output and gradients of a provider, (batch, heads, length, dim). The first that is wrong counts, else the
        one that is worst against its allowance. `roundings`: see tolerance.summation_floor."""
        verdicts: list[Verdict] = []
        for name, result in self._pick(out, gradients):
            exact = self._exact[name]
            verdict = compare(
                self.checked if name == "out" else f"{self.checked}, {name}",
                result,
                exact,
                self._same_dtype[name],
                FORWARD if name == "out" else GRADIENTS,
                self._floors.get(name, 0.0) + summation_floor(exact, roundings, self.case.torch_dtype),
            )
            if not verdict.passed:
                return verdict
            verdicts.append(verdict)
        return max(verdicts, key=lambda v: v.largest / v.allowed if v.allowed else 0.0)

    def _pick(
        self, out: torch.Tensor | None, gradients: tuple[torch.Tensor, ...] | None
    ) -> Iterator[tuple[str, list[torch.Tensor]]]:
        if out is not None:
            yield "out", [out[u.batch, u.heads] for u in self.units]
        if gradients is not None:
            yield "dq", [gradients[0][u.batch, u.heads] for u in self.units]
            for name, gradient in (("dk", gradients[1]), ("dv", gradients[2])):
                yield name, [gradient[u.batch, u.head_k] for u in self.units]
            if self.case.learns_bias:
                yield "dbias", [gradients[3][u.batch, u.heads] for u in self.units]
