"""The tables of docs/design/hopper-forward.md: what was tried on the Hopper forward kernel and what it brought, from the
measurements committed beside the benchmark's results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import committed
from benchmarks.pages import tried
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
# Ideas that were timed later: what is tried, and its name in the study.
CLUSTERS = (
    ("Clusters of two blocks share K and V", "clusters of two share K and V"),
    ("Bound: half the loads of K and V", "bound: half the loads of K and V"),
    ("The kernel in use, timed again beside them", tried.AGAIN),
)
DROPOUT = (
    ("Dropout, bound: nothing is dropped", "bound: nothing is dropped"),
    ("Dropout: hashes of fewer instructions", "fewer instructions"),
    ("Dropout: hashes beside Q K^T", "beside Q K^T"),
    ("The same, of fewer instructions", "beside Q K^T, fewer instructions"),
    ("The same, with the tile of no dropout", "beside Q K^T, fewer instructions, the tile of no dropout"),
    ("The same, with two consumers", "beside Q K^T, fewer instructions, two consumers"),
    ("Dropout: hashes among the exponentials, of fewer instructions", "among the exponentials, fewer instructions"),
)
FETCHES = (
    ("The L2 fetches 128 bytes of K and V at a time, not 256", "k and v"),
    ("The same, of Q", "q and do"),
    ("The same, of Q, K, V and O", "all"),
    ("The kernel in use, timed again beside them", tried.AGAIN),
)
DIMS = (64, 128, 256)
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
    if bounds is not None:
        lines += [table_row(title, tried.gains(bounds, name), False) for name, title in BOUNDS]
    return "\n".join([*lines, *later(root), *compiled(root)]) + "\n"


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


def later(root: Path) -> list[str]:
    """The ideas that were timed last, by head dim."""
    of = ("clusters", "tiles-and-row-sums", "dropout-ideas", "promotions")
    clusters, tiles, dropout, promotions = (committed.study(root, name) for name in of)
    if clusters is None or tiles is None or dropout is None or promotions is None:
        return []
    lines = [
        "",
        f"Timed later ({committed.where(clusters)}), by head dim; range over masks and lengths. The rule: an idea is kept if "
        "it brings at least 1 % where it is for and loses nowhere more than 1 %.",
        "",
        "| tried | timed | " + " | ".join(map(str, DIMS)) + " | kept |",
        "|---" * (len(DIMS) + 3) + "|",
    ]
    lines += [_row(title, clusters, name, method=m) for title, name in CLUSTERS for m in tried.METHODS]
    lines += _tiles(tiles)
    lines += [_row(title, dropout, name) for title, name in DROPOUT]
    fetches = tried.fetches(promotions, "forward")
    return lines + [_row(title, fetches, name) for title, name in FETCHES]


def _row(title: str, study: tried.Study, name: str, **where: Any) -> str:
    methods = {row["method"] for row in study["rows"] if all(row[key] == x for key, x in where.items())}
    timed = " and ".join(said for method, said in tried.METHODS.items() if method in methods)
    cells = (tried.brought(tried.gains(study, name, dim=dim, **where)) for dim in DIMS)
    return f"| {title} | {timed} | {' | '.join(cells)} | {'' if name == tried.AGAIN else 'no'} |"


def _tiles(study: tried.Study) -> list[str]:
    """The best of the other tiles, and row sums by products, which take the place of additions at head dim 64."""
    best, count, lines = {}, 0, []
    for dim in DIMS:
        others = [name for name in tried.names(study, of="tiles", dim=dim) if name != tried.IN_USE]
        count += len(others)
        if others:
            found = {name: tried.gains(study, name, of="tiles", dim=dim) for name in others}
            best[dim] = max(found.items(), key=lambda item: geometric_mean(item[1]))
    which = ", ".join(f"{name.split()[0]} at {dim}" for dim, (name, _) in best.items())
    cells = (tried.brought(best[dim][1]) if dim in best else "" for dim in DIMS)
    lines.append(f"| The best of {count} other tiles: {which} | sustained | {' | '.join(cells)} | no |")
    titles = (
        "Row sums by products with a column of ones",
        "With it: 24 exponentials before the wait",
        "With it: an eighth of the exponentials by FMAs",
    )
    ideas = [name for name in tried.names(study, of="row sums") if name != tried.IN_USE]
    return lines + [_row(title, study, name, of="row sums") for title, name in zip(titles, ideas, strict=True)]


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
