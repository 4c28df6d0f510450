"""The numbers in the documents, made from the committed results: a block of README.md, the whole of docs/results.md,
their figures.

    python -m strobe.bench.docs            say what differs; exit 1 if anything does
    python -m strobe.bench.docs --write    bring everything up to date

Where there are no results for something, nothing is said about it.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

from strobe.bench import claims, figure, ledger, studies
from strobe.bench.compile_time import CALLED, COMPILED
from strobe.bench.results import KINDS, Results, load
from strobe.bench.table import milliseconds
from strobe.measure.generated import replace_between

BEGIN, END = "<!-- results: begin (python -m strobe.bench.docs --write) -->", "<!-- results: end -->"
_BASE = "torch-cudnn"


def committed(root: Path) -> dict[str, dict[str, Results]]:
    """Machine -> name of a file -> its results."""
    found: dict[str, dict[str, Results]] = defaultdict(dict)
    for path in sorted(
        (root / "benchmarks" / "results").glob("*/*.json"), key=lambda path: (path.parent.name, path.stem)
    ):
        kind = json.loads(path.read_text(encoding="utf-8")).get("kind")
        if kind == "strobe bench":  # the ladder and `strobe tune` write there too
            found[path.parent.name][path.stem] = load(path)
    return dict(found)


def wanted(root: Path) -> dict[Path, str]:
    """Every generated file with the text it should have."""
    machines = committed(root)
    files = {root / "docs" / "results.md": page(machines)}
    readme = root / "README.md"
    if readme.exists() and BEGIN in (text := readme.read_text(encoding="utf-8")):
        files[readme] = replace_between(text, BEGIN, END, readme_block(machines))
    for path, begin, end, block in (
        (root / "docs" / "design" / "hopper-forward.md", ledger.BEGIN, ledger.END, ledger.block(root)),
        (root / "benchmarks" / "README.md", studies.BEGIN, studies.END, studies.turns_block(root)),
    ):
        if path.exists():
            files[path] = replace_between(path.read_text(encoding="utf-8"), begin, end, block)
    for machine, results in machines.items():
        for name, run in results.items():
            for suite in run.suites():
                drawn = figure.speed(run, suite) if suite == "grid36" else None
                if drawn is not None:
                    files[root / "docs" / "figures" / f"{machine}-{name}.svg"] = drawn
    return files


# ---- README
# ------------------------------------------------------------------------------------------------------------


def readme_block(machines: dict[str, dict[str, Results]]) -> str:
    """The grid of the first GPU that has one; nothing without one."""
    for machine, results in machines.items():
        for name, run in results.items():
            lines = grid_table(run, "forward")
            if run.provenance["device"]["kind"] == "cuda" and lines:
                return "\n".join(
                    [
                        "## Measured",
                        "",
                        f"{run.device}. " + lines[0],
                        *lines[1:],
                        "",
                        *_peer_means(run, "forward"),
                        "",
                        f"![Speed against length](docs/figures/{machine}-{name}.svg)",
                        "",
                        "How this was measured, the distance to standard attention, and memory: "
                        "[docs/results.md](docs/results.md). At its power limit a GPU's clock depends on what else runs: "
                        "[what that does to these numbers](benchmarks/README.md#why-turns-are-short).",
                        "",
                    ]
                )
    return ""


def _link_figure(machine: str, name: str) -> str:
    return f"![Speed against length](figures/{machine}-{name}.svg)"


def grid_table(run: Results, direction: str) -> list[str]:
    """Best of ours in TFLOP/s, and its ratio to the fastest peer, for the 36 cells."""
    rows = [r for r in run.rows if r.case.suite == "grid36" and r.case.direction == direction]
    if not any(r.kind == "ours" and r.timed for r in rows):
        return []
    lengths = sorted({r.case.len_k for r in rows})
    head = (
        f"Best of ours, TFLOP/s {direction}, bfloat16, 16384 tokens, heads × dim = 2048 "
        "(in brackets: the fastest peer that was installed)."
    )
    lines = [
        head,
        "",
        "| head dim, mask | " + " | ".join(_short(n) for n in lengths) + " |",
        "|---|" + "---|" * len(lengths),
    ]
    for dim, mask in dict.fromkeys((r.case.dim, r.case.mask) for r in rows):
        cells = []
        for n in lengths:
            cell = [r for r in rows if (r.case.dim, r.case.mask, r.case.len_k) == (dim, mask, n)]
            best, peer = claims.fastest_of_ours(cell), _fastest_peer(cell)
            ours = "–" if best is None or best.tflops is None else f"{best.tflops:.0f}"
            cells.append(ours + (f" ({peer:.0f})" if peer else ""))
        lines.append(f"| {dim}, {mask} | " + " | ".join(cells) + " |")
    return lines


def _fastest_peer(rows: list) -> float | None:
    return max((r.tflops for r in rows if r.kind == "peer" and r.timed and r.tflops), default=None)


def _cell(ms: float | None) -> str:
    return milliseconds(ms) if ms else "–"


def _short(n: int) -> str:
    return f"{n // 1024}K" if n >= 1024 and n % 1024 == 0 else str(n)


# ---- docs/results.md
# ---------------------------------------------------------------------------------------------------


def page(machines: dict[str, dict[str, Results]]) -> str:
    lines = [
        "# Results",
        "",
        "Generated from `benchmarks/results` by `python -m strobe.bench.docs --write`; a test fails when it differs.",
        "Every number is a median; a difference is called one only where the 95 % intervals of the medians do not overlap.",
        "`benchmarks/README.md` says how things are measured and how to repeat them.",
        "",
    ]
    for machine, results in machines.items():
        lines += _machine(machine, results)
    return "\n".join(lines).rstrip("\n") + "\n"


def _machine(machine: str, results: dict[str, Results]) -> list[str]:
    first = next(iter(results.values()))
    lines = [
        f"## {first.device}",
        "",
        *(line for name, run in results.items() for line in _provenance(machine, name, run)),
        "",
    ]
    for name, run in results.items():
        for direction in ("forward", "backward", "both"):
            table = grid_table(run, direction)
            if table:
                lines += [f"### The grid, {direction} (`{name}`)", "", *table, "", *_peer_means(run, direction), ""]
                if direction == "forward":
                    lines += [_link_figure(machine, name), ""]
        for suite in run.suites():
            lines += _against_standard(run, suite)
            lines += _memory(run, suite)
        lines += _by_case(run) + _overhead(run) + _compile(run)
    lines += _repeatability(results)
    lines += _unmeasured(results)
    return lines


def _provenance(machine: str, name: str, run: Results) -> list[str]:
    p = run.provenance
    commit = (p["git"]["commit"] or "unknown")[:10] + (" with changes" if p["git"]["dirty"] else "")
    versions = ", ".join(
        f"{what} {p[key]}"
        for what, key in (("torch", "torch"), ("CUDA", "cuda"), ("driver", "driver"), ("NVRTC", "nvrtc"))
        if p.get(key)
    )
    matmul = ", ".join(f"{dtype} {value:.3g} TFLOP/s" for dtype, value in run.ceilings.matmul_tflops.items())
    copy = "" if run.ceilings.copy_gbytes_per_s is None else f", copy {run.ceilings.copy_gbytes_per_s:.0f} GB/s"
    unfinished = "" if run.complete else " Stopped before its end."
    if p["device"]["kind"] == "cpu" and (p.get("host_load") or 0) > p["host_cores"] / 4:
        unfinished += (
            f" Other work ran on the machine (load {p['host_load']} on {p['host_cores']} cores): the times are noisy."
        )
    return [
        f"- `benchmarks/results/{machine}/{name}.json`: {p['date'][:10]}, commit {commit}, {versions}; "
        f"matrix product {matmul}{copy}.{unfinished}"
    ]


def _peer_means(run: Results, direction: str) -> list[str]:
    ours = sorted(
        {
            r.provider
            for r in run.rows
            if r.kind == "ours" and r.timed and r.case.suite == "grid36" and r.case.direction == direction
        }
    )
    others = sorted(
        {
            r.provider
            for r in run.rows
            if r.kind != "ours" and r.timed and r.case.suite == "grid36" and r.case.direction == direction
        }
    )
    lines = []
    for name in ours:
        for other in others:
            ratios = claims.ratios(run, "grid36", name, other, direction)
            mean = claims.mean_ratio(ratios)
            if mean is not None:
                slower = [label for label, value in ratios.items() if value < 1]
                where = f"; slower in {len(slower)}" if slower else ""
                lines.append(
                    f"- `{name}` is {_times(mean)} as fast as `{other}` (geometric mean of {len(ratios)} cells{where})."
                )
    return lines


def _times(value: float) -> str:
    return f"{value:.3g} times"


def _against_standard(run: Results, suite: str) -> list[str]:
    lines: list[str] = []
    for direction in ("forward", "backward", "both"):
        found = claims.speed_ups(run, suite, direction)
        baselines = sorted({s.baseline for s in found if s.times is not None})  # what never ran has no column
        lengths = sorted({s.length for s in found})
        if not baselines or len(lengths) < 2:
            continue
        lines += [
            f"### Against standard attention: {suite}, {direction}",
            "",
            "How many times as fast our fastest backend is: the range over the cases of that length. "
            "*oom*: the baseline ran out of memory.",
            "",
            "| length | " + " | ".join(f"`{b}`" for b in baselines) + " |",
            "|---|" + "---|" * len(baselines),
        ]
        for n in lengths:
            lines.append(
                f"| {_short(n)} | "
                + " | ".join(_range([s for s in found if (s.length, s.baseline) == (n, b)]) for b in baselines)
                + " |"
            )
        slower = [s for s in found if s.times is not None and s.times < 1 and s.clear]
        unclear = [s for s in found if s.times is not None and not s.clear]
        if slower:
            lines += [
                "",
                "Slower than the baseline: "
                + ", ".join(sorted({f"`{s.baseline}` at {_short(s.length)} ({s.times:.2f})" for s in slower}))
                + ".",
            ]
        if unclear:
            lines += [
                "",
                "No clear difference: "
                + ", ".join(sorted({f"`{s.baseline}` at {_short(s.length)}" for s in unclear}))
                + ".",
            ]
        lines.append("")
    return lines


def _range(found: list[claims.SpeedUp]) -> str:
    times = [s.times for s in found if s.times is not None]
    oom = sum(1 for s in found if s.times is None)
    text = (
        ""
        if not times
        else f"{min(times):.3g}"
        if f"{min(times):.3g}" == f"{max(times):.3g}"
        else f"{min(times):.3g} to {max(times):.3g}"
    )
    return " ".join(part for part in (text, f"*oom* ×{oom}" if oom > 1 else "*oom*" if oom else "") if part) or "–"


def _memory(run: Results, suite: str) -> list[str]:
    exponents = claims.memory_exponents(run, suite)
    if not exponents:
        return []
    kinds = {row.provider: row.kind for row in run.rows}
    lines = [
        f"### Memory: {suite}",
        "",
        "Extra memory over q, k, v and the output grows with the length to this power (fitted; 1 is linear, 2 quadratic, "
        "0 constant):",
        "",
        "| provider | kind | exponent |",
        "|---|---|---|",
    ]
    shown = {name: f"{value:.2f}" for name, value in exponents.items()}
    timed = [row for row in run.rows if row.case.suite == suite and row.case.measure == "time" and row.timed]
    for name in {row.provider for row in timed} - set(shown):
        if not any(row.extra_bytes for row in timed if row.provider == name):
            shown[name] = "none at any length"
    lines += [
        f"| `{name}` | {kinds[name]} | {text} |"
        for name, text in sorted(shown.items(), key=lambda item: (KINDS.index(kinds[item[0]]), item[0]))
    ]
    return [*lines, ""]


def _by_case(run: Results) -> list[str]:
    """Suites whose cases have nothing in common but the provider."""
    lines: list[str] = []
    for suite, title in (
        ("gqa", "Grouped heads, and few queries against a long cache"),
        ("models", "Shapes of models"),
    ):
        for direction in dict.fromkeys(r.case.direction for r in run.rows):
            rows = [r for r in run.rows if r.case.suite == suite and r.case.direction == direction and r.timed]
            if not rows:
                continue
            providers = list(dict.fromkeys(r.provider for r in rows))
            lines += [
                f"### {title}, {direction} (`{suite}`)",
                "",
                "| case | " + " | ".join(f"`{p}`" for p in providers) + " |",
            ]
            lines += ["|---|" + "---|" * len(providers)]
            for label in dict.fromkeys(r.case.label for r in rows):
                times = {r.provider: r.median_ms for r in rows if r.case.label == label}
                lines.append(f"| {label} | " + " | ".join(_cell(times.get(p)) for p in providers) + " |")
            lines.append("")
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
        lines += [
            f"### {title}",
            "",
            "| provider | " + " | ".join(f"length {n}" for n in lengths) + " |",
            "|---|" + "---|" * len(lengths),
        ]
        for name in providers:
            times = {r.case.len_k: r.median_ms for r in rows if r.provider == name}
            lines.append(f"| `{name}` | " + " | ".join(_cell(times.get(n)) for n in lengths) + " |")
        lines.append("")
    return lines


def _compile(run: Results) -> list[str]:
    rows = [r for r in run.rows if r.case.measure == "compile" and r.timed]
    if not rows:
        return []
    headings = ("compiled", "from disk", "from memory", "first call", "first call, kernel on disk")
    lines = ["### From source to kernel", "", f"| kernel | {' | '.join(headings)} |", "|---|" + "---|" * len(headings)]
    for label, backend in dict.fromkeys((r.case.label, r.provider.split(":")[0]) for r in rows):
        times = {
            r.provider.split(": ")[1]: r.median_ms
            for r in rows
            if (r.case.label, r.provider.split(":")[0]) == (label, backend)
        }
        lines.append(f"| `{backend}` {label} | " + " | ".join(_cell(times.get(o)) for o in (*COMPILED, *CALLED)) + " |")
    return [*lines, ""]


def _repeatability(results: dict[str, Results]) -> list[str]:
    """Files called NAME.json and NAME-again.json are two runs of the same."""
    lines = []
    for name, run in results.items():
        again = results.get(f"{name}-again")
        if again is not None:
            close, total = claims.repeatability(run, again)
            if total:
                lines.append(
                    f"- `{name}` was run twice: {close} of {total} medians ({close / total:.0%}) differ by at most 3 %."
                )
    return ["### Repeated", "", *lines, ""] if lines else []


def _unmeasured(results: dict[str, Results]) -> list[str]:
    """Reason by reason. Out of memory is a result, and stands in the tables."""
    who: dict[tuple[str, str], set[str]] = defaultdict(set)
    for run in results.values():
        for row in run.rows:
            if not row.timed and row.status != "out of memory":
                who[row.status, row.reason or ""].add(row.provider)
    lines = [
        f"- {status}: {reason}: {', '.join(f'`{name}`' for name in sorted(names))}"
        for (status, reason), names in sorted(who.items())
    ]
    return ["### Not measured", "", *lines, ""] if lines else []


def outdated(root: Path) -> list[Path]:
    return [
        path for path, text in wanted(root).items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def main(arguments: list[str], root: Path | None = None) -> int:
    root = root or Path.cwd()
    if arguments not in ([], ["--write"]):
        raise SystemExit("usage: python -m strobe.bench.docs [--write]")
    files = wanted(root)
    late = outdated(root)
    if arguments:
        for path in late:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
    for path in late:
        print(f"{'wrote' if arguments else 'out of date:'} {path.relative_to(root)}")
    return 1 if late and not arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
