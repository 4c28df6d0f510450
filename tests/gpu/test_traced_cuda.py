"""torch.compile on a GPU: generated code around our kernels, and CUDA graphs around both."""

from __future__ import annotations

import pytest
import torch

import strobe

DEVICE = torch.device("cuda")


def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return strobe.attention(2 * q, k, v, mask=strobe.causal).float().sigmoid()


def inputs(requires_grad: bool) -> list[torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = [(2, 200, 8, 64), (2, 200, 2, 64), (2, 200, 2, 64)]
    return [torch.randn(s, generator=generator, device=DEVICE).bfloat16().requires_grad_(requires_grad) for s in shapes]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_one_graph_and_the_same_results(mode: str) -> None:
    compiled = torch.compile(block, fullgraph=True, mode=mode)
    expected = block(*inputs(False))
    for _ in range(3):  # the third replays a CUDA graph, where there is one
        assert torch.allclose(compiled(*inputs(False)), expected, atol=1e-3)


def test_gradients() -> None:
    found = []
    for function in (block, torch.compile(block, fullgraph=True)):
        tensors = inputs(True)
        function(*tensors).sum().backward()
        found.append([t.grad for t in tensors])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, atol=2e-2, rtol=2e-2)
