"""`torch.func`: gradients, Jacobians and batches of them, as of any operation of PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import strobe

q, k, v = (torch.randn(1, n, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (4, 5, 6))
v = v[:, :5]
many = torch.randn(3, 1, 4, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


def ours(q: torch.Tensor, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
    return strobe.attention(q, k, v)


def theirs(q: torch.Tensor, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)


def loss(f):  # type: ignore[no-untyped-def]
    return lambda q: f(q).square().sum()


TRANSFORMS = {
    "grad": lambda f: grad(loss(f))(q),
    "vjp": lambda f: vjp(lambda k, v: f(q, k, v), k, v)[1](torch.ones_like(q)),
    "jacrev": lambda f: jacrev(f)(q),
    "jacrev of jacrev": lambda f: jacrev(jacrev(loss(f)))(q),
    "vmap": lambda f: vmap(f)(many),
    "vmap of grad": lambda f: vmap(grad(loss(f)))(many),
    "vmap along a later axis": lambda f: vmap(lambda k: f(q, k), in_dims=2)(k.unsqueeze(2).expand(1, 5, 3, 2, 3)),
    "vmap of keys and values": lambda f: vmap(lambda k, v: f(q, k, v), in_dims=(0, None))(
        many.new_ones(3, *k.shape), v
    ),
    "vmap of vmap": lambda f: vmap(vmap(f))(many.unsqueeze(0)),
    "vmap of nothing": lambda f: vmap(f)(many[:0]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_as_of_pytorchs_own(name: str) -> None:
    torch.testing.assert_close(TRANSFORMS[name](ours), TRANSFORMS[name](theirs))


CALLS = {
    "mask": (lambda m: strobe.attention(q, k, v, mask=m), torch.rand(3, 4, 5) > 0.3),
    "bias": (lambda b: strobe.attention(q, k, v, bias=b), torch.randn(3, 4, 5, dtype=torch.float64)),
    "sinks": (lambda s: strobe.attention(q, k, v, sinks=s), torch.randn(3, 2, dtype=torch.float64)),
    "dropout": (lambda q: strobe.attention(q, k, v, dropout=0.4, seed=5), many),
    "lse": (lambda q: strobe.attention(q, k, v, return_lse=True)[1], many),
    "softcap, 3 axes": (lambda q: strobe.attention(q[0], k[0], v[0], softcap=2.0, layout="bshd"), many),
    "varlen": (lambda q: strobe.attention_varlen(q[0], k[0], v[0], CU_Q, CU_K), many),
}
CU_Q, CU_K = torch.tensor([0, 1, 4], dtype=torch.int32), torch.tensor([0, 3, 5], dtype=torch.int32)


@pytest.mark.parametrize("name", CALLS)
def test_vmap_is_a_call_for_each_example(name: str) -> None:
    function, examples = CALLS[name]
    torch.testing.assert_close(vmap(function)(examples), torch.stack([function(x) for x in examples]))


@pytest.mark.parametrize("name", ["bias", "sinks", "varlen"])
def test_vmap_of_grad_is_a_gradient_for_each_example(name: str) -> None:
    function, examples = CALLS[name]
    found = vmap(grad(lambda x: function(x).square().sum()))(examples)
    torch.testing.assert_close(found, torch.stack([grad(lambda x: function(x).square().sum())(x) for x in examples]))


def test_batched_cotangents() -> None:
    leaf = q.clone().requires_grad_()
    out = strobe.attention(leaf, k, v)
    directions = torch.randn(3, *out.shape, dtype=torch.float64)
    (found,) = torch.autograd.grad(out, leaf, directions, is_grads_batched=True, retain_graph=True)
    expected = [torch.autograd.grad(out, leaf, d, retain_graph=True)[0] for d in directions]
    torch.testing.assert_close(found, torch.stack(expected))


def test_forward_mode_is_refused_in_words() -> None:
    with pytest.raises(strobe.Unsupported, match="no forward-mode derivative; reverse mode"):
        jvp(ours, (q,), (torch.ones_like(q),))
