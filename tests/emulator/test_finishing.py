"""Forward kernels for Hopper that merge with an earlier result in fp32 and round: against those that merge in place, whose
result is rounded afterwards, and against the separate results."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cases import Case
from emulator.emulate import member, plan_of, tensors_of, with_positions, with_source
from emulator.mutation import replaced
from emulator.test_merging import CASES, RESUMED, WIDE, Rows, compare, merged, run
from emulator.test_partial_results import part_of, small_splits
from everyday import everyday
from oracle import prepare

from strobe.emulator import EmulatorError, backend, compiler
from strobe.problem import Problem, State
from strobe.problem.arguments import Inputs
from strobe.variants.mask import causal

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.usefixtures(small_splits.__name__),
]


def finish(
    problem: Problem,
    inputs: Inputs,
    state: Rows,
    *,
    positions: Any = None,
    sms: int = 2,
    edit: Any = None,
    seed: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rounded output, in rows of a tensor that has more of them, and the LSE in `state`, whose output stays."""
    if positions is not None:
        inputs = inputs._replace(positions=torch.tensor(positions, dtype=torch.int32))
    batch, heads, rows, _ = inputs.q.shape
    wide = torch.full((batch, rows + 7, heads, problem.dim_v + 8), torch.nan, dtype=problem.dtype)
    out = wide[:, 2 : 2 + rows, :, : problem.dim_v].transpose(1, 2)
    strides = State(state.lse.stride()[:2], state.out.stride()[:3])  # type: ignore[arg-type]
    asked = dataclasses.replace(with_positions(problem, positions), state=strides)
    made = plan_of("sm90", asked, out.stride()[:3], sms)  # type: ignore[arg-type]
    assert member(made, "kMerge") and not member(made, "kPartialOut") and not member(made, "kSplit")
    if edit is not None:
        made = with_source(made, edit)
    before = state.out.clone()
    tensors = tensors_of(inputs, out, state.lse) | {"state": state.out}
    backend.launch(made, tensors, mode="async", seed=seed)
    assert torch.equal(state.out, before)
    found = out.clone(), state.lse.clone()
    out.fill_(torch.nan)
    assert wide.isnan().all()
    return found


def check(problem: Problem, inputs: Inputs, first: Any, last: Any, sms: int = 2) -> None:
    """`first`, `last`: (problem, inputs, positions) of two calls."""
    states, results = [Rows(problem, inputs), Rows(problem, inputs)], []
    for state in states:
        state.begin()
        run("sm90", *first[:2], state, merge=True, positions=first[2], sms=sms)
    for p, x, positions in (first, last):
        results.append(run("sm90", p, x, Rows(problem, inputs), merge=False, positions=positions, sms=sms)[1])
    made, (wide, wide_lse) = run("sm90", *last[:2], states[0], merge=True, positions=last[2], sms=sms)
    out, lse = finish(*last[:2], states[1], positions=last[2], sms=sms)
    compare((out.float(), lse), merged(results))
    if not member(made, "kSplit"):  # the same sums in the same order
        assert torch.equal(out, wide.to(out.dtype)) and torch.equal(lse, wide_lse)
    states[1].check_the_rest()


@pytest.mark.parametrize("case", everyday(CASES, ["causal", "split_packed_gqa"]))
def test_two_parts_of_the_keys(case: Case) -> None:
    """Some rows see no key of the first part, others none of the last or, with more queries than keys, of any."""
    problem, inputs = prepare(case, torch.bfloat16)
    whole, half = (problem.len_q, problem.len_k), problem.len_k // 2
    calls = []
    for part in (slice(half, whole[1]), slice(0, half)):
        positions: Any = [(0, whole[0], part.start, whole[1])] * problem.batch
        if case.mask.lo is None and case.mask.hi is None:
            positions = None
        calls.append((*part_of(problem, inputs, slice(0, whole[0]), part), positions))
    check(problem, inputs, *calls, sms=6 if "split" in case.name else 2)


@pytest.mark.parametrize("dim", everyday([64, 128], ["64"]))
def test_varlen_with_positions(dim: int) -> None:
    lengths = ((60, 100), (0, 5), (70, 130), (140, 40))
    case = Case("varlen", 0, 0, heads=2, heads_k=1, dim=dim, mask=causal, lengths=lengths)
    problem, inputs = prepare(case, torch.float16)
    calls = []
    for offset in (40, 90):  # the same keys, at other places of longer sequences
        calls.append((problem, inputs, [(offset // 2, n + 100, 100 - offset, k + 100) for n, k in lengths]))
    check(problem, inputs, *calls)


def test_one_box_and_rows_that_see_no_key() -> None:
    """The first 80 of 200 rows see none of 120 keys under the causal mask, counted from the start."""
    case = Case("no_positions", 200, 120, batch=2, heads=2, heads_k=2, dim=128, mask=causal)
    problem, inputs = prepare(case, torch.bfloat16)
    check(problem, inputs, (problem, inputs, None), (problem, inputs, None))


MUTATIONS = {
    "merged_with_what_is_in_out": (RESUMED, "return &p.map_state;", "return &p.map_o;"),
    "first_block_not_rescaled": (WIDE, "if (!first || Config::kMerge) f.o", "if (!first || Config::kPartialOut) f.o"),
    "no_state_lse": (WIDE, "State<Config::kMerge> state;", "State<Config::kPartialOut> state;"),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_noticed(name: str) -> None:
    case, old, new = MUTATIONS[name]
    problem, inputs = prepare(case, torch.bfloat16)

    def edit(source: str) -> str:
        return replaced(name, source, old, new)

    def result(edit: Any = None) -> None:
        state = Rows(problem, inputs)
        state.out.normal_(), state.lse.normal_(4.0)
        before = state.out.clone(), state.lse.clone()
        _, alone = run("sm90", problem, inputs, Rows(problem, inputs), merge=False)
        out, lse = finish(problem, inputs, state, edit=edit)
        compare((out.float(), lse), merged([before, alone]))

    result()
    with pytest.raises((AssertionError, EmulatorError)):
        result(edit)
