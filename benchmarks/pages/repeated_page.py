"""The end of docs/results.md: how far runs repeat, and what was not measured, with the reason."""

from __future__ import annotations

from collections import defaultdict

from benchmarks.pages import comparisons
from strobe.bench import claims
from strobe.bench.names import PASS_TITLES, PASSES
from strobe.bench.results import Results
from strobe.measure.method import SUSTAINED, TITLES

AGAIN = "-again"  # NAME-again.json is NAME.json once more


def repeatability(results: dict[str, Results]) -> list[str]:
    """Files called NAME.json and NAME-again.json are two runs of the same."""
    lines = []
    for name, run in results.items():
        again = results.get(f"{name}{AGAIN}")
        if again is None:
            continue
        for method in run.methods():
            close, total = comparisons.repeatability(run, again, method)
            if total:
                share = f"{close} of {total} times ({close / total:.0%}) differ by at most 3 %"
                lines.append(f"- `{name}`, {TITLES[method]}, was run twice: {share}.")
        lines += _same_ratios(name, run, again)
    return ["### Repeated", "", *lines, ""] if lines else []


def _same_ratios(name: str, run: Results, again: Results) -> list[str]:
    lines = []
    for direction in PASSES:
        duels = claims.duels(claims.selected(run.rows, "grid36", direction, SUSTAINED), "peer")
        if not duels:
            continue
        ours, peer = duels[0][0].provider, duels[0][1].provider
        close, total = comparisons.ratio_repeatability(run, again, "grid36", ours, peer, direction)
        if total:
            which = "sustained" if direction == "forward" else f"{PASS_TITLES[direction]}, sustained"
            share = f"{close} of {total} ratios of `{ours}` to `{peer}` differ by at most 3 %"
            lines.append(f"- `{name}`, {which}: {share}.")
    return lines


def unmeasured(results: dict[str, Results]) -> list[str]:
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
