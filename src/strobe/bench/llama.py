"""A model, not a kernel: steps of a Llama-shaped stack of transformers' layers, one for each attention implementation.

Everything but the attention is the same, weights included. What the stacks compute, and in a training step the gradient
of what goes in, is compared by the tolerance rule before anything is timed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from strobe.bench.case import BenchCase, case
from strobe.bench.inputs import Tensors
from strobe.bench.installed import imported
from strobe.bench.provider import Provider, Reason
from strobe.measure.tolerance import FORWARD, GRADIENTS, Verdict, compare

SUITE, PREFIX = "llama", "model-"
_CHECKED = 256  # tokens, at most: float64 and the score matrix of every layer must fit


@dataclass(frozen=True)
class Stack:
    title: str
    layers: int
    hidden: int  # of the feed-forward
    heads: int
    heads_k: int
    dim: int
    dtype: str
    prefill: tuple[int, int]  # (batch, length)
    training: tuple[int, int]


STACKS = {
    "8b": Stack("Llama 3 8B, 8 layers", 8, 14336, 32, 8, 128, "bfloat16", (1, 16384), (2, 4096)),
    "tiny": Stack("a tiny Llama, 2 layers", 2, 96, 4, 2, 16, "float32", (1, 256), (2, 128)),
}


def cases(direction: str = "forward", on_gpu: bool = False) -> list[BenchCase]:
    """A prefill, and a training step (forward and backward, without an optimiser); with gradients, that alone."""
    name = "8b" if on_gpu else "tiny"
    stack = STACKS[name]
    steps = {"prefill": (stack.prefill, "forward"), "training step": (stack.training, "both")}
    return [
        case(
            SUITE,
            f"{name}-{what.split()[0]}",
            batch=batch,
            heads=stack.heads,
            heads_k=stack.heads_k,
            length=length,
            dim=stack.dim,
            mask="causal",
            dtype=stack.dtype,
            direction=of,
            measure="model",
            model=f"{stack.title}, {what}",
        )
        for what, ((batch, length), of) in steps.items()
        if direction == "forward" or of == "both"
    ]


def missing() -> str | None:
    """Return why there is no such model here."""
    import importlib.util

    installed = importlib.util.find_spec("transformers") is not None
    return None if installed else "it needs transformers, which is not installed: pip install transformers"


class Steps:
    """One case. The first model is transformers' eager one, which the others are compared with."""

    def __init__(self, case: BenchCase, device: torch.device, seed: int) -> None:
        self.case, self.device, self.stack = case, device, STACKS[case.label.split("-")[0]]
        self._library = imported("transformers", "transformers")
        generator = torch.Generator(device).manual_seed(seed)
        torch.manual_seed(seed)
        with device:
            self._model = self._made("eager").to(case.torch_dtype)
        shape = (case.batch, case.len_q, case.model_dim)
        self._x = torch.randn(shape, device=device, dtype=case.torch_dtype, generator=generator)
        self._short = self._x[:1, :_CHECKED]
        self._same = self._results(self._model, self._short)
        self._exact = self._results(copy.deepcopy(self._model).double(), self._short.double())

    def _made(self, implementation: str) -> Any:
        stack, case = self.stack, self.case
        config = self._library.LlamaConfig(
            hidden_size=case.model_dim,
            intermediate_size=stack.hidden,
            num_hidden_layers=stack.layers,
            num_attention_heads=case.heads,
            num_key_value_heads=case.heads_k,
            head_dim=case.dim,
            max_position_embeddings=case.len_q,
            vocab_size=32,  # embeddings are given
            attn_implementation=implementation,
        )
        return self._library.LlamaModel(config)

    def _rotate_in_fp32(self, model: Any) -> None:
        """Rotate as transformers loads models: the frequencies keep their dtype."""
        model.rotary_emb = type(model.rotary_emb)(model.config).to(self.device)

    def _with(self, implementation: str) -> Any:
        """A model with the weights of the first."""
        if implementation == "strobe":
            from strobe.compat import transformers as host

            host.register()
        with torch.device("meta"):
            model = self._made(implementation)
        model.load_state_dict(self._model.state_dict(keep_vars=True), assign=True)
        return model

    def _results(self, model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self._rotate_in_fp32(model)
        training = self.case.direction == "both"
        x = x.detach().clone().requires_grad_(training)
        with torch.set_grad_enabled(training):
            out = model(inputs_embeds=x, use_cache=False).last_hidden_state
        if not training:
            return {"out": out}
        return {"out": out.detach(), "dx": torch.autograd.grad(out, x, torch.ones_like(out) / out.shape[1])[0]}

    def prepare(self, implementation: str) -> tuple[Callable[[], torch.Tensor], Verdict]:
        """The step to time, and what is to be said of its numbers."""
        model = self._with(implementation)
        results = self._results(model, self._short)
        verdicts = [
            compare(name, results[name], self._exact[name], self._same[name], FORWARD if name == "out" else GRADIENTS)
            for name in results
        ]
        verdict = next((v for v in verdicts if not v.passed), verdicts[0])
        x = self._x

        def prefill() -> torch.Tensor:
            return model(inputs_embeds=x, use_cache=False).last_hidden_state

        def training_step() -> torch.Tensor:
            loss = prefill().float().square().mean()
            loss.backward()
            for p in model.parameters():
                p.grad = None
            return loss.detach()

        return training_step if self.case.direction == "both" else prefill, verdict


# ---- providers -------------------------------------------------------------------------------------------------------


def _no_kernel(case: BenchCase, x: Tensors) -> NoReturn:
    raise NotImplementedError("a whole model; it takes cases of the suite llama alone")


def _slow_on_a_cpu(case: BenchCase, device: torch.device) -> str | None:
    return None if device.type == "cuda" else "FlexAttention is compiled, for a minute on a CPU; name it to time it"


def providers() -> list[Provider]:
    """transformers' attention implementations."""

    def provider(name: str, kind: str, summary: str, **more: Any) -> Provider:
        return Provider(f"{PREFIX}{name}", kind, f"transformers' Llama with {summary}", _no_kernel, models=True, **more)

    skipped: Reason = _slow_on_a_cpu
    return [
        provider("strobe", "ours", "strobe's attention"),
        provider("sdpa", "peer", "scaled_dot_product_attention"),
        provider("flex_attention", "peer", "FlexAttention", compiles=True, skipped=skipped),
        provider("eager", "standard", "softmax(q kᵀ) v"),
    ]
