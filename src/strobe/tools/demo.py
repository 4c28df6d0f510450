"""`strobe demo` compares strobe with standard attention: error, time and memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import strobe
from strobe.measure import units
from strobe.measure.memory import free_bytes, with_peak_memory
from strobe.measure.stopwatch import Settings as Timing, Stopwatch
from strobe.measure.tolerance import Verdict, compare
from strobe.tiled import block_sizes
from strobe.tools import demo_inputs
from strobe.tools.demo_inputs import QKV

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
LENGTHS = {"cpu": (1024, 2048, 4096, 8192), "cuda": (1024, 2048, 4096, 8192, 16384)}
STANDARD = "standard"
CHECKED_ROWS = 1024  # of the output that are compared with float64, evenly spread
_BUDGET_MS = 200.0  # of calls that are timed, for each method and length
_LONG_MS = 250.0  # a call that takes longer is timed once


@dataclass(frozen=True)
class Settings:
    lengths: tuple[int, ...] = LENGTHS["cpu"]
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
    verdict: Verdict | None = None  # None if it did not run
    ms: float | None = None
    extra_bytes: int | None = None
    skipped: str | None = None  # why it did not run

    @property
    def exact(self) -> bool:
        """Standard attention is what is compared with; nothing is asked of it."""
        return self.method == STANDARD or self.verdict is None or self.verdict.passed


def check_room(settings: Settings) -> None:
    """Raises ValueError if q, k, v and the output of the longest sequence do not fit."""
    if settings.init not in demo_inputs.RULES:
        return
    elements = max(settings.lengths) * settings.heads * settings.head_dim
    needs = {torch.device("cpu"): 3 * 4 * elements}  # inputs are made there, in fp32
    needs[settings.device] = needs.get(settings.device, 0) + 4 * settings.dtype.itemsize * elements
    for device, need in needs.items():
        if need > (free := free_bytes(device)):
            raise ValueError(
                f"--seq-len {max(settings.lengths)}: q, k, v and the output need {units.size(need)}, "
                f"{units.size(free)} are free on {device.type}"
            )


def inputs_of(settings: Settings) -> Iterator[QKV]:
    """Yield the inputs of each length, one after the other."""
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
        options = {"mask": settings.mask, "layout": "bshd", "backend": name}
        calls[name] = lambda options=options: strobe.attention(q, k, v, **options)  # type: ignore[misc]
    return calls


def run(settings: Settings) -> Iterator[Row]:
    """Measure everything, shortest length first. Each row is given when it is there."""
    for qkv in inputs_of(settings):
        with block_sizes(settings.block_q, settings.block_k):
            yield from _rows(settings, qkv)


def _rows(settings: Settings, qkv: QKV) -> Iterator[Row]:
    q, k, v = qkv
    length, device = k.shape[1], settings.device
    calls = methods(settings, qkv)
    count = min(q.shape[1], CHECKED_ROWS)
    rows = torch.linspace(0, q.shape[1] - 1, count, dtype=torch.float64, device=device).round().long()
    exact, same = (textbook(q, k, v, rows, settings.causal, dtype) for dtype in (torch.float64, q.dtype))
    watch = Stopwatch(device, Timing(l2="warm"))
    for name, call in calls.items():
        matrices = 2 * q.shape[2] * q.shape[1] * length * q.element_size()  # S and P
        if name == STANDARD and matrices > 0.8 * (free := free_bytes(device)):
            fits = f"its matrices of {units.size(matrices)} do not fit in the {units.size(free)} that are free"
            yield Row(length, name, skipped=fits)
            continue
        if device.type == "cuda":
            call()  # compiles what has to be compiled
            watch.synchronize()
        (out, ms), extra = with_peak_memory(lambda call=call: _timed(call), device)  # type: ignore[misc]
        verdict = compare(name, out[:, rows], exact, same)
        del out
        if device.type == "cuda" or ms < _LONG_MS:
            ms = watch.best_ms(call, _BUDGET_MS)
        yield Row(length, name, verdict, ms, extra)


def _timed(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    begun = time.perf_counter()
    out = call()
    return out, (time.perf_counter() - begun) * 1e3


def standard_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, first_row: int = 0
) -> torch.Tensor:
    """Three steps with the whole matrix between them: S = q k^T, P = softmax(S), O = P v. On (1, length, heads, dim).
    Scaling q saves one more pass over the matrix."""
    s = (q / math.sqrt(q.shape[3])).transpose(1, 2) @ k.permute(0, 2, 3, 1)
    return _from_scores(s, v, causal, torch.arange(first_row, first_row + q.shape[1], device=q.device))


def _from_scores(s: torch.Tensor, v: torch.Tensor, causal: bool, positions: torch.Tensor) -> torch.Tensor:
    if causal:
        s.masked_fill_(torch.arange(s.shape[3], device=s.device) > positions[:, None], -math.inf)
    return (torch.softmax(s, -1) @ v.transpose(1, 2)).transpose(1, 2)


def textbook(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, causal: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Standard attention of some rows in a dtype, a few at a time; by the book, which scales q k^T and rounds no q."""
    diagonal = k.shape[1] - q.shape[1]
    k, v = k.to(dtype), v.to(dtype)
    done = []
    for part in rows.split(256):
        s = q[:, part].to(dtype).transpose(1, 2) @ k.permute(0, 2, 3, 1)
        done.append(_from_scores(s.div_(math.sqrt(q.shape[3])), v, causal, part + diagonal))
    return torch.cat(done, 1)


MEMORY_NOTE = {
    "cuda": "by torch.cuda.max_memory_allocated",
    "cpu": "by the allocations that torch.profiler records",
}
TILES_NOTE = (
    "tiled: the algorithm in PyTorch operations. It saves memory. On a CPU it can be slower than standard attention: each "
    "tile takes about ten small operations, and the caches hold much of the matrix that tiles avoid"
)
