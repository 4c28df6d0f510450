"""Before timing: our kernels are compiled in parallel, and compilers of others are given a limit."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from strobe.bench.exactness import Tensors
from strobe.bench.providers import Provider, to_layout
from strobe.bench.suites import DTYPES, Case


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the main thread; does nothing elsewhere."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"compiling took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def compile_ahead(cases: list[Case], providers: list[Provider], device: torch.device, threads: int = 12) -> float:
    """Runs each of our CUDA kernels once on a small problem of the same kind, in threads; returns the seconds it took.
    What cannot be compiled fails again, with its reason, when it is measured."""
    begun = time.perf_counter()
    own = [p for p in providers if p.device == "cuda" and (p.kind in ("ours", "ladder") or p.name.startswith("cuda-"))]
    jobs: dict[Any, tuple[Provider, Case]] = {}
    for case in cases:
        if case.measure != "compile":
            small = dataclasses.replace(
                case,
                label="",
                batch=1,
                heads=case.group,
                heads_k=1,
                len_q=min(case.len_q, 256),
                len_k=min(case.len_k, 256),
                direction="forward",
                measure="time",
            )
            jobs |= {(p.name, small): (p, small) for p in own if p.tiles or case.tile is None}

    def compile_one(job: tuple[Provider, Case]) -> None:
        provider, case = job
        with contextlib.suppress(Exception), torch.no_grad():
            dtype = DTYPES[case.dtype]
            q = torch.zeros(case.batch, case.heads, case.len_q, case.dim, dtype=dtype, device=device)
            k = torch.zeros(case.batch, case.heads_k, case.len_k, case.dim, dtype=dtype, device=device)
            v = torch.zeros(case.batch, case.heads_k, case.len_k, case.dim_v, dtype=dtype, device=device)
            bias = torch.zeros(1, case.heads, case.len_q, case.len_k, dtype=dtype, device=device) if case.bias else None
            tensors = Tensors(q, k, v, bias=bias, sinks=torch.zeros(case.heads, device=device) if case.sinks else None)
            prepared = provider.prepare(case, tensors)
            with prepared.scope():
                prepared.forward(*(to_layout(t, prepared.layout) for t in (q, k, v)))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(compile_one, jobs.values()))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun
