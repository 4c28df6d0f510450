"""Speeds of tiles from rows that `strobe tune` writes: the mean of each tile over the cases it was timed in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from strobe.measure.statistics import geometric_mean


def means(rows: Iterable[dict[str, Any]], dim: int, dim_v: int, kind: str, speed: str = "tflops") -> dict[str, float]:
    """Return, for every tile that ran in all cases of a head dim and kind, the one in use first, the geometric mean of
    its speed, or of another number in its rows."""
    mine = [row for row in rows if (row["dim"], row["dim_v"], row["kind"]) == (dim, dim_v, kind) and "ms" in row]
    count = len({row["case"] for row in mine})
    speeds: dict[str, list[float]] = {}
    for row in mine:
        if row.get(speed) is not None:
            speeds.setdefault(row["tile"], []).append(row[speed])
    return {
        tile: geometric_mean(samples) for tile, samples in speeds.items() if len(samples) == count and tile != "cudnn"
    }
