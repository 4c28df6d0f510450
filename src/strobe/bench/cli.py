"""`strobe bench` and `strobe report`. Only their arguments live here; what they need is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from strobe.bench.results import Results

_SUITES = "grid36, sweep, gqa, models, overhead, tiles, ladder, compile, cpu, quick"


def bench(
    suite: Annotated[list[str] | None, typer.Option(help=f"{_SUITES}; may be repeated; quick by default.")] = None,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the results here, after each case.")] = None,
    direction: Annotated[str, typer.Option("--pass", help="forward, backward or both.")] = "forward",
    provider: Annotated[
        list[str] | None,
        typer.Option(
            help="A name, a kind (ours, ladder, standard, peer) or a prefix (torch, ladder-05); may be repeated; "
            "all but the ladder by default."
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Cases whose label or key matches this pattern, such as 'd128-causal-*'.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; by default a GPU if there is one.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random inputs.")] = 0,
    budget_ms: Annotated[float, typer.Option(min=1.0, help="Of timed calls, per row.")] = 150.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each provider.")] = 25,
    warmup_ms: Annotated[float, typer.Option(min=0.0, help="Per provider and case.")] = 30.0,
    l2: Annotated[str, typer.Option(help="flushed: the cache is overwritten before each launch; warm.")] = "flushed",
    call_limit_s: Annotated[
        float, typer.Option(min=0.001, help="A provider that takes longer for one call is not timed.")
    ] = 3.0,
    compile_limit_s: Annotated[
        float, typer.Option(min=1.0, help="For each provider that compiles, all shapes together.")
    ] = 90.0,
    profile: Annotated[bool, typer.Option(help="Record which kernels ran.")] = True,
    compare: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Compare with these results; exit 1 on a regression outside noise."),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Differences up to this fraction are no regression.")
    ] = 0.03,
    result: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Compare these results instead of measuring.")
    ] = None,
    report_to: Annotated[
        Path | None, typer.Option("--report", file_okay=False, help="Also write the report into this directory.")
    ] = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="Print suites, cases and providers, and measure nothing.")
    ] = False,
) -> None:
    """Measure attention: every provider checked against float64, then timed in turns with the others."""
    from rich.console import Console

    from strobe.bench import compare as comparison, results as files, table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)  # a file or a pipe has room
    if list_only:
        _list(suite)
        return
    try:
        found = (
            files.load(result)
            if result is not None
            else _measure(
                suite,
                out,
                direction,
                provider,
                only,
                device,
                seed,
                (budget_ms, rounds, warmup_ms, l2),
                (call_limit_s, compile_limit_s),
                profile,
            )
        )
        old = None if compare is None else files.load(compare)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if result is None:
        table.show(found, console)
        if out is not None:
            console.print(f"{len(found.rows)} rows in {found.seconds:.0f} s, written to {out}", markup=False)
    if report_to is not None:
        _report([found], report_to)
    if old is not None:
        if (problem := comparison.comparable(old, found)) is not None:
            raise typer.BadParameter(f"--compare {compare}: {problem}")
        if (warning := comparison.other_company(old, found)) is not None:
            console.print(f"note: {warning}")
        changes = comparison.compare(old, found, tolerance)
        table.show_changes(changes, console)
        if any(change.bad for change in changes):
            raise typer.Exit(1)


def report(
    results: Annotated[
        list[Path], typer.Argument(help="Files written by `strobe bench`; a second run is compared with the first.")
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", file_okay=False, help="Directory for index.html and the figures.")
    ] = Path("report"),
    figures: Annotated[bool, typer.Option(help="Also PNG and SVG files (needs matplotlib).")] = True,
) -> None:
    """A self-contained HTML page from results, and its figures as PNG and SVG."""
    from strobe.bench import results as files

    try:
        loaded = [files.load(path) for path in results]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _report(loaded, out, figures)


def _report(loaded: list[Results], out: Path, figures: bool = True) -> None:
    from strobe.bench import plots
    from strobe.bench.report import page

    written = [page.write(loaded, out)]
    if figures:
        if (problem := plots.unavailable()) is not None:
            typer.echo(f"no PNG and SVG: {problem}", err=True)
        else:
            written += plots.write(loaded, out)
    typer.echo(f"{written[0]}" + (f" and {len(written) - 1} figures" if len(written) > 1 else ""))


def _list(suite: list[str] | None) -> None:
    from strobe.bench import providers, suites

    for name in suite or suites.SUITES:
        typer.echo(f"{name}:")
        for case in suites.cases(name):
            typer.echo(f"  {case.key}")
    typer.echo("providers:")
    for provider in providers.every():
        typer.echo(f"  {provider.name:27} {provider.kind:9} {provider.summary}")


def _measure(
    suite: list[str] | None,
    out: Path | None,
    direction: str,
    provider: list[str] | None,
    only: list[str] | None,
    device: str | None,
    seed: int,
    timing: tuple[float, int, float, str],
    limits: tuple[float, float],
    profile: bool,
) -> Results:
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from strobe.bench import runner
    from strobe.measure import stopwatch as measure

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device: {device} was asked for, torch finds no NVIDIA GPU")
        where = torch.device("cuda", where.index or 0)
        torch.cuda.set_device(where)
    budget_ms, rounds, warmup_ms, l2 = timing
    request = runner.Request(
        suites=tuple(suite or ("quick",)),
        device=where,
        direction=direction,
        providers=tuple(provider or ()),
        only=tuple(only or ()),
        seed=seed,
        settings=measure.Settings(budget_ms, rounds, warmup_ms, l2),
        out=out,
        profile=profile,
        call_limit_s=limits[0],
        compile_limit_s=limits[1],
    )
    work = runner.Runner(request)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=len(work.cases))
        return work.run(lambda what, done, total: bar.update(task, description=what, completed=done, total=total))
