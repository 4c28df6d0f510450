"""What docs/design/hopper-forward.md says of the ideas at the power limit, against the committed measurements."""

from __future__ import annotations

import json
import math
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = " ".join((ROOT / "docs/design/hopper-forward.md").read_text(encoding="utf-8").split())
FOUND = json.loads((ROOT / "benchmarks/results/h200/studies/ideas-sustained.json").read_text(encoding="utf-8"))


def over_the_kernel_in_use(name: str, what: str = "ms") -> list[float]:
    """Of every case: time, or energy, of the kernel in use over that of ideas with such a name."""
    rows = [row for row in FOUND["rows"] if "ms" in row]
    used = {(row["dim"], row["case"]): row[what] for row in rows if row["tile"] == "in use"}
    return [used[row["dim"], row["case"]] / row[what] for row in rows if name in row["tile"]]


def test_what_the_ideas_brought() -> None:
    for name, text in (
        ("half the loads", "would be {} to {} % faster"),
        ("no loads", "without all of them {} to {} %"),
    ):
        gains = [round(100 * (x - 1)) for x in over_the_kernel_in_use(name)]
        assert text.format(min(gains), max(gains)) in PAGE
    in_registers = [x for what in ("ms", "joules_per_tflop") for x in over_the_kernel_in_use("Q in registers", what)]
    assert max(abs(x - 1) for x in in_registers) < 0.015 and "changes less than 1.5 % either way" in PAGE
    fewer = over_the_kernel_in_use("24 registers for the producer")
    assert f"cost up to {math.ceil(100 * (1 - min(fewer)))} %" in PAGE
