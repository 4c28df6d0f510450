"""The rectangles of a step: together exactly the visible pairs, each once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from shard_cases import MASKS

import strobe
from strobe.distributed import ShardPlan, spans as sets
from strobe.distributed.pieces import Axis, pieces, rounds
from strobe.distributed.shard_strategies import STRATEGIES

ranges = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=4)


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=3),
    ranges,
    ranges,
    st.sampled_from(sorted(MASKS)),
    st.booleans(),
    st.sampled_from([None, 4]),
)
def test_pieces_are_what_is_visible(lengths: list[int], q: list, k: list, mask: str, positional: bool, block) -> None:
    plan = ShardPlan(lengths, ranks=1, mask=MASKS[mask])
    everything = sets.spans([(0, plan.total)])
    queries, keys = (sets.intersection(sets.spans(r), everything) for r in (q, k))
    axis = Axis(plan.lengths, plan.starts)
    visible = torch.block_diag(*(plan.mask.dense(n, n) for n in lengths)).bool()[: plan.total, : plan.total]
    wanted = visible[sets.indices(queries)][:, sets.indices(keys)].int()

    found = torch.zeros_like(wanted)
    list_of = pieces(queries, keys, axis, axis, plan.mask, positional=positional, block=block)
    for p in list_of:
        rows, columns = slice(*p.rows), slice(*p.keys)
        size = p.rows[1] - p.rows[0], p.keys[1] - p.keys[0]
        assert 0 not in size
        shown = torch.ones(size) if p.at is None else plan.mask.dense(*size, at=p.at)
        found[rows, columns] += shown.int()
        assert not positional or p.at is not None
        if block is not None:
            assert p.at is not None and p.at.offset_q // block == (p.at.offset_q + size[0] - 1) // block
    assert torch.equal(found, wanted)
    for group in rounds(list_of):
        assert len({p.document for p in group}) == len(group)
    assert sum(map(len, rounds(list_of))) == len(list_of)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mask", sorted(MASKS))
@pytest.mark.parametrize("length, ranks", [(61, 3), (64, 4), (7, 8)])
def test_steps_of_plans_are_what_is_visible(length: int, ranks: int, mask: str, strategy: str) -> None:
    """Each rank with the keys of each rank, and with all keys; how many of the steps need no positions is no accident."""
    plan = ShardPlan(length, ranks=ranks, mask=MASKS[mask], strategy=strategy, block=2)
    axis, visible = Axis(plan.lengths, plan.starts), plan.mask.dense(length, length).int()
    everything = sets.spans([(0, length)])
    for queries in plan.shards:
        for keys in (*plan.shards, everything):
            found = torch.zeros(sets.size(queries), sets.size(keys), dtype=torch.int32)
            step = pieces(queries, keys, axis, axis, plan.mask, positional=False)
            for p in step:
                size = p.rows[1] - p.rows[0], p.keys[1] - p.keys[0]
                shown = torch.ones(size) if p.at is None else plan.mask.dense(*size, at=p.at)
                found[slice(*p.rows), slice(*p.keys)] += shown.int()
            assert torch.equal(found, visible[sets.indices(queries)][:, sets.indices(keys)])
            if queries == keys and mask in ("causal", "full") and queries:
                (own,) = step
                assert own.at in (None, own.local)


def test_a_shard_that_counts_otherwise_keeps_its_positions() -> None:
    """The late part of a zig-zag must not see the end of the early part under a window."""
    mask = strobe.causal & strobe.window(10, 0)
    plan = ShardPlan(64, ranks=2, mask=mask)
    axis = Axis(plan.lengths, plan.starts)
    assert len(pieces(plan.shards[0], plan.shards[0], axis, axis, mask, positional=False)) == 2
    causal = pieces(plan.shards[0], plan.shards[0], axis, axis, strobe.causal, positional=True)
    assert len(causal) == 3 and all(p.at is not None for p in causal)


def test_a_causal_zigzag_needs_one_call_for_each_rank() -> None:
    """The early part of its keys, for all queries; or all of its keys, for the late part of the queries; or, of its own
    keys, those that come before in the shard."""
    plan = ShardPlan(64, ranks=4, mask=strobe.causal)
    axis = Axis(plan.lengths, plan.starts)
    found = [pieces(plan.shards[1], s, axis, axis, plan.mask, positional=False) for s in plan.shards]
    assert [[(p.rows, p.keys, p.at is None) for p in f] for f in found] == [
        [((0, 16), (0, 8), True)],
        [((0, 16), (0, 16), False)],
        [((8, 16), (0, 16), True)],
        [((8, 16), (0, 16), True)],
    ]


def test_a_window_touches_only_its_edge() -> None:
    mask = strobe.causal & strobe.window(10, 0)
    plan = ShardPlan(2000, ranks=2, mask=mask, strategy="contiguous")
    axis = Axis(plan.lengths, plan.starts)
    (piece,) = pieces(plan.shards[1], plan.shards[0], axis, axis, mask, positional=False)
    assert piece.rows == (0, 10) and piece.keys == (990, 1000)
