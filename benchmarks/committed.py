"""Read the results committed below benchmarks/results, as the pages need them."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks import anchors as others
from benchmarks.anchors import Anchors
from strobe.bench import read_results
from strobe.bench.results import Results

ROOT = Path(__file__).resolve().parents[1]  # of the checkout
ANCHORS = "anchors.json"
RESULTS = Path("benchmarks", "results", "h200")
Machines = dict[str, dict[str, Results]]  # machine -> name of a file -> its results


def runs(root: Path) -> Machines:
    """Every file of results; what else lies there (the ladder, tiles, training, anchors) is left out. GPUs come first:
    people come for them."""
    found: dict[str, dict[str, Results]] = defaultdict(dict)
    paths = (root / "benchmarks" / "results").glob("*/*.json")
    for path in sorted(paths, key=lambda path: (path.parent.name.startswith("cpu-"), path.parent.name, path.stem)):
        run = _run(path, path.read_text(encoding="utf-8"))
        if run is not None:
            found[path.parent.name][path.stem] = run
    return dict(found)


@functools.lru_cache(maxsize=256)
def _run(path: Path, text: str) -> Results | None:
    """Pages ask for the same files again and again, and checking thousands of rows takes seconds. Nobody changes them."""
    return read_results.load(path) if json.loads(text).get("kind") == "strobe bench" else None


def anchors(root: Path) -> dict[str, Anchors]:
    """Machine -> what others reached there in other runs."""
    paths = sorted((root / "benchmarks" / "results").glob(f"*/{ANCHORS}"))
    return {path.parent.name: others.load(path) for path in paths}


def where(study: dict[str, Any]) -> str:
    """The machine of a study, and the commit in seven digits."""
    p = study["provenance"]
    return f"{p['device']['name'].removeprefix('NVIDIA ')}, commit {p['git']['commit'][:7]}"
