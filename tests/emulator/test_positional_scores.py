"""Scores that look at positions, in every kernel and direction: each entry of a fragment knows where it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from everyday import everyday

import strobe
from strobe.emulator import compiler
from strobe.variants.expression import DIAGONAL, Expr, K, S
from strobe.variants.score import Score

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

DISTANCE = Expr("float", (Expr("iabs", (DIAGONAL - K,)),))
DECAY = Score(Expr("tanh", (S,)) * Expr.of(2.0) - DISTANCE * Expr.of(0.05), "decay")


def results(backend: str, tensors: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    call = strobe.attention_varlen if "cu_q" in options else strobe.attention
    out, lse = call(*leaves, score=DECAY, backend=backend, return_lse=True, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    return [out, lse, *torch.autograd.grad((out.float() * weights).sum() + lse.sum(), leaves)]


CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "packed_gqa": ("sm90", 64, 9, {"mask": strobe.causal}),
    "two_kernels": ("sm90", 192, 70, {"mask": strobe.window(30, 5)}),
    "ampere": ("sm80", 64, 70, {"mask": strobe.causal}),
    "varlen": ("sm90", 64, 70, {"cu_q": (0, 30, 70), "cu_k": (0, 50, 100), "mask": strobe.causal}),
}


@pytest.mark.parametrize("name", everyday(list(CASES), ["ampere", "varlen"]))
def test_a_score_of_positions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, dim, rows, options = CASES[name]
    monkeypatch.setenv("STROBE_EMULATE", family)
    torch.manual_seed(0)
    cu = {n: torch.tensor(c, dtype=torch.int32) for n, c in options.items() if n.startswith("cu")}
    lead = () if cu else (1,)
    tensors = [torch.randn(*lead, n, heads, dim).bfloat16() for n, heads in ((rows, 2), (100, 1), (100, 1))]
    found = results("emulator", tensors, **(options | cu))
    exact = results("tiled", [t.double() for t in tensors], **(options | cu))
    for x, e in zip(found, exact, strict=True):
        assert (x.double() - e).abs().max() <= 0.02 * e.abs().max()
    wrong = results("tiled", [t.double() for t in tensors], **(options | cu | {"scale": 0.3}))
    assert (wrong[0] - exact[0]).abs().max() > 0.04 * exact[0].abs().max()  # the bound above tells scores apart


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_keys_behind_those_in_use_are_not_multiplied(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN there comes out of no gradient, and those keys have the gradient 0."""
    from strobe.call.attend import attend
    from strobe.problem.arguments import Arguments
    from strobe.variants.mask import used_keys

    monkeypatch.setenv("STROBE_EMULATE", family)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 1, 64).bfloat16() for n in (40, 100, 100))
    used = (70, 90)
    for i, n in enumerate(used):
        k[i, n:], v[i, n:] = torch.nan, torch.nan
    positions = torch.tensor([(0, 40, 0, n) for n in used], dtype=torch.int32)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = attend(Arguments(*leaves, mask=strobe.causal & used_keys, positions=positions, backend="emulator"))
    found = torch.autograd.grad(out.float().square().sum(), leaves)
    for i, n in enumerate(used):
        one = [t[i : i + 1, :length].detach().requires_grad_() for t, length in ((q, 40), (k, n), (v, n))]
        alone = strobe.attention(*one, mask=strobe.causal, backend="tiled")
        exact = torch.autograd.grad(alone.float().square().sum(), one)
        for g, e in zip(found, exact, strict=True):
            torch.testing.assert_close(g[i : i + 1, : e.shape[1]].float(), e.float(), atol=0.06, rtol=0.05)
        assert not found[1][i, n:].any() and not found[2][i, n:].any()
