"""Providers take turns, and each call is timed."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
import torch
from fake_gpu import FakeGpu, FakeGraph

from strobe.measure import do_bench
from strobe.measure.stopwatch import Settings, Stopwatch, TimedCall
from strobe.measure.turns import interleave, orders


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
    timed = [TimedCall(lambda name=name: calls.append(name)) for name in "abcd"]
    watch = Stopwatch(torch.device("cpu"), Settings(budget_ms=500, rounds=30, warmup_ms=0))
    shares = [share for _, share in interleave(timed, watch)]
    assert {share.rounds for share in shares} == {30} and all(len(c.intervals) == len(c.turns_ms) == 30 for c in timed)
    for name, call, share in zip("abcd", timed, shares, strict=True):
        assert {len(turn) for turn in call.turns_ms} == {share.repeats} and len(call.samples_ms) <= 400
        assert calls.count(name) == 2 + 30 * (share.repeats + 1)  # two to warm up


def test_a_slow_call_has_fewer_turns_spread_over_all_rounds() -> None:
    calls: list[str] = []

    def slow() -> None:
        time.sleep(0.05)
        calls.append("slow")

    timed = [TimedCall(slow), TimedCall(lambda: calls.append("fast"))]
    watch = Stopwatch(torch.device("cpu"), Settings(budget_ms=60, rounds=9, warmup_ms=0))
    (_, of_slow), (_, of_fast) = interleave(timed, watch)
    assert (of_slow.rounds, of_fast.rounds) == (3, 9) and not of_slow.leads
    begun = calls.index("fast") + 2  # after the warm-up
    gaps = [len(list(group)) for name, group in itertools.groupby(calls[begun:]) if name == "fast"]
    assert len(gaps) >= 3 and max(gaps) <= 4 * (of_fast.repeats + 1)


def test_a_failing_call_drops_out() -> None:
    def fails() -> None:
        raise RuntimeError("no")

    slow, failing = TimedCall(lambda: torch.randn(400, 400) @ torch.randn(400, 400)), TimedCall(fails)
    watch = Stopwatch(torch.device("cpu"), Settings(budget_ms=0.01, rounds=50, warmup_ms=0))
    ((call, share),) = interleave([slow, failing], watch)
    assert call is slow and share.rounds == 3 and len(slow.samples_ms) == 3
    assert str(failing.problem) == "no" and not failing.samples_ms


@pytest.mark.parametrize("kind", ["time", "graph"])
def test_the_first_call_of_a_turn_is_left_out_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    watch = gpu.watch(budget_ms=1000, rounds=6)
    monkeypatch.setattr(watch, "capture", FakeGraph)
    timed = [gpu.timed(name) for name in "ab"]
    for call, share in interleave(timed, watch, kind):
        assert call.problem is None and call.how.startswith("graph" if kind == "graph" else "device")
        assert len(call.turns_ms) == 6 and share.leads and {round(ms, 9) for ms in call.samples_ms} == {0.125}
    assert watch.queue_delay == 0 and not watch.host_bound


@pytest.mark.parametrize(("cpu_ms", "queue_delay"), [(0.3, 0), (0.4, 1), (0.6, 3), (2.0, 4)])
def test_a_slow_cpu_gets_a_queue_delay(cpu_ms: float, queue_delay: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call and the clearing before it take 0.375 ms: a CPU that needs more falls behind, and its time must not show.
    One that always does is said to."""
    gpu = FakeGpu(monkeypatch, cpu_ms)
    watch = gpu.watch(budget_ms=2.5, rounds=5)
    for call, share in interleave([gpu.timed(name) for name in "ab"], watch):
        if queue_delay < 4:
            assert (share.rounds, share.repeats, call.host_bound) == (5, 4, 0)
            assert {round(ms, 9) for ms in call.samples_ms} == {0.125}
        else:
            assert call.host_bound == len(call.samples_ms) > 0
    assert watch.queue_delay == queue_delay


def test_all_are_replayed_from_graphs_where_one_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    watch = gpu.watch(budget_ms=100, rounds=3, graph_below_ms=0.2)
    monkeypatch.setattr(watch, "capture", FakeGraph)
    slow = TimedCall(lambda: gpu.run(3.0))
    timed = [slow, gpu.timed("a")]
    interleave(timed, watch)
    assert all(c.how.startswith("graph") and c.l2 == "warm" for c in timed)
    assert {round(ms, 9) for ms in slow.samples_ms} == {3.0}


def test_the_best_of_few_calls() -> None:
    watch = Stopwatch(torch.device("cpu"), Settings(l2="warm"))
    slow = iter([0.1, 0.001, 0.08, *[0.15] * 50])
    assert 1 <= watch.best_ms(lambda: time.sleep(next(slow)), budget_ms=300) < 80  # a busy machine may be late
    count = itertools.count()
    watch.best_ms(lambda: (next(count), time.sleep(0.02)), budget_ms=1)
    assert next(count) == 1  # a slow one is called once


# ---- do_bench


def test_do_bench_is_tritons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provider after provider, in their scopes; one that fails becomes a problem."""
    import sys
    import types

    asked: list[tuple[str, object]] = []

    def fake(call: object, return_mode: str) -> list[float]:
        asked.append((return_mode, call()))  # type: ignore[operator]
        return [1.0, 2.0, 3.0]

    testing = types.ModuleType("triton.testing")
    testing.do_bench = fake  # type: ignore[attr-defined]
    triton = types.ModuleType("triton")
    triton.testing = testing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.testing", testing)

    def fails() -> None:
        raise RuntimeError("no kernel")

    calls = [TimedCall(lambda: "a"), TimedCall(fails), TimedCall(lambda: "b")]
    do_bench.do_bench(calls)
    assert asked == [("all", "a"), ("all", "b")]
    assert calls[0].samples_ms == [1.0, 2.0, 3.0] and calls[0].l2 == "flushed" and len(calls[0].intervals) == 1
    assert str(calls[1].problem) == "no kernel" and not calls[1].samples_ms


def test_do_bench_says_why_not() -> None:
    reason = do_bench.unavailable(Stopwatch(torch.device("cpu"), Settings()))
    assert reason == "do_bench times GPUs, the device is cpu"
