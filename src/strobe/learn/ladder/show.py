"""How the ladder looks in a terminal: tables, a chart, a diff."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from strobe.learn.ladder.measure import Row
from strobe.learn.ladder.rung import LIBRARY_KERNEL, Rung, Shape
from strobe.measure.units import traffic

_BAR = 40  # characters
_TEXT = ("rung", "what", "numbers")


def show(rows: Sequence[Row], shape: Shape, machine: str, console: Console) -> None:
    timed = any(row.ms for row in rows)
    mask = ", causal" if shape.causal else ""
    heads = f"{shape.slices} head{'s' if shape.slices > 1 else ''}"
    console.print(f"{machine}: {heads}, {shape.len_q} queries, {shape.len_k} keys, head dim {shape.dim}{mask}")
    console.print(_timings(rows) if timed else _counts(rows))
    _chart(rows, timed, console)
    for row in rows:
        if row.skipped:
            style = "bold red" if row.failed else "yellow"
            console.print(f"{row.number} not run: {row.skipped}", style=style, markup=False)
        elif not row.passed:
            assert row.error is not None
            console.print(f"{row.number} is wrong: {row.error}", style="bold red", markup=False)
    console.print(_TIMED_NOTE if timed else _COUNTED_NOTE, style="dim")


_TIMED_NOTE = (
    "time: median of launches, by device events; TFLOP/s: of the products in the formulas; faster, predicted: against the rung "
    "before (b1: against 05, for equal work)"
)
_COUNTED_NOTE = (
    "No GPU: counted by the emulator, which cannot tell time. global: bytes asked of global memory, before any cache, and what "
    "the tile sizes predict; conflicts: extra passes because lanes met in a bank; barriers: of whole blocks; matrix: warp or "
    "warpgroup products; faster: the speed-up predicted on a GPU, against the rung before (b1: against 05)"
)


def _timings(rows: Sequence[Row]) -> Table:
    table = Table()
    _add_columns(table, ("rung", "what", "numbers", "time", "TFLOP/s", "faster", "predicted", "error"))
    for row in rows:
        if row.skipped:
            table.add_row(row.number, row.title, row.dtype, "not run", "", "", f"x {row.predicted:g}", "")
            continue
        assert row.ms is not None and row.tflops is not None
        faster = "" if row.speed_up is None else f"x {row.speed_up:.2f}"
        time, rate, predicted = f"{row.ms:.3f} ms", f"{row.tflops:.3g}", f"x {row.predicted:g}"
        table.add_row(row.number, row.title, row.dtype, time, rate, faster, predicted, _error(row))
    return table


def _add_columns(table: Table, headings: Sequence[str]) -> None:
    for heading in headings:
        table.add_column(heading, justify="left" if heading in _TEXT else "right", no_wrap=heading != "what")


def _counts(rows: Sequence[Row]) -> Table:
    table = Table()
    _add_columns(
        table,
        ("rung", "what", "global", "predicted", "shared", "conflicts", "barriers", "matrix", "exp2", "error", "faster"),
    )
    for row in rows:
        assert row.counters is not None
        c = row.counters
        table.add_row(
            row.number,
            row.title,
            traffic(row.global_bytes),
            traffic(row.predicted_bytes),
            traffic(c["shared_bytes_read"] + c["shared_bytes_written"]),
            f"{c['bank_conflicts']:,}",
            f"{c['block_barriers']:,}",
            f"{c['mma'] + c['wgmma']:,}",
            f"{c['exp2']:,}",
            _error(row),
            f"x {row.predicted:g}",
        )
    return table


def _error(row: Row) -> str:
    assert row.error is not None
    return f"{row.error.largest:.0e}" if row.passed else f"[bold red]{row.error.largest:.0e}[/]"


def _chart(rows: Sequence[Row], timed: bool, console: Console) -> None:
    """Bars on a logarithmic scale: between the first rung and the last lie three orders of magnitude."""
    value: Callable[[Row], float | None] = (lambda row: row.tflops) if timed else (lambda row: row.global_bytes)
    drawn = [(row, x) for row in rows if (x := value(row))]
    if not drawn:
        return
    least, most = min(x for _, x in drawn), max(x for _, x in drawn)
    console.print("\nTFLOP/s, logarithmic" if timed else "\nbytes asked of global memory, logarithmic")
    for row, x in drawn:
        length = 1 + round((_BAR - 1) * (math.log(x / least) / math.log(most / least) if most > least else 1))
        text = f"{x:.3g}" if timed else traffic(x)
        colour = "green" if row.passed else "red"
        console.print(
            f"{row.number} [{colour}]{'█' * length}[/]{' ' * (_BAR - length)} {text}  [dim]{escape(row.title)}[/]"
        )
    console.print()


# ---- the step from one rung to another
# ---------------------------------------------------------------------------------


def text_of(rung: Rung) -> str:
    """What a reader should compare: the library's rung is its kernel's file."""
    return rung.text if not rung.library else rung.text + LIBRARY_KERNEL.read_text(encoding="utf-8")


def unified(old: Rung, new: Rung) -> str:
    lines = difflib.unified_diff(
        text_of(old).splitlines(keepends=True), text_of(new).splitlines(keepends=True), old.file, new.file, n=3
    )
    return "".join(lines)


def show_diff(old: Rung, new: Rung, console: Console) -> None:
    console.print(f"[bold]{old.number}[/] {escape(old.title)}  →  [bold]{new.number}[/] {escape(new.title)}")
    for name, text in new.header.items():
        console.print(f"[bold]{name}:[/] {escape(text)}")
    console.print()
    diff = unified(old, new)
    if console.is_terminal:
        console.print(Syntax(diff, "diff", theme="ansi_dark", word_wrap=True))
    else:
        print(diff, end="")
