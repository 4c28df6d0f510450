"""A plan for reading: who holds which positions, who sees whose keys, how equal the work is, and what each method costs."""

from __future__ import annotations

from strobe.distributed import spans as sets
from strobe.distributed.cost import Estimate, Machine, Shape, estimate, possible
from strobe.distributed.pieces import Axis, pieces
from strobe.distributed.shard_plan import ShardPlan

_COLUMNS = 64
_SHOWN = 8  # ranks in a picture; of more, the first and the last ones
_SHADES = "·░▒▓█"


def describe(
    plan: ShardPlan,
    shape: Shape | None = None,
    machine: Machine | None = None,
    *,
    gradients: bool = True,
    inner: int | None = None,
) -> str:
    """Pictures of the plan and, given the shape of a layer, a table of what each method costs on a machine: for a
    forward and a backward pass, or without `gradients` a forward pass. `inner`: ranks that trade heads in a hybrid."""
    lines = [*_summary(plan), "", *_holdings(plan), "", *_sights(plan)]
    if shape is not None:
        lines += ["", *_costs(plan, shape, machine or Machine(), gradients, inner)]
    return "\n".join(lines) + "\n"


def _summary(plan: ShardPlan) -> list[str]:
    rows = [plan.rows(r) for r in range(plan.ranks)]
    documents = "1 document" if len(plan.lengths) == 1 else f"{len(plan.lengths)} documents"
    ranks = "1 rank" if plan.ranks == 1 else f"{plan.ranks:,} ranks"
    each = f"{min(rows):,}" if min(rows) == max(rows) else f"{min(rows):,} to {max(rows):,}"
    return [
        f"{plan.total:,} positions in {documents} on {ranks}, {plan.strategy}, {plan.mask.name}",
        f"{each} positions a rank; work is balanced to {100 * plan.balance:.1f} % (average by largest)",
    ]


def shown(ranks: int) -> list[int]:
    return list(range(ranks)) if ranks <= _SHOWN else [*range(_SHOWN // 2), *range(ranks - _SHOWN // 2, ranks)]


def _shade(share: float) -> str:
    """· for nothing, █ for everything, and three shades between."""
    if share <= 0:
        return _SHADES[0]
    return _SHADES[4] if share >= 1 else _SHADES[1 + min(2, int(3 * share))]


def _holdings(plan: ShardPlan) -> list[str]:
    columns = min(_COLUMNS, max(1, plan.total))
    ends = [i * plan.total // columns for i in range(columns + 1)]
    most = max(plan.pairs) or 1
    lines = [f"{'rank':>6}  {'positions held':{columns}}  work"]
    for rank in shown(plan.ranks):
        cells = (
            _shade(sets.size(sets.intersection(plan.shards[rank], ((a, b),))) / (b - a)) if a < b else _SHADES[0]
            for a, b in zip(ends, ends[1:], strict=False)
        )
        lines.append(f"{rank:>6}  {''.join(cells)}  {100 * plan.pairs[rank] / most:5.1f} %")
    return _with_gap(lines, plan.ranks)


def _sights(plan: ShardPlan) -> list[str]:
    """Return how much of each rank's keys each rank's queries see."""
    ranks, axis = shown(plan.ranks), Axis(plan.lengths, plan.starts)
    lines = [f"{'rank':>6}  keys of rank {', '.join(map(str, ranks))}"]
    for rank in ranks:
        cells = []
        for source in ranks:
            seen = pieces(plan.shards[rank], plan.shards[source], axis, axis, plan.mask, positional=True)
            area = sum(plan.mask.area(p.rows[1] - p.rows[0], p.keys[1] - p.keys[0], p.at) for p in seen)
            everything = plan.rows(rank) * plan.rows(source)
            cells.append(_shade(area / everything if everything else 0))
        lines.append(f"{rank:>6}  {' '.join(cells)}")
    return _with_gap(lines, plan.ranks)


def _with_gap(lines: list[str], ranks: int) -> list[str]:
    if ranks <= _SHOWN:
        return lines
    middle = 1 + _SHOWN // 2
    return [*lines[:middle], f"{'⋮':>6}", *lines[middle:]]


def _costs(plan: ShardPlan, shape: Shape, machine: Machine, gradients: bool, inner: int | None) -> list[str]:
    names = [*possible(plan, shape), *(possible(plan, shape, inner) if inner else [])]
    estimates = [estimate(plan, shape, n, machine, gradients=gradients, inner=inner) for n in names]
    passes = "forward and backward" if gradients else "forward"
    heads = f"{shape.heads} heads on {shape.heads_k}" if shape.heads != shape.heads_k else f"{shape.heads} heads"
    link, rate = f"{8 * machine.link / 1e9:,.0f} Gb/s", f"{machine.rate / 1e12:,.0f} TFLOP/s"
    head = f"{passes} of one layer, {heads}, dim {shape.dim}, {shape.itemsize} bytes a number; links {link}, {rate}"
    best = min(estimates, key=lambda e: e.total)
    lines = [
        head,
        f"{'method':>10}  {'sent':>9}  {'transfer':>9}  {'compute':>9}  {'total':>9}  {'busy':>5}  {'memory':>9}",
    ]
    return [*lines, *(_row(e) + ("  least time" if e is best else "") for e in estimates)]


def _row(e: Estimate) -> str:
    times = "  ".join(f"{seconds(t):>9}" for t in (e.transfer, e.compute, e.total))
    return f"{e.method:>10}  {size(e.sent):>9}  {times}  {100 * e.efficiency:4.0f} %  {size(e.memory):>9}"


def seconds(t: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if t * factor >= 1 or unit == "µs":
            return f"{t * factor:.3g} {unit}"
    raise AssertionError


def size(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 1000 or unit == "TB":
            return f"{n:.3g} {unit}"
        n /= 1000
    raise AssertionError
