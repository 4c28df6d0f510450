"""What training adds to attention, as ratios of two calls in turns: dropout, sums of dQ in a fixed order, grouped heads,
context parallel steps, and the CPU time of a small forward and backward. A study: `python -m benchmarks.studies
training -o benchmarks/results/MACHINE/studies/training.json`."""

from __future__ import annotations

import functools
import gc
import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import strobe
from strobe.bench import context_parallel
from strobe.measure.stopwatch import Call, Settings, Stopwatch, TimedCall
from strobe.measure.turns import medians

TOKENS, HIDDEN = 16384, 2048  # as in the grid
DROPOUT = 0.1
MASKS = {"full": strobe.full, "causal": strobe.causal}
_CALLS = 50  # of CPU time that are one sample
Pairs = Iterator[tuple[dict[str, Any], dict[str, Call]]]  # what is added where; the plain call, and the one with it


def rows(device: torch.device) -> Iterator[dict[str, Any]]:
    yield cpu_time(device)
    watch = Stopwatch(device, Settings(budget_ms=60, rounds=12, graph_below_ms=0))
    for facts, calls in itertools.chain(_dropout(device), _fixed_order(device), _grouped(device)):
        yield facts | {"ms": medians({name: TimedCall(call) for name, call in calls.items()}, watch)}
    cut = context_parallel.cut(device, context_parallel.SIZES[device.type])
    yield {"what": "context parallel", **asdict(cut)}


def _dropout(device: torch.device) -> Pairs:
    for dim, length, mask in itertools.product((64, 128, 256), (4096, 16384), MASKS):
        leaves = _leaves(device, TOKENS // length, length, HIDDEN // dim, HIDDEN // dim, dim)
        for name, made in (("forward", _forward), ("backward", _backward)):
            plain, dropped = (made({"mask": MASKS[mask], "dropout": p}, leaves) for p in (0.0, DROPOUT))
            facts = {"what": "dropout", "pass": name, "dim": dim, "length": length, "mask": mask}
            yield facts, {"plain": plain, "dropout": dropped}


def _fixed_order(device: torch.device) -> Pairs:
    for dim, length, mask in itertools.product((64, 128), (512, 1024, 2048, 4096, 8192, 16384), MASKS):
        leaves = _leaves(device, TOKENS // length, length, HIDDEN // dim, HIDDEN // dim, dim)
        plain, fixed = (_backward({"mask": MASKS[mask], "deterministic": x}, leaves) for x in (False, True))
        facts = {"what": "deterministic", "pass": "backward", "dim": dim, "length": length, "mask": mask}
        yield facts, {"plain": plain, "deterministic": fixed}


def _grouped(device: torch.device) -> Pairs:
    """64 heads on 8, beside 64 on 64."""
    for dim, length, mask in itertools.product((64, 128), (2048, 4096, 8192), MASKS):
        inputs = (_leaves(device, 8192 // length, length, 64, heads_k, dim) for heads_k in (64, 8))
        plain, grouped = (_backward({"mask": MASKS[mask]}, leaves) for leaves in inputs)
        facts = {"what": "grouped", "pass": "backward", "dim": dim, "length": length, "mask": mask}
        yield facts, {"plain": plain, "grouped": grouped}


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
            context_parallel.wait_for(device)
            start = time.perf_counter()
            for _ in range(_CALLS):
                calls[name]()
            best[name] = min(best[name], (time.perf_counter() - start) / _CALLS)
    context_parallel.wait_for(device)
    return {"what": "cpu", "us": {name: round(1e6 * seconds, 1) for name, seconds in best.items()}}


def _leaves(device: torch.device, batch: int, length: int, heads: int, heads_k: int, dim: int) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((batch, length, h, dim) for h in (heads, heads_k, heads_k))
    tensors = (torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for shape in shapes)
    return [t.requires_grad_() for t in tensors]


def _forward(options: dict[str, Any], leaves: list[torch.Tensor]) -> Call:
    detached = [t.detach() for t in leaves]
    call = functools.partial(strobe.attention, *detached, **options)
    call()
    return call


def _backward(options: dict[str, Any], leaves: list[torch.Tensor]) -> Call:
    out = strobe.attention(*leaves, **options)
    call = functools.partial(torch.autograd.grad, out, leaves, torch.randn_like(out), retain_graph=True)
    call()
    return call
