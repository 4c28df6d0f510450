"""Other people's attention, where it is installed: FlexAttention, flash-attn 2, 3 and 4, xformers, FlashInfer,
Megatron-LM."""

from __future__ import annotations

import contextlib
import importlib
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from strobe.bench.exactness import Tensors
from strobe.bench.providers import Prepared, Provider, Refusal, keep_buffers, refuse
from strobe.bench.suites import DTYPES, Case


def _needs_gpu(x: Tensors) -> None:
    if x.q.device.type != "cuda":
        raise Refusal("unsupported", f"needs an NVIDIA GPU, the tensors are on {x.q.device.type}")


def _import(module: str, package: str, name: str | None = None) -> Any:
    """A module, or a name in it; whatever goes wrong is a reason."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # packages tell at length what they could do with yet others
            found = importlib.import_module(module)
        return found if name is None else getattr(found, name)
    except ModuleNotFoundError as error:
        missing = error.name or module
        raise Refusal(
            "not installed",
            f"{package} is not installed"
            if module.startswith(missing)
            else f"{package} needs {missing}, which is not installed",
        ) from None
    except Exception as error:  # binary packages fail in many ways: other ABI, other CUDA, other torch
        raise Refusal(
            "not installed",
            f"{package} cannot be imported: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
        ) from None


# ---- FlexAttention
# -----------------------------------------------------------------------------------------------------


def _flex(case: Case, x: Tensors) -> Prepared:
    refuse(case, sinks="no sinks")
    _needs_gpu(x)
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    mask, block_mask = case.mask_object(), None
    if case.mask != "full":

        def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
            lo, hi = mask.bounds(q, case.len_q, case.len_k)
            return (lo <= k) & (k < hi)

        def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
            return q + (case.len_k - case.len_q) >= k

        rule = causal if case.mask == "causal" else visible
        block_mask = flex.create_block_mask(rule, None, None, case.len_q, case.len_k, device=x.q.device)
    score_mod = None
    if case.softcap is not None or x.bias is not None:
        softcap, bias = case.softcap, x.bias

        def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            return score if bias is None else score + bias[0, h, q, k]

    torch._dynamo.reset()
    keep_buffers()
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    options = {"block_mask": block_mask, "score_mod": score_mod, "scale": case.scale, "enable_gqa": case.group > 1}
    return Prepared(lambda q, k, v: compiled(q, k, v, **options))


# ---- flash-attn
# --------------------------------------------------------------------------------------------------------


def _window(case: Case) -> tuple[int, int]:
    if not case.mask.startswith("window"):
        return (-1, -1)
    left, right = case.mask.removeprefix("window(").removesuffix(")").split(",")
    sides = [-1 if side.strip() == "None" else int(side) for side in (left, right)]
    return sides[0], sides[1]


def _flash_attn_2(case: Case, x: Tensors) -> Prepared:
    refuse(case, sinks="no sinks", bias="no bias", unequal="key and value dims differ", float32="float32 inputs")
    _needs_gpu(x)
    function = _import("flash_attn", "flash-attn", "flash_attn_func")
    options = {
        "causal": case.mask == "causal",
        "window_size": _window(case),
        "softcap": case.softcap or 0.0,
        "softmax_scale": case.scale,
    }
    return Prepared(lambda q, k, v: function(q, k, v, **options), "bshd")


def _flash_attn_3(case: Case, x: Tensors) -> Prepared:
    refuse(case, sinks="no sinks", bias="no bias", float32="float32 inputs")
    _needs_gpu(x)
    function = _import("flash_attn_interface", "flash-attn 3", "flash_attn_func")
    options = {
        "causal": case.mask == "causal",
        "window_size": _window(case),
        "softcap": case.softcap or 0.0,
        "softmax_scale": case.scale,
    }
    return Prepared(lambda q, k, v: _first(function(q, k, v, **options)), "bshd")


def _flash_attn_4(case: Case, x: Tensors) -> Prepared:
    refuse(case, sinks="not measured with sinks", bias="no bias", float32="float32 inputs")
    _needs_gpu(x)
    function = _import("flash_attn.cute", "flash-attn-4", "flash_attn_func")
    window = tuple(None if side < 0 else side for side in _window(case))
    options = {
        "causal": case.mask == "causal",
        "window_size": window,
        "softcap": case.softcap or 0.0,
        "softmax_scale": case.scale,
    }
    return Prepared(lambda q, k, v: _first(function(q, k, v, **options)), "bshd")


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


# ---- xformers, FlashInfer
# ----------------------------------------------------------------------------------------------


def _xformers(case: Case, x: Tensors) -> Prepared:
    refuse(
        case,
        softcap="no softcap",
        sinks="no sinks",
        bias="not measured with a bias",
        window="not measured with a window",
    )
    _needs_gpu(x)
    if case.group > 1:
        raise Refusal("unsupported", "not measured with grouped heads, which need expanded five-axis inputs")
    ops = _import("xformers.ops", "xformers")
    bias = ops.LowerTriangularMask() if case.mask == "causal" else None
    return Prepared(lambda q, k, v: ops.memory_efficient_attention(q, k, v, attn_bias=bias, scale=case.scale), "bshd")


def _flashinfer(case: Case, x: Tensors) -> Prepared:
    refuse(case, gradients="no gradients", sinks="not measured with sinks", bias="no bias", float32="float32 inputs")
    _needs_gpu(x)
    flashinfer = _import("flashinfer", "flashinfer")
    device = x.q.device
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=device), "NHD"
    )
    ends_q, ends_k = (
        torch.arange(case.batch + 1, dtype=torch.int32, device=device) * n for n in (case.len_q, case.len_k)
    )
    left, right = _window(case)
    if right > 0:
        raise Refusal("unsupported", f"a window to the right, {case.mask}")
    wrapper.plan(
        ends_q,
        ends_k,
        case.heads,
        case.heads_k,
        case.dim,
        head_dim_vo=case.dim_v,
        causal=case.mask != "full",
        window_left=left,
        sm_scale=case.scale,
        logits_soft_cap=case.softcap,
        q_data_type=DTYPES[case.dtype],
    )

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return wrapper.run(*(t.flatten(0, 1) for t in (q, k, v))).unflatten(0, (case.batch, case.len_q))

    return Prepared(forward, "bshd")


# ---- Megatron-LM's local attention, without a distributed set-up
# -------------------------------------------------------


@contextlib.contextmanager
def _megatron_buffer(parallel_state: Any) -> Iterator[None]:
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


def _megatron(fused_softmax: bool) -> Any:
    def prepare(case: Case, x: Tensors) -> Prepared:
        refuse(
            case,
            softcap="no softcap",
            sinks="not measured with sinks",
            bias="no bias",
            unequal="key and value dims differ",
        )
        _needs_gpu(x)
        if case.mask == "causal" and case.len_q != case.len_k:
            raise Refusal("unsupported", "its causal mask is for self attention only")
        if case.mask.startswith("window"):
            raise Refusal("unsupported", "not measured with a window")
        module = _import("megatron.core.transformer.dot_product_attention", "megatron-core")
        config_class = _import("megatron.core.transformer.transformer_config", "megatron-core", "TransformerConfig")
        mask_types = _import("megatron.core.transformer.enums", "megatron-core", "AttnMaskType")
        parallel_state = _import("megatron.core.parallel_state", "megatron-core")
        random = _import("megatron.core.tensor_parallel.random", "megatron-core")
        if fused_softmax:
            _import("scaled_upper_triang_masked_softmax_cuda", "Apex's fused softmax")
        tracker = random.get_cuda_rng_tracker()
        if "model-parallel-rng" not in tracker.get_states():
            tracker.add("model-parallel-rng", 1)
        config = config_class(
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
        mask_type = mask_types.causal if case.mask == "causal" else mask_types.no_mask
        groups = types.SimpleNamespace(tp=_OneProcess())
        layer = module.DotProductAttention(config, 1, mask_type, "self", pg_collection=groups).eval()
        taken = layer.scale_mask_softmax.is_kernel_available(None, case.batch, case.heads, case.len_q, case.len_k)
        if fused_softmax and not taken:
            raise Refusal(
                "fell back",
                "the fused softmax takes lengths above 16 and up to 4096 only; beyond it is torch's softmax",
            )

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return layer(q, k, v, None).unflatten(-1, (case.heads, case.dim_v))

        path = "fused softmax kernel of Apex" if taken else "torch's softmax"
        return Prepared(forward, "sbhd", scope=lambda: _megatron_buffer(parallel_state), note=f"path taken: {path}")

    return prepare


def _two_matrices(case: Case) -> int:
    return 2 * DTYPES[case.dtype].itemsize * case.score_elements()


def providers() -> list[Provider]:
    def compiling(case: Case, device: torch.device) -> str | None:
        return "compiling takes seconds per shape; name it to time it" if device.type == "cuda" else None

    return [
        Provider(
            "megatron-local",
            "standard",
            "Megatron-LM's local attention",
            _megatron(False),
            matrices=_two_matrices,
            device="cuda",
        ),
        Provider(
            "megatron-fused-softmax",
            "standard",
            "the same with Apex's fused softmax",
            _megatron(True),
            matrices=_two_matrices,
            device="cuda",
        ),
        Provider(
            "flex",
            "peer",
            "FlexAttention, compiled",
            _flex,
            kernels="triton|flex",
            skipped=compiling,
            compiles=True,
            device="cuda",
        ),
        Provider("flash-attn-2", "peer", "flash-attn 2", _flash_attn_2, kernels="flash", device="cuda"),
        Provider("flash-attn-3", "peer", "flash-attn 3", _flash_attn_3, kernels="flash", device="cuda"),
        Provider(
            "flash-attn-4",
            "peer",
            "flash-attn 4 (CuTe DSL)",
            _flash_attn_4,
            kernels="flash|cute|kernel",
            compiles=True,
            device="cuda",
        ),
        Provider("xformers", "peer", "xformers", _xformers, kernels="fmha|flash|attention", device="cuda"),
        Provider(
            "flashinfer",
            "peer",
            "FlashInfer",
            _flashinfer,
            kernels="(?i)prefill|flash",
            differentiable=False,
            device="cuda",
        ),
    ]
