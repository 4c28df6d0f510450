"""Figures of results, through matplotlib (the extra `bench`), which the report writes as PNG and SVG."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strobe.bench.claims import joules_per_tflop
from strobe.bench.names import PASS_TITLES, PASSES
from strobe.bench.results import Results, Row
from strobe.measure import palette, units
from strobe.measure.method import SUSTAINED, TITLES, TURNS

_MARKERS = {"circle": "o", "square": "s", "triangle": "^"}
_SMALLEST = 1 << 10  # bytes below which the axis of memory is linear, so that nothing at all can be drawn
_Value = Callable[[Row], float | None]


def unavailable() -> str | None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return f"{error}; install it with `pip install matplotlib`"
    return None


# ---- families: cases that differ in length only


def family(row: Row) -> str:
    """What a panel shows: "head dim 128, causal"."""
    c = row.case
    shape = c.model or (f"model dim {c.model_dim}" if c.suite == "sweep" else f"head dim {c.dim}")
    heads = "" if c.group == 1 or c.model else f"{c.heads} heads on {c.heads_k}"
    few = "" if c.len_q == c.len_k else f"{c.len_q} {'query' if c.len_q == 1 else 'queries'}, batch {c.batch}"
    parts = [shape, heads, "no mask" if c.mask.name == "full" else c.mask.name, few]
    parts += [c.dtype if c.dtype != "bfloat16" else "", PASS_TITLES[c.direction] if c.direction != "forward" else ""]
    return ", ".join(part for part in parts if part)


def families(rows: list[Row]) -> dict[str, list[Row]]:
    """Title of a panel -> its rows; only those with more than one length."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[family(row)].append(row)
    return {title: same for title, same in found.items() if len({r.case.len_k for r in same}) > 1}


def style() -> Any:
    import matplotlib

    return matplotlib.rc_context({"svg.hashsalt": "strobe", "svg.fonttype": "none", "font.family": "sans-serif"})


def speed(rows: list[Row], method: str) -> Any:
    unit, scale = rate_unit([r.tflops or 0.0 for r in rows if r.timed])
    return _lines(rows, lambda r: r.tflops and r.tflops / scale, f"{unit}, {TITLES[method]}")


def rate_unit(tflops: list[float]) -> tuple[str, float]:
    """(unit, TFLOP/s in it): CPUs are drawn in GFLOP/s."""
    return ("TFLOP/s", 1.0) if max(tflops, default=1.0) >= 2 else ("GFLOP/s", 1e-3)


# ---- the report's


def write(runs: list[Results], directory: Path) -> list[Path]:
    """For each suite, method and pass of the first run, whatever figures its rows give."""
    import matplotlib

    matplotlib.use("Agg")
    directory.mkdir(parents=True, exist_ok=True)
    run, written = runs[0], []
    for suite in run.suites():
        for method, direction in itertools.product(run.methods(), PASSES):
            chosen = [r for r in run.rows if (r.case.suite, r.method, r.case.direction) == (suite, method, direction)]
            for name, figure in _figures(run, chosen, method).items():
                kinds = ["" if method == TURNS else f"-{method}", "" if direction == PASSES[0] else f"-{direction}"]
                stem = f"{suite}-{name}{''.join(kinds)}"
                for suffix in ("png", "svg"):
                    path = directory / f"{stem}.{suffix}"
                    metadata = {"Date": None} if suffix == "svg" else None
                    with style():
                        figure.savefig(path, dpi=150, bbox_inches="tight", metadata=metadata)
                    written.append(path)
    return written


def _figures(run: Results, rows: list[Row], method: str) -> dict[str, Any]:
    plain = [r for r in rows if r.case.measure == "time" and r.case.tile is None]
    memory = run.provenance["device"].get("memory_bytes")
    found = {
        "speed": speed(plain, method),
        "speed-up": _lines(*_against_ours(plain), "× faster (our fastest)", log=True),
        "memory": _lines(
            plain, lambda r: r.extra_bytes, "memory beyond inputs, outputs, gradients", memory=memory or 0
        ),
        "error": _lines(plain, lambda r: r.error.relative if r.error else None, "‖out − exact‖ / ‖exact‖", log=True),
        "energy": _lines(plain, joules_per_tflop, "J/TFLOP") if method == SUSTAINED else None,
        "roofline": _roofline(rows, run),
        "tiles": _tiles([r for r in rows if r.case.tile is not None]),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def _styles(rows: list[Row]) -> dict[str, palette.Style]:
    return palette.styles([(r.provider, r.kind) for r in rows if r.timed])


def _lines(rows: list[Row], value: _Value, label: str, log: bool = False, memory: int | None = None) -> Any:
    """Against length, a panel per family. `memory`: the axis is one of bytes that begins at 0, and so many there are."""
    known = [r for r in rows if r.timed and value(r) is not None and (value(r) or memory is not None)]
    shown = {title: [r for r in rows if family(r) == title] for title in families(known)}
    if not shown:
        return None
    styles = _styles(rows)
    figure, axes = panels(len(shown))
    for axis, (title, same) in zip(axes, shown.items(), strict=False):
        for provider, style in styles.items():
            points = sorted((r.case.len_k, value(r)) for r in same if r in known and r.provider == provider)
            if points:
                fmt = _MARKERS[style.shape] + ("--" if style.dashed else "-")
                line = {"color": style.colour, "linewidth": style.width, "markersize": 4, "zorder": 2 + style.width}
                axis.plot(*zip(*points, strict=True), fmt, label=provider, **line)
        _mark_out_of_memory(axis, same, styles)
        lengths = sorted({r.case.len_k for r in same})
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [units.length(n) for n in lengths])
        axis.minorticks_off()
        _scale(axis, same, log, memory)
        axis.set_title(title, fontsize=10)
        axis.set(xlabel="sequence length", ylabel=label)
        axis.grid(alpha=0.25)
    names = {text: handle for axis in axes for handle, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(names.values(), names.keys(), fontsize=8, loc="outside lower center", ncols=4)
    return figure


def _scale(axis: Any, rows: list[Row], log: bool, memory: int | None) -> None:
    if memory is None:
        axis.set_yscale("log" if log else "linear")
        if not log:
            axis.set_ylim(bottom=0)
        return
    axis.set_yscale("symlog", base=2, linthresh=_SMALLEST)
    axis.set_ylim(bottom=-_SMALLEST / 4)
    axis.yaxis.set_major_formatter(lambda value, _: units.size(value))
    if memory and any(r.status == "out of memory" for r in rows):
        axis.axhline(memory, color="black", linestyle=":", linewidth=1)


def _mark_out_of_memory(axis: Any, rows: list[Row], styles: dict[str, palette.Style]) -> None:
    for n, row in enumerate(r for r in rows if r.status == "out of memory" and r.provider in styles):
        at, colour = 0.97 - 0.05 * (n % 4), styles[row.provider].colour
        axis.plot(row.case.len_k, at, "x", color=colour, transform=axis.get_xaxis_transform(), markersize=7)


def _against_ours(rows: list[Row]) -> tuple[list[Row], _Value]:
    """Standard baselines, and how much faster our fastest is."""
    best: dict[str, float] = {}
    for row in rows:
        if row.kind == "ours" and row.timed and row.ms:
            best[row.case.key] = min(row.ms, best.get(row.case.key, row.ms))
    return [
        r for r in rows if r.kind == "standard"
    ], lambda r: r.ms / best[r.case.key] if r.ms and r.case.key in best else None


def panels(count: int) -> tuple[Any, list[Any]]:
    import matplotlib.pyplot as plt

    columns = min(3, count)
    lines = -(-count // columns)
    size = (max(4.6 * columns, 6.4), 3.2 * lines + 0.6)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    flat = list(axes.flat)
    for axis in flat[count:]:
        axis.set_visible(False)
    plt.close(figure)
    return figure, flat


def _roofline(rows: list[Row], run: Results) -> Any:
    points = [r for r in rows if r.timed and r.tflops and r.flops and r.ideal_bytes]
    dtype = points[0].case.dtype if points else ""
    peak, copy = run.ceilings.matmul_tflops.get(dtype), run.ceilings.copy_gbytes_per_s
    points = [r for r in points if r.case.dtype == dtype]
    if not points or not peak or not copy:
        return None
    figure, (axis, *_) = panels(1)
    for provider, style in _styles(rows).items():
        own = [r for r in points if r.provider == provider]
        at = [_intensity(r) for r in own]
        axis.plot(at, [r.tflops for r in own], _MARKERS[style.shape], color=style.colour, label=provider, markersize=4)
    ridge = peak * 1e3 / copy
    every = [_intensity(r) for r in points]
    ends = (min(ridge / 2, *every), max(ridge * 2, *every))
    axis.plot([ends[0], ridge, ends[1]], [ends[0] * copy / 1e3, peak, peak], color="black", linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel="FLOP per byte that must move", ylabel="TFLOP/s")
    axis.set_title(f"roofline, {dtype}", fontsize=10)
    axis.legend(fontsize=6)
    axis.grid(alpha=0.25)
    return figure


def _intensity(row: Row) -> float:
    return (row.flops or 0) / (row.ideal_bytes or 1)


def _tiles(rows: list[Row]) -> Any:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.timed and row.tflops:
            groups[f"{row.provider}, {row.case.label.rsplit('-', 1)[0]}"].append(row)
    if not groups:
        return None
    unit, scale = rate_unit([r.tflops or 0.0 for r in rows if r.timed])
    figure, axes = panels(len(groups))
    for axis, (title, same) in zip(axes, groups.items(), strict=False):
        speeds = {r.case.tile: (r.tflops or 0.0) / scale for r in same if r.case.tile is not None}
        queries, keys = (sorted({tile[i] for tile in speeds}) for i in (0, 1))
        axis.imshow([[speeds.get((q, k), float("nan")) for k in keys] for q in queries], cmap="Blues", aspect="auto")
        for (q, k), value in speeds.items():
            axis.text(keys.index(k), queries.index(q), f"{value:.3g}", ha="center", va="center", fontsize=8)
        axis.set_xticks(range(len(keys)), keys)
        axis.set_yticks(range(len(queries)), queries)
        axis.set_title(f"{title}, {unit}", fontsize=10)
        axis.set(xlabel="keys in a tile", ylabel="queries in a tile")
    return figure
