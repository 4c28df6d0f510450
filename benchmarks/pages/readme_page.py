"""The generated parts of README.md: three numbers, and one table with its figure. Every other table is in docs/results.md."""

from __future__ import annotations

from benchmarks.committed import Machines
from benchmarks.pages.anchors_page import TITLE as ANCHORS_TITLE
from benchmarks.pages.repeated_page import AGAIN
from benchmarks.pages.results_page import figure_name, grid_table
from strobe.bench import anchors, claims
from strobe.bench.anchors import Anchors
from strobe.bench.conclusions import against, conclusions
from strobe.bench.names import PASS_TITLES, PASSES
from strobe.bench.results import Results, Row
from strobe.measure import units
from strobe.measure.method import METHODS, SUSTAINED, TITLES, TURNS
from strobe.measure.statistics import geometric_mean

BEGIN, END = "<!-- results: begin (python -m benchmarks.pages --write) -->", "<!-- results: end -->"
NUMBERS_BEGIN, NUMBERS_END = "<!-- numbers: begin (python -m benchmarks.pages --write) -->", "<!-- numbers: end -->"
_GRID = "grid36"
_STANDARD = ("sweep", _GRID)  # suites with standard attention, the one with most of them first


def _first_gpu(machines: Machines) -> tuple[str, dict[str, Results]] | None:
    """The first GPU with a grid, and its runs."""
    for machine, results in machines.items():
        runs = {name: run for name, run in results.items() if run.on_gpu and not name.endswith(AGAIN)}
        if any(
            grid_table(run, direction, method) for run in runs.values() for direction in PASSES for method in METHODS
        ):
            return machine, runs
    return None


def numbers(machines: Machines, elsewhere: dict[str, Anchors]) -> str:
    """How much faster than what, and how much memory; nothing without results."""
    if (found := _first_gpu(machines)) is None:
        return ""
    machine, runs = found
    whole = claims.merged(runs.values())
    lines = [*_against_peers(whole), *_against_standard(whole), *_memory(whole)]
    if machine in elsewhere:
        lines += ["", _against_anchors(elsewhere[machine], whole)]
    return "\n".join([f"Measured on one {whole.device}:", "", *lines, ""])


def _against_peers(whole: Results) -> list[str]:
    said: list[str] = []
    ran: set[str] = set()
    counts: set[int] = set()
    fastest: list[Row] = []
    for method in (TURNS, SUSTAINED):
        means = []
        for direction in PASSES:
            cases = claims.selected(whole.rows, _GRID, direction, method)
            duels = claims.duels(cases, "peer")
            if duels:
                mean = geometric_mean([(b.ms or 0.0) / (a.ms or 1.0) for a, b in duels])
                means.append(f"{units.faster(mean)} {PASS_TITLES[direction]}")
                ran |= set(claims.rivals(cases, "peer"))
                counts.add(len(duels))
                fastest += [other for _, other in duels]
        if means:
            said.append(f"{', '.join(means)} {TITLES[method]}")
    if not said:
        return []
    others = against(fastest, sorted(ran), "other fused attention")
    return [
        f"- Against {others}: {'; '.join(said)}. Geometric means of {' and '.join(map(str, sorted(counts)))} cases."
    ]


def _against_standard(whole: Results) -> list[str]:
    for suite in _STANDARD:
        cases = claims.selected(whole.rows, suite)
        duels = claims.duels(cases, "standard")
        if duels:
            ratios = [(b.ms or 0.0) / (a.ms or 1.0) for a, b in duels]
            names = ", ".join(f"`{name}`" for name in claims.rivals(cases, "standard"))
            mean, ends = units.faster(geometric_mean(ratios)), (units.times(min(ratios)), units.times(max(ratios)))
            return [
                f"- Against standard attention, the fastest of {names} in each case: {mean} forward "
                f"({ends[0]} to {ends[1]}), geometric mean of {len(duels)} cases."
            ]
    return []


def _memory(whole: Results) -> list[str]:
    for suite in _STANDARD:
        if found := [s for s in conclusions(whole, suite, PASSES[:1]) if s.startswith("Beyond ")]:
            return [f"- Memory: {found[0][0].lower()}{found[0][1:]}"]
    return []


def _against_anchors(elsewhere: Anchors, whole: Results) -> str:
    """The first question of whoever has a Hopper GPU."""
    lines = {line.title: line for line in anchors.comparison(elsewhere, whole.rows)}
    shown = [line for title, line in lines.items() if title not in (anchors.BEST, "FlashAttention-2")]
    said = "; ".join(
        ", ".join(f"{line.title} {line.means[d]:.3f}" for line in shown if d in line.means) + f" {d}"
        for d in elsewhere.tflops
    )
    anchor = ANCHORS_TITLE.lower().replace(" ", "-").replace(",", "")
    return (
        f"FlashAttention-3 and 4 did not run beside it. By `do_bench`, over the cuDNN of their own runs: {said}; "
        f"[how these were taken](docs/results.md#{anchor})."
    )


def results(machines: Machines) -> str:
    """One table and its figure: the grid of the first GPU that has one."""
    if (found := _first_gpu(machines)) is None:
        return ""
    machine, runs = found
    grids = (
        (direction, method, name, table)
        for direction in PASSES
        for method in (TURNS, SUSTAINED)
        for name, run in runs.items()
        if (table := grid_table(run, direction, method))
    )
    direction, method, name, table = next(grids)
    title = f"Speed against length, {PASS_TITLES[direction]}, {TITLES[method]}"
    figure = f"![{title}](docs/figures/{figure_name(machine, name, direction, method)})"
    more = (
        "Backward, sustained at the power limit, joules, standard attention, memory and models: "
        "[docs/results.md](docs/results.md). How this was measured: [benchmarks/README.md](benchmarks/README.md#two-methods)."
    )
    return "\n".join([*table, "", figure, "", more, ""])
