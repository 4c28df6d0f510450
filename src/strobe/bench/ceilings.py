"""The two ceilings of a device, measured in the same run: a large matrix product, and a large copy."""

from __future__ import annotations

from dataclasses import replace

import torch

from strobe.bench.case import DTYPES
from strobe.bench.results import Ceilings
from strobe.measure.clocks import Monitor
from strobe.measure.stopwatch import Call, Stopwatch
from strobe.measure.sustained import Settings, SustainedCall, sustain

# Dense 16-bit multiplications and additions with fp32 sums, per multiprocessor and clock. Where products of one
# architecture differ (GeForce and professional Ampere, Ada), nothing is said.
_MATRIX_FLOP_PER_CLOCK = {"sm_80": 2048, "sm_90": 4096, "sm_100": 8192}


def matrix_flop_per_clock(arch: str | None, dtype: str) -> int | None:
    return _MATRIX_FLOP_PER_CLOCK.get(arch or "") if dtype in ("bfloat16", "float16") else None


def matrix_unit_use(
    flops: int, ms: float, sm_mhz: float | None, arch: str | None, dtype: str, multiprocessors: int | None
) -> float | None:
    """Cycles that the matrix units need for so many FLOP / cycles that passed."""
    per_clock = matrix_flop_per_clock(arch, dtype)
    if per_clock is None or sm_mhz is None or not multiprocessors:
        return None
    return flops / (per_clock * multiprocessors) / (ms * 1e-3 * sm_mhz * 1e6)


def measure(watch: Stopwatch, dtypes: list[str]) -> Ceilings:
    """Medians on a GPU. On a CPU, whose cores others use too, the fastest of several: a ceiling is what can be
    reached."""
    on_gpu = watch.on_gpu
    sizes = (4096, 8192) if on_gpu else (512, 1024, 2048)
    statistic = "median" if on_gpu else "fastest call"
    products, copied = ", ".join(f"{n}³" for n in sizes), "1 GiB" if on_gpu else "128 MiB"
    how = f"{statistic} of the best of {products} matrix products; copy of {copied}, bytes read plus written"
    ceilings = Ceilings(how=how)
    for dtype in dtypes:
        of_dtype = (4096,) if dtype == "float32" and on_gpu else sizes
        ceilings.matmul_tflops[dtype] = max(_matmul_tflops(watch, n, DTYPES[dtype]) for n in of_dtype)
    source = torch.ones((1 << 30 if on_gpu else 128 << 20) // 4, device=watch.device)
    target = torch.empty_like(source)
    ceilings.copy_gbytes_per_s = 2 * source.numel() * 4 / _typical_ms(watch, lambda: target.copy_(source)) / 1e6
    return ceilings


def measure_sustained(ceilings: Ceilings, watch: Stopwatch, monitor: Monitor, settings: Settings) -> None:
    """The matrix product once more, alone and for as long as a provider runs: speed, and energy per FLOP."""
    n = 8192 if watch.on_gpu else 1024
    for dtype in ceilings.matmul_tflops:
        call = SustainedCall(_matmul(watch, n, DTYPES[dtype]))
        call.call()
        sustain([call], watch, monitor, replace(settings, repeats=1))
        if call.problem is not None:
            raise call.problem
        ceilings.sustained_tflops[dtype] = speed = 2 * n**3 / call.mean_ms() / 1e9
        if (watts := call.watts()) is not None:
            ceilings.sustained_joules_per_tflop[dtype] = watts / speed


def _matmul(watch: Stopwatch, n: int, dtype: torch.dtype) -> Call:
    a, b = (torch.randn(n, n, device=watch.device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _matmul_tflops(watch: Stopwatch, n: int, dtype: torch.dtype) -> float:
    return 2 * n**3 / _typical_ms(watch, _matmul(watch, n, dtype)) / 1e9


def _typical_ms(watch: Stopwatch, call: Call, most: int = 15) -> float:
    estimate = watch.warm_up(call)
    times = sorted(watch.times_ms(call, max(3, min(most, int(watch.settings.budget_ms / estimate)))))
    return times[len(times) // 2] if watch.on_gpu else times[0]
