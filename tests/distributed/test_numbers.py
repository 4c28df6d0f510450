"""Rounding, repetition and invariance: what ranks add to the error, and when results have the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from shard_cases import Case, expected, inputs, joined, on_one_rank

import strobe
from strobe.distributed import ShardPlan, simulator
from strobe.distributed.choose_method import rank_of
from strobe.distributed.pieces import Piece
from strobe.distributed.step import State, Step, last_calls
from strobe.merging import merge_

METHODS = ("ring", "halo", "allgather", "ulysses", "hybrid")


def simulate(case: Case, plan: ShardPlan, method: str, **keywords: Any) -> dict[str, torch.Tensor]:
    def work(mesh: Any) -> dict[str, torch.Tensor]:
        transports = mesh if isinstance(mesh, tuple) else (mesh,)
        return on_one_rank(case, mesh, rank_of(transports), plan, method, **keywords)

    inner = 2 if method == "hybrid" else None
    return joined(case, plan, simulator.run(plan.ranks, work, inner=inner))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_errors_are_those_of_one_device(method: str, dtype: torch.dtype) -> None:
    """Errors against fp64 are at most half as large again as those of one process: partial results and sums stay in
    fp32."""
    case = Case(lengths=(300,), heads=(4, 2), dims=(16, 16), sinks=True, dtype=dtype, batch=1)
    x = inputs(case)
    exact_case = replace(case, dtype=torch.float64)
    wide = inputs(exact_case)
    for name in ("q", "k", "v", "sinks", "dout", "dlse"):  # the same numbers, rounded
        getattr(wide, name).copy_(getattr(x, name).double())
    expected.cache_clear()
    exact, alone = expected(exact_case), expected(case)
    found = simulate(case, case.plan(4), method)
    for name, t in exact.items():
        error, allowed = ((y[name].double() - t).abs().max().item() for y in (found, alone))
        floor = torch.finfo(found[name].dtype).eps * t.abs().max().item()
        assert error <= 1.5 * allowed + floor, f"{name}: error {error:.2e}, that of one process {allowed:.2e}"


def test_merging_rows_that_see_nothing() -> None:
    """-inf beside -inf is nothing, not NaN; and beside something it changes not a bit."""
    out, lse = torch.zeros(3, 1, 2), torch.full((1, 3), -torch.inf)
    new = torch.zeros(3, 1, 2)
    new[1:] = torch.randn(2, 1, 2)
    new_lse = torch.tensor([[-torch.inf, 2.0, -3.0]])
    merge_(out, lse, new, new_lse)
    assert torch.equal(out, new) and torch.equal(lse, new_lse)
    merge_(out, lse, torch.zeros(3, 1, 2), torch.full((1, 3), -torch.inf))
    assert torch.equal(out, new) and torch.equal(lse, new_lse)


def test_merging_hands_on_nan() -> None:
    out, lse = torch.zeros(1, 1, 2), torch.zeros(1, 1)
    merge_(out, lse, torch.full((1, 1, 2), torch.nan), torch.full((1, 1), torch.nan))
    assert out.isnan().all() and lse.isnan().all()


def test_the_first_result_of_a_row_is_written_and_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nothing has been written to holds NaN here; rows without a result end as out 0 and LSE -inf."""
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda t, shape, dtype: t.new_full(shape, torch.nan, dtype=dtype))
    state = State(torch.zeros(2, 10, 3, 4), dim_v=5)
    total, total_lse = torch.zeros(2, 10, 3, 5), torch.full((2, 3, 10), -torch.inf)
    for start, stop in ((2, 5), (7, 9), (3, 8)):
        out, lse = torch.randn(2, stop - start, 3, 5), torch.randn(2, 3, stop - start)
        merge_(total[:, start:stop], total_lse[..., start:stop], out, lse)
        state.add((start, stop), out, lse)
    found, found_lse = state.results()
    assert torch.equal(found, total) and torch.equal(found_lse, total_lse)
    assert (found_lse == -torch.inf).sum() == 2 * 3 * 3


def test_rows_to_merge_into_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels read the output of rows without a result, and count it 0 times: 0 times NaN is NaN."""
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda t, shape, dtype: t.new_full(shape, torch.nan, dtype=dtype))
    state = State(torch.zeros(1, 10, 2, 4), dim_v=4)
    assert state.is_empty((2, 5))
    out, lse = state.rows_to_write_to((2, 5))
    out.fill_(1.0), lse.fill_(2.0)
    assert not state.is_empty((2, 5)) and not state.is_empty((3, 8)) and state.is_empty((5, 10))
    merged, merged_lse = state.rows_to_merge_into((3, 8))
    assert merged[0, :, 0, 0].tolist() == [1, 1, 0, 0, 0]
    assert merged_lse[0, 0].tolist() == [2, 2, -torch.inf, -torch.inf, -torch.inf]
    found, _ = state.results()
    assert found[0, :, 0, 0].tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0]


def test_rows_that_are_not_finished_are_rounded_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda t, shape, dtype: t.new_full(shape, torch.nan, dtype=dtype))
    state = State(torch.zeros(1, 10, 2, 4, dtype=torch.bfloat16), dim_v=6)
    out, lse = state.rows_to_write_to((2, 7))
    out.fill_(1.001), lse.fill_(2.0)
    for rows, value in (((3, 5), 3.0), ((8, 9), 4.0)):
        out, lse = state.rows_to_finish(rows)
        out.fill_(value), lse.fill_(value)
    found, found_lse = state.rounded()
    assert found.dtype == torch.bfloat16 and found.is_contiguous() and found.shape == (1, 10, 2, 6)
    assert found[0, :, 1, 5].tolist() == [0, 0, 1, 3, 3, 1, 1, 0, 4, 0]
    inf = torch.inf
    assert found_lse[0, 1].tolist() == [-inf, -inf, 2, 3, 3, 2, 2, -inf, 4, -inf]


def test_the_last_calls_of_all_rows() -> None:
    def step(*ranges: tuple[int, int]) -> Step:
        return Step(tuple(Piece(rows, (0, 5), 0, None) for rows in ranges), strobe.causal, 0)

    steps = [step((0, 10)), step((0, 4), (3, 10)), step(), step((4, 8)), step((5, 7))]
    assert last_calls(steps) == [(False,), (False, False), (), (False,), (True,)]
    assert last_calls([step((0, 4), (4, 10)), step((4, 10))]) == [(True, False), (True,)]
    packed = Step(tuple(Piece((9 * d, 9 * d + 9), (0, 5), d, None) for d in (0, 1)), strobe.causal, 2)
    assert last_calls([packed]) == [(True,)] and last_calls([packed, step((17, 18))]) == [(False,), (True,)]


def test_a_result_of_all_rows_is_adopted() -> None:
    state, out, lse = State(torch.zeros(1, 4, 2, 8), dim_v=8), torch.randn(1, 4, 2, 8), torch.randn(1, 2, 4)
    state.add((0, 4), out, lse)
    assert state.results()[0] is out and state.results()[1] is lse


@pytest.mark.parametrize("method", METHODS)
def test_deterministic_calls_repeat_bit_for_bit(method: str) -> None:
    case = Case(lengths=(130,), heads=(4, 1), dims=(16, 16), sinks=True, dtype=torch.float32, dropout=0.2)
    first, second = (simulate(case, case.plan(4), method, deterministic=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("lengths", [(400,), (100, 260, 40)], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_invariant_results_have_the_same_bits_on_any_number_of_ranks(lengths: tuple[int, ...], dtype: Any) -> None:
    """Out, LSE and dq: cuts are at the same blocks, and each block is one call, whoever makes it."""
    case = Case(lengths=lengths, heads=(6, 2), dims=(16, 16), sinks=True, dtype=dtype, strategy="documents", block=16)
    found = [simulate(case, case.plan(ranks), "allgather", invariant=True) for ranks in (1, 2, 4, 8)]
    wanted = expected(case)
    for name in ("out", "lse", "dq"):
        assert all(torch.equal(found[0][name], f[name]) for f in found[1:]), name
        torch.testing.assert_close(found[0][name], wanted[name], atol=0.05, rtol=0.05)
    # Without it they differ: else this test would show nothing.
    loose = [simulate(case, case.plan(ranks), "ring") for ranks in (2, 8)]
    assert dtype != torch.float32 or not torch.equal(loose[0]["out"], loose[1]["out"])


def test_dropout_does_not_depend_on_the_cut() -> None:
    """The weights that are dropped are those of one process, whatever the method, the ranks and the strategy."""
    case = Case(lengths=(60,), heads=(8, 2), dropout=0.5)
    wanted = expected(case)["out"]
    for method, ranks, strategy in (("ring", 2, "zigzag"), ("ulysses", 8, "striped"), ("hybrid", 4, "contiguous")):
        plan = ShardPlan(60, ranks=ranks, mask=strobe.causal, strategy=strategy, block=4)
        torch.testing.assert_close(simulate(case, plan, method)["out"], wanted, atol=1e-12, rtol=0)


def test_calls_that_differ_in_numbers_or_tensors_alone() -> None:
    """Ranks send texts to one another, and remember what they have read; the numbers and the tensors are those of the call."""
    case, table = Case(lengths=(60,), heads=(2, 2)), torch.randn(2, 119, dtype=torch.float64)
    kept = strobe.score_function(lambda s, b, h, q, k: s + table[h, k - q + 59])
    slopes = [
        strobe.score_function(lambda s, b, h, q, k, a=a: s + torch.where(q > k + 7, a, 1.0)) for a in (1.0, 2.0, 1)
    ]
    masks = [strobe.window(5, 0), strobe.window(9, 0)]
    x = inputs(case)
    for score, mask in [(score, mask) for score in (kept, *slopes, kept) for mask in masks]:
        if score is kept:
            table.neg_()
        plan = ShardPlan(60, ranks=2, mask=mask)
        found = simulate(case, plan, "ring", score=score, gradients=False)["out"]
        torch.testing.assert_close(found, strobe.attention(x.q, x.k, x.v, mask=mask, score=score), atol=1e-12, rtol=0)
