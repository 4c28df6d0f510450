"""Say in a few sentences what a run found: how much faster than what, where not, memory, energy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from strobe.bench import claims
from strobe.bench.names import PASS_TITLES, PASSES
from strobe.bench.results import Results, Row
from strobe.measure import units
from strobe.measure.method import METHODS, SUSTAINED, TITLES, TURNS
from strobe.measure.statistics import geometric_mean, separated

_MOST_NAMED = 3  # cases in which we are slower: the worst are named
_OTHERS = {"peer": "other fused attention", "standard": "standard attention"}
_BEYOND = {
    "forward": "Beyond q, k, v and the output",
    "backward": "Backward, beyond inputs, output and gradients",
    "both": "Forward and backward, beyond inputs, output and gradients",
}
_Duels = list[tuple[Row, Row]]


def conclusions(results: Results, suite: str | None = None, directions: Sequence[str] = PASSES) -> list[str]:
    """Return the conclusions of one suite, by default the first with times in it. Empty if there is nothing to
    conclude."""
    for name in results.suites() if suite is None else [suite]:
        sentences = []
        for direction in directions:
            cases = {m: claims.selected(results.rows, name, direction, m) for m in METHODS if m in results.methods()}
            for kind in _OTHERS:
                sentences += _speed(cases, direction, kind)
                sentences += _out_of_memory(cases, kind, direction)
            sentences += _energy(cases.get(SUSTAINED, {}), direction)
        if sentences:
            return [
                *sentences,
                *(sentence for direction in directions for sentence in _memory(results, name, direction)),
            ]
    return []


def _speed(cases: dict[str, dict[str, list[Row]]], direction: str, kind: str) -> list[str]:
    """Our best against the best of a kind that ran beside it in each case, by every method."""
    duels = {method: pairs for method, of in cases.items() if (pairs := claims.duels(of, kind))}
    if not duels:
        return []
    said = []
    for method, pairs in duels.items():
        ratios = [_ratio(*duel) for duel in pairs]
        said.append(f"{units.faster(geometric_mean(ratios))} {TITLES[method]}{_range(ratios)}")
    method, pairs = next(iter(duels.items()))
    ours, title = _names([duel[0] for duel in pairs]), PASS_TITLES[direction].capitalize()
    others = against([duel[1] for duel in pairs], claims.rivals(cases[method], kind), _OTHERS[kind])
    sentence = f"{title}: against {others}, {ours} is {' and '.join(said)}; {_cases(*map(len, duels.values()))}."
    return [" ".join([sentence, *_where_not(duels)])]


def against(fastest: Sequence[Row], ran: Sequence[str], what: str) -> str:
    """Whom we are compared with, and who else ran: "fastest" says nothing without that."""
    names = Counter(row.provider for row in fastest).most_common()
    if len(ran) == 1:
        return f"{ran[0]}, the only {what} that ran beside it"
    if len(names) == 1:
        return f"{names[0][0]}, the fastest {what} that ran beside it (of {', '.join(ran)})"
    return f"the fastest {what} of each case that ran beside it (of {', '.join(ran)}; mostly {names[0][0]})"


def _ratio(ours: Row, other: Row) -> float:
    assert ours.ms and other.ms
    return other.ms / ours.ms


def _names(rows: Sequence[Row]) -> str:
    """The provider, or the most frequent of several."""
    count = Counter(row.provider for row in rows).most_common()
    return count[0][0] if len(count) == 1 else f"mostly {count[0][0]}"


def _cases(*counts: int) -> str:
    """Say how many cases there are, by method where they differ."""
    if len(set(counts)) > 1:
        return f"geometric means of {' and '.join(map(str, counts))} cases"
    return "one case" if counts[0] == 1 else f"geometric mean of {counts[0]} cases"


def _range(ratios: Sequence[float]) -> str:
    least, most = min(ratios), max(ratios)
    if len(ratios) == 1:
        return ""
    if least >= 1:
        return f" ({units.times(least)} to {units.times(most)})"
    return f" (from {units.faster(least)} to {units.faster(most)})"


def _where_not(duels: dict[str, _Duels]) -> list[str]:
    """The cases in which our best is slower beyond noise."""
    said = []
    for method, pairs in duels.items():
        slower = sorted((_ratio(*duel), duel[0].case.title) for duel in pairs if _clearly_slower(*duel))
        if slower:
            worst = "; ".join(f"{title}, {units.faster(ratio)}" for ratio, title in slower[:_MOST_NAMED])
            more = f"; and {len(slower) - _MOST_NAMED} more" if len(slower) > _MOST_NAMED else ""
            said.append(f"Slower beyond noise {TITLES[method]} in {len(slower)} of {len(pairs)} ({worst}{more}).")
    return said


def _clearly_slower(ours: Row, other: Row) -> bool:
    assert ours.timing is not None and other.timing is not None
    return _ratio(ours, other) < 1 and separated(ours.timing.summary, other.timing.summary)


def _out_of_memory(cases: dict[str, dict[str, list[Row]]], kind: str, direction: str) -> list[str]:
    """Cases that ours can do and nobody of a kind can, because memory does not suffice."""
    of = next((rows_of for rows_of in cases.values() if rows_of), {})
    mine = [rows for rows in of.values() if claims.fastest(rows, "ours") is not None]
    there = [[r for r in rows if r.kind == kind] for rows in mine]
    lost = [rows for rows in there if any(r.status == "out of memory" for r in rows) and not any(r.timed for r in rows)]
    some = sum(any(r.status == "out of memory" for r in rows) for rows in there)
    if not some:
        return []
    what = "standard attention" if kind == "standard" else "a peer"
    every = f", in {len(lost)} of them every one that was tried" if lost else ""
    where = "" if direction == "forward" else f", {PASS_TITLES[direction]},"
    return [f"In {some} of {len(mine)} cases{where} {what} runs out of memory{every}."]


def _energy(cases: dict[str, list[Row]], direction: str) -> list[str]:
    duels = claims.duels(cases, "peer") or claims.duels(cases, "standard")
    joules = [(claims.joules_per_tflop(a), claims.joules_per_tflop(b)) for a, b in duels]
    ratios = [b / a for a, b in joules if a and b]
    if not ratios:
        return []
    mean = units.less(geometric_mean(ratios))
    energy = "as much energy per FLOP as" if mean == "as much" else f"{mean} energy per FLOP than"
    ours, other = (_names([duel[i] for duel in duels]) for i in (0, 1))
    title = "" if direction == "forward" else f"{PASS_TITLES[direction]}, "
    return [f"Sustained, {title}{ours} needs {energy} {other} ({_cases(len(ratios))})."]


def _memory(results: Results, suite: str, direction: str) -> list[str]:
    """Compare the memory of our fastest provider and of a standard one: how extra memory grows with the length, or else
    the most it is."""
    method = TURNS if TURNS in results.methods() else results.methods()[0]
    cases = claims.selected(results.rows, suite, direction, method)
    best = [fastest for rows in cases.values() if (fastest := claims.fastest(rows, "ours")) is not None]
    measured = [row for row in best if row.extra_bytes is not None]
    if not measured:
        return []
    exponents = claims.memory_exponents(results, suite, direction)
    ours, beyond = Counter(row.provider for row in best).most_common(1)[0][0], _BEYOND[direction]
    if not any(row.extra_bytes for row in measured):
        said = f"{beyond} {ours} needs no memory at any length"
    elif ours in exponents:
        said = f"{beyond} {ours} needs memory that grows with the length to the power {exponents[ours]:.2f}"
    elif direction != "forward" and ours in (most := claims.memory_in_q(cases)):
        said = f"{beyond} {ours} needs at most {most[ours]:.2f} × the size of q"
    else:
        return []
    standard = [row.provider for rows in cases.values() for row in rows if row.kind == "standard"]
    grows = next(
        (f"; that of {name} grows to the power {exponents[name]:.2f}" for name in standard if name in exponents), ""
    )
    return [f"{said}{grows}."]
