"""Summarise a list of timings by the median, its 95 % interval, the 5th and 95th percentile, and say when two lists
differ."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """The statistics of samples, in their unit. `low` and `high` hold the true median in 95 of 100 repetitions, or in
    as many as so few samples allow (`confidence`)."""

    n: int
    median: float
    low: float
    high: float
    p5: float
    p95: float
    confidence: float

    @property
    def noise(self) -> float:
        """Half the width of the interval, relative to the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Linear between the neighbours; `ordered` is sorted."""
    at = fraction * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def median_ranks(n: int, confidence: float = 0.95) -> tuple[int, int, float]:
    """Indices (from 0) of the two ordered samples between which the median lies with at least this confidence, and the
    confidence reached. How many of n samples fall below the median is binomial(n, 1/2), whatever their distribution."""
    ways = 1  # in which i of n samples lie below the median: an integer, which no number of samples overflows
    tail = 0  # and at most i
    rank, reached = 0, 0.0
    for i in range(max(1, n // 2)):
        tail += ways
        inside = 1 - 2 * tail / 2**n
        if i > 0 and inside < confidence:
            break
        rank, reached = i, inside
        ways = ways * (n - i) // (i + 1)
    return rank, n - 1 - rank, max(0.0, reached)


def summarise(samples: Sequence[float]) -> Summary:
    if not samples:
        raise ValueError("samples is empty; at least one is needed")
    ordered = sorted(samples)
    low, high, confidence = median_ranks(len(ordered))
    return Summary(
        n=len(ordered),
        median=percentile(ordered, 0.5),
        low=ordered[low],
        high=ordered[high],
        p5=percentile(ordered, 0.05),
        p95=percentile(ordered, 0.95),
        confidence=confidence,
    )


def summarise_turns(turns: Sequence[Sequence[float]]) -> Summary:
    """Summarise samples that were taken in turns. Those of one turn resemble each other, so the interval of the median
    is that of the turns' medians."""
    whole = summarise([sample for turn in turns for sample in turn])
    of_turns = summarise([percentile(sorted(turn), 0.5) for turn in turns])
    low, high = min(of_turns.low, whole.median), max(of_turns.high, whole.median)
    return dataclasses.replace(whole, low=low, high=high, confidence=of_turns.confidence)


def separated(a: Summary, b: Summary) -> bool:
    """Return whether a difference may be called one: the intervals of the medians have nothing in common."""
    return a.high < b.low or b.high < a.low


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def growth_exponent(sizes: Sequence[float], values: Sequence[float]) -> float | None:
    """b of the least-squares fit log(value) = a + b log(size): 1 for linear growth, 2 for quadratic. None without two
    sizes."""
    points = [(math.log(x), math.log(y)) for x, y in zip(sizes, values, strict=True) if x > 0 and y > 0]
    if len({x for x, _ in points}) < 2:
        return None
    mean_x, mean_y = (sum(c) / len(points) for c in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
