"""Send between real processes: late messages change nothing, transfers overlap with work, bytes are those of the
formula."""

from __future__ import annotations

import pytest
import rank_work
from rank_pool import RankPool
from shard_cases import DENSE, PACKED, Case, compare, expected, joined

from strobe.distributed.cost import Shape, sent

METHODS = ("ring", "halo", "allgather", "ulysses", "hybrid")


@pytest.mark.parametrize("method", METHODS)
def test_late_messages_change_nothing(pool: RankPool, method: str) -> None:
    """A missing wait would show NaN, a buffer that is used too early an error, an order that hangs on luck a hang."""
    cases = [
        Case(mask="causal", heads=(6, 2), sinks=True),
        Case(mask="window", heads=(4, 4), strategy="contiguous"),
        Case(mask="causal", lengths=PACKED, heads=(4, 1), dropout=0.2, strategy="documents"),
    ]
    for seed in (1, 2):
        found = pool.run(rank_work.attend_late, method, cases, 100 * seed)
        for i, case in enumerate(cases):
            compare(joined(case, case.plan(4), [of_rank[i] for of_rank in found]), expected(case), case)


@pytest.mark.parametrize("method", METHODS)
def test_bytes_between_processes(pool: RankPool, method: str) -> None:
    cases = [Case(mask="causal", heads=(6, 3)), Case(mask="causal window", lengths=PACKED, heads=(4, 2))]
    found = pool.run(rank_work.bytes_sent, method, cases)
    for i, case in enumerate(cases):
        shape = Shape(*case.heads, *case.dims, 8, case.batch if case.lengths == DENSE else 1)
        wanted = sent(case.plan(4), shape, method, inner=2 if method == "hybrid" else None)
        assert [of_rank[i] for of_rank in found] == [s.forward + s.backward for s in wanted]


def check_overlap(events: list[str]) -> None:
    """Something is attended to between the start of each transfer and the wait for it."""
    for number in range(1, 1 + sum(e.startswith("start") for e in events)):
        begin, end = events.index(f"start {number}"), events.index(f"wait {number}")
        assert "attend" in events[begin:end], f"transfer {number} of {events} hides behind nothing"


def test_ring_transfers_while_it_attends(pool: RankPool) -> None:
    for forward, backward in pool.run(rank_work.events, "ring", Case(mask="full")):
        assert forward == [
            "start 1", "attend", "wait 1", "start 2", "attend", "wait 2", "start 3", "attend", "wait 3", "attend",
        ]  # fmt: skip
        # Keys (4, 5, 7) go out before a step, gradients (6, 8, 9) after it; each is waited for a step later. The last
        # gradients come home when there is nothing left to attend to.
        assert backward == [
            "start 4", "attend", "wait 4", "start 5", "attend", "start 6", "wait 5", "start 7", "attend", "wait 6",
            "start 8", "wait 7", "attend", "wait 8", "start 9", "wait 9",
        ]  # fmt: skip
        check_overlap(forward)


def test_halo_transfers_while_it_attends_to_its_own_keys(pool: RankPool) -> None:
    for forward, _ in pool.run(rank_work.events, "halo", Case(mask="causal window")):
        assert forward[:3] == ["start 1", "attend", "wait 1"]


def test_allgather_transfers_the_next_heads_while_it_attends(pool: RankPool) -> None:
    for forward, backward in pool.run(rank_work.events, "allgather", Case(mask="causal", heads=(6, 3))):
        # Three stages of keys and values: 1 and 2, 3 and 4, 5 and 6.
        assert forward == [
            "start 1", "start 2", "wait 1", "wait 2", "start 3", "start 4", "attend", "wait 3", "wait 4", "start 5",
            "start 6", "attend", "wait 5", "wait 6", "attend",
        ]  # fmt: skip
        starts = [e for e in backward if e.startswith("start")]
        assert len(starts) == 12  # keys out, gradients back
        last = backward.index("start 14")  # gradients of the first stage, waited for after the second
        assert "attend" in backward[last : backward.index("wait 14")]
