"""Other people's fused attention, where it is installed: FlexAttention, flash-attn 2, 3 and 4, xformers,
FlashInfer."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from strobe.bench import variants
from strobe.bench.case import BenchCase
from strobe.bench.inputs import Tensors
from strobe.bench.installed import imported
from strobe.bench.provider import Prepared, Provider, Refusal, costs_a_compilation, keep_buffers, needs_gpu, refuse
from strobe.variants.mask import full

# ---- FlexAttention
# -----------------------------------------------------------------------------------------------------


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


# ---- flash-attn
# --------------------------------------------------------------------------------------------------------


def _window(case: BenchCase) -> tuple[int, int]:
    left, right = case.window or (None, None)
    return -1 if left is None else left, -1 if right is None else right


def _flash_attn_2(case: BenchCase, x: Tensors) -> Prepared:
    refuse(case, sinks="no sinks", bias="no bias", unequal="key and value dims differ", float32="float32 inputs")
    needs_gpu(x)
    function = imported("flash_attn", "flash-attn", "flash_attn_func")
    options = {
        "causal": case.causal,
        "window_size": _window(case),
        "softcap": case.softcap or 0.0,
        "softmax_scale": case.softmax_scale,
    }
    return Prepared(lambda q, k, v: function(q, k, v, **options), "bshd")


def _flash_attn_3(case: BenchCase, x: Tensors) -> Prepared:
    refuse(case, sinks="no sinks", bias="no bias", float32="float32 inputs")
    needs_gpu(x)
    function = imported("flash_attn_interface", "flash-attn 3", "flash_attn_func")
    options = {
        "causal": case.causal,
        "window_size": _window(case),
        "softcap": case.softcap or 0.0,
        "softmax_scale": case.softmax_scale,
    }
    return Prepared(lambda q, k, v: _first(function(q, k, v, **options)), "bshd")


def _flash_attn_4(case: BenchCase, x: Tensors) -> Prepared:
    refuse(case, sinks="not measured with sinks", bias="no bias", float32="float32 inputs")
    needs_gpu(x)
    function = imported("flash_attn.cute", "flash-attn-4", "flash_attn_func")
    window = tuple(None if side < 0 else side for side in _window(case))
    options = {
        "causal": case.causal,
        "window_size": window,
        "softcap": case.softcap or 0.0,
        "softmax_scale": case.softmax_scale,
    }
    return Prepared(lambda q, k, v: _first(function(q, k, v, **options)), "bshd")


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


# ---- xformers, FlashInfer
# ----------------------------------------------------------------------------------------------


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
    return [
        Provider(
            "flex",
            "peer",
            "FlexAttention, compiled",
            _flex,
            kernels="triton|flex",
            skipped=costs_a_compilation,
            compiles=True,
            device="cuda",
            functions=True,
        ),
        Provider(
            "flash-attn-2",
            "peer",
            "flash-attn 2",
            _flash_attn_2,
            kernels="flash",
            device="cuda",
            install="pip install flash-attn --no-build-isolation",
        ),
        Provider(
            "flash-attn-3",
            "peer",
            "flash-attn 3",
            _flash_attn_3,
            kernels="flash",
            device="cuda",
            install="git clone https://github.com/Dao-AILab/flash-attention && cd flash-attention/hopper && "
            "python setup.py install (needs nvcc; FLASH_ATTENTION_DISABLE_FP16=TRUE and its like leave kernels out)",
        ),
        Provider(
            "flash-attn-4",
            "peer",
            "flash-attn 4 (CuTe DSL)",
            _flash_attn_4,
            kernels="flash|cute|kernel",
            compiles=True,
            device="cuda",
            install="pip install --pre flash-attn-4",
        ),
        Provider(
            "xformers",
            "peer",
            "xformers",
            _xformers,
            kernels="fmha|flash|attention",
            device="cuda",
            install="pip install xformers",
        ),
        Provider(
            "flashinfer",
            "peer",
            "FlashInfer",
            _flashinfer,
            kernels="(?i)prefill|flash",
            differentiable=False,
            device="cuda",
            install="pip install flashinfer-python",
        ),
    ]
