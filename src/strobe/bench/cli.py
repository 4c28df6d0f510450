"""`strobe bench` and `strobe report`. Only their arguments live here; what they need is imported when they run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strobe.bench.names import BY_THEMSELVES, CONTEXT_PARALLEL, DECODE, L2, PASSES, SUITES
from strobe.measure import command
from strobe.measure.method import METHODS, SUMMARIES, TURNS

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from strobe.bench.request import Request
    from strobe.bench.results import Results


def one_of(allowed: Sequence[str]) -> Callable[[Any], Any]:
    """A check of an option's value, or of each of its values, before anything is imported."""

    def check(value: Any) -> Any:
        for word in value if isinstance(value, list) else [value]:
            if word is not None and word not in allowed:
                raise typer.BadParameter(f"must be one of {', '.join(allowed)}, got {word!r}")
        return value

    return check


_METHODS = "; ".join(f"{name}: {what}" for name, what in SUMMARIES.items())
_SUITE = typer.Option(
    callback=one_of((*SUITES, *BY_THEMSELVES)),
    help=f"One of {', '.join(SUITES)}. May be repeated. Default: quick. models: attention of known models and the suite "
    f"llama, a whole model in tokens/s. Or one by itself: {DECODE}, caches in pages and in one piece; {CONTEXT_PARALLEL}, on "
    "the ranks of torchrun.",
)


def bench(
    suite: Annotated[list[str] | None, _SUITE] = None,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the results here, after each case.")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(callback=one_of(METHODS), help=f"How to time. {_METHODS}. May be repeated. Default: {TURNS}."),
    ] = None,
    direction: Annotated[
        str, typer.Option("--pass", callback=one_of(PASSES), help="What to time: forward, backward or both.")
    ] = "forward",
    provider: Annotated[
        list[str] | None,
        typer.Option(
            help="A name, a kind (ours, standard, peer) or a prefix (torch, strobe). May be repeated. Default: all."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Cases whose label or key matches this pattern, such as 'd128-causal-*'. May be repeated."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: a GPU if there is one.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")] = 0,
    budget_ms: Annotated[float, typer.Option(min=1.0, help="Milliseconds of timed calls per row, in turns.")] = 150.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each provider.")] = 25,
    warmup_ms: Annotated[float, typer.Option(min=0.0, help="Milliseconds of warm-up per provider and case.")] = 30.0,
    l2: Annotated[
        str,
        typer.Option(callback=one_of(L2), help="flushed: overwrite the L2 cache before each launch; warm: leave it."),
    ] = "flushed",
    settle_s: Annotated[float, typer.Option(min=0.0, help="Least seconds to settle, sustained.")] = 0.3,
    settle_most_s: Annotated[float, typer.Option(min=0.0, help="Most seconds to settle, sustained.")] = 2.0,
    measure_s: Annotated[float, typer.Option(min=0.01, help="Seconds to measure once settled, sustained.")] = 1.0,
    repeats: Annotated[
        int, typer.Option(min=1, help="Times that each provider runs alone, sustained; the order alternates.")
    ] = 2,
    call_limit_s: Annotated[
        float, typer.Option(min=0.001, help="A provider that takes more seconds for one call is not timed.")
    ] = 3.0,
    compile_limit_s: Annotated[
        float, typer.Option(min=1.0, help="Seconds for each provider that compiles, all shapes together.")
    ] = 90.0,
    profile: Annotated[bool, typer.Option(help="Record which kernels ran.")] = True,
    compare: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Compare with these results; exit status 1 on a regression outside noise."),
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
    yes: Annotated[bool, typer.Option("--yes", help="Run a suite that is sized for a GPU on a CPU, too.")] = False,
    list_only: Annotated[
        bool, typer.Option("--list", help="Print suites, cases and providers, and measure nothing.")
    ] = False,
) -> None:
    """Measure attention: every provider is checked against float64, then timed."""
    if set(BY_THEMSELVES) & set(suite or ()):
        _by_itself(suite or [], device, out, seed)
        return
    if list_only:
        _list(suite, direction)
        return
    from rich.console import Console

    from strobe.bench import read_results
    from strobe.bench.request import Request
    from strobe.measure import stopwatch, sustained

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=150)  # a file or a pipe has room
    try:
        if result is not None:
            results = read_results.load(result)
        else:
            where = _device(device)
            _ask_before_hours(suite or [], where, yes, bool(only))
            request = Request(
                suites=tuple(dict.fromkeys(suite or ("quick",))),
                device=where,
                methods=tuple(dict.fromkeys(method or (TURNS,))),
                direction=direction,
                providers=tuple(provider or ()),
                only=tuple(only or ()),
                seed=seed,
                settings=stopwatch.Settings(budget_ms, rounds, warmup_ms, l2),
                sustained=sustained.Settings(settle_s, max(settle_s, settle_most_s), measure_s, repeats),
                out=out,
                profile=profile,
                call_limit_s=call_limit_s,
                compile_limit_s=compile_limit_s,
            )
            results = _measure(request)
        old = None if compare is None else read_results.load(compare)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    if result is None:
        from strobe.bench import table

        table.show(results, console)
        if out is not None:
            console.print(f"{len(results.rows)} rows in {results.seconds:.0f} s, written to {out}", markup=False)
    if report_to is not None:
        _report([results], report_to)
    if old is not None:
        _compare(old, results, tolerance, console, str(compare))


def _by_itself(suite: list[str], device: str | None, out: Path | None, seed: int) -> None:
    if len(suite) != 1:
        alone = next(name for name in suite if name in BY_THEMSELVES)
        raise typer.BadParameter(f"--suite {alone} runs by itself, got {', '.join(suite)}")
    from strobe.bench import context_parallel, decode

    run = {CONTEXT_PARALLEL: context_parallel.run, DECODE: decode.run}[suite[0]]
    try:
        for line in run(_device(device), out, seed):
            typer.echo(line, nl=False)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None


def report(
    results: Annotated[
        list[Path],
        typer.Argument(help="Files written by `strobe bench`; a second run of the same is compared with the first."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", file_okay=False, help="Directory for index.html.")] = Path(
        "report"
    ),
) -> None:
    """Write results as one self-contained HTML page."""
    from strobe.bench import read_results

    try:
        loaded = [read_results.load(path) for path in results]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _report(loaded, out)


def _report(loaded: list[Results], out: Path) -> None:
    from strobe.bench.report import page

    try:
        typer.echo(page.write(loaded, out))
    except OSError as error:
        raise typer.BadParameter(f"{out}: {error.strerror or error}") from None


def _compare(old: Results, new: Results, tolerance: float, console: Console, name: str) -> None:
    from strobe.bench import compare as comparison, table

    if (problem := comparison.comparable(old, new)) is not None:
        raise typer.BadParameter(f"--compare {name}: {problem}")
    if (warning := comparison.other_neighbours(old, new)) is not None:
        console.print(f"note: {warning}")
    changes = comparison.compare(old, new, tolerance)
    table.show_changes(changes, console)
    if any(change.bad for change in changes):
        raise typer.Exit(1)


def _list(suite: list[str] | None, direction: str) -> None:
    from strobe.bench import registry, suites

    for name in suite or SUITES:
        typer.echo(f"{name}: {SUITES[name][0]}")
        for case in suites.cases(name, direction):
            typer.echo(f"  {case.key}")
    typer.echo("providers:")
    for provider in registry.every():
        typer.echo(f"  {provider.name:27} {provider.kind:9} {provider.summary}")
    typer.echo("how to build those that do not come with PyTorch, each beside the torch at hand:")
    for provider in registry.every():
        if provider.install is not None:
            typer.echo(f"  {provider.name:27} {provider.install}")


def _device(wanted: str | None) -> torch.device:
    """Raises ValueError for a device that cannot be used here."""
    import torch

    if wanted is None:
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
        if device.type == "cuda":
            device = torch.device("cuda", device.index or 0)
            torch.cuda.set_device(device)
        torch.ones(1, device=device).item()
    except Exception as error:  # each kind of device fails in its own way
        raise ValueError(f"device: {wanted} cannot be used here: {str(error).splitlines()[0]}") from None
    return device


def _ask_before_hours(suites: list[str], device: torch.device, yes: bool, chosen: bool) -> None:
    """A suite that is sized for a GPU runs on a CPU only if it is wanted all the same."""
    large = [name for name in suites if SUITES[name][1]]
    if not large or device.type != "cpu" or yes or chosen:
        return
    what = f"{', '.join(large)} is sized for a GPU and would run for a long time on this CPU"
    if not sys.stdin.isatty():
        raise ValueError(f"suite: {what}; --suite quick is not, --yes runs it all the same")
    if not typer.confirm(f"{what}. Go on?"):
        raise typer.Exit(2)


def _measure(request: Request) -> Results:
    from strobe.bench import runner

    work = runner.Runner(request)
    with command.progress() as bar:
        task = bar.add_task("cases to time", total=len(work.cases))
        return work.run(lambda what, done, total: bar.update(task, description=what, completed=done, total=total))
