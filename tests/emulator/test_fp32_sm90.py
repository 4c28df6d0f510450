"""fp32 inputs on the emulated Hopper kernels, against float64 and by the tolerance of fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tolerance
import torch
from cases import Case
from emulator.emulate import forward, with_source
from emulator.gradients import Mutation, check as check_found, check_case, gradients, planned
from emulator.mutation import replaced
from everyday import everyday
from kernel_cases import FP32_CASES as CASES
from oracle import expected, expected_gradients, prepare

import strobe
from strobe.cuda.parts.plan import Plan
from strobe.cuda.plans import backward_plan
from strobe.cuda.plans.families import FAMILIES
from strobe.emulator import EmulatorError, backend, compiler
from strobe.emulator.backend import MACHINES
from strobe.problem import State
from strobe.variants.mask import causal

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

EVERY_DAY = ["f_128_causal", "f_72_causal", "f_64_window_packed", "f_40_decode", "f_40_pair"]
BY_NAME = {case.name: case for case in CASES}
SMALL = Case("small", 70, 24, batch=1, heads=1, heads_k=1, dim=64)  # few keys: weights that a wrong score shows in


def check(case: Case, found: tuple[torch.Tensor, torch.Tensor]) -> None:
    (out, lse), (same_out, same_lse) = expected(case, torch.float32)
    tolerance.check("out", found[0], out, same_out)
    tolerance.check("lse", found[1], lse, same_lse, floor=tolerance.lse_floor(same_lse))


@pytest.mark.parametrize("case", everyday(CASES, EVERY_DAY))
def test_forward(case: Case) -> None:
    for mode in ("sync", "async"):
        check(case, forward("sm90", *prepare(case, torch.float32), mode=mode))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", everyday(CASES, ["f_128_causal", "f_72_causal"]))
def test_backward(case: Case) -> None:
    for mode in ("sync", "async"):
        check_case("sm90", case, dtype=torch.float32, mode=mode)


@pytest.mark.thorough
def test_a_group_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_plan, "LONG_LOOP", 1)
    case = Case("parts", 70, 90, batch=1, heads=8, heads_k=1, dim=128, mask=causal)
    machine = replace(MACHINES["sm90"], sms=8)
    assert backward_plan.group_parts(prepare(case, torch.float32)[0], machine.sms) == 2
    check_case("sm90", case, dtype=torch.float32, machine=machine)


@pytest.mark.thorough
def test_gradients_are_the_same_bits_in_any_order() -> None:
    p, inputs = prepare(BY_NAME["f_64_causal"], torch.float32)
    first, *others = (gradients("sm90", p, inputs, seed=seed) for seed in (0, 1, 2))
    assert all(torch.equal(x, y) for other in others for x, y in zip(first[:3], other[:3], strict=True))


# ---- accuracy --------------------------------------------------------------------------------------------------------


def test_scores_of_ten_thousand() -> None:
    """An ulp of such a score changes its weight by a thousandth, in any fp32 computation."""
    problem, inputs = prepare(replace(SMALL, len_k=150), torch.float32)  # three blocks of keys: O is rescaled
    inputs = inputs._replace(q=inputs.q * 100, k=inputs.k * 100)
    scores = (inputs.q.double() @ inputs.k.double().transpose(2, 3)) * problem.scale
    assert scores.abs().max() > 1e4
    exact, same = (torch.softmax(s, -1) for s in (scores, (inputs.q @ inputs.k.transpose(2, 3)) * problem.scale))
    found, lse = forward("sm90", problem, inputs)
    tolerance.check("out", found, exact @ inputs.v.double(), same @ inputs.v)
    assert torch.allclose(lse.double(), scores.logsumexp(-1), rtol=2e-7, atol=0)


def test_powers_of_two_change_nothing_else() -> None:
    """Terms have the range of fp32: columns of q and k that are scaled up and down, and those of v, by 2^-60 to 2^60."""
    problem, inputs = prepare(SMALL, torch.float32)
    generator = torch.Generator().manual_seed(3)
    by, of_v = (2.0 ** torch.randint(-60, 61, (64,), generator=generator) for _ in range(2))
    plain = forward("sm90", problem, inputs)
    scaled = forward("sm90", problem, inputs._replace(q=inputs.q * by, k=inputs.k / by, v=inputs.v * of_v))
    assert torch.equal(scaled[0], plain[0] * of_v) and torch.equal(scaled[1], plain[1])


S_LOOP = "for (int i = 1; i < kTermProducts; ++i)\n    Product::template ss<"
PV_LOOP = "for (int i = 1; i < kTermProducts; ++i)\n    Product::template rs_t<"
WEIGHT = "const u32 both = packed[term][i] = pack2<bf16>(a, b);"
DROPPED = {
    "third_term_in_memory": ("term[2] = rest - term[1];", "term[2] = 0.f;"),
    "third_term_of_weights": (WEIGHT, f"{WEIGHT} if (term == 2) packed[term][i] = 0;"),
    **{
        f"{name}_{left}{right}": (loop, loop.replace(")\n", f") if (i != {i})\n"))
        for name, loop in (("scores", S_LOOP), ("output", PV_LOOP))
        for i, (left, right) in enumerate(((2, 0), (1, 1), (0, 1), (1, 0)), 1)
    },
    "scores_02": ("i == 0 ? 2 : i == 2 || i == 3 ? 1 : 0", "i == 2 || i == 3 ? 1 : i == 0 ? kTerms : 0"),
}


def edit_of(name: str) -> Callable[[str], str]:
    old, new = DROPPED[name]
    return lambda source: replaced(name, source, old, new) if old in source else source


@pytest.mark.parametrize("name", everyday(list(DROPPED), ["third_term_in_memory", "scores_11"]))
def test_what_is_dropped_is_seen(name: str) -> None:
    problem, inputs = prepare(SMALL, torch.float32)
    with pytest.raises(AssertionError):
        check(SMALL, forward("sm90", problem, inputs, edit=edit_of(name)))


def check_gradients(damage: Callable[[Plan], Plan] = lambda plan: plan) -> None:
    """Check without the floors of `gradient_floor`, which are larger than the errors."""
    problem, inputs = prepare(SMALL, torch.float32)
    plan, tensors, finish = planned("sm90", problem, inputs)
    backend.launch(damage(plan), tensors)
    for name, found, exact, same in zip("qkv", finish()[:3], *expected_gradients(SMALL, torch.float32), strict=True):
        assert found is not None
        tolerance.check(f"d{name}", found, exact, same, tolerance.GRADIENTS)


def test_gradients_are_those_of_fp32() -> None:
    check_gradients()


@pytest.mark.parametrize("name", everyday(list(DROPPED), ["output_11"]))
def test_what_is_dropped_is_seen_in_gradients(name: str) -> None:
    with pytest.raises(AssertionError):
        check_gradients(lambda plan: with_source(plan, edit_of(name)))


# ---- mistakes in the order of things ---------------------------------------------------------------------------------

FALLING = replace(BY_NAME["f_64_falling"], len_q=70)
ORDER = [
    ("keys_not_released", "k.release_and_advance();", "k.next();"),
    ("values_not_released", "v.release_and_advance();", "v.next();"),
    ("queries_not_released", "if (elected()) q.release();\n", "\n"),
    ("queries_not_waited_for", "q.wait_full();\n      const Tile", "const Tile"),
    ("values_not_waited_for", "v.wait_full();\n", "\n"),
    ("output_not_rescaled", "fma(r.o[i], r.softmax.alpha[fragment_row(i)], o[i])", "r.o[i] + o[i]"),
]
ORDER_OF_GRADIENTS = [
    Mutation(name, old, new, replace(FALLING, scores="normal"))
    for name, old, new in (
        ("q_overwritten", "bar_sync(kBarrierConsumers, 256);  // nobody reads Q any more\n      if (", "if ("),
        ("dq_read_too_early", "bar_sync(kBarrierConsumers, 256);\n      if (consumer == 0)", "if (consumer == 0)"),
        ("buffer_of_the_other", "ring.next();  // the other consumer's", ""),
        ("same_keys", "all.begin() - consumer;", "all.begin();"),
        ("queries_released_early", "Dkv::exponentials(s, keys, head, m);\n      q.release", "q.release"),
    )
]


@pytest.mark.parametrize("name, old, new", [pytest.param(*m, id=m[0], marks=pytest.mark.thorough) for m in ORDER])
def test_a_mistake_is_caught(name: str, old: str, new: str) -> None:
    problem, inputs = prepare(FALLING, torch.float32)
    with pytest.raises((EmulatorError, AssertionError)):
        for seed in (1, 2, 3):
            check(FALLING, forward("sm90", problem, inputs, mode="async", seed=seed, sms=1,
                                   edit=lambda s: replaced(name, s, old, new) if old in s else s))  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("mutation", ORDER_OF_GRADIENTS, ids=str)
def test_a_mistake_in_gradients_is_caught(mutation: Mutation) -> None:
    problem, inputs = prepare(mutation.case, torch.float32)
    with pytest.raises((EmulatorError, AssertionError)):
        for seed in (1, 2, 3):
            check_found(problem, inputs, gradients("sm90", problem, inputs, seed=seed, mutation=mutation),
                        *expected_gradients(mutation.case, torch.float32))  # fmt: skip


# ---- numbers that are none -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("none", [torch.nan, torch.inf, -torch.inf])
def test_nan_goes_where_it_belongs(none: float) -> None:
    """NaN stays in its rows, and so does infinity, which becomes NaN, in queries, too."""
    problem, inputs = prepare(SMALL, torch.float32)
    clean, _ = forward("sm90", problem, inputs)
    q, v = inputs.q.clone(), inputs.v.clone()
    q[..., 3, 5] = v[..., 7, 11] = none
    out, lse = forward("sm90", problem, inputs._replace(q=q, v=v))
    wrong = torch.zeros_like(out, dtype=torch.bool)
    wrong[..., 3, :] = wrong[..., 11] = True
    assert out[wrong].isnan().all() and torch.equal(out[~wrong], clean[~wrong])
    assert lse[..., 3].isnan().all() and int(lse.isnan().sum()) == 1


def test_the_largest_numbers_and_infinity() -> None:
    """bf16 would round the largest number to infinity. An infinite one has NaN among its terms."""
    problem, inputs = prepare(SMALL, torch.float32)
    clean, _ = forward("sm90", problem, inputs)
    v = inputs.v.clone()
    v[..., 5, 9], v[..., 5, 4] = torch.finfo(torch.float32).max, torch.inf
    out, _ = forward("sm90", problem, inputs._replace(v=v))
    weights = torch.softmax(inputs.q.double() @ inputs.k.double().transpose(2, 3) * problem.scale, -1)
    torch.testing.assert_close(out[..., 9].double(), (weights @ v.double())[..., 9], rtol=1e-5, atol=0)
    assert out[..., 4].isnan().all()
    others = [c for c in range(64) if c not in (4, 9)]
    assert torch.equal(out[..., others], clean[..., others])


@pytest.mark.thorough
def test_a_bias_and_softcap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The score functions are computed through the public call."""
    monkeypatch.setenv("STROBE_EMULATE", "sm90")
    q, k, v = (torch.randn(1, n, 2, 64, generator=torch.Generator().manual_seed(n)) for n in (40, 70, 71))
    given = {"mask": causal, "bias": torch.randn(1, 2, 40, 70), "softcap": 5.0}
    out = strobe.attention(q, k, v[:, 1:], **given, backend="emulator")
    exact = strobe.attention(q.double(), k.double(), v[:, 1:].double(), **given, backend="reference")
    same = strobe.attention(q, k, v[:, 1:], **given, backend="reference")
    tolerance.check("out", out, exact, same)


@pytest.mark.thorough
def test_training_through_the_public_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a bias is computed, too, which both consumers of the kernel for dQ write."""
    monkeypatch.setenv("STROBE_EMULATE", "sm90")
    shapes = [(1, 40, 2, 64), (1, 70, 2, 64), (1, 70, 2, 64), (1, 2, 40, 70)]
    leaves = [torch.randn(s, generator=torch.Generator().manual_seed(i)).requires_grad_() for i, s in enumerate(shapes)]

    def gradients_by(backend: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        inputs = [t.detach().to(dtype).requires_grad_() for t in leaves]
        out = strobe.attention(*inputs[:3], bias=inputs[3], mask=causal, backend=backend)
        return torch.autograd.grad(out.square().sum(), inputs)

    exact, same = gradients_by("reference", torch.float64), gradients_by("tiled", torch.float32)
    for name, found, e, s in zip("qkvb", gradients_by("emulator", torch.float32), exact, same, strict=True):
        tolerance.check(f"d{name}", found, e, s, tolerance.GRADIENTS, floor=2e-5)


# ---- what it does not take -------------------------------------------------------------------------------------------


def test_gradients_of_sinks_alone_need_no_terms() -> None:
    problem, inputs = prepare(BY_NAME["f_64_sinks"], torch.float32)
    plan, _, _ = planned("sm90", problem, inputs, wanted=("sinks",))
    assert [launch.kernel.template for launch in plan.launches] == ["backward_delta"]
    assert not [name for name in plan.workspace if "terms" in name]


def test_what_is_left_to_others() -> None:
    problem, _ = prepare(CASES[0], torch.float32)
    family = FAMILIES["sm90"]
    assert family.limits(problem) is None
    assert "float32 inputs" in str(FAMILIES["sm80"].limits(problem))
    changes: list[tuple[dict[str, Any], str]] = [
        ({"dim": 136, "dim_v": 136}, "head dim 136; the kernels take multiples of 8 up to 128 with float32 inputs"),
        ({"dim_v": 36}, "value head dim 36; the kernels take multiples of 8"),
        ({"dropout": 0.1}, "dropout with float32 inputs"),
        ({"partial": True}, "no partial results with float32 inputs"),
        ({"state": State((1, 1), (1, 1, 1))}, "no merging with a state with float32 inputs"),
        ({"q": replace(problem.q, positions=True)}, "parts of longer sequences with float32 inputs"),
        ({"scale": -1.0}, "scale -1.0"),
    ]
    for change, reason in changes:
        assert reason in str(family.limits(replace(problem, **change)))
