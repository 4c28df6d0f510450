"""Find the families of transformers' models that compute the same with attn_implementation="strobe" as with "eager".

    python tests/compat/families.py --try        tiny models of all families, into families.json: a second or two for each
    python tests/compat/families.py --try gpt2   of these families only; what is there of others stays
    python tests/compat/families.py --write      the table in docs/plug-in.md, from families.json

A family's configuration is made small by the names of its fields. What cannot be built or run that way with eager
attention is left out. Each family is tried in a process of its own, which is given up after a while.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import inspect
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATA = HERE / "families.json"
PAGE = HERE.parents[1] / "docs" / "plug-in.md"
BEGIN = "<!-- families: begin (python tests/compat/families.py --write) -->"
END = "<!-- families: end -->"
SECONDS = 15  # for one family
PARAMETERS = 12_000_000  # at most
BATCH, LENGTH, TARGET = 3, 20, 11
VOCABULARY = 99
TOLERANCE = 2e-4  # of the largest output

# ---- small configurations --------------------------------------------------------------------------------------------

_NAMES = {
    2: """num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers depth num_decoder_layers
        num_encoder_layers encoder_num_hidden_layers decoder_num_hidden_layers num_blocks decoder_depth""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads
        encoder_num_attention_heads decoder_num_attention_heads""",
    64: """hidden_size d_model n_embd dim embed_dim encoder_hidden_size decoder_hidden_size embedding_size projection_dim
        out_hidden_size decoder_hidden_dim encoder_hidden_dim""",
    96: """intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim moe_intermediate_size mlp_dim n_inner
        shared_expert_intermediate_size intermediate_size_mlp ffn_hidden_size shared_intermediate_size""",
    0.0: """hidden_dropout_prob attention_probs_dropout_prob attention_dropout dropout activation_dropout resid_pdrop
        embd_pdrop attn_pdrop dropout_rate hidden_dropout encoder_layerdrop decoder_layerdrop layerdrop""",
}
_SMALL: dict[str, Any] = {name: value for value, names in _NAMES.items() for name in names.split()} | {
    "num_key_value_heads": 2, "head_dim": 16, "d_kv": 16, "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY,
    "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128, "max_source_positions": 30, "max_target_positions": 64,
    "type_vocab_size": 2, "sliding_window": 8, "local_attention": 8, "attention_chunk_size": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "num_experts": 2, "num_local_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_num_experts": 2, "moe_topk": 2, "num_experts_per_token": 2, "n_group": 1, "topk_group": 1, "moe_k": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24,
    "image_size": 32, "patch_size": 8, "num_mel_bins": 8, "num_frames": 2,
    "rotary_dim": 8,
    "tie_word_embeddings": False,
}  # fmt: skip


def small(kind: type, without: frozenset[str] = frozenset(), **changes: Any) -> Any:
    """A configuration of this class, and of those in it, with small numbers where a field's name is known."""
    fields = {f.name for f in dataclasses.fields(kind)}
    chosen = {name: value for name, value in _SMALL.items() if name in fields and name not in without}
    inner = dict(getattr(kind, "sub_configs", None) or {})
    for name, default in (getattr(kind, "sub_configs_defaults", None) or {}).items():
        inner[name] = getattr(default, "config_class", None)
    for name, part in inner.items():
        if isinstance(part, type) and dataclasses.is_dataclass(part) and name in fields:
            with contextlib.suppress(Exception):
                chosen[name] = small(part, without)
    made = kind(**(chosen | changes))
    rope = getattr(made, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in rope:
        rope["mrope_section"] = [2, 3, 3]  # of the 8 frequencies of a head of 16
    return made


def configurations(kind: type) -> Iterator[Any]:
    """Some families have a rule that the small numbers break: fewer of them."""
    heads = {"head_dim", "d_kv", "num_key_value_heads"}
    for without in (
        set(),
        heads,
        heads | {"pad_token_id", "bos_token_id", "eos_token_id", "sliding_window", "patch_size"},
    ):
        with contextlib.suppress(Exception):
            yield small(kind, frozenset(without))


# ---- a model and what it takes ---------------------------------------------------------------------------------------


def classes(model_type: str) -> Iterator[type]:
    import transformers
    from transformers.models.auto import modeling_auto

    for mapping in (
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
        "MODEL_MAPPING_NAMES",
    ):
        found = getattr(modeling_auto, mapping).get(model_type)
        for name in (found,) if isinstance(found, str) else found or ():
            if (kind := getattr(transformers, name, None)) is not None:
                yield kind


def spread(model: Any) -> None:
    """Weights with which attention is far from uniform."""
    import torch

    generator = torch.Generator().manual_seed(11)
    for name, p in model.named_parameters():
        if p.dim() > 1 and "norm" not in name.lower():
            p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype) * 1.5 * p.shape[-1] ** -0.5
        elif not torch.isfinite(p).all():
            p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3


def inputs(model: Any, padding: str | None) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(5)
    config, takes = model.config, inspect.signature(model.forward).parameters
    found: dict[str, Any] = {}

    def number(name: str, default: int) -> int:
        for c in (
            config,
            *(getattr(config, n, None) for n in ("vision_config", "audio_config", "encoder", "text_config")),
        ):
            if isinstance(value := getattr(c, name, None), int):
                return value
            if isinstance(value, (tuple, list)) and value and isinstance(value[0], int):
                return value[0]
        return default

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(3, 90, (BATCH, length), generator=generator)

    main = getattr(model, "main_input_name", "input_ids")
    if "input_ids" in takes and main in ("input_ids", "pixel_values"):
        found["input_ids"] = tokens(LENGTH)
    if "decoder_input_ids" in takes:
        found["decoder_input_ids"] = tokens(TARGET)
    if main == "pixel_values" or ("pixel_values" in takes and "input_ids" not in takes):
        size, channels = number("image_size", 32), number("num_channels", 3)
        frames = (number("num_frames", 2),) if "num_frames" in {f.name for f in dataclasses.fields(config)} else ()
        found["pixel_values"] = torch.randn(BATCH, *frames, channels, size, size, generator=generator)
    if main == "input_features":
        long = 2 * number("max_source_positions", 30)
        features = (number("num_mel_bins", 8), long)
        found["input_features"] = torch.randn(BATCH, *features, generator=generator)
    if main == "input_values":
        found["input_values"] = torch.randn(BATCH, 2000, generator=generator)
    if "bbox" in takes and "input_ids" in found:
        found["bbox"] = torch.tensor([1, 2, 30, 40]).expand(BATCH, LENGTH, 4).contiguous()
    if padding is not None and "input_ids" in found:
        mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
        for i in range(1, BATCH):
            mask[i, slice(0, 2 * i) if padding == "left" else slice(LENGTH - 3 * i, LENGTH)] = 0
        found["attention_mask"] = mask
        found["input_ids"] = found["input_ids"].masked_fill(mask == 0, model.config.get_text_config().pad_token_id or 0)
    return {name: value for name, value in found.items() if name in takes}


def output(model: Any, x: dict[str, Any]) -> Any:
    """The first floating-point output; where it has a row per token, without the rows of padding."""
    import torch

    with torch.no_grad():
        torch.manual_seed(0)
        result = model(**x)
    values = result.values() if hasattr(result, "values") else (result,)
    first = next(t for t in values if isinstance(t, torch.Tensor) and t.is_floating_point())
    mask = x.get("attention_mask")
    if mask is not None and first.dim() >= 3 and first.shape[:2] == mask.shape:
        first = first[mask.bool()]
    return first


def attempt(model_type: str) -> dict[str, Any] | None:
    """None: not a model that runs with eager attention from a small configuration."""
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for kind in classes(model_type):
        for config in configurations(CONFIG_MAPPING[model_type]):
            try:
                config._attn_implementation = "eager"
                with torch.device("meta"):
                    if sum(p.numel() for p in kind(config).parameters()) > PARAMETERS:
                        continue
                torch.manual_seed(7)
                eager = kind(config).eval()
                spread(eager)
                expected = {p: output(eager, inputs(eager, p)) for p in (None, "left", "right")}
                again = output(eager, inputs(eager, None))
                if not all(t.numel() and torch.isfinite(t).all() for t in expected.values()) or not torch.equal(
                    again, expected[None]
                ):
                    continue
            except Exception:
                continue
            return {"model": kind.__name__} | compared(kind, config, eager, expected)
    return None


def compared(kind: type, config: Any, eager: Any, expected: dict[Any, Any]) -> dict[str, Any]:
    from transformers import AttentionInterface

    import strobe
    from strobe.compat.transformers import NAME, attention

    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return attention.attention(*args, **kwargs)

    AttentionInterface.register(NAME, counted)
    try:
        config = copy.deepcopy(config)
        config._attn_implementation = NAME
        ours = kind(config).eval()
        ours.load_state_dict(eager.state_dict())
        worst = 0.0
        for padding, wanted in expected.items():
            found = output(ours, inputs(eager, padding))
            worst = max(worst, ((found - wanted).abs().max() / wanted.abs().max()).item())
    except strobe.Unsupported as e:
        return {"result": "refused", "why": str(e)}
    except Exception as e:
        return {"result": "raises", "why": f"{type(e).__name__}: {e}"[:200]}
    result = "differs" if not worst <= TOLERANCE else "same" if calls else "own"
    return {"result": result, "error": float(f"{worst:.1e}")}


def in_a_process(model_type: str) -> Any:
    """Return what `attempt` returns, or None if that takes too long or ends the process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(SECONDS)
        found = None
        with contextlib.suppress(BaseException):
            found = attempt(model_type)
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    text = b""
    while part := os.read(reading, 65536):
        text += part
    os.close(reading)
    os.waitpid(child, 0)
    return json.loads(text) if text else None


def tried(only: list[str]) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    import strobe

    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    strobe.compat.transformers.register()
    results = {}
    for name in only or sorted(CONFIG_MAPPING):
        if next(classes(name), None) is not None and (found := in_a_process(name)):
            results[name] = found
            print(name, found, file=sys.stderr, flush=True)
    return {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0], "families": results}


# ---- the table -------------------------------------------------------------------------------------------------------

_ROWS = (
    ("same", "", "the same logits as with eager attention, with and without padding"),
    ("own", "", "computes attention by itself, strobe is not asked; the same logits"),
    ("refused", "computes with its attention mask", "refused: adds its mask to the scores by itself"),
    (
        "refused",
        "computes attention by itself",
        "refused at load: has classes of layers for other implementations only",
    ),
    ("refused", "passes ", "refused: its layers choose keys in a way of their own"),
    ("refused", "", "refused for another reason"),
    ("raises", "", "does not run"),
    ("differs", "", "**differs**"),
)


def table(data: dict[str, Any]) -> str:
    left = dict(data["families"])
    lines = [
        f"{len(left)} families of transformers {data['transformers']} were tried with tiny random models (torch "
        f"{data['torch']}, CPU, float32), each with one class and a small configuration: layers of other kinds, as "
        "DeepSeek-V4's compressed ones, may be refused. `python tests/compat/families.py --try` does it again.\n",
        '| `attn_implementation="strobe"` | families |',
        "|---|---|",
    ]
    for result, why, title in _ROWS:
        found = [name for name, x in left.items() if x["result"] == result and why in x.get("why", "")]
        if found:
            lines.append(f"| {title} ({len(found)}) | {', '.join(found)} |")
        left = {name: x for name, x in left.items() if name not in found}
    assert not left, left
    return "\n".join(lines) + "\n"


def page(text: str, data: dict[str, Any]) -> str:
    from benchmarks.pages.generated import replace_between

    return replace_between(text, BEGIN, END, table(data))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--try", dest="trying", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("only", nargs="*")
    options = parser.parse_args()
    if options.trying:
        found = tried(options.only)
        if options.only and DATA.exists():
            found["families"] = dict(sorted((json.loads(DATA.read_text())["families"] | found["families"]).items()))
        DATA.write_text(json.dumps(found, indent=1) + "\n")
    if options.write:
        PAGE.write_text(page(PAGE.read_text(), json.loads(DATA.read_text())))


if __name__ == "__main__":
    main()
