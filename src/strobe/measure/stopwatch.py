"""How time is taken.

On a GPU: a pair of device events around each launch, after a warm-up by time; the L2 cache is overwritten before each
launch, or left warm, and the result says which. A call must be queued before the GPU gets to it, else the CPU's time
would be part of it: where that fails, all contenders get a head start, a kernel that only waits. Where a call of one is
too short for events, those of all are captured into CUDA graphs and replayed. On a CPU: `time.perf_counter` around each
call.

Contenders take turns of a few milliseconds, or of one call if that is longer, in changing orders: a GPU at its power
limit moves its clock within some ten milliseconds, and what ran before decides where to, so in long turns, or always
behind the same neighbour, they would be timed at different clocks. The first call of a turn takes longer and is not
timed. (The measurements behind this are in benchmarks/README.md.)"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from strobe.measure.statistics import Summary, summarise_turns

Call = Callable[[], Any]
_FLUSH_BYTES = 256 << 20  # several times the largest L2 there is
_MOST_SAMPLES = 400  # of a contender
_MOST_CALLS = 200  # whose CPU time is one sample: a GPU's queue must not fill up
_CALLS_IN_GRAPH = 20
_LEAD_BELOW_MS = 20.0  # of longer calls the slow beginning is a small part
_HEAD_STARTS_MS = (0.0, 0.25, 0.5, 1.0, 2.0)  # tried in this order
_SPINS_PER_MS = 1_800_000  # cycles; about the clock of today's GPUs


@dataclass(frozen=True)
class Settings:
    budget_ms: float = 150.0  # of timed calls, per row
    rounds: int = 25  # turns of each contender
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
class Contender:
    """One provider's call on one case, and what was found. It has been called before: else what there is to compile, or
    to plan, would be taken for the time of a call."""

    call: Call
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    turns_ms: list[list[float]] = field(default_factory=list)  # the samples of each turn
    intervals: list[tuple[float, float]] = field(default_factory=list)  # when it ran, by time.perf_counter
    late: int = 0  # samples of calls that the GPU had to wait for
    method: str = ""
    l2: str = "warm"
    problem: BaseException | None = None
    rounds: int = 1
    repeats: int = 1  # timed calls in a round
    leads: bool = True  # whether another, not timed, goes first
    graph: torch.cuda.CUDAGraph | None = None

    @property
    def samples_ms(self) -> list[float]:
        return [sample for turn in self.turns_ms for sample in turn]

    def summary(self) -> Summary:
        return summarise_turns(self.turns_ms)


class Stopwatch:
    """Times calls on one device."""

    def __init__(self, device: torch.device, settings: Settings) -> None:
        self.device, self.settings = device, settings
        self.on_gpu = device.type == "cuda"
        self.head_start = 0  # index into _HEAD_STARTS_MS
        self.late = 0  # samples so far of calls that the GPU had to wait for
        flushed = self.on_gpu and settings.l2 == "flushed"
        self._flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device=device) if flushed else None

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def times_ms(self, call: Call, n: int, flush: bool = True, lead: int = 0) -> list[float]:
        """Of n calls, behind `lead` others that are not timed. On a GPU all are queued before the first is waited for.
        Behind a lead, each must have been queued before the GPU got to it: else all are timed again with a longer head
        start, which then stays."""
        if not self.on_gpu:
            times = []
            for _ in range(lead + n):
                begun = time.perf_counter()
                call()
                times.append((time.perf_counter() - begun) * 1e3)
            return times[lead:]
        while True:
            times, late = self._queued_ms(call, n, flush, lead)
            if not late or self.head_start + 1 == len(_HEAD_STARTS_MS):
                self.late += late
                return times
            self.head_start += 1

    def _queued_ms(self, call: Call, n: int, flush: bool, lead: int) -> tuple[list[float], int]:
        """The times, and behind a lead how many calls the GPU had to wait for."""
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(lead + n)]
        late = []
        if self.head_start:
            torch.cuda._sleep(int(_HEAD_STARTS_MS[self.head_start] * _SPINS_PER_MS))
        for begin, end in events:
            if flush and self._flush is not None:
                self._flush.zero_()
            begin.record()
            call()
            end.record()
            late.append(begin.query())
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) for begin, end in events[lead:]], sum(late[lead:]) if lead else 0

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
    watch.head_start = 0
    estimates: list[tuple[Contender, float]] = []
    for contender in contenders:
        with _guarded(contender), contender.scope():
            estimates.append((contender, watch.warm_up(contender.call)))
    graphs = watch.on_gpu and (measure == "graph" or any(ms < settings.graph_below_ms for _, ms in estimates))
    for contender, estimate in estimates:
        with _guarded(contender), contender.scope():
            if measure == "call":
                contender.method, estimate = (
                    "perf_counter, CPU time per call",
                    max(watch.host_ms(contender.call, 20), 1e-4),
                )
            elif graphs:
                contender.graph = watch.capture(contender.call)
                contender.method, contender.l2 = f"graph replay, {_CALLS_IN_GRAPH} calls", "warm"
                estimate *= _CALLS_IN_GRAPH
            else:
                contender.method = "device events" if watch.on_gpu else "perf_counter"
                contender.l2 = settings.l2 if watch.on_gpu else "warm"
            contender.leads = estimate < _LEAD_BELOW_MS
            contender.rounds = min(settings.rounds, max(3, int(settings.budget_ms / estimate)))
            most = _MOST_CALLS if measure == "call" else max(1, _MOST_SAMPLES // contender.rounds)
            contender.repeats = max(1, min(most, int(settings.budget_ms / contender.rounds / estimate)))
    alive = [c for c in contenders if c.problem is None]
    rounds = max((c.rounds for c in alive), default=0)
    for turn, order in zip(range(rounds), orders(len(alive)), strict=False):
        for contender in (alive[i] for i in order):
            its_turn = (
                turn + 1
            ) * contender.rounds // rounds > turn * contender.rounds // rounds  # spread over all rounds
            if its_turn and contender.problem is None:
                with _guarded(contender), contender.scope():
                    _take_turn(contender, watch, measure)


def orders(n: int) -> Iterator[list[int]]:
    """Orders of n contenders, without end: everyone comes behind everyone else about equally often, nobody behind
    itself."""
    behind: Counter[tuple[int, int]] = Counter()
    last = -1
    while n:
        row: list[int] = []
        while len(row) < n:
            able = [i for i in range(n) if i not in row and (i != last or n == 1)]
            chosen = min(able, key=lambda i: behind[last, i])
            behind[last, chosen] += 1
            row.append(chosen)
            last = chosen
        yield row


def _take_turn(contender: Contender, watch: Stopwatch, measure: str) -> None:
    begun, late = time.perf_counter(), watch.late
    if measure == "call":
        contender.call()
        taken = [watch.host_ms(contender.call, contender.repeats)]
    elif contender.graph is not None:
        replays = watch.times_ms(contender.graph.replay, contender.repeats, flush=False, lead=contender.leads)
        taken = [replay / _CALLS_IN_GRAPH for replay in replays]
    else:
        taken = watch.times_ms(contender.call, contender.repeats, lead=contender.leads)
    contender.turns_ms.append(taken)
    contender.late += watch.late - late
    contender.intervals.append((begun, time.perf_counter()))


@contextlib.contextmanager
def _guarded(contender: Contender) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a provider raises becomes its row
        contender.problem = error.with_traceback(None)  # its frames would keep tensors alive
        contender.graph = None


def peak_memory(call: Call, device: torch.device) -> int | None:
    """The most bytes in use during a call above what there was before, its result included; None if it cannot be
    known."""
    from strobe.measure.memory import with_peak_memory

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    return with_peak_memory(call, device)[1]
