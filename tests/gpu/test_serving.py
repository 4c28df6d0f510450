"""Serving on a GPU: the decode suite, and the classes that vLLM calls, inside of a CUDA graph."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
import torch
from compat import vllm_interface
from gpu.kernels import kernels_here

import strobe
from strobe.bench import decode
from strobe.bench.decode_cases import Batch, Size

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and "sm90" not in kernels_here(), reason="no kernel of this GPU reads pages"
    ),
]
SIZE = Size(8, 2, 128, torch.bfloat16, rotated=8 << 20)


@pytest.mark.parametrize(
    "batch",
    [
        Batch("b3-1k", (1,) * 3, (1000,) * 3, (16, 64, 256)),
        Batch("mixed", (200, 1, 1), (300, 40, 1000)),
        Batch("cascade", (1,) * 4, (100,) * 4, shared=512),
    ],
    ids=lambda b: b.name,
)
def test_the_decode_suite(batch: Batch) -> None:
    rows = decode.measure(batch, SIZE, torch.device("cuda", torch.cuda.current_device()), turns=2)
    ours = [r for r in rows if "flash" not in r.way and "cuDNN" not in r.way]
    assert all(r.note is None and (r.us or 0) > 0 for r in ours), ours


def test_a_step_of_vllm_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step, replayed with other tables and lengths."""
    for name, module in vllm_interface.stubs(json.loads(vllm_interface.RECORD.read_text())).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "strobe.compat.vllm.backend", raising=False)
    backend = importlib.import_module("strobe.compat.vllm.backend")
    monkeypatch.delitem(sys.modules, "strobe.compat.vllm.backend")
    heads, heads_k, dim, page, blocks, n = 8, 2, 128, 64, 20, 3
    like = {"device": "cuda", "dtype": torch.bfloat16}
    cache = torch.randn(blocks, page, heads_k, 2 * dim, **like).transpose(1, 2)  # type: ignore[call-overload]
    impl = backend.Impl(heads, dim, dim**-0.5, heads_k, sliding_window=200)
    q, k, v = (torch.randn(n, h, dim, **like) for h in (heads, heads_k, heads_k))  # type: ignore[call-overload]
    table = torch.randperm(blocks, device="cuda")[: 6 * n].view(n, 6).int()
    lengths = torch.tensor([70, 384, 1], dtype=torch.int32, device="cuda")
    cu = torch.arange(n + 1, dtype=torch.int32, device="cuda")
    slots = strobe.paged.slots(table, page, lengths - 1)
    m = backend.Metadata(n, 1, cu, 384, lengths, table, slots)
    out = torch.zeros(n, heads, dim, **like)  # type: ignore[call-overload]

    def step() -> None:
        impl.do_kv_cache_update(None, k, v, cache, slots)
        impl.forward(None, q, k, v, cache, m, out)

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for new in ([70, 384, 1], [100, 2, 300]):
        lengths.copy_(torch.tensor(new))
        table.copy_(table.flip(0))
        slots.copy_(strobe.paged.slots(table, page, lengths - 1))
        graph.replay()
        keys, values = backend.pools(cache, dim)
        for i, length in enumerate(new):
            rows = [t[table[i].long()].flatten(0, 1)[None, :length] for t in (keys, values)]
            torch.testing.assert_close(rows[0][0, -1], k[i])
            want = strobe.attention(q[None, i : i + 1], *rows, mask=strobe.window(199, 0), backend="reference")
            torch.testing.assert_close(out[i : i + 1], want[0], atol=2e-2, rtol=2e-2)
