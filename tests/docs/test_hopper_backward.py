"""The figures in docs/design/hopper-backward.md and docs/use.md, against the committed measurements."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/h200"


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


FOUND, IDEAS, TRAINING = (load(f"studies/{name}.json") for name in ("backward", "ideas-backward", "training"))
PAGE = (ROOT / "docs/design/hopper-backward.md").read_text(encoding="utf-8")


def mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def table() -> str:
    """cuDNN's time over ours."""
    cells: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in FOUND["rows"]:
        cells.setdefault((row["d"], row["mask"]), []).append(row)
    lengths = [row["n"] for row in next(iter(cells.values()))]
    lines = [f"| head dim, mask | {' | '.join(map(str, lengths))} |", "|---" * (len(lengths) + 1) + "|"]
    for (dim, mask), rows in cells.items():
        ratios = (f"{row['cudnn'][0] / row['base'][0]:.2f}" for row in rows)
        lines.append(f"| {dim}, {mask} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def test_the_table_is_what_was_measured() -> None:
    assert table() in PAGE, table()
    found = [row["cudnn"][0] / row["base"][0] for row in FOUND["rows"]]
    assert f"geometric mean {mean(found):.2f}, least {min(found):.2f}" in PAGE


def ratios(what: str, **where: Any) -> list[float]:
    """Of the speed without it."""
    rows = [row for row in TRAINING["rows"] if row["what"] == what and all(row[key] == x for key, x in where.items())]
    return [row["ms"]["plain"] / row["ms"][what] for row in rows]


def test_the_order_of_sums_costs_what_the_documents_say() -> None:
    slower = 1 - min(ratios("deterministic"))
    assert slower <= 0.15
    assert f"at most {math.ceil(100 * slower)} % slower" in PAGE
    assert f"up to {math.ceil(100 * slower)} %" in (ROOT / "docs/use.md").read_text(encoding="utf-8")


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
    chosen = {64: "c4", 128: "c2", 256: "c0"}  # the tiles in use
    found = [row["flash"] / row[chosen[row["d"]]] for row in FOUND["sm80_ms"]]
    assert f"{mean(found):.2f} × PyTorch's flash backend" in PAGE


def test_the_distances_are_those_measured() -> None:
    for name in ("forward", "backward"):
        found = ratios("dropout", dim=128, **{"pass": name})
        assert f"{name} {min(found):.2f} to {max(found):.2f}" in PAGE
    behind = ratios("grouped", dim=128, mask="causal")
    assert f"{min(behind):.2f} to {max(behind):.2f} of the speed of plain heads" in PAGE
    assert all(ratio > 1 for ratio in ratios("grouped") if ratio not in behind)  # "elsewhere they are faster"
    (cpu,) = (row["us"] for row in TRAINING["rows"] if row["what"] == "cpu")
    assert f"{cpu['strobe'] / cpu['sdpa']:.2f} × the CPU time" in PAGE
    assert f"{FOUND['extra_memory_in_sizes_of_q']:.2f} times the size of q" in PAGE


def times(name: str) -> dict[str, dict[str, float]]:
    """Milliseconds of a benchmark, by case and provider."""
    found: dict[str, dict[str, float]] = {}
    for row in load(name)["rows"]:
        found.setdefault(row["case"]["label"], {})[row["provider"]] = row["timing"]["summary"]["median"]
    return found


def test_the_distances_to_cudnn_are_those_measured() -> None:
    grid, few = times("grid36-backward.json"), times("gqa-both.json")
    second, first, third = (
        f"{grid[case]['torch-cudnn'] / grid[case]['strobe-sm90']:.2f} ×"
        for case in ("d64-causal-2k", "d64-causal-1k", "d64-causal-4k")
    )
    assert f"{second} cuDNN through autograd, where 1,024 and 4,096 tokens have {first} and {third}" in PAGE
    slower = {case: ms["strobe-sm90"] / ms["torch-cudnn"] for case, ms in few.items() if case.startswith("32h1-")}
    assert f"up to {slower.pop('32h1-causal-2k'):.2f} × slower than cuDNN" in PAGE and max(slower.values()) < 1


def test_what_was_tried_and_lost() -> None:
    kept = [x for row in load("studies/dropout-tried.json")["rows"] for x in row["of_plain"].values()]
    assert f"had {min(kept):.2f} to {max(kept):.2f} (`dropout-tried.json`)" in PAGE

    def short(data: dict[str, Any]) -> list[float]:
        rows = [row for row in data["rows"] if row["what"] == "deterministic" and row["mask"] == "causal"]
        return [row["ms"]["deterministic"] for row in rows if row["length"] <= 1024]

    speeds = [
        ours / other for ours, other in zip(short(TRAINING), short(load("studies/order-tried.json")), strict=True)
    ]
    assert f"{min(speeds):.2f} to {max(speeds):.2f} of the speed under a causal mask at 512 and 1,024 keys" in PAGE
