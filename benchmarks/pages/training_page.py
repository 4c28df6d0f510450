"""The proof of training in docs/training.md: loss curves of a small GPT, from what `examples/train_gpt.py --compare --out`
wrote into benchmarks/results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.pages import figures
from benchmarks.pages.tables import Cell, table
from strobe.measure import palette

KIND = "train gpt"
PAGE = Path("docs", "training.md")


def load(root: Path) -> dict[Path, dict[str, Any]]:
    """Every file of that kind, wherever it lies below benchmarks/results: its place there -> what it holds."""
    results = root / "benchmarks" / "results"
    paths = sorted(results.glob("**/train-gpt*.json"), key=lambda path: (path.parent, path.stem))
    found = {path.relative_to(results): _read(path) for path in paths}
    for place, data in found.items():
        if data.get("kind") != KIND or not data.get("verdict"):
            raise ValueError(
                f"{results / place} must be a complete comparison of {KIND!r}: train_gpt.py --compare --out"
            )
    return found


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def figure_name(place: Path) -> str:
    """h200/train-gpt.json -> h200-train-gpt.svg."""
    return f"{'-'.join(place.with_suffix('').parts)}.svg"


def drawings(root: Path) -> dict[Path, figures.Committed]:
    return {root / "docs" / "figures" / figure_name(place): drawing(data) for place, data in load(root).items()}


# ---- the block of docs/training.md -----------------------------------------------------------------------------------


def block(root: Path) -> str:
    lines: list[str] = []
    for place, data in load(root).items():
        lines += [*_section(place, data), ""]
    return "\n".join(lines)


def _section(place: Path, data: dict[str, Any]) -> list[str]:
    p, s, verdict = data["provenance"], data["settings"], data["verdict"]
    sizes = ", ".join(f"{name} {s[name]}" for name in ("layers", "heads", "width", "batch", "context", "steps"))
    judged = ", ".join(f"`{name}`" for name in verdict["distance"])
    many = len(verdict["distance"]) > 1
    agree = ("agree" if many else "agrees") if verdict["agrees"] else ("do not agree" if many else "does not agree")
    return [
        f"**{p['device']['name']}**, {s['dtype']}: {judged} {agree} with math attention. Largest distance: "
        f"{max(verdict['distance'].values()) / verdict['noise']:.2g} × the noise.",
        "",
        f"{sizes}; torch {p['torch']}, {p['date'][:10]}, commit "
        f"{(p['git']['commit'] or 'unknown')[:7]}, `benchmarks/results/{place.as_posix()}`, made by",
        "",
        "```sh",
        " ".join([*(f"{name}={value}" for name, value in p["environment"].items()), f"python examples/{p['command']}"]),
        "```",
        "",
        f"![Loss curves, and how far each is from that of math attention: {p['device']['name']}, {s['dtype']}]"
        f"(figures/{figure_name(place)})",
        "",
        *table("attention", (cell for run in data["runs"] for cell in _row(data, run))),
        "",
        f"The noise is {verdict['noise']:.2g}, the largest distance between two runs of math attention from one seed. "
        f"Another seed moves the curve by {verdict['another_seed']:.2g}.",
    ]


def _row(data: dict[str, Any], run: dict[str, Any]) -> Iterator[Cell]:
    name = title(data, run)
    for way in ("forward", "backward"):
        yield name, way, run[way] if run["attention"].startswith("strobe") else "PyTorch"
    yield name, "last validation loss", f"{run['validation'][-1]:.4f}"
    if run is not _exact(data):
        yield name, "distance from math", f"{distance_from(data, run):.2g}"


def _exact(data: dict[str, Any]) -> dict[str, Any]:
    """The run that the others are compared with."""
    return next(run for run in data["runs"] if (run["attention"], run["seed"]) == ("math", data["runs"][0]["seed"]))


def distance_from(data: dict[str, Any], run: dict[str, Any]) -> float:
    """Root mean square of the difference from the math run, over training and validation losses."""
    ours, exact = (r["loss"] + r["validation"] for r in (run, _exact(data)))
    return (sum((a - b) ** 2 for a, b in zip(ours, exact, strict=True)) / len(exact)) ** 0.5


def title(data: dict[str, Any], run: dict[str, Any]) -> str:
    """`math`, or what is special about it."""
    other_seed = run["seed"] != data["runs"][0]["seed"]
    kind, _, detail = run["attention"].partition(":")
    name = f"math, keys shuffled ({detail})" if kind == "shuffled" else run["attention"]
    return f"{name}, another seed" if other_seed else name


# ---- the figure ------------------------------------------------------------------------------------------------------


def drawing(data: dict[str, Any]) -> figures.Committed:
    curves = [(title(data, run), run["loss"], run["validation_steps"], run["validation"]) for run in data["runs"]]
    digest = hashlib.sha256(json.dumps([curves, palette.COLOURS]).encode()).hexdigest()[:16]
    return figures.Committed(digest, lambda: figures.svg(_draw(data), digest))


def _draw(data: dict[str, Any]) -> Any:
    """Left: the losses. Right: how far each run is from the math run, step by step, smoothed so that lines can be told
    apart."""
    figure, (left, right) = figures.panels(2)
    kinds = [(title(data, r), "ours" if r["attention"].startswith("strobe") else "standard") for r in data["runs"]]
    styles, exact = palette.styles(kinds), _exact(data)
    for run, (name, _) in zip(data["runs"], kinds, strict=True):
        style = styles[name]
        line = {
            "color": style.colour,
            "linestyle": "--" if style.dashed else "-",
            "label": name,
            "zorder": 2 + style.width,
        }
        steps = range(1, len(run["loss"]) + 1)
        left.plot(steps, run["loss"], linewidth=style.width / 2, alpha=0.8, **line)
        if run is not exact:
            far = [abs(a - b) for a, b in zip(run["loss"], exact["loss"], strict=True)]
            right.plot(steps, smoothed(far), linewidth=style.width / 1.5, **line)
    left.set(xlabel="step", ylabel="training loss, nats per byte")
    right.set(xlabel="step", ylabel="distance from math attention", yscale="log")
    for axis in (left, right):
        axis.grid(alpha=0.25)
    names = dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
    figure.legend(names.values(), names.keys(), fontsize=8, loc="outside lower center", ncols=3)
    return figure


def smoothed(values: list[float], half: int = 5) -> list[float]:
    """Root mean square over 2 half + 1 neighbours, fewer at the ends."""
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [(sum(x * x for x in w) / len(w)) ** 0.5 for w in windows]
