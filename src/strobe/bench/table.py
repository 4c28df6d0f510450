"""Results on the terminal."""

from __future__ import annotations

from collections import defaultdict

from rich.console import Console
from rich.table import Table

from strobe.bench.compare import Change
from strobe.bench.conclusions import conclusions
from strobe.bench.results import Results, Row
from strobe.measure import units
from strobe.measure.method import SUSTAINED, TITLES
from strobe.measure.provenance import busy_machine

_NOISY = 0.3  # half an interval relative to the median: more says nothing about speed
NOISY_NOTE = "noisy: the interval of the time is wider than half of it; other work may run here"
ABOVE_NOTE = (
    "*: more than the matrix product of this run, which moves its operands through memory at another clock; an upper bound "
    "it is not"
)
_WIDTHS = {
    "time": 8,
    "±": 6,
    "rate": 15,
    "of matmul": 9,
    "matrix units": 12,
    "SM clock": 8,
    "power": 6,
    "energy": 10,
    "extra memory": 12,
    "error": 7,
}


def noise(row: Row) -> str:
    assert row.timing is not None
    return "noisy" if row.timing.summary.noise > _NOISY else f"{row.timing.summary.noise:.1%}"


def share(value: float | None) -> str:
    return units.percent(value) + ("*" if value is not None and value > 1 else "")


def show(results: Results, console: Console) -> None:
    ceilings = results.ceilings
    matmul = ", ".join(f"{dtype} {units.rate(value)}" for dtype, value in ceilings.matmul_tflops.items())
    copy = units.bandwidth(ceilings.copy_gbytes_per_s)
    console.print(f"{results.device}; matrix product {matmul}; copy {copy}", markup=False)
    if (warning := busy_machine(results.provenance)) is not None:
        console.print(warning, style="yellow", markup=False)
    by_case: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in results.rows:
        by_case[row.case.key, row.method].append(row)
    shown = _columns(results)
    for (_, method), rows in by_case.items():
        timed = sorted((r for r in rows if r.timed), key=lambda r: r.ms or 0)
        if timed:
            console.print(_table(timed, shown, method if len(results.methods()) > 1 else None))
    timed = [row for row in results.rows if row.timed and row.timing is not None]
    if any(row.timing is not None and row.timing.summary.noise > _NOISY for row in timed):
        console.print(NOISY_NOTE, style="dim")
    if any((row.of_matmul or 0) > 1 for row in timed):
        console.print(ABOVE_NOTE, style="dim")
    _show_others(results, console)
    for sentence in conclusions(results):
        console.print(sentence, style="bold", markup=False)


def _columns(results: Results) -> list[str]:
    """Those for which some row has something."""
    clocked = any(row.clock is not None and row.clock.sm_mhz for row in results.rows)
    powered = any(row.energy is not None for row in results.rows)
    hidden = ([] if clocked else ["matrix units", "SM clock"]) + ([] if powered else ["power", "energy"])
    return [heading for heading in _WIDTHS if heading not in hidden]


def _table(rows: list[Row], columns: list[str], method: str | None) -> Table:
    case = rows[0].case
    measure = {"call": ", CPU time per call", "graph": ", replayed from a CUDA graph"}.get(case.measure, "")
    title = f"{case.title}{measure}" + (f", {TITLES[method]}" if method else "")
    table = Table(box=None, pad_edge=False, title=title, title_style="bold", title_justify="left")
    table.add_column(case.dtype, no_wrap=True, width=32)
    for heading in columns:
        name = ("mean" if rows[0].method == SUSTAINED else "median") if heading == "time" else heading
        table.add_column(name, justify="right", no_wrap=True, width=_WIDTHS[heading])
    for row in rows:
        assert row.timing is not None
        clock, energy = row.clock.sm_mhz if row.clock else None, row.energy
        joules = None if energy is None else energy.joules_per_tflop
        cells = {
            "time": units.milliseconds(row.timing.ms),
            "±": noise(row),
            "rate": units.rate(row.tflops) if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f} tok/s",
            "of matmul": share(row.of_matmul),
            "matrix units": share(row.matrix_unit),
            "SM clock": units.MISSING if clock is None else f"{clock:.0f} MHz",
            "power": units.MISSING if energy is None else f"{energy.watts:.0f} W",
            "energy": units.MISSING if joules is None else f"{joules:.2f} J/TF",
            "extra memory": units.size(row.peak_bytes if case.measure == "model" else row.extra_bytes),
            "error": units.MISSING if row.error is None else f"{row.error.relative:.1e}",
        }
        name = f"  {row.provider}" + (" (fell back)" if row.status == "fell back" else "")
        style = {"ours": "bold", "standard": "dim"}.get(row.kind)
        table.add_row(name, *(cells[heading] for heading in columns), style=style)
    return table


def _show_others(results: Results, console: Console) -> None:
    """Everything that was not timed, said once per reason."""
    reasons: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in results.rows:
        if not row.timed:
            reasons[row.status, row.reason or ""][row.provider] += 1
    for (status, reason), providers in sorted(reasons.items()):
        who = ", ".join(f"{name} ×{count}" if count > 1 else name for name, count in providers.items())
        style = "bold red" if status in ("wrong", "failed") else "dim"
        console.print(f"{status}: {who}: {reason}", style=style, markup=False)
    if any(status == "not installed" for status, _ in reasons):
        console.print("`strobe bench --list` says how to build what is not installed", style="dim", markup=False)


def show_changes(changes: list[Change], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("case", "provider", "method", "before", "now", "ratio", ""):
        table.add_column(heading, justify="right" if heading in ("before", "now", "ratio") else "left")
    style = {"regression": "red", "broken": "bold red", "improvement": "green", "repaired": "green"}
    for change in changes:
        if change.kind in ("noise", "new"):
            continue
        cells = [_cell(row) for row in (change.old, change.new)]
        ratio = units.MISSING if change.ratio is None else f"{change.ratio:.3f}"
        row = (change.key, change.provider, TITLES[change.method], *cells, ratio, change.kind)
        table.add_row(*row, style=style.get(change.kind))
    if table.row_count:
        console.print(table)
    counts: dict[str, int] = defaultdict(int)
    for change in changes:
        counts[change.kind] += 1
    console.print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "nothing in common")


def _cell(row: Row | None) -> str:
    if row is None:
        return units.MISSING
    return units.milliseconds(row.ms) if row.timed and row.ms else f"{row.status}"
