"""How long our kernels take to come into being: compiled, loaded from disk, found in memory. Needs NVRTC, not a GPU."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from strobe.bench.providers import Provider
from strobe.bench.results import OK, Row, Timing
from strobe.bench.statistics import summarise
from strobe.bench.suites import Case

_REPEATS = 3


def rows(case: Case, providers: list[Provider], device: torch.device, repeat: Callable[[Case, str], str]) -> list[Row]:
    """Three for each backend of ours that compiles: provider "…: first" (compiled), "…: disk" (another process's), "…:
    memory"."""
    from strobe.cuda import jit

    found = []
    for provider in providers:
        if provider.kind == "ladder":  # asked for by name, so it is answered
            why = "this suite times the library's kernels; `strobe ladder` builds and checks rungs"
            found.append(Row(case, provider.name, "ladder", "unsupported", why, repeat=repeat(case, provider.name)))
        if provider.kind != "ours" or provider.device != "cuda":
            continue
        backend = provider.name.removeprefix("strobe-")
        try:
            if (reason := jit.nvrtc_status()) is not None:
                raise RuntimeError(reason)
            variant = _variant(backend, case, device)
            times = _times(variant)
        except Exception as error:
            row = Row(
                case, provider.name, "ours", "failed", str(error).splitlines()[0][:300], repeat=repeat(case, provider.name)
            )
            found.append(row)
            continue
        for origin, samples in times.items():
            timing = Timing(samples, summarise(samples), "perf_counter", "warm")
            name = f"{provider.name}: {origin}"
            found.append(Row(case, name, "ours", OK, note=variant.name, timing=timing, repeat=repeat(case, provider.name)))
    return found


def _variant(backend: str, case: Case, device: torch.device) -> Any:
    from strobe.cuda import plan

    strides = (case.len_q * case.heads * case.dim_v, case.dim_v, case.heads * case.dim_v)
    problem = case.problem(device)
    if backend == "sm90":
        return plan.plan_sm90(problem, strides, 132).variant
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else "sm_80"
    return plan.plan_sm80(problem, arch, strides).variant


def _times(variant: Any) -> dict[str, list[float]]:
    """Milliseconds. Each repetition has a cache directory of its own, and forgets what this process has in memory."""
    from strobe.cuda import jit

    times: dict[str, list[float]] = {"first": [], "disk": [], "memory": []}
    before = os.environ.get("STROBE_CACHE_DIR")
    kept = dict(jit._memory)
    source = jit.flatten(variant.source)
    key = jit.key_of(source, variant.arch)
    try:
        for _ in range(_REPEATS):
            with tempfile.TemporaryDirectory(prefix="strobe-bench-") as directory:
                os.environ["STROBE_CACHE_DIR"] = directory
                for origin in times:
                    if origin != "memory":
                        jit._memory.pop(key, None)
                    begun = time.perf_counter()
                    artifact = jit.get(variant.source, variant.arch, name=variant.name)
                    times[origin].append((time.perf_counter() - begun) * 1e3)
                    expected = {"first": "compiled"}.get(origin, origin)
                    if artifact.origin != expected:
                        raise RuntimeError(f"expected the kernel to come from {expected}, it came from {artifact.origin}")
    finally:
        jit._memory.clear()
        jit._memory.update(kept)
        if before is None:
            os.environ.pop("STROBE_CACHE_DIR", None)
        else:
            os.environ["STROBE_CACHE_DIR"] = before
    return times
