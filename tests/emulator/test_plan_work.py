"""The planner of paged work: every visible block of keys is in one item, pieces are even, slots are unique."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from everyday import everyday
from fake_gpu import H200

import strobe
from strobe.arguments import Arguments
from strobe.cuda import forward_sm90
from strobe.cuda.plan import Plan
from strobe.emulator import compiler
from strobe.emulator.backend import launch
from strobe.mask import Mask, Positions
from strobe.problem import Problem

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
BLOCK_M, BLOCK_N, HEADS, GROUP = 128, 128, 2, 4


def planned(lengths: list[int], counts: list[int] | None, mask: Mask) -> tuple[torch.Tensor, int, int]:
    """(records, pieces, slots) of a call: one query each, or packed ones."""
    sequences, width = len(lengths), max(lengths) // 16 + 1
    pool = torch.empty(sequences * width, 16, HEADS, 128, dtype=torch.bfloat16)
    table, used = torch.zeros(sequences, width).int(), torch.tensor(lengths).int()
    rows = (sequences, 1) if counts is None else (sum(counts),)
    q, cu = torch.empty(*rows, HEADS * GROUP, 128, dtype=torch.bfloat16), None
    if counts is not None:
        cu = torch.tensor([0, *counts]).cumsum(0).int()
    longest = None if counts is None else max(counts)
    a = Arguments(q, pool, pool, cu_q=cu, max_q=longest, mask=mask, table=table, lengths=used)
    problem, _ = Problem.of(a)
    plan = forward_sm90.plan(problem, (1, 1, 1), H200)
    first = plan.launches[0]
    work = torch.full((plan.workspace["work"] // 4,), -1, dtype=torch.int32)
    launch(Plan((first,)), {"work": work, "lengths": used, "cu_q": cu, "table": table})
    slots = plan.workspace["partial"] // (4 * BLOCK_M * (128 + 2))
    return work.view(-1, 8), plan.launches[1].grid, slots


def visible(mask: Mask, count: int, length: int, row: int) -> tuple[int, int]:
    """Blocks of keys that the rows from `row` on see: [first, end), at least one long."""
    last = min(row + BLOCK_M, count * GROUP) - 1
    at = Positions(0, count, 0, length)
    first, end = mask.bounds(row // GROUP, count, length, at)[0], mask.bounds(last // GROUP, count, length, at)[1]
    first, end = max(0, first) // BLOCK_N, -(-min(length, end) // BLOCK_N)
    return first, max(first + 1, end)


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
    records, pieces, slots = planned(lengths, counts, mask)
    found: dict[tuple[int, int, int], list[list[int]]] = {}
    loads, used = [], []
    for piece, (first, end) in enumerate(records[:pieces, :2].tolist()):
        load = 0
        for batch, head, row, slot, start, stop, first_slot, parts in records[pieces + first : pieces + end].tolist():
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
    assert int(records[0, 7]) == pieces
