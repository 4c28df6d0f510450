"""The numbers in the documents, made from the committed results: docs/results.md, blocks of README.md and of the users'
pages, the figures. And the table of backends in README.md, made from the code."""

from __future__ import annotations

from pathlib import Path

from benchmarks import committed
from benchmarks.pages import figures, generated, results_page, tables, training_page
from benchmarks.pages.generated import marks, replace_between
from benchmarks.pages.results_page import AGAIN, figure_name
from strobe.bench.names import PASSES
from strobe.tools import support


def texts(root: Path) -> dict[Path, str]:
    """Every generated file with the text it should have. A page that is not there has no blocks."""
    machines, elsewhere = committed.runs(root), committed.anchors(root)
    files = {root / "docs" / "results.md": results_page.page(machines, elsewhere)}
    blocks = [
        ("README.md", "numbers", lambda: results_page.readme_numbers(machines, elsewhere)),
        ("README.md", "results", lambda: results_page.readme_table(machines)),
        ("README.md", "support table", lambda: f"{support.table()}\n"),
        ("docs/training.md", "training", lambda: training_page.block(root)),
        *((page, name, lambda lines=lines: "\n".join([*lines(root), ""])) for page, name, lines in tables.BLOCKS),
    ]
    for page, name, block in blocks:
        path = root / page
        if path.exists():
            text = files.get(path) or path.read_text(encoding="utf-8")
            files[path] = replace_between(text, *marks(name), block())
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
    late = generated.outdated(texts(root))
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
    if any(path in drawn for path in late) and (problem := figures.unavailable()) is not None:
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
