"""Prepare for timing: our kernels are compiled in parallel, and compilers of others are given a limit."""

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

from strobe.bench.case import BenchCase
from strobe.bench.inputs import make_tensors
from strobe.bench.provider import Provider, to_layout


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


def compile_ahead(cases: list[BenchCase], providers: list[Provider], device: torch.device, threads: int = 12) -> float:
    """Runs each of our CUDA kernels once on a small problem of the same kind, in threads, forward and where it is timed
    backward; returns the seconds it took.
    What cannot be compiled fails again, with its reason, when it is measured."""
    begun = time.perf_counter()
    ours = [p for p in providers if p.device == "cuda" and (p.kind == "ours" or p.name == "cuda-unfused")]
    jobs: dict[Any, tuple[Provider, BenchCase]] = {}
    for case in cases:
        if case.measure != "model":
            small = dataclasses.replace(
                case,
                name="",
                batch=1,
                heads=case.group,
                heads_k=1,
                len_q=min(case.len_q, 256),
                len_k=min(case.len_k, 256),
                measure="time",
            )
            if case.bias is not None:
                small = dataclasses.replace(small, bias=(1, small.heads, small.len_q, small.len_k))
            if case.mask_tensor is not None:
                small = dataclasses.replace(small, mask_tensor=(1, 1, small.len_q, small.len_k))
            jobs |= {(p.name, small): (p, small) for p in ours}

    def compile_one(job: tuple[Provider, BenchCase]) -> None:
        provider, case = job
        gradients = case.direction != "forward" and provider.differentiable
        with contextlib.suppress(Exception), torch.set_grad_enabled(gradients):
            x = make_tensors(case, device, seed=0)
            prepared = provider.prepare(case, x)
            inputs = [to_layout(t, prepared.layout).requires_grad_(gradients) for t in (x.q, x.k, x.v)]
            with prepared.scope():
                out = prepared.forward(*inputs)
                if gradients and x.do is not None:
                    torch.autograd.grad(out, inputs, to_layout(x.do, prepared.layout))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(compile_one, jobs.values()))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun
