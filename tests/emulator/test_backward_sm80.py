"""The backward kernels for Ampere and later on the emulator, against float64; and kernels with one thing wrong, which the
emulator has to notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace

import oracle
import pytest
import tolerance
import torch
from cases import Case
from oracle import prepare

from strobe.arguments import Inputs, layout_of
from strobe.backends.backend import Gradients
from strobe.backends.tiled import forward as tiled
from strobe.cuda import backend as cuda_backend, backward_sm80, jit
from strobe.cuda.backward_sm80 import Tile
from strobe.cuda.catalogue import FAMILIES
from strobe.cuda.forward_sm80 import SMEM_BYTES, generation
from strobe.cuda.plan import Machine, Plan
from strobe.emulator import EmulatorError, backend, compiler
from strobe.emulator.program import Mode
from strobe.mask import Positions, causal, chunked, window
from strobe.problem import Problem

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

SMALL = Tile(32, 32, 4, 2, 2, 2)  # many blocks of queries and keys in small problems
ONE_BUFFER = replace(SMALL, stages_q=1, stages_do=1)
EARLY = replace(SMALL, early=True)
Edit = Callable[[str], str]


def machine(arch: str = "sm_80") -> Machine:
    return Machine(arch, sms=3, l2_bytes=64 << 20, smem_bytes=SMEM_BYTES[generation(arch)])


def with_source(plan: Plan, edit: Edit) -> Plan:
    """The same launches, with the flattened source of the main kernel changed by `edit`."""
    delta, main, *rest = plan.launches
    kernel = dataclasses.replace(main.kernel)
    kernel.__dict__["source"] = edit(jit.flatten(main.kernel.source, "emu"))  # in place of the cached property
    return dataclasses.replace(plan, launches=(delta, dataclasses.replace(main, kernel=kernel), *rest))


def gradients(
    p: Problem,
    inputs: Inputs,
    tile: Tile | None,
    mode: Mode = "sync",
    *,
    seed: int = 0,
    arch: str = "sm_80",
    edit: Edit | None = None,
    wanted: tuple[str, ...] | None = None,
) -> Gradients:
    """By the kernels, with gradients full of NaN before."""
    found = wanted or tuple(n for n in ("q", "k", "v", "sinks") if getattr(inputs, n) is not None)
    out, lse = tiled.forward(p, inputs)
    dout, dlse = oracle.cotangents(p, inputs)
    a = oracle.arguments(p, inputs, positions=inputs.positions)
    layout = layout_of(a)
    results = (layout.outside(out), layout.rows_outside(lse), layout.outside(dout), layout.rows_outside(dlse))
    asked = p.backward(found)
    assert FAMILIES["sm80"].limits(asked) is None
    tensors, actual, strides = cuda_backend.prepare_backward(asked, layout, a, *results)
    for name in ("dq", "dk", "dv", "dsink"):
        if tensors[name] is not None:
            tensors[name].fill_(torch.nan)
    plan = backward_sm80.plan(actual, strides, machine(arch), tile)
    backend.launch(plan if edit is None else with_source(plan, edit), tensors, mode=mode, seed=seed)
    g = cuda_backend.gradients_of(asked, layout, tensors, a)
    return Gradients(*(None if t is None else layout.inside(t) for t in g[:3]), *g[3:])


def check(p: Problem, inputs: Inputs, found: Gradients, exact: list[torch.Tensor], same: list[torch.Tensor]) -> None:
    _, lse = tiled.forward(p, inputs)
    dout, _ = oracle.cotangents(p, inputs)
    names = [n for n in oracle.LEAVES if getattr(inputs, n) is not None]
    for name, e, s in zip(names, exact, same, strict=True):
        g = getattr(found, name)
        if g is not None:
            floor = tolerance.gradient_floor(name, p, inputs, lse, dout, e)
            tolerance.check(f"d{name}", g, e, s, tolerance.GRADIENTS, floor)


def run(
    case: Case, tile: Tile | None = SMALL, mode: Mode = "async", dtype: torch.dtype = torch.bfloat16, **how
) -> None:
    p, inputs = prepare(case, dtype)
    check(p, inputs, gradients(p, inputs, tile, mode, **how), *oracle.expected_gradients(case, dtype))


CASES = [
    Case("full", 70, 90, batch=2, heads=2, dim=32),
    Case("causal_group", 70, 90, batch=1, heads=6, heads_k=2, dim=32, mask=causal),
    Case("causal_more_queries", 100, 40, batch=1, dim=32, mask=causal),  # the first rows see nothing
    Case("window", 90, 70, batch=1, heads=2, heads_k=1, dim=32, mask=window(20, 7)),
    Case("chunked", 70, 70, batch=1, dim=32, mask=chunked(20) & causal),
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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: Case) -> None:
    run(case, mode="sync")
    run(case)


def test_gradients_in_fp16() -> None:
    run(CASES[1], dtype=torch.float16)


@pytest.mark.parametrize("tile", [ONE_BUFFER, replace(SMALL, stages_do=1), EARLY], ids=str)
def test_other_orders_of_copies_and_products(tile: Tile) -> None:
    run(CASES[1], tile)


def test_scores_that_are_a_function_computed_early() -> None:
    run(replace(CASES[1], name="early", softcap=1.5), EARLY)


TABLES = [
    ("sm_80", Case("d64", 140, 140, batch=1, heads=2, heads_k=1, dim=64, mask=causal)),
    ("sm_80", Case("d128", 70, 140, batch=1, heads=1, heads_k=1, dim=128, mask=window(60, 3))),
    ("sm_80", Case("d256", 70, 70, batch=1, heads=1, heads_k=1, dim=256, mask=causal)),
    ("sm_90", Case("d192_128", 70, 70, batch=1, heads=1, heads_k=1, dim=192, dim_v=128, mask=causal)),
    ("sm_86", Case("d160", 40, 40, batch=1, heads=1, heads_k=1, dim=160, mask=causal)),
    ("sm_86", Case("d192", 40, 70, batch=1, heads=1, heads_k=1, dim=192)),
]


@pytest.mark.parametrize(("arch", "case"), TABLES, ids=str)
def test_tiles_of_the_tables(arch: str, case: Case) -> None:
    run(case, None, arch=arch)


def test_all_tiles_fit() -> None:
    """Shared memory, also with dropout, and whole tiles for every warp; ptxas and static_assert see the same numbers."""
    for arch in ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120"):
        for dim, dim_v in backward_sm80.DIMS:
            for tile in backward_sm80.candidates(dim, dim_v, arch):
                room = SMEM_BYTES[generation(arch)]
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
    found = gradients(p, inputs, SMALL, "async", wanted=wanted)
    assert [n for n in ("q", "k", "v") if getattr(found, n) is not None] == list(wanted)
    check(p, inputs, found, *oracle.expected_gradients(case, torch.bfloat16))


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_deterministic(case: Case) -> None:
    """Sums of dQ in one order, whatever the order of threads and blocks."""
    p, inputs = prepare(case, torch.bfloat16)
    p = replace(p, deterministic=True)
    first = gradients(p, inputs, SMALL, "async")
    check(p, inputs, first, *oracle.expected_gradients(case, torch.bfloat16))
    for seed in (1, 2, 3):
        again = gradients(p, inputs, SMALL, "async", seed=seed)
        assert all(torch.equal(x, y) for x, y in zip(first[:3], again[:3], strict=True))


@pytest.mark.parametrize("span", [(0, 40, 0, 50), (30, 90, 20, 90), (0, 30, 60, 90)], ids=str)
def test_parts_of_a_sequence(span: tuple[int, int, int, int]) -> None:
    """Masks count positions in the whole; the last of these rows see no key."""
    q0, q1, k0, k1 = span
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 32).bfloat16() for n in (q1 - q0, k1 - k0, k1 - k0))
    at = torch.tensor([Positions(q0, 90, k0, 90)], dtype=torch.int32)
    p, inputs = oracle.check(q, k, v, mask=causal, positions=at)
    expected = [oracle.gradients(p, inputs, dtype, True) for dtype in (torch.float64, torch.bfloat16)]
    check(p, inputs, gradients(p, inputs, SMALL), *expected)


def test_what_it_does_not_take() -> None:
    p, _ = prepare(CASES[0], torch.bfloat16)
    asked = p.backward(("q", "k", "v"))
    assert FAMILIES["sm80"].limits(asked) is None
    for other, reason in (
        (replace(asked, partial=True), "fp32"),
        (replace(asked, dtype=torch.float32), "float32"),
        (replace(asked, has_bias=True), "bias"),
        (replace(asked, has_mask_tensor=True), "mask tensor"),
    ):
        assert reason in str(FAMILIES["sm80"].limits(other))


# ---- mutations -------------------------------------------------------------------------------------------------------

by_name = {case.name: case for case in CASES}
CAUSAL, WINDOW, DROPOUT, VARLEN = (by_name[n] for n in ("causal_group", "window", "dropout", "varlen"))


@dataclass(frozen=True)
class Mutation:
    name: str
    old: str
    new: str = ""
    case: Case = CAUSAL
    tile: Tile = SMALL

    def __str__(self) -> str:
        return self.name

    def __call__(self, source: str) -> str:
        assert source.count(self.old) == 1, f"{self.old!r} occurs {source.count(self.old)} times"
        return source.replace(self.old, self.new)


MUTATIONS = [
    Mutation("copies_not_awaited", "cp_async_wait<0>();\n    sync_block();  // Q", "sync_block();  // Q"),
    Mutation("copies_not_committed", "cp_async_commit();\n    cp_async_wait<0>();", "cp_async_wait<0>();"),
    Mutation("no_barrier_at_the_top", "sync_block();  // Q and dO have landed", "//"),
    Mutation("no_barrier_behind_ds", "sync_block();  // P and dS are written", "//"),
    Mutation("no_barrier_before_do", "sync_block();  // dO may be overwritten", "//", tile=ONE_BUFFER),
    Mutation("no_barrier_before_q", "sync_block();  // Q may be overwritten", "//", tile=ONE_BUFFER),
    Mutation("no_barrier_before_the_epilogue", "sync_block();  // nobody reads K and V any more", "//"),
    Mutation("next_q_not_awaited", "cp_async_wait<1>();", "", tile=EARLY),
    Mutation("one_buffer_of_q_for_two", "kStagesQ == 1 ? 0 : left & 1", "0"),
    Mutation("mask_left_out", "if (masked(b)) {", "if (false) {"),
    Mutation("mask_only_above", "b.m < blocks.first_full || b.m >= blocks.end_full", "b.m < blocks.first_full", WINDOW),
    Mutation("head_of_another_group", "tile.head_k * p.group, blocks.first}", "tile.head_k, blocks.first}"),
    Mutation("a_head_left_out", "(blocks.end - blocks.first) * p.group", "(blocks.end - blocks.first) * (p.group - 1)"),
    Mutation("weights_not_dropped", "drop_fragment(kept, keys, by", "if (false) drop_fragment(kept, keys, by", DROPOUT),
    Mutation("dropped_for_another_query", "r.first % 2 ? kFoldOdd", "r.first % 2 == 0 ? kFoldOdd", DROPOUT),
    Mutation("keys_beyond_the_sequence_written", "if (tile.key0 + row < tile.len_k &&", "if (", VARLEN),
]  # fmt: skip


def finding(mutation: Mutation, seed: int) -> str | None:
    p, inputs = prepare(mutation.case, torch.bfloat16)
    try:
        found = gradients(p, inputs, mutation.tile, "async", seed=seed, edit=mutation)
        check(p, inputs, found, *oracle.expected_gradients(mutation.case, torch.bfloat16))
    except (EmulatorError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_mutation_is_caught(mutation: Mutation) -> None:
    assert any(finding(mutation, seed) for seed in (1, 2)), f"{mutation} passes unnoticed"
