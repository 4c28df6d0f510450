"""What training adds to attention, as ratios of two calls in turns: dropout, sums of dQ in a fixed order, grouped heads,
context parallel steps, and the CPU time of a small forward and backward. A study: `python -m strobe.bench.studies
training -o benchmarks/results/MACHINE/studies/training.json`."""

from __future__ import annotations

import functools
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import strobe
from strobe.bench import context_parallel
from strobe.measure.statistics import summarise_turns
from strobe.measure.stopwatch import Call, Settings, Stopwatch, TimedCall
from strobe.measure.turns import interleave

TOKENS, HIDDEN = 16384, 2048  # as in the grid
DROPOUT = 0.1
MASKS = {"full": strobe.full, "causal": strobe.causal}
_CALLS = 50  # of CPU time that are one sample


def rows(device: torch.device) -> Iterator[dict[str, Any]]:
    yield cpu_time(device)
    watch = Stopwatch(device, Settings(budget_ms=60, rounds=12, graph_below_ms=0))
    for dim, length, mask in itertools.product((64, 128, 256), (4096, 16384), MASKS):
        leaves = _leaves(device, TOKENS // length, length, HIDDEN // dim, HIDDEN // dim, dim)
        plain, dropped = ({"mask": MASKS[mask], "dropout": p} for p in (0.0, DROPOUT))
        for name, passes in (("forward", _forward), ("backward", _backward)):
            calls = {"plain": passes(plain, leaves), "dropout": passes(dropped, leaves)}
            yield {
                "what": "dropout",
                "pass": name,
                "dim": dim,
                "length": length,
                "mask": mask,
                "ms": timed(calls, watch),
            }
    for dim, length, mask in itertools.product((64, 128), (512, 1024, 2048, 4096, 8192, 16384), MASKS):
        leaves = _leaves(device, TOKENS // length, length, HIDDEN // dim, HIDDEN // dim, dim)
        orders = ({"mask": MASKS[mask], "deterministic": fixed} for fixed in (False, True))
        calls = dict(zip(("plain", "deterministic"), (_backward(order, leaves) for order in orders), strict=True))
        facts = {"what": "deterministic", "pass": "backward", "dim": dim, "length": length, "mask": mask}
        yield facts | {"ms": timed(calls, watch)}
    for dim, length, mask in itertools.product((64, 128), (2048, 4096, 8192), MASKS):
        calls = {
            name: _backward({"mask": MASKS[mask]}, _leaves(device, 8192 // length, length, 64, heads_k, dim))
            for name, heads_k in (("plain", 64), ("grouped", 8))
        }
        yield {
            "what": "grouped",
            "pass": "backward",
            "dim": dim,
            "length": length,
            "mask": mask,
            "ms": timed(calls, watch),
        }
    yield {
        "what": "context parallel",
        **asdict(context_parallel.cut(device, context_parallel.SIZES[device.type], calls=20)),
    }


def timed(calls: dict[str, Call], watch: Stopwatch) -> dict[str, float]:
    running = {name: TimedCall(call) for name, call in calls.items()}
    interleave(list(running.values()), watch)
    for call in running.values():
        if call.problem is not None:
            raise call.problem
    return {name: round(summarise_turns(call.turns_ms).median, 5) for name, call in running.items()}


def cpu_time(device: torch.device, samples: int = 40) -> dict[str, Any]:
    """Microseconds of a forward and a backward so small that the GPU is never behind; the least of the samples."""
    leaves = _leaves(device, 1, 64, 1, 1, 64)
    q, k, v = theirs = [t.detach().transpose(1, 2).requires_grad_() for t in leaves]
    dout = torch.randn_like(leaves[0])

    def ours() -> None:
        torch.autograd.grad(strobe.attention(*leaves, mask=strobe.causal), leaves, dout)

    def sdpa() -> None:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, theirs, dout.transpose(1, 2))

    calls = {"strobe": ours, "sdpa": sdpa}
    best = dict.fromkeys(calls, float("inf"))
    gc.collect()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for name in list(calls) * samples:
            _wait_for(device)
            start = time.perf_counter()
            for _ in range(_CALLS):
                calls[name]()
            best[name] = min(best[name], (time.perf_counter() - start) / _CALLS)
    _wait_for(device)
    return {"what": "cpu", "us": {name: round(1e6 * seconds, 1) for name, seconds in best.items()}}


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _leaves(device: torch.device, batch: int, length: int, heads: int, heads_k: int, dim: int) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((batch, length, h, dim) for h in (heads, heads_k, heads_k))
    tensors = (torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for shape in shapes)
    return [t.requires_grad_() for t in tensors]


def _forward(options: dict[str, Any], leaves: list[torch.Tensor]) -> Call:
    detached = [t.detach() for t in leaves]
    call: Callable[..., Any] = functools.partial(strobe.attention, *detached, **options)
    call()
    return call


def _backward(options: dict[str, Any], leaves: list[torch.Tensor]) -> Call:
    out = strobe.attention(*leaves, **options)
    call = functools.partial(torch.autograd.grad, out, leaves, torch.randn_like(out), retain_graph=True)
    call()
    return call
