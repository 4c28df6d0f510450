"""Decoding against a cache that ranks share out: every rank gets the whole result."""

from __future__ import annotations

from typing import Any

import pytest
import rank_work
import torch
from rank_pool import RankPool

import strobe
from strobe.distributed import Counted, ShardPlan, decode, merge, shard, simulator

HEADS, HEADS_K, DIM = 6, 2, 8


def cache(length: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, batch, length, HEADS_K, DIM, dtype=torch.float64)
    return k, v


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": strobe.causal},
        {"mask": strobe.causal & strobe.window(9, 0)},
        {"mask": strobe.causal, "softcap": 2.0},
        {"mask": strobe.causal, "score": strobe.alibi(torch.rand(HEADS, dtype=torch.float64))},
        {"mask": strobe.causal, "sinks": torch.randn(HEADS, dtype=torch.float64)},
    ],
    ids=lambda o: "-".join(o) or "plain",
)
@pytest.mark.parametrize("length", [2, 41])
def test_equals_one_process(length: int, options: dict[str, Any], new: int) -> None:
    """Also while some ranks hold nothing yet."""
    q = torch.randn(2, new, HEADS, DIM, dtype=torch.float64)
    k, v = cache(length)
    wanted, wanted_lse = strobe.attention(q, k, v, **options, return_lse=True)
    plan = ShardPlan(length, ranks=4, strategy="striped", block=3)

    def work(mesh: Any) -> tuple[torch.Tensor, torch.Tensor]:
        mine = shard(plan, k, v, rank=mesh.rank)
        return decode(q, *mine, mesh=mesh, plan=plan, **options, return_lse=True)

    for out, lse in simulator.run(4, work):
        torch.testing.assert_close(out, wanted, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(lse, wanted_lse, atol=1e-12, rtol=1e-12)


def test_between_processes_token_by_token(pool: RankPool) -> None:
    """A cache that grows; queries of one sequence without a batch."""
    torch.manual_seed(9)
    k, v = cache(12, batch=1)
    queries = torch.randn(12, HEADS, DIM, dtype=torch.float64)
    wanted = strobe.attention(queries, k[0], v[0], mask=strobe.causal, layout="bshd")
    for found in pool.run(rank_work.decode_tokens, queries, k[0], v[0]):
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)


def test_without_a_plan_all_keys_are_visible_and_every_rank_has_the_same_bits() -> None:
    q, (k, v) = torch.randn(2, 1, HEADS, DIM).bfloat16(), (t.bfloat16() for t in cache(40))
    wanted = strobe.attention(q, k, v)

    def work(mesh: Any) -> tuple[torch.Tensor, int]:
        counted = Counted(mesh)
        mine = slice(10 * mesh.rank, 10 * mesh.rank + 10)
        return decode(q, k[:, mine], v[:, mine], mesh=counted, check=False), counted.sent

    found = simulator.run(4, work)
    assert all(torch.equal(out, found[0][0]) for out, _ in found)
    torch.testing.assert_close(found[0][0], wanted, atol=2e-2, rtol=2e-2)
    # An output and an LSE in fp32, to three other ranks: nothing that grows with the cache.
    assert {size for _, size in found} == {3 * 2 * HEADS * (DIM + 1) * 4}


def test_merge_keeps_the_lse_of_half_precision_results() -> None:
    """Rounded to bfloat16, an LSE of about 300 would be off by 1."""
    out, lse = torch.ones(1, 1, 1, 4).bfloat16(), torch.full((1, 1, 1), 300.0)
    for merged, total in simulator.run(2, lambda mesh: merge((1 - mesh.rank) * out, lse + 0.7 * mesh.rank, mesh=mesh)):
        weights = torch.softmax(torch.tensor([300.0, 300.7]), 0)
        torch.testing.assert_close(merged, weights[0].expand(1, 1, 1, 4))
        torch.testing.assert_close(total, torch.logaddexp(lse, lse + 0.7))


def test_merge_takes_partial_results_of_any_kind() -> None:
    q, (k, v) = torch.randn(2, 3, HEADS, DIM, dtype=torch.float64), cache(30)
    wanted, wanted_lse = strobe.attention(q, k, v, return_lse=True)

    def work(mesh: Any) -> tuple[torch.Tensor, torch.Tensor]:
        part = slice((0, 4, 4)[mesh.rank], (4, 4, 30)[mesh.rank])
        return merge(*strobe.attention(q, k[:, part], v[:, part], return_lse=True), mesh=mesh)

    for out, lse in simulator.run(3, work):
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(lse, wanted_lse)
