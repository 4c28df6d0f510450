"""Scores through the public functions: softcap and ALiBi, forward and backward, on every backend that takes them."""

from __future__ import annotations

import functools
import operator

import pytest
import torch

import strobe
from strobe.cuda.plans.families import FAMILIES
from strobe.problem import supposed
from strobe.variants.expression import FLOAT, Expr
from strobe.variants.score import Score


def inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [torch.randn(2, n, h, 8, dtype=dtype, requires_grad=True) for n, h in ((7, 4), (11, 2), (11, 2))]


def dense_alibi(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor, causal: bool) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    rows = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    keys = torch.arange(k.shape[2])
    slopes = slopes.expand(q.shape[0], -1)[..., None, None].to(q.dtype)
    s = q @ k.mT / q.shape[-1] ** 0.5 - slopes * (rows - keys).abs()
    if causal:
        s = s.masked_fill(keys > rows, -torch.inf)
    return (s.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("backend", ["tiled", "reference", None])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_alibi(backend: str | None, causal: bool, per_sequence: bool) -> None:
    q, k, v = inputs()
    slopes = torch.rand(2, 4) if per_sequence else torch.rand(4)
    mask = strobe.causal if causal else None
    found = strobe.attention(q, k, v, mask=mask, score=strobe.alibi(slopes), backend=backend)
    expected = dense_alibi(q, k, v, slopes, causal)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad((o * weights).sum(), (q, k, v)) for o in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_second_derivatives_of_alibi() -> None:
    q, k, v = (t[:, :3].detach().requires_grad_() for t in inputs())
    score = strobe.alibi(torch.rand(4))
    assert torch.autograd.gradgradcheck(lambda *x: strobe.attention(*x, score=score), (q, k, v))


def test_alibi_of_packed_sequences_counts_from_each_beginning() -> None:
    q, k, v = (t.detach() for t in inputs())
    slopes = torch.rand(2, 4)
    cu_q, cu_k = torch.tensor([0, 7, 14], dtype=torch.int32), torch.tensor([0, 11, 22], dtype=torch.int32)
    packed = strobe.attention_varlen(
        *(t.flatten(0, 1) for t in (q, k, v)), cu_q, cu_k, mask=strobe.causal, score=strobe.alibi(slopes)
    )
    dense = strobe.attention(q, k, v, mask=strobe.causal, score=strobe.alibi(slopes))
    torch.testing.assert_close(packed, dense.flatten(0, 1))


def test_a_call_with_other_slopes_is_another_call() -> None:
    """The slopes are inputs: equal-looking scores share what is bound, not their numbers."""
    q, k, v = (t.detach() for t in inputs())
    for _ in range(2):
        slopes = torch.rand(4)
        found = strobe.attention(q, k, v, score=strobe.alibi(slopes))
        torch.testing.assert_close(found, dense_alibi(q, k, v, slopes, False))


def test_alibi_is_traced_by_structure() -> None:
    q, k, v = (t.detach() for t in inputs())

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        return strobe.attention(q, k, v, score=strobe.alibi(slopes))

    for slopes in torch.rand(2, 4):
        torch.testing.assert_close(compiled(q, slopes), dense_alibi(q, k, v, slopes, False))


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_kernels_take_a_few_captured_tensors(family: str) -> None:
    def limits(score: Score) -> str | None:
        problem = supposed(torch.device("cuda"), torch.bfloat16, *[(1, 64, 4, 64)] * 3, score=score)
        return FAMILIES[family].limits(problem)

    slopes = torch.empty(4, device="meta")
    assert limits(strobe.alibi(slopes)) is None
    loads = [Expr("load", (i, FLOAT, Expr("var", ("h",)))) for i in range(7)]
    expr = functools.reduce(operator.add, loads, Expr("var", ("s",)))
    assert "7 captured tensors; the kernels take 6" in str(limits(Score(expr, "many", (slopes,) * 7)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"score": "alibi"}, "score must be a strobe.Score"),
        ({"score": strobe.alibi(torch.ones(3))}, "shape \\(3,\\); axis 0 is for 4 heads"),
        ({"score": strobe.alibi(torch.ones(4)), "softcap": 2.0}, "softcap and score cannot be given together"),
        ({"score": strobe.alibi(torch.ones(4, device="meta"))}, "is on meta, q is on cpu"),
    ],
)
def test_bad_scores_are_named(arguments: dict, message: str) -> None:
    q, k, v = inputs()
    with pytest.raises((TypeError, ValueError), match=message):
        strobe.attention(q, k, v, **arguments)
