"""Whose turn it is."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
import torch

from strobe.bench.measure import Call, Contender, Settings, Stopwatch, interleave, orders


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


class FakeEvent:
    """Of a device on which the first call behind another contender takes 1 ms, every other an eighth."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = FakeEvent.now

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


class FakeGraph:
    def __init__(self, call: Call) -> None:
        self.call = call

    def replay(self) -> None:
        for _ in range(20):
            self.call()


@pytest.mark.parametrize("kind", ["time", "graph"])
def test_the_first_call_of_a_turn_is_left_out_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    who: list[str] = []

    def call(name: str) -> None:
        FakeEvent.now += 0.125 if who and who[-1] == name else 1.0
        who.append(name)

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    watch = Stopwatch(torch.device("cpu"), Settings(budget_ms=1000, rounds=6, warmup_ms=0))
    watch.on_gpu = True
    monkeypatch.setattr(watch, "capture", FakeGraph)
    contenders = [Contender(lambda name=name: call(name)) for name in "ab"]
    interleave(contenders, watch, kind)
    for contender in contenders:
        assert contender.problem is None and contender.method.startswith("graph" if kind == "graph" else "device")
        assert len(contender.turns_ms) == 6 and contender.leads and set(contender.samples_ms) == {0.125}
