"""The kernel behind `strobe.paged.append`, on the emulator: the bits that PyTorch's operations write."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import strobe
from strobe.cuda import append
from strobe.emulator import compiler
from strobe.emulator.backend import launch
from strobe.nn.rotary import angles
from strobe.paged import Rotary

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
PAGES, PAGE = 5, 4


def pools(dtype: torch.dtype, heads: int, dim: int, dim_v: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Make pools whose views are (pages, page, heads, dim)."""
    if kind == "side_by_side":
        both = torch.randn(PAGES, PAGE, heads, dim + dim_v).to(dtype)
        return both[..., :dim], both[..., dim:]
    if kind == "hnd":
        return tuple(torch.randn(PAGES, heads, PAGE, d).to(dtype).transpose(1, 2) for d in (dim, dim_v))  # type: ignore[return-value]
    return tuple(torch.randn(PAGES, PAGE, heads, d).to(dtype) for d in (dim, dim_v))  # type: ignore[return-value]


def compare(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    rotary: Rotary | None = None,
) -> None:
    """Compare with PyTorch's operations, which are told of no slots that the pool does not have."""
    expected = [t.clone() for t in (k, v)]
    known = torch.where(slots < PAGES * PAGE, slots, -1)
    strobe.paged.append(k_new, v_new, *expected, known, rotary=rotary)
    plan = append.plan(k_new, v_new, k, v, slots, rotary, "sm_80")
    assert plan is not None
    tensors = dict(zip(append.NAMES, (k_new, v_new, k, v, slots, *(rotary or ())[:3]), strict=False))
    launch(plan, tensors)
    for found, want in zip((k, v), expected, strict=True):
        assert torch.equal(found.view(torch.int16), want.view(torch.int16))


SLOTS = torch.tensor([3, -1, 19, 0, PAGES * PAGE, 7, -(1 << 20), 8])


@pytest.mark.parametrize("kind", ["apart", "side_by_side", "hnd"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows_go_to_their_slots(index: torch.dtype, kind: str) -> None:
    k, v = pools(torch.float16, 3, 24, 16, kind)
    new = torch.randn(8, 3, 40).to(torch.float16)  # new keys and values are views as well
    compare(new[..., :24], new[..., 24:], k, v, SLOTS.to(index))


def test_slots_far_beyond_the_pool_are_skipped() -> None:
    k, v = pools(torch.bfloat16, 1, 8, 8, "apart")
    far = torch.tensor([1 << 40, (1 << 32) + 3, -(1 << 40)])
    compare(*torch.randn(2, 3, 1, 8).bfloat16(), k, v, far)


@pytest.mark.parametrize("table", [torch.float32, None], ids=["fp32", "own"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_are_turned_to_the_last_bit(dtype: torch.dtype, interleaved: bool, table: torch.dtype | None) -> None:
    k, v = pools(dtype, 2, 48, 32, "apart")
    cos, sin = angles(torch.arange(30), 32, dtype=table or dtype)
    positions = torch.tensor([0, 29, 3, 17, 4, 5, 6, 11])
    new = torch.randn(8, 2, 80).to(dtype)
    compare(new[..., :48], new[..., 48:], k, v, SLOTS, Rotary(cos, sin, positions, interleaved))


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_are_rounded_before_they_are_added(interleaved: bool) -> None:
    """Equal products leave nothing over. An FMA leaves the rounding error of one."""
    k, v = pools(torch.bfloat16, 2, 48, 32, "apart")
    table, new = torch.full((30, 16), 0.1), torch.full((8, 2, 80), 3.0).bfloat16()
    compare(new[..., :48], new[..., 48:], k, v, SLOTS, Rotary(table, table, torch.arange(8), interleaved))
    assert (k.flatten(0, 1)[3, :, 0] == 0).all()


def test_rows_of_two_axes_and_positions_in_common() -> None:
    """A piece of each of two longer tensors: no single stride leads from row to row."""
    k, v = pools(torch.bfloat16, 2, 16, 16, "apart")
    new = torch.randn(2, 9, 4, 16).bfloat16()[:, 2:5]
    cos, sin = angles(torch.arange(8), 16)
    positions = torch.arange(4, 7, dtype=torch.int32).expand(2, 3)
    slots = torch.tensor([[3, 9, -1, 0], [12, 13, 14, 0]])[:, :3]
    compare(new[:, :, :2], new[:, :, 2:], k, v, slots, Rotary(cos, sin, positions))


def test_positions_outside_of_the_tables_are_clamped() -> None:
    k, v = pools(torch.bfloat16, 1, 16, 16, "apart")
    new, (cos, sin) = torch.randn(2, 1, 16).bfloat16(), angles(torch.arange(8), 16)
    slots = torch.tensor([3, 4])
    expected = k.clone()
    strobe.paged.append(new, new, expected, v.clone(), slots, rotary=(cos, sin, torch.tensor([0, 7])))
    rotary = Rotary(cos, sin, torch.tensor([-5, 1 << 40]))
    plan = append.plan(new, new, k, v, slots, rotary, "sm_80")
    assert plan is not None
    launch(plan, dict(zip(append.NAMES, (new, new, k, v, slots, *rotary[:3]), strict=True)))
    assert torch.equal(k, expected)


def test_numbers_that_are_none() -> None:
    k, v = pools(torch.bfloat16, 1, 16, 16, "apart")
    new = torch.full((1, 1, 16), torch.nan).bfloat16()
    new[..., 3:] = torch.inf
    cos, sin = angles(torch.arange(8), 16)
    slots, rotary = torch.tensor([3]), Rotary(cos, sin, torch.tensor([2]))
    expected = [k.clone(), v.clone()]
    strobe.paged.append(new, new, *expected, slots, rotary=rotary)
    plan = append.plan(new, new, k, v, slots, rotary, "sm_80")
    assert plan is not None
    launch(plan, dict(zip(append.NAMES, (new, new, k, v, slots, *rotary[:3]), strict=True)))
    torch.testing.assert_close((k, v), tuple(expected), equal_nan=True, rtol=0, atol=0)


def refused() -> dict[str, Any]:
    new, pool = torch.zeros(3, 2, 16).bfloat16(), torch.zeros(PAGES, PAGE, 2, 16).bfloat16()
    slots, cos = torch.arange(3), torch.zeros(9, 6)
    plain = {"k_new": new, "v_new": new, "k": pool, "v": pool, "slots": slots, "rotary": None}
    narrow = torch.zeros(PAGES, PAGE, 2, 12).bfloat16()
    return {
        "fp32": plain | {n: plain[n].float() for n in ("k_new", "v_new", "k", "v")},
        "dim 12": plain | {"k_new": new[..., :12], "k": narrow},
        "strides of 12": plain | {"k_new": new[..., :8], "k": narrow[..., :8]},
        "last axis": plain | {"k_new": new.mT.contiguous().mT},
        "no rows": plain | {"k_new": new[:0], "v_new": new[:0], "slots": slots[:0]},
        "other shape": plain | {"k_new": new[:2]},
        "int16": plain | {"slots": slots.short()},
        "half of a chunk": plain | {"rotary": Rotary(cos, cos, slots)},
        "fp64 tables": plain | {"rotary": Rotary(*torch.zeros(2, 9, 8).double(), slots)},
    }


@pytest.mark.parametrize("name", refused())
def test_what_the_kernel_does_not_take(name: str) -> None:
    assert append.plan(**refused()[name], arch="sm_80") is None
