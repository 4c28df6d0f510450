"""The numbers in the documents, made from the committed results: two blocks of README.md, the whole of docs/results.md,
the tables of seven other pages, the figures. And the table of backends in README.md, made from the code.

Where there are no results for something, nothing is said about it."""

from __future__ import annotations

from pathlib import Path

from benchmarks import committed
from benchmarks.pages import (
    backward_page,
    figures,
    forward_page,
    method_page,
    paged_page,
    readme_page,
    training_page,
    variants_page,
    wide_page,
)
from benchmarks.pages.generated import replace_between
from benchmarks.pages.readme_page import BEGIN, END, NUMBERS_BEGIN, NUMBERS_END
from benchmarks.pages.repeated_page import AGAIN
from benchmarks.pages.results_page import figure_name, page
from strobe.bench.figures import unavailable
from strobe.bench.names import PASSES
from strobe.tools import support

SUPPORT_BEGIN = "<!-- support table: begin (python -m benchmarks.pages --write) -->"
SUPPORT_END = "<!-- support table: end -->"


def texts(root: Path) -> dict[Path, str]:
    """Every generated file with the text it should have."""
    machines = committed.runs(root)
    elsewhere = committed.anchors(root)
    files = {root / "docs" / "results.md": page(machines, elsewhere)}
    readme = root / "README.md"
    if readme.exists():
        text = readme.read_text(encoding="utf-8")
        for begin, end, block in (
            (BEGIN, END, readme_page.results(machines)),
            (NUMBERS_BEGIN, NUMBERS_END, readme_page.numbers(machines, elsewhere)),
            (SUPPORT_BEGIN, SUPPORT_END, f"{support.table()}\n"),
        ):
            text = replace_between(text, begin, end, block) if begin in text else text
        files[readme] = text
    hopper_backward = root / backward_page.PAGE
    for path, begin, end, block in (
        (root / forward_page.PAGE, forward_page.BEGIN, forward_page.END, forward_page.block(root)),
        (hopper_backward, backward_page.BEGIN, backward_page.END, backward_page.block(root)),
        (hopper_backward, backward_page.TURNS_BEGIN, backward_page.TURNS_END, backward_page.turns_block(root)),
        (hopper_backward, backward_page.SUMS_BEGIN, backward_page.SUMS_END, backward_page.sums_block(root)),
        (hopper_backward, backward_page.STAGES_BEGIN, backward_page.STAGES_END, backward_page.stages_block(root)),
        (root / "benchmarks" / "README.md", method_page.BEGIN, method_page.END, method_page.block(root)),
        (root / variants_page.PAGE, variants_page.BEGIN, variants_page.END, variants_page.block(root)),
        (root / variants_page.PAGE, variants_page.BESIDE_BEGIN, variants_page.BESIDE_END, variants_page.beside(root)),
        (root / paged_page.PAGE, paged_page.BEGIN, paged_page.END, paged_page.block(root)),
        (root / wide_page.PAGE, wide_page.BEGIN, wide_page.END, wide_page.block(root)),
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
