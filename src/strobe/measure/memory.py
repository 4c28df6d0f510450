"""How much memory a call takes, and how much there is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch


def with_peak_memory(call: Callable[[], torch.Tensor], device: torch.device) -> tuple[torch.Tensor, int | None]:
    """The result, and the most bytes that were in use above what there was before (the result included)."""
    call_once = call() if device.type == "cuda" else None  # compiles what has to be compiled
    del call_once
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
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out = call()
    results = profile.profiler.kineto_results if profile.profiler is not None else None
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
