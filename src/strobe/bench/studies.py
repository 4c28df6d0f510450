"""Small experiments beside the benchmark, each with a table of its own in the documents:
`python -m strobe.bench.studies turns -o benchmarks/results/MACHINE/studies/turns.json`; `inputs`, `training` and
`variants` likewise."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from strobe.bench import claims, read_results, results, training_costs
from strobe.bench.case import BenchCase
from strobe.bench.inputs import make_tensors
from strobe.bench.provider import to_layout
from strobe.bench.registry import select
from strobe.bench.suites import cases
from strobe.cuda import forward_sm90, jit, ptxas_log
from strobe.cuda.kernel import TemplateKernel
from strobe.measure import provenance
from strobe.measure.statistics import percentile
from strobe.measure.stopwatch import Call, Scope, Settings, Stopwatch, TimedCall
from strobe.measure.turns import medians, orders

BEGIN, END = "<!-- turns: begin (python -m strobe.bench.docs --write) -->", "<!-- turns: end -->"
RESULTS = Path("benchmarks", "results", "h200")
Rows = Iterator[dict[str, Any]]
_ALL = ("strobe-sm90", "strobe-sm80", "torch-cudnn", "torch-flash")
_BOTH = ("strobe-sm90", "torch-cudnn")
# Case of grid36, who is interleaved, calls in a turn, rounds.
_TURNS = (
    ("d128-full-8k", _ALL, 12, 20),
    ("d128-causal-1k", _ALL, 12, 20),
    ("d128-causal-16k", _ALL, 12, 20),
    ("d256-full-16k", _ALL, 12, 20),
    ("d256-causal-16k", _ALL, 12, 20),
    ("d128-causal-16k", _BOTH, 60, 6),
    ("d256-causal-16k", _BOTH, 60, 6),
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


def turns_block(root: Path) -> str:
    found = load(root, "turns")
    if found is None:
        return ""
    lines = ["| case | in turns | provider | 1st call | 2nd | 6th | 12th | 60th |", "|---|---|---|---|---|---|---|---|"]
    for row in found["rows"]:
        ours, theirs = row["ms"][_BOTH[0]], row["ms"][_BOTH[1]]
        shown = {"`strobe-sm90`, ms": ours, "`torch-cudnn`, ms": theirs}
        speed = [b / a for a, b in zip(ours, theirs, strict=True)]
        for name, values in [*shown.items(), ("ratio", speed)]:
            cells = [f"{values[place - 1]:.3f}" if place <= len(values) else "" for place in (1, 2, 6, 12, 60)]
            lines.append(
                f"| {row['case']} | {len(row['ms'])} providers, {len(ours)} calls | {name} | {' | '.join(cells)} |"
            )
    return "\n".join(lines + _best_moments(root)) + "\n"


def _best_moments(root: Path) -> list[str]:
    """How far the ratio of the whole grid depends on the medians."""
    path = root / RESULTS / "grid36.json"
    if not path.exists():
        return []
    grid = read_results.load(path)
    ways = (lambda row: row.timing.summary.median, lambda row: row.timing.summary.p5)
    median, best = (claims.mean_ratio(claims.ratios(grid, "grid36", *_BOTH, of=way)) for way in ways)
    found = f"{median:.3f} by medians, {best:.3f} by 5th percentiles"
    return ["", f"`strobe-sm90` over `torch-cudnn`, geometric mean of `grid36`: {found}."]


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


def inputs_table(root: Path) -> list[str]:
    found = load(root, "inputs")
    if found is None:
        return []
    lines = ["Speed over that of bf16 with a key head for each query head, in turns (grouped: 8 to a key head):", ""]
    lines += ["| head dim, mask, length, heads | fp16 | grouped |", "|---|---|---|"]
    for row in found["rows"]:
        ms = row["ms"]
        cells = [f"{ms['bf16'] / ms[other]:.3f}" if other in ms else "" for other in ("fp16", "grouped")]
        lines.append(f"| {row['dim']}, {row['mask']}, {row['length']}, {row['heads']} | {' | '.join(cells)} |")
    return lines


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


def variants_tables(root: Path) -> list[list[str]]:
    """One for each machine that has compiled them."""
    paths = sorted((root / "benchmarks" / "results").glob("*/studies/variants.json"))
    return [_variants_table(json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def _variants_table(found: dict[str, Any]) -> list[str]:
    machine, rows = found["provenance"], found["rows"]
    seen = f"{'all' if found['complete'] else 'the first'} {len(rows)}"
    limits = {"spills": 0, "warnings": 0, "seconds": _AT_MOST_S}
    spill, warn, long = (sum(row[what] > most for row in rows) for what, most in limits.items())
    again = sum(len(row["tries"]) > 1 for row in rows)
    retried = (
        f"{again} took more than {_AT_MOST_S} at first and were compiled twice more: medians count. " if again else ""
    )
    lines = [
        f"Seconds that NVRTC {machine['nvrtc']} takes for a variant in bf16, two at a time ({machine['host_cpu']}, "
        f"{machine['host_cores']} cores). {retried}Of {seen}, {long} take more than {_AT_MOST_S}, {spill} spill and {warn} "
        "have a warning:",
        "",
        "| features | variants | median | 95th percentile | most |",
        "|---|---|---|---|---|",
    ]
    for name in _FEATURES:
        seconds = sorted(row["seconds"] for row in rows if _feature(row) == name)
        if seconds:
            shown = [percentile(seconds, share) for share in (0.5, 0.95, 1.0)]
            lines.append(f"| {name} | {len(seconds)} | {' | '.join(f'{x:.2f}' for x in shown)} |")
    return lines


_FEATURES = ("none", "varlen", "softcap", "split-KV", "softcap and split-KV", "positions and partial output", "dropout")


def _feature(row: Mapping[str, Any]) -> str:
    """The line of the table that counts a variant. Older files say "packed" for varlen."""
    if row.get("positions"):
        return "positions and partial output"
    if row.get("dropout"):
        return "dropout"
    if row["split"]:
        return "softcap and split-KV" if row["softcap"] else "split-KV"
    return "softcap" if row["softcap"] else "varlen" if row.get("varlen", row.get("packed")) else "none"


def load(root: Path, name: str) -> dict[str, Any] | None:
    path = root / RESULTS / "studies" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


STUDIES: dict[str, Callable[[torch.device], Rows]] = {
    "turns": turns,
    "inputs": inputs,
    "training": training_costs.rows,
    "variants": variants,
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m strobe.bench.studies", description="Small experiments on a Hopper GPU."
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
