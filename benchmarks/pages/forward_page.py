"""The tables of docs/design/hopper-forward.md: what was tried on the Hopper forward kernel and what it brought, from the
measurements committed beside the benchmark's results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import committed
from strobe.measure.statistics import geometric_mean, percentile

PAGE = Path("docs/design/hopper-forward.md")
BEGIN, END = "<!-- ledger: begin (python -m benchmarks.pages --write) -->", "<!-- ledger: end -->"
# What is tried, and how the idea's name begins in hopper-forward.json.
TRIED = (
    ("Causal sections of at least 16 heads", "Causal sections"),
    ("The maximum is guessed", "The row maximum is guessed"),
    ("With it: more exponentials beside P V (`hold`)", "With the guess: hold"),
    ("With it: ping-pong, head dim 128", "With the guess and hold: ping-pong"),
    ("With it: ping-pong, head dims 64 and 256", "The same at head dims 64 (hold = 8)"),
    ("Split-KV: all threads add up the parts, by columns", "With split keys, one query (full) or 512 (causal): parts"),
    ("Launches of a graph zero their counters once", "In a graph, one query"),
    ("O in registers that PTX declares", "O in registers that PTX declares"),
    ("The next tile's first scores beside the last P V", "The next tile's first scores"),
    ("The next tile's Q, K and V prefetched into the L2", "The next tile's Q, first K"),
    ("An eighth of the exponentials on the FMA pipe", "An eighth of the exponentials on the FMA pipe, to 2e-7"),
    ("All of Q in registers", "All of Q stays"),
    ("One loop for all key blocks, in every kernel", "One loop for all key blocks"),
)
# What is left out of the kernel to see what saving it could bring at most, in ideas-sustained.json.
BOUNDS = (
    ("bound: half the loads of K and V", "Bound: half the loads of K and V"),
    ("bound: no loads of K and V", "Bound: no loads of K and V"),
)


def block(root: Path) -> str:
    found = committed.study(root, "hopper-forward")
    if found is None:
        return ""
    lines = [
        f"Speed with an idea over speed without it ({found['gpu']}): geometric mean, and range over head dims, masks and "
        "lengths. Bounds: sustained, with wrong results.",
        "",
        "| tried | brought | kept |",
        "|---|---|---|",
    ]
    lines.append(table_row("Tiles taken from a counter, not dealt out in rounds; causal", _counter(found), True))
    for title, beginning in TRIED:
        (idea,) = (e for e in found["experiments"] if e["idea"].startswith(beginning))
        lines.append(table_row(title, [x for row in idea["rows"] for x in row["gain"]], idea["kept"]))
    bounds = committed.study(root, "ideas-sustained")
    for name, title in BOUNDS if bounds else ():
        lines.append(table_row(title, over_the_kernel_in_use(bounds, name), False))
    return "\n".join([*lines, *compiled(root)]) + "\n"


def table_row(title: str, gains: list[float], kept: bool) -> str:
    brought = f"{geometric_mean(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})"
    return f"| {title} | {brought} | {'yes' if kept else 'no'} |"


def _counter(found: dict[str, Any]) -> list[float]:
    """The best tile of the second run over that of the first, each as speed over cuDNN's in the same run."""
    dealt, counted = (
        {
            dim: max(
                geometric_mean(row["vs_cudnn"]) for row in stage["rows"] if (row["dim"], row["mask"]) == (dim, "causal")
            )
            for dim in (64, 128, 256)
        }
        for stage in found["stages"][:2]
    )
    return [counted[dim] / dealt[dim] for dim in dealt]


def over_the_kernel_in_use(study: Any, name: str) -> list[float]:
    """Of every case: time of the kernel in use over that of an idea."""
    rows = [row for row in study["rows"] if "ms" in row]
    used = {(row["dim"], row["case"]): row["ms"] for row in rows if row["tile"] == "in use"}
    return [used[row["dim"], row["case"]] / row["ms"] for row in rows if row["tile"] == name]


def compiled(root: Path) -> list[str]:
    """How long NVRTC takes for a variant, on each machine that has compiled all of them."""
    lines: list[str] = []
    for path in sorted((root / "benchmarks" / "results").glob("*/studies/variants.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        seconds, machine = sorted(row["seconds"] for row in found["rows"]), found["provenance"]
        lines.append(
            f"- {machine['host_cpu']}, {machine['host_cores']} cores: {len(seconds)} variants in bf16, median "
            f"{percentile(seconds, 0.5):.2f} s, longest {seconds[-1]:.2f} s; "
            f"{sum(row['spills'] > 0 for row in found['rows'])} spill."
        )
    return ["", "Seconds that NVRTC takes for a forward kernel, two at a time:", "", *lines] if lines else []
