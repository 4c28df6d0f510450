"""The figures in docs/design/hopper-backward.md and docs/use.md, against the committed measurements."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

from strobe.measure.statistics import geometric_mean

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/h200"


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


IDEAS, TRAINING, SECTIONS = (load(f"studies/{name}.json") for name in ("ideas-backward", "training", "sections-tried"))
PAGE = (ROOT / "docs/design/hopper-backward.md").read_text(encoding="utf-8")


def times(name: str) -> dict[str, dict[str, float]]:
    """Milliseconds of a benchmark, by case and provider."""
    found: dict[str, dict[str, float]] = {}
    for row in load(name)["rows"]:
        found.setdefault(row["case"]["label"], {})[row["provider"]] = row["timing"]["summary"]["median"]
    return found


GRID = {case: ms["torch-cudnn"] / ms["strobe-sm90"] for case, ms in times("grid36-backward.json").items()}


def table() -> str:
    """cuDNN's time over ours."""
    cells: dict[str, dict[str, float]] = {}
    for case, ratio in GRID.items():
        dim, mask, length = case.split("-")
        cells.setdefault(f"{dim[1:]}, {mask}", {})[length] = ratio
    lengths = list(next(iter(cells.values())))
    lines = [f"| head dim, mask | {' | '.join(lengths)} |", "|---" * (len(lengths) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(f'{x:.2f}' for x in row.values())} |" for name, row in cells.items()]
    return "\n".join(lines)


def test_the_table_is_what_was_measured() -> None:
    assert table() in PAGE, table()
    assert f"geometric mean {geometric_mean(list(GRID.values())):.2f}, least {min(GRID.values()):.2f}" in PAGE


def ratios(what: str, data: dict[str, Any] = TRAINING, **where: Any) -> list[float]:
    """Of the speed without it."""
    rows = [row for row in data["rows"] if what in row.get("ms", ()) and all(row[key] == x for key, x in where.items())]
    return [row["ms"]["plain"] / row["ms"][what] for row in rows]


def test_the_order_of_sums_costs_what_the_documents_say() -> None:
    slower = 1 - min(ratios("deterministic"))
    assert slower <= 0.15  # the bound
    assert f"at most {math.ceil(100 * slower)} % slower" in PAGE
    assert f"up to {math.ceil(100 * slower)} %" in (ROOT / "docs/use.md").read_text(encoding="utf-8")


def test_the_table_of_turns_is_what_was_measured() -> None:
    cells = {f"{dim}, {mask}": {"dim": dim, "mask": mask} for dim in (64, 128) for mask in ("full", "causal")}
    lines = [f"| the turn is | {' | '.join(cells)} |", "|---" * (len(cells) + 1) + "|"]
    data = load("studies/turns-tried.json")
    for name in dict.fromkeys(row["variant"] for row in data["rows"]):
        found = (ratios("deterministic", data, variant=name, **where) for where in cells.values())
        lines.append(f"| {name} | {' | '.join(f'{100 * (1 - statistics.median(x)):.0f} %' for x in found)} |")
    assert "\n".join(lines) in PAGE, "\n".join(lines)


def of_idea(name: str, lengths: tuple[str, ...] = ("512", "1024", "4096", "16384")) -> str:
    """Its speed over that of the kernels in use then, over all cells: from, to."""
    ms = {(row["dim"], row["case"], row["tile"]): row["ms"] for row in IDEAS["rows"] if "ms" in row}
    found = [ms[(*cell, "in use")] / t for (*cell, tile), t in ms.items() if tile == name and cell[1].endswith(lengths)]
    return f"{min(found):.2f} to {max(found):.2f}"


def test_ideas_brought_what_the_page_says() -> None:
    turns = of_idea("sums of dQ by turns", ("512", "1024"))
    assert f"{turns} times as fast" in PAGE
    whole, half = (f"{many}exponentials above the wait for dP" for many in ("", "half of the "))
    assert f"{of_idea(whole)} of the speed; half of them: {of_idea(half)}" in PAGE


def test_the_ampere_kernel_is_ahead_of_flash() -> None:
    found = [ms["torch-flash"] / ms["strobe-sm80"] for ms in times("grid36-backward.json").values()]
    assert f"{geometric_mean(found):.2f} × PyTorch's flash backend" in PAGE


def test_the_distances_are_those_measured() -> None:
    for name in ("forward", "backward"):
        found = ratios("dropout", dim=128, **{"pass": name})
        assert f"{name} {min(found):.2f} to {max(found):.2f}" in PAGE
    behind = ratios("grouped", dim=128, mask="causal")
    assert min(behind) >= 0.92 and f"{min(behind):.2f} to {max(behind):.2f} of the speed of plain heads" in PAGE
    assert all(ratio > 1 for ratio in ratios("grouped") if ratio not in behind)  # "elsewhere they are faster"
    (cpu,) = (row["us"] for row in TRAINING["rows"] if row["what"] == "cpu")
    assert f"{cpu['strobe'] / cpu['sdpa']:.2f} × the CPU time" in PAGE
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (memory,) = re.findall(r"Backward, beyond inputs.* strobe-sm90 needs at most (\S+) × the size of q", readme)
    assert f"{memory} times the size of q" in " ".join(PAGE.split())


def test_the_distances_to_cudnn_are_those_measured() -> None:
    least = min(GRID, key=GRID.__getitem__)
    assert f"{GRID[least]:.2f} × cuDNN at {least}" in PAGE
    assert f"{GRID['d128-causal-16k']:.2f} × at d128-causal-16k" in PAGE
    few = [ms["torch-cudnn"] / ms["strobe-sm90"] for ms in times("gqa-both.json").values()]
    assert f"{min(few):.2f} to {max(few):.2f} × cuDNN" in PAGE


def test_what_was_tried_and_lost() -> None:
    kept = [x for row in load("studies/dropout-tried.json")["rows"] for x in row["of_plain"].values()]
    assert f"had {min(kept):.2f} to {max(kept):.2f} (`dropout-tried.json`)" in PAGE

    tried = load("studies/order-tried.json")

    def short(data: dict[str, Any]) -> list[float]:
        rows = [row for row in data["rows"] if row["what"] == "deterministic" and row["mask"] == "causal"]
        return [row["ms"]["deterministic"] for row in rows if row["length"] <= 1024]

    speeds = [ours / other for ours, other in zip(short(tried["in_use"]), short(tried), strict=True)]
    assert f"{min(speeds):.2f} to {max(speeds):.2f} of the speed under a causal mask at 512 and 1,024 keys" in PAGE
    inside = [row["ms"]["head by head, 4"] / row["ms"]["inside, 4"] for row in SECTIONS["heads_inside"]]
    wide, narrow = (", ".join(f"{x:.2f}" for x in part) for part in (inside[:3], inside[3:]))
    assert f"head dim 128: {wide} of the speed at 2k, 4k, 8k; head dim 64: {narrow}" in PAGE
