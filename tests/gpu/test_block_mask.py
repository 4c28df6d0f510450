"""Block masks on the device: maps that are kept, across calls, streams and CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import strobe

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
)
N = 2048


def some() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(5)
    made = (torch.randn(2, N, 4, 128, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3))
    return tuple(t.requires_grad_() for t in made)


def documents() -> Any:
    ids = (torch.arange(N, device="cuda") // 300).int()
    return lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])


def results(x: tuple[torch.Tensor, ...], mask: Any) -> list[torch.Tensor]:
    out = strobe.attention(*x, mask=mask, backend="sm90")
    return [out, *torch.autograd.grad(out, x, torch.ones_like(out))]


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert torch.equal(found[0], expected[0])
    for f, e in zip(found[1:], expected[1:], strict=True):  # sums of dQ have no fixed order
        assert (f - e).norm() <= 0.01 * e.norm()


def test_maps_are_kept() -> None:
    x, mask = some(), documents()
    expected, kept = results(x, mask), strobe.block_mask(mask, None, None, N, N)
    close(results(x, kept), expected)
    assert len(kept.maps) == 2  # of each direction
    with torch.cuda.stream(torch.cuda.Stream()):
        close(results(x, kept), expected)
    torch.cuda.synchronize()
    assert len(kept.maps) == 2
    for found in kept.maps.values():
        found.bits.zero_()
    assert not any(t.any() for t in results(x, kept)), "the maps are not those that are kept"


@pytest.mark.parametrize("known", [True, False])
def test_in_a_graph(known: bool) -> None:
    x, mask = some(), documents()
    kept = strobe.block_mask(mask, None, None, N, N)
    q, k, v = (t.detach() for t in x)
    expected = strobe.attention(q, k, v, mask=kept if known else mask, backend="sm90")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = strobe.attention(q, k, v, mask=kept, backend="sm90")
    assert len(kept.maps) == known
    for _ in range(2):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
    assert torch.equal(strobe.attention(q, k, v, mask=kept, backend="sm90"), expected)
