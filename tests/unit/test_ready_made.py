"""Masks and scores that come with the library, against what they are elsewhere, written out pair by pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import strobe


def inputs(len_q: int, len_k: int, heads: int = 2, batch: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(len_q)
    return [torch.randn(batch, n, heads, 8, dtype=torch.float64, requires_grad=True) for n in (len_q, len_k, len_k)]


def with_bias(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return ((q @ k.mT / 8**0.5 + bias).softmax(-1) @ v).transpose(1, 2)


def same_with_gradients(found: torch.Tensor, expected: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected)
    of_found, of_expected = (torch.autograd.grad(out.square().sum(), leaves) for out in (found, expected))
    for a, b in zip(of_found, of_expected, strict=True):
        torch.testing.assert_close(a, b)


def test_documents() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 5]], dtype=torch.int32)
    same = ids[:, None, 2:, None] == ids[:, None, None, :]
    assert torch.equal(strobe.documents(ids).dense(5, 7, 2), same)
    causal = torch.ones(5, 7).tril(2).bool()
    assert torch.equal((strobe.causal & strobe.documents(ids[0].long())).dense(5, 7), same[0, 0] & causal)
    q, k, v = inputs(5, 7)
    torch.testing.assert_close(
        strobe.attention(q, k, v, mask=strobe.documents(ids)), strobe.attention(q, k, v, mask=same)
    )


def test_relative_bias() -> None:
    x, table = inputs(6, 9), torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    offset = torch.arange(9) - torch.arange(3, 9)[:, None]
    bias = table[:, (offset + 4).clamp(0, 8)]  # beyond, the ends
    same_with_gradients(strobe.attention(*x, score=strobe.relative_bias(table)), with_bias(*x, bias), [*x, table])


def t5_bucket(relative: torch.Tensor, bidirectional: bool, buckets: int, max_distance: int) -> torch.Tensor:
    """Return the bucket as transformers' T5Attention._relative_position_bucket has it."""
    found = torch.zeros_like(relative)
    if bidirectional:
        buckets //= 2
        found += (relative > 0).long() * buckets
        relative = relative.abs()
    else:
        relative = -torch.min(relative, torch.zeros_like(relative))
    exact = buckets // 2
    scale = torch.log(torch.tensor(max_distance / exact))
    far = exact + (torch.log(relative.float() / exact) / scale * (buckets - exact)).long()
    return found + torch.where(relative < exact, relative, far.clamp(max=buckets - 1))


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets, max_distance", [(32, 128), (8, 20)])
def test_t5_bias(bidirectional: bool, buckets: int, max_distance: int) -> None:
    x, table = inputs(40, 300), torch.randn(buckets, 2, dtype=torch.float64, requires_grad=True)
    relative = torch.arange(300) - torch.arange(260, 300)[:, None]
    bias = table[t5_bucket(relative, bidirectional, buckets, max_distance)].permute(2, 0, 1)
    score = strobe.t5_bias(table, bidirectional=bidirectional, max_distance=max_distance)
    same_with_gradients(strobe.attention(*x, score=score), with_bias(*x, bias), [*x, table])


@pytest.mark.parametrize("make", [strobe.t5_bias, lambda table: strobe.relative_bias(table.t())], ids=["t5", "view"])
def test_a_kept_bias_follows_its_table(make: Callable[[torch.Tensor], strobe.Score]) -> None:
    """Through steps of an optimiser, with one score for all of them."""
    x, table = inputs(6, 9), torch.randn(31, 2, dtype=torch.float64, requires_grad=True)
    score, optimiser = make(table), torch.optim.SGD([table], lr=0.1)
    for _ in range(3):
        expected = strobe.attention(*x, score=make(table.detach().clone()))
        same_with_gradients(strobe.attention(*x, score=score), expected, x)
        optimiser.zero_grad()
        strobe.attention(*x, score=score).square().sum().backward()
        before = table.detach().clone()
        optimiser.step()
        assert not torch.equal(before, table)


@pytest.mark.parametrize("radius", [1, (0, 2)])
def test_neighbourhood(radius: Any) -> None:
    height, width, (down, across) = 4, 6, (radius, radius) if isinstance(radius, int) else radius
    found = strobe.neighbourhood(height, width, radius).dense(24, 24).view(height, width, height, width)
    assert (found.sum((2, 3)) == (2 * down + 1) * (2 * across + 1)).all()
    assert found[2, 3, 2 - down : 3 + down, 3 - across : 4 + across].all()
    assert found[0, 5, : 2 * down + 1, 5 - 2 * across :].all()
    longer = strobe.neighbourhood(height, width, radius).dense(30, 30)
    assert not longer[:, 24:].any() and torch.equal(longer[24:, :24], longer[18:24, :24])  # as the last row sees


def test_tree() -> None:
    parents = [-1, 0, 0, 2, 1, 2, -1, 6, 4]  # in no order of depth
    expected = torch.eye(9, dtype=torch.bool)
    for i in range(9):
        at = i
        while (at := parents[at]) >= 0:
            expected[i, at] = True
    assert torch.equal(strobe.tree(parents).dense(9, 9), expected)
    assert torch.equal(strobe.tree(torch.tensor(parents)).dense(9, 9), expected)
    behind = strobe.tree(parents, first=4).dense(9, 13)  # keys that all of them see
    assert behind[:, :4].all() and torch.equal(behind[:, 4:], expected)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: strobe.documents(torch.ones(3)), "ids must be a tensor of integers"),
        (lambda: strobe.documents([0, 1]), "ids must be a tensor of integers"),
        (lambda: strobe.relative_bias(torch.ones(2, 4)), r"table must be a tensor \(heads, 2 n - 1\)"),
        (lambda: strobe.t5_bias(torch.ones(3, 2)), "at least 4 buckets"),
        (lambda: strobe.t5_bias(torch.ones(32, 2), max_distance=8), "max_distance must be greater than 8"),
        (lambda: strobe.neighbourhood(4, 4, 2), "at most the height 4"),
        (lambda: strobe.tree([0]), "parents.0. leads round in a circle"),
        (lambda: strobe.tree([-1, 2, 1]), "leads round in a circle"),
        (lambda: strobe.tree([-1, 5]), "parents.1. is 5"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_names() -> None:
    assert repr(strobe.documents(torch.arange(3))) == "strobe.mask_function(documents)"
    assert repr(strobe.relative_bias(torch.ones(2, 3))) == "strobe.relative_bias"
