"""How long our kernels take to come into being: compiled, loaded from disk, found in memory, and in the first call of a
process. All but that call need NVRTC, and no GPU."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from strobe.bench import first_call
from strobe.bench.case import BenchCase
from strobe.bench.provider import Provider, Refusal
from strobe.bench.refusals import explain
from strobe.bench.results import Row, Timing
from strobe.measure.statistics import summarise
from strobe.measure.units import milliseconds

_REPEATS = 3
COMPILED = ("first", "disk", "memory")
CALLED = tuple(first_call.ORIGINS)


def rows(
    case: BenchCase, providers: list[Provider], device: torch.device, repeat: Callable[[BenchCase, str], str]
) -> list[Row]:
    """Five for each backend of ours that compiles. Of the kernel alone: provider "…: first" (compiled), "…: disk"
    (another process's), "…: memory". Of a whole call in a new process: "…: first call" (nothing on disk), "…: cached
    call"."""
    found = []
    for provider in providers:
        again = repeat(case, provider.name)
        if provider.kind == "ladder":  # asked for by name, so it is answered
            why = "this suite times the library's kernels; `strobe ladder` builds and checks rungs"
            found.append(Row(case, provider.name, "ladder", status="unsupported", reason=why, repeat=again))
        if provider.kind != "ours" or provider.device != "cuda":
            continue
        backend = provider.name.removeprefix("strobe-")
        for names, method, measured in ((COMPILED, "perf_counter", _compiled), (CALLED, first_call.METHOD, _called)):
            new = {name: Row(case, f"{provider.name}: {name}", "ours", repeat=again) for name in names}
            try:
                for name, samples, note in measured(backend, case, device):
                    new[name].timing, new[name].note = Timing(samples, summarise(samples), method, "warm"), note
            except Exception as error:  # what was measured before it stays
                status, reason = explain(error)
                for row in new.values():
                    if row.timing is None:
                        row.status, row.reason = status, reason
            found += new.values()
    return found


_Measured = Iterator[tuple[str, list[float], str]]  # name, milliseconds, note


def _compiled(backend: str, case: BenchCase, device: torch.device) -> _Measured:
    from strobe.cuda.runtime import jit

    if (reason := jit.nvrtc_status()) is not None:
        raise RuntimeError(reason)
    variant = _variant(backend, case, device)
    for name, samples in _times(variant).items():
        yield name, samples, variant.name


def _called(backend: str, case: BenchCase, device: torch.device) -> _Measured:
    if device.type != "cuda":
        raise Refusal("unsupported", "a whole call needs an NVIDIA GPU")
    if case.direction != "forward":
        raise Refusal("unsupported", "first calls are timed for the forward pass alone")
    for name, samples in first_call.times(case, backend, device):
        yield name, samples, f"should take at most {milliseconds(first_call.AIMS_MS[name])}"


def _variant(backend: str, case: BenchCase, device: torch.device) -> Any:
    """The kernel that computes; a backward has smaller ones beside it."""
    from strobe.cuda import backend as cuda_backend
    from strobe.cuda.parts.plan import Machine
    from strobe.cuda.plans.families import FAMILIES

    if case.direction == "both":
        raise Refusal("unsupported", "a kernel belongs to one pass; --pass forward and --pass backward are measured")
    if device.type == "cuda":
        machine = cuda_backend.machine_of(device)
    else:
        machine = Machine("sm_90a" if backend == "sm90" else "sm_80", sms=132, l2_bytes=60 << 20, smem_bytes=227 << 10)
    problem = case.problem(device)
    of_q, of_k, of_v = problem.strides
    of_o = (case.len_q * case.heads * case.value_dim, case.value_dim, case.heads * case.value_dim)
    if case.direction == "forward":
        return FAMILIES[backend].planner(problem).plan(problem, {"o": of_o}, machine).launches[0].kernel
    problem = problem.backward(("q", "k", "v"))
    strides = {"o": of_o, "d_o": of_o, "dq": of_q, "dk": of_k, "dv": of_v}
    launches = FAMILIES[backend].planner(problem).plan(problem, strides, machine).launches
    return max((launch.kernel for launch in launches), key=lambda kernel: kernel.smem)


def _times(variant: Any) -> dict[str, list[float]]:
    """Milliseconds. Each repetition has a cache directory of its own, and forgets what this process has in memory."""
    from strobe.cuda.runtime import jit

    times: dict[str, list[float]] = {name: [] for name in COMPILED}
    before = os.environ.get("STROBE_CACHE_DIR")
    kept = dict(jit.in_memory)
    source = jit.flatten(variant.source)
    key = jit.key_of(source, variant.arch)
    try:
        for _ in range(_REPEATS):
            with tempfile.TemporaryDirectory(prefix="strobe-bench-") as directory:
                os.environ["STROBE_CACHE_DIR"] = directory
                for origin in times:
                    if origin != "memory":
                        jit.in_memory.pop(key, None)
                    begun = time.perf_counter()
                    artifact = jit.get(variant.source, variant.arch, name=variant.name)
                    times[origin].append((time.perf_counter() - begun) * 1e3)
                    expected = {"first": "compiled"}.get(origin, origin)
                    if artifact.origin != expected:
                        raise RuntimeError(
                            f"expected the kernel to come from {expected}, it came from {artifact.origin}"
                        )
    finally:
        jit.in_memory.clear()
        jit.in_memory.update(kept)
        if before is None:
            os.environ.pop("STROBE_CACHE_DIR", None)
        else:
            os.environ["STROBE_CACHE_DIR"] = before
    return times
