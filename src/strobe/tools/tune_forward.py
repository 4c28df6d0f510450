"""`strobe tune` times, in the forward pass, the tiles of the Hopper kernel."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from strobe.cuda.launch import Launcher, addresses_of
from strobe.cuda.parts.plan import Machine, Plan
from strobe.cuda.plans.forward_sm90 import KINDS, PLANNER, SMEM_BYTES, Tile, plan, table_tile
from strobe.cuda.plans.plan_work import MOST_CONSUMERS
from strobe.measure.cases import Case, problem_of
from strobe.measure.sustained import SustainedCall
from strobe.problem import Problem
from strobe.tools.tune import CUDNN, HIDDEN, SOFTCAP, TOKENS, Calls, Subject
from strobe.variants.mask import causal, full


@dataclass(frozen=True, kw_only=True)
class TileCase(Case):
    """A problem on which the tiles of a kind compete."""

    kind: str

    def tensors(self, device: torch.device | str) -> tuple[torch.Tensor, ...]:
        """q, k, v and a place for the output."""
        inputs = [torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in self.shapes()]
        return (*inputs, inputs[0].new_empty((*inputs[0].shape[:3], self.value_dim)))

    @functools.cached_property
    def problem(self) -> Problem:
        return problem_of(self, torch.bfloat16, torch.device("meta"))

    @property
    def tuned_flops(self) -> int:
        return self.problem.flops()

    def plan(self, tile: Tile | None, machine: Machine) -> Plan:
        strides = (self.len_q * self.heads * self.value_dim, self.value_dim, self.heads * self.value_dim)
        return plan(self.problem, {"o": strides}, machine, tile)


def cases(dim: int, dim_v: int, kind: str, lengths: Sequence[int]) -> list[TileCase]:
    """Different ones: two lengths may lead to the same."""
    return list(dict.fromkeys(case for length in lengths for case in _cases_at(dim, dim_v, kind, length)))


def _cases_at(dim: int, dim_v: int, kind: str, length: int) -> list[TileCase]:
    softcap = SOFTCAP if "softcap" in KINDS[kind] else None
    shape: dict[str, Any] = {"kind": kind, "dim": dim, "dim_v": dim_v, "softcap": softcap}
    if "split" in KINDS[kind]:  # decode, and chunked prefill
        keys = max(4 * length, 4096)
        return [
            TileCase(f"full, 1 of {keys}", 1, keys, batch=1, heads=64, heads_k=8, mask=full, **shape),
            TileCase(f"causal, 512 of {keys}", 512, keys, batch=1, heads=8, heads_k=8, mask=causal, **shape),
        ]
    batch, heads = max(1, TOKENS // length), max(1, HIDDEN // dim)
    shape |= {"batch": batch, "heads": heads, "heads_k": heads}
    masks = {"full": [full], "bounded": [causal], "softcap": [full, causal]}[kind]
    return [TileCase(f"{mask.name}, {length}", length, length, mask=mask, **shape) for mask in masks]


def candidates(dim: int, dim_v: int, kind: str) -> list[Tile]:
    """The tile that is used now, and its neighbours: one switch changed at a time."""
    best = table_tile(dim, dim_v, **dict.fromkeys(KINDS[kind], True))
    near = [table_tile(dim, dim_v)]
    near += [replace(best, exps_before_wait=exps) for exps in (0, 4, 8, 16, 24, 32, 40)]
    near += [replace(best, ping_pong=not best.ping_pong)]
    near += [replace(best, stages=stages) for stages in (2, 3)]
    near += [replace(best, block_n=best.block_n + step) for step in (-32, -16, 16, 32)]
    near += [replace(best, consumers=consumers) for consumers in (1, 2, 3)]
    most_consumers = MOST_CONSUMERS if "split" in KINDS[kind] else 3
    return [
        tile
        for tile in dict.fromkeys([best, *near])
        if tile.block_n >= 32
        and tile.exps_before_wait < tile.block_n // 2
        and tile.smem(dim, dim_v) <= SMEM_BYTES
        and tile.consumers <= most_consumers
    ]


def calls(
    tiles: list[Any], case: TileCase, device: torch.device, machine: Machine, *, bounds: Collection[str] = ()
) -> Calls:
    """Each tile's call. The first is the one in use, which the tests check; the others must agree with it, except for
    `bounds`, which are not meant to."""
    q, k, v, out = case.tensors(device)
    timed: dict[str, SustainedCall] = {}
    wrong: dict[str, str] = {}
    expected: torch.Tensor | None = None
    for tile in tiles:
        plan = case.plan(tile, machine)
        call = functools.partial(
            Launcher(plan, device.index or 0), *addresses_of(plan, {"q": q, "k": k, "v": v, "o": out})
        )
        out.fill_(torch.nan)
        call()
        if expected is None:
            expected = out.clone()
        elif str(tile) not in bounds and not torch.allclose(out, expected, rtol=0.02, atol=0.02):
            wrong[str(tile)] = f"wrong: {case}"
            continue
        timed[str(tile)] = SustainedCall(call)
    if case.softcap is None and (case.mask == full or case.len_q == case.len_k):
        queries, keys, values = (t.transpose(1, 2) for t in (q, k, v))
        timed[CUDNN] = SustainedCall(
            lambda: F.scaled_dot_product_attention(
                queries, keys, values, is_causal=case.mask == causal, enable_gqa=True
            ),
            scope=lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        )
        with timed[CUDNN].scope():
            timed[CUDNN].call()  # makes its plan
    return timed, wrong


FORWARD = Subject(PLANNER.dims, tuple(KINDS), cases, candidates, calls)
