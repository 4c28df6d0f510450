"""The ways that keys travel, as data. A chain is a source and the ranks that its keys visit, one after the other.

At tick t the keys of a chain are at its t-th stop; every rank works on what it then has. A stop lists the positions that
are needed there or further on, so that a chain ends when nobody behind needs it. In a backward pass the gradients of the
keys travel along: the first stop starts them, each further one adds to them, and whatever no later stop needs goes home.
So each position travels as far as gradient as it did as key.

    ring  one chain for each source, through all other ranks in turn
    halo  one chain of one stop for each source and each rank that sees some of its keys
"""

from __future__ import annotations

from typing import NamedTuple

from strobe.distributed import spans as sets
from strobe.distributed.shard_plan import ShardPlan
from strobe.distributed.spans import Spans


class Stop(NamedTuple):
    rank: int
    spans: Spans


class Chain(NamedTuple):
    source: int
    stops: tuple[Stop, ...]


def ring(plan: ShardPlan) -> tuple[Chain, ...]:
    chains = []
    for source, shard in enumerate(plan.shards):
        needed: Spans = ()
        stops: list[Stop] = []
        for distance in range(plan.ranks - 1, 0, -1):
            rank = (source + distance) % plan.ranks
            if needed != shard:
                needed = sets.union(needed, sets.intersection(plan.seen[rank], shard))
            if needed:
                stops.append(Stop(rank, needed))
        if stops:
            chains.append(Chain(source, tuple(reversed(stops))))
    return tuple(chains)


def halo(plan: ShardPlan) -> tuple[Chain, ...]:
    chains = []
    for source, shard in enumerate(plan.shards):
        for distance in range(1, plan.ranks):
            rank = (source + distance) % plan.ranks
            needed = sets.intersection(plan.seen[rank], shard)
            if needed:
                chains.append(Chain(source, (Stop(rank, needed),)))
    return tuple(chains)


KINDS = {"ring": ring, "halo": halo}


def chains(plan: ShardPlan, kind: str) -> tuple[Chain, ...]:
    if ("chains", kind) not in plan.prepared:
        plan.prepared["chains", kind] = KINDS[kind](plan)
    return plan.prepared["chains", kind]


# ---- what one rank does ----------------------------------------------------------------------------------------------


class Parcel(NamedTuple):
    """Rows of a chain that move between this rank and a peer."""

    chain: int
    peer: int
    spans: Spans


class Visit(NamedTuple):
    """A chain at this rank: what is here, what goes on to the next stop and what goes home."""

    chain: int
    here: Spans
    onward: Parcel | None
    home: Parcel | None


class Tick(NamedTuple):
    """One step of one rank. Parcels of both ends are in the order of the chains, so that messages between a pair
    match."""

    visits: tuple[Visit, ...]  # what is worked on
    arriving: tuple[Parcel, ...]  # the keys of `visits`, from where they come
    leaving: tuple[Parcel, ...]  # keys that peers work on in this tick
    gradients: tuple[Parcel, ...]  # of keys that arrive here for the next tick, from the stop before
    returning: tuple[Parcel, ...]  # of keys of this rank, which come home after this tick


def ticks(route: tuple[Chain, ...], rank: int) -> tuple[Tick, ...]:
    """Tick 1 and those that follow; in tick 0 a rank works on the keys that it holds."""
    last = max((len(chain.stops) for chain in route), default=0)
    kinds: list[tuple[list, list, list, list, list]] = [([], [], [], [], []) for _ in range(last)]
    for index, chain in enumerate(route):
        before = chain.source
        for t, stop in enumerate(chain.stops):
            visits, arriving, leaving, gradients, returning = kinds[t]
            after = chain.stops[t + 1] if t + 1 < len(chain.stops) else None
            done = _rest(stop, after) if rank in (stop.rank, chain.source) else ()
            if rank == stop.rank:
                onward = Parcel(index, after.rank, after.spans) if after else None
                visits.append(Visit(index, stop.spans, onward, Parcel(index, chain.source, done) if done else None))
                arriving.append(Parcel(index, before, stop.spans))
            if rank == before:
                leaving.append(Parcel(index, stop.rank, stop.spans))
            if after and rank == after.rank:
                gradients.append(Parcel(index, stop.rank, after.spans))
            if rank == chain.source and done:
                returning.append(Parcel(index, stop.rank, done))
            before = stop.rank
    return tuple(Tick(*map(tuple, kind)) for kind in kinds)


def _rest(stop: Stop, after: Stop | None) -> Spans:
    """Return the keys of a stop that no later stop needs."""
    if after is None:
        return stop.spans
    return () if after.spans == stop.spans else sets.difference(stop.spans, after.spans)
