"""`src/strobe/learn/measured.json`, which is part of the package as the committed results are not, and the figures on the
first page of the documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import committed
from benchmarks.pages.generated import marks, replace_between, update
from strobe.bench import claims
from strobe.bench.results import Row
from strobe.learn import measured
from strobe.measure.statistics import geometric_mean

MACHINE = "h200"
_CASE = "m2048-full-4k"  # of the suite `sweep`: 16 heads of 128 numbers, 4096 tokens, no mask
_FACTS = ("number", "title", "dtype", "ms", "tflops", "speed_up", "predicted", "against")


def excerpt(root: Path) -> dict[str, Any]:
    """Make the excerpt from the results that are committed in the checkout `root`."""
    folder = f"benchmarks/results/{MACHINE}"
    ladder = json.loads((root / folder / "ladder.json").read_text(encoding="utf-8"))
    runs = committed.runs(root)[MACHINE]
    sweep = [row for row in runs["sweep"].rows if row.case.label == _CASE and row.timed]
    if not sweep:
        raise ValueError(f"{root / folder / 'sweep.json'} has no timed row of the case {_CASE!r}")
    case = sweep[0].case.to_dict()
    grid = claims.duels(claims.selected(runs["grid36"].rows, "grid36"), "peer")
    ((ours, peer),) = {(a.provider, b.provider) for a, b in grid}
    return {
        "device": ladder["provenance"]["device"]["name"],
        "ladder": {
            "file": f"{folder}/ladder.json",
            "date": ladder["provenance"]["date"][:10],
            "method": ladder["method"],
            "shape": ladder["shape"],
            "rungs": [{name: row[name] for name in _FACTS} for row in ladder["rungs"]],
        },
        "attention": {
            "file": f"{folder}/sweep.json",
            "date": runs["sweep"].provenance["date"][:10],
            "case": {name: case[name] for name in ("heads", "len_q", "len_k", "dim", "mask", "dtype")},
            "flash": _fastest(sweep, "ours"),
            "standard": _fastest(sweep, "standard"),
        },
        "peer": {
            "file": f"{folder}/grid36.json",
            "ours": ours,
            "peer": peer,
            "cases": len(grid),
            "faster": round(geometric_mean([(b.ms or 0) / (a.ms or 1) for a, b in grid]), 4),
        },
    }


def _fastest(rows: list[Row], kind: str) -> dict[str, Any]:
    row = claims.fastest(rows, kind)
    assert row is not None
    return {"provider": row.provider, "ms": row.ms, "tflops": row.tflops}


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


def main(arguments: list[str], root: Path = committed.ROOT) -> int:
    return update(texts(root), root, "--write" in arguments)
