"""Every table of the documents is a list of cells that `table` prints. BLOCKS names the tables of the users' pages that come
from a committed study or suite; those of docs/results.md and README.md are in `results_page`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import committed
from strobe.bench.decode import READ
from strobe.measure.statistics import geometric_mean
from strobe.measure.units import MISSING

Cell = tuple[str, str, str]  # row, column, text


def table(corner: str, cells: Iterable[Cell]) -> list[str]:
    """A Markdown table. Rows and columns stand in the order of their first cells."""
    texts = {(row, column): text for row, column, text in cells}
    columns = list(dict.fromkeys(column for _, column in texts))
    lines = [f"| {corner} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in dict.fromkeys(row for row, _ in texts):
        lines.append(f"| {name} | {' | '.join(texts.get((name, column), MISSING) for column in columns)} |")
    return lines


def _source(data: dict[str, Any], files: str) -> list[str]:
    return [f"On an {committed.where(data)}. {data.get('note', '')}".rstrip(), f"Data: {files}.", ""]


def _load(root: Path, name: str) -> dict[str, Any]:
    """A file of the H200's results; a study's name begins with "studies/"."""
    found: dict[str, Any] = json.loads((root / committed.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


# ---- docs/variants.md

_OURS, _FLEX = "strobe-sm90", "flex"


def _functions(root: Path) -> list[str]:
    names = {"forward": "variants-functions", "backward": "variants-functions-backward"}
    runs = {direction: committed.runs(root)[committed.RESULTS.name][name] for direction, name in names.items()}
    cells: list[Cell] = []
    for direction, run in runs.items():
        ms = {(row.case.label, row.provider): row.ms for row in run.rows if row.timed and row.ms}
        ratios = {label: ms[label, _FLEX] / ours for (label, who), ours in ms.items() if who == _OURS}
        cells += [(label, direction, f"{x:.2f} × ({ms[label, _OURS]:.2f} ms)") for label, x in ratios.items()]
        mean = geometric_mean([x for label, x in ratios.items() if not label.startswith("softcap")])
        cells.append(("geometric mean without softcap", direction, f"**{mean:.2f} ×**"))
    note = (
        "FlexAttention's time over ours, in short turns; batch 2, 16 heads, head dim 128, bfloat16. FlexAttention is compiled "
        "by torch.compile; its block masks were made before."
    )
    source = {"provenance": runs["forward"].provenance, "note": note}
    means = cells.pop(cells.index(next(cell for cell in cells if cell[0].startswith("geometric"))))
    return [
        *_source(source, ", ".join(f"`{name}.json`" for name in names.values())),
        *table("function", [*cells, means]),
    ]


def _beside(root: Path) -> list[str]:
    study, learnt = _load(root, "studies/beside"), _load(root, "studies/learnt")
    efficient: list[Cell] = []
    alone: list[Cell] = []
    for row in study["rows"]:
        for direction, ms in row["ms"].items():
            if "efficient" in ms:
                efficient.append((row["name"], f"ours {direction}, ms", f"{ms['strobe']:.2f}"))
                efficient.append((row["name"], f"efficient {direction}", f"{ms['efficient'] / ms['strobe']:.2f} ×"))
            if "plain" in ms:
                others = [name for name in ms if name != "plain"]
                alone += [(f"{row['name']}, {name}", direction, f"{ms[name] / ms['plain']:.2f}") for name in others]
    slopes = [(row["name"], name, f"{ms:.2f}") for row in learnt["rows"] for name, ms in row["ms"].items()]
    lines = [*_source(study, "`studies/beside.json`"), *table("call", efficient), ""]
    lines += [*table("time over that of the same mask alone", alone), "", *_source(learnt, "`studies/learnt.json`")]
    return lines + table("backward, ms", slopes)


def _wide(root: Path) -> list[str]:
    study = _load(root, "studies/wide")
    cells: list[Cell] = []
    for row in study["rows"]:
        ours = row["ms"]["strobe"]
        cells.append((row["name"], "ours, ms", ", ".join(f"{ms:.2f}" for ms in ours.values())))
        for name in ("efficient", "math"):
            ratios = [f"{row['ms'][name][direction] / ms:.1f} ×" for direction, ms in ours.items()]
            cells.append((row["name"], name, ", ".join(ratios)))
    study["note"] = f"Times of PyTorch's backends over ours, forward and backward; {study['note']}"
    return [*_source(study, "`studies/wide.json`"), *table("head dim", cells)]


# ---- docs/serving.md


def _paged(root: Path) -> list[str]:
    run, study = _load(root, "decode"), _load(root, "studies/paged")
    us = {(row["batch"], row["way"]): row["us"] for row in run["rows"] if row["us"] is not None}
    whole = {
        batch: t for (batch, way), t in us.items() if way == "contiguous" and not batch.endswith(("queries", "uniform"))
    }
    timed = ((batch, way, t) for (batch, way), t in us.items() if batch in whole and way != READ)
    cells = [(way, batch, f"{t:.0f} ({whole[batch] / t:.2f})") for batch, way, t in timed]
    run["note"] = (
        "µs, and the speed relative to the same keys in one piece. Decoding, 1 query, 32 heads on 8, head dim 128, bfloat16; "
        "CUDA graphs over caches that do not fit the L2, in turns. Pages in random order, with a plan."
    )
    lines = [*_source(run, "`decode.json`, `studies/paged.json`"), *table("sequences and keys", cells), ""]
    plans = ", ".join(f"{study['plan_us'][count]:.1f}" for count in ("64", "1024"))
    return [
        *lines,
        *table("what else", ((what, "measured", text) for what, text in _also(run, study, set(whole), plans))),
    ]


def _also(run: dict[str, Any], study: dict[str, Any], batches: set[str], plans: str) -> Iterator[tuple[str, str]]:
    for what, ratio in run[
        "comparisons"
    ].items():  # not those of the table, nor cuDNN with 4 queries, which it takes for a prompt
        if what.split(": ")[0] not in batches and "cuDNN" not in what:
            yield what, f"{ratio:.2f}"
    yield "planning 64, 1,024 sequences", f"{plans} µs"
    yield "appending a token to each of 64 sequences", f"{study['append_us']:.1f} µs"
    yield (
        "CPU time of a planned call over that of SDPA",
        f"{study['host_us']['paged plan'] / study['host_us']['sdpa']:.2f}",
    )


BLOCKS: tuple[tuple[str, str, Callable[[Path], list[str]]], ...] = (  # page, name of the block, its lines
    ("docs/variants.md", "functions", _functions),
    ("docs/variants.md", "beside", _beside),
    ("docs/variants.md", "wide", _wide),
    ("docs/serving.md", "paged", _paged),
)
