"""Many ranks in one process: results of 8 to 64 ranks, any cut, and the bytes that each rank sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from shard_cases import DENSE, MASKS, PACKED, Case, compare, expected, joined, on_one_rank

from strobe.distributed import Counted, ShardPlan, simulator
from strobe.distributed.choose_method import rank_of
from strobe.distributed.cost import Shape, sent
from strobe.distributed.transport import Failed

METHODS = ("ring", "halo", "allgather", "ulysses", "hybrid")


def simulate(
    case: Case, plan: ShardPlan, method: str, inner: int | None = None, **keywords: Any
) -> list[dict[str, torch.Tensor]]:
    def work(mesh: Any) -> dict[str, torch.Tensor]:
        transports = mesh if isinstance(mesh, tuple) else (mesh,)
        return on_one_rank(case, mesh, rank_of(transports), plan, method, **keywords)

    return simulator.run(plan.ranks, work, inner=inner)


@pytest.mark.parametrize(
    "method, ranks, inner, case",
    [
        ("ring", 8, None, Case(lengths=(100,), mask="causal", sinks=True)),
        ("ring", 64, None, Case(lengths=(131,), mask="causal window")),
        ("halo", 32, None, Case(lengths=(200, 3, 40), mask="causal window", strategy="documents")),
        ("halo", 64, None, Case(lengths=(140,), mask="window", strategy="contiguous")),
        ("allgather", 16, None, Case(lengths=(50, 20), mask="causal", dropout=0.3)),
        ("ulysses", 64, None, Case(lengths=(70,), heads=(64, 4), dims=(4, 4), batch=1, dropout=0.3)),
        ("hybrid", 16, 4, Case(lengths=(90,), heads=(8, 2), mask="causal", strategy="striped", block=2)),
        ("hybrid", 64, 8, Case(lengths=(60, 70), heads=(8, 8), mask="chunked")),
        ("auto", 8, None, Case(lengths=(80,), mask="causal window")),
    ],
    ids=lambda x: x.mask if isinstance(x, Case) else str(x),
)
def test_many_ranks(method: str, ranks: int, inner: int | None, case: Case) -> None:
    plan = case.plan(ranks)
    compare(joined(case, plan, simulate(case, plan, method, inner)), expected(case), case)


@settings(max_examples=25)
@given(
    st.sampled_from(METHODS),
    st.lists(st.integers(0, 3), min_size=37, max_size=37),
    st.sampled_from([DENSE, PACKED]),
    st.sampled_from(sorted(MASKS)),
    st.booleans(),
)
def test_any_cut(method: str, owner: list[int], lengths: tuple[int, ...], mask: str, positional: bool) -> None:
    """Positions dealt out at random: shards are unequal, in many pieces, perhaps empty."""
    case = Case(mask=mask, lengths=lengths, heads=(4, 2), sinks=True, dropout=0.25 if positional else 0.0)
    shards = [[(i, i + 1) for i, r in enumerate(owner) if r == rank] for rank in range(4)]
    plan = ShardPlan.of_shards(lengths, shards, mask=MASKS[mask])
    found = simulate(case, plan, method, 2 if method == "hybrid" else None)
    compare(joined(case, plan, found), expected(case), case)


@pytest.mark.parametrize("lengths", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("method", METHODS)
def test_ranks_without_rows(method: str, lengths: tuple[int, ...]) -> None:
    """One rank holds everything, one a single position, two nothing."""
    case = Case(lengths=lengths, heads=(4, 2), sinks=True)
    plan = ShardPlan.of_shards(lengths, [[], [(1, 37)], [(0, 1)], []], mask=MASKS[case.mask])
    found = simulate(case, plan, method, 2 if method == "hybrid" else None)
    compare(joined(case, plan, found), expected(case), case)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method, deterministic", [*((m, False) for m in METHODS), ("allgather", True)])
def test_bytes_are_those_of_the_formula(method: str, dtype: torch.dtype, deterministic: bool) -> None:
    inner = 2 if method == "hybrid" else None
    for mask, lengths, strategy, heads in (
        ("full", DENSE, "zigzag", (6, 2)),
        ("causal", DENSE, "contiguous", (8, 8)),
        ("causal window", DENSE, "zigzag", (4, 1)),
        ("causal", PACKED, "documents", (6, 3)),
        ("window", DENSE, "striped", (6, 3)),
    ):
        case = Case(mask=mask, lengths=lengths, strategy=strategy, heads=heads, dtype=dtype)
        plan = case.plan(4)

        def work(mesh: Any, gradients: bool, case: Case = case, plan: ShardPlan = plan) -> int:
            transports = [Counted(t) for t in (mesh if isinstance(mesh, tuple) else (mesh,))]
            wrapped = tuple(transports) if len(transports) == 2 else transports[0]
            on_one_rank(
                case, wrapped, rank_of(transports), plan, method, gradients, check=False, deterministic=deterministic,
                through_lse=False,
            )  # fmt: skip
            return sum(t.sent for t in transports)

        shape = Shape(*case.heads, *case.dims, dtype.itemsize, case.batch if lengths == DENSE else 1)
        wanted = sent(plan, shape, method, inner=inner, deterministic=deterministic)
        forward = simulator.run(4, lambda mesh: work(mesh, False), inner=inner)  # noqa: B023
        both = simulator.run(4, lambda mesh: work(mesh, True), inner=inner)  # noqa: B023
        assert forward == [s.forward for s in wanted], case
        assert both == [s.forward + s.backward for s in wanted], case


def test_backward_runs_in_the_thread_of_its_rank() -> None:
    """Also on a GPU, where autograd has one thread for all: ranks that wait for one another would stop there."""
    threaded = torch._C._is_multithreading_enabled
    assert simulator.run(3, lambda mesh: threaded()) == [False] * 3
    assert threaded()


def test_one_that_fails_fails_all() -> None:
    def work(mesh: Any) -> None:
        if mesh.rank == 2:
            raise RuntimeError("rank 2 has had enough")
        mesh.exchange([], [(torch.empty(1), (mesh.rank + 1) % 4)]).wait()

    with pytest.raises(RuntimeError, match="had enough"):
        simulator.run(4, work)


def test_messages_of_another_shape_are_noticed() -> None:
    def work(mesh: Any) -> None:
        got = torch.empty(3 if mesh.rank else 2)
        mesh.exchange([(torch.zeros(2), 1 - mesh.rank)], [(got, 1 - mesh.rank)]).wait()

    with pytest.raises(Failed, match=r"rank 1 got a message of \(2,\)"):
        simulator.run(2, work)
