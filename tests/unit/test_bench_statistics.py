"""Medians, their intervals, and when a difference may be called one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st

from strobe.measure.statistics import (
    geometric_mean,
    growth_exponent,
    median_ranks,
    percentile,
    separated,
    summarise,
    summarise_turns,
)


@pytest.mark.parametrize(
    ("n", "low", "high", "confidence"),
    [(5, 0, 4, 0.9375), (6, 0, 5, 0.96875), (10, 1, 8, 0.978515625), (20, 5, 14, 0.95861), (100, 39, 60, 0.9648)],
)
def test_ranks_from_the_tables(n: int, low: int, high: int, confidence: float) -> None:
    """The textbook's order statistics (counted from 0 here)."""
    found = median_ranks(n)
    assert found[:2] == (low, high) and found[2] == pytest.approx(confidence, abs=1e-4)


def test_many_samples_do_not_overflow() -> None:
    low, high, confidence = median_ranks(5000)
    assert high == 4999 - low and 0.95 <= confidence < 0.96
    assert low == pytest.approx(2500 - 1.96 * 5000**0.5 / 2, abs=2)  # the normal approximation


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    chance = random.Random(1)
    true_median = 2**0.5  # of max(u1, u2) * 2 with u uniform on [0, 1]
    inside = 0
    for _ in range(2000):
        s = summarise([2 * max(chance.random(), chance.random()) for _ in range(15)])
        inside += s.low <= true_median <= s.high
    assert 0.94 <= inside / 2000 <= 0.995


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=60))
def test_ordered(samples: list[float]) -> None:
    s = summarise(samples)
    assert s.low <= s.median <= s.high and min(samples) <= s.p5 <= s.p95 <= max(samples) and s.n == len(samples)


def test_the_interval_of_turns_is_that_of_their_medians() -> None:
    """Samples of one turn are alike: a hundred of them say no more than one."""
    turns = [[level + noise for noise in (0.0, 0.001, 0.002)] for level in (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)]
    flat = [sample for turn in turns for sample in turn]
    found, naive = summarise_turns(turns), summarise(flat)
    assert (found.median, found.n, found.p5, found.p95) == (naive.median, naive.n, naive.p5, naive.p95)
    assert (found.low, found.high) == (1.001, 1.501) and found.confidence == median_ranks(6)[2]
    assert naive.low > found.low and naive.high < found.high


@given(st.lists(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5), min_size=1, max_size=20))
def test_the_median_lies_in_its_interval(turns: list[list[float]]) -> None:
    found = summarise_turns(turns)
    assert found.low <= found.median <= found.high


def test_separated_needs_a_gap() -> None:
    slow, fast = summarise([2.0, 2.1, 2.2, 2.3, 2.1, 2.2]), summarise([1.0, 1.1, 1.2, 1.3, 1.1, 1.2])
    assert separated(slow, fast) and separated(fast, slow)
    assert not separated(slow, summarise([1.0, 2.15, 3.0, 2.0, 1.5, 2.5]))


def test_small_facts() -> None:
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0 and percentile([1.0, 3.0], 0.5) == 2.0
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert growth_exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2.0)
    assert growth_exponent([1, 2, 4], [3, 6, 12]) == pytest.approx(1.0)
    assert growth_exponent([4, 4], [1, 2]) is None
    with pytest.raises(ValueError, match="empty"):
        summarise([])
