"""The report's figures as PNG and SVG files, through matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strobe.bench.report.page import flat, panels
from strobe.bench.results import KINDS, Results

_COLOURS = {
    "ours": ("#d1495b", "#e07a3f", "#b8336a", "#e0a13f"),
    "ladder": ("#fbb03b", "#e8793a", "#c94c4c", "#9b3a6b", "#6b3a8a", "#3f3a8f", "#22577a"),
    "peer": ("#2f6fb3", "#2a9d8f", "#6a5acd", "#4f9d3a", "#1f8fb8"),
    "standard": ("#8a8d93", "#a67c52", "#6f7d5c", "#9a7aa0", "#7a6a5a"),
}
_Row = dict[str, Any]


def unavailable() -> str | None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return f'{error}; install it with `pip install "strobe[bench]"`'
    return None


def write(runs: list[Results], directory: Path) -> list[Path]:
    """For each suite of the first run, whatever figures its rows give."""
    import matplotlib

    matplotlib.use("Agg")
    directory.mkdir(parents=True, exist_ok=True)
    run = runs[0]
    rows = [flat(row, panel) for row, panel in zip(run.rows, panels(run.rows), strict=True)]
    written: list[Path] = []
    for suite in run.suites():
        chosen = [r for r in rows if r["suite"] == suite]
        plain = [r for r in chosen if r["measure"] == "time" and "tile" not in r]
        device = run.provenance["device"]
        styles = _styles(chosen)
        for name, figure in (
            ("speed", _lines(plain, styles, lambda r: r.get("tflops"), "TFLOP/s")),
            ("speed-up", _lines(_against_ours(plain), styles, lambda r: r.get("times"), "times as fast", log=True)),
            (
                "memory",
                _lines(
                    plain,
                    styles,
                    lambda r: r.get("extra"),
                    "extra bytes over q, k, v, o",
                    log=True,
                    limit=device.get("memory_bytes"),
                ),
            ),
            ("error", _lines(plain, styles, lambda r: r.get("error"), "‖out − exact‖ / ‖exact‖", log=True)),
            ("roofline", _roofline(chosen, styles, run)),
            ("tiles", _tiles([r for r in chosen if "tile" in r])),
        ):
            if figure is not None:
                for suffix in ("png", "svg"):
                    path = directory / f"{suite}-{name}.{suffix}"
                    figure.savefig(
                        path, dpi=150, bbox_inches="tight", metadata={"Date": None} if suffix == "svg" else None
                    )
                    written.append(path)
    return written


def _styles(rows: list[_Row]) -> dict[str, dict[str, Any]]:
    names = {
        kind: list(dict.fromkeys(r["provider"] for r in rows if r["kind"] == kind and r["timed"])) for kind in KINDS
    }
    marks = {"ours": "o-", "ladder": "d-", "peer": "s-", "standard": "^--"}
    return {
        name: {
            "color": _COLOURS[kind][i % len(_COLOURS[kind])],
            "fmt": marks[kind],
            "linewidth": 2.2 if kind == "ours" else 1.3,
        }
        for kind in KINDS
        for i, name in enumerate(names[kind])
    }


def _by(rows: list[_Row], key: Callable[[_Row], Any]) -> dict[Any, list[_Row]]:
    found: dict[Any, list[_Row]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


def _lines(
    rows: list[_Row],
    styles: dict[str, Any],
    value: Callable[[_Row], float | None],
    label: str,
    log: bool = False,
    limit: int | None = None,
) -> Any:
    families = {
        title: list_
        for title, list_ in _by(rows, lambda r: f"{r['panel']}, {r['direction']}, {r['dtype']}").items()
        if len({r["length"] for r in list_ if r["timed"] and value(r)}) > 1
    }
    if not families:
        return None
    figure, axes = _axes(len(families))
    for axis, (title, list_) in zip(axes, families.items(), strict=False):
        for provider, points in _by(list_, lambda r: r["provider"]).items():
            known = sorted((r["length"], value(r)) for r in points if r["timed"] and value(r))
            if known and provider in styles:
                style = dict(styles[provider])
                axis.plot(*zip(*known, strict=True), style.pop("fmt"), label=provider, markersize=4, **style)
        _mark_out_of_memory(axis, list_, styles)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log" if log else "linear")
        lengths = sorted({r["length"] for r in list_})
        axis.set_xticks(lengths, [f"{n // 1024}K" if n >= 1024 else str(n) for n in lengths])
        if limit and any(r["status"] == "out of memory" for r in list_):
            axis.axhline(limit, color="black", linestyle=":", linewidth=1)
        axis.set(title=title, xlabel="sequence length", ylabel=label)
        if not log:
            axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
    axes[0].legend(fontsize=7)
    return figure


def _mark_out_of_memory(axis: Any, rows: list[_Row], styles: dict[str, Any]) -> None:
    for n, row in enumerate(r for r in rows if r["status"] == "out of memory" and r["provider"] in styles):
        colour = styles[row["provider"]]["color"]
        axis.plot(
            row["length"], 0.97 - 0.05 * (n % 4), "x", color=colour, transform=axis.get_xaxis_transform(), markersize=7
        )


def _against_ours(rows: list[_Row]) -> list[_Row]:
    """Standard baselines, with how many times as fast our fastest is."""
    found = []
    for same in _by(rows, lambda r: r["key"]).values():
        ours = min((r["ms"] for r in same if r["kind"] == "ours" and r["timed"]), default=None)
        found += [
            {**r, "times": r["ms"] / ours if ours and r["timed"] else None} for r in same if r["kind"] == "standard"
        ]
    return found


def _axes(count: int) -> tuple[Any, list[Any]]:
    import matplotlib.pyplot as plt

    columns = min(3, count)
    lines = -(-count // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.6 * columns, 3.4 * lines), squeeze=False, layout="constrained"
    )
    flat_axes = list(axes.flat)
    for axis in flat_axes[count:]:
        axis.set_visible(False)
    plt.close(figure)
    return figure, flat_axes


def _roofline(rows: list[_Row], styles: dict[str, Any], run: Results) -> Any:
    points = [r for r in rows if r["timed"] and r.get("tflops") and r.get("intensity")]
    dtype = points[0]["dtype"] if points else ""
    peak, copy = run.ceilings.matmul_tflops.get(dtype), run.ceilings.copy_gbytes_per_s
    points = [r for r in points if r["dtype"] == dtype]
    if not points or not peak or not copy:
        return None
    figure, (axis, *_) = _axes(1)
    for provider, list_ in _by(points, lambda r: r["provider"]).items():
        style = styles[provider]
        axis.plot(
            [r["intensity"] for r in list_],
            [r["tflops"] for r in list_],
            style["fmt"][0],
            color=style["color"],
            label=provider,
            markersize=4,
        )
    ridge = peak * 1e3 / copy
    ends = (min(ridge / 2, *(r["intensity"] for r in points)), max(ridge * 2, *(r["intensity"] for r in points)))
    axis.plot([ends[0], ridge, ends[1]], [ends[0] * copy / 1e3, peak, peak], color="black", linewidth=1)
    axis.set(
        xscale="log", yscale="log", xlabel="FLOP per byte that must move", ylabel="TFLOP/s", title=f"roofline, {dtype}"
    )
    axis.legend(fontsize=6)
    axis.grid(alpha=0.25)
    return figure


def _tiles(rows: list[_Row]) -> Any:
    families = _by([r for r in rows if r["timed"]], lambda r: f"{r['provider']}, {r['label'].rsplit('-', 1)[0]}")
    if not families:
        return None
    figure, axes = _axes(len(families))
    for axis, (title, list_) in zip(axes, families.items(), strict=False):
        queries, keys = (sorted({r["tile"][i] for r in list_}) for i in (0, 1))
        speed = {tuple(r["tile"]): r["tflops"] for r in list_}
        axis.imshow([[speed.get((q, k), float("nan")) for k in keys] for q in queries], cmap="Blues", aspect="auto")
        for (q, k), value in speed.items():
            axis.text(keys.index(k), queries.index(q), f"{value:.3g}", ha="center", va="center", fontsize=8)
        axis.set_xticks(range(len(keys)), keys)
        axis.set_yticks(range(len(queries)), queries)
        axis.set(title=f"{title}, TFLOP/s", xlabel="keys in a tile", ylabel="queries in a tile")
    return figure
