"""The modules: `Attention` against a textbook and Llama's block, `MultiheadAttention` against PyTorch's."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest
import torch

import strobe
from strobe.nn import Attention, MultiheadAttention

DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ---- MultiheadAttention ----------------------------------------------------------------------------------------------


def pair(**options: Any) -> tuple[torch.nn.MultiheadAttention, MultiheadAttention]:
    """PyTorch's, and ours with its checkpoint."""
    theirs = torch.nn.MultiheadAttention(32, 4, dtype=DOUBLE, **options)
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.4)
    ours = MultiheadAttention(32, 4, dtype=DOUBLE, **options)
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    return theirs, ours


def same(theirs: Any, ours: Any, *x: torch.Tensor, hint: bool = False, **options: Any) -> None:
    """Outputs, and gradients of inputs and parameters. `hint`: ours is told that the mask is causal. PyTorch's would
    forget the additional keys then, without a padding mask."""
    found = []
    for module in (theirs, ours):
        module.zero_grad()
        inputs = [t.clone().requires_grad_() for t in x]
        inputs = inputs * 3 if len(x) == 1 else inputs
        hinted = {"is_causal": True} if hint and module is ours else {}
        out, weights = module(*inputs, need_weights=False, **hinted, **options)
        assert weights is None
        (out * torch.arange(out.numel()).view(out.shape).sin()).sum().backward()
        found.append((out, [t.grad for t in inputs], [p.grad for p in module.parameters()]))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 24, "vdim": 20}], ids=str
)
def test_multihead(batch_first: bool, options: dict[str, Any]) -> None:
    theirs, ours = pair(batch_first=batch_first, **options)
    dims = (32, options.get("kdim", 32), options.get("vdim", 32))
    x = [torch.randn(3, n, d, dtype=DOUBLE) for n, d in zip((9, 11, 11), dims, strict=True)]
    x = x if batch_first else [t.transpose(0, 1) for t in x]
    padding = torch.arange(11) >= torch.tensor([11, 8, 5])[:, None]
    numbers, causal = torch.randn(9, 11, dtype=DOUBLE), torch.ones(9, 11, dtype=torch.bool).triu(1)
    per_head = torch.rand(12, 9, 11) < 0.3
    per_head[..., 0] = False
    same(theirs, ours, *x)
    same(theirs, ours, *x, key_padding_mask=padding, attn_mask=causal)
    same(theirs, ours, *x, attn_mask=per_head, key_padding_mask=padding)
    same(theirs, ours, *x, attn_mask=numbers)
    same(theirs, ours, *x, attn_mask=numbers, key_padding_mask=torch.randn(3, 11, dtype=DOUBLE))
    same(theirs, ours, *x, attn_mask=causal, hint=True)
    same(theirs, ours, *x, attn_mask=causal, hint=True, key_padding_mask=padding)


def test_multihead_of_one_input_and_without_a_batch() -> None:
    theirs, ours = pair(batch_first=True)
    same(theirs, ours, torch.randn(3, 9, 32, dtype=DOUBLE))
    same(theirs, ours, torch.randn(9, 32, dtype=DOUBLE))
    padding = torch.arange(9) > 6
    same(theirs, ours, torch.randn(9, 32, dtype=DOUBLE), key_padding_mask=padding)


def test_multihead_attends_with_strobe(monkeypatch: pytest.MonkeyPatch) -> None:
    from strobe.nn import multihead

    masks: list[Any] = []
    original = multihead.attention
    monkeypatch.setattr(multihead, "attention", lambda *a, **o: masks.append(o["mask"]) or original(*a, **o))
    _, ours = pair(batch_first=True)
    x = torch.randn(2, 9, 32, dtype=DOUBLE)
    ours(x, x, x, need_weights=False, is_causal=True)
    assert masks == [strobe.causal_top_left]  # not a tensor


def test_multihead_weights_are_left_to_pytorch() -> None:
    theirs, ours = pair(batch_first=True)
    x = torch.randn(2, 9, 32, dtype=DOUBLE)
    with pytest.warns(UserWarning, match="need_weights=False"):
        found = ours(x, x, x)
    torch.testing.assert_close(found, theirs(x, x, x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(ours(x, x, x, need_weights=False)[0], found[0])


def test_multihead_refuses_wrong_shapes() -> None:
    _, ours = pair(batch_first=True)
    x = torch.randn(2, 9, 32, dtype=DOUBLE)
    with pytest.raises(ValueError, match=r"key_padding_mask must have shape \(2, 9\), got \(2, 8\)"):
        ours(x, x, x, torch.zeros(2, 8, dtype=torch.bool), need_weights=False)
    with pytest.raises(ValueError, match=r"attn_mask must have shape \(9, 9\) or \(8, 9, 9\), got \(9, 8\)"):
        ours(x, x, x, need_weights=False, attn_mask=torch.zeros(9, 8))
    with pytest.raises(ValueError, match="3 axes, or 2 without a batch; got 4, 3, 3"):
        ours(x[None], x, x, need_weights=False)


def test_multihead_refuses_nested_tensors() -> None:
    _, ours = pair(batch_first=True)
    x = torch.nested.nested_tensor([torch.randn(n, 32, dtype=DOUBLE) for n in (3, 5)], layout=torch.jagged)
    with pytest.raises(strobe.Unsupported, match="nested tensors"):
        ours(x, x, x, need_weights=False)


def test_multihead_under_autocast() -> None:
    theirs, ours = (module.float() for module in pair(batch_first=True, add_bias_kv=True))
    x, numbers = torch.randn(2, 9, 32), torch.randn(9, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = (m(x, x, x, need_weights=False, attn_mask=numbers)[0] for m in (ours, theirs))
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=0.15, rtol=0.02)


def test_multihead_dropout_in_training_only() -> None:
    _, ours = pair(batch_first=True, dropout=0.5)
    x = torch.randn(2, 9, 32, dtype=DOUBLE)
    a, b = (ours(x, x, x, need_weights=False)[0] for _ in range(2))
    assert not torch.equal(a, b)
    ours.eval()
    a, b = (ours(x, x, x, need_weights=False)[0] for _ in range(2))
    assert torch.equal(a, b)


def test_multihead_compiles() -> None:
    _, ours = pair(batch_first=True)
    x = torch.randn(2, 9, 32, dtype=DOUBLE)
    compiled = torch.compile(lambda x: ours(x, x, x, need_weights=False)[0], fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), ours(x, x, x, need_weights=False)[0])


# ---- Attention -------------------------------------------------------------------------------------------------------


def test_attention_by_hand() -> None:
    module = Attention(32, 4, 2, mask=strobe.causal, softcap=3.0, sinks=True, bias=True, dtype=DOUBLE)
    torch.nn.init.normal_(module.sinks)
    x = torch.randn(2, 9, 32, dtype=DOUBLE)
    q, k, v = (p(x).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    s = 3.0 * (q @ k.mT * 8**-0.5 / 3.0).tanh()
    s = s.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    s = torch.cat((s, module.sinks.view(1, 4, 1, 1).expand(2, 4, 9, 1)), -1)
    out = (s.softmax(-1)[..., :-1] @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(module(x), module.o_proj(out))
    assert "heads_k=2" in repr(module) and "causal" in repr(module)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_attention_is_that_of_llama() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rope_theta=500.0)
    config._attn_implementation = "eager"
    theirs = LlamaAttention(config, 0).double()
    ours = Attention(
        32, 4, 2, head_dim=16, rotary_base=config.rope_parameters["rope_theta"], mask=strobe.causal, dtype=DOUBLE
    )
    ours.load_state_dict(theirs.state_dict())
    x, positions = torch.randn(2, 9, 32, dtype=DOUBLE), torch.arange(3, 12)[None]
    cos_sin = tuple(t.double() for t in LlamaRotaryEmbedding(config)(x.float(), positions))
    mask = torch.full((9, 9), -torch.inf, dtype=DOUBLE).triu(1)[None, None]
    expected, _ = theirs(x, cos_sin, mask)
    torch.testing.assert_close(ours(x, positions=positions), expected, atol=1e-6, rtol=1e-5)  # their angles are in fp32


def test_positions_are_relative_and_matter() -> None:
    module = Attention(32, 4, rotary_base=100.0, rotary_dim=4, interleaved=True, mask=strobe.causal, dtype=DOUBLE)
    x = torch.randn(2, 9, 32, dtype=DOUBLE)
    expected = module(x)
    torch.testing.assert_close(module(x, positions=torch.arange(9)), expected)
    torch.testing.assert_close(module(x, positions=torch.arange(9) + 40), expected, atol=1e-5, rtol=1e-5)
    assert (module(x, positions=2 * torch.arange(9)) - expected).abs().max() > 1e-3


def test_packed_sequences() -> None:
    module = Attention(32, 4, 2, rotary_base=100.0, mask=strobe.causal & strobe.window(4, 0), dtype=DOUBLE)
    x, cu = torch.randn(15, 32, dtype=DOUBLE), torch.tensor([0, 5, 5, 15], dtype=torch.int32)
    expected = torch.cat([module(x[None, :5]), module(x[None, 5:])], 1)[0]
    torch.testing.assert_close(module(x, cu=cu), expected)
    torch.testing.assert_close(module(x, cu=cu, longest=10), expected)


def test_context_and_masks_of_a_call() -> None:
    module = Attention(32, 4, mask=strobe.causal, dtype=DOUBLE)
    x, context = (torch.randn(2, n, 32, dtype=DOUBLE) for n in (5, 9))
    visible = torch.rand(5, 9) < 0.5
    found = module(x, context, mask=visible)
    changed = context.clone()
    changed[:, ~visible[2]] += 1.0
    torch.testing.assert_close(module(x, changed, mask=visible)[:, 2], found[:, 2])
    assert (module(x, changed, mask=visible) - found).abs().max() > 1e-3
    assert (module(x, mask=strobe.full)[:, 0] - module(x)[:, 0]).abs().max() > 1e-3
    with pytest.raises(ValueError, match="context cannot be combined"):
        Attention(32, 4, rotary_base=100.0, dtype=DOUBLE)(x, context)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((32, 4, 3), {}, "heads must be a multiple of heads_k, got 4 and 3"),
        ((30, 4), {}, "dim must be a multiple of heads unless head_dim is given, got 30 and 4"),
        ((32, 4), {"rotary_base": 100.0, "rotary_dim": 10}, "rotary_dim must be even, from 2 to head_dim 8, got 10"),
    ],
)
def test_attention_refuses(arguments: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Attention(*arguments, **options)


def test_attention_trains_and_drops() -> None:
    module = Attention(32, 4, 2, rotary_base=100.0, sinks=True, dropout=0.5, mask=strobe.causal)
    x = torch.randn(2, 9, 32)
    module(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in module.parameters())
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
