"""The attention function of transformers: what it honours, what it refuses, and that it waits for nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")
from compat import models  # noqa: E402
from transformers import masking_utils as mu  # noqa: E402

import strobe  # noqa: E402
from strobe.compat.transformers import NAME, attention as module_under_test, masks  # noqa: E402
from strobe.compat.transformers.attention import attention  # noqa: E402

LENGTH = 12


def layer(**attributes: Any) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def qkv(batch: int = 2, len_q: int = LENGTH, len_k: int = LENGTH) -> list[torch.Tensor]:
    return [torch.randn(batch, h, n, 8, dtype=torch.float64) for h, n in ((4, len_q), (2, len_k), (2, len_k))]


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    return out.transpose(1, 2)


# ---- masks -----------------------------------------------------------------------------------------------------------


def test_without_a_mask_it_does_what_sdpa_does() -> None:
    q, k, v = qkv()
    causal, both = layer(is_causal=True), layer(is_causal=False)
    torch.testing.assert_close(attention(causal, q, k, v, None)[0], sdpa(q, k, v, is_causal=True))
    torch.testing.assert_close(attention(layer(), q, k, v, None)[0], sdpa(q, k, v, is_causal=True))
    torch.testing.assert_close(attention(both, q, k, v, None)[0], sdpa(q, k, v))
    torch.testing.assert_close(attention(causal, q, k, v, None, is_causal=False)[0], sdpa(q, k, v))
    torch.testing.assert_close(attention(both, q, k, v, None, is_causal=True)[0], sdpa(q, k, v, is_causal=True))
    one = q[:, :, -1:]
    torch.testing.assert_close(attention(causal, one, k, v, None)[0], sdpa(one, k, v))
    few = q[:, :, :5]  # keys behind are room in a cache
    torch.testing.assert_close(attention(causal, few, k, v, None)[0], sdpa(few, k, v, is_causal=True))


def test_windows_without_a_mask() -> None:
    q, k, v = qkv()
    at = torch.arange(LENGTH)
    distance = at[:, None] - at
    found = attention(layer(is_causal=True), q, k, v, None, sliding_window=3)[0]
    torch.testing.assert_close(found, sdpa(q, k, v, attn_mask=(distance >= 0) & (distance < 3)))
    found = attention(layer(is_causal=False), q, k, v, None, sliding_window=3)[0]
    torch.testing.assert_close(found, sdpa(q, k, v))  # as with eager attention: what is not hidden by a mask is seen
    few = q[:, :, :5]
    torch.testing.assert_close(attention(layer(is_causal=False), few, k, v, None, sliding_window=3)[0], sdpa(few, k, v))
    wide = attention(layer(is_causal=True), few, k, v, None, sliding_window=LENGTH)[0]
    torch.testing.assert_close(wide, sdpa(few, k, v, is_causal=True))
    with pytest.raises(
        strobe.Unsupported, match="Module has a sliding_window of 3, 5 queries, 12 keys and no attention mask"
    ):
        attention(layer(is_causal=True), few, k, v, None, sliding_window=3)


def test_masks_that_a_user_made() -> None:
    q, k, v = qkv()
    visible = torch.rand(2, 1, LENGTH, LENGTH) < 0.6
    visible[..., 0] = True
    numbers = torch.where(visible, torch.randn(visible.shape), -torch.inf).double()
    room = torch.nn.functional.pad(visible, (0, 3))  # longer than the keys
    torch.testing.assert_close(attention(layer(), q, k, v, visible)[0], sdpa(q, k, v, attn_mask=visible))
    torch.testing.assert_close(attention(layer(), q, k, v, room)[0], sdpa(q, k, v, attn_mask=visible))
    torch.testing.assert_close(attention(layer(), q, k, v, numbers)[0], sdpa(q, k, v, attn_mask=numbers))
    with pytest.raises(strobe.Unsupported, match=r"attention_mask has shape \(2, 12\)"):
        attention(layer(), q, k, v, torch.ones(2, LENGTH))


def test_position_bias_has_a_gradient() -> None:
    q, k, v = qkv()
    bias = torch.randn(1, 4, LENGTH, LENGTH, dtype=torch.float64, requires_grad=True)
    visible = torch.rand(2, 1, LENGTH, LENGTH) < 0.6
    visible[..., 0] = True
    lazy = masks.mask(2, LENGTH, LENGTH)
    padded = masks.mask(2, LENGTH, LENGTH, attention_mask=torch.tensor([[True] * 4 + [False, True] * 4] * 2))
    assert padded.bias is not None
    for mask in (visible, torch.where(visible, 0.0, -torch.inf).double(), lazy, padded):
        whole = mask if isinstance(mask, torch.Tensor) else mask.dense()
        added = torch.where(whole, 0.0, -torch.inf) if whole.dtype == torch.bool else whole
        expected = sdpa(q, k, v, attn_mask=bias + added)
        found = attention(layer(), q, k, v, mask, position_bias=bias)[0]
        torch.testing.assert_close(found, expected)
        gradients = (torch.autograd.grad(t.square().sum(), bias)[0] for t in (found, expected))
        torch.testing.assert_close(*gradients)
    static = masks.mask(2, 3, LENGTH)  # only the first three keys of a cache are in use
    found = attention(layer(), q[:, :, :3], k, v, static, position_bias=bias[:, :, :3])[0]
    expected = attention(layer(), q[:, :, :3], k[:, :, :3], v[:, :, :3], None, position_bias=bias[:, :, :3, :3])[0]
    torch.testing.assert_close(found, expected)


def test_scale_softcap_sinks_and_dropout_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    sinks = torch.randn(4)
    found = attention(layer(), q, k, v, masks.mask(2, LENGTH, LENGTH), scaling=0.3, softcap=2.0, s_aux=sinks)[0]
    options = {"mask": strobe.causal, "scale": 0.3, "softcap": 2.0, "sinks": sinks, "layout": "bhsd"}
    torch.testing.assert_close(found, strobe.attention(q, k, v, **options).transpose(1, 2))
    torch.manual_seed(4)
    found = attention(layer(), q, k, v, None, dropout=0.4)[0]
    torch.manual_seed(4)
    torch.testing.assert_close(
        found, strobe.attention(q, k, v, mask=strobe.causal, dropout=0.4, layout="bhsd").transpose(1, 2)
    )
    seen: list[Any] = []
    monkeypatch.setattr(module_under_test, "attend", lambda a: seen.append(a) or a.q)
    attention(layer(), q, k, v, None, deterministic=True)
    assert seen[0].deterministic is True


# ---- packed sequences ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt-oss"])
def test_packed_documents_do_not_see_each_other(name: str) -> None:
    """position_ids that start again, with and without cu_seq_lens: each document as if it were alone. transformers' gpt-oss
    does not look for documents in position_ids, whatever the implementation."""
    model, lengths = models.model(name, NAME), (5, 12, 4)
    tokens = torch.randint(3, 90, (1, 21))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    cu = torch.tensor([0, 5, 17, 21])
    described = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 12, "max_length_k": 12}
    with torch.no_grad():
        alone = torch.cat([model(input_ids=part).logits for part in tokens.split(lengths, dim=1)], 1)
        for more in (described,) if name == "gpt-oss" else ({}, described):
            packed = model(input_ids=tokens, position_ids=positions, use_cache=False, **more).logits
            torch.testing.assert_close(packed, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("registered")
def test_packed_documents_in_several_rows() -> None:
    model = models.model("llama", NAME)
    tokens = torch.randint(3, 90, (2, 12))
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ((7, 5), (3, 9))])
    with torch.no_grad():
        packed = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        eager = models.model("llama", "eager")(input_ids=tokens, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed, eager, atol=1e-4, rtol=1e-4)


def test_what_packed_sequences_cannot_have() -> None:
    q, k, v = qkv(batch=1)
    cu = torch.tensor([0, 5, LENGTH], dtype=torch.int32)
    described = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 7, "max_length_k": 7}
    padded = masks.mask(1, LENGTH, LENGTH, attention_mask=torch.tensor([[False] + [True] * 11]))
    with pytest.raises(strobe.Unsupported, match="cannot be combined with packed sequences"):
        attention(layer(), q, k, v, padded, **described)
    with pytest.raises(strobe.Unsupported, match="cannot be combined with packed sequences"):
        attention(layer(), q, k, v, None, position_bias=torch.zeros(1, 4, LENGTH, LENGTH), **described)
    with pytest.raises(strobe.Unsupported, match="mask tensors and position_bias cannot be combined with packed"):
        attention(layer(), q, k, v, torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), **described)
    function = mu.and_masks(
        mu.causal_mask_function, mu.packed_sequence_mask_function(torch.tensor([[0] * 5 + [1] * 7]))
    )
    documents = masks.mask(1, LENGTH, LENGTH, mask_function=function)
    with pytest.raises(strobe.Unsupported, match="position_ids that start again"):
        attention(layer(), q, k, v, documents, position_bias=torch.zeros(1, 4, LENGTH, LENGTH))


@pytest.mark.parametrize("is_causal", [None, False, True])
@pytest.mark.parametrize("of_layer", [None, False, True])
def test_packed_sequences_without_a_mask(of_layer: bool | None, is_causal: bool | None) -> None:
    """A call's word on causality counts before its layer's, as without packed sequences."""
    q, k, v = qkv(batch=1)
    cu = torch.tensor([0, 5, LENGTH], dtype=torch.int32)
    described = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 7, "max_length_k": 7}
    module = layer() if of_layer is None else layer(is_causal=of_layer)
    found = attention(module, q, k, v, None, is_causal=is_causal, **described)[0]
    parts = zip(*(t.split((5, 7), 2) for t in (q, k, v)), strict=True)
    alone = [attention(module, *part, None, is_causal=is_causal)[0] for part in parts]
    torch.testing.assert_close(found, torch.cat(alone, 1))


def test_windows_of_packed_sequences_that_are_not_causal() -> None:
    """They reach as far to both sides, as in transformers' own flash attention."""
    q, k, v = qkv(batch=1)
    cu = torch.tensor([0, LENGTH], dtype=torch.int32)
    described = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": LENGTH, "max_length_k": LENGTH}
    found = attention(layer(), q, k, v, None, is_causal=False, sliding_window=3, **described)[0]
    at = torch.arange(LENGTH)
    torch.testing.assert_close(found, sdpa(q, k, v, attn_mask=(at[:, None] - at).abs() < 3))


def test_booleans_and_packed_sequences() -> None:
    """A mask is booleans under a tracer; cu_seq_lens still say where sequences end."""
    q, k, v = qkv(batch=1)
    cu = torch.tensor([0, 5, LENGTH], dtype=torch.int32)
    described = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 7, "max_length_k": 7}
    expected = attention(layer(), q, k, v, masks.mask(1, LENGTH, LENGTH), **described)[0]
    booleans = masks.mask(1, LENGTH, LENGTH)[:]
    assert booleans.booleans is not None
    torch.testing.assert_close(attention(layer(), q, k, v, booleans, **described)[0], expected)
    assert not torch.allclose(attention(layer(), q, k, v, booleans)[0], expected)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("registered")
def test_weights_cannot_be_had() -> None:
    q, k, v = qkv()
    with pytest.raises(strobe.Unsupported, match="output_attentions=True"):
        attention(layer(), q, k, v, None, output_attentions=True)
    model = models.model("llama", NAME)
    with pytest.raises((strobe.Unsupported, ValueError), match="output_attentions"):
        model(**models.inputs("llama"), output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions"):
        model.config.output_attentions = True


# ---- nothing waits ---------------------------------------------------------------------------------------------------


class NoReading(TorchDispatchMode):
    """Fails where the host would wait for a device: when a number is read, or a shape depends on contents."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        assert not any(word in name for word in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")), name
        return function(*args, **(kwargs or {}))


def test_layers_read_no_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test covers a layer's call up to `attend`, which has its own test."""
    monkeypatch.setattr(module_under_test, "attend", lambda a: a.q)
    q, k, v = qkv()
    padding = torch.ones(2, LENGTH, dtype=torch.bool)
    padding[1, :4] = False
    holes = padding.clone()
    holes[0, 5] = False
    window = mu.sliding_window_causal_mask_function(4)
    prepared = [
        None,
        masks.mask(2, LENGTH, LENGTH),
        masks.mask(2, LENGTH, LENGTH, mask_function=window),
        masks.mask(2, LENGTH, LENGTH, attention_mask=padding),
        masks.mask(2, LENGTH, LENGTH, attention_mask=holes),
        torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool),
    ]
    cu = torch.tensor([0, 2 * LENGTH])
    described = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 2 * LENGTH, "max_length_k": 2 * LENGTH}
    with NoReading():
        for mask in prepared:
            attention(layer(), q, k, v, mask, s_aux=torch.ones(4), softcap=1.0)
        attention(layer(), q, k, v, None, **described)


def test_masks_without_padding_read_no_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask function reads nothing either, if the number of tokens so far lies on the device, as in a static
    cache."""
    monkeypatch.setattr(masks, "_as_int", lambda n: n)
    so_far = torch.tensor(5)
    with NoReading():
        for function in (
            mu.causal_mask_function,
            mu.sliding_window_causal_mask_function(4),
            mu.bidirectional_mask_function,
        ):
            masks.mask(2, LENGTH, LENGTH, mask_function=function)
            masks.mask(2, 1, LENGTH, q_offset=so_far, mask_function=function)
