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

from strobe.bench.tile_speeds import means
from strobe.cuda import backend, jit
from strobe.cuda.forward_sm90 import DIMS, KINDS, SMEM_BYTES, Tile, choose_tile, plan, tile_name
from strobe.cuda.kernel import KernelSpec
from strobe.cuda.launch import Launcher
from strobe.cuda.plan import Machine, Plan
from strobe.mask import causal, full
from strobe.measure import provenance
from strobe.measure.cases import Case, problem_of
from strobe.measure.clocks import Monitor
from strobe.measure.method import SUSTAINED, TURNS
from strobe.measure.statistics import summarise_turns
from strobe.measure.stopwatch import Settings, Stopwatch, TimedCall
from strobe.measure.sustained import Settings as SustainedSettings, SustainedCall, sustain
from strobe.measure.turns import interleave
from strobe.problem import Problem

TOKENS, HIDDEN = 16384, 2048  # as in the grid of the benchmark
Report = Callable[[str, int, int], None]  # what is done, step, of how many


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

    def plan(self, tile: Tile | None, machine: Machine) -> Plan:
        strides = (self.len_q * self.heads * self.value_dim, self.value_dim, self.heads * self.value_dim)
        return plan(self.problem, strides, machine, tile)


def cases(dim: int, dim_v: int, kind: str, lengths: Sequence[int]) -> list[TileCase]:
    """Different ones: two lengths may lead to the same."""
    return list(dict.fromkeys(case for length in lengths for case in _cases_at(dim, dim_v, kind, length)))


def _cases_at(dim: int, dim_v: int, kind: str, length: int) -> list[TileCase]:
    softcap = 30.0 if "softcap" in KINDS[kind] else None
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
    best = choose_tile(dim, dim_v, **dict.fromkeys(KINDS[kind], True))
    near = [choose_tile(dim, dim_v)]
    near += [replace(best, exps_before_wait=exps) for exps in (0, 4, 8, 16, 24, 32, 40)]
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
    method: str = TURNS,
) -> dict[str, Any]:
    """Every candidate at every length, beside cuDNN where that can do the same; results with their provenance."""
    watch = Stopwatch(device, Settings(budget_ms=40, rounds=8, graph_below_ms=0))  # events for all, however short
    monitor = Monitor(device, energy=method == SUSTAINED)
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
            rows += _time([tile for tile in tiles if tile not in reasons], case, watch, machine, method, monitor)
            done += 1
    monitor.close()
    facts = {"provenance": provenance.collect(device, seed=0), "method": method, "energy": monitor.energy_source}
    return facts | {"rows": rows, "best": best_tiles(rows)}


def unable(tiles: list[Tile], group: Iterable[TileCase], machine: Machine) -> dict[Tile, str]:
    """Tiles that cannot be used for all of a group of cases, and why."""
    wanted = {(tile, case.plan(tile, machine).launches[0].kernel) for tile in tiles for case in group}
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda pair: (pair[0], compiles(pair[1])), wanted)
    return {tile: reason for tile, reason in found if reason is not None}


def _time(
    tiles: list[Tile], case: TileCase, watch: Stopwatch, machine: Machine, method: str, monitor: Monitor
) -> list[dict[str, Any]]:
    facts = {"dim": case.dim, "dim_v": case.value_dim, "kind": case.kind, "case": str(case)}
    q, k, v, out = case.tensors(watch.device)
    calls: dict[str, SustainedCall] = {}
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
        calls[str(tile)] = SustainedCall(functools.partial(call, *addresses))
    if case.softcap is None and (case.mask == full or case.len_q == case.len_k):
        queries, keys, values = (t.transpose(1, 2) for t in (q, k, v))
        calls["cudnn"] = SustainedCall(
            lambda: F.scaled_dot_product_attention(
                queries, keys, values, is_causal=case.mask == causal, enable_gqa=True
            ),
            scope=lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        )
        with calls["cudnn"].scope():
            calls["cudnn"].call()  # makes its plan
    return wrong + [facts | row for row in _measured(calls, case.problem.flops(), watch, method, monitor)]


def _measured(
    calls: dict[str, SustainedCall], flops: int, watch: Stopwatch, method: str, monitor: Monitor
) -> list[dict[str, Any]]:
    """Time, speed and, sustained, energy of each; tiles that failed are left out."""
    running: list[TimedCall] = list(calls.values())
    if method == SUSTAINED:
        sustain(list(calls.values()), watch, monitor, SustainedSettings(repeats=1))
    else:
        interleave(running, watch)
    done = {name: call for name, call in calls.items() if call.problem is None}
    ms = {n: c.mean_ms() if method == SUSTAINED else summarise_turns(c.turns_ms).median for n, c in done.items()}
    rows = []
    for name, call in done.items():
        row: dict[str, Any] = {"tile": name, "ms": ms[name], "tflops": flops / ms[name] / 1e9}
        row["vs_cudnn"] = ms["cudnn"] / ms[name] if "cudnn" in ms else None
        if method == SUSTAINED and (watts := call.watts()) is not None:
            row |= {"watts": watts, "joules_per_tflop": watts / row["tflops"]}
        rows.append(row)
    return rows


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
