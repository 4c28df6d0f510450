"""flash-attn 2's functions: signatures, meaning, return values and gradients, against dense matrices in fp64."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy
import pytest
import torch
from compat import textbook

import strobe
from strobe.compat import flash_attn, flash_attn_2_cuda, flash_attn_interface as fa3
from strobe.compat.flash_attn import flash_attn_interface as interface

TAIL = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic"]
CU = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
SIGNATURES = {
    "flash_attn_func": ["q", "k", "v", *TAIL, "return_attn_probs"],
    "flash_attn_kvpacked_func": ["q", "kv", *TAIL, "return_attn_probs"],
    "flash_attn_qkvpacked_func": ["qkv", *TAIL, "return_attn_probs"],
    "flash_attn_varlen_func": ["q", "k", "v", *CU, *TAIL, "return_attn_probs", "block_table"],
    "flash_attn_varlen_kvpacked_func": ["q", "kv", *CU, *TAIL, "return_attn_probs"],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen", *TAIL, "return_attn_probs"],
    "flash_attn_with_kvcache": [
        "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
        "cache_leftpad", "block_table", "softmax_scale", "causal", "window_size", "softcap", "rotary_interleaved",
        "alibi_slopes", "num_splits", "return_softmax_lse",
    ],
}  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (3, -1)},
    {"window": (-1, 2)},
    {"window": (4, 1)},
    {"causal": True, "window": (5, 7)},
    {"causal": True, "softcap": 3.0},
    {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    {"slopes": torch.rand(2, 4, generator=torch.Generator().manual_seed(1)), "causal": True, "softcap": 2.0},
    {"scale": 0.3, "window": (0, 0)},
]
DENSE = [(9, 9), (5, 17), (17, 5)]  # the last has rows without keys under causal masks


def in_their_terms(options: dict[str, Any]) -> dict[str, Any]:
    names = {"scale": "softmax_scale", "window": "window_size", "slopes": "alibi_slopes"}
    return {names.get(name, name): value for name, value in options.items()}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def qkv(len_q: int, len_k: int, heads_k: int = 2, dim: int = 7) -> list[torch.Tensor]:
    """Head dims that are no multiple of 8."""
    shapes = ((2, len_q, 4, dim), (2, len_k, heads_k, dim), (2, len_k, heads_k, dim))
    return [random(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    assert list(parameters) == SIGNATURES[name]
    defaults = {"dropout_p": 0.0, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True}
    for parameter, default in defaults.items():
        if parameter in parameters:
            assert parameters[parameter].default == default
    assert getattr(interface, name) is getattr(flash_attn, name)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", DENSE, ids=str)
def test_dense(lengths: tuple[int, int], options: dict[str, Any]) -> None:
    q, k, v = qkv(*lengths)
    expected, lse, _ = textbook.attention(q, k, v, **options)
    theirs = in_their_terms(options)
    out = flash_attn.flash_attn_func(q, k, v, **theirs)
    torch.testing.assert_close(out, expected)
    out, found_lse, s_dmask = flash_attn.flash_attn_func(q, k, v, **theirs, return_attn_probs=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found_lse, lse)
    assert s_dmask.numel() == 0
    dout = random(*out.shape, seed=9)
    wanted, found = (torch.autograd.grad((o * dout).sum(), (q, k, v)) for o in (expected, out))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b.nan_to_num())  # the textbook's softmax of a row without keys has no gradient


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_varlen(options: dict[str, Any]) -> None:
    lengths = [(6, 6), (0, 4), (3, 11), (5, 0)]
    if options.get("slopes", torch.empty(0)).dim() == 2:
        options = {**options, "slopes": options["slopes"][:1].expand(len(lengths), 4).contiguous()}
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in zip(*lengths, strict=True))
    shapes = ((int(cu_q[-1]), 4, 7), (int(cu_k[-1]), 2, 7), (int(cu_k[-1]), 2, 7))
    q, k, v = (random(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes))
    parts, lses = [], []
    for i in range(len(lengths)):
        row, key = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
        one = {n: (t[i] if n == "slopes" and t.dim() == 2 else t) for n, t in options.items()}
        out, lse, _ = textbook.attention(q[None, row], k[None, key], v[None, key], **one)
        parts.append(out[0])
        lses.append(lse[0])
    expected, expected_lse = torch.cat(parts), torch.cat(lses, dim=1)
    arguments = (q, k, v, cu_q, cu_k, 6, 11)
    out, lse, s_dmask = flash_attn.flash_attn_varlen_func(*arguments, **in_their_terms(options), return_attn_probs=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert lse.shape == (4, 14) and s_dmask.numel() == 0
    wanted, found = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (expected, out))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b.nan_to_num())


def test_packed_forms_are_views_of_the_same() -> None:
    packed = random(2, 9, 3, 4, 7).requires_grad_()
    q, k, v = packed.unbind(2)
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    found = [
        flash_attn.flash_attn_qkvpacked_func(packed, causal=True),
        flash_attn.flash_attn_kvpacked_func(q, packed[:, :, 1:], causal=True),
    ]
    cu = torch.tensor([0, 9, 18], dtype=torch.int32)
    flat = packed.flatten(0, 1)
    found += [
        flash_attn.flash_attn_varlen_qkvpacked_func(flat, cu, 9, causal=True).unflatten(0, (2, 9)),
        flash_attn.flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], cu, cu, 9, 9, causal=True).unflatten(
            0, (2, 9)
        ),
    ]
    (gradient,) = torch.autograd.grad(expected.square().sum(), packed)
    for out in found:
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), packed)[0], gradient)
    with pytest.raises(
        ValueError, match=r"qkv must have shape \(batch, length, 3, heads, dim\), got \(2, 9, 2, 4, 7\)"
    ):
        flash_attn.flash_attn_qkvpacked_func(packed[:, :, 1:])


def test_s_dmask_has_the_sign_of_dropout() -> None:
    q, k, v = qkv(5, 9)
    torch.manual_seed(3)
    out, _, s_dmask = flash_attn.flash_attn_func(q, k, v, dropout_p=0.375, causal=True, return_attn_probs=True)
    assert s_dmask.shape == (2, 4, 128, 128)
    dropped = s_dmask[:, :, :5, :9] < 0
    assert 0.2 < dropped[s_dmask[:, :, :5, :9] != 0].double().mean() < 0.6
    expected, _, p = textbook.attention(q, k, v, causal=True, dropped=dropped, dropout_p=0.375)
    torch.testing.assert_close(s_dmask[:, :, :5, :9].abs(), p / p.amax(-1, keepdim=True))
    assert not s_dmask[:, :, 5:].any() and not s_dmask[:, :, :, 9:].any()
    torch.testing.assert_close(out, expected)
    torch.manual_seed(3)
    torch.testing.assert_close(flash_attn.flash_attn_func(q, k, v, dropout_p=0.375, causal=True), out)


def test_s_dmask_of_packed_sequences() -> None:
    cu_q, cu_k = torch.tensor([0, 4, 7], dtype=torch.int32), torch.tensor([0, 2, 9], dtype=torch.int32)
    q, k, v = random(7, 4, 8), random(9, 2, 8, seed=1), random(9, 2, 8, seed=2)
    out, _, s_dmask = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 4, 7, dropout_p=0.25, return_attn_probs=True
    )
    assert s_dmask.shape == (2, 4, 128, 128)
    for i, (row, key) in enumerate(((slice(0, 4), slice(0, 2)), (slice(4, 7), slice(2, 9)))):
        part = s_dmask[i : i + 1, :, : row.stop - row.start, : key.stop - key.start]
        expected, _, p = textbook.attention(q[None, row], k[None, key], v[None, key], dropped=part < 0, dropout_p=0.25)
        torch.testing.assert_close(part.abs(), p / p.amax(-1, keepdim=True))
        torch.testing.assert_close(out[row], expected[0])


def test_s_dmask_is_relative_to_the_largest_score_so_far() -> None:
    """The tiles of keys are visited as flash-attn 2 does, the last one first. Its users normalise with
    `_get_block_size_n`."""
    q, k, v = qkv(3, 150, dim=72)
    size = interface._get_block_size_n(q.device, 72, True, False)
    _, lse, s_dmask = flash_attn.flash_attn_func(q, k, v, dropout_p=0.4, return_attn_probs=True)
    s = textbook.attention(q, k, v)[2].log() + lse[..., None]
    for start in range(0, 150, size):
        so_far = s[..., start:].amax(-1, keepdim=True)  # of this tile and those behind it
        here = slice(start, start + size)
        torch.testing.assert_close(s_dmask[:, :, :3, :150][..., here].abs(), (s[..., here] - so_far).exp())
    assert (s_dmask < 0).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_in_its_dtype(dtype: torch.dtype) -> None:
    q, k, v = (t.detach().to(dtype) for t in qkv(9, 9, dim=64))
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    expected, expected_lse, _ = textbook.attention(*(t.double() for t in (q, k, v)), causal=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, atol=4 * torch.finfo(dtype).eps, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=torch.finfo(dtype).eps, rtol=0)


def test_rows_that_are_not_contiguous() -> None:
    q, k, v = (random(2, 9, 4, 8, seed=i).transpose(1, 3).contiguous().transpose(1, 3) for i in range(3))
    assert q.stride(-1) != 1
    torch.testing.assert_close(flash_attn.flash_attn_func(q, k, v), textbook.attention(q, k, v)[0])


@pytest.mark.parametrize("dropout_p", [0.0, 0.35])
@pytest.mark.parametrize("varlen", [False, True])
def test_private_forward_and_backward_agree_with_autograd(varlen: bool, dropout_p: float) -> None:
    """Ring attention and Transformer Engine call these functions."""
    q, k, v = qkv(7, 7)
    cu = torch.tensor([0, 7, 14], dtype=torch.int32)
    options = (dropout_p, 0.4, True, 5, -1, 0.0, None)
    if varlen:
        flat = [t.detach().flatten(0, 1) for t in (q, k, v)]
        out, lse, s_dmask, rng_state = interface._flash_attn_varlen_forward(*flat, cu, cu, 7, 7, *options)
    else:
        flat = [t.detach() for t in (q, k, v)]
        out, lse, s_dmask, rng_state = interface._flash_attn_forward(*flat, *options, return_softmax=False)
    assert s_dmask.numel() == 0 and not out.requires_grad
    seed = int(rng_state[0]) if dropout_p else None
    keywords = {"mask": strobe.causal & strobe.window(5, None), "scale": 0.4, "dropout": dropout_p, "seed": seed}
    expected = strobe.attention(q, k, v, **keywords)
    torch.testing.assert_close(out.view_as(expected), expected)
    dout = random(*expected.shape, seed=5)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    gradients = [torch.full_like(t, torch.nan) for t in flat]
    lengths = (cu, cu, 7, 7) if varlen else ()
    backward = interface._flash_attn_varlen_backward if varlen else interface._flash_attn_backward
    delta = backward(dout.view_as(out), *flat, out, lse, *gradients, *lengths, *options, False, rng_state=rng_state)
    for a, b in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a.view_as(b), b)
    rows = (dout * expected).sum(-1).transpose(1, 2).float()  # (batch, heads, rows)
    if varlen:
        assert delta.shape == (4, 14 + 2 * 128)
        torch.testing.assert_close(delta[:, :14], rows.transpose(0, 1).flatten(1))
    else:
        assert delta.shape == (2, 4, 128)
        torch.testing.assert_close(delta[:, :, :7], rows)


def test_backward_of_parts_adds_up() -> None:
    """Keys in two pieces, the output and LSE of the whole: the way of ring attention."""
    q, k, v = (t.detach() for t in qkv(6, 10))
    options = (0.0, 8**-0.5, False, -1, -1, 0.0, None)
    out, lse, _, _ = interface._flash_attn_forward(q, k, v, *options, False)
    dout = random(*out.shape, seed=4)
    whole = [torch.empty_like(t) for t in (q, k, v)]
    interface._flash_attn_backward(dout, q, k, v, out, lse, *whole, *options, False)
    dq = torch.zeros_like(q)
    for part in (slice(0, 4), slice(4, 10)):
        piece = [torch.empty_like(t) for t in (q, k[:, part], v[:, part])]
        interface._flash_attn_backward(dout, q, k[:, part], v[:, part], out, lse, *piece, *options, False)
        dq += piece[0]
        torch.testing.assert_close(piece[1], whole[1][:, part])
        torch.testing.assert_close(piece[2], whole[2][:, part])
    torch.testing.assert_close(dq, whole[0])


def test_keys_in_use_of_packed_buffers() -> None:
    """`seqused_k` and `leftpad_k`: rows outside hold anything, even NaN."""
    cu_q, cu_k = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([0, 8, 16], dtype=torch.int32)
    q, k, v = random(5, 4, 8), random(16, 2, 8, seed=1), random(16, 2, 8, seed=2)
    filled, first = torch.tensor([6, 8], dtype=torch.int32), torch.tensor([1, 3], dtype=torch.int32)
    for t in (k, v):
        t[:1], t[6:8], t[8:11] = torch.nan, torch.nan, torch.nan
    out, lse, _, _ = interface._flash_attn_varlen_forward(
        q, k, v, cu_q, cu_k, 3, 8, 0.0, 8**-0.5, True, leftpad_k=first, seqused_k=filled
    )
    for row, key in ((slice(0, 3), slice(1, 6)), (slice(3, 5), slice(11, 16))):
        expected, expected_lse, _ = textbook.attention(q[None, row], k[None, key], v[None, key], causal=True)
        torch.testing.assert_close(out[row], expected[0])
        torch.testing.assert_close(lse[:, row], expected_lse[0])


def test_the_extension_module_agrees_with_the_functions() -> None:
    q, k, v = (t.detach() for t in qkv(7, 7))
    cu = torch.tensor([0, 7, 14], dtype=torch.int32)
    expected, lse, _ = textbook.attention(q, k, v, causal=True, scale=0.4)
    out, found_lse, _, state = flash_attn_2_cuda.fwd(q, k, v, None, None, 0.0, 0.4, True, -1, -1, 0.0, False, None)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found_lse, lse)
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    into = torch.empty_like(flat[0])
    found = flash_attn_2_cuda.varlen_fwd(
        *flat, into, cu, cu, None, None, None, None, 7, 7, 0.0, 0.4, False, True, -1, -1, 0.0, False, None
    )
    assert found[0] is into
    torch.testing.assert_close(into, expected.flatten(0, 1))
    dout = random(*out.shape, seed=4)
    dense = flash_attn_2_cuda.bwd(
        dout, q, k, v, out, found_lse, None, None, None, None, 0.0, 0.4, True, -1, -1, 0.0, False, None, state
    )
    varlen = flash_attn_2_cuda.varlen_bwd(
        dout.flatten(0, 1), *flat, into, found[1], None, None, None, cu, cu, None, 7, 7, 0.0, 0.4, False, True, -1, -1, 0.0,
        False, None, state,
    )  # fmt: skip
    for a, b in zip(dense[:3], varlen[:3], strict=True):
        torch.testing.assert_close(a.flatten(0, 1), b)
    assert flash_attn.flash_attn_interface.flash_attn_gpu is flash_attn_2_cuda


def test_alibi_is_a_score_that_tiled_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a dense bias, which would take quadratic memory."""
    seen: list[Any] = []
    monkeypatch.setattr(interface, "attend", lambda a: seen.append(a) or a.q)
    q, k, v = (t.detach() for t in qkv(9, 9))
    flash_attn.flash_attn_func(q, k, v, alibi_slopes=torch.ones(4))
    (a,) = seen
    assert a.bias is None and a.score == strobe.alibi(a.score.tensors[0])
    assert strobe.explain(q, k, v, score=a.score).backend == "tiled"


def test_compiles_without_a_graph_break() -> None:
    q, k, v = (t.detach() for t in qkv(9, 9))
    slopes = torch.rand(2, 4)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        first = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(4, 0))
        return first + flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes, softcap=2.0)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), layer(q, k, v))


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.tensor, numpy.int64], ids=["0-d tensors", "numpy"])
def test_numbers_of_other_kinds(kind: Any) -> None:
    """transformers passes lengths as tensors when it packs by position_ids."""
    q, k, v = qkv(9, 9)
    cu = torch.tensor([0, 9, 18], dtype=torch.int32)
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    window, scale, cap = (kind(3), kind(1)), kind(2) / 4, kind(2) * 1.5
    options: dict[str, Any] = {"softmax_scale": scale, "window_size": window, "softcap": cap}
    expected = textbook.attention(q, k, v, scale=0.5, window=(3, 1), softcap=3.0)[0]
    torch.testing.assert_close(flash_attn.flash_attn_func(q, k, v, **options), expected)
    torch.testing.assert_close(fa3.flash_attn_func(q, k, v, **options), expected)
    for function in (flash_attn.flash_attn_varlen_func, fa3.flash_attn_varlen_func):
        found = function(*flat, cu, cu, kind(9), kind(9), **options)
        torch.testing.assert_close(found, expected.flatten(0, 1))
    private = interface._flash_attn_varlen_forward(*flat, cu, cu, kind(9), kind(9), 0.0, scale, False, *window, cap)
    torch.testing.assert_close(private[0], expected.detach().flatten(0, 1))
    chunks = fa3.flash_attn_func(q, k, v, attention_chunk=kind(4), causal=True)
    torch.testing.assert_close(chunks, textbook.attention(q, k, v, chunk=4, causal=True)[0])
    cached = fa3.flash_attn_with_kvcache(
        flat[0], k, v, cache_seqlens=kind(9), cu_seqlens_q=cu, max_seqlen_q=kind(9), **options
    )
    torch.testing.assert_close(cached, expected.detach().flatten(0, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": -1.0}, "softcap must be finite and at least 0 .no cap., got -1.0"),
        ({"softcap": float("nan")}, "softcap must be finite"),
        ({"softcap": float("inf")}, "softcap must be finite"),
        ({"softmax_scale": "0.5"}, "softmax_scale must be a number, got '0.5'"),
        ({"softmax_scale": float("nan")}, "scale must be finite, got nan"),
        ({"window_size": (2.5, 0)}, r"window_size.0. must be an int, got 2.5"),
        ({"window_size": (0, torch.tensor(2.0))}, r"window_size.1. must be an int"),
        ({"dropout_p": 1.0}, "dropout must be at least 0 and less than 1"),
    ],
    ids=str,
)
def test_numbers_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    """The errors are RuntimeErrors, too, as flash-attn's are."""
    with pytest.raises(ValueError, match=message) as found:
        flash_attn.flash_attn_func(*qkv(9, 9), **options)
    assert isinstance(found.value, RuntimeError)


def test_chunks_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="attention_chunk must be at least 0, got -4"):
        fa3.flash_attn_func(*qkv(9, 9), attention_chunk=-4)


@pytest.mark.parametrize(
    ("used", "message"),
    [
        ({"seqused_k": [9, -1]}, r"seqused_k must be from 0 to \[9, 9\], got \[9, -1\]"),
        ({"seqused_k": [10, 9]}, "seqused_k must be from 0 to"),
        ({"seqused_q": [9, 10]}, "seqused_q must be from 0 to"),
        ({"seqused_k": [9]}, r"seqused_k must be ints, one for each sequence, shape \(2,\)"),
    ],
    ids=str,
)
def test_lengths_in_use_that_make_no_sense(used: dict[str, list[int]], message: str) -> None:
    cu = torch.tensor([0, 9, 18], dtype=torch.int32)
    flat = [t.flatten(0, 1) for t in qkv(9, 9)]
    tensors = {name: torch.tensor(values, dtype=torch.int32) for name, values in used.items()}
    with pytest.raises(ValueError, match=message):
        fa3.flash_attn_varlen_func(*flat, cu, cu, 9, 9, **tensors)


def test_generators_are_refused() -> None:
    x = [t.detach() for t in qkv(9, 9)]
    cu = torch.tensor([0, 9, 18], dtype=torch.int32)
    flat = [t.flatten(0, 1) for t in x]
    generator = torch.Generator()
    gpu = interface.flash_attn_gpu
    with pytest.raises(strobe.Unsupported, match="generator was given"):
        gpu.fwd(*x, None, None, 0.1, 0.5, False, -1, -1, 0.0, False, generator)
    with pytest.raises(strobe.Unsupported, match="generator was given"):
        gpu.varlen_fwd(
            *flat, None, cu, cu, None, None, None, None, 9, 9, 0.1, 0.5, False, False, -1, -1, 0.0, False, generator
        )
    out, lse, _, state = gpu.fwd(*x, None, None, 0.1, 0.5, False, -1, -1, 0.0, False, None)
    with pytest.raises(strobe.Unsupported, match="generator was given"):
        gpu.bwd(out, *x, out, lse, None, None, None, None, 0.1, 0.5, False, -1, -1, 0.0, False, generator, state)
