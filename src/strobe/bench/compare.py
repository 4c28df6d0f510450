"""Two runs: what became slower or faster beyond noise, what stopped or began to work."""

from __future__ import annotations

from dataclasses import dataclass

from strobe.bench.results import Results, Row
from strobe.measure.method import TITLES, TURNS
from strobe.measure.statistics import separated


@dataclass(frozen=True)
class Change:
    key: str
    provider: str
    method: str
    kind: str  # "regression", "improvement", "noise", "broken", "repaired", "new", "gone"
    old: Row | None
    new: Row | None

    @property
    def ratio(self) -> float | None:
        """New time / old time: above 1 is slower."""
        if self.old is None or self.new is None or not self.old.ms or not self.new.ms:
            return None
        return self.new.ms / self.old.ms

    @property
    def bad(self) -> bool:
        return self.kind in ("regression", "broken")


def compare(old: Results, new: Results, tolerance: float = 0.03) -> list[Change]:
    """A regression needs both: intervals of the medians that do not overlap, and a difference above `tolerance`. What
    was timed and is no longer is broken. Rows of cases that were not run again are left out."""
    changes = []
    cases = {(row.case.key, row.method) for row in new.rows}
    before = {row.identity: row for row in old.rows if (row.case.key, row.method) in cases}
    for row in new.rows:
        was = before.pop(row.identity, None)
        changes.append(Change(*row.identity, _kind(was, row, tolerance), was, row))
    providers = {row.provider for row in new.rows}
    changes += [Change(*identity, "gone", was, None) for identity, was in before.items() if was.provider in providers]
    return changes


def _kind(was: Row | None, row: Row, tolerance: float) -> str:
    if was is None:
        return "new"
    if was.timed and not row.timed:
        return "noise" if row.status in ("skipped", "not installed") else "broken"
    if not was.timed:
        return "repaired" if row.timed else "noise"
    assert was.timing is not None and row.timing is not None
    ratio = row.timing.ms / was.timing.ms
    if not separated(was.timing.summary, row.timing.summary) or abs(ratio - 1) <= tolerance:
        return "noise"
    return "regression" if ratio > 1 else "improvement"


def comparable(old: Results, new: Results) -> str | None:
    """None, or why times of the two say nothing about the code."""
    for what, key in (("devices", "name"), ("kinds of device", "kind")):
        a, b = old.provenance["device"].get(key), new.provenance["device"].get(key)
        if a != b:
            return f"different {what}: {a} and {b}"
    if not set(old.methods()) & set(new.methods()):
        methods = [", ".join(TITLES[m] for m in run.methods()) for run in (old, new)]
        return f"different methods: {methods[0]} and {methods[1]}"
    return None


def other_neighbours(old: Results, new: Results) -> str | None:
    """A warning where rows of the two runs were interleaved with other providers: a GPU's clock follows what ran
    before."""
    if not new.on_gpu:
        return None
    suites = set(new.suites())
    interleaved = [
        {row.provider for row in run.rows if row.timed and row.method == TURNS and row.case.suite in suites}
        for run in (old, new)
    ]
    names = ", ".join(sorted(interleaved[0] ^ interleaved[1]))
    if not all(interleaved) or not names:
        return None
    return f"{names} took turns in only one of the two runs; that alone can move times by some percent"
