"""What committed results say about the claims one hears of FlashAttention, and the words for it. Nothing is said that
no row shows."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from strobe.bench.results import Results, Row
from strobe.measure.statistics import geometric_mean, growth_exponent, separated


@dataclass(frozen=True)
class SpeedUp:
    """Our fastest against one standard baseline on one case."""

    length: int
    baseline: str
    times: float | None  # None: the baseline did not run
    clear: bool  # the intervals of the medians are separate
    reason: str | None = None


def by_case(results: Results) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in results.rows:
        if row.case.tile is None:
            found[row.case.key].append(row)
    return found


def fastest_of_ours(rows: list[Row]) -> Row | None:
    ours = [row for row in rows if row.kind == "ours" and row.timed]
    return min(ours, key=lambda row: row.median_ms or 0.0) if ours else None


def speed_ups(results: Results, suite: str, direction: str = "forward") -> list[SpeedUp]:
    found = []
    for rows in by_case(results).values():
        case, best = rows[0].case, fastest_of_ours(rows)
        if (
            case.suite != suite
            or case.direction != direction
            or case.measure != "time"
            or best is None
            or best.timing is None
        ):
            continue
        for row in rows:
            if row.kind == "standard" and row.timed and row.timing is not None:
                times = row.timing.summary.median / best.timing.summary.median
                found.append(
                    SpeedUp(case.len_k, row.provider, times, separated(row.timing.summary, best.timing.summary))
                )
            elif row.kind == "standard" and row.status == "out of memory":
                found.append(SpeedUp(case.len_k, row.provider, None, True, "out of memory"))
    return found


def memory_exponents(results: Results, suite: str) -> dict[str, float]:
    """Provider -> exponent with which its extra memory grows with the length, all else kept; the mean over the series
    of the suite."""
    series: dict[str, dict[tuple[int, int, str, str], list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for row in results.rows:
        c = row.case
        if (
            c.suite == suite
            and c.tile is None
            and c.measure == "time"
            and row.timed
            and row.extra_bytes
            and c.batch == 1
        ):
            series[row.provider][c.heads, c.dim, c.mask, c.direction].append((c.len_k, row.extra_bytes))
    found = {}
    for provider, lines in series.items():
        fits = [growth_exponent(*zip(*points, strict=True)) for points in lines.values() if len(points) >= 3]
        known = [fit for fit in fits if fit is not None]
        if known:
            found[provider] = sum(known) / len(known)
    return found


def ratios(
    results: Results, suite: str, provider: str, base: str, direction: str = "forward", of: str = "median"
) -> dict[str, float]:
    """Case label -> how many times as fast `provider` is as `base`, by this field of their summaries."""
    found = {}
    for rows in by_case(results).values():
        times = {row.provider: getattr(row.timing.summary, of) for row in rows if row.timed and row.timing is not None}
        case = rows[0].case
        if case.suite == suite and case.direction == direction and case.measure == "time":
            a, b = times.get(provider), times.get(base)
            if a and b:
                found[case.label] = b / a
    return found


def mean_ratio(values: dict[str, float]) -> float | None:
    return geometric_mean(list(values.values())) if values else None


def repeatability(first: Results, second: Results) -> tuple[int, int]:
    """(rows whose medians differ by at most 3 %, rows in both)."""
    again = {(row.case.key, row.provider): row.median_ms for row in second.rows if row.timed}
    pairs = [
        (row.median_ms, again[row.case.key, row.provider])
        for row in first.rows
        if row.timed and (row.case.key, row.provider) in again
    ]
    close = [1 for a, b in pairs if a and b and abs(b / a - 1) <= 0.03]
    return len(close), len(pairs)
