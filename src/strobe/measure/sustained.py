"""The method "sustained": each provider alone until power and clock have settled, then for at least a second.

This is how training and serving run: nobody cooler lends a kernel its clock. At the power limit of a GPU, speed is
energy per FLOP, so the mean power is taken along with the mean time. Calls follow each other without a gap (on a GPU
the next ones are queued while the last ones run), the L2 cache is left as the calls leave it, and the order of
providers is reversed from one repeat to the next."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from strobe.measure.clocks import Monitor
from strobe.measure.statistics import Summary, percentile
from strobe.measure.stopwatch import CALLS_IN_GRAPH, Stopwatch, TimedCall

_CHUNK_MS = 10.0  # of calls that are queued together
_MOST_IN_CHUNK = 400  # a GPU's queue holds some 1000 launches, and two chunks are in it
_WINDOW_S = 0.15  # of which two must agree before a provider has settled
_SPEED, _CLOCK, _POWER = 0.01, 0.02, 0.04  # by at most so much; a clock moves in steps of a percent
_SPEED_ON_CPU = 0.03  # whose cores others use too

Now = Callable[[], float]


@dataclass(frozen=True)
class Settings:
    settle_s: float = 0.3  # at least
    settle_most_s: float = 2.0  # what has not settled by then is measured all the same, and the row says so
    measure_s: float = 1.0
    repeats: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.settle_s <= self.settle_most_s:
            raise ValueError(
                f"settle_s ({self.settle_s}) must be at least 0 and at most settle_most_s ({self.settle_most_s})"
            )
        if self.measure_s <= 0 or self.repeats < 1:
            raise ValueError(f"measure_s ({self.measure_s}) and repeats ({self.repeats}) must be positive")


@dataclass
class Repeat:
    """One provider alone, once."""

    ms: float  # of a call: the mean
    calls: int
    seconds: float
    settled_after_s: float | None  # None: it had not settled when it was measured
    watts: float | None = None


@dataclass
class SustainedCall(TimedCall):
    repeats: list[Repeat] = field(default_factory=list)

    def mean_ms(self) -> float:
        """Return the mean time of a call, over all repeats."""
        return sum(r.ms * r.calls for r in self.repeats) / sum(r.calls for r in self.repeats)

    def watts(self) -> float | None:
        samples = [(r.watts, r.seconds) for r in self.repeats if r.watts is not None]
        return sum(w * s for w, s in samples) / sum(s for _, s in samples) if samples else None

    def summary(self) -> Summary:
        """Summarise the chunks; the interval spans the means of the repeats."""
        samples, means = sorted(self.samples_ms), [r.ms for r in self.repeats]
        return Summary(
            n=len(samples),
            median=percentile(samples, 0.5),
            low=min(means),
            high=max(means),
            p5=percentile(samples, 0.05),
            p95=percentile(samples, 0.95),
            confidence=1 - 0.5 ** (len(means) - 1),  # that the median of such means lies between them
        )


@dataclass(frozen=True)
class _Chunk:
    ms: float  # of a call
    calls: int
    end: float  # when it was done, by `now`


class _Pump:
    """Keeps a device busy with one call, a chunk of calls at a time. On a GPU one chunk is always queued behind the one
    that runs, so that it never waits."""

    def __init__(self, call: SustainedCall, n: int, watch: Stopwatch, now: Now) -> None:
        self._call, self._n, self._watch, self._now = call, n, watch, now
        self._marks: list[torch.cuda.Event] = []
        self.host_bound = 0  # chunks that the GPU had to wait for

    def chunk(self) -> _Chunk:
        """The next one that is done."""
        if not self._watch.on_gpu:
            start = self._now()
            self._calls(self._n)
            end = self._now()
            return _Chunk((end - start) * 1e3 / self._counted, self._counted, end)
        if not self._marks:
            self._mark()
            self._queue()
        self._queue()
        begun, done = self._marks.pop(0), self._marks[0]
        done.synchronize()
        return _Chunk(begun.elapsed_time(done) / self._counted, self._counted, self._now())

    @property
    def _counted(self) -> int:
        return self._n * (CALLS_IN_GRAPH if self._call.graph is not None else 1)

    def _calls(self, n: int) -> None:
        call = self._call.call if self._call.graph is None else self._call.graph.replay
        for _ in range(n):
            call()

    def _queue(self) -> None:
        self._calls(1)
        self.host_bound += self._marks[-1].query()  # what was queued before is done: the GPU has waited for this call
        self._calls(self._n - 1)
        self._mark()

    def _mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)


def sustain(
    calls: list[SustainedCall],
    watch: Stopwatch,
    monitor: Monitor,
    settings: Settings,
    now: Now = time.perf_counter,
) -> None:
    """Fills in each call's repeats. One that fails drops out with its `problem`; the others go on."""
    for repeat in range(settings.repeats):
        for call in calls if repeat % 2 == 0 else reversed(calls):
            if call.problem is None:
                with call.guarded():
                    _run_alone(call, watch, monitor, settings, now)


def _run_alone(call: SustainedCall, watch: Stopwatch, monitor: Monitor, settings: Settings, now: Now) -> None:
    estimate = watch.warm_up(call.call)
    if watch.on_gpu and call.graph is None and estimate < watch.settings.graph_below_ms:
        call.replay_from_graph(watch)
    elif call.graph is None:
        call.how = "device events, back to back" if watch.on_gpu else "perf_counter, back to back"
    one = estimate * (CALLS_IN_GRAPH if call.graph is not None else 1)
    pump = _Pump(call, max(1, min(_MOST_IN_CHUNK, round(_CHUNK_MS / one))), watch, now)
    settled_after, begun = _settle(pump, watch, monitor, settings, now)
    pump.host_bound = 0
    chunks: list[_Chunk] = []
    while not chunks or chunks[-1].end - begun < settings.measure_s:
        chunks.append(pump.chunk())
    end = chunks[-1].end
    watch.synchronize()  # what is still queued
    count = sum(c.calls for c in chunks)
    mean = sum(c.ms * c.calls for c in chunks) / count
    watts = monitor.mean_watts(begun, end)
    call.repeats.append(Repeat(mean, count, end - begun, settled_after, watts))
    call.turns_ms.append([c.ms for c in chunks])
    call.intervals.append((begun, end))
    call.host_bound += pump.host_bound


def _settle(
    pump: _Pump, watch: Stopwatch, monitor: Monitor, settings: Settings, now: Now
) -> tuple[float | None, float]:
    """(after how many seconds it had settled, when); None if it had not within the time there is."""
    begun = now()
    chunks: list[_Chunk] = [pump.chunk()]
    while True:
        passed = chunks[-1].end - begun
        if passed >= settings.settle_s and _is_settled(chunks, watch, monitor):
            return passed, chunks[-1].end
        if passed >= settings.settle_most_s:
            return None, chunks[-1].end
        chunks.append(pump.chunk())


def _is_settled(chunks: list[_Chunk], watch: Stopwatch, monitor: Monitor) -> bool:
    """Return whether the last two windows agree in speed and, where they are known, in clock and power."""
    end = chunks[-1].end
    windows = [(end - 2 * _WINDOW_S, end - _WINDOW_S), (end - _WINDOW_S, end)]
    speeds = [[c.ms for c in chunks if a < c.end <= b] for a, b in windows]
    if chunks[-1].ms >= _WINDOW_S * 1e3:  # a window has no room for two calls: the last two are compared
        speeds = [[c.ms] for c in chunks[-2:]] if len(chunks) > 1 else [[], []]
    if not all(speeds):
        return False
    means = [sum(window) / len(window) for window in speeds]
    if not _close(means[0], means[1], _SPEED if watch.on_gpu else _SPEED_ON_CPU):
        return False
    before, after = (monitor.during([window]) for window in windows)
    if before is None or after is None:
        return True
    clocks = _close(before.sm_mhz, after.sm_mhz, _CLOCK)
    return clocks and (not monitor.instant_power or _close(before.power_w, after.power_w, _POWER))


def _close(a: float | None, b: float | None, by: float) -> bool:
    return a is None or b is None or abs(a - b) <= by * max(abs(a), abs(b))
