"""Two blocks of docs/variants.md: functions beside FlexAttention, from the suite `variants`; what else a call may have, from
studies in which calls took turns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from benchmarks import committed
from strobe.bench.results import Results

BEGIN, END = "<!-- functions: begin (python -m benchmarks.pages --write) -->", "<!-- functions: end -->"
BESIDE_BEGIN, BESIDE_END = "<!-- beside: begin (python -m benchmarks.pages --write) -->", "<!-- beside: end -->"
PAGE = Path("docs", "variants.md")
OURS, PEER = "strobe-sm90", "flex"
FILES = {"forward": "variants-functions", "backward": "variants-functions-backward"}
OTHER = "softcap"  # among the functions, but an argument of its own here

Times = dict[str, dict[str, float]]  # case or call -> provider or direction -> ms


def times(run: Results) -> Times:
    found: Times = {}
    for row in run.rows:
        if row.timed and row.ms is not None:
            found.setdefault(row.case.label, {})[row.provider] = row.ms
    return {label: ms for label, ms in found.items() if {OURS, PEER} <= ms.keys()}


def block(root: Path) -> str:
    there = committed.runs(root).get(committed.RESULTS.name, {})
    runs = {direction: there[name] for direction, name in FILES.items() if name in there}
    if not runs:
        return ""
    found = {direction: times(run) for direction, run in runs.items()}
    provenance = next(iter(runs.values())).provenance
    device = provenance["device"]["name"].removeprefix("NVIDIA ")
    lines = [
        f"FlexAttention's time over ours on an {device}, commit {provenance['git']['commit']}, in short turns; batch 2, 16 "
        "heads, head dim 128, bfloat16. FlexAttention is compiled by torch.compile; its block masks were made before.",
        f"Data: {', '.join(f'`{FILES[direction]}.json`' for direction in runs)}.",
        "",
        f"| function | {' | '.join(runs)} |",
        f"|---{'|---' * len(runs)}|",
    ]
    for label in dict.fromkeys(label for ms in found.values() for label in ms):
        cells = [_cell(ms[label]) if label in ms else "–" for ms in found.values()]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    means = [[ms[PEER] / ms[OURS] for label, ms in of.items() if not label.startswith(OTHER)] for of in found.values()]
    shown = [f"**{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f} ×**" for ratios in means]
    lines.append(f"| geometric mean without {OTHER} | {' | '.join(shown)} |")
    return "\n".join([*lines, ""])


def _cell(ms: dict[str, float]) -> str:
    return f"{ms[PEER] / ms[OURS]:.2f} × ({ms[OURS]:.2f} ms)"


def beside(root: Path) -> str:
    study, learnt = (committed.study(root, name) for name in ("beside", "learnt"))
    if study is None or learnt is None:
        return ""
    lines = [f"On an {committed.where(study)}. {study['note']}", "Data: `studies/beside.json`.", ""]
    lines += ["| call | ours forward, ms | efficient | ours backward, ms | efficient |", "|---|---|---|---|---|"]
    lines += [_against_efficient(row) for row in study["rows"] if "efficient" in row["ms"]["forward"]]
    lines += ["", "| time over that of the same mask alone | forward | backward |", "|---|---|---|"]
    for row in study["rows"]:
        for name in row["ms"]["forward"]:
            if "plain" in row["ms"]["forward"] and name != "plain":
                ratios = [f"{ms[name] / ms['plain']:.2f}" for ms in row["ms"].values()]
                lines.append(f"| {row['name']}, {name} | {' | '.join(ratios)} |")
    lines += ["", f"On an {committed.where(learnt)}. {learnt['note']}", "Data: `studies/learnt.json`.", ""]
    names = list(learnt["rows"][0]["ms"])
    lines += [f"| backward, ms | {' | '.join(names)} |", f"|---{'|---' * len(names)}|"]
    for row in learnt["rows"]:
        lines.append(f"| {row['name']} | {' | '.join(f'{ms:.2f}' for ms in row['ms'].values())} |")
    return "\n".join([*lines, ""])


def _against_efficient(row: dict[str, Any]) -> str:
    cells = [
        cell for ms in row["ms"].values() for cell in (f"{ms['strobe']:.2f}", f"{ms['efficient'] / ms['strobe']:.2f} ×")
    ]
    return f"| {row['name']} | {' | '.join(cells)} |"
