"""Continuous batching: requests of different lengths in one batch get the tokens that each gets alone."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("psutil")  # transformers asks it for the memory of a CPU
from compat import models  # noqa: E402

pytestmark = pytest.mark.usefixtures("registered")
# Neither chunked attention nor different head dims of keys and values have a paged cache in transformers.
NAMES = [name for name in models.DECODERS if name not in ("llama4", "deepseek-v3")]
PROMPTS = [list(range(5, 17)), [20, 21, 22], list(range(30, 37)), [40, 41]]
NEW = 10


def alone(name: str) -> list[list[int]]:
    model = models.model(name, "eager")
    found = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW, do_sample=False)
        found.append(out[0, len(prompt) :].tolist())
    return found


def together(name: str, implementation: str) -> list[list[int]]:
    model = models.model(name, implementation)
    found = model.generate_batch(
        inputs=PROMPTS,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        # Few tokens a step, so that prompts are cut into pieces and mixed with requests that are further on.
        continuous_batching_config=transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=16),
        progress_bar=False,
    )
    assert model.config._attn_implementation.removeprefix("paged|") == "strobe"
    return [found[key].generated_tokens for key in sorted(found, key=lambda key: int(key.split("_")[-1]))]


@pytest.mark.parametrize("name", NAMES)
def test_tokens(name: str) -> None:
    assert together(name, "strobe") == alone(name)


def test_the_paged_name() -> None:
    assert together("mistral", "paged|strobe") == alone("mistral")


def test_others_are_switched_as_before() -> None:
    """The gate that lets us pass still does its work for the rest."""
    from strobe.compat.transformers import paged

    calls: list[str] = []

    class Manager:
        def switch_to_cb_friendly_attn(self, model: object, *args: object) -> None:
            calls.append("original")

    api = type("Api", (), {"ContinuousBatchingManager": Manager})
    original, paged.continuous_api = paged.continuous_api, api
    try:
        gate = paged.open_gate("strobe")
        Manager().switch_to_cb_friendly_attn(models.model("llama", "sdpa"), True)
        assert calls == ["original"]
        paged.close_gate(gate)
        assert Manager.switch_to_cb_friendly_attn is gate[1]
    finally:
        paged.continuous_api = original
