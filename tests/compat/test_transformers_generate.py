"""`generate` with attn_implementation="strobe": token for token what eager attention gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packaging.version import Version

transformers = pytest.importorskip("transformers")
from compat import models  # noqa: E402

pytestmark = pytest.mark.usefixtures("registered")
GENERATING = [name for name, family in models.FAMILIES.items() if family.generates]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, padded": {"padding": "left"},
    "beams, padded": {"padding": "left", "num_beams": 3},
    "static cache": {"cache_implementation": "static"},
    "static cache, padded": {"cache_implementation": "static", "padding": "left"},
}


def generate(name: str, implementation: str, padding: str | None = None, **options: Any) -> torch.Tensor:
    x = models.inputs(name, padding=padding)
    for key in ("decoder_input_ids", "decoder_attention_mask"):
        x.pop(key, None)
    # No token twice: a chain of equal tokens would show little of the cache.
    options |= {"no_repeat_ngram_size": 1, "max_new_tokens": 12, "do_sample": False}
    return models.model(name, implementation).generate(**x, **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", GENERATING)
def test_tokens(name: str, way: str) -> None:
    if name == "llama4" and "static" in way and Version(transformers.__version__) < Version("5.18"):
        pytest.skip("transformers cannot make this model's masks for a static cache before 5.18")
    expected = generate(name, "eager", **WAYS[way])
    assert torch.equal(generate(name, "strobe", **WAYS[way]), expected)
    assert not torch.equal(expected[0, -12:], expected[1, -12:])  # the prompt matters


def test_a_prompt_in_pieces() -> None:
    """More queries than one against a cache that has keys already."""
    for name in ("llama", "mistral", "gemma3"):
        x = models.inputs(name)["input_ids"]
        found = []
        for implementation in ("eager", "strobe"):
            model, cache = models.model(name, implementation), transformers.DynamicCache()
            with torch.no_grad():
                parts = [
                    model(input_ids=x[:, part], past_key_values=cache).logits for part in (slice(0, 9), slice(9, 21))
                ]
            found.append(torch.cat(parts, 1))
        torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


def test_holes_between_tokens() -> None:
    """A prompt padded on the right and then continued: padding lies between tokens."""
    for name in ("llama", "mistral", "gpt-oss"):
        x = models.inputs(name, padding="right")
        found = []
        for implementation in ("eager", "strobe"):
            model, cache = models.model(name, implementation), transformers.DynamicCache()
            mask = x["attention_mask"]
            with torch.no_grad():
                model(input_ids=x["input_ids"], attention_mask=mask, past_key_values=cache)
                for n in (1, 3):  # one token, then several
                    mask = torch.cat((mask, mask.new_ones(3, n)), 1)
                    logits = model(
                        input_ids=torch.arange(3 * n).view(3, n) + 10, attention_mask=mask, past_key_values=cache
                    ).logits
            found.append(logits)
        torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_an_encoder_that_generates(family: str) -> None:
    """It makes the mask of a new token for that token alone, and its layers attend to the cache as well. Without padding
    eager attention has no mask there."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 97,
    }
    config = getattr(transformers, f"{family}Config")(**sizes, pad_token_id=0, eos_token_id=None)
    kind = getattr(transformers, {"Bert": "BertLMHeadModel", "Roberta": "RobertaForCausalLM"}[family])
    found = []
    for implementation in ("eager", "strobe"):
        torch.manual_seed(0)
        model = kind._from_config(config, attn_implementation=implementation).eval()
        found.append(model.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=6, do_sample=False))
    assert torch.equal(*found)
