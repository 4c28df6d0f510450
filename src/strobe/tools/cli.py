"""The command line: `strobe demo`, `doctor`, `compile`, `tune`, `bench`, `report`, `ladder`, `plan`,
`explain-page`.

What the commands show is computed elsewhere, and imported when they run: help and usage errors do not wait for torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import strobe
from strobe.bench import cli as benchmark
from strobe.bench.names import PASSES
from strobe.learn import cli as learning
from strobe.learn.ladder import cli as ladder
from strobe.measure import command
from strobe.measure.command import UserError
from strobe.measure.method import SUSTAINED, TURNS
from strobe.tools import compile_command as ahead_of_time, plan_command as planning

if TYPE_CHECKING:
    import torch

    from strobe.cuda.parts.architecture import Architecture
    from strobe.tools import demo as demonstration
    from strobe.tools.tune import Subject

app = typer.Typer(
    help="Exact attention in tiles that fit on-chip: see it run, see what this machine offers, compile its kernels.",
    no_args_is_help=True,
    add_completion=False,
    cls=command.Group,
    pretty_exceptions_enable=False,
)


def main() -> None:
    try:
        app()
    except Exception as error:
        if not isinstance(error, UserError) and not _is_unsupported(error):
            raise
        from rich.console import Console

        stderr = Console(stderr=True, highlight=False)
        stderr.print(f"strobe: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(2)


def _is_unsupported(error: Exception) -> bool:
    return isinstance(error, strobe.Unsupported)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"strobe {strobe.__version__}")
        raise typer.Exit


_VERSION = typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")


@app.callback()
def _options(version: Annotated[bool, _VERSION] = False) -> None:
    pass


# ---- demo ------------------------------------------------------------------------------------------------------------

_INIT = (
    "How q, k and v are made. A FILE (.pt .npy .npz .txt .csv) holds one matrix (length, dim) or (length, heads, dim) that "
    "serves as all three, or (.pt, .npz) three of them named q, k and v."
)
_DTYPES = ("float16", "bfloat16", "float32", "float64")


@app.command(cls=command.Command)
def demo(
    seq_len: Annotated[
        list[int] | None,
        typer.Option(
            parser=command.tokens,
            metavar=command.TOKENS,
            help="Tokens: 5000, 4K. May be repeated. Default: 1K to 8K, on a GPU 1K to 16K.",
        ),
    ] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Numbers per head. Default: 64, on a GPU 128.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Heads. Default: 1, on a GPU 16.")] = None,
    block_q: Annotated[int | None, typer.Option(min=1, help="Queries per tile, for the backend `tiled`.")] = None,
    block_k: Annotated[int | None, typer.Option(min=1, help="Keys per tile, for the backend `tiled`.")] = None,
    init: Annotated[str, typer.Option(metavar="uniform|normal|ones|ramp|FILE", help=_INIT)] = "normal",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(
            callback=benchmark.one_of(_DTYPES),
            help=f"One of {', '.join(_DTYPES)}. Default: float32, on a GPU bfloat16.",
        ),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Queries do not see later keys.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: a GPU if there is one.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="A backend that `strobe doctor` lists. Default: the fastest that can.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--print", help="Print Query, Key, Value and Output of the first head.")
    ] = False,
    example: Annotated[
        bool,
        typer.Option("--example", help="Instead: a small example step by step, with every number explained."),
    ] = False,
) -> None:
    """Run strobe against standard attention: error, time and peak memory."""
    if (block_q or block_k) and backend not in (None, "tiled"):
        raise UserError(f"--block-q and --block-k belong to the backend tiled, got --backend {backend}")
    from strobe.backends import dispatch
    from strobe.tools import demo as demonstration, demo_inputs

    if backend is not None and backend not in dispatch.NAMES:
        raise UserError(f"--backend must be one of {', '.join(dispatch.NAMES)}, got {backend!r}")
    if example:
        others: dict[str, object] = {
            **{"--seq-len": seq_len, "--head-dim": head_dim, "--heads": heads},
            **{"--block-q": block_q, "--block-k": block_k, "--init": init != "normal", "--seed": seed},
            **{"--dtype": dtype, "--causal": causal, "--device": device, "--print": show},
        }
        if ignored := [flag for flag, value in others.items() if value]:
            raise UserError(f"--example has numbers of its own: leave out {', '.join(ignored)}")
        _show_example(backend)
    sizes = {"--seq-len": seq_len, "--head-dim": head_dim, "--heads": heads}
    if init not in demo_inputs.RULES and any(sizes.values()):
        flags = ", ".join(flag for flag, value in sizes.items() if value)
        raise UserError(f"--init {init} is a file, which has sizes of its own: leave out {flags}")
    where = _device(device)
    on_gpu = where.type == "cuda"
    if backend is not None and not on_gpu:
        _refuse_without_gpu(backend, where)
    settings = demonstration.Settings(
        lengths=tuple(sorted(set(seq_len or demonstration.LENGTHS["cuda" if on_gpu else "cpu"]))),
        head_dim=head_dim or (128 if on_gpu else 64),
        heads=heads or (16 if on_gpu else 1),
        block_q=block_q,
        block_k=block_k,
        init=init,
        seed=seed,
        dtype=demonstration.DTYPES[dtype or ("bfloat16" if on_gpu else "float32")],
        causal=causal,
        device=where,
        backend=backend,
    )
    _run_demo(settings, show)


def _refuse_without_gpu(backend: str, where: torch.device) -> None:
    import torch

    from strobe.cuda.backend import missing
    from strobe.cuda.plans.families import FAMILIES

    if backend not in FAMILIES:
        return
    architectures = FAMILIES[backend].architectures
    why = missing(torch.device("cuda", 0), *architectures) or f"--device is {where}"
    gpus = " or ".join(architecture.gpus for architecture in architectures)
    raise UserError(f"--backend {backend} needs {gpus}: {why}; `strobe doctor` says what is ready here")


def _show_example(backend: str | None) -> None:
    from strobe.learn import worked_example
    from strobe.tools import terminal

    checks = worked_example.checks(backend)
    terminal.show_worked_example(checks)
    raise typer.Exit(0 if all(check.passed for check in checks) else 1)


def _run_demo(settings: demonstration.Settings, show: bool) -> None:
    from strobe.tools import demo as demonstration, terminal

    try:
        demonstration.check_room(settings)
        shortest = demonstration.first_inputs(settings)
        calls = demonstration.methods(settings, shortest)
    except (ValueError, TypeError) as error:  # from the checks of the options and of `strobe.attention`
        raise UserError(str(error)) from error
    if show:
        ours = next(name for name in calls if name != demonstration.STANDARD)
        terminal.print_tensors(Query=shortest.q, Key=shortest.k, Value=shortest.v, Output=calls[ours]())
    _, _, heads, dim = shortest.q.shape
    kind = f"{str(settings.dtype).removeprefix('torch.')}, {heads} x {dim} (heads x dim), {settings.init}"
    terminal.stdout.print(f"{_device_name(settings.device)}, {kind}{', causal' if settings.causal else ''}")
    table, exact, tiles = terminal.DemoTable(), True, False
    for row in demonstration.run(settings):
        table.show(row)
        exact, tiles = exact and row.exact, tiles or row.method == "tiled"
    terminal.show_demo_notes(settings.device, tiles)
    if not exact:
        terminal.stderr.print("strobe: an error is larger than rounding explains", style="bold red")
        raise typer.Exit(1)


def _device(wanted: str | None) -> torch.device:
    import torch

    if wanted is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.ones(1, device=device).item()
    except Exception as error:  # each kind of device fails in its own way
        raise UserError(f"--device {wanted} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def _device_name(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.get_num_threads()} threads" if device.type == "cpu" else str(device)


# ---- doctor ----------------------------------------------------------------------------------------------------------


@app.command(cls=command.Command)
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say what this machine offers: torch, GPU, driver, NVRTC, cache, compiler, and each backend: ready or why not."""
    from strobe.tools import doctor as examination, terminal

    report = examination.report()
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        terminal.show_doctor(report)


# ---- tune ------------------------------------------------------------------------------------------------------------


@app.command(cls=command.Command)
def tune(
    direction: Annotated[
        str,
        typer.Option(
            "--pass",
            callback=benchmark.one_of(PASSES[:2]),
            help="forward: tiles of Hopper's forward kernel. backward: tiles of the backward kernels.",
        ),
    ] = PASSES[0],
    family: Annotated[
        str | None,
        typer.Option(
            "--backend",
            callback=benchmark.one_of(("sm90", "sm80")),
            help="Whose tiles. Default: sm90 on Hopper, else sm80. The forward of sm80 has nothing to tune.",
        ),
    ] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="Only this head dim. May be repeated.")] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="Forward: full or bounded (masks), softcap, split (KV) or softcap-split. Backward: backward or "
            "backward-softcap. May be repeated. Default: all of the pass."
        ),
    ] = None,
    seq_len: Annotated[
        list[int] | None,
        typer.Option(
            parser=command.tokens,
            metavar=command.TOKENS,
            help="Lengths to time: 5000, 4K. May be repeated. Default: 1K, 4K and 16K.",
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            callback=benchmark.one_of((TURNS, SUSTAINED)),
            help=f"{TURNS}: all tiles and cuDNN interleaved, half a minute a head dim. {SUSTAINED}: each alone at the "
            "power limit, with its energy per FLOP, about 1.5 s a tile and case.",
        ),
    ] = TURNS,
    out: Annotated[
        Path, typer.Option(dir_okay=False, help="Where to write what was found; other kinds in the file stay.")
    ] = Path("tiles.json"),
) -> None:
    """Time the tiles of our kernels on this GPU, beside cuDNN, and write down the best."""
    import torch

    from strobe.bench import results
    from strobe.cuda import backend
    from strobe.tools import terminal, tune as tuning, tune_table

    device = torch.device("cuda", 0)
    subject, architectures = _tuned(direction, family, device)
    kinds = {name.split()[0]: name for name in subject.kinds}
    if unknown := set(kind or ()) - set(kinds):
        raise UserError(f"--kind {', '.join(sorted(unknown))}: not one of {', '.join(kinds)}")
    dims = subject.dims_of(head_dim)
    if not dims:
        raise UserError(f"no such kernel has --head-dim {', '.join(map(str, head_dim or ()))}")
    if (reason := backend.missing(device, *architectures)) is not None:
        raise UserError(f"there is nothing to tune here: {reason}")
    with command.progress() as bar:
        task = bar.add_task("tuning", total=None)
        result = tuning.sweep(
            subject,
            dims,
            [name for word, name in kinds.items() if not kind or word in kind],
            seq_len or tuning.LENGTHS,
            device,
            lambda what, step, of: bar.update(task, description=what, completed=step, total=of),
            method,
        )
    tune_table.show(result, terminal.stdout)
    try:
        results.write(tuning.merged(result, out), out)
    except ValueError as error:
        spare = out.with_name(f"{out.stem}-new{out.suffix}")
        results.write(result, spare)
        raise UserError(f"--out {error}; what was found is in {spare}") from error
    print(f"use them: export STROBE_TILES={out.resolve()}")


def _tuned(direction: str, family: str | None, device: torch.device) -> tuple[Subject, tuple[Architecture, ...]]:
    """Return the subject of the tuning, and the GPUs that it runs on."""
    import torch

    from strobe.cuda import backend
    from strobe.cuda.plans.families import FAMILIES
    from strobe.tools import tune_backward, tune_forward

    def runs(name: str) -> bool:
        return backend.missing(device, *FAMILIES[name].architectures) is None

    names = [name for name in FAMILIES if FAMILIES[name].tuned(direction == "backward")]
    if family is not None and family not in names:
        raise UserError(f"--backend {family} has no {direction} tiles to tune")
    chosen = family or next(filter(runs, names), names[-1])
    architectures = FAMILIES[chosen].architectures
    if direction == "forward":
        return tune_forward.FORWARD, architectures
    capability = torch.cuda.get_device_capability(device) if runs(chosen) else architectures[0].first
    return tune_backward.subject(chosen, architectures[0].target(capability)), architectures


# ---- compile, plan: strobe.tools; bench, report: strobe.bench.cli; ladder, explain-page: strobe.learn

app.command(cls=command.Command)(ahead_of_time.compile)
app.command(cls=command.Command)(benchmark.bench)
app.command(cls=command.Command)(benchmark.report)
app.add_typer(ladder.app, name="ladder")
app.command(cls=command.Command)(planning.plan)
app.command(cls=command.Command)(learning.explain_page)


if __name__ == "__main__":
    main()
