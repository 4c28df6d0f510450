"""Attention under torch.autocast behaves as PyTorch's own does: it casts its inputs, and computes as it always does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import strobe

ATTENTION = {
    "attention": lambda q, k, v: strobe.attention(q, k, v),
    "window": lambda q, k, v: strobe.attention(q, k, v, mask=strobe.window(3, 0)),
    "sdpa": lambda q, k, v: strobe.sdpa(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2),
}


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.bfloat16, torch.float32, torch.float32)], ids=str)
def test_inputs_are_cast_and_may_be_mixed(dtypes: tuple[torch.dtype, ...], name: str) -> None:
    tensors = [torch.randn(1, 20, 2, 8).to(d) for d in dtypes]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ATTENTION[name](*tensors)
        theirs = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in tensors))
    assert found.dtype == theirs.dtype == torch.bfloat16
    assert torch.equal(found, ATTENTION[name](*(t.bfloat16() for t in tensors)))


def test_float64_is_left_alone() -> None:
    q = torch.randn(1, 20, 2, 8, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert strobe.attention(q, q, q).dtype == torch.float64


def test_outside_of_autocast_mixed_dtypes_are_an_error() -> None:
    q = torch.randn(1, 20, 2, 8)
    with pytest.raises(TypeError, match="k has dtype torch.bfloat16, q has torch.float32"):
        strobe.attention(q, q.bfloat16(), q)


def test_gradients_have_the_dtype_of_the_inputs() -> None:
    q = torch.randn(1, 20, 2, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        strobe.attention(q, q, q, mask=strobe.causal).sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32


def test_second_derivatives_are_not_cast() -> None:
    """Called outside, differentiated inside: the operations of which a backend is made are no business of autocast's."""
    q = torch.randn(1, 8, 2, 8, requires_grad=True)

    def penalty() -> torch.Tensor:
        (g,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        return torch.autograd.grad(g.square().sum(), q)[0]

    out = strobe.attention(q, q, q)
    expected = penalty()
    out = strobe.attention(q, q, q)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(penalty(), expected)
