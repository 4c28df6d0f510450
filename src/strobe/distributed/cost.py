"""The cost of each method on paper: bytes that each rank sends, exactly, and from those time and memory.

Tests count the bytes of real runs against `sent`. Times are a model: transfers at the speed of one link, matrix products at
a given rate, and what can overlap does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from strobe.distributed import spans as sets
from strobe.distributed.gather import STAGES
from strobe.distributed.pieces import Axis, pieces
from strobe.distributed.routes import chains
from strobe.distributed.shard_plan import ShardPlan
from strobe.distributed.ulysses import is_shared, shares_of

METHODS = ("ring", "halo", "allgather", "ulysses", "hybrid")


class Shape(NamedTuple):
    """The shape of the call: one layer, all ranks."""

    heads: int
    heads_k: int
    dim: int
    dim_v: int
    itemsize: int = 2
    batch: int = 1

    @property
    def wide(self) -> int:
        """Bytes of a number of the LSE and of gradients that are summed up."""
        return max(4, self.itemsize)

    @property
    def key_row(self) -> int:
        """Numbers in the keys and values of one position."""
        return self.batch * self.heads_k * (self.dim + self.dim_v)


class Sent(NamedTuple):
    """Bytes sent by one rank."""

    forward: int
    backward: int


def sent(
    plan: ShardPlan, shape: Shape, method: str, *, inner: int | None = None, deterministic: bool = False
) -> list[Sent]:
    """Return the bytes sent by each rank. `inner`: the ranks that trade heads in a hybrid. A gradient of the LSE would
    come on top."""
    if plan.ranks == 1:
        return [Sent(0, 0)]
    if method in ("ring", "halo"):
        return _chained(plan, shape, method)
    if method == "allgather":
        return _gathered(plan, shape, deterministic)
    if method == "ulysses":
        return _traded(plan, shape, plan.ranks)
    if method != "hybrid":
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}")
    if inner is None or inner < 1 or plan.ranks % inner:
        raise ValueError(f"inner must be a divisor of the {plan.ranks} ranks, got {inner}")
    traded, outer = _traded(plan, shape, inner), plan.joined(inner)
    by_rank = []
    for i, share in enumerate(shares_of(shape.heads, shape.heads_k, inner)):
        queries = share.queries[1] - share.queries[0]
        keys = queries if share.expand is not None else share.keys[1] - share.keys[0]
        inside = _chained(outer, shape._replace(heads=queries, heads_k=keys), "ring")
        for o, more in enumerate(inside):
            here = traded[o * inner + i]
            by_rank.append((o * inner + i, Sent(here.forward + more.forward, here.backward + more.backward)))
    return [s for _, s in sorted(by_rank)]


def _chained(plan: ShardPlan, shape: Shape, kind: str) -> list[Sent]:
    """Gradients of keys make as many hops as the keys do: those that a rank has received it sends on, or home."""
    out, come = [0] * plan.ranks, [0] * plan.ranks
    for chain in chains(plan, kind):
        before = chain.source
        for stop in chain.stops:
            rows = sets.size(stop.spans)
            out[before] += rows
            come[stop.rank] += rows
            before = stop.rank
    row = shape.key_row
    return [
        Sent(a * row * shape.itemsize, row * (a * shape.itemsize + b * shape.wide))
        for a, b in zip(out, come, strict=True)
    ]


def _gathered(plan: ShardPlan, shape: Shape, deterministic: bool) -> list[Sent]:
    padded = (plan.ranks - 1) * plan.largest * shape.key_row
    back = [plan.total - plan.rows(r) if deterministic else (plan.ranks - 1) * plan.largest for r in range(plan.ranks)]
    forward = padded * shape.itemsize
    return [Sent(forward, forward + rows * shape.key_row * shape.wide) for rows in back]


def _traded(plan: ShardPlan, shape: Shape, ranks: int) -> list[Sent]:
    """Return the bytes that each rank sends if each `ranks` neighbours trade heads."""
    shares = shares_of(shape.heads, shape.heads_k, ranks)
    keys_of_all = sum(s.keys[1] - s.keys[0] for s in shares)
    width, size = shape.dim + shape.dim_v, shape.itemsize
    traded = []
    for rank in range(plan.ranks):
        first, mine = rank - rank % ranks, shares[rank % ranks]
        rows = plan.rows(rank)
        others = sum(plan.rows(r) for r in range(first, first + ranks)) - rows
        queries, keys = mine.queries[1] - mine.queries[0], mine.keys[1] - mine.keys[0]
        there = rows * ((shape.heads - queries) * shape.dim + (keys_of_all - keys) * width) * size
        back = others * queries * (shape.dim_v * size + shape.wide)  # the output and the LSE
        gradient = shape.wide if is_shared(shares) else size
        dback = others * (queries * shape.dim * size + keys * width * gradient)
        dthere = rows * (shape.heads - queries) * shape.dim_v * size
        traded.append(Sent(shape.batch * (there + back), shape.batch * (dthere + dback)))
    return traded


# ---- time and memory -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Each rank's link, in bytes a second one way, and its matrix products, in FLOPs a second."""

    link: float = 50e9  # 400 Gb/s
    rate: float = 500e12
    latency: float = 20e-6  # of a message, and of the calls that go with it


class Estimate(NamedTuple):
    """The estimated cost of one layer; the largest of all ranks."""

    method: str
    sent: int  # bytes
    compute: float  # seconds
    transfer: float
    total: float  # with what overlaps
    memory: int  # bytes beside the shards of q, k, v, the output and their gradients

    @property
    def efficiency(self) -> float:
        """The share of the time that matrix products take."""
        return self.compute / self.total if self.total else 1.0


def flops(plan: ShardPlan, shape: Shape, gradients: bool, method: str = "ring", inner: int | None = None) -> list[int]:
    """Return the operations of each rank: two matrix products forward, five backward. Whoever trades rows for heads
    works on other rows."""
    each = 2 * (shape.dim + shape.dim_v) + (2 * (3 * shape.dim + 2 * shape.dim_v) if gradients else 0)
    each *= shape.batch
    if method not in ("ulysses", "hybrid"):
        return [shape.heads * each * pairs for pairs in plan.pairs]
    neighbours = plan.ranks if method == "ulysses" else inner or 1
    shares = shares_of(shape.heads, shape.heads_k, neighbours)
    return [(stop - start) * each * pairs for pairs in plan.joined(neighbours).pairs for (start, stop), _, _ in shares]


def estimate(
    plan: ShardPlan, shape: Shape, method: str, machine: Machine, *, gradients: bool = True, inner: int | None = None
) -> Estimate:
    """`gradients`: a forward and a backward pass; else a forward pass alone."""
    messages = sent(plan, shape, method, inner=inner)
    most = max(s.forward + (s.backward if gradients else 0) for s in messages)
    compute, transfer = max(flops(plan, shape, gradients, method, inner)) / machine.rate, most / machine.link
    passes = 3 if gradients else 1  # keys go out twice, gradients come back once
    if method == "ring" or method == "hybrid":
        outer = plan if method == "ring" else plan.joined(inner or 1)
        ticks = max((len(c.stops) for c in chains(outer, "ring")), default=0)
        exposed = 0.0
        if method == "hybrid":
            traded = max(s.forward + (s.backward if gradients else 0) for s in _traded(plan, shape, inner or 1))
            exposed = traded / machine.link
        # The first tick has nothing before it to hide its transfer behind.
        total = exposed + max(compute, transfer - exposed + compute / (ticks + 1)) + machine.latency * ticks * passes
    elif method == "halo":
        hidden = compute * _own_share(plan)
        total = compute + max(0.0, transfer - hidden) + machine.latency * passes
    elif method == "allgather":
        stages = min(STAGES, shape.heads_k)
        total = (transfer + compute + (stages - 1) * max(transfer, compute)) / stages
        total += machine.latency * stages * passes
    else:
        total = compute + transfer + 2 * machine.latency * (2 if gradients else 1)
    return Estimate(method, most, compute, transfer, total, _memory(plan, shape, method, gradients, inner))


def _own_share(plan: ShardPlan) -> float:
    """Return, for the rank with the most work, the share of it that needs no keys of others."""
    rank = max(range(plan.ranks), key=lambda r: plan.pairs[r])
    axis = Axis(plan.lengths, plan.starts)
    area = 0
    for p in pieces(plan.shards[rank], plan.shards[rank], axis, axis, plan.mask, positional=True):
        area += plan.mask.area(p.rows[1] - p.rows[0], p.keys[1] - p.keys[0], p.at)
    return area / plan.pairs[rank] if plan.pairs[rank] else 1.0


def _memory(plan: ShardPlan, shape: Shape, method: str, gradients: bool, inner: int | None) -> int:
    """Buffers for keys and their gradients, and results in fp32 before they are rounded."""
    keys, wide_keys = shape.key_row * shape.itemsize, shape.key_row * shape.wide
    queries = shape.batch * shape.heads * plan.largest
    result = queries * max(shape.dim, shape.dim_v) * shape.wide  # the output; later dq
    own = plan.largest * wide_keys if gradients else 0
    in_flight = 2 * keys + (2 * wide_keys if gradients else 0)  # of one row: what is here, and what is coming
    if plan.ranks == 1:
        return 0
    if method == "ring":
        return result + own + plan.largest * in_flight
    if method == "halo":
        others = max(sets.size(sets.difference(plan.seen[r], plan.shards[r])) for r in range(plan.ranks))
        return result + own + others * (keys + (wide_keys if gradients else 0))
    if method == "allgather":
        stages = min(STAGES, shape.heads_k)
        return result + own + plan.ranks * plan.largest * (in_flight + keys) // stages
    traded = queries * (shape.dim + shape.dim_v) * shape.itemsize + plan.largest * keys
    if method == "ulysses":
        return traded * (2 if gradients else 1)
    rows = plan.joined(inner or 1).largest  # of the share of the heads that a rank has then
    return traded + result + own + rows * in_flight // (inner or 1)


def possible(plan: ShardPlan, shape: Shape, inner: int | None = None) -> list[str]:
    """The methods that can run this: `hybrid` on two dimensions, the others on one."""
    if inner is not None:
        return ["hybrid"] if shape.heads >= inner else []
    return ["ring", "halo", "allgather", *(["ulysses"] if shape.heads >= plan.ranks else [])]


def choose(plan: ShardPlan, shape: Shape, machine: Machine, *, gradients: bool, inner: int | None = None) -> str:
    """The method with the least time on paper. Every rank finds the same one: it depends on nothing that differs."""
    names = possible(plan, shape, inner)
    if not names:
        raise ValueError(f"q has {shape.heads} heads, the inner dimension of mesh {inner} ranks; heads must be as many")
    key = ("choice", shape, machine, gradients, inner)
    if key not in plan.prepared:
        estimates = [estimate(plan, shape, name, machine, gradients=gradients, inner=inner) for name in names]
        plan.prepared[key] = min(estimates, key=lambda e: e.total).method
    return plan.prepared[key]
