"""Kernels with one thing wrong. The emulator has to notice each of them, else passing on it would prove nothing.

A mutation is a replacement in the flattened source. Noticed means: an EmulatorError (a race, a deadlock, a stray
access) or a result outside the tolerance, for one of a few seeds in asynchronous mode. Tiles are fixed here, so that
the mutations stay the same when the tables are tuned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import tolerance
import torch
from cases import Case
from emulator import gradients
from emulator.emulate import only, plan_of, poisoned_outputs, tensors_of, with_source
from emulator.mutation import Mismatch, replaced
from everyday import everyday
from oracle import expected, prepare

from strobe.cuda.parts.plan import Plan
from strobe.cuda.plans import forward_sm80, forward_sm90
from strobe.emulator import EmulatorError, backend, compiler
from strobe.problem.arguments import Inputs
from strobe.variants.mask import causal
from strobe.variants.ready_made import window

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
PACKED_GQA = Case("packed_gqa", 9, 150, batch=1, heads=4, heads_k=1, dim=64, mask=causal)
DROPOUT = replace(CAUSAL, name="dropout", dropout=0.3)
SOFTCAP = replace(CAUSAL, name="softcap", softcap=5.0)
VARLEN = Case("varlen", 0, 0, heads=2, dim=64, lengths=((70, 100), (0, 3), (65, 129), (130, 70)))
TILES: dict[str, Any] = {
    "sm80": forward_sm80.Tile(64, 64, 4, 1, 1),
    "sm80_two_buffers": forward_sm80.Tile(64, 64, 4, 2, 1),
    "sm80_state_in_smem": forward_sm80.Tile(128, 64, 4, 1, 1),
    "sm80_lazy_rescale": forward_sm80.Tile(64, 64, 4, 1, 1, lazy_rescale=True),
    "sm90": forward_sm90.Tile(2, 64),
    "sm90_rolled": forward_sm90.Tile(2, 64, rolled=True, skips_after=True),
    "sm90_ping_pong": forward_sm90.Tile(2, 64, ping_pong=True),
    "sm90_one_slot": forward_sm90.Tile(2, 64, q_slots=1, store_panels=1),
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
        return replaced(str(self), source, self.old, self.new, self.times)


LANDED = "cp_async_wait<0>();\n    sync_block();  // everybody's copies have landed"
VALUES = "cp_async_wait<0>();\n    sync_block();  // V_n is here"
ZERO_FILL = "cp_async_16(to, row_there && column_there ? from + panel * kPanel<T> : src, row_there && column_there);"

SKIP = "sync_warp();  // else one lane's release could let the barrier run a round ahead of another's wait"
SKIPPED_BEFORE = "sees_keys ? mine.end : all.first"
ACCEPT = "softmax.accept(f.softmax, f.weights, s)"
YIELD, MEET = "turns.yield_turn();", "sync_warpgroup(consumer);"
PUBLISH = "publish_tile<Config>(tile_info(), tile);"
LOAD_QUERIES = "if (any_keys) load_queries(tile);\n    else mbar_arrive(q.full_barrier());"
OVERLAPPED = "qk_overlapped(s, q_desc, f);"
Q_DESC, RELEASE_Q = "const u64 q_desc = k_major(q_tile(consumer));", "if (elected()) q.release();"

# Wrong for both kernels: the mask, the range of key blocks, the running softmax.
ARITHMETIC = [
    ("mask_one_too_far", "if (column >= hi[row] ||", "if (column > hi[row] ||", CAUSAL),
    ("mask_one_too_early", "if (column >= hi[row] ||", "if (column + 1 >= hi[row] ||", CAUSAL),
    ("mask_low_end", "column < lo[row])) s[i]", "column < lo[row] - 1)) s[i]", WINDOW),
    ("last_block_missing", "(mask.hi(last_query) + kBlockN - 1) / kBlockN", "mask.hi(last_query) / kBlockN", CAUSAL),
    (
        "diagonal_unmasked",
        "max(mask.hi(first_query) / kBlockN,",
        "max((mask.hi(first_query) + kBlockN - 1) / kBlockN,",
        CAUSAL,
    ),
    (
        "first_block_skipped",
        "b.first = mask.lo(first_query) / kBlockN;",
        "b.first = mask.lo(first_query) / kBlockN + 1;",
        WINDOW,
    ),
    ("sum_not_rescaled", "l[row] = kByRow ? mul_rn(l[row], alpha[row]) : l[row] * alpha[row];", "", FALLING),
    ("keys_of_another", "Keys::span(p.cu_k, batch, 0)", "Keys::span(p.cu_q, batch, 0)", VARLEN),
]

MUTATIONS = [
    *(Mutation(name, old, new, case, tile=tile) for tile in ("sm80", "sm90") for name, old, new, case in ARITHMETIC),
    Mutation("growth_overlooked", "grew |= far;", "", FALLING, tile="sm80_lazy_rescale"),
    # ---- sm80: copies and block barriers ----
    Mutation("no_wait_for_keys", LANDED, "sync_block();  //"),
    Mutation("no_barrier_before_keys", LANDED, "cp_async_wait<0>();  //"),
    Mutation("no_wait_for_values", VALUES, "sync_block();  //"),
    Mutation("no_barrier_before_values", VALUES, "cp_async_wait<0>();  //"),
    Mutation("no_wait", LANDED, "sync_block();  //", tile="sm80_two_buffers"),
    Mutation("no_barrier", LANDED, "cp_async_wait<0>();  //", tile="sm80_two_buffers"),
    Mutation("wait_leaves_one_group", LANDED, LANDED.replace("<0>", "<1>"), tile="sm80_two_buffers"),
    Mutation("one_buffer_for_two", "Offset::k + (n & (kStages - 1)) * Bytes::k", "Offset::k", tile="sm80_two_buffers"),
    Mutation("place_not_published", "sync_block();  // now all can read it", tile="sm80_state_in_smem"),
    Mutation("tail_not_filled_with_zeros", ZERO_FILL, f"if (row_there && column_there) {ZERO_FILL}"),
    Mutation("tail_read_from_beyond", ZERO_FILL, "cp_async_16(to, from + panel * kPanel<T>);"),
    Mutation("output_not_rescaled", "softmax[t].template rescale<kMaybeEmpty>(o[t]);", case=FALLING, times=2),
    Mutation("output_read_too_early", "sync_warp();\n      constexpr int kChunks", "constexpr int kChunks"),
    Mutation(
        "rows_beyond_the_sequence_written", "if (warp_row + row < tile.q.length && (Config::", "if ((Config::", VARLEN
    ),
    # ---- sm90: rings of buffers ----
    *(
        Mutation(*m, tile="sm90")
        for m in [
            ("keys_not_released", "k.release_and_advance();", "k.next();", CAUSAL),
            ("values_not_released", "v.release_and_advance();", "v.next();", CAUSAL, 2),
            ("one_key_block_too_many", "if (blocks.has_next(n)) load_keys(", "load_keys(", CAUSAL),
            ("blocks_left_of_the_window_not_skipped", "from(n); kSkipsAfter && all", "from(n); false && all", WINDOWS),
            (
                "rows_without_keys_skip_nothing",
                f"{SKIPPED_BEFORE};",
                f"{SKIPPED_BEFORE.split(':')[0]}: n + 1;",
                WIDE_NO_KEYS,
            ),
            ("skipped_buffers_not_released", f"{SKIP}\n    release_and_advance();", f"{SKIP}\n    next();", CAUSAL),
            ("queries_not_released", "ring.release();", "", CAUSAL),
            ("buffers_released_by_every_thread", "if (elected()) release();", "release();", CAUSAL),
            (
                "keys_released_in_flight",
                "wgmma_wait<kIssuedSince>();\n    pin(s);\n    k.release_and_advance();",
                "k.release_and_advance();\n    wgmma_wait<kIssuedSince>();",
                CAUSAL,
            ),
            ("keys_not_awaited", "k.wait_full();", "", CAUSAL, 2),
            ("values_not_awaited", "v.wait_full();", "", CAUSAL, 2),
            ("queries_not_awaited", "q.wait_full();", "", CAUSAL),
            ("buffers_overwritten", "wait_empty();\n    mbar_arrive_expect_tx", "mbar_arrive_expect_tx", CAUSAL),
            ("queries_overwritten", "q.wait_empty();", "", SHORT),
            ("parity_never_flips", "parity ^= 1;", "", CAUSAL),
            ("parity_begins_wrong", "parity(producer)", "parity(!producer)", CAUSAL),
            ("too_few_bytes_expected", "ring.begin_load(bytes);", "ring.begin_load(bytes / 2);", CAUSAL),
            ("too_many_bytes_expected", "ring.begin_load(bytes);", "ring.begin_load(2 * bytes);", CAUSAL),
            (
                "too_few_arrivals",
                "Offset::ring_k, 4 * kConsumers, KeyLoader",
                "Offset::ring_k, 4 * kConsumers - 1, KeyLoader",
                CAUSAL,
            ),
            ("barriers_not_fenced", "    mbar_init_fence();\n  }", "  }", CAUSAL),
            ("barriers_not_published", "Kernel::init_barriers();\n  sync_block();", "Kernel::init_barriers();", CAUSAL),
            # ---- matrix products in flight ----
            ("no_wait_for_scores", "wgmma_wait<kIssuedSince>();", "", CAUSAL),
            ("wait_leaves_one_more", "wait_qk<1>(s);", "wait_qk<2>(s);", CAUSAL),
            ("no_wait_for_the_first_scores", "wait_qk<0>(s);", "wait_qk<1>(s);", CAUSAL),
            ("no_wait_for_the_output", "wgmma_wait<0>();\n    pin(f.weights);", "", CAUSAL),
            ("no_wait_for_the_last_output", "wgmma_wait<0>();\n    v.release", "v.release", CAUSAL),
            ("no_fence", "wgmma_fence();", "", CAUSAL, 2),
            (
                "weights_overwritten_in_flight",
                "if (Config::kExpsBeforeWait) keep_above(",
                "pack_fragment<T>(f.weights, s); if (Config::kExpsBeforeWait) keep_above(",
                CAUSAL,
            ),
            ("output_not_rescaled", f"if (!{ACCEPT}) f.o.scale(f.softmax.alpha);", f"{ACCEPT};", FALLING),
            ("output_not_begun_at_zero", "      o.zero();", "", SHORT),
            (
                "output_not_rescaled_on_the_diagonal",
                "if (!first || Config::kMerge) f.o.scale(f.softmax.alpha);",
                "",
                DIAGONAL,
            ),
            ("values_of_the_diagonal_missing", f"{YIELD}\n      pv(f);", YIELD, CAUSAL),
            (
                "loop_left_on_the_diagonal",
                "if ((n = mine.next(n)) < mine.end_full || !kDiagonalAlone) break;",
                "n = mine.next(n); break;",
                WIDE,
            ),
            (
                "wrong_speculation_accepted",
                "if (any(!(sum[0] <= kLargestSum && sum[1] <= kLargestSum)))",
                "if (false)",
                STEEP,
            ),
            # ---- output through shared memory ----
            ("no_proxy_fence", f"fence_proxy_async();\n    {MEET}", MEET, CAUSAL),
            ("staged_over_queries_in_use", f"{MEET}  // and every warp", "//", CAUSAL),
            ("stored_before_staged", f"fence_proxy_async();\n    {MEET}", "fence_proxy_async();", CAUSAL),
            ("store_not_committed", "tma_store_commit();", "", CAUSAL),
            ("store_not_awaited", "tma_store_wait_read<0>();\n      ring.release();", "ring.release();", CAUSAL),
            # ---- tiles: the tile info slot, the first block, varlen sequences, the counter ----
            ("tile_not_published", f"{PUBLISH}\n    {LOAD_QUERIES}", f"{LOAD_QUERIES}\n    {PUBLISH}", CAUSAL),
            (
                "ragged_first_block_unmasked",
                "Mask::kHasHi || mine.masked(n));",
                "Mask::kHasHi);",
                SHORT,
            ),
            ("load_runs_into_the_next_sequence", "clip = max(0, kRows - rows_left);", "clip = 0;", VARLEN),
            (
                "store_runs_into_the_next_sequence",
                "&p.map_o, box_of_consumer<Config>(tile, consumer),",
                "&p.map_o, clipped_box<64>(tile.q.first + tile.row0 + 64 * consumer, 64, tile.head),",
                VARLEN,
            ),
            (
                "tile_left_out",
                "return grid_dim() + atomic_inc_wrap(",
                "return grid_dim() + 1 + atomic_inc_wrap(",
                CAUSAL,
            ),
        ]
    ),
    # ---- few queries: split-KV and packed GQA ----
    *(
        Mutation(*m, SPLIT, tile="sm90")
        for m in [
            ("splits_all_the_same", "remainder(tile.work, p.splits), p.splits);", "0, p.splits);"),
            ("first_split_taken_for_the_last", "+ added == splits() - 1;", "+ added == 0;"),
            ("splits_not_weighted", "l = fma(ml[j][1], weight, l);", "l += ml[j][1];"),
            ("rows_of_a_split_left_out", "warp_uniform(eight < rows())", "warp_uniform(eight + 8 <= rows())"),
            (
                "count_not_published",
                "count_in(splits_before);\n    sync_warpgroup(staging.consumer);",
                "count_in(splits_before);",
            ),
        ]
    ),
    *(
        Mutation(name, old, new, SOFTCAP, tile="sm90_rolled")
        for name, old, new in [
            ("values_released_before_the_first", "if (!first) v.release_and", "v.release_and"),
            ("queries_not_released_after_the_first", "if (first) stored.release();", ""),
            (
                "loop_unmasked",
                "score_and_mask(s, f, tile, mine, row, n, mine.masked(n));",
                "score_and_mask(s, f, tile, mine, row, n, false);",
            ),
            ("loop_without_values", f"return n;\n      {OVERLAPPED}", "return n;\n      qk<kBlockN>(s, q_desc, f);"),
        ]
    ),
    Mutation("blocks_of_other_splits_skipped", f"{SKIPPED_BEFORE};", "mine.end;", WIDE_SPLIT, tile="sm90"),
    Mutation("split_that_does_not_exist_counts", "if (!exists) ml[j][0] = neg_inf();", "", LOW, tile="sm90"),
    *(
        Mutation(*m, PACKED_GQA, tile="sm90")
        for m in [
            ("rows_taken_for_queries", "row / kPackGqa, (row + 8) / kPackGqa, first_key", "row, row + 8, first_key"),
            (
                "lse_of_another_head",
                "tile.head * Config::kPackGqa + row % Config::kPackGqa;",
                "tile.head * Config::kPackGqa;",
            ),
        ]
    ),
    *(
        Mutation(*m, tile="sm90_ping_pong")
        for m in [
            ("rows_alike", "bits(factors[i & 3])", "bits(factors[i & 2])", DROPOUT),
            ("turn_not_passed_on", "turns.pass_turn();\n    wait_qk<1>(s);", "wait_qk<1>(s);"),
            ("turn_not_yielded", "wait_turn();\n    pass_turn();\n  }", "wait_turn();\n  }"),
            ("turn_not_taken_by_a_skip", f"if (has_turn) {YIELD}", ""),
            ("turn_not_taken_on_the_diagonal", f"{YIELD}\n      pv(f);", "pv(f);", DIAGONAL),
            ("turn_not_taken_on_the_diagonal_wide", f"{YIELD}\n      pv(f);", "pv(f);", replace(DIAGONAL, dim=128)),
        ]
    ),
    # ---- one Q slot, O in a buffer of its own ----
    *(
        Mutation(*m, tile="sm90_one_slot")
        for m in [
            ("queries_not_released", "if (kPrivateO && elected()) q.release();", "", CAUSAL),
            (
                "queries_of_rows_without_keys_not_released",
                "if (kPrivateO && el",
                "if (kPrivateO && sees_keys && el",
                NO_KEYS,
            ),
            ("queries_released_on_the_diagonal", f"{YIELD}\n      pv(f);", f"{YIELD} {RELEASE_Q} pv(f);", WIDE),
            ("queries_overwritten", "q.wait_empty();", "", SHORT),
            ("queries_released_in_use", Q_DESC, f"{Q_DESC} {RELEASE_Q}", CAUSAL, 2),
            ("tile_read_too_late", "sync_warp();  // as in read_positions", "", CAUSAL),
            ("staged_over_output_in_flight", "tma_store_wait_read<0>();  // what was staged", ";  //", CAUSAL),
            ("last_store_not_awaited", "tma_store_wait_read<0>();  // shared memory must outlive", ";  //", CAUSAL),
        ]
    ),
]

# One for each way of being caught (a race, a deadlock, a stray access, a wrong number) and each part of the kernels.
EVERYDAY = """
    sm80-mask_one_too_far sm80-no_wait_for_keys sm80-no_barrier_before_values sm80-tail_not_filled_with_zeros
    sm80-rows_beyond_the_sequence_written
    sm90-mask_low_end sm90-keys_not_released sm90-buffers_overwritten sm90-barriers_not_fenced sm90-no_wait_for_scores
    sm90-output_not_rescaled sm90-no_proxy_fence sm90-store_runs_into_the_next_sequence sm90-splits_not_weighted
    sm90-lse_of_another_head sm90_ping_pong-turn_not_passed_on sm90_one_slot-queries_released_in_use
""".split()


# Redundant as things are, and kept for the reader: neither the emulator nor a GPU can tell the difference. If one of
# these is caught one day, what made it redundant has gone.
REDUNDANT = [
    # Between a warp's last read of Q and its first write over it there is a P V, and that meets at sync_warp between
    # its steps.
    Mutation("output_staged_early", "sync_warp();  // all lanes are done with this warp's rows of Q"),
    # The last step of the loop commits an empty group: there is nothing to wait for.
    Mutation("no_last_wait", "cp_async_wait<0>();\n    }\n    store();", "}\n    store();"),
]


def planned(case: Case, tile: str, mutation: Mutation | None) -> tuple[Plan, Inputs, torch.Tensor, torch.Tensor]:
    """A plan, of damaged kernels if there is a mutation, and what it works on: the inputs, the output and the LSE."""
    problem, inputs = prepare(case, torch.bfloat16)
    if problem.varlen:  # the keys of the sequence without queries are nobody's: they must not be read
        for t in (inputs.k, inputs.v):
            t[:, :, int(inputs.cu_k[1]) : int(inputs.cu_k[2])] = torch.nan  # type: ignore[index]
    out, lse = poisoned_outputs(problem, inputs)
    plan = plan_of(tile[:4], problem, out.stride()[:3], 2, TILES[tile])  # type: ignore[arg-type]
    return plan if mutation is None else with_source(plan, mutation), inputs, out, lse


def finding(case: Case, tile: str, mutation: Mutation | None, seed: int) -> str | None:
    """Return what is wrong with a run; None if nothing is."""
    plan, inputs, out, lse = planned(case, tile, mutation)
    try:
        backend.launch(plan, tensors_of(inputs, out, lse), mode="async", seed=seed, workers=1)
        (exact, exact_lse), (same, same_lse) = expected(case, torch.bfloat16)
        tolerance.check("out", out, exact, same)
        tolerance.check("lse", lse, exact_lse, same_lse, floor=tolerance.lse_floor(same_lse))
    except (EmulatorError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    "case",
    everyday(
        [CAUSAL, WINDOWS, WIDE, WIDE_NO_KEYS, FALLING, SHORT, SPLIT, WIDE_SPLIT, LOW, PACKED_GQA, VARLEN], ["causal"]
    ),
)
def test_nothing_is_found_in_the_kernels_themselves(case: Case, tile: str) -> None:
    assert [finding(case, tile, None, seed) for seed in SEEDS] == [None] * len(SEEDS)


@pytest.mark.parametrize("case", [SPLIT, WIDE_SPLIT, LOW], ids=str)
def test_keys_are_split_where_that_is_what_is_broken(case: Case) -> None:
    problem, _ = prepare(case, torch.bfloat16)
    assert only(plan_of("sm90", problem, (1, 1, 1), 2, TILES["sm90"])).values["splits"] == 2


@pytest.mark.parametrize("mutation", [*MUTATIONS, *REDUNDANT], ids=str)
def test_mutation_fits_the_source(mutation: Mutation) -> None:
    """Those that `make test` does not run must not outlive what they replace."""
    planned(mutation.case, mutation.tile, mutation)


def test_a_mutation_that_does_not_fit_is_no_finding() -> None:
    """It would pass for caught. The message says which one it is, and what text is missing."""
    gone = Mutation("gone", "text_that_is_nowhere();")
    with pytest.raises(Mismatch, match=r"mutation sm80-gone: .* 0 times .*, not 1:\ntext_that_is_nowhere\(\);"):
        finding(CAUSAL, "sm80", gone, seed=1)
    backward = gradients.Mutation("gone", "text_that_is_nowhere();", "", CAUSAL)
    with pytest.raises(Mismatch, match=r"mutation gone: .*\ntext_that_is_nowhere\(\);"):
        gradients.finding("sm80", backward, seed=1)


@pytest.mark.parametrize("mutation", everyday(MUTATIONS, EVERYDAY))
def test_mutation_is_caught(mutation: Mutation) -> None:
    assert any(finding(mutation.case, mutation.tile, mutation, seed) for seed in SEEDS), f"{mutation} passes unnoticed"


@pytest.mark.thorough
@pytest.mark.parametrize("mutation", REDUNDANT, ids=str)
def test_redundant_parts_are_known(mutation: Mutation) -> None:
    assert not any(finding(mutation.case, mutation.tile, mutation, seed) for seed in SEEDS)
