"""`torch.compile(fullgraph=True)` of whole models: no graph break, and what runs without the compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from everyday import everyday

transformers = pytest.importorskip("transformers")
from compat import models  # noqa: E402

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def compiled(model: Any, backend: str = "aot_eager") -> Any:
    return torch.compile(model, fullgraph=True, backend=backend)


def model_of(name: str) -> Any:
    """Experts in matrix products of a fixed shape: the plain ones are a loop over those that were chosen, which no
    implementation of attention can compile into one graph."""
    model = models.model(name, "strobe")
    model.set_experts_implementation("batched_mm")
    return model


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", everyday(list(models.FAMILIES), ["llama", "gemma2", "gemma3-images", "gpt-oss"]))
def test_forward(name: str) -> None:
    model, x = model_of(name), models.inputs(name)
    with torch.no_grad():
        close(compiled(model, "eager")(**x).logits, model(**x).logits)


@pytest.mark.parametrize("name", ["llama", "gemma3", "t5", "modernbert"])
def test_padded(name: str) -> None:
    model, x = models.model(name, "strobe"), models.inputs(name, padding="left")
    with torch.no_grad():
        found, expected = compiled(model)(**x).logits, model(**x).logits
    tokens = slice(None) if name == "t5" else x["attention_mask"].bool()
    close(found[tokens], expected[tokens])


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_decoding_with_a_static_cache(name: str) -> None:
    """One graph for all steps."""
    model, x = model_of(name), models.inputs(name)["input_ids"]
    caches = [transformers.StaticCache(config=model.config, max_cache_len=40) for _ in range(2)]
    step = compiled(model)
    with torch.no_grad():
        for cache in caches:
            model(input_ids=x, past_key_values=cache)
        for i in range(3):
            token = torch.full((3, 1), 10 + i)
            close(
                step(input_ids=token, past_key_values=caches[0]).logits,
                model(input_ids=token, past_key_values=caches[1]).logits,
            )


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_training_step(name: str) -> None:
    found = []
    for wrap in (lambda m: m, compiled):
        model, x = models.model(name, "strobe").train(), models.inputs(name)
        wrap(model)(**x, use_cache=False).logits.square().mean().backward()
        found.append({key: p.grad for key, p in model.named_parameters()})
    for key, gradient in found[1].items():
        torch.testing.assert_close(gradient, found[0][key], atol=1e-5, rtol=1e-3, msg=lambda m, k=key: f"{k}: {m}")
