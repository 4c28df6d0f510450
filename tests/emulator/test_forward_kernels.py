"""The forward kernels on the emulator: every case they support, against float64, from outputs full of NaN.

In asynchronous mode copies and matrix products land late and threads run in random order: what passes there waits for
everything it reads.
"""

from __future__ import annotations

import dataclasses

import exact_inputs
import pytest
import tolerance
import torch
from cases import CASES, Case, make
from emulator.emulate import KERNELS, SMS, forward, only, plan_of, poisoned_outputs
from everyday import everyday
from kernel_cases import KERNEL_CASES, SUPPORTED
from oracle import expected, prepare

import strobe
from strobe.emulator import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

BY_NAME = {case.name: case for case in (*CASES, *KERNEL_CASES)}
FP16 = ("k_64_causal_rounds", "k_128_sliced", "k_192_128_packed", "rising", "huge")
ASYNC = (
    "k_64_causal_rounds",
    "k_128_rounds",
    "k_128_packed",
    "k_128_dropout",
    "k_256_rounds",
    "k_96",
    "k_72_packed",
    "k_rows_without_keys",
)
SEEDS = (1, 2)


def check(case: Case, dtype: torch.dtype, found: tuple[torch.Tensor, torch.Tensor]) -> None:
    (out, lse), (same_out, same_lse) = expected(case, dtype)
    tolerance.check("out", found[0], out, same_out)
    tolerance.check("lse", found[1], lse, same_lse, floor=tolerance.lse_floor(same_lse))


# Most features and tiles, in few programs: what stands in one line shares one for each kernel.
EVERYDAY = """
    plain ragged one_query one_query_causal one_key one_pair group_8 huge rising sliced_group
    causal ragged_causal more_queries_causal group_3 empty_rows rising_causal sliced
    dim_v_larger k_40
    k_64_rounds k_scale
    k_64_causal_rounds k_64_falling
    k_64_packed
    k_64_softcap_sinks
    k_rows_without_keys
    k_window_left
    k_chunked
    k_72_packed
    k_96_window_packed
    k_128_rounds k_128_rising k_128_falling k_128_steep
    k_128_causal k_128_more_queries k_128_sliced k_128_first_row_late k_128_huge
    k_128_packed
    k_128_dropout
    k_192_128
    k_256_rounds dim_256
""".split()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", everyday(SUPPORTED, EVERYDAY))
def test_case(case: Case, kernel: str) -> None:
    check(case, torch.bfloat16, forward(kernel, *prepare(case, torch.bfloat16)))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", everyday(FP16, ["k_64_causal_rounds"]))
def test_fp16(name: str, kernel: str) -> None:
    check(BY_NAME[name], torch.float16, forward(kernel, *prepare(BY_NAME[name], torch.float16)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", everyday(ASYNC, {*ASYNC} - {"k_96"}))
def test_asynchronous(name: str, kernel: str, seed: int) -> None:
    """Whatever lands late or runs out of turn, the result has the same bits as when everything happens at once."""
    problem, inputs = prepare(BY_NAME[name], torch.bfloat16)
    late, at_once = (forward(kernel, problem, inputs, mode=mode, seed=seed) for mode in ("async", "sync"))  # type: ignore[arg-type]
    assert torch.equal(late[0], at_once[0]) and torch.equal(late[1], at_once[1])
    check(BY_NAME[name], torch.bfloat16, late)


@pytest.mark.parametrize(
    "case",
    everyday([c for c in exact_inputs.CASES if c.dim <= 128], ["e_64", "e_64_causal", "e_128", "e_128_causal_sliced"]),
)
def test_kernels_agree_where_nothing_is_rounded(case: Case) -> None:
    q, k, v, kwargs = exact_inputs.make_exact(case, torch.bfloat16)
    one, other = (exact_inputs.emulate(kernel, q, k, v, **kwargs)[0] for kernel in KERNELS)
    assert torch.equal(one, other)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["k_64_packed", "k_128_packed", "k_72_packed"])
def test_nan_of_a_packed_neighbour_stays_there(name: str, kernel: str) -> None:
    """Every other sequence holds nothing but NaN: the ones between must not notice, neither by reading nor by being
    written."""
    case = BY_NAME[name]
    problem, inputs = prepare(case, torch.bfloat16)
    assert inputs.cu_q is not None and inputs.cu_k is not None
    for parity in (0, 1):
        q, k, v = (t.clone() for t in (inputs.q, inputs.k, inputs.v))
        spared = torch.zeros(q.shape[2], dtype=torch.bool)
        for i in range(problem.batch):
            rows, keys = (slice(int(cu[i]), int(cu[i + 1])) for cu in (inputs.cu_q, inputs.cu_k))
            if i % 2 == parity:
                q[:, :, rows], k[:, :, keys], v[:, :, keys] = torch.nan, torch.nan, torch.nan
            else:
                spared[rows] = True
        assert spared.any()
        found = forward(kernel, problem, inputs._replace(q=q, k=k, v=v))
        (out, lse), (same_out, same_lse) = expected(case, torch.bfloat16)
        tolerance.check("out", found[0][:, :, spared], out[:, :, spared], same_out[:, :, spared])
        floor = tolerance.lse_floor(same_lse)
        tolerance.check("lse", found[1][:, :, spared], lse[:, :, spared], same_lse[:, :, spared], floor=floor)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("keys", [1, 63, 64, 65, 127, 129])
def test_nan_beyond_the_last_key_is_not_seen(keys: int, kernel: str) -> None:
    """Keys and values behind the end exist in memory, inside the same allocation, and are NaN."""
    case = Case("tail", 70, keys, batch=2, dim=64)
    problem, inputs = prepare(case, torch.bfloat16)
    longer = []
    for t in (inputs.k, inputs.v):  # (batch, heads, keys, dim)
        around = t.new_full((t.shape[0], t.shape[1], keys + 200, t.shape[3]), torch.nan)
        around[:, :, :keys] = t
        longer.append(around[:, :, :keys])
    keys_of = dataclasses.replace(problem.k, strides=tuple(t.stride()[:3] for t in longer))
    problem = dataclasses.replace(problem, k=keys_of)
    check(case, torch.bfloat16, forward(kernel, problem, inputs._replace(k=longer[0], v=longer[1])))


@pytest.mark.parametrize("name", ["k_64_causal_rounds", "k_128_rounds", "k_256_rounds"])
def test_hopper_blocks_go_several_rounds(name: str) -> None:
    """Else the cases above would not test what happens at the boundary of two tiles."""
    problem, inputs = prepare(BY_NAME[name], torch.bfloat16)
    plan = plan_of("sm90", problem, poisoned_outputs(problem, inputs)[0].stride()[:3])  # type: ignore[arg-type]
    assert only(plan).grid == SMS
    assert only(plan).values["tiles"] > 2 * SMS


@pytest.mark.parametrize("kernel", KERNELS)
def test_through_the_public_call(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROBE_EMULATE", kernel)
    case = BY_NAME["k_128_sliced"]
    q, k, v, kwargs = make(case, torch.bfloat16)
    out = q.new_full((*q.shape[:3], case.dim), torch.nan)
    result, lse = strobe.attention(q, k, v, **kwargs, out=out, return_lse=True, backend="emulator")
    assert result is out
    check(case, torch.bfloat16, (out.transpose(1, 2), lse))


@pytest.mark.parametrize("kernel", KERNELS)
def test_misaligned_tensors_are_copied(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs and output that begin at an odd element: right, and nothing beside the output is written."""
    monkeypatch.setenv("STROBE_EMULATE", kernel)
    case = BY_NAME["plain"]
    q, k, v, _ = make(case, torch.bfloat16)

    def shifted(t: torch.Tensor) -> torch.Tensor:
        memory = t.new_full((t.numel() + 2,), 7.0)
        return memory[1:-1].view(t.shape).copy_(t)

    out = shifted(torch.full_like(q, torch.nan))
    strobe.attention(shifted(q), shifted(k), shifted(v), out=out, backend="emulator")
    (exact, _), (same, _) = expected(case, torch.bfloat16)
    tolerance.check("out", out.transpose(1, 2), exact, same)
    around = torch.as_strided(out, (out.numel() + 2,), (1,), 0)
    assert around[0] == 7 and around[-1] == 7
