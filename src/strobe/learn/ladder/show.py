"""Show the ladder in a terminal: tables, a chart, a diff."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from strobe.learn import measured
from strobe.learn.ladder import rungs
from strobe.learn.ladder.measure import Row
from strobe.learn.ladder.rung import Rung, Shape
from strobe.measure.units import traffic

_BAR = 40  # characters
_TEXT = ("rung", "what", "numbers")


def show(rows: Sequence[Row], shape: Shape, machine: str, console: Console) -> None:
    timed = any(row.ms for row in rows)
    mask = ", causal" if shape.causal else ""
    heads = f"{shape.slices} head{'s' if shape.slices > 1 else ''}"
    console.print(f"{machine}: {heads}, {shape.len_q} queries, {shape.len_k} keys, head dim {shape.dim}{mask}")
    for heading, backward in ((_FORWARD, False), (_BACKWARD, True)):
        flight = [row for row in rows if rungs.get(row.number).backward == backward]
        if flight:
            console.print(f"\n[bold]{heading}[/]")
            console.print(_timings(flight) if timed else _counts(flight))
            _chart(flight, timed, console)
    for row in rows:
        if row.skipped:
            style = "bold red" if row.failed else "yellow"
            console.print(f"{row.number} not run: {row.skipped}", style=style, markup=False)
        elif not row.passed:
            assert row.error is not None
            console.print(f"{row.number} is wrong: {row.error}", style="bold red", markup=False)
    console.print(_TIMED_NOTE if timed else f"{_COUNTED_NOTE} {_measured_note()}", style="dim")


_FORWARD = "The forward pass: O and the LSE from Q, K and V"
_BACKWARD = "The gradient: dQ, dK and dV from dO, the inputs, O and the LSE"
_TIMED_NOTE = (
    "time: median of launches, by device events; TFLOP/s: of the products in the formulas; faster, predicted: over the rung "
    f"before ({rungs.comparisons()})"
)
_COUNTED_NOTE = (
    "No GPU: counted by the emulator, which cannot tell time. global: bytes asked of global memory, before any cache, and "
    "in brackets what the tile sizes predict. conflicts: extra passes because lanes met in a bank. barriers: of whole "
    "blocks. matrix: products of a warp or warpgroup. predicted: the speed-up on a GPU over the rung before "
    f"({rungs.comparisons()})."
)


def _measured_note() -> str:
    """Return where the last two columns come from."""
    results = measured.load()
    shape, ladder = results["ladder"]["shape"], results["ladder"]
    case = f"{shape['slices']} heads, {shape['len_q']} tokens, head dim {shape['dim']}"
    return (
        f"measured, TFLOP/s: not here, but on an {results['device']} ({case}; {ladder['date']}, {ladder['file']}): the "
        "speed-up over the rung before, and the speed."
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
        (
            *("rung", "what", "global", "shared", "conflicts", "barriers", "matrix", "error"),
            *("predicted", "measured", "TFLOP/s"),
        ),
    )
    by_number = {row["number"]: row for row in measured.load()["ladder"]["rungs"]}
    for row in rows:
        assert row.counters is not None
        c = row.counters
        table.add_row(
            row.number,
            row.title,
            traffic(row.global_bytes) + (f" ({traffic(row.predicted_bytes)})" if row.predicted_bytes else ""),
            traffic(c["shared_bytes_read"] + c["shared_bytes_written"]),
            f"{c['bank_conflicts']:,}",
            f"{c['block_barriers']:,}",
            f"{c['mma'] + c['wgmma']:,}",
            _error(row),
            f"x {row.predicted:g}",
            *_on_the_gpu(by_number.get(row.number)),
        )
    return table


def _on_the_gpu(row: dict[str, Any] | None) -> tuple[str, str]:
    """(speed-up, TFLOP/s) as they were measured."""
    if row is None or row["tflops"] is None:
        return "not yet", "–"
    return "" if row["speed_up"] is None else f"x {row['speed_up']:.2f}", f"{row['tflops']:.3g}"


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


# ---- the step from one rung to another -------------------------------------------------------------------------------


def text_of(rung: Rung) -> str:
    """Return the text that a reader should compare: the library's rung is its kernel's file."""
    return rung.text if not rung.library else rung.text + rung.library_kernel.read_text(encoding="utf-8")


def unified(old: Rung, new: Rung, *, headers: bool = True) -> str:
    """The diff of two files; without `headers`, the comments with which both begin are left out."""
    old_lines, new_lines = ([*text_of(rung).splitlines(keepends=True)] for rung in (old, new))
    if not headers:
        old_lines, new_lines = (list(itertools.dropwhile(_is_comment, lines)) for lines in (old_lines, new_lines))
    return "".join(difflib.unified_diff(old_lines, new_lines, old.file, new.file, n=3))


def _is_comment(line: str) -> bool:
    return line.startswith("//")


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
