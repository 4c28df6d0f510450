"""Megatron-LM's local attention (megatron-core), without a distributed set-up: standard attention as many have trained
with it.

megatron-core need only be on the path: what is used of it is Python. Its fused softmax is three kernels of Apex."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch

from strobe.bench.case import BenchCase
from strobe.bench.inputs import Tensors
from strobe.bench.installed import imported
from strobe.bench.provider import Prepare, Prepared, Provider, Refusal, needs_gpu, refuse, two_matrices

_APEX = ("scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda", "scaled_softmax_cuda")


@contextlib.contextmanager
def _score_buffer(parallel_state: Any) -> Iterator[None]:
    """The score matrix lives in a buffer that Megatron keeps between calls; here it goes when the measurement ends."""
    parallel_state.destroy_global_memory_buffer()
    parallel_state._set_global_memory_buffer()
    try:
        yield
    finally:
        parallel_state.destroy_global_memory_buffer()


class _OneProcess:
    """A process group of one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def _core(module: str, name: str | None = None) -> Any:
    return imported(f"megatron.core.{module}", "megatron-core", name)


def _prepare(fused_softmax: bool) -> Prepare:
    def prepare(case: BenchCase, x: Tensors) -> Prepared:
        refuse(
            case,
            softcap="no softcap",
            sinks="not measured with sinks",
            bias="no bias",
            window="not measured with a window",
            unequal="key and value dims differ",
        )
        needs_gpu(x)
        if case.causal and case.len_q != case.len_k:
            raise Refusal("unsupported", "its causal mask is for self attention only")
        attention = _core("transformer.dot_product_attention", "DotProductAttention")
        mask_types = _core("transformer.enums", "AttnMaskType")
        parallel_state = _core("parallel_state")
        if fused_softmax:
            for module in _APEX:
                imported(module, "Apex's fused softmax")
        tracker = _core("tensor_parallel.random", "get_cuda_rng_tracker")()
        if "model-parallel-rng" not in tracker.get_states():
            tracker.add("model-parallel-rng", 1)
        config = _core("transformer.transformer_config", "TransformerConfig")(
            num_layers=1,
            hidden_size=case.heads * case.dim,
            num_attention_heads=case.heads,
            num_query_groups=case.heads_k,
            kv_channels=case.dim,
            attention_dropout=0.0,
            bf16=case.dtype == "bfloat16",
            fp16=case.dtype == "float16",
            masked_softmax_fusion=fused_softmax,
        )
        mask_type = mask_types.causal if case.causal else mask_types.no_mask
        groups = types.SimpleNamespace(tp=_OneProcess())
        layer = attention(config, 1, mask_type, "self", pg_collection=groups).eval()
        taken = layer.scale_mask_softmax.is_kernel_available(None, case.batch, case.heads, case.len_q, case.len_k)
        if fused_softmax and not taken:
            raise Refusal(
                "fell back",
                "the fused softmax takes lengths above 16 and up to 4096 only; beyond it is torch's softmax",
            )

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return layer(q, k, v, None).unflatten(-1, (case.heads, case.value_dim))

        path = "fused softmax kernel of Apex" if taken else "torch's softmax"
        return Prepared(forward, "sbhd", scope=lambda: _score_buffer(parallel_state), note=f"path taken: {path}")

    return prepare


def providers() -> list[Provider]:
    return [
        Provider(
            "megatron-local",
            "standard",
            "Megatron-LM's local attention",
            _prepare(False),
            matrices=two_matrices,
            device="cuda",
            install="pip install megatron-core",
        ),
        Provider(
            "megatron-fused-softmax",
            "standard",
            "the same with Apex's fused softmax",
            _prepare(True),
            matrices=two_matrices,
            device="cuda",
            install="git clone https://github.com/NVIDIA/apex && cd apex && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 "
            "pip install -v --no-build-isolation . (needs nvcc), besides megatron-core",
        ),
    ]
