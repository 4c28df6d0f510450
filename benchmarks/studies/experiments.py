"""Small experiments beside the benchmark:
`python -m benchmarks.studies turns -o benchmarks/results/MACHINE/studies/turns.json`; `inputs`, `training` and `variants`
likewise."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.studies import training_costs
from strobe.bench import results
from strobe.bench.case import BenchCase
from strobe.bench.inputs import make_tensors
from strobe.bench.provider import to_layout
from strobe.bench.registry import select
from strobe.bench.suites import cases
from strobe.cuda.parts.kernel import TemplateKernel
from strobe.cuda.plans import forward_sm90
from strobe.cuda.runtime import jit, ptxas_log
from strobe.measure import provenance
from strobe.measure.stopwatch import Call, Scope, Settings, Stopwatch, TimedCall
from strobe.measure.turns import medians, orders

Rows = Iterator[dict[str, Any]]
_ALL = ("strobe-sm90", "strobe-sm80", "torch-cudnn", "torch-flash")
BOTH = ("strobe-sm90", "torch-cudnn")
# Case of grid36, who is interleaved, calls in a turn, rounds.
_TURNS = (
    ("d128-full-8k", _ALL, 12, 20),
    ("d128-causal-1k", _ALL, 12, 20),
    ("d128-causal-16k", _ALL, 12, 20),
    ("d256-full-16k", _ALL, 12, 20),
    ("d256-causal-16k", _ALL, 12, 20),
    ("d128-causal-16k", BOTH, 60, 6),
    ("d256-causal-16k", BOTH, 60, 6),
)


def prepared(case: BenchCase, name: str, device: torch.device) -> tuple[Call, Scope]:
    """A provider's call on a case; what there is to compile is compiled."""
    (provider,) = select([name])
    tensors = make_tensors(case, device, seed=0)
    ready = provider.prepare(case, tensors)
    inputs = [to_layout(t, ready.layout) for t in (tensors.q, tensors.k, tensors.v)]

    def call() -> torch.Tensor:
        return ready.forward(*inputs)

    with ready.scope():
        call()
    return call, ready.scope


# ---- turns: does it matter when in its turn a call is timed?
# -------------------------------------------------------------


def by_place(
    watch: Stopwatch, calls: Mapping[str, tuple[Call, Scope]], places: int, rounds: int
) -> dict[str, list[float]]:
    """The median time of a provider's first, second, ... call in a turn, in ms."""
    times: dict[str, list[list[float]]] = {name: [] for name in calls}
    for turn, order in zip(range(rounds + 1), orders(len(calls)), strict=False):
        for name in (list(calls)[i] for i in order):
            call, scope = calls[name]
            with scope():
                taken = watch.times_ms(call, places)
            if turn:  # the first round warms up
                times[name].append(taken)
    return {
        name: [round(statistics.median(place), 5) for place in zip(*rows, strict=True)] for name, rows in times.items()
    }


def turns(device: torch.device) -> Rows:
    watch = Stopwatch(device, Settings())
    known = {case.label: case for case in cases("grid36")}
    for label, names, places, rounds in _TURNS:
        ms = by_place(watch, {name: prepared(known[label], name, device) for name in names}, places, rounds)
        yield {"case": label, "rounds": rounds, "ms": ms}


# ---- inputs: what the type and the grouping of heads change
# ----------------------------------------------------------------


def input_cases() -> list[dict[str, BenchCase]]:
    """Each problem in bf16 with a key head for each query head, and what is compared with that."""
    found = []
    for case in cases("grid36"):
        if case.len_q not in (2048, 8192):
            continue
        grouped = replace(case, heads_k=case.heads // 8)
        found.append({"bf16": case, "fp16": replace(case, dtype="float16"), "grouped": grouped})
        wide = replace(case, batch=max(1, 4096 // case.len_q), heads=64, heads_k=64)
        found.append({"bf16": wide, "grouped": replace(wide, heads_k=8)})
    return sorted(found, key=lambda problem: problem["bf16"].heads == 64)


def inputs(device: torch.device) -> Rows:
    watch = Stopwatch(device, Settings(budget_ms=60, rounds=10))
    for problem in input_cases():
        calls = {name: TimedCall(*prepared(case, "strobe-sm90", device)) for name, case in problem.items()}
        case, ms = problem["bf16"], medians(calls, watch)
        yield {"dim": case.dim, "mask": case.mask.name, "length": case.len_q, "heads": case.heads, "ms": ms}


# ---- variants: how long does NVRTC take for each of them?
# ------------------------------------------------------------------

_AT_MOST_S = 1.5


def variants(device: torch.device, arch: str = "sm_90a", most: int | None = None) -> Rows:
    """The forward kernels with every combination of features in bf16, two at a time. Needs no GPU."""
    every = [variant for variant in forward_sm90.variants(arch, exhaustive=True) if variant.element == "bf16"]
    pool = ThreadPoolExecutor(2)
    try:
        yield from pool.map(lambda variant: _variant(variant, arch), every[:most])
    finally:
        pool.shutdown(cancel_futures=True)


def _variant(variant: TemplateKernel, arch: str) -> dict[str, Any]:
    """One that took too long is compiled twice more: a CPU that others use, too, is slow at times. The median
    counts."""
    tries = [jit.compile(variant.source, arch)]
    if tries[0].seconds > _AT_MOST_S:
        tries += [jit.compile(variant.source, arch) for _ in range(2)]
    log, seconds = tries[0].log, [round(done.seconds, 3) for done in tries]
    times = {"seconds": statistics.median(seconds), "tries": seconds}
    return {**variant.facts, **times} | {"spills": ptxas_log.spills(log), "warnings": len(ptxas_log.warnings(log))}


STUDIES: dict[str, Callable[[torch.device], Rows]] = {
    "turns": turns,
    "inputs": inputs,
    "training": training_costs.rows,
    "variants": variants,
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies", description="Small experiments on a Hopper GPU."
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("-o", "--out", type=Path, required=True, help="the JSON file to write")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available() and chosen.study != "variants":
        parser.error("there is no GPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {"kind": chosen.study, "provenance": provenance.collect(device, 0), "complete": False, "rows": []}
    for row in STUDIES[chosen.study](device):
        found["rows"].append(row)
        print(json.dumps(row), flush=True)
        results.write(found, chosen.out)  # a study that is stopped leaves what it has
    results.write(found | {"complete": True}, chosen.out)
    print(f"wrote {chosen.out}")
    return 0
