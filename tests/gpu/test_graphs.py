"""CUDA graphs: capture once, replay with other inputs."""

from __future__ import annotations

import pytest
import torch
from gpu.kernels import KERNELS, kernels_here

import strobe
from strobe.cuda import launch
from strobe.variants.mask import causal

pytestmark = pytest.mark.parametrize("kernel", KERNELS)


@pytest.fixture(autouse=True)
def _kernel_is_here(kernel: str) -> None:
    if kernel not in kernels_here():
        pytest.skip("no Hopper GPU")


def some(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def test_replay_sees_new_inputs(kernel: str) -> None:
    q, k, v = (some(2, 500, 8, 128) for _ in range(3))
    strobe.attention(q, k, v, mask=causal, return_lse=True, backend=kernel)  # compiles; nothing may during a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = strobe.attention(q, k, v, mask=causal, return_lse=True, backend=kernel)
    for _ in range(3):
        for t in (q, k, v):
            t.copy_(some(*t.shape))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        wanted = strobe.attention(q, k, v, mask=causal, return_lse=True, backend=kernel)
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])


def test_no_seed_is_drawn_while_a_graph_is_captured(kernel: str) -> None:
    """Every replay would drop the same weights. A seed of the call's own may be captured."""
    q = some(1, 300, 4, 64)
    wanted = strobe.attention(q, q, q, dropout=0.5, seed=3, backend=kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="each replay would drop the same weights"):
            strobe.attention(q, q, q, dropout=0.5, backend=kernel)
        out = strobe.attention(q, q, q, dropout=0.5, seed=3, backend=kernel)
    graph.replay()
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("keys", [9000, 1100])
def test_split_keys_in_a_graph(kernel: str, keys: int) -> None:
    """Blocks meet in memory of the graph's own. With few keys it lies where counters lie, too: they must not
    overlap."""
    q, k, v = some(1, 1, 16, 128), some(1, keys, 2, 128), some(1, keys, 2, 128)
    wanted = strobe.attention(q, k, v, backend=kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [strobe.attention(q, k, v, backend=kernel) for _ in range(3)]
    for _ in range(3):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        strobe.attention(q, k, v, backend=kernel)  # beside the graph, with counters of its own
        torch.cuda.synchronize()
        assert all(torch.equal(out, wanted) for out in outs)


def test_launches_of_a_graph_share_counters(kernel: str) -> None:
    """Counters are not shared with other graphs, other streams of the same graph, or calls outside; and there are none
    if the reserve is used up."""
    q, k, v = some(1, 1, 16, 128), some(1, 3000, 2, 128), some(1, 3000, 2, 128)
    wanted = strobe.attention(q, k, v, backend=kernel)
    outs: list[torch.Tensor] = []

    def capture() -> torch.cuda.CUDAGraph:
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            outs.extend(strobe.attention(q, k, v, backend=kernel) for _ in range(2))
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                beside = [strobe.attention(q, k, v, backend=kernel) for _ in range(2)]
            outs.extend(strobe.attention(q, k, v, backend=kernel) for _ in range(2))
            torch.cuda.current_stream().wait_stream(side)
        outs.extend(beside)
        return graph

    before = len(launch._zeros)
    graphs = [capture(), capture()]
    assert len(launch._zeros) - before == 4
    spare = launch._spare.get(q.device.index or 0, [])
    kept, spare[:] = spare[:], []
    graphs.append(capture())
    spare[:] = kept
    assert len(launch._zeros) - before == 4
    for _ in range(3):
        for out in outs:
            out.fill_(torch.nan)
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, wanted) for out in outs)


def test_several_calls_in_one_graph(kernel: str) -> None:
    """A small model: the output of one call is the input of the next; calls of equal shape share a plan."""
    x = some(1, 300, 4, 64)

    def layers(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x + strobe.attention(x, x, x, mask=causal, backend=kernel)
        return x

    layers(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layers(x)
    for _ in range(3):
        x.copy_(some(*x.shape))
        graph.replay()
        assert torch.equal(y, layers(x))


def test_two_graphs_side_by_side(kernel: str) -> None:
    """Replayed on two streams at once: launches share nothing that they write."""
    inputs = [[some(1, 900, 8, 128) for _ in range(3)] for _ in range(2)]
    wanted = [strobe.attention(*i, mask=causal, backend=kernel) for i in inputs]
    graphs, outs, streams = [torch.cuda.CUDAGraph() for _ in range(2)], [], [torch.cuda.Stream() for _ in range(2)]
    for graph, tensors in zip(graphs, inputs, strict=True):
        with torch.cuda.graph(graph):
            outs.append([strobe.attention(*tensors, mask=causal, backend=kernel) for _ in range(3)])
    torch.cuda.synchronize()
    for _ in range(5):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for found, want in zip(outs, wanted, strict=True):
        assert all(torch.equal(out, want) for out in found)


def test_replay_with_other_sequence_lengths(kernel: str) -> None:
    """Packed: how the rows are divided is read on the GPU, so it may change from replay to replay."""
    q, k, v = (some(600, 4, 64) for _ in range(3))
    cu = torch.tensor([0, 100, 350, 600], device="cuda", dtype=torch.int32)

    def call() -> torch.Tensor:
        return strobe.attention_varlen(q, k, v, cu, cu, max_q=600, max_k=600, mask=causal, backend=kernel)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for bounds in ([0, 0, 600, 600], [0, 1, 2, 600], [0, 200, 400, 600]):
        cu.copy_(torch.tensor(bounds, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        for a, b in zip(bounds, bounds[1:], strict=False):
            if b > a:
                one = strobe.attention(q[None, a:b], k[None, a:b], v[None, a:b], mask=causal, backend=kernel)
                torch.testing.assert_close(out[None, a:b], one, atol=2e-2, rtol=2e-2)
        assert torch.equal(out, call())


def test_a_training_step_in_a_graph(kernel: str) -> None:
    """Forward and backward, with gradients that are repeatable bit for bit."""
    q, k, v = (some(2, 300, 4, 64).requires_grad_() for _ in range(3))

    def step() -> tuple[torch.Tensor, ...]:
        out = strobe.attention(q, k, v, mask=causal, deterministic=True, backend=kernel)
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(3):
        with torch.no_grad():
            for t in (q, k, v):
                t.copy_(some(*t.shape))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, step(), strict=True))
