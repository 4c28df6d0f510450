"""`strobe plan`: how a sequence is cut among ranks, and what each method of context parallel attention costs on paper."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from strobe.bench.cli import one_of
from strobe.measure import command

if TYPE_CHECKING:
    from strobe.variants.mask import Mask

_STRATEGIES = ("contiguous", "zigzag", "documents", "striped")  # those of `ShardPlan`, which would load torch
MOST_RANKS = 1024
_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_RATE_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def _link(text: str) -> float:
    """Bytes a second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)([bB])(?:/s)?", text)
    if match is None or not float(match[1]):
        raise typer.BadParameter(f"--link must look like 400Gb (bits a second) or 50GB (bytes), got {text!r}")
    return float(match[1]) * _RATE_UNITS[match[2]] / (8 if match[3] == "b" else 1)


def _mask(name: str, window: int | None) -> Mask:
    import strobe

    mask = strobe.causal if name == "causal" else strobe.full
    return mask if window is None else mask & strobe.window(window - 1, 0 if name == "causal" else window - 1)


def plan(
    ranks: Annotated[int, typer.Option(min=1, help=f"Among how many ranks, at most {MOST_RANKS}.")],
    length: Annotated[
        list[int],
        typer.Option(
            parser=command.tokens,
            metavar=command.TOKENS,
            help="Tokens: 5000, 128K, 1M. May be repeated: documents, packed one after the other.",
        ),
    ],
    strategy: Annotated[
        str, typer.Option(callback=one_of(_STRATEGIES), help=f"How to cut: {', '.join(_STRATEGIES)}.")
    ] = "zigzag",
    block: Annotated[
        int | None,
        typer.Option(parser=command.tokens, metavar=command.TOKENS, help="Cut at multiples of so many tokens."),
    ] = None,
    mask: Annotated[str, typer.Option(callback=one_of(("causal", "full")), help="causal or full.")] = "causal",
    window: Annotated[
        int | None,
        typer.Option(
            parser=command.tokens,
            metavar=command.TOKENS,
            help="A sliding window: how many keys a query sees, itself included.",
        ),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    heads_k: Annotated[int, typer.Option(min=1, help="Key heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Numbers per head.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    dtype: Annotated[
        str, typer.Option(callback=one_of(tuple(_BYTES)), help=f"One of {', '.join(_BYTES)}.")
    ] = "bfloat16",
    link: Annotated[
        str, typer.Option(help="What a rank sends, one way: 400Gb (bits a second) or 50GB (bytes).")
    ] = "400Gb",
    tflops: Annotated[float, typer.Option(min=1e-6, help="What the kernels of a rank reach, in TFLOP/s.")] = 500.0,
    inner: Annotated[
        int | None, typer.Option(min=1, help="Also the method hybrid, with so many ranks that trade heads.")
    ] = None,
    forward: Annotated[bool, typer.Option("--forward", help="A forward pass alone, without gradients.")] = False,
) -> None:
    """Show how a sequence is cut among ranks, and what each method of context parallelism costs on paper."""
    if ranks > MOST_RANKS:
        # A closed form for regular cuts would be fast, but says nothing: a ring of so many ranks waits for messages alone.
        why = f"what each rank sends to each other one is counted, {ranks * (ranks - 1):,} times here"
        instead = "give the ranks that share one sequence, not all that train"
        raise typer.BadParameter(f"--ranks must be at most {MOST_RANKS}, got {ranks}: {why}; {instead}")
    speed = _link(link)
    if heads % heads_k:
        raise typer.BadParameter(f"--heads must be a multiple of --heads-k, got {heads} and {heads_k}")
    if inner is not None and ranks % inner:
        raise typer.BadParameter(f"--inner must be a divisor of the {ranks} ranks, got {inner}")
    if inner is not None and inner > heads:
        raise typer.BadParameter(f"--inner must be at most the {heads} query heads, got {inner}")
    from strobe.distributed.cost import Machine, Shape
    from strobe.distributed.report import describe
    from strobe.distributed.shard_plan import ShardPlan

    shard_plan = ShardPlan(length, ranks=ranks, mask=_mask(mask, window), strategy=strategy, block=block)
    shape = Shape(heads, heads_k, head_dim, head_dim, _BYTES[dtype], batch)
    machine = Machine(link=speed, rate=tflops * 1e12)
    typer.echo(describe(shard_plan, shape, machine, gradients=not forward, inner=inner), nl=False)
