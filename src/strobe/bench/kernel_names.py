"""List the kernels that really ran, by torch's profiler: a silent fallback shows in the names."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

_MARK = "strobe bench: "
_NOT_KERNELS = ("Memcpy", "Memset", _MARK)
_MOST = 8


def kernels_that_ran(calls: dict[str, tuple[Any, Any]], device: torch.device) -> dict[str, list[str]]:
    """Provider -> names, longest-running first: CUDA kernels on a GPU, operators on a CPU. One session of the profiler
    for all, since starting it costs more than a call; each provider is waited for before the next begins, so that time
    tells whose a kernel is."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes to the terminal otherwise
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.profiler.profile(activities=activities) as profile:
                for name, (call, scope) in calls.items():
                    with scope(), torch.profiler.record_function(_MARK + name):
                        try:
                            result = call()
                        except Exception:  # the same happens when it is timed, and is reported there
                            result = None
                        if on_gpu:
                            torch.cuda.synchronize(device)
                        del result
            events = list(profile.events() or [])
    except RuntimeError:  # no profiler here (CUPTI missing, or in use)
        return {}
    return {name: _names(events, _MARK + name, on_gpu) for name in calls}


def _names(events: list[Any], mark: str, on_gpu: bool) -> list[str]:
    cpu, gpu = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    spans = [e for e in events if e.name == mark and e.device_type == cpu]
    if not spans:
        return []
    span = spans[0]
    inside = [
        e
        for e in events
        if span.time_range.start <= e.time_range.start <= span.time_range.end and not e.name.startswith(_NOT_KERNELS)
    ]
    if on_gpu:
        inside = [e for e in inside if e.device_type == gpu]
    else:
        inside = [e for e in inside if e.device_type == cpu and e.cpu_parent is not None and e.cpu_parent.name == mark]
    spent: dict[str, float] = {}
    for e in inside:
        spent[e.name] = spent.get(e.name, 0.0) + e.time_range.elapsed_us()
    return sorted(spent, key=lambda name: -spent[name])[:_MOST]
