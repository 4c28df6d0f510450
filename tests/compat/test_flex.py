"""FlexAttention's function, and strobe's in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as host

import strobe
from strobe.compat import flex
from strobe.variants import flex_mask

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
TABLE = torch.linspace(-1, 1, 400).reshape(4, 100)
DOCUMENTS = (torch.arange(96) // 40).int()
SCORES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "alibi": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
    "table": lambda s, b, h, q, k: s + TABLE[h, (q - k).abs()],
    "tanh": lambda s, b, h, q, k: 5 * torch.tanh(s / 5),
    "hidden": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
}
MASKS: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "causal": lambda b, h, q, k: q >= k,
    "documents": lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k],
    "heads": lambda b, h, q, k: q - k < 8 * (h + 1),
}


def tensors(heads_k: int = 4, len_q: int = 96) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 4, len_q, 16), (2, heads_k, 96, 16), (2, heads_k, 96, 16))
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_as_pytorch_computes_it(score: str, mask: str) -> None:
    q, k, v = tensors(len_q=80)
    made = (
        None if MASKS[mask] is None else host.create_block_mask(MASKS[mask], 2, 4, 80, 96, device="cpu", BLOCK_SIZE=16)
    )
    want, want_lse = host.flex_attention(q, k, v, SCORES[score], made, return_lse=True)
    out, lse = flex.flex_attention(q, k, v, SCORES[score], made, return_lse=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    torch.testing.assert_close(flex.flex_attention(q, k, v, SCORES[score], made), want)


def test_shared_heads_need_to_be_asked_for() -> None:
    q, k, v = tensors(heads_k=2)
    with pytest.raises(ValueError, match="enable_gqa"):
        flex.flex_attention(q, k, v)
    torch.testing.assert_close(
        flex.flex_attention(q, k, v, enable_gqa=True), host.flex_attention(q, k, v, enable_gqa=True)
    )


def test_blocks_without_a_function() -> None:
    q, k, v = tensors()
    counts = torch.tensor([[[1, 2, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 0, 0], [0, 1, 0], [2, 0, 0]]]], dtype=torch.int32)
    blocks = host.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=32)
    seen = torch.zeros(96, 96, dtype=torch.bool)
    for i, j in ((0, 0), (1, 0), (1, 1), (2, 2)):
        seen[32 * i : 32 * i + 32, 32 * j : 32 * j + 32] = True
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    torch.testing.assert_close(flex.flex_attention(q, k, v, block_mask=blocks), want)
    torch.testing.assert_close(strobe.attention(q, k, v, mask=blocks, layout="bhsd"), want)


@pytest.mark.parametrize("whole", [False, True])
def test_blocks_beside_a_function(whole: bool) -> None:
    """The function is for the partial blocks that are listed; it hides nothing in whole ones."""
    q, k, v = tensors()
    counts = torch.tensor([[[1, 1, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 0, 0], [1, 0, 0], [0, 2, 1]]]], dtype=torch.int32)
    others = torch.tensor([[[0, 1, 0]]], dtype=torch.int32), torch.tensor([[[[0, 0, 0], [2, 0, 0], [0, 0, 0]]]]).int()
    made = host.BlockMask.from_kv_blocks(
        counts, indices, *(others if whole else (None, None)), BLOCK_SIZE=32, mask_mod=MASKS["causal"]
    )
    seen = torch.zeros(96, 96, dtype=torch.bool)
    for i, j in ((0, 0), (1, 1), (2, 0), (2, 2)):
        seen[32 * i : 32 * i + 32, 32 * j : 32 * j + 32] = True
    seen &= torch.ones(96, 96).tril().bool()
    seen[32:64, 64:] |= whole
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    torch.testing.assert_close(flex.flex_attention(q, k, v, block_mask=made), want)
    torch.testing.assert_close(strobe.attention(q, k, v, mask=made, layout="bhsd"), want)


@pytest.mark.parametrize("name", ["causal", "documents", "heads"])
def test_blocks_that_a_function_made_add_nothing_to_it(name: str) -> None:
    made = host.create_block_mask(MASKS[name], 2, 4, 90, 96, device="cpu", BLOCK_SIZE=16)
    found, alone = flex_mask.of_block_mask(made), strobe.mask_function(MASKS[name], rows=True)
    assert (found.interval, found.rest) == (alone.interval, alone.rest)


def test_blocks_for_other_lengths_are_refused() -> None:
    q, k, v = tensors()
    made = host.create_block_mask(MASKS["causal"], None, None, 64, 96, device="cpu", BLOCK_SIZE=32)
    for call in (
        lambda: flex.flex_attention(q, k, v, block_mask=made),
        lambda: strobe.attention(q, k, v, mask=made, layout="bhsd"),
    ):
        with pytest.raises(ValueError, match="created for 64 queries and 96 keys, got 96 and 96"):
            call()
    empty = host._create_empty_block_mask(q, k)
    torch.testing.assert_close(flex.flex_attention(q, k, v, block_mask=empty), flex.flex_attention(q, k, v))


def test_a_verdict_lasts_no_longer_than_what_it_is_about() -> None:
    """Another function, or other contents of its tensors or of the lists, is another mask."""
    q, k, v = tensors()
    ids = DOCUMENTS.clone()
    made = host.create_block_mask(lambda b, h, i, j: ids[i] == ids[j], 2, 4, 96, 96, device="cpu", BLOCK_SIZE=16)

    def check() -> torch.Tensor:
        lists = (made.kv_num_blocks, made.kv_indices), (made.full_kv_num_blocks, made.full_kv_indices)
        partial, whole = (pairs(*each) for each in lists)
        row, column = torch.arange(96)[:, None], torch.arange(96)
        seen = whole | partial & made.mask_mod(torch.tensor(0), torch.tensor(0), row, column)
        found = flex.flex_attention(q, k, v, block_mask=made)
        torch.testing.assert_close(found, torch.nn.functional.scaled_dot_product_attention(q, k, v, seen))
        return found

    def pairs(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        blocks = torch.zeros(2, 4, 6, 6, dtype=torch.bool)
        for at in torch.cartesian_prod(*map(torch.arange, (2, 4, 6))).tolist():
            blocks[tuple(at)][indices[tuple(at)][: counts[tuple(at)]].long()] = True
        return blocks.repeat_interleave(16, -1).repeat_interleave(16, -2)

    first = check()
    ids.copy_(torch.arange(96) // 25)
    second = check()
    made.mask_mod = lambda b, h, i, j: i >= j
    third = check()
    made.kv_num_blocks.clamp_(max=1)
    fourth = check()
    for a, b in ((first, second), (second, third), (third, fourth)):
        assert not torch.equal(a, b)
    with torch.inference_mode():
        made.kv_num_blocks = made.kv_num_blocks.clone()
        made.kv_num_blocks.zero_()
        whole = flex.flex_attention(q, k, v, block_mask=made)
        made.kv_num_blocks.fill_(1)
        assert not torch.equal(flex.flex_attention(q, k, v, block_mask=made), whole)


def test_a_function_of_the_name_of_pytorchs_is_asked() -> None:
    def noop_mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    q, k, v = tensors()
    made = host.create_block_mask(noop_mask, 2, 4, 96, 96, device="cpu", BLOCK_SIZE=16)
    torch.testing.assert_close(
        flex.flex_attention(q, k, v, block_mask=made), host.flex_attention(q, k, v, block_mask=made)
    )


@pytest.mark.parametrize("name", ["causal", "documents"])
def test_pages_of_pytorch(name: str) -> None:
    """PyTorch's pages: keys of all sequences in a pool of batch 1; lists of blocks with -1 where no page is."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention

    q, k, v = tensors()
    pages = PagedAttention(16, 16, 2, device="cpu")
    for i in (1, 0):
        pages.reserve(torch.tensor([i]), torch.tensor([96]))
    pool = [torch.zeros(1, 4, 256, 16) for _ in range(2)]
    pages.assign(torch.arange(2), torch.arange(96).expand(2, -1), k, v, *pool)
    made = host.create_block_mask(MASKS[name], 2, 1, 96, 96, device="cpu", BLOCK_SIZE=16)
    made.kv_indices[..., -1].masked_fill_(made.kv_num_blocks < 6, 7)  # an unused entry whose page is not there
    converted = pages.convert_logical_block_mask(made)
    assert (converted.kv_indices < 0).any()
    score = pages.get_score_mod(SCORES["alibi"])
    want = host.flex_attention(q, k, v, SCORES["alibi"], made)
    torch.testing.assert_close(flex.flex_attention(q, *pool, score, converted), want)


def test_a_pool_of_keys_for_all_sequences_has_a_gradient() -> None:
    q, k, v = (t.requires_grad_() for t in (tensors()[0], *(t[:1].clone() for t in tensors()[1:])))
    mask = host.create_block_mask(MASKS["causal"], 2, 4, 96, 96, device="cpu", BLOCK_SIZE=16)
    out = flex.flex_attention(q, k, v, block_mask=mask)
    dense = torch.ones(96, 96, dtype=torch.bool).tril()
    want = torch.nn.functional.scaled_dot_product_attention(q, *(t.expand(2, -1, -1, -1) for t in (k, v)), dense)
    torch.testing.assert_close(out, want)
    for found, expected in zip(*(torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (out, want)), strict=True):
        torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="batch"):
        flex.flex_attention(q, k, v)


def test_any_strides() -> None:
    q, k, v = (t.transpose(2, 3).contiguous().transpose(2, 3) for t in tensors())
    torch.testing.assert_close(flex.flex_attention(q, k, v), host.flex_attention(q, k, v))


@pytest.mark.parametrize("score", ["none", "alibi", "hidden"])
def test_the_largest_scores(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_MOST_PROBABILITIES", 2 * 4 * 96 * 20)  # parts of 20 rows
    q, k, v = tensors()
    made = host.create_block_mask(lambda b, h, i, j: (i > j) | (i > 90), 2, 4, 96, 96, device="cpu", BLOCK_SIZE=16)
    s, function = q @ k.mT / 4, SCORES[score] or (lambda s, *_: s)
    places = (torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(s.shape))
    i, j = torch.arange(96)[:, None], torch.arange(96)
    largest = function(s, *places).masked_fill(~((i > j) | (i > 90)), -torch.inf).amax(-1)
    assert (largest == -torch.inf).any()
    for request in (host.AuxRequest(max_scores=True), host.AuxRequest(lse=True, max_scores=True)):
        out, aux = flex.flex_attention(q, k, v, SCORES[score], made, return_aux=request)
        torch.testing.assert_close(out, flex.flex_attention(q, k, v, SCORES[score], made))
        torch.testing.assert_close(aux.max_scores, largest)
        assert (aux.lse is None) == (not request.lse)


def test_gradients() -> None:
    found = []
    for function in (flex.flex_attention, host.flex_attention):
        x = [t.requires_grad_() for t in tensors()]
        if function is host.flex_attention:  # PyTorch's has no backward pass on a CPU
            s = x[0] @ x[1].mT / 4 - SLOPES[:, None, None] * (torch.arange(96)[:, None] - torch.arange(96)).abs()
            out = s.softmax(-1) @ x[2]
        else:
            out = function(*x, SCORES["alibi"])
        found.append(torch.autograd.grad(out.square().sum(), x))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_patched() -> None:
    q, k, v = tensors()
    before = host.flex_attention
    with flex.patched():
        assert strobe.compat.status()["torch.nn.attention.flex_attention"] == "flex_attention is patched"
        out = torch.nn.attention.flex_attention.flex_attention(q, k, v, SCORES["alibi"])
        assert host.flex_attention is flex.flex_attention
    assert host.flex_attention is before
    torch.testing.assert_close(out, before(q, k, v, SCORES["alibi"]))


def test_masks_of_strobe_take_the_place_of_block_masks() -> None:
    q, k, v = tensors()
    for mask in (strobe.causal, strobe.causal & strobe.mask_function(lambda b, h, i, j: (i - j) % 3 != 1)):
        want = strobe.attention(q, k, v, mask=mask, layout="bhsd")
        torch.testing.assert_close(flex.flex_attention(q, k, v, block_mask=mask), want)
