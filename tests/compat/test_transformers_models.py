"""Models with attn_implementation="strobe": logits and gradients, against eager attention by the tolerance rule."""

from __future__ import annotations

from typing import Any

import pytest
import tolerance
import torch

pytest.importorskip("transformers")
from compat import models  # noqa: E402

pytestmark = pytest.mark.usefixtures("registered")


def in_dtype(x: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in x.items()}


def is_token(x: dict[str, Any], logits: torch.Tensor) -> torch.Tensor:
    """(…, 1), which rows of the logits belong to tokens: eager attention has its own idea of the others."""
    mask = x.get("attention_mask", x.get("decoder_attention_mask"))
    if mask is None or logits.dim() != 3 or mask.shape[1] != logits.shape[1]:
        return torch.ones_like(logits[..., :1], dtype=torch.bool)
    return mask.bool()[..., None]


def outputs(name: str, implementation: str, dtype: torch.dtype, padding: str | None) -> torch.Tensor:
    x = in_dtype(models.inputs(name, padding=padding), dtype)
    with torch.no_grad(), models.finite_masks():
        logits = models.model(name, implementation, dtype)(**x).logits
    return logits.masked_fill(~is_token(x, logits), 0)


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", models.FAMILIES)
def test_logits(name: str, padding: str | None) -> None:
    if padding and models.FAMILIES[name].inputs == "pixels":
        return  # images are not padded
    exact = outputs(name, "eager", torch.float64, padding)
    eager, ours = (outputs(name, implementation, torch.float32, padding) for implementation in ("eager", "strobe"))
    tolerance.check("logits", ours, exact, eager)
    assert exact.abs().max() > 100 * (eager.double() - exact).abs().max()  # not comparing noise with noise


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss", "t5", "modernbert"])
def test_logits_in_bfloat16(name: str) -> None:
    exact = outputs(name, "eager", torch.float64, "left")
    eager, ours = (outputs(name, implementation, torch.bfloat16, "left") for implementation in ("eager", "strobe"))
    tolerance.check("logits", ours, exact, eager)


def gradients(name: str, implementation: str, dtype: torch.dtype, padding: str | None) -> dict[str, torch.Tensor]:
    x = in_dtype(models.inputs(name, padding=padding), dtype)
    model = models.model(name, implementation, dtype).train()
    with models.finite_masks():
        logits = model(**x).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    (logits * weights).masked_fill(~is_token(x, logits), 0).sum().backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", models.FAMILIES)
def test_gradients_of_a_training_step(name: str, padding: str | None) -> None:
    if padding and models.FAMILIES[name].inputs == "pixels":
        return
    exact = gradients(name, "eager", torch.float64, padding)
    eager, ours = (gradients(name, implementation, torch.float32, padding) for implementation in ("eager", "strobe"))
    assert ours.keys() == exact.keys() and len(ours) > 10
    sizes = {key: gradient.abs().max().item() for key, gradient in exact.items()}
    largest = max(sizes.values())
    for key, gradient in ours.items():
        # Where it is 0 in exact arithmetic, as that of the keys' bias is, it is the rounding noise of the others.
        size = largest if sizes[key] < 1e-6 * largest else sizes[key]
        floor = 8 * torch.finfo(torch.float32).eps * size
        tolerance.check(f"gradient of {key}", gradient, exact[key], eager[key], tolerance.GRADIENTS, floor)


def test_attention_matters_in_these_models() -> None:
    """Each of the features changes the logits: a test that ignores one would go red."""
    llama, mistral = (outputs(name, "strobe", torch.float32, None) for name in ("llama", "mistral"))
    assert (llama - mistral).abs().max() > 0.1  # the same weights, but a window
    for name, change in (("gemma2", {"attn_logit_softcapping": 50.0}), ("llama4", {"attention_chunk_size": 5})):
        model = models.model(name, "strobe")
        x = models.inputs(name)
        with torch.no_grad():
            before = model(**x).logits
            for module in model.modules():
                for key, value in change.items():
                    for holder in (module, getattr(module, "config", None)):
                        if getattr(holder, key, None) is not None:
                            setattr(holder, key, value)
            assert (model(**x).logits - before).abs().max() > 0.01, name


def test_dropout_in_training() -> None:
    """Other weights are dropped at each step, the same after the same seed; none in evaluation."""
    model = models.model("bert", "strobe")
    for module in model.modules():
        if hasattr(module, "dropout") and isinstance(module.dropout, torch.nn.Dropout):
            module.dropout.p = 0.3
    x = models.inputs("bert")
    model.train()

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model(**x).logits.detach()

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))
    model.eval()
    assert torch.equal(run(1), run(2))
