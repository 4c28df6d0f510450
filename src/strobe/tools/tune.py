"""`strobe tune`: time the Hopper kernel's tiles on this machine and write down which is best.

What is best depends on ptxas as much as on the GPU. The tables in cuda/forward_sm90.py were swept like this on an H200;
another compiler may want others. STROBE_TILES=FILE makes the library use what was found."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from strobe.arguments import Arguments
from strobe.cuda import backend, jit
from strobe.cuda.forward_sm90 import DIMS, KINDS, SMEM_BYTES, Tile, choose_tile, plan, tile_name
from strobe.cuda.kernel import KernelSpec
from strobe.cuda.launch import Launcher
from strobe.cuda.plan import Machine, Plan
from strobe.mask import Mask, causal, full
from strobe.measure import provenance
from strobe.measure.statistics import geometric_mean
from strobe.measure.stopwatch import Contender, Settings, Stopwatch, interleave
from strobe.problem import Problem

TOKENS, HIDDEN = 16384, 2048  # as in the grid of the benchmark
Report = Callable[[str, int, int], None]  # what is done, step, of how many


@dataclass(frozen=True)
class Case:
    """A problem on which the tiles of a kind compete."""

    kind: str
    dim: int
    dim_v: int
    mask: Mask
    batch: int
    len_q: int
    len_k: int
    heads: int
    heads_k: int
    softcap: float | None = None

    def __str__(self) -> str:
        queries = "" if self.len_q == self.len_k else f"{self.len_q} of "
        return f"{self.mask.name}, {queries}{self.len_k}"

    def tensors(self, device: torch.device | str) -> tuple[torch.Tensor, ...]:
        """q, k, v and a place for the output."""
        q = (self.batch, self.len_q, self.heads, self.dim)
        k, v = ((self.batch, self.len_k, self.heads_k, d) for d in (self.dim, self.dim_v))
        inputs = (torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in (q, k, v))
        return (*inputs, torch.empty(*q[:3], self.dim_v, dtype=torch.bfloat16, device=device))

    @functools.cached_property
    def problem(self) -> Problem:
        q, k, v, _ = self.tensors("meta")
        return Problem.of(Arguments(q, k, v, mask=self.mask, softcap=self.softcap))[0]

    def plan(self, tile: Tile | None, machine: Machine) -> Plan:
        out = self.tensors("meta")[-1]
        return plan(self.problem, out.transpose(1, 2).stride()[:3], machine, tile)  # type: ignore[arg-type]


def cases(dim: int, dim_v: int, kind: str, lengths: Sequence[int]) -> list[Case]:
    """Different ones: two lengths may lead to the same."""
    return list(dict.fromkeys(case for length in lengths for case in _cases_at(dim, dim_v, kind, length)))


def _cases_at(dim: int, dim_v: int, kind: str, length: int) -> list[Case]:
    batch, heads = max(1, TOKENS // length), max(1, HIDDEN // dim)
    softcap = 30.0 if "softcap" in KINDS[kind] else None
    if "split" in KINDS[kind]:  # one new token, and a piece of a prompt, against a long cache
        keys = max(4 * length, 4096)
        return [
            Case(kind, dim, dim_v, full, 1, 1, keys, heads=64, heads_k=8, softcap=softcap),
            Case(kind, dim, dim_v, causal, 1, 512, keys, heads=8, heads_k=8, softcap=softcap),
        ]
    masks = {"full": [full], "bounded": [causal], "softcap": [full, causal]}[kind]
    return [Case(kind, dim, dim_v, mask, batch, length, length, heads, heads, softcap) for mask in masks]


def candidates(dim: int, dim_v: int, kind: str) -> list[Tile]:
    """The tile that is used now, and its neighbours: one switch changed at a time."""
    best = choose_tile(dim, dim_v, **dict.fromkeys(KINDS[kind], True))
    near = [choose_tile(dim, dim_v)]
    near += [replace(best, exps_before_wait=hold) for hold in (0, 4, 8, 16, 24, 32, 40)]
    near += [replace(best, ping_pong=not best.ping_pong)]
    near += [replace(best, stages=stages) for stages in (2, 3)]
    near += [replace(best, block_n=best.block_n + step) for step in (-32, -16, 16, 32)]
    near += [replace(best, consumers=consumers) for consumers in (1, 2, 3)]
    return [
        tile
        for tile in dict.fromkeys([best, *near])
        if tile.block_n >= 32 and tile.exps_before_wait < tile.block_n // 2 and tile.smem(dim, dim_v) <= SMEM_BYTES
    ]


def compiles(variant: KernelSpec) -> str | None:
    """None, or why a candidate is out of the question: it does not compile, or spills registers."""
    from strobe.cuda import cubin

    try:
        artifact = jit.get(variant.source, variant.arch, name=variant.name)
    except jit.CompileError:
        return "does not compile"
    log = artifact.log or jit.compile(variant.source, variant.arch).log  # what comes from the cache has none
    warnings = cubin.warnings(log)
    return "spills" if cubin.spills(log) else warnings[0] if warnings else None


def sweep(
    dims: Sequence[tuple[int, int]],
    kinds: Sequence[str],
    lengths: Sequence[int],
    device: torch.device,
    report: Report,
    settings: Settings | None = None,
) -> dict[str, Any]:
    """Every candidate at every length, beside cuDNN where that can do the same; results with their provenance."""
    watch = Stopwatch(device, settings or Settings(budget_ms=40, rounds=8, graph_below_ms=0))  # the same method for all
    machine = backend.machine_of(device)
    rows: list[dict[str, Any]] = []
    groups = {(*d, kind): cases(*d, kind, lengths) for d in dims for kind in kinds}
    total, done = sum(map(len, groups.values())), 0
    for (dim, dim_v, kind), group in groups.items():
        tiles = candidates(dim, dim_v, kind)
        report(f"compiling {len(tiles)} tiles for head dim {dim}/{dim_v}, {kind}", done, total)
        reasons = unable(tiles, group, machine)
        rows += [{"dim": dim, "dim_v": dim_v, "kind": kind, "tile": str(t), "reason": r} for t, r in reasons.items()]
        for case in group:
            report(f"head dim {dim}/{dim_v}, {kind}: {case}", done, total)
            rows += _time([tile for tile in tiles if tile not in reasons], case, watch, machine)
            done += 1
    return {"provenance": provenance.collect(device, seed=0), "rows": rows, "best": best_tiles(rows)}


def unable(tiles: list[Tile], group: Iterable[Case], machine: Machine) -> dict[Tile, str]:
    """Tiles that cannot be used for all of a group of cases, and why."""
    wanted = {(tile, case.plan(tile, machine).launches[0].kernel) for tile in tiles for case in group}
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda pair: (pair[0], compiles(pair[1])), wanted)
    return {tile: reason for tile, reason in found if reason is not None}


def _time(tiles: list[Tile], case: Case, watch: Stopwatch, machine: Machine) -> list[dict[str, Any]]:
    facts = {"dim": case.dim, "dim_v": case.dim_v, "kind": case.kind, "case": str(case)}
    q, k, v, out = case.tensors(watch.device)
    contenders: dict[str, Contender] = {}
    wrong: list[dict[str, Any]] = []
    expected: torch.Tensor | None = None
    for tile in tiles:
        call = Launcher(case.plan(tile, machine), watch.device.index or 0)
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), 0, 0, 0, 0, 0)
        out.fill_(torch.nan)
        call(*addresses)
        if expected is None:
            expected = out.clone()  # of the tile that is used now, which the tests check
        elif not torch.allclose(out, expected, rtol=0.02, atol=0.02):
            wrong.append({**facts, "tile": str(tile), "reason": f"wrong: {case}"})
            continue
        contenders[str(tile)] = Contender(functools.partial(call, *addresses))
    if case.softcap is None and (case.mask is full or case.len_q == case.len_k):
        queries, keys, values = (t.transpose(1, 2) for t in (q, k, v))
        contenders["cudnn"] = Contender(
            lambda: F.scaled_dot_product_attention(
                queries, keys, values, is_causal=case.mask is causal, enable_gqa=True
            ),
            scope=lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        )
        with contenders["cudnn"].scope():
            contenders["cudnn"].call()  # makes its plan
    interleave(list(contenders.values()), watch)
    medians = {name: c.summary().median for name, c in contenders.items() if c.problem is None}
    return wrong + [
        {
            **facts,
            "tile": name,
            "ms": ms,
            "tflops": case.problem.flops() / ms / 1e9,
            "vs_cudnn": medians["cudnn"] / ms if "cudnn" in medians else None,
        }
        for name, ms in medians.items()
    ]


def means(rows: list[dict[str, Any]], dim: int, dim_v: int, kind: str) -> dict[str, float]:
    """Of every tile that ran in all cases, the one in use first: the geometric mean of its speed."""
    mine = [row for row in rows if (row["dim"], row["dim_v"], row["kind"]) == (dim, dim_v, kind) and "ms" in row]
    return means_over(mine, "case", "tflops")


def means_over(rows: list[dict[str, Any]], cell: str, speed: str) -> dict[str, float]:
    """The geometric mean of the speed of every tile, but not of cuDNN, that was timed in all cells."""
    count = len({row[cell] for row in rows})
    speeds: dict[str, list[float]] = {}
    for row in rows:
        speeds.setdefault(row["tile"], []).append(row[speed])
    return {tile: geometric_mean(found) for tile, found in speeds.items() if len(found) == count and tile != "cudnn"}


def best_tiles(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each head dim and kind the fastest tile, as cuda/forward_sm90.py reads it."""
    best = {}
    for dim, dim_v, kind in dict.fromkeys((row["dim"], row["dim_v"], row["kind"]) for row in rows):
        if speeds := means(rows, dim, dim_v, kind):
            tiles = {str(tile): tile for tile in candidates(dim, dim_v, kind)}
            best[tile_name(dim, dim_v, kind)] = asdict(tiles[max(speeds, key=speeds.__getitem__)])
    return best


def dims_of(head_dims: Sequence[int] | None) -> list[tuple[int, int]]:
    return [pair for pair in DIMS if not head_dims or pair[0] in head_dims]
