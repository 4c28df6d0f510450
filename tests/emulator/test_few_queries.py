"""The Hopper kernel where queries are few: heads become rows of a tile, and keys are split among blocks, which then
meet."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from emulator.emulate import forward, member, only, plan_of
from emulator.test_forward_kernels import check
from everyday import everyday
from oracle import prepare

from strobe.cuda.parts import blocks
from strobe.emulator import compiler
from strobe.variants.mask import causal
from strobe.variants.ready_made import window

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

SMS = 12
CASES = [
    Case("s_one_query", 1, 700, batch=2, heads=2, heads_k=2, dim=64),
    Case("s_group", 1, 500, batch=1, heads=8, heads_k=2, dim=128),  # heads become rows
    Case("s_causal", 70, 600, batch=1, heads=2, dim=128, mask=causal),
    Case("s_many_parts", 1, 1400, batch=1, heads=1, heads_k=1, dim=64, scores="rising"),  # more than are read at once
    Case("s_two_row_tiles", 150, 600, batch=1, dim=64, mask=causal),
    Case("s_parts_without_keys", 30, 900, batch=1, dim=64, mask=window(100, 0)),
    Case("s_rows_without_keys", 700, 520, batch=1, heads=1, heads_k=1, dim=64, mask=causal),
    Case("s_sinks_softcap", 5, 600, batch=1, heads=2, dim=96, sinks=True, softcap=4.0, mask=causal),
    Case("s_falling", 20, 600, batch=1, dim=128, scores="falling", scale=0.5),
    Case(
        "s_packed", 0, 0, heads=1, heads_k=1, dim=64, mask=causal, lengths=((1, 500), (0, 3), (1, 1), (5, 0), (60, 300))
    ),
    Case("s_192_128", 3, 500, batch=1, heads=2, dim=192, dim_v=128),
    Case("s_192_low", 3, 500, batch=1, heads=2, dim=192, scores="low"),
    Case("s_256", 65, 400, batch=1, dim=256, mask=causal),
    Case(
        "s_192_rows", 150, 600, batch=1, heads=6, heads_k=6, dim=64, mask=causal
    ),  # 128 would make one tile for each SM
    Case("s_192_rows_softcap_sinks", 130, 400, batch=1, heads=6, heads_k=6, dim=96, softcap=4.0, sinks=True),
]


@pytest.fixture(autouse=True)
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LEAST_SPLIT", 1), ("FEWEST_SPLITS", 1), ("FEW_ROWS", 64)):
        monkeypatch.setattr(blocks, name, value)


EVERYDAY = """
    s_one_query s_causal s_many_parts s_two_row_tiles s_rows_without_keys s_sinks_softcap s_falling s_packed s_192_rows
""".split()


@pytest.mark.parametrize("case", everyday(CASES, EVERYDAY))
def test_case(case: Case) -> None:
    problem, inputs = prepare(case, torch.bfloat16)
    made = plan_of("sm90", problem, (0, problem.dim_v, problem.heads * problem.dim_v), SMS)
    assert member(made, "kSplit") and only(made).values["splits"] > 1 and made.workspace_bytes > 0
    assert member(made, "kBlockM") == (192 if "192_rows" in case.name else 128)
    at_once, late = (forward("sm90", problem, inputs, sms=SMS, mode=mode, seed=3) for mode in ("sync", "async"))  # type: ignore[arg-type]
    check(case, torch.bfloat16, at_once)
    assert torch.equal(late[0], at_once[0]) and torch.equal(late[1], at_once[1])


def test_whoever_is_last_the_bits_are_the_same() -> None:
    problem, inputs = prepare(CASES[2], torch.bfloat16)
    results = [forward("sm90", problem, inputs, sms=SMS, mode="async", seed=seed) for seed in range(3)]
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)


PACKED_GQA = [
    Case("f_decode", 1, 300, batch=2, heads=8, heads_k=2, dim=128),
    Case("f_decode_window_sinks", 1, 400, batch=1, heads=16, heads_k=2, dim=64, mask=window(200, 0), sinks=True),
    Case("f_causal", 9, 300, batch=2, heads=8, heads_k=2, dim=64, mask=causal),
    Case("f_causal_many_rows", 70, 200, batch=1, heads=4, heads_k=1, dim=128, mask=causal),
    Case("f_group_of_64", 3, 150, batch=1, heads=64, heads_k=1, dim=64, mask=causal),
    Case("f_sliced", 5, 260, batch=2, heads=4, heads_k=2, dim=96, memory="sliced", mask=window(50, 1)),
    Case("f_padded", 5, 260, batch=1, heads=4, heads_k=2, dim=72, dim_v=40, softcap=3.0),
    Case("f_192_128", 5, 260, batch=1, heads=4, heads_k=2, dim=192, dim_v=128, mask=causal, sinks=True),
    Case("f_256", 3, 100, batch=1, heads=8, heads_k=1, dim=256),
]


@pytest.mark.parametrize("sms", [1, SMS])
@pytest.mark.parametrize("case", everyday(PACKED_GQA, ["f_causal", "f_decode_window_sinks"]))
def test_heads_of_a_group_as_rows_of_a_tile(case: Case, sms: int) -> None:
    problem, inputs = prepare(case, torch.bfloat16)
    made = plan_of("sm90", problem, (0, problem.dim_v, problem.heads * problem.dim_v), sms)
    assert member(made, "kPackGqa") == problem.group and member(made, "kSplit") == (sms > 1 and case.len_k >= 256)
    check(case, torch.bfloat16, forward("sm90", problem, inputs, sms=sms))
