"""Every provider against float64, before it is timed: a few rows of the score matrix at a time, on a few heads where
there are many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from strobe.bench.results import Error
from strobe.bench.suites import DTYPES, Case
from strobe.score import softcap

_BLOCK_ELEMENTS = 1 << 24  # of scores at a time
_FLOP_BUDGET = {"cuda": 3e11, "cpu": 4e9}  # of one reference


@dataclass
class Tensors:
    """(batch, heads, length, dim), contiguous."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor | None = None
    bias: torch.Tensor | None = None  # (1, heads, len_q, len_k)
    sinks: torch.Tensor | None = None  # (heads,)


@dataclass(frozen=True)
class Unit:
    """Query heads of one sequence that share a key head."""

    batch: int
    heads: slice
    head_k: int


Parts = dict[str, list[torch.Tensor]]  # "out", "dq", "dk", "dv" -> one tensor per unit


def units_of(case: Case, device: torch.device) -> list[Unit]:
    """Evenly spread, first and last included, as many as the budget allows. Gradients of keys need all heads of a
    group."""
    wide = case.group if case.direction != "forward" else 1
    per_head = 2 * (case.dim + case.dim_v) * case.len_q * case.len_k * (1 if case.direction == "forward" else 3.5)
    every = [
        Unit(b, slice(h, h + wide), h // case.group) for b in range(case.batch) for h in range(0, case.heads, wide)
    ]
    most = max(1, min(len(every), int(_FLOP_BUDGET.get(device.type, 4e9) / (per_head * wide)), 64))
    if most == 1:
        return every[-1:]
    return [every[round(i * (len(every) - 1) / (most - 1))] for i in range(most)]


def compute(case: Case, x: Tensors, units: list[Unit], dtype: torch.dtype) -> Parts:
    """Textbook attention in `dtype`, and its gradients if the case has any."""
    parts: Parts = {"out": []} if case.direction == "forward" else {"out": [], "dq": [], "dk": [], "dv": []}
    for unit in units:
        for name, value in _one(case, x, unit, dtype).items():
            parts[name].append(value)
    return parts


def _one(case: Case, x: Tensors, unit: Unit, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    q = x.q[unit.batch, unit.heads].to(dtype)  # (group, len_q, dim)
    k, v = (t[unit.batch, unit.head_k].to(dtype) for t in (x.k, x.v))  # (len_k, dim)
    mask, keys = case.mask_object(), torch.arange(case.len_k, device=q.device)
    outs, dqs = [], []
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    step = max(1, _BLOCK_ELEMENTS // (case.len_k * q.shape[0]))
    for start in range(0, case.len_q, step):
        rows = torch.arange(start, min(start + step, case.len_q), device=q.device)
        qi = q[:, rows]
        s = qi @ k.mT * case.scale
        if case.softcap is not None:
            s = softcap(case.softcap).expr.evaluate({"s": s})
        capped = s
        if x.bias is not None:
            s = s + x.bias[0, unit.heads, rows].to(dtype)
        s = s.masked_fill(~mask.block(rows, keys, case.len_q, case.len_k), -torch.inf)
        if x.sinks is not None:
            s = torch.cat([s, x.sinks[unit.heads].to(dtype)[:, None, None].expand(-1, len(rows), 1)], -1)
        p = torch.softmax(s, -1)[..., : case.len_k]
        o = p @ v
        outs.append(o)
        if case.direction == "forward":
            continue
        assert x.do is not None
        do = x.do[unit.batch, unit.heads, rows].to(dtype)
        ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * case.scale
        if case.softcap is not None:
            ds = ds * (1 - (capped / case.softcap) ** 2)
        dqs.append(ds @ k)
        dk += (ds.mT @ qi).sum(0)
        dv += (p.mT @ do).sum(0)
    found = {"out": torch.cat(outs, 1)}
    return found if case.direction == "forward" else found | {"dq": torch.cat(dqs, 1), "dk": dk, "dv": dv}


class Judge:
    """Holds what is exact, and what rounding explains, for one case."""

    def __init__(self, case: Case, tensors: Tensors) -> None:
        device = tensors.q.device
        self.case, self.units = case, units_of(case, device)
        self._exact = compute(case, tensors, self.units, torch.float64)
        same_dtype = compute(case, tensors, self.units, DTYPES[case.dtype])
        eps = torch.finfo(DTYPES[case.dtype]).eps
        floor = 4 * eps if case.dtype == "float32" else eps / 4
        self._allowed, self._rounding = {}, {}
        for name, exact in self._exact.items():
            largest, relative = _distance(same_dtype[name], exact)
            top = max(t.abs().max().item() for t in exact)
            self._allowed[name] = (4 * largest + 2 * eps * top, 3 * relative + floor)
            self._rounding[name] = eps * top

    @property
    def checked(self) -> str:
        heads = sum(len(range(*u.heads.indices(self.case.heads))) for u in self.units)
        every = self.case.batch * self.case.heads
        return "every head" if heads == every else f"{heads} of {every} heads"

    def judge(
        self, out: torch.Tensor | None, gradients: tuple[torch.Tensor, ...] | None, roundings: float = 0.0
    ) -> Error:
        """The output and gradients of a provider, (batch, heads, length, dim). The quantity that is worst against its
        allowance counts. `roundings`: of the largest number, that the provider's way of computing explains."""
        worst: Error | None = None
        for name, found in self._pick(out, gradients):
            largest, relative = _distance(found, self._exact[name])
            allowed, allowed_relative = self._allowed[name]
            checked = f"{self.checked}, {name}" if name != "out" else self.checked
            error = Error(
                largest, relative, allowed + roundings * self._rounding[name], allowed_relative, checked=checked
            )
            if (
                worst is None
                or not error.passed
                or error.relative / error.allowed_relative > worst.relative / worst.allowed_relative
            ):
                worst = error
                if not error.passed:
                    break
        assert worst is not None
        return worst

    def _pick(
        self, out: torch.Tensor | None, gradients: tuple[torch.Tensor, ...] | None
    ) -> Iterator[tuple[str, list[torch.Tensor]]]:
        if out is not None:
            yield "out", [out[u.batch, u.heads] for u in self.units]
        if gradients is not None:
            yield "dq", [gradients[0][u.batch, u.heads] for u in self.units]
            for name, gradient in (("dk", gradients[1]), ("dv", gradients[2])):
                yield name, [gradient[u.batch, u.head_k] for u in self.units]


def _distance(found: list[torch.Tensor], exact: list[torch.Tensor]) -> tuple[float, float]:
    """(largest absolute difference, ‖found − exact‖ / ‖exact‖); NaN where anything is."""
    largest, square, norm = 0.0, 0.0, 0.0
    for a, b in zip(found, exact, strict=True):
        if a.shape != b.shape:
            raise ValueError(f"the result has shape {tuple(a.shape)}, should be {tuple(b.shape)}")
        difference = a.double() - b
        if not bool(torch.isfinite(difference).all()):
            return float("nan"), float("nan")
        largest = max(largest, difference.abs().max().item())
        square += difference.square().sum().item()
        norm += b.square().sum().item()
    return largest, (square / max(norm, 1e-300)) ** 0.5
