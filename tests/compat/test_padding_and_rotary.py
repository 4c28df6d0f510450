"""flash-attn's helpers that other libraries import: unpadding, and rotary embedding with its gradient."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from strobe.compat.flash_attn import bert_padding
from strobe.compat.flash_attn.layers import rotary
from strobe.compat.flash_attn.ops.triton.rotary import apply_rotary
from strobe.nn.rotary import angles


def test_unpad_and_pad_are_inverse() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    x = torch.randn(3, 4, 2, 5, requires_grad=True)
    tokens, indices, cu, longest, used = bert_padding.unpad_input(x, mask)
    assert tokens.shape == (6, 2, 5) and longest == 4 and cu.dtype == torch.int32
    assert cu.tolist() == [0, 2, 6, 6] and used.tolist() == [2, 4, 0] and indices.tolist() == [1, 2, 4, 5, 6, 7]
    back = bert_padding.pad_input(tokens, indices, 3, 4)
    torch.testing.assert_close(back, x * mask[..., None, None])
    (gradient,) = torch.autograd.grad(back.sum(), x)
    torch.testing.assert_close(gradient, mask[..., None, None].expand_as(x).to(x.dtype))


def test_padding_with_indices_in_int32() -> None:
    """transformers has them so in `generate()` with padded batches."""
    tokens, indices = torch.randn(3, 2), torch.tensor([1, 2, 5], dtype=torch.int32)
    back = bert_padding.pad_input(tokens, indices, 2, 3)
    torch.testing.assert_close(back.flatten(0, 1)[indices.long()], tokens)
    torch.testing.assert_close(bert_padding.index_first_axis(back.flatten(0, 1), indices), tokens)


def test_unused_tokens_keep_their_place() -> None:
    mask, unused = torch.tensor([[1, 1, 0, 0]]), torch.tensor([[0, 0, 1, 0]])
    tokens, indices, cu, longest, used = bert_padding.unpad_input(torch.randn(1, 4, 3), mask, unused)
    assert (
        tokens.shape[0] == longest == 3
        and cu.tolist() == [0, 3]
        and used.tolist() == [2]
        and indices.tolist() == [0, 1, 2]
    )


def test_sequences_concatenated_in_a_row() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.randn(2, 6, 3)
    tokens, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert cu.tolist() == [0, 2, 5, 11] and longest == 6
    torch.testing.assert_close(tokens, torch.cat((x[0, :5], x[1])))
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]


def test_residual_rows() -> None:
    x = torch.randn(5, 3, requires_grad=True)
    rows, same = bert_padding.index_first_axis_residual(x, torch.tensor([1, 4]))
    (gradient,) = torch.autograd.grad(2 * rows.sum() + same.sum(), x)
    assert gradient[:, 0].tolist() == [1, 3, 1, 1, 3]


# ---- rotary ----------------------------------------------------------------------------------------------------------


def as_complex(x: torch.Tensor, at: torch.Tensor, dim: int, interleaved: bool) -> torch.Tensor:
    """Pairs of dims as complex numbers, multiplied by e^(i angle)."""
    head, rest = x[..., :dim], x[..., dim:]
    pairs = head.unflatten(-1, (-1, 2)) if interleaved else head.unflatten(-1, (2, -1)).transpose(-1, -2)
    angle = at.double()[..., None, None] * 10000.0 ** (-torch.arange(0, dim, 2).double() / dim)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat((turned, rest), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [8, 16])
@pytest.mark.parametrize("offset", [0, 5, "tensor"])
def test_rotary_turns_pairs(dim: int, interleaved: bool, offset: int | str) -> None:
    x = torch.randn(2, 6, 3, 16, dtype=torch.float64, requires_grad=True)
    cos, sin = angles(torch.arange(32), dim, dtype=torch.float64)
    offsets = torch.tensor([3, 11]) if offset == "tensor" else offset
    start = offsets if isinstance(offsets, torch.Tensor) else torch.full((2,), offsets)
    expected = as_complex(x, start[:, None] + torch.arange(6), dim, interleaved)
    found = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)  # the tables' angles are in fp32
    gradients = (torch.autograd.grad(t.square().sum(), x)[0] for t in (found, expected))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-5)
    packed = x.detach().flatten(0, 1)
    cu = torch.tensor([0, 6, 12], dtype=torch.int32)
    same = rotary.apply_rotary_emb(packed, cos, sin, interleaved, seqlen_offsets=offsets, cu_seqlens=cu, max_seqlen=6)
    torch.testing.assert_close(same, found.detach().flatten(0, 1))


def test_rotary_in_place() -> None:
    cos, sin = angles(torch.arange(8), 16)
    qkv = torch.randn(2, 6, 3, 4, 16)
    before = qkv.clone()
    expected = [rotary.apply_rotary_emb(before[:, :, i], cos, sin) for i in (0, 1)]
    assert rotary.apply_rotary_emb_qkv_(qkv, cos, sin) is qkv
    torch.testing.assert_close(qkv, torch.stack((*expected, before[:, :, 2]), 2))
    kv = before[:, :, 1:].clone()
    assert rotary.apply_rotary_emb_kv_(kv, cos, sin) is kv
    torch.testing.assert_close(kv, torch.stack((expected[1], before[:, :, 2]), 2))
    grouped = before[:, :, 0].clone()  # two query heads, one of keys, one of values
    assert rotary.apply_rotary_emb_qkv_(grouped, cos, sin, num_heads_q=2) is grouped
    torch.testing.assert_close(grouped[:, :, :3], expected[0][:, :, :3])
    torch.testing.assert_close(grouped[:, :, 3], before[:, :, 0, 3])
    with pytest.raises(ValueError, match="num_heads_q must leave as many heads of k as of v"):
        rotary.apply_rotary_emb_qkv_(grouped, cos, sin, num_heads_q=1)


def leaf_and_views() -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(kind, the leaf, what is to be turned)"""
    leaf = torch.randn(2, 6, 4, 16, requires_grad=True)
    yield "leaf", leaf, leaf
    leaf = torch.randn(2, 6, 4, 16, requires_grad=True)
    yield "view", leaf, leaf[:, :, 1:3]
    leaf = torch.randn(2, 6, 4, 16, requires_grad=True)
    yield "result", leaf, leaf * 1


@pytest.mark.parametrize("compiled", [False, True])
def test_rotary_in_place_of_leaves_and_their_views(compiled: bool) -> None:
    """The result is a function of what x was; the memory of x holds it."""
    cos, sin = angles(torch.arange(8), 16)

    def turn(x: torch.Tensor) -> torch.Tensor:
        return rotary.apply_rotary_emb(x, cos, sin, inplace=True)

    function = torch.compile(turn, backend="aot_eager", fullgraph=True) if compiled else turn
    for kind, leaf, x in leaf_and_views():
        torch._dynamo.reset()
        old = x.detach().clone().requires_grad_()
        expected = rotary.apply_rotary_emb(old, cos, sin)
        found = function(x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(x.detach(), expected.detach())
        weights = torch.randn_like(found)
        (wanted,) = torch.autograd.grad(expected, old, weights)
        (gradient,) = torch.autograd.grad(found, leaf, weights)
        torch.testing.assert_close(gradient[:, :, 1:3] if kind == "view" else gradient, wanted)


@pytest.mark.parametrize("parts", [3, 2])
def test_rotary_in_place_of_packed_leaves(parts: int) -> None:
    cos, sin = angles(torch.arange(8), 16)
    packed = torch.randn(2, 6, parts, 4, 16, requires_grad=True)
    old = packed.detach().clone().requires_grad_()
    turned = [rotary.apply_rotary_emb(old[:, :, i], cos, sin) for i in range(parts - 1)]
    expected = torch.stack((*turned, old[:, :, -1]), 2)
    function = rotary.apply_rotary_emb_qkv_ if parts == 3 else rotary.apply_rotary_emb_kv_
    found = function(packed, cos, sin)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(packed.detach(), expected.detach())
    weights = torch.randn_like(found)
    (wanted,), (gradient,) = (torch.autograd.grad(o, x, weights) for o, x in ((expected, old), (found, packed)))
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (3, "seqlen_offsets must be from 0 to 2: x has 6 rows and the tables have 8; got 3"),
        (7, "got 7"),
        (-1, "got -1"),
        (torch.tensor([0, 3]), r"seqlen_offsets must be from 0 to 2, got \[0, 3\]"),
        (torch.tensor([0, -1]), r"got \[0, -1\]"),
    ],
    ids=str,
)
def test_rotary_offsets_that_the_tables_do_not_have(offset: int | torch.Tensor, message: str) -> None:
    cos, sin = angles(torch.arange(8), 16)
    x = torch.randn(2, 6, 3, 16)
    with pytest.raises(ValueError, match=message):
        rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=offset)
    with pytest.raises(ValueError, match="rotary positions must be from 0 to 7"):
        cu = torch.tensor([0, 6, 12], dtype=torch.int32)
        rotary.apply_rotary_emb(x.flatten(0, 1), cos, sin, seqlen_offsets=offset, cu_seqlens=cu, max_seqlen=6)


@pytest.mark.parametrize("inplace", [False, True])
def test_rotary_below_autograd(inplace: bool) -> None:
    cos, sin = angles(torch.arange(8), 16)
    x = torch.randn(2, 6, 3, 16, requires_grad=True)
    expected = rotary.apply_rotary_emb(x.detach().clone(), cos, sin, seqlen_offsets=2)
    before = x.detach().clone()
    found = apply_rotary(x, cos, sin, seqlen_offsets=2, inplace=inplace)
    torch.testing.assert_close(found.detach(), expected)
    torch.testing.assert_close(x.detach(), expected if inplace else before)
    back = apply_rotary(found.detach(), cos, sin, seqlen_offsets=2, conjugate=True)
    torch.testing.assert_close(back, before)


def test_rotary_module_in_inference_and_then_in_training() -> None:
    module = rotary.RotaryEmbedding(16)
    qkv = torch.randn(2, 6, 3, 4, 16)
    with torch.inference_mode():
        expected = module(qkv.clone())
    leaf = qkv.clone().requires_grad_()
    found = module(leaf * 1)
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found.sum(), leaf)
    assert gradient.isfinite().all()


def test_rotary_module() -> None:
    module = rotary.RotaryEmbedding(16)
    qkv = torch.randn(2, 6, 3, 4, 16)
    cos, sin = angles(torch.arange(9), 16)
    expected = rotary.apply_rotary_emb_qkv_(qkv.clone(), cos, sin, seqlen_offsets=3)
    torch.testing.assert_close(module(qkv.clone(), seqlen_offset=3), expected)
    q, kv = module(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone(), seqlen_offset=3)
    torch.testing.assert_close(torch.cat((q[:, :, None], kv), 2), expected)
    assert not module.state_dict()
    slower = rotary.RotaryEmbedding(16)
    slower.inv_freq.mul_(0.25)
    cos, sin = angles(torch.arange(9) / 4, 16)
    expected = rotary.apply_rotary_emb_qkv_(qkv.clone(), cos, sin, seqlen_offsets=3)
    torch.testing.assert_close(slower(qkv.clone(), seqlen_offset=3), expected)
    torch.testing.assert_close(
        rotary.RotaryEmbedding(16).bfloat16()(qkv.clone()), rotary.RotaryEmbedding(16)(qkv.clone())
    )  # frequencies are not rounded with the module
    with pytest.raises(ValueError, match="XPos"):
        rotary.RotaryEmbedding(16, scale_base=512)


def test_rotary_refuses_tables_that_do_not_fit() -> None:
    cos, sin = angles(torch.arange(8), 16)
    with pytest.raises(ValueError, match="rotary_dim at most 8, the head dim"):
        rotary.apply_rotary_emb(torch.randn(1, 4, 2, 8), cos, sin)
    with pytest.raises(ValueError, match="dim must be even"):
        angles(torch.arange(8), 15)
