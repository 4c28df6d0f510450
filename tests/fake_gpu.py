"""GPUs that are not there: an H200 for plans, and a queue with a clock of its own for tests of how things are timed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from strobe.cuda.parts.plan import Machine
from strobe.measure.stopwatch import SPINS_PER_MS, Call, Settings, Stopwatch, TimedCall

H200 = Machine("sm_90a", sms=132, l2_bytes=60 << 20, smem_bytes=227 << 10)


class FakeGpu:
    """One queue, and a CPU that takes `cpu_ms` to put a call into it. The first call behind another's takes 1 ms, every
    other an eighth; clearing the cache a quarter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cpu_ms: float = 0.01) -> None:
        self.cpu = self.free = 0.0  # the time on the CPU; when the GPU will have done all it was given
        self.cpu_ms, self.last = cpu_ms, ""
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = max(gpu.cpu, gpu.free)

            def query(self) -> bool:
                return self.at <= gpu.cpu

            def synchronize(self) -> None:
                gpu.cpu = max(gpu.cpu, self.at)

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        def synchronize(device: torch.device) -> None:
            self.cpu = max(self.cpu, self.free)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.run(cycles / SPINS_PER_MS))

    def now(self) -> float:
        """Seconds, as the CPU sees them."""
        return self.cpu / 1e3

    def run(self, ms: float) -> None:
        self.free = max(self.cpu, self.free) + ms

    def call(self, name: str) -> None:
        self.cpu += self.cpu_ms
        self.run(0.125 if self.last == name else 1.0)
        self.last = name

    def timed(self, name: str) -> TimedCall:
        return TimedCall(lambda: self.call(name))

    def watch(self, **settings: float) -> Stopwatch:
        watch = Stopwatch(torch.device("cpu"), Settings(warmup_ms=0, **settings))  # type: ignore[arg-type]
        watch.on_gpu = True
        watch._flush = SimpleNamespace(zero_=lambda: self.run(0.25))  # type: ignore[assignment]
        return watch


class FakeGraph:
    def __init__(self, call: Call) -> None:
        self.call = call

    def replay(self) -> None:
        for _ in range(20):
            self.call()
