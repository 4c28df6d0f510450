"""The backward kernels on the emulator, for Hopper and for Ampere and later, against float64; and kernels with one thing
wrong, which the emulator has to notice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

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

from strobe.backends.tiled import forward as tiled
from strobe.cuda.parts.architecture import SMEM_BYTES, generation
from strobe.cuda.parts.plan import Machine
from strobe.cuda.plans import backward_plan, backward_sm80, backward_sm90
from strobe.cuda.plans.backward_sm80 import Tile
from strobe.cuda.plans.families import FAMILIES
from strobe.emulator import compiler
from strobe.emulator.backend import MACHINES
from strobe.problem import Load
from strobe.variants.mask import Positions, causal
from strobe.variants.ready_made import chunked, window

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

SMALL = Tile(32, 32, 4, 2, 2, 2)  # many blocks of queries and keys in small problems
ONE_BUFFER = replace(SMALL, stages_q=1, stages_do=1)
EARLY = replace(SMALL, early=True)


@dataclass(frozen=True)
class Run:
    """A case, or a mutation, for the kernels of a family."""

    family: str
    case: Any

    @property
    def tile(self) -> Any:
        return SMALL if self.family == "sm80" else None  # None: that of the table

    def __str__(self) -> str:
        return f"{self.family}-{self.case}"


def machine(arch: str = "sm_80") -> Machine:
    return Machine(arch, sms=3, l2_bytes=64 << 20, smem_bytes=SMEM_BYTES[generation(arch)])


@pytest.fixture(autouse=True)
def sums_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only `deterministic` take turns: so few keys would do so, too."""
    monkeypatch.setattr(backward_sm90, "TURNS_UP_TO", 0)


SM80 = [
    Case("full", 70, 90, batch=2, heads=2, dim=32),
    Case("causal_group", 70, 90, batch=1, heads=6, heads_k=2, dim=32, mask=causal),
    Case("causal_more_queries", 100, 40, batch=1, dim=32, mask=causal),  # the first rows see nothing
    Case("window", 90, 70, batch=1, heads=2, heads_k=1, dim=32, mask=window(20, 7)),
    Case("chunked", 70, 70, batch=1, dim=32, mask=chunked(20) & causal),
    Case("chunked_more_queries", 70, 40, batch=1, dim=32, mask=chunked(20)),  # the first chunks have no keys
    Case("varlen", 0, 0, heads=4, heads_k=2, dim=32, mask=causal, lengths=((40, 70), (0, 5), (3, 0), (65, 33), (1, 1))),
    Case("softcap", 40, 70, batch=1, heads=2, heads_k=1, dim=32, mask=causal, softcap=1.5),
    Case("sinks", 40, 70, batch=1, heads=4, heads_k=2, dim=32, mask=causal, sinks=True),
    Case("sinks_rows_without_keys", 70, 40, batch=1, dim=32, mask=causal, sinks=True),
    Case("dropout", 40, 70, batch=2, heads=4, heads_k=2, dim=32, dropout=0.3),
    Case("dropout_everything", 0, 0, heads=4, heads_k=2, dim=24, dim_v=32, mask=window(30, 4), softcap=3.0, sinks=True,
         dropout=0.2, lengths=((40, 70), (0, 5), (3, 0), (65, 33))),
    Case("padded_dims", 40, 70, batch=1, heads=2, heads_k=1, dim=24, dim_v=16, memory="sliced", mask=causal),
    Case("sliced", 40, 70, batch=2, heads=2, heads_k=1, dim=64, dim_v=32, memory="sliced"),
    Case("huge", 48, 80, batch=1, dim=32, scores="huge"),
    Case("one_query", 1, 40, batch=1, heads=3, heads_k=1, dim=32),
]  # fmt: skip

VARLEN = ((130, 200), (0, 40), (65, 0), (140, 141), (1, 128))
CAUSAL = Case("causal_group", 200, 300, batch=1, heads=4, heads_k=2, dim=64, mask=causal)
WIDE = Case("d256", 70, 140, batch=1, heads=2, heads_k=1, dim=256, mask=causal)
SM90 = [
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

RUNS = [*(Run("sm80", case) for case in SM80), *(Run("sm90", case) for case in SM90)]
BY_NAME = {str(run): run for run in RUNS}
EVERYDAY = """
    sm80-full sm80-causal_group sm80-causal_more_queries sm80-varlen sm80-sinks sm80-sinks_rows_without_keys
    sm80-dropout_everything sm80-padded_dims sm80-huge sm80-one_query
    sm90-causal_group sm90-sections_of_heads sm90-varlen sm90-d128_everything sm90-d256_everything
""".split()


def runs(names: str, often: str) -> list[Any]:
    """Those of these names; `often`: those for every day."""
    return everyday([BY_NAME[name] for name in names.split()], often.split())


@pytest.mark.parametrize("run", everyday(RUNS, EVERYDAY))
def test_gradients(run: Run) -> None:
    for mode in ("sync", "async"):
        check_case(run.family, run.case, run.tile, mode=mode)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["sm80-causal_group", "sm90-causal_group"])
def test_gradients_in_fp16(name: str) -> None:
    run = BY_NAME[name]
    check_case(run.family, run.case, run.tile, dtype=torch.float16)


@pytest.mark.parametrize("tile", everyday([ONE_BUFFER, replace(SMALL, stages_do=1), EARLY], [str(ONE_BUFFER)]))
def test_other_orders_of_copies_and_products(tile: Tile) -> None:
    check_case("sm80", SM80[1], tile)


@pytest.mark.thorough
def test_scores_that_are_a_function_computed_early() -> None:
    check_case("sm80", replace(SM80[1], name="early", softcap=1.5), EARLY)


TABLES = {
    Case("d64", 140, 140, batch=1, heads=2, heads_k=1, dim=64, mask=causal): "sm_80",
    Case("d128", 70, 140, batch=1, heads=1, heads_k=1, dim=128, mask=window(60, 3)): "sm_80",
    Case("d256", 70, 70, batch=1, heads=1, heads_k=1, dim=256, mask=causal): "sm_80",
    Case("d192_128", 70, 70, batch=1, heads=1, heads_k=1, dim=192, dim_v=128, mask=causal): "sm_90",
    Case("d160", 40, 40, batch=1, heads=1, heads_k=1, dim=160, mask=causal): "sm_86",
    Case("d192", 40, 70, batch=1, heads=1, heads_k=1, dim=192): "sm_86",
}


@pytest.mark.parametrize("case", everyday(list(TABLES), ["d64", "d256"]))
def test_tiles_of_the_tables(case: Case) -> None:
    arch = TABLES[case]
    check_case("sm80", case, machine=machine(arch))


def test_all_tiles_fit() -> None:
    """Shared memory, also with dropout, and whole tiles for every warp; ptxas and static_assert see the same numbers."""
    for arch in ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120"):
        for dim, dim_v in backward_sm80.DIMS:
            for tile in backward_sm80.table(dim, dim_v, arch):
                room = SMEM_BYTES[generation(arch)]
                assert backward_sm80.fits(tile, dim, dim_v, arch), (arch, dim, str(tile))
                assert tile.smem(dim, dim_v, dropout=True) <= room, (arch, dim, str(tile))
                each = (room + 1024) // tile.blocks_per_sm - 1024  # every block takes 1 KB more
                assert tile.smem(dim, dim_v, dropout=False) <= each, (arch, dim, str(tile))
                keys, rest, dims = (tile.warps // n for n in (tile.warps_s, tile.warps_kv, tile.warps_q))
                for size, warps in (
                    (tile.block_m, tile.warps_s), (tile.block_n, keys), (tile.block_n, tile.warps_kv), (dim, rest),
                    (dim_v, rest), (tile.block_m, tile.warps_q), (dim, dims),
                ):  # fmt: skip
                    assert size % (16 * warps) == 0, (arch, dim, str(tile))


@pytest.mark.parametrize("wanted", [("q",), ("k", "v"), ("v",)], ids=str)
@pytest.mark.parametrize(
    "run", runs("sm80-causal_group sm90-causal_group sm90-d256", "sm80-causal_group sm90-causal_group")
)
def test_only_what_is_asked_for(run: Run, wanted: tuple[str, ...]) -> None:
    p, inputs = prepare(run.case, torch.bfloat16)
    found = gradients(run.family, p, inputs, run.tile, wanted=wanted)
    assert [n for n in ("q", "k", "v") if getattr(found, n) is not None] == list(wanted)
    check(p, inputs, found, *oracle.expected_gradients(run.case, torch.bfloat16))


@pytest.mark.parametrize(
    "run",
    runs("sm80-full sm80-window sm90-full sm90-causal_group sm90-d256", "sm80-full sm90-full sm90-causal_group"),
)
def test_deterministic(run: Run) -> None:
    check_deterministic(run.family, run.case, run.tile, seeds=(1, 2, 3) if run.tile else (1, 2))


@pytest.mark.parametrize(
    "run",
    runs(
        "sm90-varlen sm90-padded_dims sm90-d128_rows_without_keys sm90-d128_everything", "sm90-d128_rows_without_keys"
    ),
)
def test_gradients_by_turns(run: Run) -> None:
    """Rows that see no key have no turn: somebody else writes their zeros. Packed sequences end within a block."""
    check_deterministic("sm90", run.case, seeds=(1,))


@pytest.mark.thorough
@pytest.mark.parametrize("dim", [64, 128])
def test_turns_that_wait_for_many(dim: int) -> None:
    """Several blocks of queries and keys, a group of heads, no mask: the order of turns is cyclic."""
    case = Case("many", 300, 400, batch=1, heads=2, heads_k=1, dim=dim)
    check_deterministic("sm90", case, seeds=(1,))


SPANS = {  # length of the whole, heads and head dim, parts of queries and keys
    "sm80": (90, (2, 32), (0, 40, 0, 50), (30, 90, 20, 90), (0, 30, 60, 90)),
    "sm90": (290, (1, 64), (0, 140, 0, 150), (130, 290, 120, 290), (0, 130, 60, 290)),
}


@pytest.mark.parametrize("family", SPANS)
def test_parts_of_a_sequence(family: str) -> None:
    """Masks count positions in the whole; the last of these rows see no key."""
    whole, shape, *spans = SPANS[family]
    for q0, q1, k0, k1 in spans:
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, n, *shape).bfloat16() for n in (q1 - q0, k1 - k0, k1 - k0))
        at = torch.tensor([Positions(q0, whole, k0, whole)], dtype=torch.int32)
        p, inputs = oracle.check(q, k, v, mask=causal, positions=at)
        expected = [oracle.gradients(p, inputs, dtype, True) for dtype in (torch.float64, torch.bfloat16)]
        check(p, inputs, gradients(family, p, inputs, SMALL if family == "sm80" else None), *expected)


FP32 = """sm80-causal_group sm80-varlen sm80-padded_dims sm90-causal_group sm90-d256 sm90-varlen sm90-padded_dims"""


@pytest.mark.parametrize("run", runs(FP32, "sm90-causal_group"))
def test_gradients_in_fp32(run: Run) -> None:
    check_fp32(run.family, run.case, run.tile)


PARTS = {"sm80-32": (1, 4, 4), "sm90-64": (2, 5, 8), "sm90-128": (2, 5, 8), "sm90-256": (2, 5, 8)}


@pytest.mark.parametrize("name", everyday(list(PARTS), ["sm90-64"]))
def test_a_group_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few key heads leave multiprocessors idle: query heads are divided among blocks that see the same keys."""
    monkeypatch.setattr(backward_plan, "LONG_LOOP", 1)
    family, dim = name.split("-")
    batch, few, more = PARTS[name]  # few, more: multiprocessors
    gpu = machine() if family == "sm80" else MACHINES["sm90"]
    case = Case("parts", 70, 90, batch=batch, heads=8, heads_k=1, dim=int(dim), mask=causal)
    assert backward_plan.group_parts(prepare(case, torch.bfloat16)[0], sms=few) == 2
    check_case(family, case, machine=replace(gpu, sms=more))
    check_deterministic(family, case, seeds=(1,), machine=replace(gpu, sms=few))


@pytest.mark.thorough
def test_packed_groups_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_plan, "LONG_LOOP", 1)
    case = Case("parts", 0, 0, heads=8, heads_k=1, dim=64, mask=causal, lengths=((70, 90), (0, 40), (33, 0)))
    check_case("sm90", case, machine=replace(MACHINES["sm90"], sms=16))


@pytest.mark.parametrize(("family", "dtype"), [("sm80", torch.float32), ("sm90", torch.float64)], ids=str)
def test_what_they_do_not_take(family: str, dtype: torch.dtype) -> None:
    p, _ = prepare(BY_NAME[f"{family}-full"].case, torch.bfloat16)
    asked = p.backward(("q", "k", "v"))
    with_bias = replace(p.backward(("bias",)), loads=(Load("bias", torch.bfloat16, (0, 0, 0, 0), shared=True),))
    assert FAMILIES[family].limits(asked) is None
    for other, reason in (
        (replace(asked, dtype=dtype), str(dtype).removeprefix("torch.")),
        (replace(asked, loads=(Load("bias", torch.float64, (0, 0, 0, 0)),)), "bias of float64"),
        (replace(asked, loads=(Load("bias", torch.bfloat16, (0, 0, 0, 0), negated=True),)), "negated view"),
        (replace(with_bias, deterministic=True), "deterministic gradient of a bias"),
    ):
        assert reason in str(FAMILIES[family].limits(other))


# ---- mutations -------------------------------------------------------------------------------------------------------

WINDOW, DROPOUT, PACKED = (BY_NAME[f"sm80-{name}"].case for name in ("window", "dropout", "varlen"))
LANDED = "cp_async_wait<0>();\n    sync_block();  // Q"
CHUNK = "(Config::kExactDims || chunk * kChunk<T> < dim)"


def mutation(name: str, old: str, new: str = "", case: Case = SM80[1], tile: Tile = SMALL) -> Mutation:
    return Mutation(name, old, new, case, tile)


MUTATIONS_SM80 = [
    mutation("copies_not_awaited", LANDED, "sync_block();  // Q"),
    mutation("copies_not_committed", f"cp_async_commit();\n    {LANDED}", LANDED),
    mutation("no_barrier_at_the_top", "sync_block();  // Q and dO have landed", "//"),
    mutation("no_barrier_behind_ds", "sync_block();  // P and dS are written", "//"),
    mutation("no_barrier_before_do", "sync_block();  // dO may be overwritten", "//", tile=ONE_BUFFER),
    mutation("no_barrier_before_q", "sync_block();  // Q may be overwritten", "//", tile=ONE_BUFFER),
    mutation("no_barrier_before_the_epilogue", "sync_block();  // nobody reads K and V any more", "//"),
    mutation("next_q_not_awaited", "cp_async_wait<1>();", "", tile=EARLY),
    mutation("one_buffer_of_q_for_two", "kStagesQ == 1 ? 0 : left & 1", "0"),
    mutation("mask_left_out", "if (blocks.masked(b.m)) {", "if (false) {"),
    mutation("mask_only_above", "m < first_full || m >= end_full", "m < first_full", WINDOW),
    mutation("head_of_another_group", "tile.head_k * p.group, blocks.first}", "tile.head_k, blocks.first}"),
    mutation("a_head_left_out", "blocks.count() * p.group", "blocks.count() * (p.group - 1)"),
    mutation("weights_not_dropped", "dropout.drop(kept,", "if (false) dropout.drop(kept,", DROPOUT),
    mutation("dropped_for_another_query", "as_bits(x), as_bits(y)}, row)", "as_bits(x), as_bits(y)}, row + 1)", DROPOUT),
    mutation("keys_beyond_the_sequence_written", f"if (tile.key0 + row < tile.k.length && {CHUNK}", f"if ({CHUNK}", PACKED),
]  # fmt: skip

MUTATIONS_SM90 = [
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
    Mutation("dropped_for_another_query", "row % 2 ? keys.b : keys.a", "row % 2 ? keys.a : keys.b", SM90[5]),
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
    Mutation("dq_not_sent_yet", "column(sum.consumer) / kPanel<T>, 1);\n    tma_store_commit();\n    tma_store_wait_read<0>();",
             "column(sum.consumer) / kPanel<T>, 1);\n    tma_store_commit();", CAUSAL, turns=True),
    Mutation("last_turn_offered_too_soon", "if (!turn.last) sum.offer();", "sum.offer();", CAUSAL, turns=True),
    Mutation("rows_without_keys_left_as_they_are", "if (Config::kClearDq) clear_dq(row, lane);", "", SM90[7],
             turns=True),
]  # fmt: skip

MUTATIONS = [*(Run("sm80", m) for m in MUTATIONS_SM80), *(Run("sm90", m) for m in MUTATIONS_SM90)]
EVERYDAY_MUTATIONS = """
    sm80-copies_not_awaited sm80-mask_only_above sm80-weights_not_dropped sm80-keys_beyond_the_sequence_written
    sm90-ds_without_a_fence sm90-dq_put_over_what_leaves sm90-a_head_left_out sm90-lse_without_gradient
    sm90-last_turn_not_awaited
""".split()


@pytest.mark.parametrize("run", MUTATIONS, ids=str)
def test_mutation_fits_the_source(run: Run) -> None:
    """Those that `make test` does not run must not outlive what they replace."""
    check_fits(run.family, run.case)


@pytest.mark.parametrize("run", everyday(MUTATIONS, EVERYDAY_MUTATIONS))
def test_mutation_is_caught(run: Run) -> None:
    assert any(finding(run.family, run.case, seed) for seed in (1, 2)), f"{run} passes unnoticed"


@pytest.mark.thorough
def test_sums_without_turns_are_noticed() -> None:
    """They are right, but not the same for every order of blocks."""
    untimely = mutation(
        "turn_not_awaited", "while (acquire_turn(p.turns + 2 * block) != turn(b.m)) {\n          }", ";"
    )
    p, inputs = prepare(SM80[1], torch.bfloat16)
    p = replace(p, deterministic=True, partial=True)  # fp32: rounding would hide it
    forward = tiled.forward(p, inputs)
    several = [gradients("sm80", p, inputs, SMALL, seed=s, mutation=untimely, forward=forward).q for s in (1, 2, 3)]
    assert not all(torch.equal(several[0], other) for other in several)
