"""Plans: who holds what, who sees what, how equal the work is. No process but this one, up to 1,024 ranks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, strategies as st
from shard_cases import MASKS

import strobe
from strobe.distributed import ShardPlan, describe, join, shard, simulator, spans as sets, unshard
from strobe.distributed.shard_plan import parse_plan
from strobe.distributed.shard_strategies import STRATEGIES

lengths = st.lists(st.integers(0, 40), min_size=1, max_size=5)
plans = st.builds(
    lambda n, ranks, strategy, block, mask: ShardPlan(n, ranks=ranks, strategy=strategy, block=block, mask=MASKS[mask]),
    lengths,
    st.integers(1, 9),
    st.sampled_from(sorted(STRATEGIES)),
    st.sampled_from([None, 1, 3, 16]),
    st.sampled_from(sorted(MASKS)),
)


def dense_mask(plan: ShardPlan) -> torch.Tensor:
    """(total, total), from the mask of each document."""
    blocks = [plan.mask.dense(n, n) for n in plan.lengths]
    return torch.block_diag(*blocks).bool()[: plan.total, : plan.total]


@given(plans)
def test_each_position_has_one_rank(plan: ShardPlan) -> None:
    held = torch.cat([plan.index(r) for r in range(plan.ranks)])
    assert held.sort().values.tolist() == list(range(plan.total))
    assert [plan.rows(r) for r in range(plan.ranks)] == [plan.index(r).numel() for r in range(plan.ranks)]
    assert plan.largest == max(plan.rows(r) for r in range(plan.ranks))


@given(plans)
def test_cuts_are_at_blocks(plan: ShardPlan) -> None:
    starts = plan.starts if plan.strategy == "documents" else (0,)
    ends = {e for s in plan.shards for r in s for e in r} - {*plan.starts, plan.total}
    for end in ends:
        begin = max(s for s in starts if s <= end)
        assert (end - begin) % plan.block == 0


@given(plans)
def test_work_and_sight_are_those_of_the_dense_mask(plan: ShardPlan) -> None:
    visible = dense_mask(plan)
    for rank in range(plan.ranks):
        rows = visible[plan.index(rank)]
        assert plan.pairs[rank] == int(rows.sum())
        seen = set(sets.indices(plan.seen[rank]).tolist())
        assert seen >= set(rows.any(0).nonzero()[:, 0].tolist())


@given(plans, st.integers(0, 3))
def test_shard_and_join_are_inverse(plan: ShardPlan, more: int) -> None:
    x = torch.randn(2, plan.total, *[3] * more)
    ids = torch.arange(plan.total)
    parts = [shard(plan, x, ids, rank=r) for r in range(plan.ranks)]
    assert torch.equal(join(plan, [p[0] for p in parts]), x)
    assert torch.equal(join(plan, [p[1] for p in parts], 0), ids)
    expected = torch.cat([torch.arange(n) for n in plan.lengths])
    positions = join(plan, [plan.position_ids(r) for r in range(plan.ranks)], 0)
    assert torch.equal(positions, expected)


@given(plans)
def test_a_plan_travels_as_text(plan: ShardPlan) -> None:
    again = parse_plan(plan.text)
    assert again == plan and again.shards == plan.shards and again.mask == plan.mask
    custom = ShardPlan.of_shards(plan.lengths, plan.shards, mask=plan.mask, block=plan.block)
    assert parse_plan(custom.text).shards == plan.shards


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8|zigzag|2|1|",
        "8|zigzag|2|1||;system();x",
        "8|zigzag|2|1||;(+ q;x",
        "8|zigzag|two|1||;;full",
        "8|zigzag|99999999999|1||;;full",
        "8|evil|2|1||;;full",
        "1e3|zigzag|2|1||;;full",
        "8|custom|2|1|0-4/4|;;full",
        "8|custom|2|1|0-4/4-9|;;full",
        "8|zigzag|2|0||;;full",
    ],
)
def test_damaged_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_plan(text)


@given(plans)
def test_shards_are_as_equal_as_blocks_allow(plan: ShardPlan) -> None:
    rows = [plan.rows(r) for r in range(plan.ranks)]
    parts = {"contiguous": 1, "zigzag": 2, "documents": 2 * len(plan.lengths), "striped": 1}[plan.strategy]
    assert max(rows) - min(rows) <= parts * plan.block


def test_hand_drawn_cuts() -> None:
    def owners(plan: ShardPlan) -> str:
        held = {int(i): rank for rank in range(plan.ranks) for i in plan.index(rank)}
        return "".join(str(held[i]) for i in range(plan.total))

    assert owners(ShardPlan(12, ranks=3, strategy="contiguous")) == "000011112222"
    assert owners(ShardPlan(12, ranks=3, strategy="zigzag")) == "001122221100"
    assert owners(ShardPlan(12, ranks=3, strategy="striped", block=2)) == "001122001122"
    assert owners(ShardPlan([6, 6], ranks=3, strategy="documents")) == "012210012210"
    assert owners(ShardPlan([6, 6], ranks=3, strategy="zigzag")) == "001122221100"
    # What does not come out even goes to those that hold least: here one token each, to three ranks.
    assert owners(ShardPlan([1, 1, 1], ranks=3, strategy="documents")) == "012"


def test_zigzag_balances_a_causal_mask() -> None:
    for ranks in (2, 7, 64):
        assert ShardPlan(ranks * 64, ranks=ranks, mask=strobe.causal).balance > 0.999
        contiguous = ShardPlan(ranks * 64, ranks=ranks, mask=strobe.causal, strategy="contiguous")
        assert contiguous.balance < 0.5 + 0.6 / ranks
    documents = ShardPlan([1000, 70, 3000, 5, 5, 5], ranks=8, mask=strobe.causal, strategy="documents")
    assert documents.balance > 0.99


def test_neighbours_join_to_the_plan_of_fewer_ranks() -> None:
    for strategy in ("contiguous", "zigzag"):
        many, few = (ShardPlan(480, ranks=n, strategy=strategy, mask=strobe.causal) for n in (12, 4))
        assert many.joined(3).shards == few.shards
    assert ShardPlan([5, 9], ranks=6, strategy="documents").joined(6).shards == (((0, 14),),)


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_1024_ranks(strategy: str) -> None:
    ranks, length = 1024, 1 << 18
    plan = ShardPlan(length, ranks=ranks, mask=strobe.causal, strategy=strategy)
    assert sum(plan.pairs) == length * (length + 1) // 2
    assert sum(plan.rows(r) for r in range(ranks)) == length
    assert all(plan.seen[r][0][0] == 0 for r in range(ranks) if plan.rows(r))
    text = describe(plan)
    assert "1,024 ranks" in text and f"{strategy}, causal" in text


def test_describe_shows_who_holds_what() -> None:
    text = describe(ShardPlan(64, ranks=4, mask=strobe.causal, strategy="contiguous"))
    rows = [line.split() for line in text.splitlines()]
    pictures = {row[0]: row[1:] for row in rows if row and row[0] in "0123"}
    assert "█" * 16 + "·" * 48 in text
    assert pictures["1"] == ["█", "▒", "·", "·"]  # keys of ranks 0 to 3, under the last heading
    assert "balanced to 57.5 %" in text  # 520 pairs on average, 904 for the last rank


def test_no_mask_is_a_full_mask() -> None:
    assert ShardPlan(8, ranks=2, mask=None) == ShardPlan(8, ranks=2, mask=strobe.full)
    halves = [[(0, 4)], [(4, 8)]]
    assert ShardPlan.of_shards(8, halves, mask=None).mask == ShardPlan.of_shards(8, halves).mask == strobe.full


@pytest.mark.parametrize("shape, dim", [((8,), 1), ((8,), 0), ((3, 8), -1), ((8, 3), -2), ((2, 8, 3), 1)], ids=str)
def test_join_and_unshard_find_the_axis_that_shard_has_cut(shape: tuple[int, ...], dim: int) -> None:
    whole, plan = torch.arange(math.prod(shape)).view(shape), ShardPlan(8, ranks=3)
    shards = [shard(plan, whole, rank=rank, dim=dim)[0] for rank in range(3)]
    assert torch.equal(join(plan, shards, dim), whole)
    for (found,) in simulator.run(3, lambda mesh: unshard(plan, shards[mesh.rank], mesh=mesh, dim=dim)):
        assert torch.equal(found, whole)


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="strategy must be one of .*, got 'spiral'"):
        ShardPlan(8, ranks=2, strategy="spiral")
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        ShardPlan(8, ranks=0)
    with pytest.raises(TypeError, match="lengths must be an int, got 2.5"):
        ShardPlan([2.5], ranks=2)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="at least one document"):
        ShardPlan([], ranks=2)
    with pytest.raises(TypeError, match="mask must be a strobe mask"):
        ShardPlan(8, ranks=2, mask=torch.ones(8, 8) > 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="each of the positions 0 to 7 once"):
        ShardPlan.of_shards(8, [[(0, 5)], [(4, 8)]])
    plan = ShardPlan(8, ranks=2)
    with pytest.raises(ValueError, match="rank must be at least 0 and less than 2, got 2"):
        shard(plan, torch.zeros(1, 8), rank=2)
    with pytest.raises(ValueError, match="axis 1 must have the 8 positions"):
        shard(plan, torch.zeros(1, 7), rank=0)
    with pytest.raises(ValueError, match=r"dim is -3, but a tensor has shape \(1, 8\)"):
        shard(plan, torch.zeros(1, 8), rank=0, dim=-3)
    with pytest.raises(ValueError, match="shards has 1 tensors, the plan 2 ranks"):
        join(plan, [torch.zeros(1, 8)])
    with pytest.raises(ValueError, match=r"shard 1 has shape \(1, 3\); axis 1 must have 4 positions"):
        join(plan, [torch.zeros(1, 4), torch.zeros(1, 3)])


def test_a_sequence_that_grows_keeps_its_stripes() -> None:
    for short, long in itertools.pairwise(ShardPlan(n, ranks=3, strategy="striped", block=4) for n in (5, 14, 40)):
        for a, b in zip(short.shards, long.shards, strict=True):
            assert sets.difference(a, b) == ()
