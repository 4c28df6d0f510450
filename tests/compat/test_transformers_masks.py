"""The mask function: whatever transformers describes, ours means the same, and mostly without the booleans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

transformers = pytest.importorskip("transformers")
from transformers import masking_utils as mu  # noqa: E402

import strobe  # noqa: E402
from strobe.compat.transformers import masks  # noqa: E402
from strobe.compat.transformers.layer_mask import LayerMask  # noqa: E402

BATCH = 3


def booleans(x: Any) -> torch.Tensor:
    return x.dense() if isinstance(x, LayerMask) else x


def expected(**description: Any) -> torch.Tensor:
    return mu.sdpa_mask(**(description | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}))


@st.composite
def descriptions(draw: Any) -> dict[str, Any]:
    """Everything that transformers may ask for: kinds of masks, places of queries and keys, padding."""
    kind = draw(
        st.sampled_from(["causal", "sliding", "chunked", "bidirectional", "bidirectional sliding", "packed", "or"])
    )
    past, len_q = draw(st.integers(0, 12)), draw(st.integers(1, 9))
    room = draw(st.integers(0, 6))  # of a static cache
    kv_offset = draw(st.integers(0, past)) if kind in ("causal", "sliding", "chunked", "bidirectional sliding") else 0
    if kind in ("packed", "or"):
        past = room = kv_offset = 0
    len_k = past + len_q - kv_offset + room
    padding = (
        draw(st.sampled_from([None, "all", "left", "right", "both", "holes", "none"])) if kind != "packed" else None
    )
    tokens = past + len_q
    mask = None
    if padding is not None:
        mask = torch.ones(BATCH, tokens, dtype=torch.bool)
        for i in range(BATCH):
            a, b = sorted(draw(st.tuples(st.integers(0, tokens), st.integers(0, tokens))))
            if padding in ("left", "both"):
                mask[i, :a] = False
            if padding in ("right", "both"):
                mask[i, b:] = False
            if padding == "holes":
                mask[i] = torch.tensor(draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
            if padding == "none" and i:
                mask[i] = False
    size = draw(st.integers(1, 8))
    if kind == "chunked":
        first = (mask.cumsum(-1) == 0).sum(-1) if mask is not None else torch.zeros(BATCH, dtype=torch.long)
        function = mu.chunked_causal_mask_function(size, first)
    elif kind == "packed":
        ids = torch.tensor(
            draw(st.lists(st.lists(st.integers(0, 1), min_size=len_q, max_size=len_q), min_size=3, max_size=3))
        )
        base = draw(st.sampled_from([mu.causal_mask_function, mu.sliding_window_causal_mask_function(size)]))
        function = mu.and_masks(base, mu.packed_sequence_mask_function(ids.cumsum(-1)))
    elif kind == "or":
        blocks = torch.randint(-1, 2, (BATCH, len_k), generator=torch.Generator().manual_seed(size))
        function = mu.or_masks(mu.causal_mask_function, mu.blockwise_overlay(blocks))
    else:
        function = {
            "causal": mu.causal_mask_function,
            "sliding": mu.sliding_window_causal_mask_function(size),
            "bidirectional": mu.bidirectional_mask_function,
            "bidirectional sliding": mu.sliding_window_bidirectional_mask_function(size),
        }[kind]
    return {
        "batch_size": BATCH,
        "q_length": len_q,
        "kv_length": len_k,
        "q_offset": past,
        "kv_offset": kv_offset,
        "mask_function": function,
        "attention_mask": mask,
    }


@settings(max_examples=300)
@given(descriptions(), st.booleans())
def test_means_the_same(description: dict[str, Any], unread: bool) -> None:
    """`unread`: as on a GPU, where the number of tokens so far is not read back."""
    with pytest.MonkeyPatch.context() as patch:
        if unread:
            patch.setattr(masks, "_as_int", lambda n: n)
            description["q_offset"] = torch.tensor(description["q_offset"])
        found = masks.mask(**description)
    assert found.shape == (BATCH, 1, description["q_length"], description["kv_length"])
    assert torch.equal(booleans(found), expected(**description))


@settings(max_examples=60)
@given(descriptions())
def test_traced_masks_mean_the_same(description: dict[str, Any]) -> None:
    """A tracer cannot look into functions and tensors: flags that transformers sets must be enough, or booleans."""
    plain = description["mask_function"] is mu.causal_mask_function
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "is_tracing", lambda tensor=None: True)
        found = masks.mask(**description, allow_is_causal_skip=plain)
    assert torch.equal(booleans(found), expected(**description))


def config(**attributes: Any) -> Any:
    return type("Config", (), attributes)()


def test_promises_are_believed_while_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "is_tracing", lambda tensor=None: True)
    common = {"batch_size": 1, "q_length": 9, "kv_length": 9}
    window = mu.sliding_window_causal_mask_function(4)
    sliding = masks.mask(**common, mask_function=window, local_size=4, config=config(sliding_window=4))
    assert isinstance(sliding, LayerMask) and torch.equal(sliding.dense(), expected(**common, mask_function=window))
    both = mu.sliding_window_bidirectional_mask_function(4)
    flags = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True, "local_size": 4}
    wide = masks.mask(**common, mask_function=both, **flags, config=config(sliding_window=4))
    assert isinstance(wide, LayerMask) and torch.equal(wide.dense(), expected(**common, mask_function=both))
    everything = masks.mask(**common, mask_function=mu.bidirectional_mask_function, **flags)  # a size that is not meant
    assert everything.dense().all()
    chunks = mu.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    ambiguous = config(sliding_window=4, attention_chunk_size=4)
    for settings_ in (config(attention_chunk_size=4), ambiguous):  # chunked or sliding: the flags do not say
        found = masks.mask(**common, mask_function=chunks, local_size=4, config=settings_)
        assert found.booleans is not None and torch.equal(found.dense(), expected(**common, mask_function=chunks))


# ---- the common cases need no booleans -------------------------------------------------------------------------------


def mask_of(**description: Any) -> Any:
    return masks.mask(**({"batch_size": 2, "q_length": 50, "kv_length": 50} | description))


def test_what_becomes_an_interval() -> None:
    plain = mask_of()
    assert plain.mask is strobe.causal and plain.positions is None and plain.keys is None and plain.padding is None
    assert mask_of(attention_mask=torch.ones(2, 50, dtype=torch.bool)).mask is strobe.causal
    sliding = mask_of(mask_function=mu.sliding_window_causal_mask_function(8))
    assert sliding.mask == strobe.causal & strobe.window(7, None)
    assert mask_of(mask_function=mu.sliding_window_causal_mask_function(8)).mask is sliding.mask  # one object
    assert mask_of(mask_function=mu.bidirectional_mask_function).mask is strobe.full
    around = mask_of(mask_function=mu.sliding_window_bidirectional_mask_function(8))
    assert around.mask == strobe.window(8, 8)
    static = mask_of(q_length=1, q_offset=30)
    assert static.keys == 31 and static.positions is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_a_matter_of_positions(side: str) -> None:
    padding = torch.ones(2, 50, dtype=torch.bool)
    padding[1, slice(0, 20) if side == "left" else slice(30, 50)] = False
    found = mask_of(attention_mask=padding)
    assert isinstance(found, LayerMask) and found.padding is None and found.positions is not None
    assert found.positions.shape == (2, 4) and found.positions.dtype == torch.int32
    assert torch.equal(found.dense(), expected(batch_size=2, q_length=50, kv_length=50, attention_mask=padding))


def test_holes_are_a_row_to_add() -> None:
    padding = torch.ones(2, 50, dtype=torch.bool)
    padding[1, 10:15] = False
    found = mask_of(attention_mask=padding, dtype=torch.bfloat16)
    assert found.bias.shape == (2, 1, 1, 50) and found.bias.dtype == torch.bfloat16
    assert torch.equal(found.bias[:, 0, 0] == 0, padding)


def test_documents() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 2, 2]])
    function = mu.and_masks(mu.causal_mask_function, mu.packed_sequence_mask_function(ids))
    found = masks.mask(2, 5, 5, mask_function=function)
    cu, longest = found.documents()
    assert cu.tolist() == [0, 2, 5, 6, 7, 10] and longest == 3 and cu.dtype == torch.int32
    assert found.documents()[0] is cu  # once for all layers


# ---- models that compute with a mask ---------------------------------------------------------------------------------


def padded() -> tuple[LayerMask, torch.Tensor]:
    padding = torch.ones(2, 6, dtype=torch.bool)
    padding[1, :2] = False
    description = {"batch_size": 2, "q_length": 6, "kv_length": 6, "attention_mask": padding}
    return masks.mask(**description), expected(**description)


def test_it_looks_like_a_tensor() -> None:
    lazy, dense = padded()
    assert isinstance(lazy, LayerMask)
    assert lazy.shape == dense.shape and len(lazy.shape) == lazy.ndim == lazy.dim() == 4 and lazy.dtype == torch.bool
    assert lazy.size(2) == 6 and lazy.size() == dense.size() and lazy.numel() == dense.numel()
    assert lazy.to("cpu") is lazy and lazy.is_floating_point() is False
    moved = lazy.to("meta")
    assert moved.positions.device.type == "meta" and lazy.positions.device.type == "cpu"
    assert repr(lazy) == "LayerMask(strobe.causal & strobe.used, shape=(2, 1, 6, 6))"
    assert repr(lazy[:1]) == "LayerMask(booleans, shape=(1, 1, 6, 6))"
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        lazy.nonsense  # noqa: B018
    assert lazy != None and (lazy == None) is False  # noqa: E711


def test_it_turns_into_booleans_when_it_must() -> None:
    lazy, dense = padded()
    scores = torch.randn(2, 4, 6, 6)
    masks_of_it = [
        (lazy[:, :, 1:, :3], dense[:, :, 1:, :3]),
        (torch.cat((lazy, dense), -1), torch.cat((dense, dense), -1)),
        (lazy.expand(2, 4, 6, 6), dense.expand(2, 4, 6, 6)),
        (lazy & dense, dense),
        (dense & lazy, dense),
        (lazy | dense, dense),
        (~lazy, ~dense),
    ]
    for found, wanted in masks_of_it:
        assert isinstance(found, LayerMask) and torch.equal(found.dense(), wanted)
    tensors = [
        (torch.where(lazy, 0.0, -1.0), torch.where(dense, 0.0, -1.0)),
        (scores.where(lazy, -1.0), scores.where(dense, -1.0)),
        (scores.masked_fill(~lazy, -1.0), scores.masked_fill(~dense, -1.0)),
        (scores.masked_fill(mask=~lazy, value=-1.0), scores.masked_fill(~dense, -1.0)),
        (scores[:, :1][lazy], scores[:, :1][dense]),
        (torch.zeros_like(lazy), torch.zeros_like(dense)),
        (lazy.cumsum(-1), dense.cumsum(-1)),
        (lazy.to_dense(), dense),
    ]
    for found, wanted in tensors:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize(
    "compute",
    [
        lambda scores, mask: scores + mask,
        lambda scores, mask: mask + scores,
        lambda scores, mask: scores.add_(mask),
        lambda scores, mask: scores * mask,
        lambda scores, mask: 1.0 - mask,
        lambda scores, mask: torch.baddbmm(mask.squeeze(1), scores[:, 0], scores[:, 0]),
        lambda scores, mask: mask == 0,
        lambda scores, mask: mask < 0,
        lambda scores, mask: mask.float(),
        lambda scores, mask: mask.to(scores.dtype),
        lambda scores, mask: mask.to(torch.bool),
        lambda scores, mask: mask.bool(),
        lambda scores, mask: mask.any(),
        lambda scores, mask: torch.logical_not(mask),
        lambda scores, mask: mask.masked_fill(scores[:, :1] < 0, -1.0),
        lambda scores, mask: torch.where(scores < 0, mask, -1.0),
        lambda scores, mask: torch.cat((mask, scores[:, :1]), -1),
        lambda scores, mask: torch.nn.functional.pad(mask, (0, 2)),
        lambda scores, mask: mask.__setitem__(0, -1.0),
    ],
)
def test_it_is_no_number(compute: Any, sliced: bool) -> None:
    """Functions that mean something else for numbers added to scores are refused, of a mask and of what was cut out of
    it."""
    lazy, _ = padded()
    with pytest.raises(
        strobe.Unsupported, match=r'computes with its attention mask \(\w+\).*attn_implementation="eager"'
    ):
        compute(torch.randn(2, 4, 6, 6), lazy[:, :, :, :6] if sliced else lazy)


def test_a_mask_that_is_ready_stays() -> None:
    """generate() makes masks before the forward pass, which asks for them again."""
    lazy, _ = padded()
    embeddings = torch.zeros(2, 6, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(transformers.AttentionMaskInterface._global_mapping, "strobe", masks.mask)
        settings_ = config(_attn_implementation="strobe", sliding_window=4, attention_chunk_size=4)
        for make in (mu.create_causal_mask, mu.create_sliding_window_causal_mask, mu.create_chunked_causal_mask):
            assert make(settings_, embeddings, lazy, None) is lazy
        assert mu.create_bidirectional_mask(settings_, embeddings, lazy) is lazy
