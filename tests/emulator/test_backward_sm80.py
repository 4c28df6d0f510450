"""The backward kernels for Ampere and later on the emulator, against float64; and kernels with one thing wrong, which the
emulator has to notice."""

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

from strobe.backends.tiled import forward as tiled
from strobe.cuda.parts.plan import Machine
from strobe.cuda.plans import backward_plan, backward_sm80
from strobe.cuda.plans.backward_sm80 import Tile
from strobe.cuda.plans.families import FAMILIES
from strobe.cuda.plans.forward_sm80 import SMEM_BYTES, generation
from strobe.emulator import compiler
from strobe.problem import Load
from strobe.variants.mask import Positions, causal
from strobe.variants.ready_made import chunked, window

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

SMALL = Tile(32, 32, 4, 2, 2, 2)  # many blocks of queries and keys in small problems
ONE_BUFFER = replace(SMALL, stages_q=1, stages_do=1)
EARLY = replace(SMALL, early=True)


def machine(arch: str = "sm_80") -> Machine:
    return Machine(arch, sms=3, l2_bytes=64 << 20, smem_bytes=SMEM_BYTES[generation(arch)])


CASES = [
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


EVERYDAY = """
    full causal_group causal_more_queries varlen sinks sinks_rows_without_keys dropout_everything padded_dims huge one_query
""".split()


@pytest.mark.parametrize("case", everyday(CASES, EVERYDAY))
def test_gradients(case: Case) -> None:
    for mode in ("sync", "async"):
        check_case("sm80", case, SMALL, mode=mode)


@pytest.mark.thorough
def test_gradients_in_fp16() -> None:
    check_case("sm80", CASES[1], SMALL, dtype=torch.float16)


@pytest.mark.parametrize("tile", everyday([ONE_BUFFER, replace(SMALL, stages_do=1), EARLY], [str(ONE_BUFFER)]))
def test_other_orders_of_copies_and_products(tile: Tile) -> None:
    check_case("sm80", CASES[1], tile)


@pytest.mark.thorough
def test_scores_that_are_a_function_computed_early() -> None:
    check_case("sm80", replace(CASES[1], name="early", softcap=1.5), EARLY)


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
def test_only_what_is_asked_for(wanted: tuple[str, ...]) -> None:
    case = CASES[1]
    p, inputs = prepare(case, torch.bfloat16)
    found = gradients("sm80", p, inputs, SMALL, wanted=wanted)
    assert [n for n in ("q", "k", "v") if getattr(found, n) is not None] == list(wanted)
    check(p, inputs, found, *oracle.expected_gradients(case, torch.bfloat16))


@pytest.mark.parametrize("case", everyday([CASES[0], CASES[3]], ["full"]))
def test_deterministic(case: Case) -> None:
    check_deterministic("sm80", case, SMALL)


@pytest.mark.parametrize("span", [(0, 40, 0, 50), (30, 90, 20, 90), (0, 30, 60, 90)], ids=str)
def test_parts_of_a_sequence(span: tuple[int, int, int, int]) -> None:
    """Masks count positions in the whole; the last of these rows see no key."""
    q0, q1, k0, k1 = span
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 32).bfloat16() for n in (q1 - q0, k1 - k0, k1 - k0))
    at = torch.tensor([Positions(q0, 90, k0, 90)], dtype=torch.int32)
    p, inputs = oracle.check(q, k, v, mask=causal, positions=at)
    expected = [oracle.gradients(p, inputs, dtype, True) for dtype in (torch.float64, torch.bfloat16)]
    check(p, inputs, gradients("sm80", p, inputs, SMALL), *expected)


@pytest.mark.thorough
@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("causal_group", "varlen", "padded_dims")], ids=str)
def test_gradients_in_fp32(case: Case) -> None:
    check_fp32("sm80", case, SMALL)


@pytest.mark.thorough
def test_a_group_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few key heads leave multiprocessors idle: query heads are divided among blocks that see the same keys."""
    monkeypatch.setattr(backward_plan, "LONG_LOOP", 1)
    case = Case("parts", 70, 90, batch=1, heads=8, heads_k=1, dim=32, mask=causal)
    assert backward_plan.group_parts(prepare(case, torch.bfloat16)[0], sms=4) == 2
    check_case("sm80", case, machine=replace(machine(), sms=4))
    check_deterministic("sm80", case, seeds=(1,), machine=replace(machine(), sms=4))


def test_what_it_does_not_take() -> None:
    p, _ = prepare(CASES[0], torch.bfloat16)
    asked = p.backward(("q", "k", "v"))
    with_bias = replace(p.backward(("bias",)), loads=(Load("bias", torch.bfloat16, (0, 0, 0, 0), shared=True),))
    assert FAMILIES["sm80"].limits(asked) is None
    for other, reason in (
        (replace(asked, dtype=torch.float32), "float32"),
        (replace(asked, loads=(Load("bias", torch.float64, (0, 0, 0, 0)),)), "bias of float64"),
        (replace(asked, loads=(Load("bias", torch.bfloat16, (0, 0, 0, 0), negated=True),)), "negated view"),
        (replace(with_bias, deterministic=True), "deterministic gradient of a bias"),
    ):
        assert reason in str(FAMILIES["sm80"].limits(other))


# ---- mutations -------------------------------------------------------------------------------------------------------

by_name = {case.name: case for case in CASES}
CAUSAL, WINDOW, DROPOUT, VARLEN = (by_name[n] for n in ("causal_group", "window", "dropout", "varlen"))


LANDED = "cp_async_wait<0>();\n    sync_block();  // Q"
CHUNK = "(Config::kExactDims || chunk * 8 < dim)"


def mutation(name: str, old: str, new: str = "", case: Case = CAUSAL, tile: Tile = SMALL) -> Mutation:
    return Mutation(name, old, new, case, tile)


MUTATIONS = [
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
    mutation("keys_beyond_the_sequence_written", f"if (tile.key0 + row < tile.k.length && {CHUNK}", f"if ({CHUNK}", VARLEN),
]  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_mutation_fits_the_source(mutation: Mutation) -> None:
    """Those that `make test` does not run must not outlive what they replace."""
    check_fits("sm80", mutation)


EVERYDAY_MUTATIONS = "copies_not_awaited mask_only_above weights_not_dropped keys_beyond_the_sequence_written".split()


@pytest.mark.parametrize("mutation", everyday(MUTATIONS, EVERYDAY_MUTATIONS))
def test_mutation_is_caught(mutation: Mutation) -> None:
    assert any(finding("sm80", mutation, seed) for seed in (1, 2)), f"{mutation} passes unnoticed"


@pytest.mark.thorough
def test_sums_without_turns_are_noticed() -> None:
    """They are right, but not the same for every order of blocks."""
    untimely = mutation(
        "turn_not_awaited", "while (acquire_turn(p.turns + 2 * block) != turn(b.m)) {\n          }", ";"
    )
    p, inputs = prepare(CAUSAL, torch.bfloat16)
    p = replace(p, deterministic=True, partial=True)  # fp32: rounding would hide it
    forward = tiled.forward(p, inputs)
    several = [gradients("sm80", p, inputs, SMALL, seed=s, mutation=untimely, forward=forward).q for s in (1, 2, 3)]
    assert not all(torch.equal(several[0], other) for other in several)
