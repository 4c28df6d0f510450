"""Results in, one self-contained HTML page out."""

from __future__ import annotations

import dataclasses
import html as escaping
import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from strobe.bench.claims import merged
from strobe.bench.compare import comparable, compare
from strobe.bench.conclusions import conclusions
from strobe.bench.names import PASS_TITLES, PASSES, SUITES
from strobe.bench.results import Results, Row
from strobe.measure.method import SUMMARIES, TITLES
from strobe.measure.palette import KINDS, styles
from strobe.measure.provenance import busy_machine

_HERE = Path(__file__).parent
_PARTS = {"STYLE": "page.css", "CHARTS": "charts.js", "SCRIPT": "page.js"}


def write(runs: list[Results], directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "index.html"
    path.write_text(html(runs), encoding="utf-8")
    return path


def html(runs: list[Results]) -> str:
    if not runs:
        raise ValueError("runs is empty; at least one result is needed")
    data = json.dumps(page_data(runs), separators=(",", ":"), allow_nan=False)
    data = data.replace("<", "\\u003c")  # no text in it can end, or begin, a script or a comment
    parts = {f"/*{mark}*/": (_HERE / name).read_text(encoding="utf-8") for mark, name in _PARTS.items()}
    parts |= {"/*DATA*/": data, "TITLE": f"Attention on {escaping.escape(runs[0].device)}"}
    pieces = re.split("(" + "|".join(map(re.escape, parts)) + ")", (_HERE / "page.html").read_text(encoding="utf-8"))
    return "".join(parts.get(piece, piece) for piece in pieces)  # in one go: no mark inside a part is replaced


def page_data(runs: list[Results]) -> dict[str, Any]:
    """Return the data that the script draws from."""
    whole, compared = together(runs)
    return {"run": _run(whole), "compared": [_comparison(whole, run) for run in compared]}


def together(runs: list[Results]) -> tuple[Results, list[Results]]:
    """Runs of the first one's device as one run, and those that measured something of it again."""
    first, parts = runs[0], [runs[0]]
    compared: list[Results] = []
    seen = {row.identity for row in first.rows}
    for run in runs[1:]:
        again = any(row.identity in seen for row in run.rows)
        same_device = first.provenance["device"]["name"] == run.provenance["device"]["name"]
        (compared if again or not same_device else parts).append(run)
        seen |= {row.identity for row in run.rows}
    return merged(parts), compared


def _run(run: Results) -> dict[str, Any]:
    many = set(families([row for row in run.rows if row.case.measure == "time"]))
    drawn = styles([(row.provider, row.kind) for row in run.rows if row.timed])
    return {
        "provenance": run.provenance,
        "method": run.method,
        "ceilings": vars(run.ceilings),
        "conclusions": {suite: {p: conclusions(run, suite, [p]) for p in PASSES} for suite in run.suites()},
        "passes": {p: PASS_TITLES[p] for p in PASSES if any(row.case.direction == p for row in run.rows)},
        "suites": {suite: SUITES[suite][0] if suite in SUITES else "" for suite in run.suites()},
        "methods": {method: [TITLES[method], SUMMARIES[method]] for method in run.methods()},
        "kinds": KINDS,
        "styles": {name: dataclasses.asdict(style) for name, style in drawn.items()},
        "warnings": _warnings(run),
        "rows": [flat(row, _panel(row, many)) for row in run.rows],
    }


# ---- panels: cases that differ in length only


def family(row: Row) -> str:
    """Return the title of the panel that shows the row: "head dim 128, causal"."""
    c = row.case
    shape = c.model or (f"model dim {c.model_dim}" if c.suite == "sweep" else f"head dim {c.dim}")
    heads = "" if c.group == 1 or c.model else f"{c.heads} heads on {c.heads_k}"
    few = "" if c.len_q == c.len_k else f"{c.len_q} {'query' if c.len_q == 1 else 'queries'}, batch {c.batch}"
    parts = [shape, heads, "no mask" if c.mask.name == "full" else c.mask.name, few]
    parts += [c.dtype if c.dtype != "bfloat16" else "", PASS_TITLES[c.direction] if c.direction != "forward" else ""]
    return ", ".join(part for part in parts if part)


def families(rows: list[Row]) -> dict[str, list[Row]]:
    """Title of a panel -> its rows; only those with more than one length."""
    panels: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        panels[family(row)].append(row)
    return {title: same for title, same in panels.items() if len({r.case.len_k for r in same}) > 1}


def _panel(row: Row, families: set[str]) -> str:
    """The title of the figure that shows a row: of a family of lengths, or of the case."""
    return family(row) if row.case.measure == "time" and family(row) in families else row.case.title


def _warnings(run: Results) -> list[str]:
    warnings = [] if run.complete else ["The run was stopped before its end; what it had is shown."]
    throttled = sorted({reason for row in run.rows if row.clock for reason in row.clock.throttle})
    warnings += [f"While it ran the GPU reported: {', '.join(throttled)}."] if throttled else []
    warnings += [warning for warning in [busy_machine(run.provenance)] if warning]
    wrong = sum(row.status in ("wrong", "failed") for row in run.rows)
    return warnings + ([f"{wrong} rows are wrong or failed; see the table of every row."] if wrong else [])


def flat(row: Row, panel: str) -> dict[str, Any]:
    case, summary, energy = row.case, row.timing.summary if row.timing else None, row.energy
    fields = {
        "suite": case.suite,
        "pass": case.direction,
        "key": case.key,
        "title": case.title,
        "panel": panel,
        "length": case.len_k,
        "dtype": case.dtype,
        "measure": case.measure,
        "scores": case.score_elements(),
        "provider": row.provider,
        "kind": row.kind,
        "method": row.method,
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
        "intensity": row.flops / row.ideal_bytes if row.flops and row.ideal_bytes else None,
        "error": row.error.relative if row.error else None,
        "clock": row.clock.sm_mhz if row.clock else None,
        "watts": energy.watts if energy else None,
        "joules": energy.joules_per_tflop if energy else None,
        "per_tokens": energy.joules_per_1000_tokens if energy else None,
        "timed": row.timed,
        "ms": row.ms,
        "tokens_per_s": row.tokens_per_s,
    }
    if summary is not None:
        fields |= {"low": summary.low, "high": summary.high, "n": summary.n}
    return {name: _short(value) for name, value in fields.items() if value is not None}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def _comparison(old: Results, other: Results) -> dict[str, Any]:
    changes = [
        {
            "key": c.key,
            "provider": c.provider,
            "method": TITLES[c.method],
            "kind": c.kind,
            "ratio": _short(c.ratio),
            "old": _short(None if c.old is None else c.old.ms),
            "new": _short(None if c.new is None else c.new.ms),
        }
        for c in compare(old, other)
        if c.old is not None and (c.old.timed or (c.new is not None and c.new.timed))
    ]
    return {"provenance": other.provenance, "problem": comparable(old, other), "changes": changes}
