"""The figures in docs/design/hopper-backward.md and docs/use.md, against the committed measurements."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOUND = json.loads((ROOT / "benchmarks/results/h200/studies/backward.json").read_text(encoding="utf-8"))
AGAIN = json.loads((ROOT / "benchmarks/results/h200/studies/backward-again.json").read_text(encoding="utf-8"))
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
    ratios = [row["cudnn"][0] / row["base"][0] for row in FOUND["rows"]]
    assert f"geometric mean {mean(ratios):.2f}, least {min(ratios):.2f}" in PAGE


def test_the_order_of_sums_costs_what_the_documents_say() -> None:
    slower = [1 - row["base"][0] / row["det"][0] for row in FOUND["rows"] if "det" in row]
    assert f"at most {math.ceil(100 * max(slower))} %" in PAGE
    assert max(slower) <= 0.15 and "up to 15 %" in (ROOT / "docs/use.md").read_text(encoding="utf-8")


def test_the_ampere_kernel_is_ahead_of_flash() -> None:
    chosen = {64: "c4", 128: "c2", 256: "c0"}  # the tiles in use
    ratios = [row["flash"] / row[chosen[row["d"]]] for row in FOUND["sm80_ms"]]
    assert f"{mean(ratios):.2f} × PyTorch's flash backend" in PAGE


def test_the_distances_are_those_measured() -> None:
    for name in ("forward", "backward"):
        ratios = [row[name] for row in AGAIN["dropout_0.1_of_without"] if row["d"] == 128]
        assert f"{name} {min(ratios):.2f} to {max(ratios):.2f}" in PAGE
    rows = AGAIN["grouped_64_on_8_of_plain"]
    behind = [row["backward"] for row in rows if (row["d"], row["mask"]) == (128, "causal")]
    assert f"{min(behind):.2f} to {max(behind):.2f} of the speed of plain heads" in PAGE
    assert all(row["backward"] > 1 for row in rows if row["backward"] not in behind)  # "elsewhere they are faster"
    cpu = AGAIN["cpu_us"]
    assert f"{cpu['ours forward and backward'] / cpu['sdpa forward and backward']:.2f} × the CPU time" in PAGE
    assert f"{FOUND['extra_memory_in_sizes_of_q']:.2f} times the size of q" in PAGE
