"""Measure how much memory a call takes, and how much there is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

Result = TypeVar("Result")


def with_peak_memory(call: Callable[[], Result], device: torch.device) -> tuple[Result, int | None]:
    """The result, and the most bytes that were in use above what there was before, the result included; None if that
    cannot be known. What the first call of a kind allocates to compile or to plan is counted too: call it once before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        out = call()
        torch.cuda.synchronize(device)
        return out, torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        return call(), None
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes to the terminal otherwise
    # Not torch.profiler.profile, which imports the whole of torch's compiler.
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True, use_kineto=True) as profile:
        out = call()
    results = profile.kineto_results
    events = [] if results is None else [e for e in results.events() if e.name() == "[memory]"]
    in_use = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        in_use += event.nbytes()
        peak = max(peak, in_use)
    return out, peak if events else None


def free_bytes(device: torch.device) -> int:
    """Memory that a new tensor could have."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [1 << 62]
    for path, key in (("/proc/meminfo", "MemAvailable:"), ("/sys/fs/cgroup/memory.max", "")):
        try:
            words = Path(path).read_text().split()
            free.append(int(words[words.index(key) + 1]) * 1024 if key else int(words[0]))
        except (OSError, ValueError):  # another system, or no limit ("max")
            continue
    return min(free) if len(free) > 1 else 4 << 30
