"""The suites: cases to be measured, in groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strobe.bench import llama
from strobe.bench.case import BenchCase, case
from strobe.bench.names import PASSES
from strobe.bench.variants import BOOLEANS, LEARNT_BIAS
from strobe.measure.units import length as short_length

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def _short(n: int) -> str:
    """Write a length as labels do: 16384 is "16k"."""
    return short_length(n).lower()


def grid36(direction: str = "forward") -> list[BenchCase]:
    """3 head dims x 2 masks x 6 lengths; 16384 tokens in all, heads x dim = 2048."""
    return [
        case(
            "grid36",
            f"d{dim}-{mask}-{_short(n)}",
            batch=16384 // n,
            heads=2048 // dim,
            length=n,
            dim=dim,
            mask=mask,
            direction=direction,
        )
        for dim in (64, 128, 256)
        for mask in ("full", "causal")
        for n in LENGTHS
    ]


def sweep(direction: str = "forward") -> list[BenchCase]:
    """Length against model dimension, one sequence: where memory grows, and with it the distance to standard
    attention."""
    return [
        case("sweep", f"m{model}-full-{_short(n)}", heads=model // 128, length=n, dim=128, direction=direction)
        for model in (1024, 2048, 4096, 8192)
        for n in (1024, 2048, 4096, 8192, 16384, 32768)
    ]


def gqa(direction: str = "forward") -> list[BenchCase]:
    """Fewer key heads than query heads; few queries against a long cache."""
    grouped = [
        case(
            "gqa",
            f"{heads}h{heads_k}-{mask}-{_short(n)}",
            batch=2,
            heads=heads,
            heads_k=heads_k,
            length=n,
            dim=128,
            mask=mask,
            direction=direction,
        )
        for heads, heads_k in ((64, 8), (32, 8), (32, 1))
        for mask in ("full", "causal")
        for n in (2048, 8192)
    ]
    if direction != "forward":
        return grouped
    # Speculative decode, chunked prefill. Masks would hide next to nothing. The suite `decode` times decoding.
    against_a_cache = [
        ("speculative8-b1", 1, 64, 8, 32768),
        ("speculative8-b16", 16, 64, 8, 8192),
        ("prefill256-8h1", 1, 8, 256, 32768),
        ("prefill256-64h8", 1, 64, 256, 32768),
    ]
    return grouped + [
        case(
            "gqa", f"{name}-{_short(n)}", batch=batch, heads=heads, heads_k=heads // 8, length=length, len_k=n, dim=128
        )
        for name, batch, heads, length, n in against_a_cache
    ]


def models(direction: str = "forward", on_gpu: bool = False) -> list[BenchCase]:
    """Shapes of models people run, with what their attention adds: windows, softcaps, sinks, biases. Behind them a whole
    model, the suite llama."""
    gemma2 = {"heads": 16, "heads_k": 8, "length": 8192, "dim": 256, "softcap": 50.0}
    gpt_oss = {"heads": 64, "heads_k": 8, "length": 8192, "dim": 64, "sinks": True}
    shapes: list[tuple[str, str, dict[str, Any]]] = [
        ("llama3-8b", "Llama 3 8B", {"heads": 32, "heads_k": 8, "length": 8192, "dim": 128, "mask": "causal"}),
        ("llama3-70b", "Llama 3 70B", {"heads": 64, "heads_k": 8, "length": 8192, "dim": 128, "mask": "causal"}),
        ("gemma2-global", "Gemma 2 9B, global", gemma2 | {"mask": "causal"}),
        ("gemma2-local", "Gemma 2 9B, local", gemma2 | {"mask": "window(4095, 0)"}),
        (
            "gemma3-local",
            "Gemma 3 27B, local",
            {"heads": 32, "heads_k": 16, "length": 8192, "dim": 128, "mask": "window(1023, 0)"},
        ),
        (
            "deepseek-v3",
            "DeepSeek-V3, prefill",
            {"heads": 128, "length": 4096, "dim": 192, "dim_v": 128, "mask": "causal"},
        ),
        ("gpt-oss-full", "gpt-oss, full", gpt_oss | {"mask": "causal"}),
        ("gpt-oss-local", "gpt-oss, local", gpt_oss | {"mask": "window(127, 0)"}),
        ("vit-l-224", "ViT-L/16, 224 pixels", {"batch": 64, "heads": 16, "length": 197, "dim": 64}),
        ("vit-l-384", "ViT-L/16, 384 pixels", {"batch": 32, "heads": 16, "length": 577, "dim": 64}),
        ("t5-large", "T5 large encoder", {"batch": 16, "heads": 16, "length": 512, "dim": 64, "bias": True}),
    ]
    attention = [case("models", label, model=model, direction=direction, **shape) for label, model, shape in shapes]
    return attention + llama.cases(direction, on_gpu)


# Score functions and conditions of docs/variants.md -> the interval that goes with them.
_VARIANTS = {"alibi": "causal", "tanh": "full", "relative table": "full", "documents": "full", "prefix": "full"}
_VARIANTS |= {"window": "full", "neighbourhood": "full", "decay": "causal"}


def variants(direction: str = "forward", on_gpu: bool = False) -> list[BenchCase]:
    """Return cases of what users write as functions, at one long shape; softcap; a bias that learns and a mask of
    booleans, which are tensors. On a GPU also what softcap and ALiBi cost beside a plain mask, a wide head dim, and
    fp32 inputs."""
    plain: dict[str, Any] = {"direction": direction, "dtype": "bfloat16" if on_gpu else "float32"}
    long: dict[str, Any] = {"heads": 2, "length": 256, "dim": 32}
    if on_gpu:
        long = {"batch": 2, "heads": 16, "length": 8192, "dim": 128}
    end = f"d{long['dim']}-{_short(long['length'])}"
    listed = [
        case("variants", f"{name.replace(' ', '-')}-{end}", variant=name, mask=mask, **long, **plain)
        for name, mask in _VARIANTS.items()
    ]
    listed.append(case("variants", f"softcap-{end}", softcap=30.0, mask="causal", **long, **plain))
    plain |= {"batch": 4, "heads": 16} if on_gpu else {"heads": 2}
    listed += [
        case("variants", f"learnt-bias-d{dim}-{_short(n)}", variant=LEARNT_BIAS, bias=True, length=n, dim=dim, **plain)
        for dim, n in ([(64, 2048), (128, 2048)] if on_gpu else [(32, 128)])
    ]
    dim, n = (128, 4096) if on_gpu else (32, 128)
    listed.append(case("variants", f"boolean-mask-d{dim}-{_short(n)}", variant=BOOLEANS, length=n, dim=dim, **plain))
    if on_gpu:
        beside: dict[str, dict[str, Any]] = {"causal": {}, "softcap": {"softcap": 30.0}, "alibi": {"variant": "alibi"}}
        listed += [
            case("variants", f"{name}-d{d}-4k", mask="causal", length=n, dim=d, **plain, **also)
            for d in (64, 128)
            for name, also in beside.items()
        ]
        listed.append(case("variants", "d512-4k", length=n, dim=512, **plain | {"heads": 8}))
        plain |= {"dtype": "float32"}
        listed.append(case("variants", f"fp32-d{dim}-{_short(n)}", length=n, dim=dim, **plain))
    return listed


def overhead(direction: str = "forward") -> list[BenchCase]:
    """Short lengths: what one call costs the CPU, and what the device needs when a graph replays it."""
    return [
        case("overhead", f"d128-{n}", heads=16, length=n, dim=128, measure=measure, direction=direction)
        for n in (16, 128, 256, 512, 1024)
        for measure in ("call", "graph")
        if direction == "forward" or measure == "call"
    ]


def quick(direction: str = "forward", on_gpu: bool = False) -> list[BenchCase]:
    """A look at everything: the lengths over which standard attention falls behind, a backward, a call."""
    dtype = "bfloat16" if on_gpu else "float32"
    if on_gpu:
        shapes = [(128, mask, n, max(1, 8192 // n), 16) for mask in ("full", "causal") for n in (1024, 4096, 16384)]
    else:
        shapes = [(64, "full", n, 1, 2) for n in (256, 512, 1024, 2048)] + [
            (64, "causal", n, 1, 2) for n in (512, 2048)
        ]
    listed = [
        case(
            "quick",
            f"d{dim}-{mask}-{_short(n)}",
            batch=batch,
            heads=heads,
            length=n,
            dim=dim,
            mask=mask,
            dtype=dtype,
            direction=direction,
        )
        for dim, mask, n, batch, heads in shapes
    ]
    if direction == "forward":
        plain: dict[str, Any] = {"heads": 4, "length": 1024, "dim": 64, "dtype": dtype}
        listed.append(case("quick", "d64-causal-1k", **plain, mask="causal", direction="backward"))
        listed.append(case("quick", "d64-128", **plain | {"length": 128}, measure="call"))
    return listed


SUITES: dict[str, Callable[..., list[BenchCase]]] = {
    "grid36": grid36,
    "sweep": sweep,
    "gqa": gqa,
    "models": models,
    "llama": llama.cases,
    "variants": variants,
    "overhead": overhead,
    "quick": quick,
}


_BY_DEVICE = ("models", "llama", "variants", "quick")  # smaller on a CPU


def cases(suite: str, direction: str = "forward", on_gpu: bool = False) -> list[BenchCase]:
    """The cases of a suite. Raises ValueError for a name there is not."""
    if suite not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}, got {suite!r}")
    if direction not in PASSES:
        raise ValueError(f"direction must be one of {', '.join(PASSES)}, got {direction!r}")
    return SUITES[suite](direction, on_gpu) if suite in _BY_DEVICE else SUITES[suite](direction)
