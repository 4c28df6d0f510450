"""Kernels beside attention on a GPU: `strobe.paged.append` and `strobe.merge`, each one launch that a graph may hold."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import strobe
from strobe import paged
from strobe.merging import merged as merged_by_torch
from strobe.nn.rotary import angles
from strobe.paged import pool as pools

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@contextlib.contextmanager
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse PyTorch's operations within the block: they are not there to stand in."""

    def refuse(*args: Any, **more: Any) -> Any:
        raise AssertionError("no kernel was taken")

    with monkeypatch.context() as patch:
        patch.setattr(pools, "_append", refuse)
        patch.setattr("strobe.merging.merged", refuse)
        yield


def by_torch(k_new: Any, v_new: Any, k: Any, v: Any, slots: Any, rotary: Any = None) -> tuple[Any, Any]:
    k, v = k.clone(), v.clone()
    if rotary is not None:
        k_new = pools._turned(k_new, rotary)
    for new, pool in ((k_new, k), (v_new, v)):
        pools.scatter_without_reading(pool, slots.flatten().long(), new.reshape(-1, *new.shape[-2:]))
    return k, v


@pytest.mark.parametrize("interleaved", [None, False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_new_keys_are_written_to_the_last_bit(
    dtype: torch.dtype, index: torch.dtype, interleaved: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, page, heads, dim, dim_v = 300, 16, 8, 128, 64
    both = torch.randn(pages, page, heads, dim + dim_v, device="cuda").to(dtype)
    k, v = both[..., :dim], both[..., dim:]
    new = torch.randn(3, 400, heads, dim + dim_v, device="cuda").to(dtype)[:, :333]  # views, of two axes
    slots = torch.randperm(pages * page + 500, device="cuda")[: 3 * 333].view(3, 333) - 100
    positions = torch.randint(0, 2048, (3, 333), device="cuda")
    rotary = None
    if interleaved is not None:
        cos, sin = angles(torch.arange(2048, device="cuda"), 96, dtype=dtype if interleaved else None)
        rotary = paged.Rotary(cos, sin, positions.to(index), interleaved)
    slots = slots.to(index)
    expected = by_torch(new[..., :dim], new[..., dim:], k, v, slots, rotary)
    with by_kernel(monkeypatch):
        strobe.paged.append(new[..., :dim], new[..., dim:], k, v, slots, rotary=rotary)
    for found, want in zip((k, v), expected, strict=True):
        assert torch.equal(found.view(torch.int16), want.view(torch.int16))


def test_what_the_kernel_does_not_take_is_written_as_well() -> None:
    k, v = torch.randn(2, 5, 4, 2, 80, device="cuda").bfloat16()
    k_new, v_new = torch.randn(2, 3, 2, 80, device="cuda").bfloat16()
    slots = torch.tensor([3, -1, 18], device="cuda")
    cos, sin = angles(torch.arange(9, device="cuda"), 20)  # pairs 10 apart: turned by PyTorch
    rotary = paged.Rotary(cos, sin, slots.clamp(0, 8))
    for pool, new, turn in (
        ((k, v), (k_new, v_new), rotary),
        ((k.float(), v.float()), (k_new.float(), v_new.float()), None),
    ):
        expected = by_torch(*new, *pool, slots, turn)
        strobe.paged.append(*new, *pool, slots, rotary=turn)
        assert all(torch.equal(a, b) for a, b in zip(pool, expected, strict=True))


@pytest.mark.parametrize("part", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out", [None, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_states_are_merged(
    parts: int, out: torch.dtype | None, part: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, sinks = (4, 77, 8, 128), torch.randn(8, device="cuda")
    outs = [torch.randn(shape, device="cuda").to(part) for _ in range(parts)]
    lses = [(3 * torch.randn(8, 4 * 77, device="cuda")).unflatten(1, (4, 77)).transpose(0, 1) for _ in range(parts)]
    for i, lse in enumerate(lses):
        lse[:, :, i::5] = -torch.inf
    expected, expected_lse = merged_by_torch(outs, lses, sinks, None)
    into = None if out is None else torch.empty(shape, dtype=out, device="cuda")
    with by_kernel(monkeypatch):
        found, lse = strobe.merge(outs, lses, sinks=sinks, out=into)
    assert into is None or found is into
    close = {"rtol": 1e-5, "atol": 1e-5} if found.dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-5}
    torch.testing.assert_close(found.float(), expected, **close)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)


def test_rows_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    outs, lses = torch.zeros(2, 9, 4, 64, device="cuda"), torch.full((2, 4, 9), -torch.inf, device="cuda")
    with by_kernel(monkeypatch):
        out, lse = strobe.merge(outs, lses)
    assert not out.any() and (lse == -torch.inf).all()


def test_more_parts_than_a_launch_merges() -> None:
    outs, lses = torch.randn(9, 5, 4, 64, device="cuda"), torch.randn(9, 4, 5, device="cuda")
    for a, b in zip(strobe.merge(outs, lses), merged_by_torch(outs, lses, None, None), strict=True):  # type: ignore[arg-type]
        assert torch.equal(a, b)


def test_a_cascade_is_merged_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = torch.randn(2, 12, 16, 2, 64, device="cuda").bfloat16()
    q = torch.randn(3, 2, 8, 64, device="cuda").bfloat16()
    table = torch.tensor([[2, 3], [4, 5], [6, 7]], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([20, 31, 16], dtype=torch.int32, device="cuda")
    prompt = torch.tensor([[9, 10]], dtype=torch.int32, device="cuda")
    level = strobe.paged.Level(
        prompt,
        torch.tensor([32], dtype=torch.int32, device="cuda"),
        torch.tensor([0, 6], dtype=torch.int32, device="cuda"),
    )
    with by_kernel(monkeypatch):
        out = strobe.attention_paged(q, k, v, table, lengths, shared=[level])
    apart = strobe.attention_paged(q, k, v, torch.cat((prompt.expand(3, 2), table), 1), lengths + 32)
    torch.testing.assert_close(out.float(), apart.float(), rtol=2e-2, atol=2e-2)


def test_graphs_hold_both(monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = torch.zeros(2, 5, 4, 2, 64, device="cuda").half()
    new, slots = torch.zeros(3, 2, 64, device="cuda").half(), torch.full((3,), -1, device="cuda")
    cos, sin = angles(torch.arange(9, device="cuda"), 64)
    outs, lses = torch.randn(2, 5, 4, 64, device="cuda"), torch.randn(2, 4, 5, device="cuda")

    def step() -> Any:
        strobe.paged.append(new, new, k, v, slots, rotary=(cos, sin, slots.clamp(0, 8), False))
        return strobe.merge(outs, lses)

    with by_kernel(monkeypatch):
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = step()
        for seed in range(2):
            torch.manual_seed(seed)
            new.normal_(), outs.normal_(), lses.normal_()
            slots.copy_(torch.randperm(25)[:3] - 3)
            rotary = paged.Rotary(cos, sin, slots.clamp(0, 8))
            expected = by_torch(new, new, k, v, slots, rotary)
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip((k, v), expected, strict=True))
            merged = merged_by_torch(outs, lses, None, None)  # type: ignore[arg-type]
            torch.testing.assert_close((out, lse), merged, rtol=1e-5, atol=1e-5)


@pytest.mark.alone
def test_a_repeated_call_costs_the_host_little() -> None:
    """A bound that PyTorch's many launches are far above."""
    k, v = torch.zeros(2, 50, 16, 8, 128, device="cuda").bfloat16()
    k_new, v_new = torch.zeros(2, 64, 8, 128, device="cuda").bfloat16()
    slots = torch.arange(64, device="cuda")
    cos, sin = angles(torch.arange(99, device="cuda"), 128)
    outs, lses = [torch.randn(64, 8, 128, device="cuda")] * 2, [torch.randn(8, 64, device="cuda")] * 2
    calls = {
        "append": lambda: strobe.paged.append(k_new, v_new, k, v, slots, rotary=(cos, sin, slots, False)),
        "merge": lambda: strobe.merge(outs, lses),
    }
    for name, call in calls.items():
        best = float("inf")
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                call()
            best = min(best, (time.perf_counter() - start) / 20)
        print(f"{name}: {1e6 * best:.1f} µs")
        assert best < 60e-6, name
