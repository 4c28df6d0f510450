"""Whose turn it is."""

from __future__ import annotations

import itertools

import torch

from strobe.bench.measure import Contender, Settings, Stopwatch, interleave


def test_turns_are_short_equally_many_and_in_a_new_order_each_round() -> None:
    calls: list[str] = []
    contenders = [Contender(lambda name=name: calls.append(name)) for name in "abcd"]
    interleave(contenders, Stopwatch(torch.device("cpu"), Settings(budget_ms=5, rounds=30, warmup_ms=0)))
    assert {c.rounds for c in contenders} == {30} and all(len(c.intervals) == 30 for c in contenders)
    assert all(len(c.samples_ms) == 30 * c.repeats <= 400 for c in contenders)
    turns = [name for name, _ in itertools.groupby(calls[8:])]  # after the warm-up
    after = {name: {b for a, b in itertools.pairwise(turns) if a == name} for name in "abcd"}
    assert all(len(neighbours) == 3 for neighbours in after.values())  # nobody runs behind the same one every time


def test_a_slow_call_gets_fewer_turns_and_a_failing_one_none() -> None:
    def fails() -> None:
        raise RuntimeError("no")

    slow, failing = Contender(lambda: torch.randn(400, 400) @ torch.randn(400, 400)), Contender(fails)
    watch = Stopwatch(torch.device("cpu"), Settings(budget_ms=0.01, rounds=50, warmup_ms=0))
    interleave([slow, failing], watch)
    assert slow.rounds == 3 and len(slow.samples_ms) == 3
    assert str(failing.problem) == "no" and not failing.samples_ms
