"""The speed of functions, biases, masks and unusual inputs in docs/variants.md, from the suite `variants`."""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks import committed
from strobe.bench.results import Results

BEGIN, END = "<!-- variants: begin (python -m benchmarks.pages --write) -->", "<!-- variants: end -->"
PAGE = Path("docs", "variants.md")
OURS, PLAIN = "strobe-sm90", "causal"
PEERS = {"flex": "FlexAttention", "torch-efficient": "efficient"}
FILES = {"forward": "variants", "backward": "variants-backward"}
FUNCTIONS = ("alibi", "tanh", "relative-table", "documents", "prefix", "window", "neighbourhood", "decay")

Times = dict[str, dict[str, float]]  # case -> provider -> ms


def times(run: Results) -> Times:
    found: Times = {}
    for row in run.rows:
        if row.timed and row.ms is not None:
            found.setdefault(row.case.label, {})[row.provider] = row.ms
    return {label: ms for label, ms in found.items() if OURS in ms}


def block(root: Path) -> str:
    there = committed.runs(root).get(committed.RESULTS.name, {})
    runs = {direction: there[name] for direction, name in FILES.items() if name in there}
    if not runs:
        return ""
    found = {direction: times(run) for direction, run in runs.items()}
    run = next(iter(runs.values()))
    lines = [
        f"Ours on an {run.provenance['device']['name'].removeprefix('NVIDIA ')}, commit {run.provenance['git']['commit']}, "
        "and the times of others over it, in short turns. FlexAttention is compiled by torch.compile; efficient is PyTorch's "
        "memory-efficient backend, which takes functions as a bias or a mask in memory.",
        f"Data: {', '.join(f'`{FILES[direction]}.json`' for direction in runs)}.",
        "",
        f"| case | {' | '.join(f'{d}, ms | {shown}' for d in runs for shown in [' | '.join(PEERS.values())])} |",
        f"|---{'|---' * (1 + len(PEERS)) * len(runs)}|",
    ]
    for label in dict.fromkeys(label for ms in found.values() for label in ms):
        cells = [cell for direction in runs for cell in _cells(found[direction].get(label, {}))]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    lines.append(f"| geometric mean of the eight functions | {' | '.join(c for d in runs for c in _means(found[d]))} |")
    return "\n".join([*lines, "", *_beside_plain(found), ""])


def _cells(ms: dict[str, float]) -> list[str]:
    if not ms:
        return ["–"] * (1 + len(PEERS))
    return [f"{ms[OURS]:.2f}", *(f"{ms[p] / ms[OURS]:.2f} ×" if p in ms else "–" for p in PEERS)]


def _means(found: Times) -> list[str]:
    """Over those functions that the peer has, if it has them all."""
    cells = [""]
    for peer in PEERS:
        of = [ms for label, ms in found.items() if label.startswith(FUNCTIONS) and label.endswith("8k")]
        ratios = [ms[peer] / ms[OURS] for ms in of if peer in ms]
        whole = ratios and len(ratios) == len(FUNCTIONS)
        cells.append(f"**{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f} ×**" if whole else "")
    return cells


def _beside_plain(found: dict[str, Times]) -> list[str]:
    """What a score costs beside the same mask without one."""
    lines = ["| time over that of a plain causal mask | " + " | ".join(found) + " |", "|---" * (1 + len(found)) + "|"]
    for label in next(iter(found.values())):
        name, _, shape = label.partition("-")
        if name == PLAIN or not all({label, f"{PLAIN}-{shape}"} <= ms.keys() for ms in found.values()):
            continue
        ratios = [f"{ms[label][OURS] / ms[f'{PLAIN}-{shape}'][OURS]:.2f}" for ms in found.values()]
        lines.append(f"| {label} | {' | '.join(ratios)} |")
    return lines if len(lines) > 2 else []
