"""`src/strobe/learn/measured.json`, which is part of the package as the committed results are not, and the figures on the
first page of the documents."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from benchmarks.committed import ROOT
from benchmarks.pages.generated import marks, replace_between
from strobe.learn import measured

MACHINE = "h200"
_CASE = "m2048-full-4k"  # of the suite `sweep`: 16 heads of 128 numbers, 4096 tokens, no mask
_OURS, _PEER = "strobe-sm90", "torch-cudnn"
_FACTS = ("number", "title", "dtype", "ms", "tflops", "speed_up", "predicted", "against")


def excerpt(root: Path) -> dict[str, Any]:
    """From the results that are committed in the checkout `root`."""
    results = root / "benchmarks" / "results" / MACHINE
    ladder, sweep, grid = (
        json.loads((results / f"{name}.json").read_text(encoding="utf-8")) for name in ("ladder", "sweep", "grid36")
    )
    timed = [row for row in sweep["rows"] if row["case"]["label"] == _CASE and row.get("timing")]
    if not timed:
        raise ValueError(f"{results / 'sweep.json'} has no timed row of the case {_CASE!r}")
    case = timed[0]["case"]
    return {
        "device": ladder["provenance"]["device"]["name"],
        "ladder": {
            "file": f"benchmarks/results/{MACHINE}/ladder.json",
            "date": ladder["provenance"]["date"][:10],
            "method": ladder["method"],
            "shape": ladder["shape"],
            "rungs": [{name: row[name] for name in _FACTS} for row in ladder["rungs"]],
        },
        "attention": {
            "file": f"benchmarks/results/{MACHINE}/sweep.json",
            "date": sweep["provenance"]["date"][:10],
            "case": {name: case[name] for name in ("heads", "len_q", "len_k", "dim", "mask", "dtype")},
            "flash": _fastest(timed, "ours"),
            "standard": _fastest(timed, "standard"),
        },
        "peer": {"file": f"benchmarks/results/{MACHINE}/grid36.json"} | _over_peer(grid["rows"]),
    }


def _over_peer(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many times as fast as the peer, as a geometric mean over the cases that both have run."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["provider"] in (_OURS, _PEER) and row.get("timing"):
            times.setdefault(row["case"]["key"], {})[row["provider"]] = _median(row)
    ratios = [found[_PEER] / found[_OURS] for found in times.values() if len(found) == 2]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return {"ours": _OURS, "peer": _PEER, "cases": len(ratios), "faster": round(mean, 4)}


def _fastest(rows: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    row = min((row for row in rows if row["kind"] == kind), key=_median)
    return {"provider": row["provider"], "ms": _median(row), "tflops": row["tflops"]}


def _median(row: dict[str, Any]) -> float:
    return row["timing"]["summary"]["median"]


def facts(found: dict[str, Any]) -> str:
    """The first page's three figures, as HTML inside Markdown."""
    attention, peer = found["attention"], found["peer"]
    ratio = attention["standard"]["ms"] / attention["flash"]["ms"]
    case = f"{attention['case']['len_q']:,} tokens, {attention['case']['heads']} heads of {attention['case']['dim']}"
    standard = f"<code>{attention['standard']['provider']}</code>"
    lines = (
        (f"{peer['faster']:.2f} ×", f"as fast as cuDNN on an {found['device']}: mean of {peer['cases']} cases"),
        (f"{ratio:.1f} ×", f"as fast as {standard}, the fastest standard attention that ran beside it: {case}"),
        ("O(N)", "memory beyond inputs and output: one number per row"),
    )
    items = "\n".join(f"<li><b>{figure}</b>{text}</li>" for figure, text in lines)
    return f'<ul class="facts">\n{items}\n</ul>\n'


def texts(root: Path) -> dict[Path, str]:
    """Path -> what it should hold."""
    found = excerpt(root)
    page = root / "docs" / "index.md"
    excerpt_file = root / "src" / "strobe" / "learn" / measured.FILE.name
    return {
        excerpt_file: json.dumps(found, indent=1) + "\n",
        page: replace_between(page.read_text(encoding="utf-8"), *marks("speed"), facts(found)),
    }


def main(arguments: list[str], root: Path | None = None) -> int:
    root = root or ROOT
    stale = {p: t for p, t in texts(root).items() if not p.is_file() or p.read_text(encoding="utf-8") != t}
    for path, text in stale.items():
        if "--write" in arguments:
            path.write_text(text, encoding="utf-8")
        else:
            print(f"{path.relative_to(root)} is out of date: python -m benchmarks.pages --write")
    return 1 if stale and "--write" not in arguments else 0
