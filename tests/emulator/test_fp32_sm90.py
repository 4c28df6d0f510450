"""fp32 inputs on the emulated Hopper kernels, against float64 and by the tolerance of fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tolerance
import torch
from cases import Case
from emulator.emulate import forward
from emulator.mutation import replaced
from everyday import everyday
from oracle import expected, prepare

import strobe
from strobe.cuda.families import FAMILIES
from strobe.emulator import compiler
from strobe.mask import causal, prefix, window
from strobe.problem import State

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

LENGTHS = ((70, 130), (0, 3), (65, 0), (129, 90), (1, 1))
CASES = [
    Case("f_128", 130, 200, batch=1, heads=2, heads_k=1, dim=128),
    Case("f_128_causal", 150, 150, batch=1, heads=4, heads_k=2, dim=128, mask=causal),
    Case("f_128_window", 130, 260, batch=1, dim=128, mask=window(70, 20)),
    Case("f_128_packed", 0, 0, heads=4, heads_k=1, dim=128, lengths=LENGTHS),
    Case("f_128_sliced", 131, 100, dim=128, memory="sliced", mask=causal),
    Case("f_128_huge", 64, 260, batch=1, dim=128, scores="huge", mask=causal),
    Case("f_128_rising", 64, 200, batch=1, dim=128, scores="rising"),
    Case("f_72_causal", 130, 200, batch=1, heads=2, heads_k=1, dim=72, mask=causal),
    Case("f_64", 300, 200, heads=3, heads_k=3, dim=64),
    Case("f_64_causal", 150, 100, batch=1, dim=64, mask=causal),  # the first rows see nothing
    Case("f_64_window_packed", 0, 0, dim=64, mask=window(40, 7), lengths=LENGTHS),
    Case("f_64_prefix", 100, 150, batch=1, dim=64, mask=prefix(90)),
    Case("f_64_falling", 100, 300, batch=1, dim=64, scores="falling"),
    Case("f_64_sinks", 70, 140, batch=1, dim=64, sinks=True, mask=causal),
    Case("f_64_softcap", 70, 140, batch=1, dim=64, softcap=3.0),
    Case("f_40_pair", 1, 1, batch=1, heads=1, heads_k=1, dim=40),
    Case("f_40_decode", 1, 150, heads=4, heads_k=2, dim=40),
    Case("f_64_128", 70, 100, batch=1, dim=64, dim_v=128),
]
EVERY_DAY = ["f_128_causal", "f_72_causal", "f_64_window_packed", "f_40_decode", "f_40_pair"]
SMALL = Case("small", 70, 24, batch=1, heads=1, heads_k=1, dim=64)  # few keys: weights that a wrong score shows in

Edit = Callable[[str], str]


def check(case: Case, found: tuple[torch.Tensor, torch.Tensor]) -> None:
    (out, lse), (same_out, same_lse) = expected(case, torch.float32)
    tolerance.check("out", found[0], out, same_out)
    tolerance.check("lse", found[1], lse, same_lse, floor=tolerance.lse_floor(same_lse))


@pytest.mark.parametrize("case", everyday(CASES, EVERY_DAY))
def test_forward(case: Case) -> None:
    for mode in ("sync", "async"):
        check(case, forward("sm90", *prepare(case, torch.float32), mode=mode))  # type: ignore[arg-type]


# ---- accuracy --------------------------------------------------------------------------------------------------------


def test_scores_of_ten_thousand() -> None:
    """An ulp of such a score changes its weight by a thousandth, in any fp32 computation."""
    problem, inputs = prepare(SMALL, torch.float32)
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


@pytest.mark.parametrize("name", everyday(list(DROPPED), ["third_term_in_memory", "scores_11"]))
def test_what_is_dropped_is_seen(name: str) -> None:
    def edit(source: str) -> str:
        old, new = DROPPED[name]
        return replaced(name, source, old, new) if old in source else source

    problem, inputs = prepare(SMALL, torch.float32)
    with pytest.raises(AssertionError):
        check(SMALL, forward("sm90", problem, inputs, edit=edit))


# ---- numbers that are none -------------------------------------------------------------------------------------------


def test_nan_goes_where_it_belongs() -> None:
    problem, inputs = prepare(SMALL, torch.float32)
    clean, _ = forward("sm90", problem, inputs)
    q, v = inputs.q.clone(), inputs.v.clone()
    q[..., 3, 5] = v[..., 7, 11] = torch.nan
    out, lse = forward("sm90", problem, inputs._replace(q=q, v=v))
    wrong = torch.zeros_like(out, dtype=torch.bool)
    wrong[..., 3, :] = wrong[..., 11] = True
    assert out[wrong].isnan().all() and torch.equal(out[~wrong], clean[~wrong])
    assert lse[..., 3].isnan().all() and int(lse.isnan().sum()) == 1


def test_the_largest_numbers_and_infinity() -> None:
    """bf16 would round the largest number to infinity. An infinite value gives no finite output: terms of weights have
    either sign, so that it is NaN."""
    problem, inputs = prepare(SMALL, torch.float32)
    clean, _ = forward("sm90", problem, inputs)
    v = inputs.v.clone()
    v[..., 5, 9], v[..., 5, 4] = torch.finfo(torch.float32).max, torch.inf
    out, _ = forward("sm90", problem, inputs._replace(v=v))
    weights = torch.softmax(inputs.q.double() @ inputs.k.double().transpose(2, 3) * problem.scale, -1)
    torch.testing.assert_close(out[..., 9].double(), (weights @ v.double())[..., 9], rtol=1e-5, atol=0)
    assert not out[..., 4].isfinite().any()
    others = [c for c in range(64) if c not in (4, 9)]
    assert torch.equal(out[..., others], clean[..., others])


def test_a_bias_and_softcap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the score functions, through the public call."""
    monkeypatch.setenv("STROBE_EMULATE", "sm90")
    q, k, v = (torch.randn(1, n, 2, 64, generator=torch.Generator().manual_seed(n)) for n in (40, 70, 71))
    given = {"mask": causal, "bias": torch.randn(1, 2, 40, 70), "softcap": 5.0}
    out = strobe.attention(q, k, v[:, 1:], **given, backend="emulator")
    exact = strobe.attention(q.double(), k.double(), v[:, 1:].double(), **given, backend="reference")
    same = strobe.attention(q, k, v[:, 1:], **given, backend="reference")
    tolerance.check("out", out, exact, same)


# ---- what it does not take -------------------------------------------------------------------------------------------


def test_what_is_left_to_others() -> None:
    problem, _ = prepare(CASES[0], torch.float32)
    family = FAMILIES["sm90"]
    assert family.limits(problem) is None
    assert "float32 inputs" in str(FAMILIES["sm80"].limits(problem))
    changes: list[tuple[dict[str, Any], str]] = [
        ({"dim": 136, "dim_v": 136}, "head dim 136; the kernels take multiples of 8 up to 128 with float32 inputs"),
        ({"dim_v": 36}, "value head dim 36; the kernels take multiples of 8"),
        ({"dropout": 0.1}, "float32 inputs with dropout"),
        ({"partial": True}, "float32 inputs with results that are merged with others"),
        ({"state": State((1, 1), (1, 1, 1))}, "float32 inputs with results that are merged with others"),
        ({"q": replace(problem.q, positions=True)}, "float32 inputs with parts of longer sequences"),
        ({"scale": -1.0}, "scale -1.0"),
    ]
    for change, reason in changes:
        assert reason in str(family.limits(replace(problem, **change)))
