"""`strobe.sdpa` takes what torch.nn.functional.scaled_dot_product_attention takes, and gives the same."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import strobe


def r(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


CALLS = {
    "plain": lambda: ((r(2, 4, 5, 8), r(2, 4, 6, 8), r(2, 4, 6, 8)), {}),
    "causal": lambda: ((r(2, 4, 5, 8), r(2, 4, 6, 8), r(2, 4, 6, 8)), {"is_causal": True}),
    "two axes": lambda: ((r(5, 8), r(6, 8), r(6, 8)), {}),
    "five axes": lambda: ((r(2, 3, 4, 5, 8), r(2, 3, 4, 6, 8), r(2, 3, 4, 6, 8)), {}),
    "grouped": lambda: ((r(2, 4, 5, 8), r(2, 2, 6, 8), r(2, 2, 6, 8)), {"enable_gqa": True}),
    "one key head for all": lambda: ((r(2, 4, 5, 8), r(2, 1, 6, 8), r(2, 1, 6, 8)), {}),
    "one value head for all": lambda: ((r(2, 4, 5, 8), r(2, 4, 6, 8), r(2, 1, 6, 8)), {}),
    "one query head for all": lambda: ((r(2, 1, 5, 8), r(2, 4, 6, 8), r(2, 4, 6, 8)), {}),
    "one sequence of keys for all": lambda: ((r(2, 4, 5, 8), r(1, 4, 6, 8), r(1, 4, 6, 8)), {}),
    "any strides": lambda: (tuple(r(2, 4, 8, 6).transpose(-1, -2) for _ in range(3)), {}),
    "boolean mask": lambda: ((r(2, 4, 5, 8), r(2, 4, 6, 8), r(2, 4, 6, 8)), {"attn_mask": r(5, 6) > -1}),
    "added mask": lambda: ((r(2, 4, 5, 8), r(2, 4, 6, 8), r(2, 4, 6, 8)), {"attn_mask": r(2, 1, 5, 6)}),
    "scale as a tensor": lambda: ((r(2, 4, 5, 8),) * 3, {"scale": torch.tensor(0.3)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_as_pytorch(name: str) -> None:
    tensors, options = CALLS[name]()
    theirs = {k: float(x) if k == "scale" else x for k, x in options.items()}
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(strobe.sdpa(*tensors, **options), F.scaled_dot_product_attention(*tensors, **theirs))


def test_dropout_of_everything() -> None:
    q = r(1, 2, 3, 4).requires_grad_()
    out = strobe.sdpa(q, q, q, dropout_p=1.0)
    out.sum().backward()
    assert (out == 0).all() and (q.grad == 0).all()  # type: ignore[union-attr]


def test_heads_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="query has 4 heads, key has 2, value has 2; pass enable_gqa=True"):
        strobe.sdpa(r(1, 4, 3, 8), r(1, 2, 3, 8), r(1, 2, 3, 8))


@pytest.mark.parametrize("is_causal", [False, True])
def test_jagged_nested_tensors(is_causal: bool) -> None:
    parts = [r(n, 2, 8) for n in (3, 5, 1)]
    leaf = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    nested = leaf.transpose(1, 2)
    found = strobe.sdpa(nested, nested, nested, is_causal=is_causal)
    for part, out in zip(parts, found.transpose(1, 2).unbind(), strict=True):
        x = part.transpose(0, 1)
        expected = F.scaled_dot_product_attention(x, x, x, is_causal=is_causal).transpose(0, 1)
        torch.testing.assert_close(out, expected)
    found.values().sum().backward()
    assert leaf.grad is not None and torch.isfinite(leaf.grad.values()).all()


@pytest.fixture(scope="module")
def mesh() -> Iterator[object]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}
    dist.init_process_group("gloo", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("axis", [0, 1, 2, None])
def test_sharded_tensors(mesh: object, axis: int | None) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    placements = [Replicate() if axis is None else Shard(axis)]
    whole = r(2, 4, 6, 8)
    q = distribute_tensor(whole, mesh, placements).requires_grad_()  # type: ignore[arg-type]
    out = strobe.sdpa(q, q, q, is_causal=True)
    assert isinstance(out, DTensor)
    torch.testing.assert_close(out.full_tensor(), F.scaled_dot_product_attention(whole, whole, whole, is_causal=True))
    out.sum().backward()
    assert q.grad is not None and isinstance(q.grad, DTensor)
