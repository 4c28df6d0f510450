"""Tiny models with random weights, one for each way in which a family of models uses attention."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf

VOCABULARY = 97
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,  # so that every sequence is generated to the end
    "tie_word_embeddings": False,  # else the most likely token is the last one again
}
_GROUPED = _TEXT | {"num_key_value_heads": 2, "head_dim": 16}


@dataclass(frozen=True)
class Family:
    make: Callable[[], tuple[type, Any]]  # (model class, config)
    inputs: str = "tokens"  # tokens, pairs (encoder and decoder), pixels, audio, images (tokens among which images are)
    generates: bool = True
    window: int | None = None  # of its narrowest layers
    spread: float = 1.5  # of the weights, so that attention is far from uniform


def _llama() -> tuple[type, Any]:
    return tf.LlamaForCausalLM, tf.LlamaConfig(**_GROUPED)


def _llama4() -> tuple[type, Any]:
    config = tf.Llama4TextConfig(
        **_GROUPED, num_local_experts=2, intermediate_size_mlp=96, attention_chunk_size=8, num_experts_per_tok=1,
        layer_types=["chunked_attention", "full_attention"],
    )  # fmt: skip
    return tf.Llama4ForCausalLM, config


def _mistral() -> tuple[type, Any]:
    return tf.MistralForCausalLM, tf.MistralConfig(**_GROUPED, sliding_window=8)


def _gemma2() -> tuple[type, Any]:
    config = tf.Gemma2Config(
        **_GROUPED, sliding_window=8, attn_logit_softcapping=5.0, final_logit_softcapping=30.0, query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return tf.Gemma2ForCausalLM, config


def _gemma3_text() -> Any:
    layers = _GROUPED | {"num_hidden_layers": 3}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    return tf.Gemma3TextConfig(**layers, sliding_window=8, query_pre_attn_scalar=24, layer_types=kinds)


def _gemma3() -> tuple[type, Any]:
    return tf.Gemma3ForCausalLM, _gemma3_text()


def _gemma3_images() -> tuple[type, Any]:
    vision = tf.SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4
    )
    config = tf.Gemma3Config(
        text_config=_gemma3_text(), vision_config=vision, mm_tokens_per_image=4, boi_token_index=94, eoi_token_index=95,
        image_token_index=96, tie_word_embeddings=False,
    )  # fmt: skip
    return tf.Gemma3ForConditionalGeneration, config


def _gpt_oss() -> tuple[type, Any]:
    """All experts are chosen: a choice between two would turn a rounding error into another model."""
    config = tf.GptOssConfig(
        **_GROUPED, num_local_experts=2, num_experts_per_tok=2, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return tf.GptOssForCausalLM, config


def _qwen3() -> tuple[type, Any]:
    return tf.Qwen3ForCausalLM, tf.Qwen3Config(**_GROUPED)


def _deepseek() -> tuple[type, Any]:
    """Queries and keys have 192 dims, values 128."""
    config = tf.DeepseekV3Config(
        **(_TEXT | {"num_attention_heads": 2}), num_key_value_heads=2, kv_lora_rank=32, q_lora_rank=48, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=4, num_experts_per_tok=4, n_group=1, topk_group=1,
        moe_intermediate_size=32, first_k_dense_replace=1,
    )  # fmt: skip
    return tf.DeepseekV3ForCausalLM, config


def _phi() -> tuple[type, Any]:
    return tf.PhiForCausalLM, tf.PhiConfig(**_TEXT, num_key_value_heads=2)


def _gpt2() -> tuple[type, Any]:
    config = tf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=128, pad_token_id=0, bos_token_id=1,
        eos_token_id=None, attn_pdrop=0.0, tie_word_embeddings=False, resid_pdrop=0.0, embd_pdrop=0.0,
    )  # fmt: skip
    return tf.GPT2LMHeadModel, config


def _t5() -> tuple[type, Any]:
    config = tf.T5Config(
        vocab_size=VOCABULARY, tie_word_embeddings=False, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4,
        dropout_rate=0.0, pad_token_id=0, eos_token_id=None, decoder_start_token_id=0,
        relative_attention_num_buckets=8, relative_attention_max_distance=20,
    )  # fmt: skip
    return tf.T5ForConditionalGeneration, config


def _bert() -> tuple[type, Any]:
    config = tf.BertConfig(**_TEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return tf.BertForMaskedLM, config


def _modernbert() -> tuple[type, Any]:
    config = tf.ModernBertConfig(
        **(_TEXT | {"num_hidden_layers": 3}),
        local_attention=8,
        global_attn_every_n_layers=3,
        cls_token_id=1,
        sep_token_id=2,
    )
    return tf.ModernBertForMaskedLM, config


def _vit() -> tuple[type, Any]:
    config = tf.ViTConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=24, patch_size=4,
        num_labels=7, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return tf.ViTForImageClassification, config


def _whisper() -> tuple[type, Any]:
    config = tf.WhisperConfig(
        vocab_size=VOCABULARY, tie_word_embeddings=False, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96,
        max_source_positions=30, max_target_positions=64,
        num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, dropout=0.0,
    )  # fmt: skip
    return tf.WhisperForConditionalGeneration, config


FAMILIES = {
    "llama": Family(_llama),
    "llama4": Family(_llama4, window=8),
    "mistral": Family(_mistral, window=8),
    "gemma2": Family(_gemma2, window=8),
    "gemma3": Family(_gemma3, window=8),
    "gemma3-images": Family(_gemma3_images, inputs="images", window=8),
    "gpt-oss": Family(_gpt_oss, window=8, spread=1.0),
    "qwen3": Family(_qwen3),
    "deepseek-v3": Family(_deepseek),
    "phi": Family(_phi),
    "gpt2": Family(_gpt2),
    "t5": Family(_t5, inputs="pairs", spread=1.0),
    "bert": Family(_bert, generates=False),
    "modernbert": Family(_modernbert, generates=False, window=4),
    "vit": Family(_vit, inputs="pixels", generates=False),
    "whisper": Family(_whisper, inputs="audio"),
}
DECODERS = [name for name, family in FAMILIES.items() if family.inputs == "tokens" and family.generates]


@functools.cache
def _weights(name: str) -> dict[str, torch.Tensor]:
    """Return the weights, which are the same for every implementation."""
    torch.manual_seed(7)
    kind, config = FAMILIES[name].make()
    state = kind(config).state_dict()
    generator = torch.Generator().manual_seed(11)

    def spread(key: str, t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point() or "norm" in key.lower() or ".ln_" in key or t.dim() < 1:
            return t
        scale = t.shape[-1] ** -0.5 if t.dim() > 1 else 0.3
        return torch.randn(t.shape, generator=generator) * scale * FAMILIES[name].spread

    return {key: spread(key, t) for key, t in state.items()}


def model(name: str, implementation: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    kind, config = FAMILIES[name].make()
    config._attn_implementation = implementation
    made = kind(config)
    made.load_state_dict(_weights(name))
    made.set_attn_implementation(implementation)
    made.set_experts_implementation("eager")  # PyTorch's grouped matrix products take no fp64
    if getattr(made, "generation_config", None) is not None:
        made.generation_config.eos_token_id = None
    return made.to(device=device, dtype=dtype).eval()


def inputs(
    name: str, batch: int = 3, length: int = 21, padding: str | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Return the arguments of a forward pass. `padding`: "left" or "right", of different widths."""
    generator = torch.Generator().manual_seed(5)
    family = FAMILIES[name]
    if family.inputs == "pixels":
        return {"pixel_values": torch.randn(batch, 3, 24, 24, generator=generator).to(device)}
    tokens = torch.randint(3, 90, (batch, length), generator=generator)
    found: dict[str, Any] = {"input_ids": tokens}
    if family.inputs == "audio":
        found = {"input_features": torch.randn(batch, 8, 60, generator=generator), "decoder_input_ids": tokens}
    elif family.inputs == "pairs":
        found["decoder_input_ids"] = torch.randint(3, 90, (batch, 13), generator=generator)
    elif family.inputs == "images":  # four image tokens in the middle of a row see each other
        tokens[:, 6:10] = 96
        found["pixel_values"] = torch.randn(batch, 3, 16, 16, generator=generator)
        found["token_type_ids"] = (tokens == 96).long()
    if padding is not None:
        mask = torch.ones(batch, length, dtype=torch.long)
        for i in range(1, batch):
            mask[i, slice(0, 2 * i) if padding == "left" else slice(length - 3 * i, length)] = 0
        if family.inputs == "tokens" or family.inputs == "pairs":
            found["input_ids"] = tokens.masked_fill(mask == 0, 0)
        found["decoder_attention_mask" if family.inputs == "audio" else "attention_mask"] = mask
    return {key: t.to(device) for key, t in found.items()}


@contextlib.contextmanager
def finite_masks() -> Iterator[None]:
    """Eager attention adds the least number that there is, which in fp64 makes NaN of rows that see no key."""
    interface = tf.AttentionMaskInterface
    original = interface._global_mapping["eager"]

    def mask(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        return None if found is None else found.clamp(min=-1e30)

    interface.register("eager", mask)
    try:
        yield
    finally:
        interface.register("eager", original)
