"""Results in, one self-contained HTML page out."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from strobe.bench.compare import comparable, compare
from strobe.bench.results import Results, Row

_HERE = Path(__file__).parent


def write(runs: list[Results], directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "index.html"
    path.write_text(html(runs), encoding="utf-8")
    return path


def html(runs: list[Results]) -> str:
    if not runs:
        raise ValueError("runs is empty; at least one result is needed")
    data = json.dumps(page_data(runs), separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    text = (_HERE / "page.html").read_text(encoding="utf-8")
    for mark, part in (("STYLE", "page.css"), ("CHARTS", "charts.js"), ("SCRIPT", "page.js")):
        text = text.replace(f"/*{mark}*/", (_HERE / part).read_text(encoding="utf-8"))
    return text.replace("/*DATA*/", data).replace("TITLE", f"Attention on {_escaped(runs[0].device)}")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def page_data(runs: list[Results]) -> dict[str, Any]:
    """What the script draws from: runs of the same device are one run, what stands alone is compared with the first."""
    first, others = runs[0], runs[1:]
    merged = [first]
    compared: list[Results] = []
    for run in others:
        keys = {(row.case.key, row.provider) for row in merged[0].rows}
        again = any((row.case.key, row.provider) in keys for row in run.rows)
        (compared if again or comparable(first, run) else merged).append(run)
    return {
        "run": _run(merged),
        "compared": [_comparison(merged, run) for run in compared],
    }


def _run(parts: list[Results]) -> dict[str, Any]:
    rows = [row for part in parts for row in part.rows]
    return {
        "provenance": parts[0].provenance,
        "method": parts[0].method,
        "ceilings": vars(parts[0].ceilings),
        "complete": all(part.complete for part in parts),
        "seconds": sum(part.seconds or 0 for part in parts),
        "throttled": sorted({reason for row in rows if row.clock for reason in row.clock.throttle}),
        "rows": [flat(row, panel) for row, panel in zip(rows, panels(rows), strict=True)],
    }


def panels(rows: list[Row]) -> list[str]:
    """Cases that differ in length only share a figure: d128-causal-4k and d128-causal-8k are points of
    "d128-causal"."""
    families: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        families[_family(row)].add(row.case.len_k)
    return [_family(row) if len(families[_family(row)]) > 1 else row.case.label for row in rows]


def _family(row: Row) -> str:
    """Models are cases of their own, whatever their names have in common."""
    return row.case.label.rsplit("-", 1)[0] if "-" in row.case.label and row.case.model is None else row.case.label


def flat(row: Row, panel: str) -> dict[str, Any]:
    case, summary = row.case, row.timing.summary if row.timing else None
    found = {
        "suite": case.suite,
        "key": case.key,
        "label": case.label,
        "panel": panel,
        "length": case.len_k,
        "dim": case.dim,
        "mask": case.mask,
        "dtype": case.dtype,
        "direction": case.direction,
        "measure": case.measure,
        "model": case.model,
        "tile": case.tile,
        "scores": case.score_elements(),
        "provider": row.provider,
        "kind": row.kind,
        "status": row.status,
        "reason": row.reason,
        "note": row.note,
        "kernels": row.kernels[:4],
        "repeat": row.repeat,
        "tflops": row.tflops,
        "gbs": row.gbytes_per_s,
        "of": row.of_matmul,
        "units": row.matrix_unit,
        "peak": row.peak_bytes,
        "extra": row.extra_bytes,
        "tensors": case.tensor_bytes(),
        "intensity": row.flops / row.ideal_bytes if row.flops and row.ideal_bytes else None,
        "error": row.error.relative if row.error else None,
        "clock": row.clock.sm_mhz if row.clock else None,
        "timed": row.timed,
    }
    if summary is not None:
        found |= {
            "ms": summary.median,
            "low": summary.low,
            "high": summary.high,
            "n": summary.n,
            "p5": summary.p5,
            "p95": summary.p95,
        }
    return {name: _short(value) for name, value in found.items() if value is not None}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def _comparison(base: list[Results], other: Results) -> dict[str, Any]:
    old = Results(base[0].provenance, base[0].method, base[0].ceilings, [row for part in base for row in part.rows])
    changes = [
        {
            "key": c.key,
            "provider": c.provider,
            "kind": c.kind,
            "ratio": _short(c.ratio),
            "old": _short(_ms(c.old)),
            "new": _short(_ms(c.new)),
        }
        for c in compare(old, other)
        if c.old is not None and (c.old.timed or (c.new is not None and c.new.timed))
    ]
    return {"provenance": other.provenance, "problem": comparable(old, other), "changes": changes}


def _ms(row: Row | None) -> float | None:
    return None if row is None else row.median_ms
