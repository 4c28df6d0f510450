"""The method "sustained", on a GPU and with clocks that are made up: who runs when, what counts as settled, what is
measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from fake_gpu import FakeGpu, FakeGraph

from strobe.measure.clocks import Clock
from strobe.measure.stopwatch import Settings as Timing, Stopwatch
from strobe.measure.sustained import Settings, SustainedCall, sustain


@dataclass
class FakeMonitor:
    """A card's answers at a time, in seconds."""

    mhz: Callable[[float], float] = lambda at: 1500.0
    watts: Callable[[float], float] = lambda at: 700.0
    instant_power: bool = True
    energy_source: str = "made up"

    def during(self, intervals: list[tuple[float, float]]) -> Clock:
        ((begin, end),) = intervals
        middle = (begin + end) / 2
        return Clock(self.mhz(middle), self.watts(middle), 60.0, [], 10)

    def mean_watts(self, begin: float, end: float) -> float:
        return self.watts((begin + end) / 2)


def alone(
    gpu: FakeGpu, ms: Callable[[float], float], monitor: FakeMonitor, settings: Settings | None = None
) -> SustainedCall:
    """A call that takes `ms` of the time at which it begins, in milliseconds."""

    def call() -> None:
        gpu.cpu += gpu.cpu_ms
        gpu.run(ms(max(gpu.cpu, gpu.free) / 1e3))

    found = SustainedCall(call)
    sustain([found], gpu.watch(), monitor, settings or Settings(repeats=1), gpu.now)  # type: ignore[arg-type]
    assert found.problem is None
    return found


def test_each_runs_alone_and_the_order_is_reversed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, ran = FakeGpu(monkeypatch), []

    def call(name: str) -> None:
        if not ran or ran[-1] != name:
            ran.append(name)
        gpu.call(name)

    calls = [SustainedCall(lambda name=name: call(name)) for name in "abc"]  # type: ignore[misc]
    sustain(calls, gpu.watch(), FakeMonitor(), Settings(repeats=3), gpu.now)  # type: ignore[arg-type]
    assert ran == ["a", "b", "c", "b", "a", "b", "c"]  # c, and then a, come twice in a row
    for found in calls:
        assert len(found.repeats) == len(found.turns_ms) == 3 and found.how == "device events, back to back"
        assert found.mean_ms() == pytest.approx(0.125) and found.host_bound == 0 and found.l2 == "warm"
        assert all(r.seconds >= 1.0 and r.calls == pytest.approx(8000, rel=0.02) for r in found.repeats)
        assert found.watts() == pytest.approx(700.0) and (found.summary().low, found.summary().high) == pytest.approx(
            (0.125, 0.125)
        )


def test_the_gpu_is_kept_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the CPU does besides, up to a whole chunk: one is always queued ahead."""
    gpu = FakeGpu(monkeypatch, cpu_ms=0.1)
    found = alone(gpu, lambda at: 0.125, FakeMonitor())
    assert found.mean_ms() == pytest.approx(0.125) and found.host_bound == 0


def test_a_gpu_that_waits_for_the_cpu_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, cpu_ms=0.2)
    found = alone(gpu, lambda at: 0.125, FakeMonitor())
    assert found.mean_ms() == pytest.approx(0.2, rel=0.01)  # the CPU's pace
    assert found.host_bound >= 0.9 * len(found.samples_ms)


def test_what_slows_down_at_first_is_measured_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card behaves as at a power limit: fast while it is cool, then at the clock that it can keep."""
    gpu = FakeGpu(monkeypatch)
    found = alone(gpu, lambda at: 0.1 + 0.05 * min(at, 0.6), FakeMonitor())
    (repeat,) = found.repeats
    assert found.mean_ms() == pytest.approx(0.13, rel=1e-3)
    assert repeat.settled_after_s is not None and 0.7 <= repeat.settled_after_s <= 1.0


@pytest.mark.parametrize(
    "monitor",
    [
        FakeMonitor(mhz=lambda at: 1900.0 - 500.0 * min(at, 0.8)),
        FakeMonitor(watts=lambda at: 400.0 + 375.0 * min(at, 0.8)),
    ],
    ids=["clock", "power"],
)
def test_clock_and_power_have_to_settle_too(monitor: FakeMonitor, monkeypatch: pytest.MonkeyPatch) -> None:
    (repeat,) = alone(FakeGpu(monkeypatch), lambda at: 0.125, monitor).repeats
    assert repeat.settled_after_s is not None and 0.8 <= repeat.settled_after_s <= 1.3


def test_power_that_is_a_mean_over_a_second_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = FakeMonitor(watts=lambda at: 400.0 + 200.0 * min(at, 1.5), instant_power=False)
    (repeat,) = alone(FakeGpu(monkeypatch), lambda at: 0.125, slow).repeats
    assert repeat.settled_after_s is not None and repeat.settled_after_s < 0.5


def test_what_never_settles_is_measured_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    found = alone(gpu, lambda at: 0.1 * (1 + 0.1 * at), FakeMonitor(mhz=lambda at: 1900 - 100 * at))
    (repeat,) = found.repeats
    assert repeat.settled_after_s is None and repeat.seconds >= 1.0


def test_calls_longer_than_a_window_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    (repeat,) = alone(FakeGpu(monkeypatch), lambda at: 400.0, FakeMonitor()).repeats
    assert repeat.settled_after_s is not None and repeat.calls == 3 and repeat.ms == pytest.approx(400.0)


def test_short_calls_are_replayed_from_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, cpu_ms=0.001)
    watch = gpu.watch(graph_below_ms=0.2)
    monkeypatch.setattr(watch, "capture", FakeGraph)
    found = SustainedCall(lambda: gpu.call("a"))
    sustain([found], watch, FakeMonitor(), Settings(repeats=2), gpu.now)  # type: ignore[arg-type]
    assert found.how.startswith("graph replay") and found.mean_ms() == pytest.approx(0.125)
    assert all(r.calls == pytest.approx(8000, rel=0.05) for r in found.repeats)


def test_one_that_fails_drops_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)

    def fails() -> None:
        raise RuntimeError("no")

    good, bad = SustainedCall(lambda: gpu.call("a")), SustainedCall(fails)
    sustain([bad, good], gpu.watch(), FakeMonitor(), Settings(), gpu.now)  # type: ignore[arg-type]
    assert str(bad.problem) == "no" and not bad.repeats and len(good.repeats) == 2


def test_on_a_cpu_without_clocks() -> None:
    class Nothing(FakeMonitor):
        def during(self, intervals: object) -> None:  # type: ignore[override]
            return None

        def mean_watts(self, begin: float, end: float) -> None:  # type: ignore[override]
            return None

    found = SustainedCall(lambda: torch.randn(50, 50) @ torch.randn(50, 50))
    watch = Stopwatch(torch.device("cpu"), Timing(warmup_ms=0))
    sustain([found], watch, Nothing(), Settings(0.02, 0.1, 0.05, 2))  # type: ignore[arg-type]
    assert found.problem is None and len(found.repeats) == 2 and found.watts() is None
    assert all(r.seconds >= 0.05 for r in found.repeats) and found.summary().n == len(found.samples_ms)
    assert found.summary().low <= found.mean_ms() <= found.summary().high


@pytest.mark.parametrize(
    "settings", [{"settle_s": -1}, {"settle_s": 3, "settle_most_s": 2}, {"measure_s": 0}, {"repeats": 0}]
)
def test_settings_are_checked(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Settings(**settings)  # type: ignore[arg-type]
