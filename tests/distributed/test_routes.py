"""The ways that keys travel: everybody gets what it sees, nobody is sent what nobody behind needs."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from shard_cases import MASKS

import strobe
from strobe.distributed import ShardPlan, spans as sets
from strobe.distributed.routes import chains, ticks
from strobe.distributed.shard_strategies import STRATEGIES

plans = st.builds(
    lambda n, ranks, strategy, mask: ShardPlan(n, ranks=ranks, strategy=strategy, block=2, mask=MASKS[mask]),
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    st.integers(1, 7),
    st.sampled_from(sorted(STRATEGIES)),
    st.sampled_from(sorted(MASKS)),
)


@given(plans, st.sampled_from(["ring", "halo"]))
def test_everybody_gets_what_it_sees(plan: ShardPlan, kind: str) -> None:
    found = chains(plan, kind)
    for rank in range(plan.ranks):
        got = [stop.spans for chain in found for stop in chain.stops if stop.rank == rank]
        assert len(got) == len({chain.source for chain in found for stop in chain.stops if stop.rank == rank})
        everything = sets.spans(r for s in (*got, plan.shards[rank]) for r in s)
        assert sets.difference(plan.seen[rank], everything) == ()
        if kind == "halo":
            assert sets.difference(sets.spans(r for s in got for r in s), plan.seen[rank]) == ()


@given(plans, st.sampled_from(["ring", "halo"]))
def test_what_travels_shrinks_and_comes_home(plan: ShardPlan, kind: str) -> None:
    for chain in chains(plan, kind):
        before = plan.shards[chain.source]
        assert chain.source not in [stop.rank for stop in chain.stops]
        for stop in chain.stops:
            assert stop.spans and sets.difference(stop.spans, before) == ()
            before = stop.spans
        assert sets.intersection(plan.seen[chain.stops[-1].rank], chain.stops[-1].spans), "the last stop needs nothing"
    for_each = [ticks(chains(plan, kind), rank) for rank in range(plan.ranks)]
    for rank, mine in enumerate(for_each):
        home = [p for tick in mine for p in tick.returning]
        sent = [c.stops[0].spans for c in chains(plan, kind) if c.source == rank]
        assert sum(sets.size(p.spans) for p in home) == sum(map(sets.size, sent)), "gradients are lost"


@given(plans, st.sampled_from(["ring", "halo"]))
def test_messages_of_both_ends_match(plan: ShardPlan, kind: str) -> None:
    """Each pair of ranks exchanges, in each tick, the same rows in the same order."""
    for_each = [ticks(chains(plan, kind), rank) for rank in range(plan.ranks)]
    for t in range(len(for_each[0])):
        for a in range(plan.ranks):
            for b in range(plan.ranks):
                here, there = for_each[a][t], for_each[b][t]
                keys = [p.spans for p in here.leaving if p.peer == b], [p.spans for p in there.arriving if p.peer == a]
                assert keys[0] == keys[1]
                sends = [v.onward for v in here.visits] + [v.home for v in here.visits]
                gets = [*there.gradients, *there.returning]
                gradients = [[p.spans for p in s if p and p.peer == x] for s, x in ((sends, b), (gets, a))]
                assert gradients[0] == gradients[1]


@pytest.mark.parametrize("ranks", [2, 8])
def test_volumes_by_hand(ranks: int) -> None:
    def rows(plan: ShardPlan, kind: str) -> int:
        return sum(sets.size(stop.spans) for chain in chains(plan, kind) for stop in chain.stops)

    length, each = 64 * ranks, 64
    full = ShardPlan(length, ranks=ranks)
    assert rows(full, "ring") == rows(full, "halo") == length * (ranks - 1)
    contiguous = ShardPlan(length, ranks=ranks, mask=strobe.causal, strategy="contiguous")
    assert rows(contiguous, "ring") == rows(contiguous, "halo") == each * ranks * (ranks - 1) // 2
    window = ShardPlan(length, ranks=ranks, mask=strobe.causal & strobe.window(10, 0), strategy="contiguous")
    assert rows(window, "halo") == rows(window, "ring") == 10 * (ranks - 1)
    alone = ShardPlan([each] * ranks, ranks=ranks, mask=strobe.causal, strategy="contiguous")
    assert rows(alone, "ring") == 0, "a document on one rank concerns nobody else"
