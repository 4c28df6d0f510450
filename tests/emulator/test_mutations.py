"""Kernels with one thing wrong. The emulator has to notice each of them, else passing on it would prove nothing.

A mutation is a replacement in the flattened source. Noticed means: an EmulatorError (a race, a deadlock, a stray
access) or a result outside the tolerance, for one of a few seeds in asynchronous mode. Tiles are fixed here, so that
the mutations stay the same when the tables are tuned."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace

import pytest
import tolerance
import torch
from cases import Case
from emulator.emulate import poisoned_outputs, with_source
from oracle import expected, prepare
from strobe.cuda.tiles import TileSm80, TileSm90

from strobe.cuda.plan import Plan, plan_sm80, plan_sm90
from strobe.emulator import EmulatorError, backend, compiler
from strobe.mask import causal, window
from strobe.problem import Problem

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

SEEDS = (1, 2, 3)
CAUSAL = Case("causal", 150, 300, batch=1, heads=3, heads_k=1, dim=64, mask=causal)
WINDOW = Case("window", 150, 300, batch=1, heads=2, dim=64, mask=window(100, 10))
FALLING = Case("falling", 70, 300, batch=1, dim=64, scores="falling")  # kernels go from the last key to the first
NO_KEYS = Case("no_keys", 200, 60, batch=1, heads=2, dim=64, mask=causal)  # the first rows see nothing
WINDOWS = replace(WINDOW, name="windows", heads=4)  # a block gets several tiles whose rows do not see the first keys
WIDE = replace(CAUSAL, name="wide", dim=128)
DIAGONAL = replace(
    FALLING, name="diagonal", len_k=100, mask=causal
)  # every block needs the mask, the first rows meet two
STEEP = replace(FALLING, name="steep", scale=5.0)  # exp overflows under the maximum of a block ago
SHORT = Case(
    "short", 400, 50, batch=1, heads=3, heads_k=1, dim=64
)  # one key block a tile: nothing but the Q ring holds back
SPLIT = Case(
    "split", 60, 800, batch=1, heads=1, heads_k=1, dim=64, mask=causal
)  # one tile: two blocks take half the keys each
WIDE_NO_KEYS = replace(NO_KEYS, name="wide_no_keys", len_k=110, heads=4, dim=128)  # half the rows of a tile see nothing
WIDE_SPLIT = replace(SPLIT, name="wide_split", dim=128)
LOW = replace(SPLIT, name="low", scores="low")  # scores so low that 0 in their place would be the maximum
FOLD = Case("fold", 9, 150, batch=1, heads=4, heads_k=1, dim=64, mask=causal)
SOFTCAP = replace(CAUSAL, name="softcap", softcap=5.0)
PACKED = Case("packed", 0, 0, heads=2, dim=64, lengths=((70, 100), (0, 3), (65, 129), (130, 70)))
TILES = {
    "sm80": TileSm80(64, 64, 4, 1, 1),
    "sm80_two_buffers": TileSm80(64, 64, 4, 2, 1),
    "sm80_rest": TileSm80(128, 64, 4, 1, 1),
    "sm80_skip": TileSm80(64, 64, 4, 1, 1, skip=True),
    "sm90": TileSm90(2, 64),
    "sm90_ping_pong": TileSm90(2, 64, ping_pong=True),
    "sm90_one_slot": TileSm90(2, 64, q_slots=1, store_panels=1),
}


@dataclass(frozen=True)
class Mutation:
    name: str
    old: str
    new: str = ""
    case: Case = CAUSAL
    times: int = 1  # how often `old` stands in the source; all are replaced
    tile: str = "sm80"

    def __str__(self) -> str:
        return f"{self.tile}-{self.name}"

    def __call__(self, source: str) -> str:
        assert source.count(self.old) == self.times, (
            f"{self.old!r} occurs {source.count(self.old)} times, not {self.times}"
        )
        return source.replace(self.old, self.new)


LANDED = "cp_async_wait<0>();\n    sync_block();  // everybody's copies have landed"
VALUES = "cp_async_wait<0>();\n    sync_block();  // V_n is here"
ZERO_FILL = "cp_async_16(to, row_there && column_there ? from + panel * kPanel : src, row_there && column_there);"

# Wrong for both kernels: the mask, the range of key blocks, the running softmax.
ARITHMETIC = [
    ("mask_one_too_far", "if (column >= hi[row] ||", "if (column > hi[row] ||", CAUSAL),
    ("mask_one_too_early", "if (column >= hi[row] ||", "if (column + 1 >= hi[row] ||", CAUSAL),
    ("mask_low_end", "column < lo[row])) s[i]", "column < lo[row] - 1)) s[i]", WINDOW),
    ("last_block_missing", "(mask.hi(last_row) + kBlockN - 1) / kBlockN", "mask.hi(last_row) / kBlockN", CAUSAL),
    (
        "diagonal_unmasked",
        "max(mask.hi(first_row) / kBlockN,",
        "max((mask.hi(first_row) + kBlockN - 1) / kBlockN,",
        CAUSAL,
    ),
    (
        "first_block_skipped",
        "b.first = mask.lo(first_row) / kBlockN;",
        "b.first = mask.lo(first_row) / kBlockN + 1;",
        WINDOW,
    ),
    ("sum_not_rescaled", "l[row] *= alpha[row];", "", FALLING),
    ("keys_of_another", "first_key = ld_global(p.cu_k + batch);", "first_key = ld_global(p.cu_q + batch);", PACKED),
]

MUTATIONS = [
    *(Mutation(name, old, new, case, tile=tile) for tile in ("sm80", "sm90") for name, old, new, case in ARITHMETIC),
    Mutation("growth_overlooked", "grew |= far;", "", FALLING, tile="sm80_skip"),
    # ---- sm80: copies and block barriers ----
    Mutation("no_wait_for_keys", LANDED, "sync_block();  //"),
    Mutation("no_barrier_before_keys", LANDED, "cp_async_wait<0>();  //"),
    Mutation("no_wait_for_values", VALUES, "sync_block();  //"),
    Mutation("no_barrier_before_values", VALUES, "cp_async_wait<0>();  //"),
    Mutation("no_wait", LANDED, "sync_block();  //", tile="sm80_two_buffers"),
    Mutation("no_barrier", LANDED, "cp_async_wait<0>();  //", tile="sm80_two_buffers"),
    Mutation("wait_leaves_one_group", LANDED, LANDED.replace("<0>", "<1>"), tile="sm80_two_buffers"),
    Mutation("one_buffer_for_two", "kOffsetK + (n & (kStages - 1)) * kBytesK", "kOffsetK", tile="sm80_two_buffers"),
    Mutation("place_not_published", "sync_block();  // now all can read it", tile="sm80_rest"),
    Mutation("tail_not_filled_with_zeros", ZERO_FILL, f"if (row_there && column_there) {ZERO_FILL}"),
    Mutation("tail_read_from_beyond", ZERO_FILL, "cp_async_16(to, from + panel * kPanel);"),
    Mutation("output_not_rescaled", "softmax[t].template rescale<kMasked>(o[t]);", case=FALLING, times=2),
    Mutation("output_read_too_early", "sync_warp();\n    constexpr int kChunks", "constexpr int kChunks"),
    Mutation(
        "rows_beyond_the_sequence_written", "if (warp_row + row < tile.len_q && (Config::", "if ((Config::", PACKED
    ),
    # ---- sm90: rings of buffers ----
    *(
        Mutation(*m, tile="sm90")
        for m in [
            ("keys_not_released", "if (elected()) k.release();", "", CAUSAL, 2),
            ("values_not_released", "if (elected()) v.release();", "", CAUSAL, 2),
            ("one_key_block_too_many", "if (n > blocks.first) load_keys(", "load_keys(", CAUSAL),
            (
                "blocks_left_of_the_window_not_skipped",
                "for (; (Mask::kHasLo || kSkipsTwice) &&",
                "for (; false &&",
                WINDOWS,
            ),
            (
                "rows_without_keys_skip_nothing",
                "sees_keys ? mine.end : all.first;",
                "sees_keys ? mine.end : n + 1;",
                WIDE_NO_KEYS,
            ),
            ("skipped_buffers_not_released", "if (elected()) ring.release();", "", CAUSAL),
            ("queries_not_released", "stored.release();", "", CAUSAL),
            ("keys_released_by_every_thread", "if (elected()) k.release();", "k.release();", CAUSAL, 2),
            (
                "keys_released_in_flight",
                "wgmma_wait<1>();\n    pin(s);\n    if (elected()) k.release();",
                "if (elected()) k.release();\n    wgmma_wait<1>();",
                CAUSAL,
            ),
            ("keys_not_awaited", "k.wait_full();", "", CAUSAL, 2),
            ("values_not_awaited", "v.wait_full();", "", CAUSAL, 2),
            ("queries_not_awaited", "q.wait_full();", "", CAUSAL),
            ("keys_overwritten", "k.wait_empty();", "", CAUSAL),
            ("values_overwritten", "v.wait_empty();", "", CAUSAL),
            ("queries_overwritten", "q.wait_empty();", "", SHORT, 2),
            ("parity_never_flips", "parity ^= 1;", "", CAUSAL),
            ("parity_begins_wrong", "parity(producer)", "parity(!producer)", CAUSAL),
            ("too_few_bytes_expected", "(k.full_barrier(), kBytesK);", "(k.full_barrier(), kBytesK / 2);", CAUSAL),
            ("too_many_bytes_expected", "(v.full_barrier(), kBytesV);", "(v.full_barrier(), 2 * kBytesV);", CAUSAL),
            (
                "too_few_arrivals",
                "(at + RingQ::kBytes, 4 * kConsumers);",
                "(at + RingQ::kBytes, 4 * kConsumers - 1);",
                CAUSAL,
            ),
            ("barriers_not_fenced", "    mbar_init_fence();\n  }", "  }", CAUSAL),
            ("barriers_not_published", "sync_block();\n  const u32 warpgroup", "const u32 warpgroup", CAUSAL),
            # ---- matrix products in flight ----
            ("no_wait_for_scores", "wgmma_wait<1>();", "", CAUSAL),
            ("wait_leaves_one_more", "wgmma_wait<1>();", "wgmma_wait<2>();", CAUSAL),
            ("no_wait_for_the_first_scores", "wgmma_wait<0>();\n    pin(s);\n    if", "if", CAUSAL),
            ("no_wait_for_the_output", "wgmma_wait<0>();\n    pin(f.weights);", "", CAUSAL),
            ("no_wait_for_the_last_output", "wgmma_wait<0>();\n    if", "if", CAUSAL),
            ("no_fence", "wgmma_fence();", "", CAUSAL, 4),
            (
                "weights_overwritten_in_flight",
                "if (Config::kHold) hold(",
                "pack_fragment<T>(f.weights, s); if (Config::kHold) hold(",
                CAUSAL,
            ),
            ("output_not_rescaled", "f.o.scale(f.softmax.alpha);\n  }", "}", FALLING),
            ("output_not_begun_at_zero", "f.o.zero();", "", SHORT),
            ("output_not_rescaled_on_the_diagonal", "if (!first) f.o.scale(f.softmax.alpha);", "", DIAGONAL),
            ("values_of_the_diagonal_missing", "values_alone(f);\n                continue;", "continue;", CAUSAL),
            ("loop_left_on_the_diagonal", "kValuesTwice || n < mine.first) break;", "true) break;", WIDE),
            ("wrong_guess_accepted", "if (any(!(sum[0] <= 256.f && sum[1] <= 256.f))) return false;", "", STEEP),
            # ---- output through shared memory ----
            ("no_proxy_fence", "fence_proxy_async();\n    bar_sync", "bar_sync", CAUSAL),
            (
                "staged_over_queries_in_use",
                f"bar_sync(1 + kConsumers + consumer, 128);{28 * ' '}// or: every warp",
                "//",
                CAUSAL,
            ),
            (
                "stored_before_staged",
                "fence_proxy_async();\n    bar_sync(1 + kConsumers + consumer, 128);",
                "fence_proxy_async();",
                CAUSAL,
            ),
            ("store_not_committed", "tma_store_commit();", "", CAUSAL),
            ("store_not_awaited", "tma_store_wait_read<0>();\n      stored.release();", "stored.release();", CAUSAL),
            # ---- tiles: the mailbox, the first block, packed sequences, the counter ----
            (
                "mail_not_published",
                "post(tile);\n    if (any_keys) load_queries(tile); else mbar_arrive(q.full_barrier());",
                "if (any_keys) load_queries(tile); else mbar_arrive(q.full_barrier());\n    post(tile);",
                CAUSAL,
            ),
            # ---- one loop for all blocks ----
            (
                "values_released_before_the_first",
                "if (!first) {\n      if (elected()) v.release();",
                "{\n      if (elected()) v.release();",
                SOFTCAP,
            ),
            ("queries_not_released_after_the_first", "if (first) release_stored(stored, pending);", "", SOFTCAP),
            (
                "one_loop_unmasked",
                "prepare(s, tile, row, n, n >= mine.end_full || n < mine.first_full);",
                "prepare(s, tile, row, n, false);",
                SOFTCAP,
            ),
            (
                "one_loop_without_values",
                "if (--n < mine.first) break;\n              scores_beside(s, q_desc, f, consumer);",
                "if (--n < mine.first) break;\n              scores_alone<kBlockN>(s, q_desc);",
                SOFTCAP,
            ),
            (
                "ragged_first_block_unmasked",
                "Mask::kHasHi || n >= mine.end_full || n < mine.first_full",
                "Mask::kHasHi",
                SHORT,
            ),
            ("load_runs_into_the_next_sequence", "clip = max(0, kRows - rows_there);", "clip = 0;", PACKED),
            (
                "store_runs_into_the_next_sequence",
                "const Box b = query_box(tile, first);",
                "const Box b = box<64>(tile.first_row + first, 64, tile.head, tile.slice);",
                PACKED,
            ),
            (
                "tile_left_out",
                "grid_dim() + atomic_inc_wrap(p.counter,",
                "grid_dim() + 1 + atomic_inc_wrap(p.counter,",
                CAUSAL,
            ),
        ]
    ),
    # ---- few queries: keys split among blocks, heads as rows of a tile ----
    *(
        Mutation(*m, SPLIT, tile="sm90")
        for m in [
            ("parts_all_the_same", "remainder(tile.work, p.splits), p.splits) : blocks", "0, p.splits) : blocks"),
            ("first_part_taken_for_the_last", "== u32(p.splits - 1);", "== 0u;"),
            ("parts_not_weighted", "l = fma(ml[j][1], weight, l);", "l += ml[j][1];"),
            ("rows_of_a_part_left_out", "warp_uniform(eight < rows)", "warp_uniform(eight + 8 <= rows)"),
            (
                "count_not_published",
                "bar_sync(1 + kConsumers + consumer, 128);\n    const bool last",
                "const bool last",
            ),
        ]
    ),
    Mutation(
        "blocks_of_other_parts_skipped", "sees_keys ? mine.end : all.first;", "mine.end;", WIDE_SPLIT, tile="sm90"
    ),
    Mutation("part_that_is_not_there_counts", "if (!there) ml[j][0] = neg_inf();", "", LOW, tile="sm90"),
    *(
        Mutation(*m, FOLD, tile="sm90")
        for m in [
            ("rows_taken_for_queries", "query[2] = {row / kFold, (row + 8) / kFold}", "query[2] = {row, row + 8}"),
            ("lse_of_another_head", "tile.head * kFold + row % kFold;", "tile.head * kFold;"),
        ]
    ),
    Mutation(
        "turn_not_passed_on", "pass_turn(consumer);\n    wgmma_wait<1>();", "wgmma_wait<1>();", tile="sm90_ping_pong"
    ),
    Mutation(
        "unused_turn_not_passed_on",
        "wait_turn(consumer);\n    pass_turn(consumer);\n  }",
        "wait_turn(consumer);\n  }",
        tile="sm90_ping_pong",
    ),
    Mutation("turn_not_taken_by_a_skip", "if (has_turn) take_turn_unused(consumer);", "", tile="sm90_ping_pong"),
    Mutation(
        "turn_not_taken_on_the_diagonal",
        "take_turn_unused(consumer);\n              if (kValues",
        "if (kValues",
        DIAGONAL,
        tile="sm90_ping_pong",
    ),
    Mutation(
        "turn_not_taken_on_the_diagonal_wide",
        "take_turn_unused(consumer);\n              if (kValues",
        "if (kValues",
        replace(DIAGONAL, dim=128),
        tile="sm90_ping_pong",
    ),
    # ---- one Q slot, O in a buffer of its own ----
    *(
        Mutation(*m, tile="sm90_one_slot")
        for m in [
            ("queries_not_released", "if (kPrivateO && n < mine.first && elected()) q.release();", "", CAUSAL),
            ("queries_of_rows_without_keys_not_released", "if (kPrivateO && elected()) q.release();", "", NO_KEYS),
            (
                "queries_released_on_the_diagonal",
                "kPrivateO && n < mine.first && elected()",
                "kPrivateO && elected()",
                WIDE,
            ),
            ("queries_overwritten", "q.wait_empty();", "", SHORT, 2),
            (
                "queries_released_in_use",
                "const u64 q_desc = k_major(q_tile(consumer));",
                "const u64 q_desc = k_major(q_tile(consumer));\n        if (elected()) q.release();",
                CAUSAL,
            ),
            ("mail_read_too_late", "sync_warp();  // all lanes have read it", "//", CAUSAL),
            (
                "staged_over_output_in_flight",
                "tma_store_wait_read<0>();  // what was staged here before",
                ";  //",
                CAUSAL,
            ),
            ("last_store_not_awaited", "tma_store_wait_read<0>();  // shared memory must outlive", ";  //", CAUSAL),
        ]
    ),
]


# Redundant as things are, and kept for the reader: neither the emulator nor a GPU can tell the difference. If one of
# these is caught one day, what made it redundant has gone.
REDUNDANT = [
    # Between a warp's last read of Q and its first write over it there is a P V, and that meets at sync_warp between
    # its steps.
    Mutation("output_staged_early", "sync_warp();  // all lanes are done with this warp's rows of Q"),
    # The last step of the loop commits an empty group: there is nothing to wait for.
    Mutation("no_last_wait", "cp_async_wait<0>();\n    }\n    store();", "}\n    store();"),
]


def plan_of(problem: Problem, tile: str, out_strides: tuple[int, int, int]) -> Plan:
    chosen = TILES[tile]
    if isinstance(chosen, TileSm80):
        return plan_sm80(problem, "sm_80", out_strides, chosen)
    return plan_sm90(problem, out_strides, 2, chosen)


def finding(case: Case, tile: str, mutation: Mutation | None, seed: int) -> str | None:
    """What is wrong with a run; None if nothing is."""
    problem, inputs = prepare(case, torch.bfloat16)
    if problem.packed:  # the keys of the sequence without queries are nobody's: they must not be read
        for t in (inputs.k, inputs.v):
            t[:, :, int(inputs.cu_k[1]) : int(inputs.cu_k[2])] = torch.nan  # type: ignore[index]
    out, lse = poisoned_outputs(problem, inputs)
    plan = plan_of(problem, tile, out.stride()[:3])  # type: ignore[arg-type]
    plan = plan if mutation is None else with_source(plan, mutation)
    tensors = dataclasses.asdict(inputs)
    tensors = {name: tensors[name] for name in ("q", "k", "v", "sinks", "cu_q", "cu_k")} | {"o": out, "lse": lse}
    try:
        backend.launch(plan, tensors, mode="async", seed=seed)
        (exact, exact_lse), (same, same_lse) = expected(case, torch.bfloat16)
        tolerance.check("out", out, exact, same)
        tolerance.check("lse", lse, exact_lse, same_lse, floor=tolerance.lse_floor(same_lse))
    except (EmulatorError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    "case", [CAUSAL, WINDOWS, WIDE, WIDE_NO_KEYS, FALLING, SHORT, SPLIT, WIDE_SPLIT, LOW, FOLD, PACKED], ids=str
)
def test_nothing_is_found_in_the_kernels_themselves(case: Case, tile: str) -> None:
    assert [finding(case, tile, None, seed) for seed in SEEDS] == [None] * len(SEEDS)


@pytest.mark.parametrize("case", [SPLIT, WIDE_SPLIT, LOW], ids=str)
def test_keys_are_split_where_that_is_what_is_broken(case: Case) -> None:
    problem, _ = prepare(case, torch.bfloat16)
    assert plan_of(problem, "sm90", (1, 1, 1)).values["splits"] == 2


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_mutation_is_caught(mutation: Mutation) -> None:
    assert any(finding(mutation.case, mutation.tile, mutation, seed) for seed in SEEDS), f"{mutation} passes unnoticed"


@pytest.mark.parametrize("mutation", REDUNDANT, ids=str)
def test_redundant_parts_are_known(mutation: Mutation) -> None:
    assert not any(finding(mutation.case, mutation.tile, mutation, seed) for seed in SEEDS)
