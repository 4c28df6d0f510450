"""Other people's fused attention, where it is installed: FlexAttention, flash-attn 2, 3 and 4, xformers,
FlashInfer."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from strobe.bench import variants
from strobe.bench.case import BenchCase
from strobe.bench.inputs import Tensors
from strobe.bench.installed import imported
from strobe.bench.provider import (
    Prepare,
    Prepared,
    Provider,
    Refusal,
    costs_a_compilation,
    keep_buffers,
    needs_gpu,
    refuse,
)
from strobe.variants.mask import full

# ---- FlexAttention ---------------------------------------------------------------------------------------------------


def _flex(case: BenchCase, x: Tensors) -> Prepared:
    refuse(case, sinks="no sinks")
    needs_gpu(x)
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    mask, block_mask, functions = case.mask, None, variants.functions(case, x.q.device)
    if functions.mask is not None:
        batch = case.batch if case.variant in variants.BY_SEQUENCE else None
        block_mask = flex.create_block_mask(functions.mask, batch, None, case.len_q, case.len_k, device=x.q.device)
    elif case.mask != full:

        def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
            lo, hi = mask.bounds(q, case.len_q, case.len_k)
            return (lo <= k) & (k < hi)

        def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
            return q + (case.len_k - case.len_q) >= k

        rule = causal if case.causal else visible
        block_mask = flex.create_block_mask(rule, None, None, case.len_q, case.len_k, device=x.q.device)
    score_mod = functions.score
    if case.softcap is not None or x.bias is not None:
        softcap, bias = case.softcap, x.bias

        def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            return score if bias is None else score + bias[b if len(bias) > 1 else 0, h, q, k]

    torch._dynamo.reset()
    keep_buffers()
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    options = {
        "block_mask": block_mask,
        "score_mod": score_mod,
        "scale": case.softmax_scale,
        "enable_gqa": case.group > 1,
    }
    return Prepared(lambda q, k, v: compiled(q, k, v, **options))


# ---- flash-attn ------------------------------------------------------------------------------------------------------


def _window(case: BenchCase, nothing: int | None = -1) -> tuple[Any, ...]:
    """Both sides; `nothing` stands for one without a bound."""
    return tuple(nothing if side is None else side for side in case.window or (None, None))


def _flash_attn(module: str, package: str, nothing: int | None = -1, **more: str) -> Prepare:
    """A version of flash-attn. `more`: what it does not take, beside what none of them does."""

    def prepare(case: BenchCase, x: Tensors) -> Prepared:
        refuse(case, bias="no bias", float32="float32 inputs", **more)
        needs_gpu(x)
        function = imported(module, package, "flash_attn_func")
        options = {
            "causal": case.causal,
            "window_size": _window(case, nothing),
            "softcap": case.softcap or 0.0,
            "softmax_scale": case.softmax_scale,
        }
        return Prepared(lambda q, k, v: _first(function(q, k, v, **options)), "bshd")

    return prepare


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


# ---- xformers, FlashInfer --------------------------------------------------------------------------------------------


def _xformers(case: BenchCase, x: Tensors) -> Prepared:
    refuse(
        case,
        softcap="no softcap",
        sinks="no sinks",
        bias="not measured with a bias",
        window="not measured with a window",
    )
    needs_gpu(x)
    if case.group > 1:
        raise Refusal("unsupported", "not measured with grouped heads, which need expanded five-axis inputs")
    ops = imported("xformers.ops", "xformers")
    bias = ops.LowerTriangularMask() if case.causal else None
    return Prepared(
        lambda q, k, v: ops.memory_efficient_attention(q, k, v, attn_bias=bias, scale=case.softmax_scale), "bshd"
    )


def _flashinfer(case: BenchCase, x: Tensors) -> Prepared:
    refuse(case, gradients="no gradients", sinks="not measured with sinks", bias="no bias", float32="float32 inputs")
    needs_gpu(x)
    flashinfer = imported("flashinfer", "flashinfer")
    device = x.q.device
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=device), "NHD"
    )
    ends_q, ends_k = (
        torch.arange(case.batch + 1, dtype=torch.int32, device=device) * n for n in (case.len_q, case.len_k)
    )
    left, right = _window(case)
    if right > 0:
        raise Refusal("unsupported", f"a window to the right, {case.mask.name}")
    wrapper.plan(
        ends_q,
        ends_k,
        case.heads,
        case.heads_k,
        case.dim,
        head_dim_vo=case.value_dim,
        causal=case.mask != full,
        window_left=left,
        sm_scale=case.softmax_scale,
        logits_soft_cap=case.softcap,
        q_data_type=case.torch_dtype,
    )

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return wrapper.run(*(t.flatten(0, 1) for t in (q, k, v))).unflatten(0, (case.batch, case.len_q))

    return Prepared(forward, "bshd")


def providers() -> list[Provider]:
    peer = functools.partial(Provider, kind="peer", device="cuda")
    from_source = "git clone https://github.com/Dao-AILab/flash-attention && cd flash-attention/hopper && "
    from_source += (
        "python setup.py install (needs nvcc; FLASH_ATTENTION_DISABLE_FP16=TRUE and its like leave kernels out)"
    )
    unequal, sinks = "key and value dims differ", "no sinks"
    two = _flash_attn("flash_attn", "flash-attn", sinks=sinks, unequal=unequal)
    three = _flash_attn("flash_attn_interface", "flash-attn 3", sinks=sinks)
    four = _flash_attn("flash_attn.cute", "flash-attn-4", None, sinks="not measured with sinks")
    return [
        peer(
            "flex",
            summary="FlexAttention, compiled",
            prepare=_flex,
            kernels="triton|flex",
            skipped=costs_a_compilation,
            compiles=True,
            functions=True,
        ),
        peer(
            "flash-attn-2",
            summary="flash-attn 2",
            prepare=two,
            kernels="flash",
            install="pip install flash-attn --no-build-isolation",
        ),
        peer("flash-attn-3", summary="flash-attn 3", prepare=three, kernels="flash", install=from_source),
        peer(
            "flash-attn-4",
            summary="flash-attn 4 (CuTe DSL)",
            prepare=four,
            kernels="flash|cute|kernel",
            compiles=True,
            install="pip install --pre flash-attn-4",
        ),
        peer(
            "xformers",
            summary="xformers",
            prepare=_xformers,
            kernels="fmha|flash|attention",
            install="pip install xformers",
        ),
        peer(
            "flashinfer",
            summary="FlashInfer",
            prepare=_flashinfer,
            kernels="(?i)prefill|flash",
            differentiable=False,
            install="pip install flashinfer-python",
        ),
    ]
