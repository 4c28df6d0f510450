"""Results on the terminal."""

from __future__ import annotations

from collections import defaultdict

from rich.console import Console
from rich.table import Table

from strobe.bench.compare import Change
from strobe.bench.results import Results, Row


def milliseconds(ms: float) -> str:
    if ms < 0.1:
        return f"{ms * 1e3:.1f} µs"
    return f"{ms:.3g} ms" if ms < 1000 else f"{ms / 1e3:.3g} s"


def size(value: int | None) -> str:
    if value is None:
        return "–"
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value} B"


def rate(row: Row) -> str:
    if row.tflops is None:
        return "–"
    return f"{row.tflops:.0f} TFLOP/s" if row.tflops >= 10 else f"{row.tflops * 1e3:.0f} GFLOP/s"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def show(results: Results, console: Console) -> None:
    device = results.provenance["device"]
    ceilings = results.ceilings
    matmul = ", ".join(f"{dtype} {value:.3g} TFLOP/s" for dtype, value in ceilings.matmul_tflops.items())
    console.print(f"{device['name']}; matrix product {matmul}; copy {ceilings.copy_gbytes_per_s or 0:.0f} GB/s")
    by_case: dict[str, list[Row]] = defaultdict(list)
    for row in results.rows:
        by_case[row.case.key].append(row)
    clocked = any(row.clock is not None and row.clock.sm_mhz for row in results.rows)
    for key, rows in by_case.items():
        timed = sorted((r for r in rows if r.timed), key=lambda r: r.median_ms or 0)
        if timed:
            console.print(_table(key, timed, clocked))
    _show_others(results, console)


_WIDTHS = {
    "median": 8,
    "±": 5,
    "rate": 12,
    "of matmul": 9,
    "matrix units": 12,
    "SM clock": 8,
    "extra memory": 12,
    "error": 7,
}


def _table(key: str, rows: list[Row], clocked: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(f"[bold]{key}[/]", no_wrap=True, width=38)
    for heading, width in _WIDTHS.items():
        if clocked or heading not in ("matrix units", "SM clock"):
            table.add_column(heading, justify="right", no_wrap=True, width=width, style=None)
    for row in rows:
        assert row.timing is not None
        summary = row.timing.summary
        clock = row.clock.sm_mhz if row.clock else None
        name = f"  {row.provider}" + (" (fell back)" if row.status == "fell back" else "")
        table.add_row(
            name,
            milliseconds(summary.median),
            f"{summary.noise:.1%}",
            rate(row),
            percent(row.of_matmul),
            *([percent(row.matrix_unit), "–" if clock is None else f"{clock:.0f} MHz"] if clocked else []),
            size(row.extra_bytes),
            "–" if row.error is None else f"{row.error.relative:.1e}",
            style={"ours": "bold", "standard": "dim"}.get(row.kind),
        )
    return table


def _show_others(results: Results, console: Console) -> None:
    """Everything that was not timed, said once per reason."""
    reasons: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in results.rows:
        if not row.timed:
            reasons[row.status, row.reason or ""][row.provider] += 1
    for (status, reason), providers in sorted(reasons.items()):
        who = ", ".join(f"{name} ×{count}" if count > 1 else name for name, count in providers.items())
        console.print(
            f"{status}: {who}: {reason}", style="bold red" if status in ("wrong", "failed") else "dim", markup=False
        )


def show_changes(changes: list[Change], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("case", "provider", "before", "now", "ratio", ""):
        table.add_column(heading, justify="left" if heading in ("case", "provider", "") else "right")
    style = {"regression": "red", "broken": "bold red", "improvement": "green", "repaired": "green"}
    for change in changes:
        if change.kind in ("noise", "new"):
            continue
        cells = [_cell(row) for row in (change.old, change.new)]
        ratio = "–" if change.ratio is None else f"{change.ratio:.3f}"
        table.add_row(change.key, change.provider, *cells, ratio, change.kind, style=style.get(change.kind))
    if table.row_count:
        console.print(table)
    counts: dict[str, int] = defaultdict(int)
    for change in changes:
        counts[change.kind] += 1
    console.print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "nothing in common")


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    return milliseconds(row.median_ms) if row.timed and row.median_ms else f"{row.status}"
