"""The oracle against something even plainer: Python numbers, and PyTorch's own attention."""

from __future__ import annotations

import math

import pytest
import torch
from cases import CASES, Case
from oracle import forward, prepare, with_leaves

from strobe.backends import reference
from strobe.problem import Problem
from strobe.problem.arguments import Arguments, Inputs
from strobe.variants import dropout

SMALL = {
    case.name: case
    for case in (
        Case("plain", 4, 6, batch=1, dim=3),
        *(c for c in CASES if c.name in ("no_keys", "no_keys_sinks", "packed_mask_tensor", "packed_everything")),
        Case(
            "all",
            5,
            7,
            heads=4,
            dim=3,
            dim_v=2,
            softcap=1.5,
            sinks=True,
            dropout=0.4,
            bias=(1, 4, 5, 7),
            mask_tensor=(2, 1, 5, 7),
        ),
    )
}


def loops(p: Problem, x: Inputs, b: int, h: int, i: int) -> tuple[list[float], float]:
    """One row, in Python numbers, as the definition reads."""
    q0 = k0 = 0
    len_q, len_k, held = p.len_q, p.len_k, b
    if p.varlen:
        (q0, q1), (k0, k1) = ([int(n) for n in cu[b : b + 2]] for cu in (x.cu_q, x.cu_k))
        len_q, len_k, held = q1 - q0, k1 - k0, 0
    hk = h // p.group
    lo, hi = p.mask.bounds(i, len_q, len_k)
    scores = {}
    for j in range(lo, hi):
        if x.mask is not None and not x.mask.expand(p.batch, p.heads, p.len_q, p.len_k)[b, h, i, j]:
            continue
        s = p.scale * sum(float(x.q[held, h, q0 + i, c]) * float(x.k[held, hk, k0 + j, c]) for c in range(p.dim))
        s = p.score.expr.evaluate({"s": torch.tensor(s, dtype=torch.float64)}).item() if not p.score.is_identity else s
        scores[j] = s + (0 if x.bias is None else float(x.bias.expand(p.batch, p.heads, p.len_q, p.len_k)[b, h, i, j]))
    total = sum(math.exp(s) for s in scores.values()) + (0 if x.sinks is None else math.exp(float(x.sinks[h])))
    kept = dropout.keep(x.seed, range(b, b + 1), range(h, h + 1), range(i, i + 1), range(len_k), p.dropout)[0, 0, 0]
    out = [0.0] * p.dim_v
    for j, s in scores.items():
        for c in range(p.dim_v):
            weight = math.exp(s) / total * (float(kept[j]) / dropout.kept_share(p.dropout))
            out[c] += weight * float(x.v[held, hk, k0 + j, c])
    return out, math.log(total) if total else -math.inf


@pytest.mark.parametrize("name", SMALL)
def test_is_the_definition(name: str) -> None:
    p, inputs = prepare(SMALL[name], torch.float64)
    out, lse = reference.attention(p, inputs)
    for b in range(p.batch):
        starts = [0] if inputs.cu_q is None else inputs.cu_q.tolist()
        rows = p.len_q if inputs.cu_q is None else min(6, starts[b + 1] - starts[b])
        held, at = (b, 0) if inputs.cu_q is None else (0, starts[b])
        for h in range(p.heads):
            for i in range(rows):
                expected, expected_lse = loops(p, inputs, b, h, i)
                torch.testing.assert_close(out[held, h, at + i], torch.tensor(expected, dtype=torch.float64))
                torch.testing.assert_close(lse[held, h, at + i].item(), expected_lse)


@pytest.mark.parametrize("name", ["plain", "top_left", "group_3", "mask_padding", "bias"])
def test_agrees_with_pytorch(name: str) -> None:
    case = next(c for c in CASES if c.name == name)
    p, x = prepare(case, torch.float64)
    added = x.bias if x.bias is not None else x.mask
    if name == "group_3":
        added = p.mask.dense(p.len_q, p.len_k)
    expected = torch.nn.functional.scaled_dot_product_attention(
        x.q, x.k, x.v, attn_mask=added, is_causal=name == "top_left", enable_gqa=p.group > 1
    )
    torch.testing.assert_close(reference.attention(p, x)[0], expected)


def test_rows_without_keys_have_zero_gradients() -> None:
    case = next(c for c in CASES if c.name == "empty_rows")
    p, inputs = prepare(case, torch.float64)
    held, leaves = with_leaves(inputs)
    out, lse = reference.attention(p, held)
    assert (out[:, :, :70] == 0).all() and (lse[:, :, :70] == -torch.inf).all()
    gradients = torch.autograd.grad([out.sum(), lse[:, :, 70:].sum()], leaves)
    assert all(torch.isfinite(g).all() for g in gradients) and (gradients[0][:, :, :70] == 0).all()


def test_packed_sequences_without_any_key_are_differentiable() -> None:
    q, k = torch.randn(3, 2, 4, requires_grad=True), torch.randn(0, 2, 4, requires_grad=True)
    cu_q, cu_k = torch.tensor([0, 2, 3], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    a = Arguments(q, k, k, cu_q=cu_q, cu_k=cu_k, max_q=2, max_k=0, return_lse=True)
    p, layout = Problem.of(a)
    _, lse = reference.attention(p, Inputs.of(a, layout))
    assert (lse == -torch.inf).all() and lse.grad_fn is not None
    dq, dk = torch.autograd.grad(lse.sum(), (q, k))
    assert (dq == 0).all() and dq.shape == q.shape and dk.shape == k.shape


def test_backend_writes_into_out_and_is_never_chosen() -> None:
    p, inputs = prepare(SMALL["plain"], torch.float32)
    out = torch.full((1, 2, 4, 3), torch.nan)
    result, lse = forward("reference", p, inputs, out)
    assert result is out and torch.isfinite(out).all() and lse.dtype == torch.float32
    assert not reference.BACKENDS["reference"].automatic
