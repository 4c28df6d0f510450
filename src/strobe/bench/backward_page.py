"""The numbers of docs/design/hopper-backward.md, from the committed results: what the backward reaches, and what ways to
wait for a turn cost."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from strobe.bench import claims, reading, studies
from strobe.bench.results import Results
from strobe.measure import units
from strobe.measure.method import SUSTAINED
from strobe.measure.statistics import geometric_mean

PAGE = Path("docs/design/hopper-backward.md")
BEGIN, END = "<!-- measured: begin (python -m strobe.bench.docs --write) -->", "<!-- measured: end -->"
OURS, CUDNN = "strobe-sm90", "torch-cudnn"
_FOLDER = Path("benchmarks/results/h200")


def speeds(study: dict[str, Any], what: str, **where: Any) -> list[float]:
    """With `what` over without, in the rows of a study that time both."""
    rows = [row for row in study["rows"] if what in row.get("ms", ())]
    return [row["ms"]["plain"] / row["ms"][what] for row in rows if all(row[key] == x for key, x in where.items())]


def block(root: Path) -> str:
    paths = [root / _FOLDER / f"{name}.json" for name in ("grid36-backward", "grid36-backward-sustained", "gqa-both")]
    study = studies.load(root, "training")
    if study is None or not all(path.exists() for path in paths):
        return ""
    grid, sustained, grouped = map(reading.load, paths)
    ahead = claims.ratios(grid, "grid36", OURS, CUDNN, "backward")
    lines = [
        "cuDNN's time over ours on an H200, in short turns through `torch.autograd.grad`, bfloat16, 16,384 tokens, "
        f"heads × dim = 2,048; geometric mean {geometric_mean(list(ahead.values())):.2f}, least "
        f"{min(ahead.values()):.2f} (`grid36-backward.json` in `{_FOLDER}`):",
        "",
        *_cells(grid, ahead),
        "",
        "Beside the grid:",
        "",
        "| what | measured | data |",
        "|---|---|---|",
    ]
    lines += [f"| {what} | {said} | `{name}.json` |" for what, said, name in _facts(grid, sustained, grouped, study)]
    return "\n".join(lines) + "\n"


def _cells(grid: Results, ahead: dict[str, float]) -> list[str]:
    cases = {row.case.key: row.case for row in grid.rows if row.case.key in ahead}
    lengths = sorted({case.len_k for case in cases.values()})
    lines = [f"| head dim, mask | {' | '.join(map(units.length, lengths))} |", "|---" * (len(lengths) + 1) + "|"]
    for line in dict.fromkeys((case.dim, case.mask.name) for case in cases.values()):
        found = {c.len_k: f"{ahead[key]:.2f}" for key, c in cases.items() if (c.dim, c.mask.name) == line}
        lines.append(f"| {line[0]}, {line[1]} | {' | '.join(found.get(n, '') for n in lengths)} |")
    return lines


def _facts(grid: Results, sustained: Results, grouped: Results, study: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(what, what was found, where)."""
    long = geometric_mean(list(claims.ratios(sustained, "grid36", OURS, CUDNN, "backward", SUSTAINED).values()))
    energy = geometric_mean(list(claims.energy_ratios(sustained, "grid36", OURS, CUDNN, "backward").values()))
    ampere = geometric_mean(list(claims.ratios(grid, "grid36", "strobe-sm80", "torch-flash", "backward").values()))
    memory = claims.memory_in_q(claims.selected(grid.rows, "grid36", "backward"))[OURS]
    both = list(claims.ratios(grouped, "gqa", OURS, CUDNN, "both").values())
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
        ("dropout 0.1, head dim 128, of the speed without", ", ".join(dropout), "studies/training"),
        ("CPU time of a small forward and backward", f"{cpu:.2f} × PyTorch's", "studies/training"),
    ]


def turns_block(root: Path) -> str:
    study = studies.load(root, "turns-tried")
    if study is None:
        return ""
    cells = [(dim, mask) for dim in (64, 128) for mask in ("full", "causal")]
    lines = ["| the turn is | " + " | ".join(f"{dim}, {mask}" for dim, mask in cells) + " |"]
    lines += ["|---" * (len(cells) + 1) + "|"]
    for name in dict.fromkeys(row["variant"] for row in study["rows"]):
        found = (speeds(study, "deterministic", variant=name, dim=dim, mask=mask) for dim, mask in cells)
        lines.append(f"| {name} | {' | '.join(f'{100 * (1 - statistics.median(x)):.0f} %' for x in found)} |")
    return "\n".join(lines) + "\n"


def _range(found: list[float]) -> str:
    return f"{min(found):.2f} to {max(found):.2f}"
