"""Models that do something of their own with masks, keys or layers: strobe computes what eager attention computes, or says
what it does not know. Nothing is computed wrong without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
from compat import families  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

import strobe  # noqa: E402
from strobe.compat import transformers as ours  # noqa: E402
from strobe.compat.transformers import NAME, masks  # noqa: E402
from strobe.compat.transformers.attention import attention  # noqa: E402

pytestmark = pytest.mark.usefixtures("registered")


def config_of(model_type: str, without: frozenset[str] = frozenset(), **changes: Any) -> Any:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    return families.small(CONFIG_MAPPING[model_type], without, **changes)


def pair(kind: str, config: Any) -> list[Any]:
    """The model with eager attention and with ours, with the same weights."""
    made: list[Any] = []
    for name in ("eager", NAME):
        config._attn_implementation = name
        model = getattr(transformers, kind)(config).eval()
        families.spread(model) if not made else model.load_state_dict(made[0].state_dict())
        made.append(model)
        config = type(config).from_dict(config.to_dict())
    return made


def check_same(models: list[Any], x: dict[str, Any]) -> None:
    eager, found = (families.output(model, x) for model in models)
    torch.testing.assert_close(found, eager, atol=1e-4 * eager.abs().max().item(), rtol=0)


def tokens(padding: str | None = None, length: int = 20) -> dict[str, torch.Tensor]:
    x = {"input_ids": torch.randint(3, 90, (2, length), generator=torch.Generator().manual_seed(5))}
    if padding:
        x["attention_mask"] = torch.ones(2, length, dtype=torch.long)
        x["attention_mask"][1, slice(0, 5) if padding == "left" else slice(length - 5, length)] = 0
    return x


# ---- layers that compute attention by themselves ---------------------------------------------------------------------


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize(
    "kind, model_type, changes",
    [
        ("BloomForCausalLM", "bloom", {}),
        ("MptForCausalLM", "mpt", {}),
        ("CodeGenForCausalLM", "codegen", {"rotary_dim": 8}),  # adds a slice of the mask
        ("XGLMForCausalLM", "xglm", {}),
        ("GPTNeoXJapaneseForCausalLM", "gpt_neox_japanese", {}),
        ("MegatronBertForMaskedLM", "megatron-bert", {}),
        ("RoFormerForMaskedLM", "roformer", {}),
        ("LongformerForMaskedLM", "longformer", {"attention_window": 4}),  # compares the mask with 0
        ("CanineModel", "canine", {}),  # makes numbers of it
    ],
)
def test_a_mask_is_not_added_to_scores(
    kind: str, model_type: str, changes: dict[str, Any], padding: str | None
) -> None:
    model = pair(kind, config_of(model_type, **changes))[1]
    with torch.no_grad(), pytest.raises(strobe.Unsupported, match='attention mask .*attn_implementation="eager"'):
        model(**tokens(padding))


def test_a_mask_of_booleans_is_not_added_either() -> None:
    """Two kinds are tried: a mask of one query against padded keys, and one of a tracer, which cannot look into a
    mask."""
    model = pair("BloomForCausalLM", config_of("bloom"))[1]
    cache = transformers.DynamicCache(config=model.config)
    cache.update(torch.randn(2, 4, 19, 16), torch.randn(2, 4, 19, 16), 0)
    x = tokens("left")
    one = {"input_ids": x["input_ids"][:, -1:], "attention_mask": x["attention_mask"], "past_key_values": cache}
    with torch.no_grad(), pytest.raises(strobe.Unsupported, match="computes with its attention mask"):
        model(**one)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.Unsupported, match="computes with its attention mask"):
        torch.compile(model, fullgraph=True, backend="eager")(**x)


@pytest.mark.parametrize(
    "kind, model_type, changes",
    [
        ("FalconForCausalLM", "falcon", {}),
        ("GPTJForCausalLM", "gptj", {"rotary_dim": 8}),
        ("GPTNeoForCausalLM", "gpt_neo", {"attention_types": [[["global", "local"], 1]]}),
        ("GitForCausalLM", "git", {}),
        ("SamVisionModel", "sam_vision_model", {}),
        ("SamHQVisionModel", "sam_hq_vision_model", {}),
        ("Data2VecVisionModel", "data2vec-vision", {}),
        ("DeepseekOcr2VisionModel", "deepseek_ocr2_vision", {}),
        ("BarkSemanticModel", "bark", {}),
    ],
)
def test_tables_of_layers_have_a_sentence(kind: str, model_type: str, changes: dict[str, Any]) -> None:
    """The sentence is raised at load, where there was a bare KeyError."""
    if not hasattr(transformers, kind):
        pytest.skip(f"this transformers has no {kind}")
    config = config_of(model_type, **changes)
    if model_type == "bark":
        config = config.semantic_config
    config._attn_implementation = NAME
    with pytest.raises(strobe.Unsupported, match=r'computes attention by itself: .*allowed are "eager"'):
        getattr(transformers, kind)(config)


def test_tables_are_left_as_they_were() -> None:
    from transformers.models.falcon import modeling_falcon

    config = config_of("falcon")
    config._attn_implementation = NAME
    with pytest.raises(strobe.Unsupported, match=r'"sdpa", "flash_attention_2"; after strobe.compat.sdpa.activate\(\)'):
        transformers.FalconForCausalLM(config)
    assert NAME in modeling_falcon.FALCON_ATTENTION_CLASSES
    ours.unregister()
    assert set(modeling_falcon.FALCON_ATTENTION_CLASSES) == {"eager", "sdpa", "flash_attention_2"}
    ours.register()


# ---- masks and keys of their own -------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [None, "left"])
def test_a_model_that_makes_its_mask_of_ours(padding: str | None) -> None:
    check_same(pair("DogeForCausalLM", config_of("doge")), tokens(padding))


def test_keys_that_the_mask_does_not_know() -> None:
    kinds = ["sliding_attention", "compressed_sparse_attention"]
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 4}
    config = config_of("deepseek_v4", layer_types=kinds, compress_rates=rates, num_key_value_heads=1)
    model = pair("DeepseekV4ForCausalLM", config)[1]
    for x in (tokens(), tokens("left")):
        with (
            torch.no_grad(),
            pytest.raises(
                strobe.Unsupported,
                match="DeepseekV4Attention has 20 queries and 25 keys, but its .* made for 20 and 20",
            ),
        ):
            model(**x)


def test_lengths_of_mask_and_keys() -> None:
    q, k, v = (torch.randn(2, 2, n, 8) for n in (4, 6, 6))
    padding = torch.tensor([[False, True, True, True, True], [True, True, False, True, True]])
    for mask in (masks.mask(2, 4, 5, q_offset=1), masks.mask(2, 4, 5, q_offset=1)[:], masks.mask(2, 1, 6)):
        with pytest.raises(
            strobe.Unsupported, match="Module has 4 queries and 6 keys, but its attention mask was made"
        ):
            attention(torch.nn.Module(), q, k, v, mask)
    with pytest.raises(strobe.Unsupported, match="made for 4 and 5"):
        attention(torch.nn.Module(), q, k, v, masks.mask(2, 4, 5, q_offset=1, attention_mask=padding))


def test_blocks_of_keys_that_a_layer_chose() -> None:
    config = config_of("minimax_m3_vl_text", layer_types=["full_attention", "minimax_m3_sparse"], rotary_dim=8,
                       index_n_heads=2, index_head_dim=16, index_block_size=4, index_topk_blocks=2)  # fmt: skip
    model = pair("MiniMaxM3VLForCausalLM", config)[1]
    with torch.no_grad(), pytest.raises(strobe.Unsupported, match="MiniMaxM3VLAttention passes block_indices="):
        model(**tokens())


def test_keywords_that_are_not_known() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    layer = torch.nn.Linear(1, 1)
    for name in ("head_mask", "indices", "block_indices", "anything"):
        with pytest.raises(strobe.Unsupported, match=f"Linear passes {name}= to its attention function"):
            attention(layer, q, k, v, None, **{name: torch.zeros(1)})
        attention(layer, q, k, v, None, **{name: None})
    attention(layer, q, k, v, None, position_ids=torch.arange(6)[None], use_cache=True, output_attentions=False)


# ---- windows without a mask ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [5, 20])  # less than the window of 8, and more
def test_a_window_without_a_mask(length: int) -> None:
    """The decoder looks at all keys that the cache of the encoder has kept, in both directions."""
    text = config_of("diffusion_gemma_text", num_experts=2, top_k_experts=2, tie_word_embeddings=True,
                     layer_types=["sliding_attention", "full_attention"])  # fmt: skip
    config = transformers.DiffusionGemmaConfig(text_config=text, vision_config=None, canvas_length=6)
    models = pair("DiffusionGemmaForBlockDiffusion", config)
    canvas = torch.randint(3, 90, (2, 6), generator=torch.Generator().manual_seed(6))
    check_same(models, tokens(length=length) | {"decoder_input_ids": canvas})


# ---- tensors in any order, any batch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [None, "left"])
def test_keys_whose_last_axis_is_not_contiguous(padding: str | None) -> None:
    check_same(pair("InklingForCausalLM", config_of("inkling_text")), tokens(padding))


def test_channels_that_attend_to_channels() -> None:
    config = config_of(
        "florence_vision", frozenset({"patch_size", "embed_dim", "num_heads"}), depths=(1, 1), patch_size=(7, 3),
        patch_stride=(4, 2), patch_padding=(3, 1), patch_prenorm=(False, True), embed_dim=(32, 64), num_heads=(2, 4),
        num_groups=(2, 4), window_size=4, drop_path_rate=0.0,
    )  # fmt: skip
    models = pair("Florence2VisionBackbone", config)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        eager, found = (model(pixels).last_hidden_state for model in models)
    torch.testing.assert_close(found, eager, atol=1e-4, rtol=1e-3)  # two models round apart


def test_one_row_of_queries_for_a_batch_of_keys() -> None:
    q, k, v = torch.randn(1, 2, 4, 8), *torch.randn(2, 5, 2, 6, 8)
    layer = torch.nn.Module()
    layer.is_causal = False
    for mask in (None, torch.rand(5, 1, 4, 6) < 0.7):
        expected = torch.nn.functional.scaled_dot_product_attention(q.expand(5, -1, -1, -1), k, v, attn_mask=mask)
        found = attention(layer, q, k, v, mask)[0]
        torch.testing.assert_close(found, expected.transpose(1, 2))
        assert found.is_contiguous()
    with pytest.raises((ValueError, RuntimeError), match="3"):
        attention(layer, torch.randn(3, 2, 4, 8), k, v, None)


# ---- parts without an attention function -----------------------------------------------------------------------------


def test_a_part_that_computes_by_itself_gets_numbers() -> None:
    config = config_of("gemma4_audio", subsampling_conv_channels=(8, 4), output_proj_dims=32, attention_chunk_size=4,
                       attention_context_left=5)  # fmt: skip
    models = pair("Gemma4AudioModel", config)
    there = torch.ones(2, 60, dtype=torch.bool)
    there[1, 40:] = False
    sound = torch.randn(2, 60, 8, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        eager, found = (model(sound, attention_mask=there).last_hidden_state for model in models)
    torch.testing.assert_close(found, eager)
