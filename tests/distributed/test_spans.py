"""Sets of positions, against Python's own sets."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from strobe.distributed import spans as sets

ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


def members(a: sets.Spans) -> set[int]:
    assert all(start < stop for start, stop in a)
    assert all(x[1] < y[0] for x, y in zip(a, a[1:], strict=False)), f"{a} is not normal: ranges touch"
    return {i for start, stop in a for i in range(start, stop)}


@given(ranges, ranges)
def test_algebra(x: list[tuple[int, int]], y: list[tuple[int, int]]) -> None:
    a, b = sets.spans(x), sets.spans(y)
    p, q = members(a), members(b)
    assert p == {i for start, stop in x for i in range(start, stop)}
    assert members(sets.union(a, b)) == p | q
    assert members(sets.intersection(a, b)) == p & q
    assert members(sets.difference(a, b)) == p - q
    assert sets.size(a) == len(p)


@given(ranges, ranges)
def test_rows_are_places_in_a_tensor(x: list[tuple[int, int]], y: list[tuple[int, int]]) -> None:
    whole = sets.spans(x)
    part = sets.intersection(whole, sets.spans(y))
    held = sets.indices(whole)
    assert held.tolist() == sorted(members(whole))
    found = [i for start, stop in sets.rows(part, whole) for i in held[start:stop].tolist()]
    assert found == sorted(members(part))
    assert sets.take(held, part, whole, 0).tolist() == found


@given(st.lists(st.integers(0, 3), max_size=20))
def test_order_sorts_what_ranks_hold(owner: list[int]) -> None:
    parts = [sets.spans((i, i + 1) for i, r in enumerate(owner) if r == rank) for rank in range(4)]
    rows = torch.cat([sets.indices(p) for p in parts])
    order = sets.order(parts)
    assert (rows if order is None else rows[order]).tolist() == list(range(len(owner)))
