"""`strobe.sdpa` takes what torch.nn.functional.scaled_dot_product_attention takes, and gives the same."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

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
    "keys with more axes": lambda: ((r(4, 5, 8), r(2, 4, 6, 8), r(2, 4, 6, 8)), {}),
    "queries with more axes": lambda: ((r(3, 2, 4, 5, 8), r(4, 6, 8), r(6, 8)), {"is_causal": True}),
    "two axes against four": lambda: ((r(5, 8), r(2, 4, 6, 8), r(2, 4, 6, 8)), {"attn_mask": r(5, 6) > -1}),
    "head dim 0": lambda: ((r(2, 4, 5, 0), r(2, 4, 6, 0), r(2, 4, 6, 8)), {"is_causal": True}),
    "every head dim 0": lambda: ((r(2, 4, 5, 0), r(2, 4, 6, 0), r(2, 4, 6, 0)), {}),
    "causal bias": lambda: ((r(2, 4, 6, 8),) * 3, {"attn_mask": causal_lower_right(6, 6)}),
    "upper left": lambda: ((r(2, 4, 5, 8), r(2, 4, 6, 8), r(2, 4, 6, 8)), {"attn_mask": causal_upper_left(5, 6)}),
    "lower right": lambda: ((r(2, 4, 5, 8), r(2, 4, 9, 8), r(2, 4, 9, 8)), {"attn_mask": causal_lower_right(5, 9)}),
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
        expected = F.scaled_dot_product_attention(*tensors, **theirs)
    found = strobe.sdpa(*tensors, **options)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, expected)


def test_dropout_of_everything() -> None:
    q = r(1, 2, 3, 4).requires_grad_()
    out = strobe.sdpa(q, q, q, dropout_p=1.0)
    out.sum().backward()
    assert (out == 0).all() and (q.grad == 0).all()  # type: ignore[union-attr]


def test_heads_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="query has 4 heads, key has 2, value has 2; pass enable_gqa=True"):
        strobe.sdpa(r(1, 4, 3, 8), r(1, 2, 3, 8), r(1, 2, 3, 8))


ERRORS = {
    "one axis": ((r(8), r(8), r(8)), {}, "at least 2 axes; got 1, 1, 1"),
    "heads": ((r(1, 4, 3, 8), r(1, 2, 3, 8), r(1, 2, 3, 8)), {}, "query has 4 heads, key has 2"),
    "dtype": ((r(1, 4, 3, 8), r(1, 4, 3, 8, dtype=torch.float64), r(1, 4, 3, 8)), {}, "dtype torch.float64, q has"),
    "head dim": ((r(1, 4, 3, 8), r(1, 4, 3, 4), r(1, 4, 3, 8)), {}, "disagree in head dim: 8 and 4"),
    "shape of the mask": ((r(1, 4, 3, 8),) * 3, {"attn_mask": r(3, 4) > 0}, "does not broadcast"),
    "both masks": ((r(1, 4, 3, 8),) * 3, {"attn_mask": r(3, 3) > 0, "is_causal": True}, "attn_mask must be None"),
    "integers": ((r(1, 4, 3, 8).int(),) * 3, {}, "q has dtype torch.int32"),
    "dropout": ((r(1, 4, 3, 8),) * 3, {"dropout_p": 1.5}, "dropout must be"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_runtime_errors_as_those_of_pytorch(name: str) -> None:
    """Callers who then try something else catch those."""
    tensors, options, message = ERRORS[name]
    with pytest.raises(RuntimeError, match=message) as found:
        strobe.sdpa(*tensors, **options)
    assert isinstance(found.value, ValueError) and isinstance(found.value, TypeError)


def test_a_causal_bias_of_other_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="a causal bias of 5 queries and 5 keys; there are 5 queries and 6 keys"):
        strobe.sdpa(r(2, 4, 5, 8), r(2, 4, 6, 8), r(2, 4, 6, 8), attn_mask=causal_lower_right(5, 5))


def jagged(*lengths: int, heads: int = 2) -> torch.Tensor:
    return torch.nested.nested_tensor([r(n, heads, 8) for n in lengths], layout=torch.jagged).transpose(1, 2)


def test_jagged_tensors_with_gaps_are_refused() -> None:
    lengths = torch.tensor([3, 5, 2])
    gaps = torch.nested.narrow(r(3, 6, 2, 8), 1, torch.tensor([0, 1, 4]), lengths, layout=torch.jagged).transpose(1, 2)
    whole = jagged(3, 5, 2)
    for tensors in ((gaps, whole, whole), (whole, gaps, gaps)):
        with pytest.raises(ValueError, match="has gaps between its sequences"):
            strobe.sdpa(*tensors)


def test_jagged_keys_and_values_have_the_same_lengths() -> None:
    q, k, v = jagged(3, 5, 1), jagged(4, 4, 1), jagged(4, 4, 1)  # of equal offsets, but not of the same
    found = strobe.sdpa(q, k, v).transpose(1, 2).unbind()
    for x, y, z, out in zip(*(t.transpose(1, 2).unbind() for t in (q, k, v)), found, strict=True):
        one = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (x, y, z)))
        torch.testing.assert_close(out, one.transpose(0, 1))
    with pytest.raises(ValueError, match="key and value must have sequences of the same lengths"):
        strobe.sdpa(q, k, jagged(1, 4, 4))


def test_jagged_heads_are_grouped_on_request() -> None:
    q, k = jagged(3, 5, 1, heads=4), jagged(3, 5, 1)
    with pytest.raises(ValueError, match="query has 4 heads, key has 2, value has 2; pass enable_gqa=True"):
        strobe.sdpa(q, k, k)
    found = strobe.sdpa(q, k, k, enable_gqa=True).transpose(1, 2).unbind()
    for x, y, out in zip(*(t.transpose(1, 2).unbind() for t in (q, k)), found, strict=True):
        x, y = (t.transpose(0, 1) for t in (x, y))
        torch.testing.assert_close(out, F.scaled_dot_product_attention(x, y, y, enable_gqa=True).transpose(0, 1))


def test_jagged_in_another_axis_is_refused() -> None:
    x = jagged(3, 5, 1).transpose(1, 2)
    with pytest.raises(ValueError, match="query must be a jagged nested tensor .batch, heads, length, dim."):
        strobe.sdpa(x, x, x)


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


def test_sharded_tensors_with_a_causal_bias(mesh: object) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    q, k = r(2, 4, 6, 8), r(2, 4, 9, 8)
    sharded = [distribute_tensor(t, mesh, [Shard(1)]) for t in (q, k, k)]  # type: ignore[arg-type]
    out = strobe.sdpa(*sharded, attn_mask=causal_lower_right(6, 9))
    expected = F.scaled_dot_product_attention(q, k, k, attn_mask=causal_lower_right(6, 9))
    torch.testing.assert_close(out.full_tensor(), expected)  # type: ignore[attr-defined]
