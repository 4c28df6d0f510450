"""Made-up results with the shape of real ones: a fast fused provider, standard attention that runs out of memory,
reasons, clocks. For tests of the report and the documents; no number here was measured."""

from __future__ import annotations

import random

import torch

from strobe.bench.case import BenchCase
from strobe.bench.results import Ceilings, Results, Row, Timing
from strobe.bench.suites import cases
from strobe.measure.clocks import Clock
from strobe.measure.energy import Energy
from strobe.measure.method import SUSTAINED, TURNS
from strobe.measure.statistics import summarise
from strobe.measure.tolerance import Verdict

MEMORY = 140 << 30
RATES = {  # provider: (kind, TFLOP/s reached by long sequences, length at which half of it is reached, bytes per score)
    "strobe-sm90": ("ours", 680, 350, 0),
    "strobe-sm80": ("ours", 330, 300, 0),
    "torch-cudnn": ("peer", 610, 400, 0),
    "torch-flash": ("peer", 340, 300, 0),
    "torch-efficient": ("peer", 250, 300, 0),
    "torch-math": ("standard", 38, 200, 8),
    "torch-math-half": ("standard", 110, 250, 4),
    "cuda-unfused": ("standard", 90, 300, 4),
}


MODELS = {"model-strobe": "ours", "model-sdpa": "peer", "model-flex_attention": "peer", "model-eager": "standard"}


def synthetic(
    suites: tuple[str, ...] = ("grid36", "sweep", "overhead"),
    faster: float = 1.0,
    seed: int = 0,
    methods: tuple[str, ...] = (TURNS,),
    direction: str = "forward",
) -> Results:
    """`faster`: how much faster our providers are than in another made-up run."""
    results = Results(
        provenance={
            "strobe": "0.0.0",
            "date": "2026-01-01T00:00:00+00:00",
            "command": "strobe bench --suite grid36",
            "seed": 0,
            "git": {"commit": "0" * 40, "dirty": False},
            "driver": "580.0",
            "cuda": "13.0",
            "cudnn": 91900,
            "nvrtc": "13.0",
            "torch": "2.11.0",
            "python": "3.12.0",
            "system": "Linux",
            "host_cpu": "made up",
            "host_cores": 16,
            "packages": {},
            "environment": {},
            "device": {
                "kind": "cuda",
                "name": "Made-up GPU",
                "arch": "sm_90",
                "memory_bytes": MEMORY,
                "multiprocessors": 132,
            },
        },
        method={"budget_ms": 150, "rounds": 5, "l2": "flushed"},
        ceilings=Ceilings({"bfloat16": 800.0}, 4200.0, "made up", {"bfloat16": 700.0}, {"bfloat16": 0.99}),
        complete=True,
        seconds=60.0,
    )
    chance = random.Random(seed)
    for suite in suites:
        for case in cases(suite, direction, on_gpu=True):
            for method in methods if case.measure in ("time", "model") else (TURNS,):
                if case.measure == "model":
                    results.rows += [_model_row(case, name, kind, method, chance) for name, kind in MODELS.items()]
                    continue
                results.rows += [_row(case, name, chance, faster, method) for name in RATES]
                missing = {"status": "not installed", "reason": "flash-attn 3 is not installed"}
                results.rows.append(Row(case, "flash-attn-3", "peer", method, **missing))
    return results


def _row(case: BenchCase, provider: str, chance: random.Random, faster: float, method: str) -> Row:
    device = torch.device("cpu")
    kind, rate, half, per_score = RATES[provider]
    flops, ideal = case.flops(device), case.ideal_bytes(device)
    extra = per_score * case.score_elements() + 4 * case.batch * case.heads * case.len_q
    row = Row(
        case,
        provider,
        kind,
        method,
        flops=flops,
        ideal_bytes=ideal,
        repeat=f"strobe bench --only '{case.key}' --provider {provider}",
    )
    if extra > MEMORY:
        row.status, row.reason = (
            "out of memory",
            f"needs at least {extra >> 30} GiB at one time, the device has {MEMORY >> 30}",
        )
        return row
    if provider == "torch-efficient" and case.heads_k != case.heads:
        row.status, row.reason = "unsupported", "grouped heads"
        return row
    reached = (
        rate
        * case.len_k
        / (case.len_k + half)
        * (faster if kind == "ours" else 1.0)
        * (0.6 + 0.4 * min(case.dim, 128) / 128)
    )
    ms = 0.012 * (1 if kind == "ours" else 1.6) if case.measure == "call" else flops / reached / 1e9 + 0.004
    if method == SUSTAINED:  # at a lower clock, which costs the fast ones more
        ms *= 1.25 if kind == "ours" else 1.15
    samples = [ms * (1 + abs(chance.gauss(0, 0.006))) for _ in range(40)]
    row.timing = Timing(samples, summarise(samples), "device events", "flushed")
    row.kernels = [f"{provider}_kernel"]
    row.error = Verdict("every head", 2e-3, 1e-2, 2.1e-3 * (1 if kind != "standard" else 1.4))
    row.extra_bytes, row.peak_bytes = extra, extra + case.tensor_bytes()
    row.clock = Clock(1755.0, 560.0, 55.0, [], 12)
    if case.measure != "call":
        ms = row.timing.summary.median
        row.tflops, row.gbytes_per_s = flops / ms / 1e9, ideal / ms / 1e6
        row.of_matmul, row.of_copy, row.matrix_unit = row.tflops / 800, row.gbytes_per_s / 4200, row.tflops / 949
    if method == SUSTAINED:
        row.timing.mean_ms = mean = sum(samples) / len(samples)
        watts = 690.0 if kind != "standard" else 520.0
        joules = watts * mean / 1e3
        per_tokens = joules / case.tokens * 1e3
        row.energy = Energy(watts, joules, joules / flops * 1e12, per_tokens, "NVML energy counter")
    return row


def _model_row(case: BenchCase, provider: str, kind: str, method: str, chance: random.Random) -> Row:
    row = Row(case, provider, kind, method, repeat=f"strobe bench --only '{case.key}'")
    if kind == "standard" and case.len_q > 8192:
        row.status, row.reason = "out of memory", "CUDA out of memory"
        return row
    ms = case.tokens / {"ours": 120, "peer": 100, "standard": 20}[kind]
    samples = [ms * (1 + abs(chance.gauss(0, 0.006))) for _ in range(20)]
    row.timing = Timing(samples, summarise(samples), "device events", "flushed")
    row.peak_bytes, row.error = 3 << 30, Verdict("out", 2e-3, 1e-2, 2e-3)
    return row
