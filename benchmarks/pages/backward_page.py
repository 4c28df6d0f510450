"""The numbers of docs/design/hopper-backward.md, from the committed results: what the backward reaches, what ways to wait
for a turn cost, what other sums of dQ brought, and how long the stages of its loop take."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks import committed
from benchmarks.pages import comparisons, tried
from benchmarks.pages.results_page import cells_table
from benchmarks.studies import training_costs
from strobe.bench import claims, read_results
from strobe.bench.results import Results
from strobe.measure.method import SUSTAINED
from strobe.measure.statistics import geometric_mean

PAGE = Path("docs/design/hopper-backward.md")
BEGIN, END = "<!-- measured: begin (python -m benchmarks.pages --write) -->", "<!-- measured: end -->"
TURNS_BEGIN, TURNS_END = "<!-- turns: begin (python -m benchmarks.pages --write) -->", "<!-- turns: end -->"
SUMS_BEGIN, SUMS_END = "<!-- sums: begin (python -m benchmarks.pages --write) -->", "<!-- sums: end -->"
STAGES_BEGIN, STAGES_END = "<!-- stages: begin (python -m benchmarks.pages --write) -->", "<!-- stages: end -->"
BY_TURNS_UP_TO = 1024  # keys, when other sums were timed
_ANY_ORDER, _TURNS = "sums in any order", "by turns"
SUMS = (  # and how the idea is called in the study
    ("in any order", _ANY_ORDER),
    ("by turns", _TURNS),
    ("by turns, for which another warp waits", "by turns, another warp waits for them"),
    ("in any order; the last block of keys rounds", "the last block rounds"),
)
FETCHES = (
    ("K and V", "k and v"),
    ("Q and dO", "q and do"),
    ("all tensors", "all"),
    ("the kernels in use, timed again", tried.AGAIN),
)
ROUNDS = "stamped, the last block rounds"  # which takes longer than what is in use without stamps, too
ORDERS = {  # of the sums, by the name of what is stamped
    "stamped": "any order",
    "stamped, by turns": "by turns",
    ROUNDS: "the last block rounds",
}
STAGES = (  # of a consumer: a column, and what it adds up
    ("a block of 64 queries", ("a block of queries",)),
    ("waits for Q and dO", ("wait for Q", "wait for dO")),
    ("dP lands, P and dS", ("dP lands, P and dS",)),
    ("dQ handed over", ("hand dQ over",)),
)
OURS, CUDNN = "strobe-sm90", "torch-cudnn"


def speeds(study: dict[str, Any], what: str, **where: Any) -> list[float]:
    """With `what` over without, in the rows of a study that time both."""
    rows = [row for row in study["rows"] if what in row.get("ms", ())]
    return [row["ms"]["plain"] / row["ms"][what] for row in rows if all(row[key] == x for key, x in where.items())]


def block(root: Path) -> str:
    names = ("grid36-backward", "grid36-backward-sustained", "gqa-both")
    paths = [root / committed.RESULTS / f"{name}.json" for name in names]
    study = committed.study(root, "training")
    if study is None or not all(path.exists() for path in paths):
        return ""
    grid, sustained, grouped = map(read_results.load, paths)
    ahead = comparisons.ratios(grid, "grid36", OURS, CUDNN, "backward")
    cases = {row.case.key: row.case for row in grid.rows if row.case.key in ahead}
    lines = [
        "cuDNN's time over ours on an H200, in short turns through `torch.autograd.grad`, bfloat16, 16,384 tokens, "
        f"heads × dim = 2,048; geometric mean {_mean(ahead):.2f}, least "
        f"{min(ahead.values()):.2f} (`grid36-backward.json` in `{committed.RESULTS}`):",
        "",
        *cells_table(cases, {key: f"{ratio:.2f}" for key, ratio in ahead.items()}),
        "",
        "Beside the grid:",
        "",
        "| what | measured | data |",
        "|---|---|---|",
    ]
    lines += [f"| {what} | {said} | `{name}.json` |" for what, said, name in _facts(grid, sustained, grouped, study)]
    return "\n".join(lines) + "\n"


def _facts(grid: Results, sustained: Results, grouped: Results, study: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(what, what was found, where)."""
    long = _mean(comparisons.ratios(sustained, "grid36", OURS, CUDNN, "backward", SUSTAINED))
    energy = _mean(comparisons.energy_ratios(sustained, "grid36", OURS, CUDNN, "backward"))
    ampere = _mean(comparisons.ratios(grid, "grid36", "strobe-sm80", "torch-flash", "backward"))
    memory = claims.memory_in_q(claims.selected(grid.rows, "grid36", "backward"))[OURS]
    both = list(comparisons.ratios(grouped, "gqa", OURS, CUDNN, "both").values())
    (cpu,) = (row["us"]["strobe"] / row["us"]["sdpa"] for row in study["rows"] if row["what"] == "cpu")
    causal = speeds(study, "grouped", dim=128, mask="causal")
    others = [x for x in speeds(study, "grouped") if x not in causal]
    dropout = (
        f"{name} {_range(speeds(study, 'dropout', dim=128, **{'pass': name}))}" for name in ("forward", "backward")
    )
    return [
        (
            "the grid, sustained",
            f"{long:.2f} × cuDNN's speed, {energy:.2f} × its work per joule",
            "grid36-backward-sustained",
        ),
        ("the Ampere kernel, same GPU and grid", f"{ampere:.2f} × PyTorch's flash backend", "grid36-backward"),
        (
            "memory beyond inputs, output and gradients, same grid",
            f"at most {memory:.2f} × the size of q",
            "grid36-backward",
        ),
        ("forward and backward, grouped heads", f"{_range(both)} × cuDNN", "gqa-both"),
        ("`deterministic=True`, of the speed without", _range(speeds(study, "deterministic")), "studies/training"),
        (
            "64 heads on 8, of the speed of 64 on 64",
            f"head dim 128, causal: {_range(causal)}; others: {_range(others)}",
            "studies/training",
        ),
        (
            f"dropout {training_costs.DROPOUT}, head dim 128, of the speed without",
            ", ".join(dropout),
            "studies/training",
        ),
        ("CPU time of a small forward and backward", f"{cpu:.2f} × PyTorch's", "studies/training"),
    ]


def turns_block(root: Path) -> str:
    """What each way to wait for a turn costs."""
    study = committed.study(root, "turns-tried")
    if study is None:
        return ""
    (length,) = {row["length"] for row in study["rows"]}
    cells = list(dict.fromkeys((row["dim"], row["mask"]) for row in study["rows"]))
    table = ["| the turn is | " + " | ".join(f"{dim}, {mask}" for dim, mask in cells) + " |"]
    table += ["|---" * (len(cells) + 1) + "|"]
    runs = set()
    for name in dict.fromkeys(row["variant"] for row in study["rows"]):
        found = [speeds(study, "deterministic", variant=name, dim=dim, mask=mask) for dim, mask in cells]
        runs |= set(map(len, found))
        table.append(f"| {name} | {' | '.join(f'{100 * (1 - statistics.median(x)):.0f} %' for x in found)} |")
    head = (
        f"How much slower than sums in any order, at {length:,} keys: medians of {min(runs)} to {max(runs)} runs in which "
        "both alternate."
    )
    return "\n".join([head, "", *table]) + "\n"


def sums_block(root: Path) -> str:
    """What other sums of dQ brought, and smaller fetches of the L2."""
    study, promotions = committed.study(root, "backward-sums"), committed.study(root, "promotions")
    if study is None or promotions is None:
        return ""
    timed = [row for row in study["rows"] if "ms" in row]
    refused = {(row["dim"], row["tile"]): row["reason"] for row in study["rows"] if "reason" in row}
    parts = {
        f"{dim}, {where}": {**study, "rows": [r for r in timed if r["dim"] == dim and _is_short(r) == short]}
        for dim in dict.fromkeys(row["dim"] for row in timed)
        for short, where in ((True, f"up to {BY_TURNS_UP_TO:,} keys"), (False, "longer"))
    }
    lines = [
        f"Speed over that of the kernels in use, which take turns up to {BY_TURNS_UP_TO:,} keys, in short turns "
        f"({committed.where(study)}), by head dim: geometric mean, and range over masks and lengths.",
        "",
        "| sums of dQ | " + " | ".join(parts) + " |",
        "|---" * (len(parts) + 1) + "|",
    ]
    for title, name in SUMS:
        cells = []
        for part in parts.values():
            reason = refused.get((part["rows"][0]["dim"], name))
            if name == (_TURNS if _is_short(part["rows"][0]) else _ANY_ORDER):
                cells.append("in use")
            else:
                cells.append(f"not timed: {reason}" if reason else tried.brought(tried.gains(part, name)))
        lines.append(f"| {title} | {' | '.join(cells)} |")
    fetches = tried.fetches(promotions, "backward")
    said = "; ".join(f"{what}: {tried.brought(tried.gains(fetches, name))}" for what, name in FETCHES)
    lines += ["", f"If the L2 fetches 128 bytes at a time instead of 256, in short turns and sustained: {said}."]
    return "\n".join(lines) + "\n"


def _is_short(row: dict[str, Any]) -> bool:
    return int(row["case"].split(", ")[1]) <= BY_TURNS_UP_TO


def stages_block(root: Path) -> str:
    """Cycles of the stages of the main loop."""
    study, rounds = committed.study(root, "backward-stages"), committed.study(root, "backward-stages-rounds")
    if study is None or rounds is None:
        return ""
    lines = [
        f"Cycles of a block of queries by stamps ({committed.where(study)}), head dim 128, causal; of both consumers where "
        "there are two numbers. Busy: the multiprocessors, of the time until the last one is done. Stamped: the time of a "
        "call with stamps over that of the kernels in use with the same order.",
        "",
        "| keys, heads | sums of dQ | " + " | ".join(name for name, _ in STAGES) + " | busy | stamped |",
        "|---" * (len(STAGES) + 4) + "|",
    ]
    for row in [*study["rows"], *rounds["rows"]]:
        _, length, _, heads = row["case"].split(", ")
        consumers = [row["cycles"][f"consumer {i}"] for i in range(2)]
        cells = [", ".join(f"{sum(c[stage] for stage in parts):,.0f}" for c in consumers) for _, parts in STAGES]
        cells += [f"{100 * row['cycles']['a multiprocessor']['busy']:.1f} %"]
        cells += ["" if row["idea"] == ROUNDS else f"{row['ms']['stamped'] / row['ms']['in use']:.2f}"]
        lines.append(f"| {int(length):,}, {heads} | {ORDERS[row['idea']]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _mean(ratios: dict[str, float]) -> float:
    return geometric_mean(list(ratios.values()))


def _range(found: list[float]) -> str:
    return f"{min(found):.2f} to {max(found):.2f}"
