"""Whose turn it is."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from strobe.measure.stopwatch import _SPINS_PER_MS, Call, Contender, Settings, Stopwatch, interleave, orders


@pytest.mark.parametrize("n", range(1, 8))
def test_everyone_comes_behind_everyone_else(n: int) -> None:
    rows = list(itertools.islice(orders(n), 2 * n * n))
    assert all(sorted(row) == list(range(n)) for row in rows)
    turns = [i for row in rows for i in row]
    behind = Counter(itertools.pairwise(turns))
    assert n == 1 or all(a != b for a, b in behind)
    assert n == 1 or (len(behind) == n * (n - 1) and max(behind.values()) <= 1.8 * min(behind.values()))


def test_turns_are_equally_many_and_their_first_call_is_not_timed() -> None:
    calls: list[str] = []
    contenders = [Contender(lambda name=name: calls.append(name)) for name in "abcd"]
    interleave(contenders, Stopwatch(torch.device("cpu"), Settings(budget_ms=500, rounds=30, warmup_ms=0)))
    assert {c.rounds for c in contenders} == {30} and all(len(c.intervals) == len(c.turns_ms) == 30 for c in contenders)
    for name, contender in zip("abcd", contenders, strict=True):
        assert {len(turn) for turn in contender.turns_ms} == {contender.repeats} and len(contender.samples_ms) <= 400
        assert calls.count(name) == 2 + 30 * (contender.repeats + 1)  # two to warm up


def test_a_slow_call_has_fewer_turns_spread_over_all_rounds() -> None:
    calls: list[str] = []

    def slow() -> None:
        time.sleep(0.05)
        calls.append("slow")

    contenders = [Contender(slow), Contender(lambda: calls.append("fast"))]
    interleave(contenders, Stopwatch(torch.device("cpu"), Settings(budget_ms=60, rounds=9, warmup_ms=0)))
    assert [c.rounds for c in contenders] == [3, 9] and not contenders[0].leads
    begun = calls.index("fast") + 2  # after the warm-up
    gaps = [len(list(group)) for name, group in itertools.groupby(calls[begun:]) if name == "fast"]
    a_turn = contenders[1].repeats + 1
    assert len(gaps) >= 3 and max(gaps) <= 4 * a_turn


def test_a_failing_call_drops_out() -> None:
    def fails() -> None:
        raise RuntimeError("no")

    slow, failing = Contender(lambda: torch.randn(400, 400) @ torch.randn(400, 400)), Contender(fails)
    watch = Stopwatch(torch.device("cpu"), Settings(budget_ms=0.01, rounds=50, warmup_ms=0))
    interleave([slow, failing], watch)
    assert slow.rounds == 3 and len(slow.samples_ms) == 3
    assert str(failing.problem) == "no" and not failing.samples_ms


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

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        def synchronize(device: torch.device) -> None:
            self.cpu = max(self.cpu, self.free)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.run(cycles / _SPINS_PER_MS))

    def run(self, ms: float) -> None:
        self.free = max(self.cpu, self.free) + ms

    def call(self, name: str) -> None:
        self.cpu += self.cpu_ms
        self.run(0.125 if self.last == name else 1.0)
        self.last = name

    def contender(self, name: str) -> Contender:
        return Contender(lambda: self.call(name))

    def watch(self, **settings: float) -> Stopwatch:
        watch = Stopwatch(torch.device("cpu"), Settings(warmup_ms=0, **settings))
        watch.on_gpu = True
        watch._flush = SimpleNamespace(zero_=lambda: self.run(0.25))  # type: ignore[assignment]
        return watch


class FakeGraph:
    def __init__(self, call: Call) -> None:
        self.call = call

    def replay(self) -> None:
        for _ in range(20):
            self.call()


@pytest.mark.parametrize("kind", ["time", "graph"])
def test_the_first_call_of_a_turn_is_left_out_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    watch = gpu.watch(budget_ms=1000, rounds=6)
    monkeypatch.setattr(watch, "capture", FakeGraph)
    contenders = [gpu.contender(name) for name in "ab"]
    interleave(contenders, watch, kind)
    for contender in contenders:
        assert contender.problem is None and contender.method.startswith("graph" if kind == "graph" else "device")
        assert (
            len(contender.turns_ms) == 6
            and contender.leads
            and {round(ms, 9) for ms in contender.samples_ms} == {0.125}
        )
    assert watch.head_start == 0 and not watch.late


@pytest.mark.parametrize(("cpu_ms", "head_start"), [(0.3, 0), (0.4, 1), (0.6, 3), (2.0, 4)])
def test_a_slow_cpu_gets_a_head_start(cpu_ms: float, head_start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call and the clearing before it take 0.375 ms: a CPU that needs more falls behind, and its time must not show.
    One that always does is said to."""
    gpu = FakeGpu(monkeypatch, cpu_ms)
    watch = gpu.watch(budget_ms=2.5, rounds=5)
    contenders = [gpu.contender(name) for name in "ab"]
    interleave(contenders, watch)
    assert watch.head_start == head_start
    for contender in contenders:
        if head_start < 4:
            assert (contender.rounds, contender.repeats, contender.late) == (5, 4, 0)
            assert {round(ms, 9) for ms in contender.samples_ms} == {0.125}
        else:
            assert contender.late == len(contender.samples_ms) > 0


def test_all_are_replayed_from_graphs_where_one_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    watch = gpu.watch(budget_ms=100, rounds=3, graph_below_ms=0.2)
    monkeypatch.setattr(watch, "capture", FakeGraph)
    slow = Contender(lambda: gpu.run(3.0))
    contenders = [slow, gpu.contender("a")]
    interleave(contenders, watch)
    assert all(c.method.startswith("graph") and c.l2 == "warm" for c in contenders)
    assert {round(ms, 9) for ms in slow.samples_ms} == {3.0}
