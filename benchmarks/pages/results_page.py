"""docs/results.md: every table of it, from results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from benchmarks import committed
from benchmarks.committed import Machines
from benchmarks.pages import anchors_page, comparisons, figures, model_page, repeated_page
from benchmarks.pages.repeated_page import AGAIN
from strobe.bench import claims
from strobe.bench.anchors import Anchors
from strobe.bench.case import BenchCase
from strobe.bench.compile_time import CALLED, COMPILED
from strobe.bench.conclusions import conclusions
from strobe.bench.names import PASS_TITLES, PASSES
from strobe.bench.results import Results, Row
from strobe.measure import units
from strobe.measure.method import METHODS, SUMMARIES, SUSTAINED, TITLES
from strobe.measure.palette import KINDS
from strobe.measure.provenance import busy_machine


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
    first = next(iter(results.values()))
    lines = [f"## {first.device}", ""]
    for suite in dict.fromkeys(suite for run in results.values() for suite in run.suites()):
        whole = claims.merged(run for name, run in results.items() if not name.endswith(AGAIN))
        if found := conclusions(whole, suite):
            lines += [f"Of `{suite}`:", "", *(f"- {sentence}" for sentence in found), ""]
    methods = [m for m in METHODS if any(m in run.methods() for run in results.values())]
    lines += [*(f"- *{TITLES[m]}*: {SUMMARIES[m]}." for m in methods), ""]
    lines += [*(line for name, run in results.items() for line in _provenance(machine, name, run)), ""]
    if elsewhere is not None:
        data = f"benchmarks/results/{machine}/{committed.ANCHORS}"
        lines += anchors_page.section(data, elsewhere, (r for n, r in results.items() if not n.endswith(AGAIN)))
    for name, run in results.items():
        lines += _grids(machine, name, run)
        for suite in run.suites():
            for method in run.methods():
                lines += _against_standard(run, suite, method)
            for direction in PASSES:
                lines += _memory(run, suite, direction)
        lines += _by_case(run) + model_page.tables(run) + _overhead(run) + _compile(run)
    lines += repeated_page.repeatability(results)
    lines += repeated_page.unmeasured(results)
    return lines


def _provenance(machine: str, name: str, run: Results) -> list[str]:
    p = run.provenance
    commit = (p["git"]["commit"] or "unknown")[:10] + (" with changes" if p["git"]["dirty"] else "")
    versions = ", ".join(
        f"{what} {p[key]}"
        for what, key in (("torch", "torch"), ("CUDA", "cuda"), ("driver", "driver"), ("NVRTC", "nvrtc"))
        if p.get(key)
    )
    matmul = ", ".join(f"{dtype} {units.rate(value)}" for dtype, value in run.ceilings.matmul_tflops.items())
    copy = "" if run.ceilings.copy_gbytes_per_s is None else f", copy {units.bandwidth(run.ceilings.copy_gbytes_per_s)}"
    unfinished = "" if run.complete else " Stopped before its end."
    warning = busy_machine(p)
    return [
        f"- `benchmarks/results/{machine}/{name}.json`: {p['date'][:10]}, commit {commit}, {versions}; "
        f"matrix product {matmul}{copy}.{unfinished}{'' if warning is None else f' {warning}'}"
    ]


# ---- the grid


def _grids(machine: str, name: str, run: Results) -> list[str]:
    lines = []
    for direction in PASSES:
        for method in run.methods():
            table = grid_table(run, direction, method)
            if not table:
                continue
            lines += [f"### The grid, {PASS_TITLES[direction]}, {TITLES[method]} (`{name}`)", "", *table, ""]
            for energy in energy_tables(run, direction, method):
                lines += [*energy, ""]
            lines += [*mean_ratios(run, direction, method), "", *_no_fused_softmax(run)]
            lines += [*memory_line(claims.selected(run.rows, "grid36", direction, method)), ""]
            if not name.endswith(AGAIN) and figures.speed(run, "grid36", direction, method) is not None:
                lines += [f"![Speed against length](figures/{figure_name(machine, name, direction, method)})", ""]
    return lines


_FUSED_SOFTMAX = "megatron-fused-softmax"


def _no_fused_softmax(run: Results) -> list[str]:
    """Why Megatron is here without its own softmax, where it is."""
    timed = {row.provider for row in run.rows if row.timed}
    if "megatron-local" not in timed or _FUSED_SOFTMAX in timed:
        return []
    return [
        "Megatron has a fused softmax: three extensions of Apex that scale, mask and normalise in one pass over the scores. "
        "They need nvcc and were not built for this run, so `megatron-local` is Megatron with torch's softmax. "
        f"`{_FUSED_SOFTMAX}` times them where they are installed. They write and read the matrix of scores, too.",
        "",
    ]


def figure_name(machine: str, name: str, direction: str, method: str) -> str:
    ending = "".join(
        f"-{part}" for part in (direction, method) if part not in ("forward", "turns") and part not in name
    )
    return f"{machine}-{name}{ending}.svg"


def grid_table(run: Results, direction: str, method: str) -> list[str]:
    """Best of ours in TFLOP/s, and the fastest peer, for the 36 cells."""
    head = (
        f"TFLOP/s {TITLES[method]}, {PASS_TITLES[direction]}, bfloat16, 16384 tokens, heads × dim = 2048: our fastest "
        f"backend{_in_brackets(claims.rivals(claims.selected(run.rows, 'grid36', direction, method), 'peer'))}."
    )
    return _grid(run, direction, method, head, lambda row: row.tflops, lambda value: f"{value:.0f}")


def _in_brackets(ran: list[str]) -> str:
    names = ", ".join(f"`{name}`" for name in ran)
    if not ran:
        return ""
    return f" (in brackets: {'' if len(ran) == 1 else 'the faster of ' if len(ran) == 2 else 'the fastest of '}{names})"


def energy_tables(run: Results, direction: str, method: str) -> list[list[str]]:
    """Joules per TFLOP and per 1,000 tokens of the same cells; none without joules."""
    rows = [r for r in run.rows if (r.method, r.case.direction) == (SUSTAINED, direction) and r.energy is not None]
    if method != SUSTAINED or not rows:
        return []
    sources = ", ".join(dict.fromkeys(r.energy.source for r in rows if r.energy is not None))
    tables: tuple[tuple[str, Callable[[Row], float | None]], ...] = (
        ("Joules per TFLOP", claims.joules_per_tflop),
        ("Joules per 1,000 tokens", lambda row: None if row.energy is None else row.energy.joules_per_1000_tokens),
    )
    return [
        _grid(
            run, direction, method, f"{what} of the same providers ({sources}).", value, lambda number: f"{number:.2f}"
        )
        for what, value in tables
    ]


def _grid(
    run: Results,
    direction: str,
    method: str,
    head: str,
    value: Callable[[Row], float | None],
    written: Callable[[float], str],
) -> list[str]:
    cases = claims.selected(run.rows, "grid36", direction, method)
    if not any(claims.fastest(rows, "ours") for rows in cases.values()):
        return []
    facts = {key: rows[0].case for key, rows in cases.items()}
    return [head, "", *cells_table(facts, {key: _pair(rows, value, written) for key, rows in cases.items()})]


def cells_table(cases: dict[str, BenchCase], cells: dict[str, str]) -> list[str]:
    """A line for each head dim and mask, a column for each length."""
    lengths = sorted({case.len_k for case in cases.values()})
    lines = ["| head dim, mask | " + " | ".join(units.length(n) for n in lengths) + " |"]
    lines += ["|---|" + "---|" * len(lengths)]
    for dim, mask in dict.fromkeys((case.dim, case.mask.name) for case in cases.values()):
        mine = {case.len_k: cells[key] for key, case in cases.items() if (case.dim, case.mask.name) == (dim, mask)}
        lines.append(f"| {dim}, {mask} | " + " | ".join(mine.get(n, units.MISSING) for n in lengths) + " |")
    return lines


def _pair(rows: list[Row], value: Callable[[Row], float | None], written: Callable[[float], str]) -> str:
    ours, peer = claims.fastest(rows, "ours"), claims.fastest(rows, "peer")
    a, b = (None if row is None else value(row) for row in (ours, peer))
    return (units.MISSING if a is None else written(a)) + ("" if b is None else f" ({written(b)})")


def mean_ratios(run: Results, direction: str, method: str) -> list[str]:
    """Each of our backends against each other provider."""
    cases = claims.selected(run.rows, "grid36", direction, method)
    names = sorted({(KINDS.index(r.kind), r.provider) for rows in cases.values() for r in rows if r.timed})
    ours, others = ([name for kind, name in names if (kind == 0) == mine] for mine in (True, False))
    lines = []
    for name in ours:
        for other in others:
            ratios = comparisons.ratios(run, "grid36", name, other, direction, method)
            mean = comparisons.mean_ratio(ratios)
            if mean is None:
                continue
            behind = sum(value < 1 for value in ratios.values())
            where = f"; ahead in {len(ratios) - behind}" if behind and mean < 1 and behind < len(ratios) else ""
            where = f"; slower in {behind}" if behind and mean >= 1 else where
            words = units.faster(mean)
            than = "as" if words == "as fast" else "than"
            energy = comparisons.mean_ratio(comparisons.energy_ratios(run, "grid36", name, other, direction))
            joules = f", and needs {units.less(energy)} energy per FLOP" if energy and method == SUSTAINED else ""
            lines.append(
                f"- `{name}` is {words} {than} `{other}` (geometric mean of {len(ratios)} cells{where}){joules}."
            )
    return lines


def memory_line(cases: dict[str, list[Row]]) -> list[str]:
    """The most that each provider needs beyond what any attention has to hold."""
    most = claims.memory_in_q(cases)
    if not most:
        return []
    kinds = {row.provider: KINDS.index(row.kind) for rows in cases.values() for row in rows}
    names = sorted(most, key=lambda name: (kinds[name], name))
    return [
        "Most memory beyond inputs, outputs and gradients, in sizes of q, where queries are as many as keys: "
        + ", ".join(f"`{name}` {most[name]:.2f}" for name in names)
        + "."
    ]


# ---- against standard attention, and memory


def _against_standard(run: Results, suite: str, method: str) -> list[str]:
    lines: list[str] = []
    for direction in PASSES:
        found = comparisons.speed_ups(run, suite, direction, method)
        baselines = sorted({s.baseline for s in found if s.times is not None})  # what never ran has no column
        lengths = sorted({s.length for s in found})
        if not baselines or len(lengths) < 2:
            continue
        lines += [
            f"### Against standard attention: {suite}, {PASS_TITLES[direction]}, {TITLES[method]}",
            "",
            "How many times faster our fastest backend is: the range over the cases of that length. Below 1 it is slower. "
            "*oom*: the baseline ran out of memory.",
            "",
            "| length | " + " | ".join(f"`{b}`" for b in baselines) + " |",
            "|---|" + "---|" * len(baselines),
        ]
        for n in lengths:
            cells = (_range([s for s in found if (s.length, s.baseline) == (n, b)]) for b in baselines)
            lines.append(f"| {units.length(n)} | " + " | ".join(cells) + " |")
        slower = {
            f"`{s.baseline}` at {units.length(s.length)} ({units.times(1 / s.times)})"
            for s in found
            if s.times is not None and s.times < 1 and s.clear
        }
        unclear = {f"`{s.baseline}` at {units.length(s.length)}" for s in found if s.times is not None and not s.clear}
        lines += ["", f"Slower than the baseline: {', '.join(sorted(slower))}."] if slower else []
        lines += ["", f"No clear difference: {', '.join(sorted(unclear))}."] if unclear else []
        lines.append("")
    return lines


def _range(found: list[comparisons.SpeedUp]) -> str:
    times = [s.times for s in found if s.times is not None]
    oom = sum(1 for s in found if s.times is None)
    ends = [f"{value:.3g}" for value in (min(times), max(times))] if times else []
    text = " to ".join(dict.fromkeys(ends))
    return " ".join(part for part in (text, f"*oom* ×{oom}" if oom > 1 else "*oom*" if oom else "") if part) or "–"


def _memory(run: Results, suite: str, direction: str) -> list[str]:
    exponents = claims.memory_exponents(run, suite, direction)
    if not exponents:
        return []
    kinds = {row.provider: row.kind for row in run.rows}
    lines = [
        f"### Memory: {suite}, {PASS_TITLES[direction]}",
        "",
        "Memory beyond inputs, outputs and gradients grows with the length to this power (fitted; 1 is linear, 2 quadratic, "
        "0 constant):",
        "",
        "| provider | kind | exponent |",
        "|---|---|---|",
    ]
    shown = {name: f"{value:.2f}" for name, value in exponents.items()}
    same = (suite, direction, "time")
    timed = [r for r in run.rows if (r.case.suite, r.case.direction, r.case.measure) == same and r.timed]
    for name in {row.provider for row in timed} - set(shown):
        if not any(row.extra_bytes for row in timed if row.provider == name):
            shown[name] = "none at any length"
    lines += [
        f"| `{name}` | {kinds[name]} | {text} |"
        for name, text in sorted(shown.items(), key=lambda item: (KINDS.index(kinds[item[0]]), item[0]))
    ]
    return [*lines, ""]


# ---- suites whose cases have nothing in common but the provider


def _by_case(run: Results) -> list[str]:
    lines: list[str] = []
    titles = {"gqa": "Grouped heads, and few queries against a long cache", "models": "Shapes of models"}
    for suite, title in titles.items():
        for direction in PASSES:
            for method in run.methods():
                cases = claims.selected(run.rows, suite, direction, method)
                rows = [row for same in cases.values() for row in same if row.timed]
                if not rows:
                    continue
                named = f"### {title}, {PASS_TITLES[direction]}, {TITLES[method]} (`{suite}`)"
                lines += [named, "", *_cells(rows, lambda row: units.milliseconds(row.ms)), ""]
                if sources := ", ".join(dict.fromkeys(r.energy.source for r in rows if r.energy is not None)):
                    lines += [f"Joules per TFLOP of the same providers ({sources}).", "", *_cells(rows, _joules), ""]
                lines += [*memory_line(cases), ""]
    return lines


def _joules(row: Row) -> str:
    joules = claims.joules_per_tflop(row)
    return units.MISSING if joules is None else f"{joules:.2f}"


def _cells(rows: list[Row], written: Callable[[Row], str]) -> list[str]:
    """A line per case, a column per provider."""
    providers = list(dict.fromkeys(r.provider for r in rows))
    lines = ["| case | " + " | ".join(f"`{p}`" for p in providers) + " |", "|---|" + "---|" * len(providers)]
    for label in dict.fromkeys(r.case.label for r in rows):
        cells = {r.provider: written(r) for r in rows if r.case.label == label}
        lines.append(f"| {label} | " + " | ".join(cells.get(p, units.MISSING) for p in providers) + " |")
    return lines


def _overhead(run: Results) -> list[str]:
    lines: list[str] = []
    for measure, title in (
        ("call", "What one call costs the CPU"),
        ("graph", "Short calls, replayed from a CUDA graph"),
    ):
        rows = [r for r in run.rows if r.case.suite == "overhead" and r.case.measure == measure and r.timed]
        if not rows:
            continue
        lengths, providers = sorted({r.case.len_k for r in rows}), list(dict.fromkeys(r.provider for r in rows))
        lines += [f"### {title}", "", "| provider | " + " | ".join(f"length {n}" for n in lengths) + " |"]
        lines += ["|---|" + "---|" * len(lengths)]
        for name in providers:
            times = {r.case.len_k: r.ms for r in rows if r.provider == name}
            lines.append(f"| `{name}` | " + " | ".join(units.milliseconds(times.get(n)) for n in lengths) + " |")
        lines.append("")
    return lines


def _compile(run: Results) -> list[str]:
    rows = [r for r in run.rows if r.case.measure == "compile" and r.timed]
    if not rows:
        return []
    headings = ("compiled", "from disk", "from memory", "first call", "first call, kernel on disk")
    lines = ["### From source to kernel", "", f"| kernel | {' | '.join(headings)} |", "|---|" + "---|" * len(headings)]
    for label, backend in dict.fromkeys((r.case.label, r.provider.split(":")[0]) for r in rows):
        same = [r for r in rows if (r.case.label, r.provider.split(":")[0]) == (label, backend)]
        times = {r.provider.partition(": ")[2]: r.ms for r in same}
        cells = " | ".join(units.milliseconds(times.get(origin)) for origin in (*COMPILED, *CALLED))
        lines.append(f"| `{backend}` {label} | {cells} |")
    return [*lines, ""]
