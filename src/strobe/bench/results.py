"""Results of a run: provenance, ceilings, and a row for every provider, case and method, whatever became of it.
`reading` loads them again."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strobe.bench.case import BenchCase
from strobe.measure.clocks import Clock
from strobe.measure.energy import Energy
from strobe.measure.method import TURNS
from strobe.measure.statistics import Summary
from strobe.measure.tolerance import Verdict

SCHEMA = 3
OK = "ok"
# Everything else is a result with a reason: timed, but not with the kernels it is named after; or not timed at all.
STATUSES = (OK, "fell back", "not installed", "unsupported", "out of memory", "wrong", "failed", "skipped")
TIMED = (OK, "fell back")


@dataclass
class Timing:
    samples_ms: list[float]
    summary: Summary
    how: str  # "device events", "graph replay", "perf_counter", …
    l2: str  # "flushed", "warm"
    per_turn: int = 1  # samples that were taken one right after the other
    host_bound: int = 0  # samples in which the GPU had to wait for the CPU
    mean_ms: float | None = None  # of a sustained run

    @property
    def ms(self) -> float:
        """The time of a call that counts: the mean of a sustained run, else the median."""
        return self.summary.median if self.mean_ms is None else self.mean_ms


@dataclass
class Row:
    case: BenchCase
    provider: str
    kind: str  # one of palette.KINDS
    method: str = TURNS  # one of method.METHODS
    status: str = OK
    reason: str | None = None
    note: str | None = None
    kernels: list[str] = field(default_factory=list)  # that really ran
    error: Verdict | None = None
    timing: Timing | None = None
    energy: Energy | None = None
    peak_bytes: int | None = None  # everything alive at the worst moment: inputs, outputs, gradients, workspace
    extra_bytes: int | None = None  # the same without what any attention has to hold, BenchCase.tensor_bytes
    flops: int | None = None
    ideal_bytes: int | None = None
    tflops: float | None = None
    gbytes_per_s: float | None = None
    of_matmul: float | None = None  # fraction of the matrix product measured in the same run
    of_copy: float | None = None
    clock: Clock | None = None
    matrix_unit: float | None = None  # cycles that the matrix units need / cycles taken, at the clock during the row
    repeat: str = ""
    run: int = 0  # which of several runs it is of, once they are merged; no part of a file

    @property
    def timed(self) -> bool:
        return self.status in TIMED and self.timing is not None

    @property
    def ms(self) -> float | None:
        return self.timing.ms if self.timing is not None else None

    @property
    def tokens_per_s(self) -> float | None:
        """The tokens per second of a step of a model; None for others."""
        return self.case.tokens / self.ms * 1e3 if self.case.measure == "model" and self.ms else None

    @property
    def identity(self) -> tuple[str, str, str]:
        """The key by which rows of two runs are matched."""
        return self.case.key, self.provider, self.method


@dataclass
class Ceilings:
    matmul_tflops: dict[str, float] = field(default_factory=dict)  # by dtype
    copy_gbytes_per_s: float | None = None
    how: str = ""
    sustained_tflops: dict[str, float] = field(default_factory=dict)  # of a matrix product that runs alone, by dtype
    sustained_joules_per_tflop: dict[str, float] = field(default_factory=dict)


@dataclass
class Results:
    provenance: dict[str, Any]
    method: dict[str, Any]
    ceilings: Ceilings
    rows: list[Row] = field(default_factory=list)
    clocks: dict[str, Any] = field(default_factory=dict)  # before, after
    complete: bool = False
    seconds: float | None = None

    @property
    def device(self) -> str:
        return self.provenance["device"]["name"]

    @property
    def on_gpu(self) -> bool:
        return self.provenance["device"]["kind"] == "cuda"

    def suites(self) -> list[str]:
        return list(dict.fromkeys(row.case.suite for row in self.rows))

    def methods(self) -> list[str]:
        return list(dict.fromkeys(row.method for row in self.rows))

    def find(self, provider: str, key: str, method: str = TURNS) -> Row | None:
        return next((row for row in self.rows if row.identity == (key, provider, method)), None)


def to_json(results: Results) -> dict[str, Any]:
    rows = []
    for row in results.rows:
        data = {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
        data["case"], data["run"] = row.case.to_dict(), None
        data["tokens_per_s"] = row.tokens_per_s
        for name in ("error", "timing", "clock", "energy"):
            data[name] = None if data[name] is None else dataclasses.asdict(data[name])
        rows.append({name: value for name, value in data.items() if value not in (None, [])})
    return {
        "kind": "strobe bench",
        "schema": SCHEMA,
        "complete": results.complete,
        "seconds": results.seconds,
        "provenance": results.provenance,
        "method": results.method,
        "ceilings": dataclasses.asdict(results.ceilings),
        "clocks": results.clocks,
        "rows": rows,
    }


def save(results: Results, path: Path) -> None:
    write(to_json(results), path)


def write(data: dict[str, Any], path: Path) -> None:
    """Replaces the file in one step, so that a run that is killed leaves the rows it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = _text(data)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(lines)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _text(data: dict[str, Any]) -> str:
    """One line per row: such files are read in diffs."""
    rows = ",\n".join("  " + json.dumps(_rounded(row)) for row in data["rows"])
    head = json.dumps(_rounded({name: value for name, value in data.items() if name != "rows"}), indent=1)
    return f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
