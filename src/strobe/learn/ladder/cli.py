"""`strobe ladder` and `strobe ladder diff`. Only their arguments live here; what they need is imported when they
run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strobe.measure import command

if TYPE_CHECKING:
    from rich.console import Console

    from strobe.learn.ladder.rung import Rung, Shape

app = typer.Typer(
    help="FlashAttention as a ladder of kernels, one idea a rung, in two flights: the forward pass (01 to 13) and the "
    "gradient (b0 to b4). Each goes from standard attention to the library's own kernel.",
    invoke_without_command=True,
    no_args_is_help=False,
    cls=command.Group,
    rich_markup_mode="markdown",
)
_WHAT, _SIZES, _WHERE = "Which rungs", "The problem", "Where it runs, and what is kept"


@app.callback(
    epilog="Examples: `strobe ladder` runs all rungs; `strobe ladder --rung 06 --rung 07` shows what a swizzle does; "
    "`strobe ladder --rung b1 --rung b2` what atomic sums do; "
    "`strobe ladder diff 04 05` explains one step."
)
def ladder(
    context: typer.Context,
    rung: Annotated[
        list[str] | None,
        typer.Option(
            help="A rung: 01, 02, … 13, b0, … b4. May be given several times. Default: all.", rich_help_panel=_WHAT
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            parser=command.tokens,
            metavar=command.TOKENS,
            help="Tokens: 5000, 4K. Default: 4K on a GPU, 256 without one.",
            rich_help_panel=_SIZES,
        ),
    ] = None,
    head_dim: Annotated[
        int | None,
        typer.Option(
            help="Numbers per head, 64 or 128. Default: 128 on a GPU, 64 without one.", rich_help_panel=_SIZES
        ),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Heads. Default: 16 on a GPU, 1 without one.", rich_help_panel=_SIZES)
    ] = None,
    causal: Annotated[
        bool,
        typer.Option("--causal", help="A query sees no later keys. Default: it sees all.", rich_help_panel=_SIZES),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="cuda, cuda:1, or cpu (the emulator). Default: a GPU if there is one.", rich_help_panel=_WHERE
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--json", dir_okay=False, help="Write the results to this file as well.", rich_help_panel=_WHERE),
    ] = None,
) -> None:
    """Build each rung, check it against float64, and time it. Without a GPU the emulator counts what each rung does, and
    the times that were measured on an H200 stand beside the counts."""
    if context.invoked_subcommand is not None:
        return
    import torch

    from strobe.emulator import CompilerMissing
    from strobe.learn.ladder import measure, rungs, show

    try:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if where.type == "cuda":
            torch.ones(1, device=where)
        shape = _shape(
            measure.GPU_SHAPE if where.type == "cuda" else measure.CPU_SHAPE, seq_len, head_dim, heads, causal
        )
        wanted = [rungs.get(number) for number in rung] if rung else list(rungs.RUNGS)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise typer.BadParameter(str(error).splitlines()[0]) from None
    console = _console()
    try:
        rows = _run(shape, wanted, where)
    except CompilerMissing as error:
        raise typer.BadParameter(str(error)) from None
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "emulator"
    if rows:
        show.show(rows, shape, name, console)
    if len(rows) < len(wanted):
        missing = ", ".join(r.number for r in wanted[len(rows) :])
        console.print(f"interrupted: {len(rows)} of {len(wanted)} rungs are shown; not run: {missing}", style="yellow")
    if out is not None and rows:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(measure.as_json(shape, rows, where), indent=1) + "\n", encoding="utf-8")
    if len(rows) < len(wanted) or any(row.failed or not (row.passed or row.skipped) for row in rows):
        raise typer.Exit(1)


@app.command(cls=command.Command)
def diff(
    old: Annotated[str, typer.Argument(help="The rung to start from, such as 04.")],
    new: Annotated[str, typer.Argument(help="The rung to compare it with, such as 05.")],
) -> None:
    """Show what changes from one rung to another, and why."""
    from strobe.learn.ladder import rungs, show

    try:
        steps = rungs.get(old), rungs.get(new)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    show.show_diff(*steps, _console())


def _shape(default: Shape, seq_len: int | None, head_dim: int | None, heads: int | None, causal: bool) -> Shape:
    from strobe.learn.ladder.rung import Shape

    length = seq_len or default.len_q
    return Shape(heads or default.slices, length, length, head_dim or default.dim, causal)


def _run(shape: Shape, wanted: list[Rung], device: object) -> list:
    from strobe.learn.ladder import measure

    with command.progress() as bar:
        task = bar.add_task("steps, two for each rung", total=2 * len(wanted))
        return measure.run(shape, wanted, device, lambda what: bar.update(task, advance=1, description=what))  # type: ignore[arg-type]


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140)  # a file or a pipe has room
