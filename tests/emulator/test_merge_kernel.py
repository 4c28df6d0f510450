"""The kernel behind `strobe.merge`, on the emulator, against PyTorch's operations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from strobe.cuda import merge
from strobe.emulator import compiler
from strobe.emulator.backend import launch
from strobe.merging import merged

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
EPS = torch.finfo(torch.float32).eps
SINKS = torch.tensor([0.5, -torch.inf, 30.0])


def states(n: int, *shape: int, dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Make states of shape (…, rows, heads, dim). Some rows have no keys in some parts, and one has none at all."""
    *leading, rows, heads, _ = shape
    outs, lses = [torch.randn(shape) for _ in range(n)], [4 * torch.randn(*leading, heads, rows) for _ in range(n)]
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        for row in {i % rows, rows - 1}:
            lse[..., row], out[..., row, :, :] = -torch.inf, 0
    return [out.to(dtype) for out in outs], lses


def compare(outs: Any, lses: Any, sinks: torch.Tensor | None = None, out: torch.Tensor | None = None) -> Any:
    expected, expected_lse = merged(outs, lses, sinks, None)
    found = torch.full(outs[0].shape, torch.nan) if out is None else out
    lse = torch.full(lses[0].shape, torch.nan)
    plan = merge.plan(outs, lses, sinks, found, lse, "sm_80")
    assert plan is not None
    tensors = (*outs, *lses, found, lse, *(() if sinks is None else (sinks,)))
    launch(plan, dict(zip(merge.names(len(outs), sinks is not None), tensors, strict=True)))
    torch.testing.assert_close(lse, expected_lse, rtol=4 * EPS, atol=4 * EPS, equal_nan=True)
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=16 * EPS, atol=16 * EPS, equal_nan=True)
    else:  # rounded once: at most to the other neighbour
        torch.testing.assert_close(found.float(), expected, rtol=torch.finfo(found.dtype).eps, atol=16 * EPS)
    return found, lse


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_parts_are_merged(parts: int, sinks: torch.Tensor | None) -> None:
    out, lse = compare(*states(parts, 2, 9, 3, 16), sinks)
    assert not out[:, -1].any()
    assert (lse[..., -1] == (-torch.inf if sinks is None else SINKS)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype: torch.dtype) -> None:
    outs, lses = states(3, 9, 3, 8, dtype=dtype)
    compare(outs, lses, SINKS.to(dtype))
    compare(outs, lses, None, torch.empty(9, 3, 8, dtype=dtype))
    compare([t.float() for t in outs], lses, None, torch.empty(9, 3, 8, dtype=dtype))


def test_views() -> None:
    """Those of a cascade with several queries a sequence, parts of one tensor, and an output with gaps."""
    outs, lses = states(2, 2, 5, 3, 8)
    packed = lses[1].transpose(0, 1).contiguous()  # (heads, batch, rows)
    outs[0] = torch.cat((outs[0], outs[0]), dim=-1)[..., :8]
    outs[1] = outs[1].transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((2, 5, 3, 24), 7.0)
    found, _ = compare(outs, [lses[0], packed.flatten(1).unflatten(1, (2, 5)).transpose(0, 1)], None, wide[..., 8:16])
    assert found.isfinite().all() and (wide[..., :8] == 7).all() and (wide[..., 16:] == 7).all()
    stacked, stacked_lses = torch.stack(outs), torch.stack([lse.mT for lse in lses]).mT
    compare(stacked.unbind(), stacked_lses.unbind())


def test_numbers_that_are_none() -> None:
    """An infinite LSE and an NaN have the same effect here as in PyTorch's operations."""
    special = (torch.nan, torch.inf, -torch.inf, 3.0)
    pairs = [(a, b) for a in special for b in special]
    lses = [torch.tensor([[pair[i] for pair in pairs]]) for i in range(2)]
    outs = [torch.randn(len(pairs), 1, 8) for _ in range(2)]
    compare(outs, lses)
    compare(outs, lses, torch.tensor([1.5]))
    outs[1][:, 0, 3] = torch.nan
    found, _ = compare(outs, lses)
    assert math.isnan(found[-1, 0, 3])


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("hole", [torch.nan, torch.inf])
def test_rows_that_see_no_key_may_hold_anything(hole: float, sinks: torch.Tensor | None) -> None:
    outs, lses = states(2, 2, 9, 3, 16)
    expected = compare(outs, lses, sinks)
    for out, lse in zip(outs, lses, strict=True):
        out.masked_fill_((lse == -torch.inf).mT.unsqueeze(-1), hole)
    assert all(out[:, i].isinf().all() or out[:, i].isnan().all() for i, out in enumerate(outs))
    for found, want in zip(compare(outs, lses, sinks), expected, strict=True):
        assert torch.equal(found, want)


def refused() -> dict[str, Any]:
    outs, lses = states(2, 2, 5, 3, 16)
    plain = {"outs": outs, "lses": lses, "sinks": None, "out": outs[0].clone(), "lse": lses[0].clone()}
    return {
        "nine parts": plain | {"outs": outs[:1] * 9, "lses": lses[:1] * 9},
        "fp64": plain | {"outs": [t.double() for t in outs]},
        "two dtypes": plain | {"outs": [outs[0], outs[1].half()]},
        "lse of 16 bits": plain | {"lses": [t.half() for t in lses]},
        "dim 12": plain | {"outs": [t[..., :12] for t in outs], "out": outs[0][..., :12]},
        "last axis": plain | {"outs": [outs[0], outs[1].mT.contiguous().mT]},
        "one place": plain | {"out": torch.empty(5, 3, 16).expand(2, 5, 3, 16)},
        "other shape": plain | {"outs": [outs[0], outs[1][:1]]},
    }


@pytest.mark.parametrize("name", refused())
def test_what_the_kernel_does_not_take(name: str) -> None:
    assert merge.plan(**refused()[name], arch="sm_80") is None
