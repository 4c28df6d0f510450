"""Each rung built, checked, and timed (on a GPU) or counted (on the emulator)."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from strobe.cuda.runtime import jit
from strobe.emulator import build
from strobe.learn.ladder import execute, rungs
from strobe.learn.ladder.exact import judge
from strobe.learn.ladder.rung import Rung, Shape
from strobe.measure.provenance import collect, cores
from strobe.measure.stopwatch import Settings, Stopwatch
from strobe.measure.tolerance import Verdict

Say = Callable[[str], None]
_BUDGET_MS, _MOST, _FEWEST = 200.0, 50, 3  # of timed launches, for each rung
GPU_SHAPE = Shape(slices=16, len_q=4096, len_k=4096, dim=128)
CPU_SHAPE = Shape(slices=1, len_q=256, len_k=256, dim=64)  # all rungs in some seconds, after they were built


@dataclass
class Row:
    """The results of one rung."""

    number: str
    title: str
    dtype: str
    against: str | None  # the rung that the prediction and the speed-up speak of
    predicted: float
    predicted_bytes: float | None
    error: Verdict | None = None
    ms: float | None = None  # the median
    samples: int = 0
    tflops: float | None = None  # of the products that the formulas need, whatever the rung computed besides
    speed_up: float | None = None
    counters: dict[str, int] | None = None
    skipped: str | None = None
    failed: bool = False  # skipped because something went wrong, not because this GPU cannot

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error.passed

    @property
    def global_bytes(self) -> int | None:
        if self.counters is None:
            return None
        return self.counters["global_bytes_read"] + self.counters["global_bytes_written"]


def run(shape: Shape, wanted: Sequence[Rung], device: torch.device, say: Say = lambda what: None) -> list[Row]:
    """`say` is called once for each rung built and once for each rung run, before it happens. An interruption (Ctrl-C)
    ends it after the rungs that are complete; the others are missing from the result."""
    rows = []
    with contextlib.suppress(KeyboardInterrupt):
        build_all(shape, wanted, device, say)
        for rung in wanted:
            say(f"running {rung.number}")
            rows.append(_time(rung, shape, device) if device.type == "cuda" else _count(rung, shape))
    by_number = {row.number: row for row in rows}
    for row in rows:
        base = by_number.get(row.against or "")
        if row.ms and base is not None and base.ms:  # per product: the backward pass has more of them
            work = _flops(row, shape) / _flops(base, shape)
            row.speed_up = base.ms * work / row.ms
    return rows


def _flops(row: Row, shape: Shape) -> int:
    return shape.flops(rungs.get(row.number).backward)


def _new_row(rung: Rung, shape: Shape) -> Row:
    before = rungs.before(rung)
    against = None if before is None else before.number
    dtype = str(rung.dtype).removeprefix("torch.")
    return Row(rung.number, rung.title, dtype, against, rung.predicted, rung.predicted_bytes(shape))


def build_all(shape: Shape, wanted: Sequence[Rung], device: torch.device, say: Say = lambda what: None) -> None:
    """Side by side: a compiler runs in a process or a library of its own."""

    def one(rung: Rung) -> None:
        say(f"building {rung.number}")
        if rung.library:  # the first launch builds it
            return
        if device.type != "cuda":
            build(rung.source(shape.dim), name=rung.name)
        elif execute.cannot_run(rung, device) is None:
            with contextlib.suppress(RuntimeError):  # it will be told of the rung, when that is run
                jit.get(rung.source(shape.dim), execute.arch_of(rung, device), name=rung.name)

    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(one, wanted))


def _count(rung: Rung, shape: Shape) -> Row:
    row = _new_row(rung, shape)
    x = execute.make(rung, shape)
    row.counters = dataclasses.asdict(execute.emulate(rung, shape, x))
    row.error = judge(rung, shape, x)
    return row


def _time(rung: Rung, shape: Shape, device: torch.device) -> Row:
    row = _new_row(rung, shape)
    if (reason := execute.cannot_run(rung, device)) is not None:
        row.skipped = reason
        return row
    try:
        x = execute.make(rung, shape, device)
        launch = execute.prepare(rung, shape, x)
        watch = Stopwatch(device, Settings(l2="warm"))
        estimate = watch.warm_up(launch)
        row.error = judge(rung, shape, x)
        times = watch.times_ms(launch, max(_FEWEST, min(_MOST, int(_BUDGET_MS / estimate))))
    except torch.OutOfMemoryError:
        row.skipped = "out of memory"
        return row
    except RuntimeError as error:  # of the compiler, the driver or the kernel: the other rungs go on
        row.skipped, row.failed = str(error).splitlines()[0], True
        return row
    row.ms, row.samples = statistics.median(times), len(times)
    row.tflops = _flops(row, shape) / row.ms / 1e9
    return row


def as_json(shape: Shape, rows: Sequence[Row], device: torch.device) -> dict[str, Any]:
    """Return what `--json` writes, and what docs/ladder.md is made from."""
    return {
        "kind": "ladder",
        "shape": dataclasses.asdict(shape),
        "method": "device events, median, warm caches" if device.type == "cuda" else "counted by the emulator",
        "provenance": collect(device, seed=0),
        "rungs": [dataclasses.asdict(row) | {"passed": row.passed} for row in rows],
    }
