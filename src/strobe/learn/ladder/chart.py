"""The ladder as a figure: what each rung reached on the GPU that was measured, and what its header had predicted."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

_MEASURED, _PREDICTED, _SOFT = "#5433a0", "#a85200", "#63666d"
_TICKS = (1, 10, 100, 1000)
_COLUMN = 3000  # TFLOP/s: where the numbers stand, to the right of all bars


def predicted_rate(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float | None:
    """TFLOP/s if the prediction came true: so many times the measured rate of the rung that it speaks of."""
    base = next((other for other in rows if other["number"] == row["against"]), None)
    return None if base is None or base["tflops"] is None else row["predicted"] * base["tflops"]


def svg(measured: dict[str, Any]) -> str:
    """`measured` is what `strobe ladder --json` wrote. Numbers are text in the file, so that they can be read and tested."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = [row for row in measured["rungs"] if row["tflops"] is not None]
    shape, device = measured["shape"], measured["provenance"]["device"]["name"]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "strobe"}):
        canvas = Figure(figsize=(8.6, 0.34 * len(rows) + 1.2), layout="constrained")
        axes = canvas.subplots()
        axes.set_xscale("log")
        for y, row in enumerate(rows):
            axes.barh(y, row["tflops"], height=0.62, color=_MEASURED, alpha=0.75)
            axes.annotate(f"{row['tflops']:.3g}", (_COLUMN, y), ha="right", va="center", fontsize=9)
            if (rate := predicted_rate(row, rows)) is not None:
                axes.plot([rate], [y], marker="D", color=_PREDICTED, markersize=6, linestyle="none")
        axes.plot([], [], marker="D", color=_PREDICTED, linestyle="none", label="predicted in the rung's header")
        axes.barh([0], [0], color=_MEASURED, alpha=0.75, label="measured")
        axes.legend(loc="lower right", bbox_to_anchor=(0.9, 0), frameon=False, fontsize=9)
        axes.set_yticks(range(len(rows)), [f"{row['number']}  {row['title']}" for row in rows], fontsize=9)
        axes.invert_yaxis()
        axes.set_xlim(right=_COLUMN)
        axes.set_xticks(_TICKS, [str(tick) for tick in _TICKS], fontsize=9)
        axes.minorticks_off()
        case = f"{shape['slices']} heads, {shape['len_q']} tokens, head dim {shape['dim']}"
        axes.set_xlabel(f"TFLOP/s, logarithmic; {device}, {case}", fontsize=9, color=_SOFT)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        file = io.StringIO()
        canvas.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"
