"""docs/results.md, and the numbers and the table of README.md, from the committed results."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from benchmarks import anchors, committed
from benchmarks.anchors import Anchors
from benchmarks.committed import Machines
from benchmarks.pages import figures
from benchmarks.pages.tables import Cell, table
from strobe.bench import claims
from strobe.bench.conclusions import conclusions
from strobe.bench.names import PASS_TITLES, PASSES
from strobe.bench.results import Results, Row
from strobe.measure import units
from strobe.measure.method import METHODS, SUMMARIES, SUSTAINED, TITLES, TURNS
from strobe.measure.provenance import busy_machine
from strobe.measure.statistics import geometric_mean

AGAIN = "-again"  # NAME-again.json is NAME.json once more
ANCHORS_TITLE = "Beside FlashAttention-3 and 4, over cuDNN"
_CLOSE = 0.03  # two runs of the same agree if their times differ by no more
_MEASURES = {
    "time": "TFLOP/s",
    "call": "CPU time of one call",
    "graph": "time of one call, replayed from a CUDA graph",
    "model": "tokens/s; only the attention implementation differs",
}
_Value = Callable[[Row], str]


def page(machines: Machines, elsewhere: Mapping[str, Anchors] = MappingProxyType({})) -> str:
    """`elsewhere`: machine -> what others reached there in other runs."""
    lines = [
        "# Results",
        "",
        "Generated from `benchmarks/results` by `python -m benchmarks.pages --write`; a test fails when it differs.",
        "`benchmarks/README.md` says how things are measured and how to repeat them. A difference is called one only where",
        "the 95 % intervals do not overlap.",
        "",
    ]
    for machine, results in machines.items():
        lines += _machine(machine, results, elsewhere.get(machine))
    return "\n".join(lines).rstrip("\n") + "\n"


def _machine(machine: str, results: dict[str, Results], elsewhere: Anchors | None) -> list[str]:
    whole = claims.merged(run for name, run in results.items() if not name.endswith(AGAIN))
    lines = [f"## {whole.device}", ""]
    for suite in whole.suites():
        if found := conclusions(whole, suite):
            lines += [f"Of `{suite}`:", "", *(f"- {sentence}" for sentence in found), ""]
    lines += [*(f"- *{TITLES[m]}*: {SUMMARIES[m]}." for m in METHODS if m in whole.methods()), ""]
    lines += [*(_provenance(machine, name, run) for name, run in results.items()), ""]
    if elsewhere is not None:
        cells = ((line.title, *cell) for line in anchors.comparison(elsewhere, whole.rows) for cell in _anchor(line))
        source = f"Data: `benchmarks/results/{machine}/{committed.ANCHORS}`."
        lines += [f"### {ANCHORS_TITLE}", "", f"{anchors.note(elsewhere)} {elsewhere.provenance['note']} {source}", ""]
        lines += [*table("", cells), ""]
    for name, run in results.items():
        lines += [line for rows in _groups(run) for line in _section(machine, name, run, rows)]
    return lines + _repeated(results) + _unmeasured(results)


def _anchor(line: anchors.Line) -> Iterator[tuple[str, str]]:
    for direction in ("forward", "backward"):
        yield direction, anchors.text_of_line(line, direction)
    yield "built from", line.built


def _provenance(machine: str, name: str, run: Results) -> str:
    p = run.provenance
    commit = (p["git"]["commit"] or "unknown")[:10] + (" with changes" if p["git"]["dirty"] else "")
    names = (("torch", "torch"), ("CUDA", "cuda"), ("driver", "driver"), ("NVRTC", "nvrtc"))
    versions = ", ".join(f"{what} {p[key]}" for what, key in names if p.get(key))
    matmul = ", ".join(f"{dtype} {units.rate(value)}" for dtype, value in run.ceilings.matmul_tflops.items())
    copy = "" if run.ceilings.copy_gbytes_per_s is None else f", copy {units.bandwidth(run.ceilings.copy_gbytes_per_s)}"
    unfinished = "" if run.complete else " Stopped before its end."
    warning = "" if busy_machine(p) is None else f" {busy_machine(p)}"
    return (
        f"- `benchmarks/results/{machine}/{name}.json`: {p['date'][:10]}, commit {commit}, {versions}; "
        f"matrix product {matmul}{copy}.{unfinished}{warning}"
    )


# ---- the tables of a file


def _groups(run: Results) -> Iterator[list[Row]]:
    """Rows that share a table: one suite, pass, measure and method. Those without a timed row have none."""
    found: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in run.rows:
        if row.case.measure in _MEASURES:
            found[row.case.suite, row.case.direction, row.case.measure, row.method].append(row)
    yield from (rows for rows in found.values() if any(row.timed for row in rows))


def _section(machine: str, name: str, run: Results, rows: list[Row]) -> list[str]:
    case, method = rows[0].case, rows[0].method
    what = _MEASURES[case.measure]
    lines = [
        f"### `{case.suite}`, {PASS_TITLES[case.direction]}, {TITLES[method]} (`{name}`): {what.split(';')[0]}",
        "",
    ]
    lines += [*table(what, [*_by_provider(rows, _speed), *_over_ours(rows)]), ""]
    if sources := ", ".join(dict.fromkeys(row.energy.source for row in rows if row.energy is not None)):
        lines += [*table(f"joules per TFLOP ({sources})", _by_provider(rows, _joules)), ""]
    if most := claims.memory_in_q(claims.by_case(rows, method)):
        said = ", ".join(f"`{provider}` {size:.2f}" for provider, size in most.items())
        lines += [f"Most memory beyond inputs, outputs and gradients, in sizes of q: {said}.", ""]
    if not name.endswith(AGAIN) and figures.speed(run, "grid36", case.direction, method) and case.suite == "grid36":
        lines += [f"![Speed against length](figures/{figure_name(machine, name, case.direction, method)})", ""]
    return lines


def _by_provider(rows: list[Row], value: _Value) -> Iterator[Cell]:
    """A line for each case, a column for each provider that was timed."""
    timed = {row.provider for row in rows if row.timed}
    for row in rows:
        if row.provider in timed:
            text = value(row) if row.timed else "*oom*" if row.status == "out of memory" else units.MISSING
            yield row.case.label, f"`{row.provider}`", text


def _speed(row: Row) -> str:
    if row.case.measure == "model":
        return f"{row.tokens_per_s or 0:,.0f}"
    return units.milliseconds(row.ms) if row.case.measure != "time" or row.tflops is None else f"{row.tflops:.3g}"


def _joules(row: Row) -> str:
    joules = claims.joules_per_tflop(row)
    return units.MISSING if joules is None else f"{joules:.2f}"


def _over_ours(rows: list[Row]) -> Iterator[Cell]:
    """Yield how many times as long each provider takes as our fastest, in the cases that both can do."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for same in claims.by_case(rows, rows[0].method).values():
        best = claims.fastest(same, "ours")
        for row in same:
            if best is not None and row.timed and row.ms and best.ms:
                ratios[row.provider].append(row.ms / best.ms)
    for provider, of in ratios.items():
        yield "time over our fastest, geometric mean", f"`{provider}`", f"{geometric_mean(of):.2f}"


def figure_name(machine: str, name: str, direction: str, method: str) -> str:
    ending = "".join(
        f"-{part}" for part in (direction, method) if part not in ("forward", "turns") and part not in name
    )
    return f"{machine}-{name}{ending}.svg"


# ---- the end: how far runs repeat, and what was not measured


def _repeated(results: dict[str, Results]) -> list[str]:
    lines = []
    for name, again in results.items():
        first = results.get(name.removesuffix(AGAIN))
        if name.endswith(AGAIN) and first is not None:
            before = {row.identity: row.ms for row in first.rows if row.timed and row.ms}
            pairs = [(row.ms, before[row.identity]) for row in again.rows if row.timed and row.identity in before]
            close = sum(abs((ms or 0) / other - 1) <= _CLOSE for ms, other in pairs)
            lines.append(f"- `{name}`: {close} of {len(pairs)} times differ from the first run's by at most 3 %.")
    return ["### Repeated", "", *lines, ""] if lines else []


def _unmeasured(results: dict[str, Results]) -> list[str]:
    """Reason by reason. Out of memory is a result, and stands in the tables."""
    who: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in (row for run in results.values() for row in run.rows):
        if not row.timed and row.status != "out of memory":
            who[row.status, row.reason or ""].add(f"`{row.provider}`")
    lines = [f"- {status}: {why}: {', '.join(sorted(names))}" for (status, why), names in sorted(who.items())]
    return ["### Not measured", "", *lines, ""] if lines else []


# ---- README.md


def _first_gpu(machines: Machines) -> tuple[str, dict[str, Results]] | None:
    """The first GPU with a grid, and its runs."""
    for machine, results in machines.items():
        runs = {name: run for name, run in results.items() if run.on_gpu and not name.endswith(AGAIN)}
        if any("grid36" in run.suites() for run in runs.values()):
            return machine, runs
    return None


def readme_numbers(machines: Machines, elsewhere: Mapping[str, Anchors]) -> str:
    """The first conclusions; nothing without results."""
    if (found := _first_gpu(machines)) is None:
        return ""
    machine, runs = found
    whole = claims.merged(runs.values())
    plain = dataclasses.replace(whole, rows=[row for row in whole.rows if row.method in (TURNS, SUSTAINED)])
    said = [
        sentence for direction in ("forward", "backward") for sentence in conclusions(plain, "grid36", [direction])[:1]
    ]
    swept = conclusions(plain, "sweep", ["forward"])
    wanted = [s for s in swept if (s.startswith("Forward") and "standard attention" in s) or s.startswith("Beyond")]
    said += [" ".join(wanted)] if wanted else []
    lines = [f"Measured on one {whole.device}:", "", *(f"- {sentence}" for sentence in said)]
    if machine in elsewhere:
        lines += ["", _readme_anchors(elsewhere[machine], whole)]
    return "\n".join([*lines, ""])


def _readme_anchors(elsewhere: Anchors, whole: Results) -> str:
    """The first question of whoever has a Hopper GPU."""
    lines = anchors.comparison(elsewhere, whole.rows)
    shown = [line for line in lines if line.title not in (anchors.BEST, "FlashAttention-2")]
    said = "; ".join(
        ", ".join(f"{line.title} {line.means[d]:.3f}" for line in shown if d in line.means) + f" {d}"
        for d in elsewhere.tflops
    )
    anchor = ANCHORS_TITLE.lower().replace(" ", "-").replace(",", "")
    return (
        f"FlashAttention-3 and 4 did not run beside it. By `do_bench`, over the cuDNN of their own runs: {said}; "
        f"[how these were taken](docs/results.md#{anchor})."
    )


def readme_table(machines: Machines) -> str:
    """The grid of the first GPU that has one, and its figure."""
    if (found := _first_gpu(machines)) is None:
        return ""
    machine, runs = found
    orders = ((direction, method) for direction in PASSES for method in (TURNS, SUSTAINED))
    grids = (
        (direction, method, name, cases)
        for direction, method in orders
        for name, run in runs.items()
        if (cases := claims.selected(run.rows, "grid36", direction, method))
    )
    direction, method, name, cases = next(grids)
    peers = ", ".join(f"`{peer}`" for peer in claims.rivals(cases, "peer"))
    what = f"{PASS_TITLES[direction]}, {TITLES[method]}"
    lines = [
        f"TFLOP/s {what}, bfloat16, 16384 tokens, heads × dim = 2048: our fastest backend (in brackets: the "
        f"fastest of {peers}).",
        "",
        *table("head dim, mask", (_pair(rows) for rows in cases.values())),
        "",
        f"![Speed against length, {what}](docs/figures/{figure_name(machine, name, direction, method)})",
        "",
        "Backward, sustained at the power limit, joules, standard attention, memory and models: "
        "[docs/results.md](docs/results.md). How this was measured: [benchmarks/README.md](benchmarks/README.md#two-methods).",
    ]
    return "\n".join([*lines, ""])


def _pair(rows: list[Row]) -> Cell:
    """Our fastest, and the fastest peer in brackets."""
    case = rows[0].case
    speeds = [row.tflops for kind in ("ours", "peer") if (row := claims.fastest(rows, kind)) is not None and row.tflops]
    text = f"{speeds[0]:.0f}" + "".join(f" ({speed:.0f})" for speed in speeds[1:])
    return f"{case.dim}, {case.mask.name}", units.length(case.len_k), text
