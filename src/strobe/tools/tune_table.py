"""Print the results of `strobe tune` on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from strobe.bench.tile_speeds import means
from strobe.cuda.parts.tuned import tile_name
from strobe.measure import units
from strobe.tools.tune import groups_of


def show(results: dict[str, Any], console: Console) -> None:
    """A table for each head dim and kind: the mean speed of every tile over its cases, fastest first; the others with
    the reason why they were not timed."""
    for dim, dim_v, kind in groups_of(results["rows"]):
        rows = [row for row in results["rows"] if (row["dim"], row["dim_v"], row["kind"]) == (dim, dim_v, kind)]
        table = Table(title=f"head dim {tile_name(dim, dim_v, kind)}", title_justify="left", box=None, pad_edge=False)
        for heading in ("tile", "TFLOP/s", "over the tile in use", "over cuDNN", "J/TFLOP", ""):
            table.add_column(heading, justify="left" if heading in ("tile", "") else "right")
        speeds, joules, cudnn = (means(rows, dim, dim_v, kind, of) for of in ("tflops", "joules_per_tflop", "vs_cudnn"))
        refused = {row["tile"]: row["reason"] for row in rows if "reason" in row}
        in_use = next(iter(speeds), None)
        for tile in sorted(speeds, key=lambda tile: -speeds[tile]):
            notes = [refused.get(tile, ""), "in use" if tile == in_use else ""]
            over = speeds[tile] / speeds[in_use] if in_use else None
            cells = [f"{speeds[tile]:.1f}", *(_number(value, 3) for value in (over, cudnn.get(tile)))]
            table.add_row(tile, *cells, _number(joules.get(tile), 2), ", ".join(filter(None, notes)))
        for tile, reason in refused.items():
            if tile not in speeds:
                table.add_row(tile, *[units.MISSING] * 4, reason, style="dim")
        console.print(table)


def _number(value: float | None, digits: int) -> str:
    return units.MISSING if value is None else f"{value:.{digits}f}"
