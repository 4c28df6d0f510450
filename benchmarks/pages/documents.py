"""The numbers in the documents, made from the committed results: a block of README.md, the whole of docs/results.md,
the tables of four other pages, the figures. And the table of backends in README.md, made from the code.

Where there are no results for something, nothing is said about it."""

from __future__ import annotations

from pathlib import Path

from benchmarks import committed
from benchmarks.committed import Machines
from benchmarks.pages import backward_page, figures, forward_page, method_page, training_page
from benchmarks.pages.generated import replace_between
from benchmarks.pages.results_page import AGAIN, energy_tables, figure_name, grid_table, page
from strobe.bench import claims
from strobe.bench.conclusions import conclusions
from strobe.bench.figures import unavailable
from strobe.bench.names import PASS_TITLES, PASSES
from strobe.measure.method import SUSTAINED, TITLES, TURNS
from strobe.tools import support

BEGIN, END = "<!-- results: begin (python -m benchmarks.pages --write) -->", "<!-- results: end -->"
SUPPORT_BEGIN = "<!-- support table: begin (python -m benchmarks.pages --write) -->"
SUPPORT_END = "<!-- support table: end -->"


def texts(root: Path) -> dict[Path, str]:
    """Every generated file with the text it should have."""
    machines = committed.runs(root)
    files = {root / "docs" / "results.md": page(machines)}
    readme = root / "README.md"
    if readme.exists() and BEGIN in (text := readme.read_text(encoding="utf-8")):
        files[readme] = replace_between(text, BEGIN, END, readme_block(machines))
        if SUPPORT_BEGIN in text:
            files[readme] = replace_between(files[readme], SUPPORT_BEGIN, SUPPORT_END, f"{support.table()}\n")
    hopper_backward = root / backward_page.PAGE
    for path, begin, end, block in (
        (root / forward_page.PAGE, forward_page.BEGIN, forward_page.END, forward_page.block(root)),
        (hopper_backward, backward_page.BEGIN, backward_page.END, backward_page.block(root)),
        (hopper_backward, backward_page.TURNS_BEGIN, backward_page.TURNS_END, backward_page.turns_block(root)),
        (root / "benchmarks" / "README.md", method_page.BEGIN, method_page.END, method_page.block(root)),
        (root / training_page.PAGE, training_page.BEGIN, training_page.END, training_page.block(root)),
    ):
        if path.exists():
            text = files.get(path) or path.read_text(encoding="utf-8")
            files[path] = replace_between(text, begin, end, block)
    return files


def drawings(root: Path) -> dict[Path, figures.Committed]:
    """Every committed figure."""
    found = training_page.drawings(root)
    for machine, results in committed.runs(root).items():
        for name, run in results.items():
            for direction in () if name.endswith(AGAIN) else PASSES:
                for method in run.methods():
                    drawing = figures.speed(run, "grid36", direction, method)
                    if drawing is not None:
                        found[root / "docs" / "figures" / figure_name(machine, name, direction, method)] = drawing
    return found


def readme_block(machines: Machines) -> str:
    """What the grid of the first GPU that has one says; nothing without one."""
    for machine, results in machines.items():
        runs = {name: run for name, run in results.items() if run.on_gpu and not name.endswith(AGAIN)}
        grids = [
            (direction, method, name, table)
            for direction in PASSES
            for method in (TURNS, SUSTAINED)
            for name, run in runs.items()
            if (table := grid_table(run, direction, method))
        ]
        if not grids:
            continue
        whole = claims.merged(runs.values())
        lines = ["## Measured", "", f"On one {whole.device}:", ""]
        lines += [*(f"- {sentence}" for sentence in conclusions(whole, "grid36")), ""]
        for direction in dict.fromkeys(direction for direction, *_ in grids):
            of_pass = {method: (name, table) for d, method, name, table in reversed(grids) if d == direction}
            for method in (m for m in (TURNS, SUSTAINED) if m in of_pass):
                name, table = of_pass[method]
                for shown in (table, *energy_tables(runs[name], direction, method)[:1]):
                    lines += [*shown, ""]
            method = next(m for m in (TURNS, SUSTAINED) if m in of_pass)
            figure = figure_name(machine, of_pass[method][0], direction, method)
            title = f"Speed against length, {PASS_TITLES[direction]}, {TITLES[method]}"
            lines += [f"![{title}](docs/figures/{figure})", ""]
        lines += [
            "Standard attention, memory, models and every other table: [docs/results.md](docs/results.md). How this was "
            "measured, and why the method matters at a GPU's power limit: "
            "[benchmarks/README.md](benchmarks/README.md#two-methods).",
            "",
        ]
        return "\n".join(lines)
    return ""


def outdated(root: Path) -> list[Path]:
    late = [p for p, text in texts(root).items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    drawn = drawings(root)
    machines = {path.parent.name for path in (root / "benchmarks" / "results").glob("*/*.json")} | {"train-gpt"}
    figures_there = (root / "docs" / "figures").glob("*.svg")  # others draw, too
    stale = {p for p in figures_there if p not in drawn and any(p.name.startswith(f"{m}-") for m in machines)}
    return [*late, *(p for p, drawing in drawn.items() if not drawing.is_current(p)), *sorted(stale)]


def main(arguments: list[str], root: Path | None = None) -> int:
    root = root or committed.ROOT
    late = outdated(root)
    if not arguments:
        for path in late:
            print(f"out of date: {path.relative_to(root)}")
        return 1 if late else 0
    wanted, drawn = texts(root), drawings(root)
    if any(path in drawn for path in late) and (problem := unavailable()) is not None:
        raise SystemExit(f"the figures cannot be drawn: {problem}")
    for path in late:
        if path in wanted or path in drawn:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path] if path in wanted else drawn[path].draw(), encoding="utf-8")
            print(f"wrote {path.relative_to(root)}")
        else:
            path.unlink()
            print(f"removed {path.relative_to(root)}")
    return 0
