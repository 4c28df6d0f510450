"""Head dims above 256 on the emulated Hopper kernels, forward and backward, against float64."""

from __future__ import annotations

from dataclasses import replace

import oracle
import pytest
import tolerance
import torch
from cases import Case, make
from emulator.emulate import forward, plan_of, poisoned_outputs
from emulator.gradients import check_case, check_fp32
from everyday import everyday
from kernel_cases import WIDE_CASES
from oracle import expected, prepare
from paged_cases import pool, queries

import strobe
from strobe.cuda.plans import backward_plan, block_map
from strobe.cuda.plans.families import FAMILIES
from strobe.cuda.plans.forward_wide_sm90 import column_parts
from strobe.emulator import EmulatorError, compiler
from strobe.emulator.backend import MACHINES
from strobe.problem import State
from strobe.variants.mask import causal

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

BY_NAME = {case.name: case for case in WIDE_CASES}
CAUSAL = BY_NAME["w_512_causal"]


def check(case: Case, found: tuple[torch.Tensor, torch.Tensor]) -> None:
    (out, lse), (same_out, same_lse) = expected(case, torch.bfloat16)
    tolerance.check("out", found[0], out, same_out)
    tolerance.check("lse", found[1], lse, same_lse, floor=tolerance.lse_floor(same_lse))


@pytest.mark.parametrize("case", everyday(WIDE_CASES, ["w_512_causal", "w_320_packed"]))
def test_forward(case: Case) -> None:
    for mode in ("sync", "async"):
        check(case, forward("sm90", *prepare(case, torch.bfloat16), mode=mode))  # type: ignore[arg-type]


@pytest.mark.thorough
def test_blocks_go_several_rounds() -> None:
    """A tile stages O over the only Q of its block: the next Q comes when O has left."""
    case = BY_NAME["w_512"]
    problem, inputs = prepare(case, torch.bfloat16)
    plan = plan_of("sm90", problem, poisoned_outputs(problem, inputs)[0].stride()[:3], sms=2)  # type: ignore[arg-type]
    assert all(launch.values["tiles"] > 2 * launch.grid for launch in plan.launches)
    for seed in (1, 2):
        check(case, forward("sm90", problem, inputs, mode="async", seed=seed, sms=2))


@pytest.mark.thorough
def test_o_overwritten_by_the_next_q_is_caught() -> None:
    problem, inputs = prepare(BY_NAME["w_512"], torch.bfloat16)
    old = "tma_store_wait_read<0>();\n      ring.release();"
    with pytest.raises((EmulatorError, AssertionError)):
        for seed in (1, 2, 3):
            found = forward("sm90", problem, inputs, mode="async", seed=seed, sms=1,
                            edit=lambda text: text.replace(old, "ring.release();"))  # fmt: skip
            check(BY_NAME["w_512"], found)


@pytest.mark.thorough
@pytest.mark.parametrize("case", [
    Case("w_decode", 1, 700, batch=1, heads=8, heads_k=2, dim=512, mask=causal),
    Case("w_few_queries", 5, 700, batch=1, heads=4, heads_k=1, dim=320, mask=causal),
], ids=str)  # fmt: skip
def test_split_kv_and_packed_gqa(case: Case) -> None:
    problem, inputs = prepare(case, torch.bfloat16)
    strides = poisoned_outputs(problem, inputs)[0].stride()[:3]
    plan = plan_of("sm90", problem, strides, sms=12)  # type: ignore[arg-type]
    assert all(launch.values["splits"] > 1 for launch in plan.launches) and len(plan.launches) == 2
    for mode in ("sync", "async"):
        check(case, forward("sm90", problem, inputs, mode=mode, sms=12))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", everyday(WIDE_CASES, ["w_512_causal", "w_320_packed"]))
def test_backward(case: Case) -> None:
    for mode in ("sync", "async"):
        check_case("sm90", case, mode=mode)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["w_512_causal", "w_320_packed"])
def test_gradients_in_fp32(name: str) -> None:
    check_fp32("sm90", BY_NAME[name])


@pytest.mark.thorough
def test_a_group_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_plan, "LONG_LOOP", 1)
    case = Case("parts", 70, 90, batch=1, heads=8, heads_k=1, dim=512, mask=causal)
    machine = replace(MACHINES["sm90"], sms=8)
    assert backward_plan.group_parts(prepare(case, torch.bfloat16)[0], machine.sms) == 2
    check_case("sm90", case, machine=machine)


@pytest.mark.thorough
def test_the_gradient_of_a_bias_is_added_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both consumers have dS."""
    monkeypatch.setenv("STROBE_EMULATE", "sm90")
    case = Case("bias", 40, 70, batch=1, heads=2, heads_k=2, dim=264, bias=(1, 1, 40, 70))
    p, inputs = prepare(case, torch.bfloat16)
    out, lse = oracle.forward("tiled", p, inputs)
    dout, _ = oracle.cotangents(p, inputs)
    assert FAMILIES["sm90"].limits(p.backward(("q", "bias"))) is None and lse is not None
    found = oracle.backward("emulator", p, inputs, out, lse, dout, gradients=("q", "bias"))
    exact, same = oracle.expected_gradients(case, torch.bfloat16, through_lse=False)
    for name, g, e, s in (("dq", found.q, exact[0], same[0]), ("dbias", found.bias, exact[3], same[3])):
        assert g is not None
        tolerance.check(name, g, e, s, tolerance.GRADIENTS)


@pytest.mark.thorough
def test_through_the_public_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROBE_EMULATE", "sm90")
    q, k, v, kwargs = make(CAUSAL, torch.bfloat16)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = strobe.attention(*leaves, **kwargs, return_lse=True, backend="emulator")
    check(CAUSAL, (out.detach().transpose(1, 2), lse.detach()))
    found = torch.autograd.grad(out.float().square().sum(), leaves)
    exact = strobe.attention(*(t.detach().double().requires_grad_() for t in leaves), **kwargs, backend="reference")
    assert all(torch.isfinite(g).all() and g.shape == t.shape for g, t in zip(found, leaves, strict=True))
    assert torch.allclose(out.double(), exact, atol=0.02)


@pytest.mark.thorough
def test_paged_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROBE_EMULATE", "sm90")
    p = pool([37, 0, 150, 99], 16, dim=320, dim_v=320, dtype=torch.bfloat16)
    q, _ = queries([2, 2, 2, 2], dim=320, dtype=torch.bfloat16)
    given = (q.view(4, 2, 4, 320), p.k, p.v, p.table, p.lengths)
    out, lse = strobe.attention_paged(*given, return_lse=True, backend="emulator")
    want, want_lse = strobe.attention_paged(*given, return_lse=True, backend="reference")
    torch.testing.assert_close(out.double(), want.double(), atol=0.03, rtol=0.01)
    torch.testing.assert_close(lse, want_lse.to(lse.dtype), atol=1e-4, rtol=1e-5)


@pytest.mark.thorough
def test_blocks_that_a_condition_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The map of blocks is found once, for both parts of the columns."""
    monkeypatch.setenv("STROBE_EMULATE", "sm90")
    monkeypatch.setattr(block_map, "LEAST_KEYS", 64)
    q, k, v = (torch.randn(1, n, 1, 320).bfloat16() for n in (130, 200, 200))
    mask = strobe.mask_function(lambda b, h, q, k: (k < 50) | (k >= 150))
    clean = strobe.attention(q, k, v, mask=mask, backend="emulator")
    exact = strobe.attention(q.double(), k.double(), v.double(), mask=mask, backend="reference")
    assert (clean.double() - exact).norm() <= 0.01 * exact.norm()
    k[:, 96:144] = v[:, 96:144] = torch.nan  # a block of 48 keys that nobody sees
    assert torch.equal(strobe.attention(q, k, v, mask=mask, backend="emulator"), clean)


@pytest.mark.parametrize("dim_v, parts", [
    (64, [(0, 64)]), (264, [(0, 192), (192, 72)]), (384, [(0, 192), (192, 192)]), (400, [(0, 256), (256, 144)]),
    (512, [(0, 256), (256, 256)]),
])  # fmt: skip
def test_parts_of_the_columns(dim_v: int, parts: list[tuple[int, int]]) -> None:
    assert column_parts(dim_v) == parts


def test_what_it_does_not_take() -> None:
    problem, _ = prepare(CAUSAL, torch.bfloat16)
    family = FAMILIES["sm90"]
    assert family.limits(problem) is None and family.limits(problem.backward(("q", "k", "v"))) is None
    for other, reason in (
        (replace(problem, dim=520, dim_v=520), "head dim 520; the kernels take multiples of 8 up to 512"),
        (replace(problem, dim_v=260), "value head dim 260"),
        (replace(problem, partial=True), "no partial results above head dim 256"),
        (replace(problem, state=State((1, 1), (1, 1, 1))), "no merging with a state above head dim 256"),
    ):
        assert reason in str(family.limits(other))
    assert "up to 256" in str(FAMILIES["sm80"].limits(problem))
