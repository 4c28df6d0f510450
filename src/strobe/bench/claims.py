"""Check the claims one hears of FlashAttention against results: who is fastest, how memory grows, energy. Nothing is
said that no row shows. `conclusions` puts them into sentences."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

from strobe.bench.results import Results, Row
from strobe.measure.method import TURNS
from strobe.measure.statistics import growth_exponent


def by_case(rows: Iterable[Row], method: str = TURNS) -> dict[str, list[Row]]:
    """Key of a case -> its rows by one method."""
    cases: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.method == method:
            cases[row.case.key].append(row)
    return cases


def selected(rows: Iterable[Row], suite: str, direction: str = "forward", method: str = TURNS) -> dict[str, list[Row]]:
    """The cases of a suite in which the device's time was measured."""
    return {
        key: same
        for key, same in by_case(rows, method).items()
        if (same[0].case.suite, same[0].case.direction, same[0].case.measure) == (suite, direction, "time")
    }


def fastest(rows: Iterable[Row], kind: str) -> Row | None:
    return min((r for r in rows if r.kind == kind and r.timed), key=lambda r: r.ms or 0.0, default=None)


def duels(cases: dict[str, list[Row]], kind: str) -> list[tuple[Row, Row]]:
    """(our fastest, the fastest of a kind that ran beside it) of each case that has both."""
    pairs = ((ours, fastest(beside(rows, ours), kind)) for rows, ours in _with_ours(cases))
    return [(ours, other) for ours, other in pairs if other is not None]


def beside(rows: Iterable[Row], ours: Row) -> list[Row]:
    """Those of the same run: clocks and versions of another one may differ."""
    return [row for row in rows if row.run == ours.run]


def rivals(cases: dict[str, list[Row]], kind: str) -> list[str]:
    """Return who of a kind was timed beside ours, in any of the cases."""
    timed = (row for rows, ours in _with_ours(cases) for row in beside(rows, ours) if row.kind == kind and row.timed)
    return sorted({row.provider for row in timed})


def _with_ours(cases: dict[str, list[Row]]) -> list[tuple[list[Row], Row]]:
    return [(rows, ours) for rows in cases.values() if (ours := fastest(rows, "ours")) is not None]


def memory_exponents(results: Results, suite: str, direction: str = "forward") -> dict[str, float]:
    """Provider -> exponent with which its extra memory grows with the length, all else kept; the mean over the series
    of the suite."""
    series: dict[str, dict[tuple[int, int, str], dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for row in results.rows:
        c = row.case
        plain = (c.suite, c.direction, c.measure, c.batch) == (suite, direction, "time", 1)
        if plain and row.timed and row.extra_bytes:
            series[row.provider][c.heads, c.dim, c.mask.name][c.len_k] = row.extra_bytes
    exponents = {}
    for provider, lines in series.items():
        fits = [growth_exponent(list(points), list(points.values())) for points in lines.values() if len(points) >= 3]
        slopes = [fit for fit in fits if fit is not None]
        if slopes:
            exponents[provider] = sum(slopes) / len(slopes)
    return exponents


def memory_in_q(cases: dict[str, list[Row]]) -> dict[str, float]:
    """Provider -> the most memory it needs beyond inputs, outputs and gradients in any case, in sizes of q. Cases with
    fewer queries than keys do not count: next to their q any workspace is large."""
    memory: dict[str, float] = {}
    for row in (row for rows in cases.values() for row in rows):
        if row.timed and row.extra_bytes is not None and row.case.len_q == row.case.len_k:
            memory[row.provider] = max(memory.get(row.provider, 0.0), row.extra_bytes / row.case.q_bytes())
    return memory


def joules_per_tflop(row: Row) -> float | None:
    return None if row.energy is None else row.energy.joules_per_tflop


def merged(runs: Iterable[Results]) -> Results:
    """Runs of one device as one: the first row of each identity counts, and the first run's provenance."""
    runs = list(runs)
    rows: dict[tuple[str, str, str], Row] = {}
    for i, run in enumerate(runs):
        for row in run.rows:
            rows.setdefault(row.identity, dataclasses.replace(row, run=i))
    first = runs[0]
    return Results(
        first.provenance,
        first.method,
        first.ceilings,
        list(rows.values()),
        first.clocks,
        all(run.complete for run in runs),
        sum(run.seconds or 0.0 for run in runs),
    )
