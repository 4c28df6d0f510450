"""Ratios of two providers, and how far they repeat: what the documents say beyond `strobe report`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from strobe.bench import claims
from strobe.bench.results import Results, Row
from strobe.measure.method import SUSTAINED, TURNS
from strobe.measure.statistics import geometric_mean, separated

CLOSE = 0.03  # two runs of the same agree if they differ by no more


@dataclass(frozen=True)
class SpeedUp:
    """Our fastest against one standard baseline on one case."""

    length: int
    baseline: str
    times: float | None  # None: the baseline did not run
    clear: bool  # the intervals of the medians are separate
    reason: str | None = None


def speed_ups(results: Results, suite: str, direction: str = "forward", method: str = TURNS) -> list[SpeedUp]:
    found = []
    for rows in claims.selected(results.rows, suite, direction, method).values():
        case, best = rows[0].case, claims.fastest(rows, "ours")
        if best is None or best.timing is None:
            continue
        for row in rows:
            if row.kind == "standard" and row.timed and row.timing is not None:
                clear = separated(row.timing.summary, best.timing.summary)
                found.append(SpeedUp(case.len_k, row.provider, row.timing.ms / best.timing.ms, clear))
            elif row.kind == "standard" and row.status == "out of memory":
                found.append(SpeedUp(case.len_k, row.provider, None, True, "out of memory"))
    return found


def ratios(
    results: Results,
    suite: str,
    provider: str,
    base: str,
    direction: str = "forward",
    method: str = TURNS,
    of: Callable[[Row], float | None] = lambda row: row.ms,
) -> dict[str, float]:
    """Key of a case -> how much more `base` needs than `provider`: above 1, `provider` is ahead."""
    found = {}
    for key, rows in claims.selected(results.rows, suite, direction, method).items():
        values = {row.provider: of(row) for row in rows if row.timed}
        a, b = values.get(provider), values.get(base)
        if a and b:
            found[key] = b / a
    return found


def energy_ratios(
    results: Results, suite: str, provider: str, base: str, direction: str = "forward"
) -> dict[str, float]:
    """The same for joules per FLOP, of sustained rows."""
    return ratios(results, suite, provider, base, direction, SUSTAINED, of=claims.joules_per_tflop)


def mean_ratio(values: dict[str, float]) -> float | None:
    return geometric_mean(list(values.values())) if values else None


def repeatability(first: Results, second: Results, method: str = TURNS) -> tuple[int, int]:
    """(rows whose times differ by at most 3 %, rows in both)."""
    again = {row.identity: row.ms for row in second.rows if row.timed and row.method == method}
    pairs = [(row.ms, again[row.identity]) for row in first.rows if row.timed and row.identity in again]
    close = [1 for a, b in pairs if a and b and abs(b / a - 1) <= CLOSE]
    return len(close), len(pairs)


def ratio_repeatability(
    first: Results, second: Results, suite: str, provider: str, base: str, direction: str = "forward"
) -> tuple[int, int]:
    """(cases whose sustained ratios to `base` differ by at most 3 %, cases in both)."""
    a, b = (ratios(run, suite, provider, base, direction, SUSTAINED) for run in (first, second))
    pairs = [(a[key], b[key]) for key in a if key in b]
    return sum(abs(y / x - 1) <= CLOSE for x, y in pairs), len(pairs)
