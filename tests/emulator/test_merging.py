"""Forward kernels that merge their result into an earlier one: against the separate results, merged afterwards."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cases import Case
from emulator.emulate import KERNELS, member, plan_of, tensors_of, with_positions, with_source
from emulator.mutation import replaced
from emulator.test_partial_results import part_of, small_splits
from everyday import everyday
from oracle import prepare

from strobe.emulator import EmulatorError, backend, compiler
from strobe.emulator.program import Mode
from strobe.merging import merge_
from strobe.problem import Problem, State
from strobe.problem.arguments import Inputs
from strobe.variants.mask import causal, full
from strobe.variants.ready_made import window

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.usefixtures(small_splits.__name__),
]

Result = tuple[torch.Tensor, torch.Tensor]  # O [batch, heads, rows, dim_v] and LSE [batch, heads, rows], fp32


class Rows:
    """Rows `start` to `start + rows` of a state that has more of them, and columns; all is NaN until it is written."""

    def __init__(self, problem: Problem, inputs: Inputs, start: int = 3, more: int = 5) -> None:
        batch, heads, rows, _ = inputs.q.shape
        self.wide = torch.full((batch, start + rows + more, heads, problem.dim_v + 8), torch.nan)
        self.wide_lse = torch.full((batch, heads, start + rows + more), torch.nan)
        self.rows = slice(start, start + rows)
        self.out = self.wide[:, self.rows, :, : problem.dim_v].transpose(1, 2)
        self.lse = self.wide_lse[..., self.rows]

    def begin(self) -> None:
        """Begin as rows that have seen no key: O may be anything but infinite or NaN."""
        self.out.fill_(1e30), self.lse.fill_(-torch.inf)

    def check_the_rest(self) -> None:
        self.out.fill_(torch.nan), self.lse.fill_(torch.nan)
        assert self.wide.isnan().all() and self.wide_lse.isnan().all()


def run(
    kernel: str,
    problem: Problem,
    inputs: Inputs,
    into: Rows,
    *,
    merge: bool,
    positions: Any = None,
    sms: int = 2,
    mode: Mode = "async",
    edit: Any = None,
    seed: int = 1,
) -> Any:
    if positions is not None:
        inputs = inputs._replace(positions=torch.tensor(positions, dtype=torch.int32))
    state = State(into.lse.stride()[:2]) if merge else None  # type: ignore[arg-type]
    asked = dataclasses.replace(with_positions(problem, positions), partial=True, state=state)
    lse = into.lse if merge else torch.full(into.lse.shape, torch.nan)
    made = plan_of(kernel, asked, into.out.stride()[:3], sms)  # type: ignore[arg-type]
    if edit is not None:
        made = with_source(made, edit)
    backend.launch(made, tensors_of(inputs, into.out, lse), mode=mode, seed=seed)
    return made, (into.out.clone(), lse.clone())


def merged(results: list[Result]) -> Result:
    (out, lse), *others = [(out.transpose(1, 2).double(), lse.double()) for out, lse in results]
    for new, new_lse in others:
        merge_(out, lse, new, new_lse)
    return out.transpose(1, 2), lse


def compare(found: Result, wanted: Result) -> None:
    assert torch.equal(found[1] == -torch.inf, wanted[1] == -torch.inf)
    torch.testing.assert_close(found[1].double(), wanted[1], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found[0].double(), wanted[0], atol=6e-3, rtol=6e-3)  # weights are rounded to 16 bits
    assert (found[0][found[1] == -torch.inf] == 0).all()


CASES = [
    Case("causal", 150, 200, batch=2, heads=2, heads_k=1, dim=64, mask=causal),
    Case("causal_rolled", 150, 200, batch=1, heads=2, heads_k=1, dim=64, mask=causal, softcap=20.0),
    Case("window", 150, 200, batch=1, heads=1, heads_k=1, dim=128, mask=window(60, 5)),
    Case("full", 150, 200, batch=1, heads=2, heads_k=2, dim=128),
    Case("more_queries", 200, 120, batch=1, heads=1, heads_k=1, dim=96, mask=causal),  # the first see nothing
    Case("private_o", 100, 200, batch=1, heads=1, heads_k=1, dim=256, mask=causal),
    Case("padded", 70, 140, batch=1, heads=2, heads_k=2, dim=72, dim_v=40, mask=causal),
    Case("packed_gqa", 9, 150, batch=2, heads=8, heads_k=2, dim=64, mask=causal),
    Case("group_of_three", 1, 150, batch=2, heads=6, heads_k=2, dim=64),  # not packed: LSEs of heads are far apart
    Case("split", 5, 900, batch=1, heads=1, heads_k=1, dim=64, mask=causal),
    Case("split_padded", 60, 900, batch=1, heads=2, heads_k=2, dim=136, dim_v=72, mask=causal),
    Case("split_packed_gqa", 5, 900, batch=1, heads=8, heads_k=1, dim=128, mask=causal),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", everyday(CASES, ["causal", "split"]))
def test_three_parts_of_the_keys_one_after_the_other(case: Case, kernel: str) -> None:
    """The state starts with LSE -inf. Some rows see no key of the first part, others none of the last. Scores of
    the parts lie far apart, either way."""
    problem, inputs = prepare(case, torch.bfloat16)
    whole, third = (problem.len_q, problem.len_k), problem.len_k // 3
    keys = inputs.k.clone()
    keys[:, :, third : 2 * third] *= 4
    inputs = inputs._replace(k=keys)
    sms = 6 if "split" in case.name else 2
    for order in ((0, 1, 2), (1, 0, 2)):
        state, results = Rows(problem, inputs), []
        state.begin()
        for i in order:
            part = slice(i * third, (i + 1) * third if i < 2 else whole[1])
            call = kernel, *part_of(problem, inputs, slice(0, whole[0]), part)
            positions = [(0, whole[0], part.start, whole[1])] * problem.batch
            if case.mask.lo is None and case.mask.hi is None:
                positions = None
            _, alone = run(*call, Rows(problem, inputs), merge=False, positions=positions, sms=sms)
            made, found = run(*call, state, merge=True, positions=positions, sms=sms, mode="async" if i else "sync")
            results.append(alone)
            compare(found, merged(results))
            if kernel == "sm90":
                assert bool(member(made, "kSplit")) == ("split" in case.name)
        state.check_the_rest()


@pytest.mark.parametrize("kernel", KERNELS)
def test_varlen_with_positions(kernel: str) -> None:
    lengths = ((60, 100), (0, 5), (70, 130), (140, 40))
    case = Case("varlen", 0, 0, heads=2, heads_k=1, dim=64, mask=causal, lengths=lengths)
    problem, inputs = prepare(case, torch.bfloat16)
    state, results = Rows(problem, inputs), []
    state.begin()
    for offset in (40, 0, 90):  # the same keys, at other places of longer sequences
        positions = [(offset // 2, n + 100, 100 - offset, k + 100) for n, k in lengths]
        _, alone = run(kernel, problem, inputs, Rows(problem, inputs), merge=False, positions=positions)
        _, found = run(kernel, problem, inputs, state, merge=True, positions=positions)
        results.append(alone)
        compare(found, merged(results))
    state.check_the_rest()


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", KERNELS)
def test_sinks_count_as_one_more_key(kernel: str) -> None:
    case = Case("sinks", 70, 140, batch=1, heads=2, heads_k=2, dim=64, sinks=True, mask=causal)
    problem, inputs = prepare(case, torch.bfloat16)
    state = Rows(problem, inputs)
    _, first = run(kernel, problem, inputs, state, merge=False)
    state.lse.copy_(first[1])
    _, found = run(kernel, problem, inputs, state, merge=True)
    compare(found, merged([first, first]))


@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_is_handed_on_and_an_earlier_result_outweighs(kernel: str) -> None:
    case = Case("causal", 150, 200, batch=1, heads=2, heads_k=1, dim=64, mask=causal)
    problem, inputs = prepare(case, torch.bfloat16)
    state = Rows(problem, inputs)
    state.out.normal_(), state.lse.fill_(100.0)  # e^100 times as much as any score
    state.out[0, 1, 7], state.lse[0, 1, 7] = torch.nan, torch.nan
    before = state.out.clone(), state.lse.clone()
    _, (out, lse) = run(kernel, problem, inputs, state, merge=True)
    torch.testing.assert_close(out, before[0], atol=1e-5, rtol=1e-5, equal_nan=True)
    torch.testing.assert_close(lse, before[1], atol=1e-4, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dim", everyday([64, 96, 128, 256], ["64", "128"]))
def test_output_in_shared_memory_has_no_bank_conflicts(dim: int) -> None:
    case = Case("causal", 150, 200, batch=1, heads=1, heads_k=1, dim=dim, mask=causal)
    problem, inputs = prepare(case, torch.bfloat16)
    state = Rows(problem, inputs)
    state.begin()
    made, _ = run("sm90", problem, inputs, state, merge=True)
    counters = backend.launch(made, tensors_of(inputs, state.out, state.lse))
    assert not member(made, "kSplit") and counters.bank_conflicts == 0


RESUMED = Case("resumed", 150, 300, batch=1, heads=2, heads_k=1, dim=64, mask=causal)
RESUMED_SPLIT = Case("resumed_split", 60, 800, batch=1, heads=1, heads_k=1, dim=64, mask=causal)
WIDE = dataclasses.replace(RESUMED, name="wide", dim=128)
TWO_PARTS = dataclasses.replace(RESUMED, name="two_parts", len_k=200, dim=256)  # of a consumer's O
FEW_KEYS = dataclasses.replace(WIDE, name="few_keys", len_q=600, len_k=50, mask=full)  # one V a tile
PART_LANDED = "mbar_wait(full + 8 * i, merge ? parity_of(q, false) : 1);"
GIVE_BACK = "if (elected()) mbar_arrive(empty + 8 * i);"
MUTATIONS = {
    "every_split_resumes": ("sm90", RESUMED_SPLIT, "remainder(tile.work, p.splits) == 0)", "true)"),
    "every_lane_counts": (None, RESUMED, "neg_inf() && thread_idx() % 4 == 0 ? 1.f", "neg_inf() ? 1.f"),
    "maximum_in_other_units": (None, RESUMED, "lse[r] * p.unscale", "lse[r]"),
    "first_block_not_rescaled": ("sm90", RESUMED, "if (!first || Config::kMerge) f.o.scale", "if (!first) f.o.scale"),
    "rows_beyond_the_end": (None, RESUMED, "merges() && row < tile.q.length;", "merges();"),
    "other_half_of_the_row": (
        "sm90", RESUMED_SPLIT, "fragment.load_row(r, o(row + 8 * r)", "fragment.load_row(r, o(row)"
    ),
    # ---- sm90: O by TMA, in the buffers of V and out of those of Q ----
    "part_not_awaited": ("sm90", RESUMED, PART_LANDED, ""),
    "part_given_back_unread": ("sm90", RESUMED, PART_LANDED, f"{PART_LANDED} {GIVE_BACK} return;"),
    "part_given_back_by_one_warp": ("sm90", RESUMED, GIVE_BACK, "if (thread_idx() % 128 == 0) mbar_arrive(empty + 8 * i);"),
    "part_given_back_before_all_lanes_have_read": ("sm90", RESUMED, "sync_warp();  // all lanes have read it", ""),
    "part_of_another_consumer": ("sm90", RESUMED, "tile.row0 + i / kEach * 64", "tile.row0"),
    "values_over_an_unread_part": ("sm90", RESUMED, "if (!kInTurn) wait_read(parity);", ""),
    "values_over_an_unread_part_wide": ("sm90", WIDE, "if (kInTurn && n < kStages", "if (false && n < kStages"),
    "part_over_an_unread_one": ("sm90", FEW_KEYS, "if (kInTurn) wait_read(parity ^ 1);", ""),
    "part_over_values": ("sm90", WIDE, "if (i < kStages) v.wait_empty();", "if (i < kStages) ;"),
    "part_over_a_part": ("sm90", TWO_PARTS, "else wait_read(i - kStages, parity);", ""),
    "staged_over_output_in_flight": ("sm90", RESUMED, "acquire<kPrivate || (kFrom > 0)>();", "acquire<kPrivate>();"),
}  # fmt: skip


MUTATED = [f"{kernel}-{name}" for name, (only, *_) in MUTATIONS.items() for kernel in KERNELS if only in (None, kernel)]


@pytest.mark.parametrize("mutated", everyday(MUTATED, ["sm90-part_not_awaited"]))
def test_mutations_are_noticed(mutated: str) -> None:
    """A kernel with one thing wrong must not pass for right: nothing is written beyond the state, and half of the rows
    have no earlier result."""
    kernel, name = mutated.split("-")
    _, case, old, new = MUTATIONS[name]
    result_of_merging(kernel, case)

    def edit(source: str) -> str:
        return replaced(mutated, source, old, new)

    with pytest.raises((AssertionError, EmulatorError)):
        for seed in (1, 2, 3):
            result_of_merging(kernel, case, seed, edit)


def result_of_merging(kernel: str, case: Case, seed: int = 1, edit: Any = None) -> None:
    """Compared with that of merging afterwards."""
    problem, inputs = prepare(case, torch.bfloat16)
    state = Rows(problem, inputs, more=0)
    state.begin()
    half = problem.len_q // 2
    state.out[:, :, half:].normal_(), state.lse[:, :, half:].normal_(4.0)
    before = state.out.nan_to_num(), state.lse.clone()
    sms = 6 if "split" in case.name else 2
    _, alone = run(kernel, problem, inputs, Rows(problem, inputs), merge=False, sms=sms)
    _, found = run(kernel, problem, inputs, state, merge=True, sms=sms, edit=edit, seed=seed)
    compare(found, merged([before, alone]))
