"""Times of other people's attention that were taken in other runs, over a base that both runs have.

Peers that take long to build are not in every run of `strobe bench`. A file of anchors holds what they reached beside a
common peer (cuDNN), by `triton.testing.do_bench`. Only ratios to that peer are compared, and only with ours by the same
method: the runs were not the same."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strobe.bench import claims
from strobe.bench.results import Row
from strobe.measure.method import DO_BENCH
from strobe.measure.statistics import geometric_mean

SUITE = "grid36"
BASE = "torch-cudnn"  # our name of the common peer
BEST = "the best of these in each case"
Cell = tuple[int, str, int]  # head dim, mask, length


@dataclass(frozen=True)
class Peer:
    title: str
    built: str
    base: str  # in which column the common peer of its run stands


@dataclass(frozen=True)
class Anchors:
    device: str
    provenance: dict[str, str]
    peers: dict[str, Peer]
    tflops: dict[str, dict[Cell, dict[str, float]]]  # pass -> case -> column

    def over_base(self, direction: str) -> dict[str, dict[Cell, float]]:
        """Title of a peer -> case -> how many times as fast as the common peer of its run. The last one is the best of
        each case, the common peer included."""
        cells = self.tflops.get(direction, {})
        found = {
            peer.title: {cell: of[name] / of[peer.base] for cell, of in cells.items()}
            for name, peer in self.peers.items()
        }
        return found | {BEST: {cell: max(1.0, *(ratios[cell] for ratios in found.values())) for cell in cells}}


@dataclass(frozen=True)
class Line:
    """A line of the comparison: geometric means over the common peer, by pass."""

    title: str
    built: str
    means: dict[str, float]
    ahead: dict[str, tuple[int, int]]  # of ours: (cases in which it is ahead of the best peer, cases)


def load(path: Path) -> Anchors:
    data = json.loads(path.read_text(encoding="utf-8"))
    tflops: dict[str, dict[Cell, dict[str, float]]] = {}
    for row in data["rows"]:
        for direction in ("forward", "backward"):
            tflops.setdefault(direction, {})[row["dim"], row["mask"], row["length"]] = row[direction]
    peers = {name: Peer(**peer) for name, peer in data["peers"].items()}
    return Anchors(data["device"], data["provenance"], peers, tflops)


def comparison(anchors: Anchors, rows: Iterable[Row]) -> list[Line]:
    """The peers, the best of them, and ours if it was timed by the same method."""
    rows = list(rows)
    over = {direction: anchors.over_base(direction) for direction in anchors.tflops}
    built = {peer.title: peer.built for peer in anchors.peers.values()}
    titles = dict.fromkeys(title for of in over.values() for title in of)
    lines = [
        Line(title, built.get(title, ""), {d: geometric_mean(list(of[title].values())) for d, of in over.items()}, {})
        for title in titles
    ]
    for name in dict.fromkeys(row.provider for row in rows if row.kind == "ours"):
        found = {d: ours for d in over if (ours := _ours(rows, name, d))}
        if found:
            best = {d: over[d][BEST] for d in found}
            ahead = {
                d: (sum(r > best[d][c] for c, r in of.items() if c in best[d]), len(of)) for d, of in found.items()
            }
            means = {d: geometric_mean(list(of.values())) for d, of in found.items()}
            lines.append(Line(name, "this library", means, ahead))
    return lines


def _ours(rows: list[Row], provider: str, direction: str) -> dict[Cell, float]:
    found = {}
    for same in claims.selected(rows, SUITE, direction, DO_BENCH).values():
        row = next((row for row in same if row.provider == provider and row.timed), None)
        ms = {} if row is None else {r.provider: r.ms for r in claims.beside(same, row) if r.timed}
        ours, base = ms.get(provider), ms.get(BASE)
        if ours and base:
            case: Any = same[0].case
            found[case.dim, case.mask.name, case.len_k] = base / ours
    return found


def text_of_line(line: Line, direction: str) -> str:
    """1.06, or 1.15 (ahead in 26 of 36)."""
    if direction not in line.means:
        return "–"
    ahead = line.ahead.get(direction)
    return f"{line.means[direction]:.3f}" + (f" (ahead of the best in {ahead[0]} of {ahead[1]})" if ahead else "")


def note(anchors: Anchors) -> str:
    """Say what the comparison is, and what it is not."""
    p = anchors.provenance
    return (
        f"How many times as fast as cuDNN, geometric means over {len(anchors.tflops['forward'])} cases ({p['problem']}), by "
        f"{p['timing']}, on an {anchors.device} with torch {p['torch']}, cuDNN {p['cudnn']}, CUDA {p['cuda']} and driver "
        f"{p['driver']}. The runs were not the same: each ratio is to the cuDNN of its own run."
    )
