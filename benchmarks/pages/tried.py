"""What ideas for the Hopper kernels brought, from the committed studies: speed over that of the kernels in use."""

from __future__ import annotations

from typing import Any

from strobe.measure.method import SUSTAINED, TURNS
from strobe.measure.statistics import geometric_mean

IN_USE, AGAIN = "in use", "in use, again"
METHODS = {SUSTAINED: "sustained", TURNS: "in turns"}
Study = dict[str, Any]


def gains(study: Study, name: str, **where: Any) -> list[float]:
    """Of every case: time of the kernel in use over that of an idea. If the kernel in use was timed before and behind the
    ideas, the mean of both counts; for its second time itself, the first."""
    rows = [row for row in study["rows"] if "ms" in row and all(row[key] == x for key, x in where.items())]
    used: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if row["tile"] == IN_USE or (row["tile"] == AGAIN and name != AGAIN):
            used.setdefault(_case(row), []).append(row["ms"])
    return [geometric_mean(used[_case(row)]) / row["ms"] for row in rows if row["tile"] == name]


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["dim"], row["case"], row.get("method")


def names(study: Study, **where: Any) -> list[str]:
    """What was timed, in its order."""
    rows = [row for row in study["rows"] if all(row[key] == x for key, x in where.items())]
    return list(dict.fromkeys(row["tile"] for row in rows))


def fetches(study: Study, direction: str) -> Study:
    """The study of what the L2 fetches at a time, in the shape of the others."""
    rows = [
        {"dim": row["dim"], "case": row["case"], "method": method, "tile": name, "ms": ms}
        for row in study["rows"]
        if row["direction"] == direction
        for method in METHODS
        for name, ms in row.get(method, {}).items()
    ]
    return {**study, "rows": rows}


def brought(found: list[float]) -> str:
    """Three digits: the rule is about 1 %."""
    return f"{geometric_mean(found):.3f} ({min(found):.3f} to {max(found):.3f})" if found else ""
