"""The file a run leaves: provenance, ceilings, and a row for every provider and case, whatever became of it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strobe.bench.suites import Case
from strobe.measure.clocks import Clock
from strobe.measure.statistics import Summary

SCHEMA = 1
OK = "ok"
# Everything else is a result with a reason: timed, but not with the kernels it is named after; or not timed at all.
STATUSES = (OK, "fell back", "not installed", "unsupported", "out of memory", "wrong", "failed", "skipped")
TIMED = (OK, "fell back")
KINDS = ("ours", "ladder", "peer", "standard")  # of providers, in the order in which they are shown


@dataclass
class Error:
    """Against float64. `allowed` is what rounding explains: a multiple of what standard attention in the same dtype
    errs."""

    max_abs: float
    relative: float  # ‖out − exact‖ / ‖exact‖
    allowed_max_abs: float
    allowed_relative: float
    checked: str  # which part of the output

    @property
    def passed(self) -> bool:
        return self.max_abs <= self.allowed_max_abs and self.relative <= self.allowed_relative  # False for NaN


@dataclass
class Timing:
    samples_ms: list[float]
    summary: Summary
    method: str  # "device events", "graph replay", "perf_counter", …
    l2: str  # "flushed", "warm"
    per_turn: int = 1  # samples that were taken one right after the other
    late: int = 0  # samples in which the GPU had to wait for the CPU


@dataclass
class Row:
    case: Case
    provider: str
    kind: str  # one of KINDS
    status: str = OK
    reason: str | None = None
    note: str | None = None
    kernels: list[str] = field(default_factory=list)  # that really ran
    error: Error | None = None
    timing: Timing | None = None
    peak_bytes: int | None = None  # q, k, v, o and everything else alive at the worst moment
    extra_bytes: int | None = None  # the same without q, k, v, o
    flops: int | None = None
    ideal_bytes: int | None = None
    tflops: float | None = None
    gbytes_per_s: float | None = None
    of_matmul: float | None = None  # fraction of the matrix product measured in the same run
    of_copy: float | None = None
    clock: Clock | None = None
    matrix_unit: float | None = None  # cycles that the matrix units need / cycles taken, at the clock during the row
    repeat: str = ""

    @property
    def timed(self) -> bool:
        return self.status in TIMED and self.timing is not None

    @property
    def median_ms(self) -> float | None:
        return self.timing.summary.median if self.timing is not None else None


@dataclass
class Ceilings:
    matmul_tflops: dict[str, float] = field(default_factory=dict)  # by dtype
    copy_gbytes_per_s: float | None = None
    how: str = ""


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

    def suites(self) -> list[str]:
        return list(dict.fromkeys(row.case.suite for row in self.rows))

    def find(self, provider: str, key: str) -> Row | None:
        return next((row for row in self.rows if row.provider == provider and row.case.key == key), None)


def to_json(results: Results) -> dict[str, Any]:
    rows = []
    for row in results.rows:
        data = {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
        data["case"] = row.case.to_dict()
        for name in ("error", "timing", "clock"):
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


def from_json(data: dict[str, Any]) -> Results:
    if not isinstance(data, dict):
        raise ValueError(f"not a result of `strobe bench`: a JSON object is expected, this is a {type(data).__name__}")
    if data.get("kind") != "strobe bench" or data.get("schema") != SCHEMA:
        raise ValueError(
            f"not a result of `strobe bench` with schema {SCHEMA}: kind {data.get('kind')!r}, schema {data.get('schema')!r}"
        )
    rows = []
    for entry in data["rows"]:
        values = dict(entry)
        values["case"] = Case.from_dict(values["case"])
        if "error" in values:
            # JSON has no NaN; a result that is not a number is stored as null
            stored: dict[str, Any] = values["error"]
            restored: dict[str, Any] = {name: math.nan if value is None else value for name, value in stored.items()}
            values["error"] = Error(**restored)
        if "timing" in values:
            timing = dict(values["timing"])
            values["timing"] = Timing(**{**timing, "summary": Summary(**timing["summary"])})
        if "clock" in values:
            values["clock"] = Clock(**values["clock"])
        rows.append(Row(**values))
    return Results(
        provenance=data["provenance"],
        method=data["method"],
        ceilings=Ceilings(**data["ceilings"]),
        rows=rows,
        clocks=data["clocks"],
        complete=data["complete"],
        seconds=data["seconds"],
    )


def load(path: Path) -> Results:
    """Raises ValueError, naming the file, for anything that is not a result."""
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


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
    head = json.dumps({name: value for name, value in data.items() if name != "rows"}, indent=1)
    return f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
