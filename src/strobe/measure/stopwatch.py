"""Time one call.

On a GPU: a pair of device events around each launch; the L2 cache is overwritten before each launch, or left warm, and
the result says which. A call must be in the queue before the GPU gets to it, else the CPU's time would be part of it:
where that fails, a queue delay (a kernel that only waits) goes before the calls of everybody. On a CPU:
`time.perf_counter` around each call.

`turns`, `sustained` and `do_bench` say which provider runs when."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[[], Any]
Scope = Callable[[], contextlib.AbstractContextManager[Any]]
CALLS_IN_GRAPH = 20
_FLUSH_BYTES = 256 << 20  # several times the largest L2 there is
_QUEUE_DELAYS_MS = (0.0, 0.25, 0.5, 1.0, 2.0)  # tried in this order
SPINS_PER_MS = 1_800_000  # cycles; about the clock of today's GPUs


@dataclass(frozen=True)
class Settings:
    """The settings of the method `turns`, and of warming up by any."""

    budget_ms: float = 150.0  # of timed calls, per row
    rounds: int = 25  # turns of each provider
    warmup_ms: float = 30.0
    l2: str = "flushed"  # or "warm"
    graph_below_ms: float = 0.02  # if a call is shorter, all are replayed from graphs

    def __post_init__(self) -> None:
        if self.l2 not in ("flushed", "warm"):
            raise ValueError(f"l2 must be 'flushed' or 'warm', got {self.l2!r}")
        if self.rounds < 1 or self.budget_ms <= 0 or self.warmup_ms < 0:
            raise ValueError(
                f"rounds ({self.rounds}) and budget_ms ({self.budget_ms}) must be positive, "
                f"warmup_ms ({self.warmup_ms}) not negative"
            )


@dataclass
class TimedCall:
    """One provider's call on one case, and what a method found. It has been called before: else what there is to
    compile, or to plan, would be taken for the time of a call."""

    call: Call
    scope: Scope = contextlib.nullcontext
    turns_ms: list[list[float]] = field(default_factory=list)  # the samples of each turn, or of each repeat
    intervals: list[tuple[float, float]] = field(default_factory=list)  # when it ran, by time.perf_counter
    host_bound: int = 0  # samples in which the GPU had to wait for the CPU
    how: str = ""  # "device events", "graph replay", …
    l2: str = "warm"
    problem: BaseException | None = None
    graph: torch.cuda.CUDAGraph | None = None

    @property
    def samples_ms(self) -> list[float]:
        return [sample for turn in self.turns_ms for sample in turn]

    def replay_from_graph(self, watch: Stopwatch) -> None:
        """Time many calls as one replay from now on: they are too short for events."""
        self.graph = watch.capture(self.call)
        self.how, self.l2 = f"graph replay, {CALLS_IN_GRAPH} calls", "warm"

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Enter its scope; whatever it raises becomes its `problem`, and the others go on."""
        try:
            with self.scope():
                yield
        except Exception as error:
            self.problem = error.with_traceback(None)  # its frames would keep tensors alive
            self.graph = None


class Stopwatch:
    """Times calls on one device."""

    def __init__(self, device: torch.device, settings: Settings) -> None:
        self.device, self.settings = device, settings
        self.on_gpu = device.type == "cuda"
        self.queue_delay = 0  # index into _QUEUE_DELAYS_MS
        self.host_bound = 0  # samples so far of calls that the GPU had to wait for
        flushed = self.on_gpu and settings.l2 == "flushed"
        self._flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device=device) if flushed else None

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def times_ms(self, call: Call, n: int, flush: bool = True, lead: int = 0) -> list[float]:
        """Return the times of n calls, behind `lead` others that are not timed. On a GPU all are queued before the
        first is waited for. Behind a lead, each must have been queued before the GPU got to it: else all are timed
        again with a longer queue delay, which then stays."""
        if not self.on_gpu:
            times = []
            for _ in range(lead + n):
                begun = time.perf_counter()
                call()
                times.append((time.perf_counter() - begun) * 1e3)
            return times[lead:]
        while True:
            times, host_bound = self._queued_ms(call, n, flush, lead)
            if not host_bound or self.queue_delay + 1 == len(_QUEUE_DELAYS_MS):
                self.host_bound += host_bound
                return times
            self.queue_delay += 1

    def _queued_ms(self, call: Call, n: int, flush: bool, lead: int) -> tuple[list[float], int]:
        """The times, and behind a lead how many calls the GPU had to wait for."""
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(lead + n)]
        waited = []
        if self.queue_delay:
            torch.cuda._sleep(int(_QUEUE_DELAYS_MS[self.queue_delay] * SPINS_PER_MS))
        for begin, end in events:
            if flush and self._flush is not None:
                self._flush.zero_()
            begin.record()
            call()
            end.record()
            waited.append(begin.query())
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) for begin, end in events[lead:]], sum(waited[lead:]) if lead else 0

    def warm_up(self, call: Call) -> float:
        """Calls it until the warm-up time is over, a slow one only once; returns an estimate of one call, in ms."""
        begun = time.perf_counter()
        call()
        self.synchronize()
        last = (time.perf_counter() - begun) * 1e3
        if last > 4 * self.settings.warmup_ms + 20:
            return last
        while True:
            last = self.times_ms(call, 1, lead=int(self.on_gpu))[0]
            if (time.perf_counter() - begun) * 1e3 >= self.settings.warmup_ms:
                return max(last, 1e-4)

    def host_ms(self, call: Call, n: int) -> float:
        """Return what one of n calls costs the CPU; the device works behind and is waited for afterwards."""
        self.synchronize()
        begun = time.perf_counter()
        for _ in range(n):
            call()
        elapsed = time.perf_counter() - begun
        self.synchronize()
        return elapsed * 1e3 / n

    def best_ms(self, call: Call, budget_ms: float, most: int = 20) -> float:
        """The fastest of as many calls as the budget allows, one at least."""
        times = [self.times_ms(call, 1)[0]]
        begun = time.perf_counter()
        while len(times) < most and (time.perf_counter() - begun) * 1e3 + times[0] < budget_ms:
            times += self.times_ms(call, 1)
        return min(times)

    def capture(self, call: Call, n: int = CALLS_IN_GRAPH) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(n):
                call()
        return graph
