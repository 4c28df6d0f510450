"""What was measured on a GPU, for lessons on machines without one: an excerpt of the committed results.

`measured.json` is part of the package, `benchmarks/results` is not. `python -m strobe.learn.measured --write` makes the
one from the other; without `--write` it says whether the excerpt is out of date."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("measured.json")
MACHINE = "h200"
_CASE = "m2048-full-4k"  # of the suite `sweep`: 16 heads of 128 numbers, 4096 tokens, no mask
_FACTS = ("number", "title", "dtype", "ms", "tflops", "speed_up", "predicted", "against")


@functools.cache
def load() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def excerpt(root: Path) -> dict[str, Any]:
    """From the results that are committed in the checkout `root`."""
    results = root / "benchmarks" / "results" / MACHINE
    ladder, sweep = (json.loads((results / f"{name}.json").read_text(encoding="utf-8")) for name in ("ladder", "sweep"))
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
    }


def _fastest(rows: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    row = min((row for row in rows if row["kind"] == kind), key=_median)
    return {"provider": row["provider"], "ms": _median(row), "tflops": row["tflops"]}


def _median(row: dict[str, Any]) -> float:
    return row["timing"]["summary"]["median"]


def main(arguments: list[str], root: Path | None = None) -> int:
    root = root or Path(__file__).resolve().parents[3]
    wanted = json.dumps(excerpt(root), indent=1) + "\n"
    file = root / "src" / "strobe" / "learn" / FILE.name
    if file.is_file() and file.read_text(encoding="utf-8") == wanted:
        return 0
    if "--write" in arguments:
        file.write_text(wanted, encoding="utf-8")
        return 0
    print(f"{file.relative_to(root)} is out of date: python -m strobe.learn.measured --write")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
