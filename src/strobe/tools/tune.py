"""`strobe tune`: time the tiles of our kernels on this machine and write down which is best.

What is best depends on ptxas as much as on the GPU. The tables in cuda/ were swept like this on an H200; another compiler
may want others. STROBE_TILES=FILE makes the library use what was found. `tune_forward` and `tune_backward` say what
competes in each pass."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from strobe.bench.tile_speeds import means
from strobe.cuda import backend
from strobe.cuda.parts.kernel import KernelSpec
from strobe.cuda.parts.plan import Dims, Machine, Plan
from strobe.cuda.parts.tuned import tile_name
from strobe.cuda.runtime import jit, ptxas_log
from strobe.measure import provenance
from strobe.measure.clocks import Monitor
from strobe.measure.method import SUSTAINED, TURNS
from strobe.measure.statistics import summarise_turns
from strobe.measure.stopwatch import Settings, Stopwatch, TimedCall
from strobe.measure.sustained import Settings as SustainedSettings, SustainedCall, sustain
from strobe.measure.turns import interleave

TOKENS, HIDDEN = 16384, 2048  # as in the grid of the benchmark
LENGTHS = (1024, 4096, 16384)
SOFTCAP = 30.0  # of the kinds that have one
CUDNN = "cudnn"  # timed beside the tiles
Report = Callable[[str, int, int], None]  # what is done, step, of how many


class TuneCase(Protocol):
    """A problem on which the tiles of a kind compete."""

    @property
    def dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def tuned_flops(self) -> int: ...
    def plan(self, tile: Any, machine: Machine) -> Plan: ...


Calls = tuple[dict[str, SustainedCall], dict[str, str]]  # by tile: what is timed, and why others are not


def compiles(variant: KernelSpec) -> str | None:
    """None, or why a candidate is out of the question: it does not compile, or spills registers."""
    try:
        artifact = jit.get(variant.source, variant.arch, name=variant.name)
    except jit.CompileError:
        return "does not compile"
    log = artifact.log or jit.compile(variant.source, variant.arch).log  # what comes from the cache has none
    warnings = ptxas_log.warnings(log)
    return "spills" if ptxas_log.spills(log) else warnings[0] if warnings else None


@dataclass(frozen=True)
class Subject:
    """The kernels of one pass on one architecture."""

    dims: list[Dims]
    kinds: tuple[str, ...]  # as they stand in the file
    cases: Callable[[int, int, str, Sequence[int]], list[Any]]  # TuneCases of a head dim and kind at these lengths
    candidates: Callable[[int, int, str], list[Any]]  # tiles; the first is in use
    calls: Callable[[list[Any], Any, torch.device, Machine], Calls]  # checked, and ready to be timed

    def dims_of(self, head_dims: Sequence[int] | None) -> list[Dims]:
        return [pair for pair in self.dims if not head_dims or pair[0] in head_dims]


def unable(tiles: list[Any], group: Iterable[TuneCase], machine: Machine) -> dict[Any, str]:
    """Tiles that cannot be used for all of a group of cases, and why. The first is in use: whether its kernels may spill a
    little is decided elsewhere (tests/compile)."""
    plans = [(tile, case.plan(tile, machine)) for tile in tiles for case in group]
    wanted = {(tile, launch.kernel) for tile, plan in plans for launch in plan.launches}
    kernels = list(dict.fromkeys(kernel for _, kernel in wanted))  # tiles share the smaller ones
    with ThreadPoolExecutor() as pool:
        refusals = dict(zip(kernels, pool.map(compiles, kernels), strict=True))
    reasons = {tile: reason for tile, kernel in wanted if (reason := refusals[kernel]) is not None}
    return {tile: reason for tile, reason in reasons.items() if (tile, reason) != (tiles[0], "spills")}


def sweep(
    subject: Subject,
    dims: Sequence[Dims],
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
    groups = {(*d, kind): subject.cases(*d, kind, lengths) for d in dims for kind in kinds}
    total, done = sum(map(len, groups.values())), 0
    for (dim, dim_v, kind), group in groups.items():
        tiles = subject.candidates(dim, dim_v, kind)
        report(f"compiling {len(tiles)} tiles for head dim {dim}/{dim_v}, {kind}", done, total)
        reasons = unable(tiles, group, machine)
        rows += [{"dim": dim, "dim_v": dim_v, "kind": kind, "tile": str(t), "reason": r} for t, r in reasons.items()]
        for case in group:
            report(f"head dim {dim}/{dim_v}, {kind}: {case}", done, total)
            able = [tile for tile in tiles if tile not in reasons]
            rows += _time(subject, able, case, watch, machine, method, monitor)
            done += 1
    monitor.close()
    facts = {"provenance": provenance.collect(device, seed=0), "method": method, "energy": monitor.energy_source}
    return facts | {"rows": rows, "best": best_tiles(rows, subject.candidates)}


def _time(
    subject: Subject, tiles: list[Any], case: Any, watch: Stopwatch, machine: Machine, method: str, monitor: Monitor
) -> list[dict[str, Any]]:
    facts = {"dim": case.dim, "dim_v": case.value_dim, "kind": case.kind}
    calls, wrong = subject.calls(tiles, case, watch.device, machine)
    rows = [{**facts, "tile": tile, "reason": reason} for tile, reason in wrong.items()]
    facts |= {"case": str(case), "method": method}
    return rows + [facts | row for row in _measured(calls, case.tuned_flops, watch, method, monitor)]


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
        row["vs_cudnn"] = ms[CUDNN] / ms[name] if CUDNN in ms else None
        if method == SUSTAINED and (watts := call.watts()) is not None:
            row |= {"watts": watts, "joules_per_tflop": watts / row["tflops"]}
        rows.append(row)
    return rows


def groups_of(rows: Iterable[dict[str, Any]]) -> list[tuple[int, int, str]]:
    """(head dim, value head dim, kind) of rows, in their order."""
    return list(dict.fromkeys((row["dim"], row["dim_v"], row["kind"]) for row in rows))


def best_tiles(
    rows: list[dict[str, Any]], candidates: Callable[[int, int, str], list[Any]]
) -> dict[str, dict[str, Any]]:
    """Return for each head dim and kind the fastest tile that ran in every case and was right in all, as
    cuda/parts/tuned.py reads it."""
    best = {}
    for dim, dim_v, kind in groups_of(rows):
        refused = {row["tile"] for row in rows if "reason" in row and (row["dim"], row["dim_v"]) == (dim, dim_v)
                   and row["kind"] == kind}  # fmt: skip
        speeds = {tile: speed for tile, speed in means(rows, dim, dim_v, kind).items() if tile not in refused}
        if speeds:
            tiles = {str(tile): tile for tile in candidates(dim, dim_v, kind)}
            best[tile_name(dim, dim_v, kind)] = asdict(tiles[max(speeds, key=speeds.__getitem__)])
    return best


def merged(results: dict[str, Any], path: Path) -> dict[str, Any]:
    """Add what the file has of other head dims and kinds. Raises ValueError for a file that is something else, or of
    another GPU."""
    if not path.exists():
        return results
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
        rows, best, device = old["rows"], dict(old["best"]), old["provenance"]["device"]["name"]
        kept = [row for row in rows if (row["dim"], row["dim_v"], row["kind"]) not in groups_of(results["rows"])]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} exists and was not written by `strobe tune` ({error!r})") from error
    if device != results["provenance"]["device"]["name"]:
        raise ValueError(f"{path} holds tiles of another GPU, {device}")
    return results | {"rows": kept + results["rows"], "best": best | results["best"]}
