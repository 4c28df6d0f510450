"""Every method, on real processes: out, LSE and all gradients equal those of one process, to 1e-12 in fp64."""

from __future__ import annotations

import pytest
import rank_work
from rank_pool import RankPool
from shard_cases import DENSE, MASKS, OPTIONS, PACKED, Case, compare, expected, joined

METHODS = [(m, n) for m in ("ring", "halo", "allgather", "ulysses") for n in (2, 4)] + [("hybrid", 4)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("method, ranks", METHODS, ids=lambda x: str(x))
def test_equals_one_process(pool: RankPool, method: str, ranks: int, lengths: tuple[int, ...], mask: str) -> None:
    # Two processes take every second option, four the others; where there is one number of them, it takes all.
    half = {2: OPTIONS[::2], 4: OPTIONS[1::2]}[ranks] if (method, 2) in METHODS else OPTIONS
    cases = [Case(mask=mask, lengths=lengths, **options) for options in half]
    found = pool.run(rank_work.attend, method, cases, ranks=ranks)
    for i, case in enumerate(cases):
        parts = [of_rank[i] for of_rank in found]
        compare(joined(case, case.plan(ranks), parts), expected(case), case)


@pytest.mark.parametrize("lengths", [DENSE, PACKED], ids=["dense", "packed"])
def test_auto_is_one_of_them(pool: RankPool, lengths: tuple[int, ...]) -> None:
    cases = [Case(mask=mask, lengths=lengths, **OPTIONS[3]) for mask in MASKS]
    found = pool.run(rank_work.attend, "auto", cases)
    for i, case in enumerate(cases):
        compare(joined(case, case.plan(4), [of_rank[i] for of_rank in found]), expected(case), case)
