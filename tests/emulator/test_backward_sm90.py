"""The backward kernels for Hopper on the emulator, against float64; and kernels with one thing wrong, which the emulator
has to notice."""

from __future__ import annotations

from dataclasses import replace

import oracle
import pytest
import torch
from cases import Case
from emulator.gradients import (
    Mutation,
    check,
    check_case,
    check_deterministic,
    check_fits,
    check_fp32,
    finding,
    gradients,
)
from everyday import everyday
from oracle import prepare

from benchmarks.studies import ideas
from strobe.cuda.plans import backward_plan, backward_sm90
from strobe.cuda.plans.families import FAMILIES
from strobe.emulator import compiler
from strobe.emulator.backend import MACHINES
from strobe.problem import Load
from strobe.variants.mask import Positions, causal
from strobe.variants.ready_made import window

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

VARLEN = ((130, 200), (0, 40), (65, 0), (140, 141), (1, 128))
CAUSAL = Case("causal_group", 200, 300, batch=1, heads=4, heads_k=2, dim=64, mask=causal)
WIDE = Case("d256", 70, 140, batch=1, heads=2, heads_k=1, dim=256, mask=causal)
CASES = [
    CAUSAL,
    Case("full", 140, 200, batch=2, heads=1, heads_k=1, dim=64),
    Case("sinks", 140, 200, batch=1, heads=2, heads_k=1, dim=64, mask=causal, sinks=True),
    Case("sections_of_heads", 40, 130, batch=3, heads=4, heads_k=4, dim=64, mask=causal),  # of four, and the rest
    Case("varlen", 0, 0, heads=2, heads_k=1, dim=64, mask=causal, lengths=VARLEN),
    Case("dropout", 140, 200, batch=2, heads=2, heads_k=1, dim=64, dropout=0.3),
    Case("padded_dims", 70, 140, batch=1, heads=2, heads_k=1, dim=72, dim_v=40, memory="sliced", mask=causal),
    Case("d128_rows_without_keys", 200, 90, batch=1, heads=2, heads_k=1, dim=128, mask=causal),
    Case("d128_everything", 0, 0, heads=2, heads_k=1, dim=128, mask=window(60, 20), softcap=2.0, sinks=True,
         dropout=0.2, lengths=VARLEN),
    Case("d192_128", 140, 140, batch=1, heads=2, heads_k=1, dim=192, dim_v=128, mask=causal),
    WIDE,
    Case("d256_everything", 0, 0, heads=2, heads_k=1, dim=256, mask=window(60, 20), softcap=2.0, dropout=0.2,
         lengths=VARLEN[1:]),
]  # fmt: skip


@pytest.fixture(autouse=True)
def sums_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few keys would take turns: here only `deterministic` does."""
    monkeypatch.setattr(backward_sm90, "TURNS_UP_TO", 0)


@pytest.mark.parametrize(
    "case", everyday(CASES, ["causal_group", "sections_of_heads", "varlen", "d128_everything", "d256_everything"])
)
def test_gradients(case: Case) -> None:
    for mode in ("sync", "async"):
        check_case("sm90", case, mode=mode)


@pytest.mark.thorough
def test_gradients_in_fp16() -> None:
    check_case("sm90", CAUSAL, dtype=torch.float16)


@pytest.mark.parametrize("case", everyday([CASES[1], CAUSAL, WIDE], ["full", "causal_group"]))
def test_deterministic(case: Case) -> None:
    check_deterministic("sm90", case, seeds=(1, 2))


NAMES = ("varlen", "padded_dims", "d128_rows_without_keys", "d128_everything")


@pytest.mark.parametrize("case", everyday([c for c in CASES if c.name in NAMES], ["d128_rows_without_keys"]))
def test_gradients_by_turns(case: Case) -> None:
    """Rows that see no key have no turn: somebody else writes their zeros. Packed sequences end within a block."""
    check_deterministic("sm90", case, seeds=(1,))


@pytest.mark.thorough
@pytest.mark.parametrize("dim", [64, 128])
def test_turns_that_wait_for_many(dim: int) -> None:
    """Several blocks of queries and keys, a group of heads, no mask: the order of turns is cyclic."""
    case = Case("many", 300, 400, batch=1, heads=2, heads_k=1, dim=dim)
    check_deterministic("sm90", case, seeds=(1,))


@pytest.mark.parametrize("wanted", [("q",), ("k", "v"), ("v",)], ids=str)
@pytest.mark.parametrize("case", everyday([CAUSAL, WIDE], ["causal_group"]))
def test_only_what_is_asked_for(case: Case, wanted: tuple[str, ...]) -> None:
    p, inputs = prepare(case, torch.bfloat16)
    found = gradients("sm90", p, inputs, wanted=wanted)
    assert [n for n in ("q", "k", "v") if getattr(found, n) is not None] == list(wanted)
    check(p, inputs, found, *oracle.expected_gradients(case, torch.bfloat16))


def test_parts_of_a_sequence() -> None:
    """Masks count positions in the whole; the last of these rows see no key."""
    for q0, q1, k0, k1 in ((0, 140, 0, 150), (130, 290, 120, 290), (0, 130, 60, 290)):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, n, 1, 64).bfloat16() for n in (q1 - q0, k1 - k0, k1 - k0))
        at = torch.tensor([Positions(q0, 290, k0, 290)], dtype=torch.int32)
        p, inputs = oracle.check(q, k, v, mask=causal, positions=at)
        expected = [oracle.gradients(p, inputs, dtype, True) for dtype in (torch.float64, torch.bfloat16)]
        check(p, inputs, gradients("sm90", p, inputs), *expected)


@pytest.mark.parametrize(
    "case", everyday([CAUSAL, WIDE, *(c for c in CASES if c.name in ("varlen", "padded_dims"))], ["causal_group"])
)
def test_gradients_in_fp32(case: Case) -> None:
    check_fp32("sm90", case)


@pytest.mark.parametrize("dim", everyday([64, 128, 256], ["64"]))
def test_a_group_in_parts(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few key heads leave multiprocessors idle: query heads are divided among blocks that see the same keys."""
    monkeypatch.setattr(backward_plan, "LONG_LOOP", 1)
    case = Case("parts", 70, 90, batch=2, heads=8, heads_k=1, dim=dim, mask=causal)
    assert backward_plan.group_parts(prepare(case, torch.bfloat16)[0], sms=5) == 2
    check_case("sm90", case, machine=replace(MACHINES["sm90"], sms=8))
    check_deterministic("sm90", case, seeds=(1,), machine=replace(MACHINES["sm90"], sms=5))


@pytest.mark.thorough
def test_packed_groups_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_plan, "LONG_LOOP", 1)
    case = Case("parts", 0, 0, heads=8, heads_k=1, dim=64, mask=causal, lengths=((70, 90), (0, 40), (33, 0)))
    check_case("sm90", case, machine=replace(MACHINES["sm90"], sms=16))


def test_what_it_does_not_take() -> None:
    p, _ = prepare(CASES[1], torch.bfloat16)
    asked = p.backward(("q", "k", "v"))
    with_bias = replace(p.backward(("bias",)), loads=(Load("bias", torch.bfloat16, (0, 0, 0, 0), shared=True),))
    for other, reason in (
        (replace(asked, dtype=torch.float64), "float64"),
        (replace(asked, loads=(Load("bias", torch.float64, (0, 0, 0, 0)),)), "bias of float64"),
        (replace(asked, loads=(Load("bias", torch.bfloat16, (0, 0, 0, 0), negated=True),)), "negated view"),
        (replace(with_bias, deterministic=True), "deterministic gradient of a bias"),
    ):
        assert reason in str(FAMILIES["sm90"].limits(other))


# ---- mutations -------------------------------------------------------------------------------------------------------

MUTATIONS = [
    Mutation("keys_not_awaited", "mbar_wait(smem + Offset::kv_barriers, 0);", "", CAUSAL),
    Mutation("values_not_awaited", "mbar_wait(smem + Offset::kv_barriers + 8, 0);", "", CAUSAL),
    Mutation("queries_not_awaited", "q.wait_full();\n    wgmma_fence();", "wgmma_fence();", CAUSAL),
    Mutation("d_o_not_awaited", "d_o.wait_full();\n    wgmma_fence();", "wgmma_fence();", CAUSAL),
    Mutation("dp_not_awaited", "wgmma_wait<0>();\n    pin(dp);", "pin(dp);", CAUSAL),
    Mutation("ds_not_awaited", "ds_out.wait_full();\n    wgmma_fence();", "wgmma_fence();", CAUSAL),
    Mutation("ds_overwritten", "ds_in.wait_empty();", "", CAUSAL),
    Mutation("ds_without_a_fence", "fence_proxy_async();\n    sync_warp();\n    if (elected()) mbar_arrive(ds_in",
             "sync_warp();\n    if (elected()) mbar_arrive(ds_in", CAUSAL),
    Mutation("dq_put_over_what_leaves", "bar_sync(kBarrierDqEmpty + consumer, kDqThreads);", "", CAUSAL),
    Mutation("dq_added_before_it_is_there", "bar_sync(kBarrierDqFull + consumer, kDqThreads);", "", CAUSAL),
    Mutation("dq_without_a_fence", "fence_proxy_async();\n    bar_arrive(kBarrierDqFull", "bar_arrive(kBarrierDqFull",
             CAUSAL),
    Mutation("dq_not_read_yet", "tma_store_commit();\n      tma_store_wait_read<0>();\n    }\n    sync_warp();",
             "tma_store_commit();\n    }\n    sync_warp();", CAUSAL),
    Mutation("mask_left_out", "m, blocks.masked(m),", "m, false,", CAUSAL),
    Mutation("a_head_left_out", "blocks.count() * p.group", "blocks.count() * (p.group - 1)",
             CAUSAL),
    Mutation("gradients_staged_over_keys_in_use", "bar_sync(kBarrierConsumers, 256);", ";", CAUSAL),
    Mutation("lse_without_gradient", "if (there && p.dlse) delta -=", "if (false) delta -=", CAUSAL),
    Mutation("dropped_for_another_query", "row % 2 ? keys.b : keys.a", "row % 2 ? keys.a : keys.b", CASES[5]),
    Mutation("first_turn_adds", "if (number == 0) bulk_store(", "if (false) bulk_store(", CAUSAL, turns=True),
    Mutation("last_turn_not_awaited", "if (waits && !came) await_turn(p.turns + part, turn.number);", "", CAUSAL,
             turns=True),
    Mutation("turn_not_come_yet", "&& acquire_turn(p.turns + part) == turn.number;", ";", replace(CAUSAL, dim=128),
             turns=True),
    Mutation("turn_passed_on_before_its_sums", "bulk_wait_written();\n    release_turn(p.turns + sent);",
             "release_turn(p.turns + sent);", CAUSAL, turns=True),
    Mutation("others_left_out", "if (others) sum.add_to(dq);", "", CAUSAL, turns=True),
    Mutation("others_added_before_they_are_there", "cp_async_commit();\n  cp_async_wait<0>();", "cp_async_commit();",
             CAUSAL, turns=True),
    Mutation("dq_staged_over_what_others_read", "sync_warpgroup(sum.consumer);  // all have read the buffer", "", CAUSAL,
             turns=True),
    Mutation("dq_not_sent_yet", "box, DqRows<Config::kBlockM>::column(sum.consumer) / kPanel, 1);\n    tma_store_commit();\n"
             "    tma_store_wait_read<0>();", "box, DqRows<Config::kBlockM>::column(sum.consumer) / kPanel, 1);\n"
             "    tma_store_commit();", CAUSAL, turns=True),
    Mutation("last_turn_offered_too_soon", "if (!turn.last) sum.offer();", "sum.offer();", CAUSAL, turns=True),
    Mutation("rows_without_keys_left_as_they_are", "if (Config::kClearDq) clear_dq(row, lane);", "", CASES[7],
             turns=True),
]  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_mutation_fits_the_source(mutation: Mutation) -> None:
    """Those that `make test` does not run must not outlive what they replace."""
    check_fits("sm90", mutation)


EVERYDAY = (
    "ds_without_a_fence dq_put_over_what_leaves a_head_left_out lse_without_gradient last_turn_not_awaited".split()
)


@pytest.mark.parametrize("mutation", everyday(MUTATIONS, EVERYDAY))
def test_mutation_is_caught(mutation: Mutation) -> None:
    assert any(finding("sm90", mutation, seed) for seed in (1, 2)), f"{mutation} passes unnoticed"


@pytest.mark.thorough
@pytest.mark.parametrize("idea", [*ideas.BACKWARD[1:], *ideas.WIDE_BACKWARD[1:]], ids=str)
def test_an_idea_computes_the_same(idea: ideas.Idea) -> None:
    ((old, new),) = idea.edits
    case = WIDE if idea in ideas.WIDE_BACKWARD else CAUSAL
    check_case("sm90", case, mutation=Mutation(idea.name, old, new, case))
