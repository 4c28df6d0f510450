"""The planner of paged work: every visible block of keys is in one item, pieces are even, slots are unique."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from everyday import everyday
from fake_gpu import H200

import strobe
from strobe.cuda.parts.plan import Plan
from strobe.cuda.plans import forward_sm90
from strobe.cuda.plans.plan_work import RECORD, Work, described
from strobe.emulator import compiler
from strobe.emulator.backend import launch
from strobe.problem import Problem
from strobe.problem.arguments import Arguments
from strobe.variants.mask import Mask, Positions

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
BLOCK_M, BLOCK_N, HEADS, GROUP = 128, 128, 2, 4


def planned(
    lengths: list[int], counts: list[int] | None, mask: Mask, starts: list[int] | None = None, **options: Any
) -> tuple[torch.Tensor, Plan]:
    """(records, plan) of a call: one query each, or packed ones."""
    sequences, width = len(lengths), max(lengths) // 16 + 1
    pool = torch.empty(sequences * width, 16, HEADS, 128, dtype=torch.bfloat16)
    table, used = torch.zeros(sequences, width).int(), torch.tensor(lengths).int()
    rows = (sequences, 1) if counts is None else (sum(counts),)
    q, cu = torch.empty(*rows, HEADS * GROUP, 128, dtype=torch.bfloat16), None
    if counts is not None:
        cu = torch.tensor([0, *counts]).cumsum(0).int()
    longest = None if counts is None else max(counts)
    first_positions = None if starts is None else torch.tensor(starts).int()
    more = {"starts": first_positions, **options}
    a = Arguments(q, pool, pool, cu_q=cu, max_q=longest, mask=mask, table=table, lengths=used, **more)
    problem, _ = Problem.of(a)
    plan = forward_sm90.plan(problem, {"o": (1, 1, 1)}, H200)
    first = plan.launches[0]
    work = torch.full((-(-plan.workspace["work"] // RECORD), 16), -1, dtype=torch.int32)
    launch(Plan((first,)), {"work": work, "lengths": used, "cu_q": cu, "table": table, "starts": first_positions})
    return work, plan


@pytest.mark.parametrize("invariant", [False, True])
def test_a_list_that_is_too_short_is_not_overrun(invariant: bool) -> None:
    """A plan fills the list of a decode step in a step with prefill, too."""
    small, plan = planned([9000, 9000], [1, 1], strobe.causal, invariant=invariant)
    room = plan.launches[0].values["items"]
    work = torch.full((len(small) + 4096, 16), -1, dtype=torch.int32)
    lengths, cu = torch.tensor([9000, 9000]).int(), torch.tensor([0, 4000, 8000]).int()
    launch(Plan(plan.launches[:1]), {"work": work, "lengths": lengths, "cu_q": cu, "table": None, "starts": None})
    pieces = plan.launches[1].grid
    assert (work[len(small) :] == -1).all()
    assert (work[pieces + room - 1, :12] != -1).all()
    assert work[:pieces, 12:14].min() >= 0 and work[:pieces, 13].max() == room


def test_a_list_describes_itself() -> None:
    work, plan = planned([5, 0, 30000, 128], None, strobe.causal)
    text = described(work.view(-1), plan.launches[1].grid, plan.launches[0].values["items"])
    assert text == "134 items of 474 blocks of keys in 128 pieces; 128 are parts of tiles"


def visible(mask: Mask, count: int, length: int, row: int, start: int = 0) -> tuple[int, int]:
    """Blocks of keys that the rows from `row` on see: [first, end), at least one long."""
    last = min(row + BLOCK_M, count * GROUP) - 1
    at = Positions(0, count, start, start + length)
    first, end = mask.bounds(row // GROUP, count, length, at)[0], mask.bounds(last // GROUP, count, length, at)[1]
    first, end = max(0, -start, first) // BLOCK_N, -(-min(length, end) // BLOCK_N)
    return first, max(first + 1, end)


def sequence_of(batch: int, lengths: list[int], counts: list[int] | None, start: int = 0) -> list[int]:
    """Return what a record says of the sequence: its first query and its rows, the position of its first key, and its
    keys."""
    first, count = (0, 1) if counts is None else (sum(counts[:batch]), counts[batch])
    return [first, count * GROUP, start, lengths[batch]]


CASES: dict[str, dict[str, Any]] = {
    "one": {"lengths": [32768]},
    "even": {"lengths": [8192] * 16},
    "skewed": {"lengths": [5, 0, 30000, 128, 129, 1, 7000, 0]},
    "many": {"lengths": [(37 * i) % 900 for i in range(1500)]},
    "mixed": {"lengths": [8192, 4096, 4096, 0, 300], "counts": [500, 1, 1, 0, 300]},
    "window": {"lengths": [8192, 4096, 20], "counts": [200, 1, 20], "mask": strobe.window(1000, 0)},
    "nothing": {"lengths": [0, 0]},
    "no_queries": {"lengths": [50, 60, 70], "counts": [0, 1, 0]},
}


@pytest.mark.parametrize("name", everyday(list(CASES), ("skewed", "mixed", "window")))
def test_every_block_is_in_one_item(name: str) -> None:
    case = CASES[name]
    lengths, counts, mask = case["lengths"], case.get("counts"), case.get("mask", strobe.causal)
    records, plan = planned(lengths, counts, mask)
    pieces, slots = plan.launches[1].grid, plan.workspace["partial"] // (4 * BLOCK_M * (128 + 2))
    found: dict[tuple[int, int, int], list[list[int]]] = {}
    loads, used = [], []
    for piece, (first, end) in enumerate(records[:pieces, 12:14].tolist()):
        load = 0
        own = records[piece, :12].tolist()
        assert own == (records[pieces + first, :12].tolist() if first < end else [0] * 12)  # its first item
        items_of_piece = records[pieces + first : pieces + end, :12].tolist()
        for batch, head, row, slot, start, stop, first_slot, parts, *sequence in items_of_piece:
            assert sequence == sequence_of(batch, lengths, counts)
            found.setdefault((batch, head, row), []).append([start, stop, slot, first_slot, parts])
            load += max(1, stop - start)
            assert slot // 2 == piece
        loads.append(load)
    for (batch, head, row), items in found.items():
        items.sort()
        assert head < HEADS
        begin, end = visible(mask, 1 if counts is None else counts[batch], lengths[batch], row)
        assert items[0][0] == begin and max(begin + 1, items[-1][1]) == end, (batch, row, items, begin, end)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(items))
        assert all(parts == len(items) and first_slot == items[0][2] for *_, first_slot, parts in items)
        if len(items) > 1:
            used += [slot for _, _, slot, _, _ in items]
            assert [slot for _, _, slot, _, _ in items[1:]] == [
                2 * (items[0][2] // 2 + j) for j in range(1, len(items))
            ]
    rows = [1] * len(lengths) if counts is None else counts
    assert len(found) == HEADS * sum(-(-n * GROUP // BLOCK_M) for n in rows)
    assert len(set(used)) == len(used) and all(slot < slots for slot in used)
    busy = [load for load in loads if load]
    assert max(busy) - min(busy) <= 1


# ---- invariant calls: keys are cut where the rule says ---------------------------------------------------------------


def cuts() -> list[int]:
    """Blocks with which splits begin: 32 splits of 4,096 keys, 16 of 8,192, 16 of 16,384 and so on."""
    sizes = [32] * 32 + [32 << octave for octave in range(1, 8) for _ in range(16)]
    return list(itertools.accumulate(sizes, initial=0))


FIXED: dict[str, dict[str, Any]] = {
    **CASES,
    "long": {"lengths": [140000, 33768, 16383, 16385]},
    "moved": {"lengths": [8192, 900, 1500], "starts": [512, 1000, -300], "mask": strobe.window(3000, 0)},
}


@pytest.mark.parametrize("name", everyday(list(FIXED), ("skewed", "moved", "mixed")))
def test_invariant_calls_are_cut_where_the_rule_says(name: str) -> None:
    case = FIXED[name]
    lengths, counts, mask = case["lengths"], case.get("counts"), case.get("mask", strobe.causal)
    starts = case.get("starts", [0] * len(lengths))
    records, plan = planned(lengths, counts, mask, case.get("starts"), invariant=True)
    pieces, work = plan.launches[1].grid, plan.launches[1].values
    rows = [1] * len(lengths) if counts is None else counts
    expected: list[list[int]] = []
    for head in range(HEADS):
        for batch, (length, count, start) in enumerate(zip(lengths, rows, starts, strict=True)):
            for row in range(0, count * GROUP, BLOCK_M):
                first, end = visible(mask, count, length, row, start)
                end = min(end, max(first, -(-length // BLOCK_N)))  # none: an item without blocks
                moved = [cut - start // BLOCK_N for cut in cuts()]
                inside = [first, *(cut for cut in moved[1:] if first < cut < end), end]
                item = len(expected)
                for b0, b1 in itertools.pairwise(inside):
                    part = [len(expected), b0, b1, item, len(inside) - 1]
                    expected.append([batch, head, row, *part, *sequence_of(batch, lengths, counts, start)])
    items = len(expected)
    assert records[pieces : pieces + items, :12].tolist() == expected
    assert items <= work["items"] and plan.workspace["partial"] == 4 * work["items"] * work["slot_rows"] * (128 + 2)
    assert work["slot_rows"] >= min(BLOCK_M, GROUP * max(rows))
    assert not records.view(-1)[16 * (pieces + work["items"]) :].view(-1, 4)[:items].any()  # counters
    sizes = [max(1, b1 - b0) for _, _, _, _, b0, b1, *_ in expected]
    spans = [(a, b) for a, b in records[:pieces, 12:14].tolist() if a < b]
    assert spans[0][0] == 0 and spans[-1][1] == items and all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    loads, share = [sum(sizes[a:b]) for a, b in spans], sum(sizes) / pieces
    assert max(loads) <= share + max(sizes)
    assert min(128, items, share // max(sizes) + 1) <= len(spans)


@pytest.mark.parametrize("sequences", [1, 7, 40])
def test_there_is_room_for_all_items(sequences: int) -> None:
    """A ragged table has room as well, which is divided freely."""
    generator = torch.Generator().manual_seed(sequences)
    begins = torch.tensor(cuts())
    for _ in range(200):
        blocks = (2 ** (10 * torch.rand(sequences, generator=generator))).long()
        keys = 128 * blocks - torch.randint(0, 128, (sequences,), generator=generator)
        total = int(keys.sum())
        pool = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device="meta").expand(total, 1, 1, 64)
        ints = [torch.empty(n, dtype=torch.int32, device="meta") for n in (total, sequences + 1, sequences)]
        q = torch.empty(sequences, 1, 1, 64, dtype=torch.bfloat16, device="meta")
        a = Arguments(q, pool, pool, mask=strobe.causal, table=ints[0], indptr=ints[1], lengths=ints[2], invariant=True)
        work = Work.of(Problem.of(a)[0], 128, 128, 1, 132)
        splits = int(torch.searchsorted(begins, -(-keys // 128)).sum())
        assert splits <= work.items
        if sequences == 1:
            assert work.items <= splits + 2
