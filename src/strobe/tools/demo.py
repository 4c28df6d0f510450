"""What `strobe demo` measures: exact attention beside standard attention, with error, time and memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import strobe
from strobe.measure.memory import free_bytes, with_peak_memory
from strobe.tiled import block_sizes
from strobe.tools import demo_inputs
from strobe.tools.demo_inputs import QKV

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
LENGTHS = (1024, 2048, 4096, 8192, 16384)
STANDARD = "standard"


@dataclass(frozen=True)
class Settings:
    lengths: tuple[int, ...] = LENGTHS
    head_dim: int = 64
    heads: int = 1
    block_q: int | None = None  # tile sizes of the `tiled` backend
    block_k: int | None = None
    init: str = "normal"
    seed: int = 0
    dtype: torch.dtype = torch.float32
    causal: bool = False
    device: torch.device = torch.device("cpu")
    backend: str | None = None

    @property
    def mask(self) -> strobe.Mask:
        return strobe.causal if self.causal else strobe.full

    @property
    def runs(self) -> int:
        """A file has one length of its own."""
        return len(self.lengths) if self.init in demo_inputs.RULES else 1


@dataclass(frozen=True)
class Row:
    length: int
    method: str
    error: float | None = None  # largest absolute difference from float64; None if it did not run
    allowed: float = math.inf  # what rounding explains
    seconds: float | None = None
    extra_bytes: int | None = None
    skipped: str | None = None  # why it did not run

    @property
    def exact(self) -> bool:
        return self.error is None or self.error <= self.allowed  # False for NaN


def inputs_of(settings: Settings) -> Iterator[QKV]:
    """For each length, one after the other."""
    for length in settings.lengths[: settings.runs]:
        if settings.init in demo_inputs.RULES:
            qkv = demo_inputs.made(settings.init, length, settings.heads, settings.head_dim, settings.seed)
        else:
            qkv = demo_inputs.read(Path(settings.init))
        yield QKV(*(t.to(settings.device, settings.dtype) for t in qkv))


def first_inputs(settings: Settings) -> QKV:
    return next(inputs_of(settings))


def methods(settings: Settings, qkv: QKV) -> dict[str, Callable[[], torch.Tensor]]:
    """Name -> call. Standard attention, what strobe picks (or is told) and, beside it, its tiles written in PyTorch."""
    q, k, v = qkv
    diagonal = k.shape[1] - q.shape[1]  # the last query stands opposite the last key
    if settings.causal and diagonal < 0:
        raise ValueError(f"--causal: {q.shape[1]} queries but {k.shape[1]} keys, so some queries would see none")
    if settings.block_q or settings.block_k:
        chosen = "tiled"
    else:
        chosen = strobe.explain(q, k, v, mask=settings.mask, backend=settings.backend).backend
    names = [chosen] if settings.backend or chosen == "tiled" else [chosen, "tiled"]
    calls: dict[str, Callable[[], torch.Tensor]] = {
        STANDARD: lambda: standard_attention(q, k, v, settings.causal, diagonal)
    }
    for name in names:
        calls[name] = lambda name=name: strobe.attention(q, k, v, mask=settings.mask, backend=name)  # type: ignore[misc]
    return calls


def run(settings: Settings, done: Callable[[str], None] = lambda what: None) -> Iterator[Row]:
    """Measure everything, shortest length first; `done` hears of each finished measurement."""
    for qkv in inputs_of(settings):
        with block_sizes(settings.block_q, settings.block_k):
            yield from _rows(settings, qkv, done)


def _rows(settings: Settings, qkv: QKV, done: Callable[[str], None]) -> Iterator[Row]:
    q, k, v = qkv
    length, device = k.shape[1], settings.device
    calls = methods(settings, qkv)
    exact = in_row_blocks(q, k, v, settings.causal, torch.float64)
    matrices = 2 * q.shape[2] * q.shape[1] * length * q.element_size()  # S and P
    free = free_bytes(device)
    yardstick = _error(in_row_blocks(q, k, v, settings.causal, q.dtype), exact)
    explained = _explained_by_rounding(yardstick, exact, q.dtype)
    for name, call in calls.items():
        if name == STANDARD and matrices > 0.8 * free:
            reason = f"its matrices of {_gib(matrices)} do not fit in the {_gib(free)} that are free"
            row = Row(length, name, skipped=reason)
        else:
            out, extra = with_peak_memory(call, device)
            error = _error(out, exact)
            del out
            row = Row(length, name, error, math.inf if name == STANDARD else explained, best_time(call, device), extra)
        done(f"{length} tokens, {name}")
        yield row


def standard_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, first_row: int = 0
) -> torch.Tensor:
    """Three steps with the whole matrix between them: S = q k^T, P = softmax(S), O = P v. On (1, length, heads, dim).
    Scaling q saves one more pass over the matrix."""
    return _from_scores((q / math.sqrt(q.shape[3])).transpose(1, 2) @ k.permute(0, 2, 3, 1), v, causal, first_row)


def _from_scores(s: torch.Tensor, v: torch.Tensor, causal: bool, first_row: int) -> torch.Tensor:
    if causal:
        rows = torch.arange(first_row, first_row + s.shape[2], device=s.device)
        s.masked_fill_(torch.arange(s.shape[3], device=s.device) > rows[:, None], -math.inf)
    return (torch.softmax(s, -1) @ v.transpose(1, 2)).transpose(1, 2)


def in_row_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, dtype: torch.dtype) -> torch.Tensor:
    """Standard attention in a dtype, a few rows of the matrix at a time; by the book, which scales q k^T and rounds no
    q."""
    block = 512
    k, v = k.to(dtype), v.to(dtype)
    diagonal = k.shape[1] - q.shape[1]
    done = []
    for i in range(0, q.shape[1], block):
        s = q[:, i : i + block].to(dtype).transpose(1, 2) @ k.permute(0, 2, 3, 1)
        done.append(_from_scores(s.div_(math.sqrt(q.shape[3])), v, causal, i + diagonal))
    return torch.cat(done, 1)


def _error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).abs().max())


def _explained_by_rounding(yardstick: float, exact: torch.Tensor, dtype: torch.dtype) -> float:
    """The rule of the tests: twice what PyTorch errs in the same dtype, and the output's last bit."""
    if dtype == torch.float64:
        return 1e-13 * float(exact.abs().max())  # nothing finer to compare with
    o = exact.to(dtype)
    return 2 * yardstick + 2 * float(((o + 0.3 - 0.3) - o).abs().max())


# ---- measuring
# -----------------------------------------------------------------------------------------------------------


def best_time(call: Callable[[], object], device: torch.device, budget: float = 0.5, most: int = 20) -> float:
    """Seconds of the fastest of several calls; CUDA events on a GPU."""
    seconds: list[float] = []
    started = time.perf_counter()
    while not seconds or (len(seconds) < most and time.perf_counter() - started < budget):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            begun = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begun)
    return min(seconds)


MEMORY_NOTE = {
    "cuda": "by torch.cuda.max_memory_allocated",
    "cpu": "by the allocations that torch.profiler records",
}


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
