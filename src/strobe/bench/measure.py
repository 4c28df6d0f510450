"""How time is taken.

On a GPU: a pair of device events around each launch, after a warm-up by time; the L2 cache is overwritten before each
launch, or left warm, and the result says which. Calls too short for events are captured into a CUDA graph and replayed.
On a CPU: `time.perf_counter` around each call.

Contenders take turns of a few milliseconds, in a new order each round: a GPU at its power limit changes its clock every 20 to
50 ms, and what ran before decides where to, so in long turns, or always behind the same neighbour, they would be timed at
different clocks. The first call of a turn is not timed: it takes a tenth longer, whoever it is. (benchmarks/README.md has the
measurements behind this.)
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[[], Any]
_FLUSH_BYTES = 256 << 20  # several times the largest L2 there is
_MOST_SAMPLES = 400  # of a contender: more would not narrow the interval of its median by much
_MOST_CALLS = 200  # whose CPU time is one sample: a GPU's queue must not fill up
_CALLS_IN_GRAPH = 20
_LEAD_BELOW_MS = 20.0  # in longer calls it does not show what ran before


@dataclass(frozen=True)
class Settings:
    budget_ms: float = 150.0  # of timed calls, per row
    rounds: int = 25  # turns of each contender
    warmup_ms: float = 30.0
    l2: str = "flushed"  # or "warm"
    graph_below_ms: float = 0.02  # shorter calls are replayed from a graph

    def __post_init__(self) -> None:
        if self.l2 not in ("flushed", "warm"):
            raise ValueError(f"l2 must be 'flushed' or 'warm', got {self.l2!r}")
        if self.rounds < 1 or self.budget_ms <= 0 or self.warmup_ms < 0:
            raise ValueError(
                f"rounds ({self.rounds}) and budget_ms ({self.budget_ms}) must be positive, "
                f"warmup_ms ({self.warmup_ms}) not negative"
            )


@dataclass
class Contender:
    """One provider's call on one case, and what was found."""

    call: Call
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    samples_ms: list[float] = field(default_factory=list)
    intervals: list[tuple[float, float]] = field(default_factory=list)  # when it ran, by time.perf_counter
    method: str = ""
    l2: str = "warm"
    problem: BaseException | None = None
    rounds: int = 1
    repeats: int = 1  # timed calls in a round
    leads: bool = True  # whether another, not timed, goes first
    graph: torch.cuda.CUDAGraph | None = None


class Stopwatch:
    """Times calls on one device."""

    def __init__(self, device: torch.device, settings: Settings) -> None:
        self.device, self.settings = device, settings
        self.on_gpu = device.type == "cuda"
        flushed = self.on_gpu and settings.l2 == "flushed"
        self._flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device=device) if flushed else None

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def times_ms(self, call: Call, n: int, flush: bool = True) -> list[float]:
        """Of n calls. On a GPU all are queued before the first is waited for: the CPU runs ahead and its own time does not
        show."""
        if not self.on_gpu:
            times = []
            for _ in range(n):
                begun = time.perf_counter()
                call()
                times.append((time.perf_counter() - begun) * 1e3)
            return times
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)]
        for begin, end in events:
            if flush and self._flush is not None:
                self._flush.zero_()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) for begin, end in events]

    def warm_up(self, call: Call) -> float:
        """Calls it until the warm-up time is over, a slow one only once; returns an estimate of one call, in ms."""
        begun = time.perf_counter()
        call()
        self.synchronize()
        last = (time.perf_counter() - begun) * 1e3
        if last > 4 * self.settings.warmup_ms + 20:
            return last
        while True:
            last = min(self.times_ms(call, 2, flush=False)) if self.on_gpu else self.times_ms(call, 1)[0]
            if (time.perf_counter() - begun) * 1e3 >= self.settings.warmup_ms:
                return max(last, 1e-4)

    def host_ms(self, call: Call, n: int) -> float:
        """What one of n calls costs the CPU; the device works behind and is waited for afterwards."""
        self.synchronize()
        begun = time.perf_counter()
        for _ in range(n):
            call()
        elapsed = time.perf_counter() - begun
        self.synchronize()
        return elapsed * 1e3 / n

    def capture(self, call: Call, n: int = _CALLS_IN_GRAPH) -> torch.cuda.CUDAGraph:
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


def interleave(contenders: list[Contender], watch: Stopwatch, measure: str = "time") -> None:
    """Fills in each contender's samples. One that fails drops out with its `problem`; the others go on."""
    settings = watch.settings
    for contender in contenders:
        with _guarded(contender), contender.scope():
            estimate = watch.warm_up(contender.call)
            if measure == "call":
                contender.method, estimate = "perf_counter, CPU time per call", max(watch.host_ms(contender.call, 20), 1e-4)
            elif watch.on_gpu and (measure == "graph" or estimate < settings.graph_below_ms):
                contender.graph = watch.capture(contender.call)
                contender.method, contender.l2 = f"graph replay, {_CALLS_IN_GRAPH} calls", "warm"
                estimate *= _CALLS_IN_GRAPH
            else:
                contender.method = "device events" if watch.on_gpu else "perf_counter"
                contender.l2 = settings.l2 if watch.on_gpu else "warm"
            contender.leads = estimate < _LEAD_BELOW_MS
            contender.rounds = max(3, min(settings.rounds, int(settings.budget_ms / estimate)))
            most = _MOST_CALLS if measure == "call" else max(1, _MOST_SAMPLES // contender.rounds)
            contender.repeats = max(1, min(most, int(settings.budget_ms / contender.rounds / estimate)))
    alive = [c for c in contenders if c.problem is None]
    order = random.Random(0)
    for turn in range(max((c.rounds for c in alive), default=0)):
        for contender in order.sample(alive, len(alive)):
            if turn < contender.rounds and contender.problem is None:
                with _guarded(contender), contender.scope():
                    _take_turn(contender, watch, measure)


def _take_turn(contender: Contender, watch: Stopwatch, measure: str) -> None:
    if contender.leads:
        contender.call()
    begun = time.perf_counter()
    if measure == "call":
        contender.samples_ms.append(watch.host_ms(contender.call, contender.repeats))
    elif contender.graph is not None:
        contender.samples_ms += [
            t / _CALLS_IN_GRAPH for t in watch.times_ms(contender.graph.replay, contender.repeats, flush=False)
        ]
    else:
        contender.samples_ms += watch.times_ms(contender.call, contender.repeats)
    contender.intervals.append((begun, time.perf_counter()))


@contextlib.contextmanager
def _guarded(contender: Contender) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a provider raises becomes its row
        contender.problem = error.with_traceback(None)  # its frames would keep tensors alive
        contender.graph = None


def peak_memory(call: Call, device: torch.device) -> int | None:
    """The most bytes in use during a call above what there was before, its result included; None if it cannot be known."""
    from strobe.demo import with_peak_memory

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    return with_peak_memory(call, device)[1]
