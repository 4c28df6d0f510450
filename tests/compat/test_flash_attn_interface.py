"""FlashAttention 3's functions, against dense matrices in fp64."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from compat import textbook

import strobe
from strobe.compat import flash_attn_3, flash_attn_interface as fa3

DESCALE = ["q_descale", "k_descale", "v_descale"]
SIGNATURES = {
    "flash_attn_func": [
        "q", "k", "v", "softmax_scale", "causal", "qv", *DESCALE, "window_size", "attention_chunk", "softcap",
        "num_splits", "pack_gqa", "deterministic", "sm_margin", "return_attn_probs",
    ],
    "flash_attn_varlen_func": [
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k",
        "softmax_scale", "causal", "qv", *DESCALE, "window_size", "attention_chunk", "softcap", "num_splits", "pack_gqa",
        "deterministic", "sm_margin", "return_attn_probs",
    ],
    "flash_attn_qkvpacked_func": [
        "qkv", "softmax_scale", "causal", *DESCALE, "window_size", "attention_chunk", "softcap", "deterministic",
        "num_heads_q", "sm_margin", "return_attn_probs",
    ],
    "flash_attn_with_kvcache": [
        "q", "k_cache", "v_cache", "k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
        "cache_leftpad", "page_table", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens", *DESCALE,
        "softmax_scale", "causal", "window_size", "attention_chunk", "softcap", "rotary_interleaved",
        "scheduler_metadata", "num_splits", "pack_gqa", "sm_margin", "return_softmax_lse",
    ],
    "flash_attn_combine": ["out_partial", "lse_partial", "out", "out_dtype"],
}  # fmt: skip


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    assert list(inspect.signature(getattr(fa3, name)).parameters) == SIGNATURES[name]
    assert getattr(flash_attn_3.flash_attn_interface, name) is getattr(fa3, name)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (3, 2)}, {"causal": True, "chunk": 4}, {"softcap": 2.0, "scale": 0.5}],
    ids=str,
)
def test_dense_with_another_value_dim(options: dict[str, Any]) -> None:
    q, k, v = (
        t.requires_grad_() for t in (random(2, 7, 4, 24), random(2, 11, 2, 24, seed=1), random(2, 11, 2, 16, seed=2))
    )
    names = {"scale": "softmax_scale", "window": "window_size", "chunk": "attention_chunk"}
    theirs = {names.get(n, n): value for n, value in options.items()}
    expected, lse, _ = textbook.attention(q, k, v, **options)
    out = fa3.flash_attn_func(q, k, v, **theirs)
    torch.testing.assert_close(out, expected)
    both = fa3.flash_attn_func(q, k, v, **theirs, return_attn_probs=True)
    assert len(both) == 2
    torch.testing.assert_close(both[1], lse)
    wanted, found = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (expected, out))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_rows_without_keys_have_minus_inf() -> None:
    q, k = random(1, 5, 2, 8), random(1, 3, 2, 8, seed=1)
    out, lse = fa3.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    assert (lse[:, :, :2] == -torch.inf).all() and not out[:, :2].any()


def test_scores_of_queries_and_values() -> None:
    """`qv`: absorbed attention."""
    q, k, v, qv = (
        random(2, 5, 4, 8),
        random(2, 9, 1, 8, seed=1),
        random(2, 9, 1, 32, seed=2),
        random(2, 5, 4, 32, seed=3),
    )
    expected, _, _ = textbook.attention(torch.cat((q, qv), -1), torch.cat((k, v), -1), v, causal=True, scale=40**-0.5)
    torch.testing.assert_close(fa3.flash_attn_func(q, k, v, qv=qv, causal=True), expected)


def test_packed_forms() -> None:
    grouped = random(2, 9, 4 + 2 * 2, 8)
    q, k, v = grouped.split([4, 2, 2], dim=2)
    expected = textbook.attention(q, k, v, causal=True)[0]
    torch.testing.assert_close(fa3.flash_attn_qkvpacked_func(grouped, causal=True, num_heads_q=4), expected)
    packed = random(2, 9, 3, 4, 8)
    torch.testing.assert_close(fa3.flash_attn_qkvpacked_func(packed), textbook.attention(*packed.unbind(2))[0])
    with pytest.raises(ValueError, match="qkv must have shape"):
        fa3.flash_attn_qkvpacked_func(grouped)


def test_varlen_with_rows_that_are_not_in_use() -> None:
    cu_q, cu_k = torch.tensor([0, 4, 8], dtype=torch.int32), torch.tensor([0, 6, 12], dtype=torch.int32)
    used_q, used_k = torch.tensor([3, 4], dtype=torch.int32), torch.tensor([6, 5], dtype=torch.int32)
    q, k, v = random(8, 4, 8), random(12, 2, 8, seed=1), random(12, 2, 8, seed=2)
    k[11], v[11] = torch.nan, torch.nan
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 4, 6, seqused_q=used_q, seqused_k=used_k, causal=True, return_attn_probs=True
    )
    for row, key in ((slice(0, 3), slice(0, 6)), (slice(4, 8), slice(6, 11))):
        expected, expected_lse, _ = textbook.attention(q[None, row], k[None, key], v[None, key], causal=True)
        torch.testing.assert_close(out[row], expected[0])
        torch.testing.assert_close(lse[:, row], expected_lse[0])


def test_parts_combine_to_the_whole() -> None:
    q, k, v = random(2, 5, 4, 8), random(2, 12, 2, 8, seed=1), random(2, 12, 2, 8, seed=2)
    expected, lse, _ = textbook.attention(q, k, v)
    parts = [
        fa3.flash_attn_func(q, k[:, s], v[:, s], return_attn_probs=True)
        for s in (slice(0, 4), slice(4, 12), slice(0, 0))
    ]
    outs = torch.stack([out for out, _ in parts])
    lses = torch.stack([lse.transpose(1, 2) for _, lse in parts])
    merged, merged_lse = fa3.flash_attn_combine(outs, lses, out_dtype=torch.float64)
    torch.testing.assert_close(merged, expected)
    torch.testing.assert_close(merged_lse, lse.transpose(1, 2))
    into = torch.empty_like(expected)
    outs[2].fill_(torch.nan)  # a part without keys may be memory that nobody wrote
    assert fa3.flash_attn_combine(outs, lses, out=into)[0] is into
    torch.testing.assert_close(into, expected)
    nothing = fa3.flash_attn_combine(outs[2:], lses[2:])
    assert not nothing[0].any() and (nothing[1] == -torch.inf).all()
    with pytest.raises(ValueError, match="lse_partial must have the shape"):
        fa3.flash_attn_combine(outs, lses.transpose(2, 3))


def test_private_forward_and_backward() -> None:
    q, k, v = (t.requires_grad_() for t in (random(2, 7, 4, 8), random(2, 9, 2, 8, seed=1), random(2, 9, 2, 8, seed=2)))
    expected, lse, _ = textbook.attention(q, k, v, causal=True)
    out, found_lse, *_ = fa3._flash_attn_forward(q, k, v, causal=True)
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(found_lse, lse.detach())
    dout = random(*out.shape, seed=4)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    found = [torch.empty_like(t) for t in (q, k, v)]
    fa3._flash_attn_backward(dout, q, k, v, out, found_lse, dq=found[0], dk=found[1], dv=found[2], is_causal=True)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_metadata_is_taken_and_eight_bits_are_refused() -> None:
    q, cache = random(2, 1, 4, 8), random(2, 9, 2, 8, seed=1)
    lengths = torch.tensor([4, 9], dtype=torch.int32)
    metadata = fa3.get_scheduler_metadata(2, 1, 9, 4, 2, 8, lengths)
    plain = fa3.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths)
    planned = fa3.flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=lengths, scheduler_metadata=metadata, num_splits=3
    )
    torch.testing.assert_close(plain, planned)
    with pytest.raises(strobe.Unsupported, match="k_descale was given, but there are no 8-bit kernels"):
        fa3.flash_attn_func(q, cache, cache, k_descale=torch.ones(2, 2))


def used_rows(cu: list[int], used: list[int]) -> list[slice]:
    return [slice(start, start + n) for start, n in zip(cu, used, strict=False)]


@pytest.mark.parametrize(
    ("way", "options"),
    [
        *itertools.product(["autograd", "private"], [{}, {"causal": True}, {"window_size": (1, 2)}]),
        ("autograd", {"attention_chunk": 4}),
    ],
    ids=str,
)
def test_queries_that_are_not_in_use_send_no_gradient(way: str, options: dict[str, Any]) -> None:
    cu_q, cu_k, used_q, used_k = [0, 4, 8, 11], [0, 6, 12, 15], [3, 0, 3], [6, 5, 2]
    ints = {
        n: torch.tensor(x, dtype=torch.int32) for n, x in (("cu_q", cu_q), ("cu_k", cu_k), ("q", used_q), ("k", used_k))
    }
    q, k, v = (t.requires_grad_() for t in (random(11, 4, 8), random(15, 2, 8, seed=1), random(15, 2, 8, seed=2)))
    dout = random(11, 4, 8, seed=3)
    expected = torch.zeros_like(q)
    names = {"window_size": "window", "attention_chunk": "chunk"}
    ours = {names.get(n, n): value for n, value in options.items()}
    for row, key in zip(used_rows(cu_q, used_q), used_rows(cu_k, used_k), strict=True):
        if row.start < row.stop:
            part = textbook.attention(q[None, row], k[None, key], v[None, key], **ours)[0][0]
            expected = expected.index_put((torch.arange(row.start, row.stop),), part)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    arguments = (ints["cu_q"], ints["cu_k"])
    if way == "autograd":
        out, lse = fa3.flash_attn_varlen_func(
            q, k, v, *arguments, 4, 6, seqused_q=ints["q"], seqused_k=ints["k"], return_attn_probs=True, **options
        )
        assert (lse[:, 3] == -torch.inf).all()
        found = torch.autograd.grad(out, (q, k, v), dout)
    else:
        left, right = options.get("window_size", (-1, -1))
        windows = {"window_size_left": left, "window_size_right": right}
        causal = options.get("causal", False)
        used = (ints["q"], ints["k"])
        out, lse, *_ = fa3._flash_attn_forward(
            q, k, v, cu_seqlens_q=arguments[0], cu_seqlens_k=arguments[1], seqused_q=used[0], seqused_k=used[1],
            max_seqlen_q=4, max_seqlen_k=6, causal=causal, **windows,
        )  # fmt: skip
        found = tuple(torch.empty_like(t) for t in (q, k, v))
        fa3._flash_attn_backward(dout, q, k, v, out, lse, *arguments, *used, 4, 6, *found, is_causal=causal, **windows)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, wanted)
