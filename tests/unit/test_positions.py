"""Parts of sequences: rows and keys know where they are in the whole, and partial results merge to it."""

from __future__ import annotations

import itertools

import pytest
import torch

import strobe
from strobe.call.attend import attend
from strobe.call.bound_call import bind, lookup
from strobe.problem.arguments import Arguments
from strobe.variants.mask import Positions
from strobe.variants.score import softcap

LENGTH = 29
CUTS = (0, 10, 11, LENGTH)


def merged(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Merge partial results by the LSE, (batch, heads, rows)."""
    outs, lses = (torch.stack(t) for t in zip(*parts, strict=True))
    weights = (lses - lses.logsumexp(0)).exp().nan_to_num()
    return (outs.double() * weights.transpose(2, 3)[..., None]).sum(0)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize(
    "options",
    [
        {"mask": strobe.causal},
        {"mask": strobe.window(7, 2)},
        {"mask": strobe.chunked(8) & strobe.causal},
        {"mask": strobe.prefix(5)},
        {"mask": strobe.causal, "score": softcap(2.0)},
        {"score": strobe.alibi(torch.tensor([0.5, 0.1]))},
        {"mask": strobe.causal, "dropout": 0.4, "seed": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("varlen", [False, True])
def test_shards_merge_to_the_whole(varlen: bool, options: dict, backend: str) -> None:
    q, k, v = torch.randn(3, 1, LENGTH, 2, 8, dtype=torch.float64)
    expected = strobe.attention(q, k, v, **options)
    spans = list(itertools.pairwise(CUTS))
    for q0, q1 in spans:
        parts = []
        for k0, k1 in spans:
            at = torch.tensor([Positions(q0, LENGTH, k0, LENGTH)], dtype=torch.int32)
            a = Arguments(
                q[:, q0:q1], k[:, k0:k1], v[:, k0:k1], **options, return_lse=True, backend=backend, positions=at
            )
            if varlen:
                cu = [torch.tensor([0, n], dtype=torch.int32) for n in (q1 - q0, k1 - k0)]
                a = a._replace(q=a.q[0], k=a.k[0], v=a.v[0], cu_q=cu[0], cu_k=cu[1])
            out, lse = attend(a)
            parts.append((out, lse) if not varlen else (out[None], lse[None]))
        torch.testing.assert_close(merged(parts), expected[:, q0:q1])


def test_partial_output_is_in_fp32() -> None:
    q, k, v = torch.randn(3, 1, 20, 2, 8).bfloat16()
    whole = strobe.attention(q, k, v)
    for backend in ("tiled", "reference"):
        out, lse = attend(Arguments(q, k, v, partial=True, return_lse=True, backend=backend))
        assert out.dtype == lse.dtype == torch.float32
        torch.testing.assert_close(out.bfloat16(), whole, atol=1e-2, rtol=0)
    assert attend(Arguments(q.double(), k.double(), v.double(), partial=True)).dtype == torch.float64


def test_parts_are_bound_apart_from_equal_looking_wholes() -> None:
    q = torch.randn(1, 8, 2, 8).bfloat16()
    at = torch.tensor([Positions(8, 16, 0, 16)], dtype=torch.int32)
    for more in ({}, {"partial": True}, {"positions": at}, {"positions": at, "partial": True}):
        a = Arguments(q, q, q, mask=strobe.causal, **more)
        problem = lookup(a).problem
        assert (problem.positions, problem.partial) == ("positions" in more, "partial" in more)
        assert attend(a).dtype == (torch.float32 if "partial" in more else torch.bfloat16)


@pytest.mark.parametrize(
    "options", [{"mask": strobe.causal}, {"mask": strobe.window(7, 2), "sinks": torch.zeros(2)}], ids=str
)
def test_gradients_of_shards_add_up_to_the_whole(options: dict) -> None:
    """Each pair of shards gives its share, in fp32, from the output and the LSE of the whole."""
    leaves = [torch.randn(1, LENGTH, 2, 8, requires_grad=True) for _ in range(3)]
    q, k, v = leaves
    out, lse = strobe.attention(q, k, v, **options, return_lse=True)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad((out * dout).sum(), leaves)
    found = [torch.zeros_like(t) for t in leaves]
    for (q0, q1), (k0, k1) in itertools.product(itertools.pairwise(CUTS), repeat=2):
        at = torch.tensor([Positions(q0, LENGTH, k0, LENGTH)], dtype=torch.int32)
        a = Arguments(
            *(t.detach() for t in (q[:, q0:q1], k[:, k0:k1], v[:, k0:k1])), **options, positions=at, partial=True
        )
        shares = bind(a, needs_grad=True).backward(
            ("q", "k", "v"), a, out[:, q0:q1].detach(), lse[:, :, q0:q1].detach(), dout[:, q0:q1], None
        )
        for total, share, (start, stop) in zip(found, shares[:3], ((q0, q1), (k0, k1), (k0, k1)), strict=True):
            assert share is not None and share.dtype == torch.float32
            total[:, start:stop] += share
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_some_heads_drop_what_they_drop_among_all(backend: str) -> None:
    """Forward and backward. Equal-looking calls with other heads are bound apart."""
    heads, group, options = 6, 2, {"dropout": 0.5, "seed": 3, "backend": backend}
    q = torch.randn(2, 9, heads, 8, requires_grad=True)
    k, v = (torch.randn(2, 9, heads // group, 8, requires_grad=True) for _ in range(2))
    whole = strobe.attention(q, k, v, **options)
    expected = torch.autograd.grad(whole.square().sum(), (q, k, v))
    parts = []
    for h in range(heads // group):
        mine = q[:, :, group * h : group * (h + 1)], k[:, :, h : h + 1], v[:, :, h : h + 1]
        parts.append(attend(Arguments(*mine, **options, first_head=group * h)))
    found = torch.cat(parts, 2)
    torch.testing.assert_close(found, whole)
    for a, b in zip(torch.autograd.grad(found.square().sum(), (q, k, v)), expected, strict=True):
        torch.testing.assert_close(a, b)
    without = attend(Arguments(*mine, **options))
    assert not torch.allclose(without, whole[:, :, -group:])


def test_traced_calls_keep_positions_and_refuse_partial_outputs() -> None:
    q, k, v = (torch.randn(2, n, 2, 8) for n in (3, LENGTH, LENGTH))
    at = torch.tensor([Positions(4, 20, 0, 20), Positions(17, 20, 0, 20)], dtype=torch.int32)
    a = Arguments(q, k, v, mask=strobe.causal, positions=at)
    compiled = torch.compile(lambda q: attend(a._replace(q=q)), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), attend(a))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode, pytest.raises(strobe.Unsupported, match="fp32"):
        attend(Arguments(*map(mode.from_tensor, (q, k, v)), partial=True))
