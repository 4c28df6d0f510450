"""The ladder as a figure: what each rung reached on the GPU that was measured, and what its header had predicted."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from strobe.learn.ladder import rungs

_MEASURED, _PREDICTED, _SOFT = "#5433a0", "#a85200", "#63666d"
_TICKS = (1, 10, 100, 1000)
_COLUMN = 3000  # TFLOP/s: where the numbers stand, to the right of all bars
_HEADING: dict[str, Any] = {"ha": "right", "va": "center", "fontsize": 10, "fontweight": "bold"}


def predicted_rate(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float | None:
    """TFLOP/s if the prediction came true: so many times the measured rate of the rung that it speaks of, or, if that was
    not measured, the rate that was predicted for it."""
    base = next((other for other in rows if other["number"] == row["against"]), None)
    rate = None if base is None else base["tflops"] or predicted_rate(base, rows)
    return None if rate is None else row["predicted"] * rate


def svg(measured: dict[str, Any]) -> str:
    """`measured`: what `strobe ladder --json` wrote, with a row for each rung. Numbers are text in the file, so that
    they can be read and tested."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = measured["rungs"]
    backward = {rung.number for rung in rungs.BACKWARD}
    places = [i + 1.6 * (row["number"] in backward) for i, row in enumerate(rows)]  # a gap between the flights
    shape, device = measured["shape"], measured["provenance"]["device"]["name"]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "strobe"}):
        canvas = Figure(figsize=(8.6, 0.34 * (len(rows) + 1.6) + 1.2), layout="constrained")
        axes = canvas.subplots()
        axes.set_xscale("log")
        for y, row in zip(places, rows, strict=True):
            if row["tflops"] is not None:
                axes.barh(y, row["tflops"], height=0.62, color=_MEASURED, alpha=0.75)
            value, style = _label(row)
            axes.annotate(value, (_COLUMN, y), ha="right", va="center", **style)
            if (rate := predicted_rate(row, rows)) is not None:
                axes.plot([rate], [y], marker="D", color=_PREDICTED, markersize=6, linestyle="none")
        axes.plot([], [], marker="D", color=_PREDICTED, linestyle="none", label="predicted in the rung's header")
        axes.barh([0], [0], color=_MEASURED, alpha=0.75, label="measured")
        for place, heading in ((-1, "Forward"), (places[-1] - len(rungs.BACKWARD), "Gradient")):
            across = axes.get_yaxis_transform()
            axes.annotate(heading, (0, place), xycoords=across, xytext=(-6, 0), textcoords="offset points", **_HEADING)
        axes.legend(loc="upper right", bbox_to_anchor=(0.9, 1), frameon=False, fontsize=9)
        axes.set_yticks(places, [f"{row['number']}  {row['title']}" for row in rows], fontsize=9)
        axes.set_ylim(places[-1] + 0.6, -1.5)
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


def _label(row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return what stands in the column of numbers, and how."""
    if row["tflops"] is not None:
        return f"{row['tflops']:.3g}", {"fontsize": 9}
    return "not measured yet", {"fontsize": 8, "color": _SOFT}
