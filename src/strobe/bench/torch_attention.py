"""PyTorch's attention as providers: `scaled_dot_product_attention` by backend, and softmax(q kᵀ) v as written."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from strobe.bench import variants
from strobe.bench.case import BenchCase
from strobe.bench.inputs import Tensors
from strobe.bench.provider import (
    Forward,
    Prepare,
    Prepared,
    Provider,
    Refusal,
    costs_a_compilation,
    dense_mask,
    keep_buffers,
    refuse,
    two_matrices,
)

SDPA_BACKENDS = {
    "torch-flash": "FLASH_ATTENTION",
    "torch-efficient": "EFFICIENT_ATTENTION",
    "torch-cudnn": "CUDNN_ATTENTION",
}


@contextlib.contextmanager
def _sdpa_scope(backend: str, half: bool) -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed() if half else False
    if half:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with sdpa_kernel(getattr(SDPBackend, backend)):
                yield
    finally:
        if half:
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def _sdpa(backend: str, half: bool = False) -> Prepare:
    def prepare(case: BenchCase, x: Tensors) -> Prepared:
        refuse(case, softcap="no softcap", sinks="no sinks", score="no score functions")
        device = x.q.device
        if device.type != "cuda" and backend in ("EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
            raise Refusal("unsupported", f"needs an NVIDIA GPU, the tensors are on {device.type}")
        if half and (device.type != "cuda" or case.dtype == "float32"):
            raise Refusal(
                "unsupported", "a setting for 16-bit inputs on NVIDIA GPUs; here it would be the same as torch-math"
            )
        causal = case.causal and case.len_q == case.len_k
        mask = None if causal else dense_mask(case, device)
        if x.bias is not None:
            mask = x.bias if mask is None else x.bias.masked_fill(~mask, -torch.inf)
        options: dict[str, Any] = {
            "attn_mask": mask,
            "is_causal": causal,
            "scale": case.softmax_scale,
            "enable_gqa": case.group > 1,
        }
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return Prepared(lambda q, k, v: sdpa(q, k, v, **options), scope=lambda: _sdpa_scope(backend, half))

    return prepare


def why_no_kernel(provider: str, x: Tensors, prepared: Prepared) -> str:
    """PyTorch raises "no available kernel" and warns why; the warnings are the reason."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(RuntimeError), sdpa_kernel(getattr(SDPBackend, SDPA_BACKENDS[provider])):
            prepared.forward(*(t.detach().requires_grad_(x.do is not None) for t in (x.q, x.k, x.v)))
    texts = [str(w.message).split("(Triggered")[0].strip() for w in caught]
    useful = [
        t
        for t in texts
        if "was not enabled" not in t and "kernel not used because" not in t and "has been runtime disabled" not in t
    ]
    return "; ".join(dict.fromkeys(useful)) or "PyTorch has no such kernel for this problem"


def _textbook(case: BenchCase, x: Tensors) -> Forward:
    visible, score = dense_mask(case, x.q.device), variants.functions(case, x.q.device).score
    hidden = None if visible is None else ~visible
    batch, heads, rows = (
        torch.arange(n, device=x.q.device).view(-1, *(1,) * axes)
        for n, axes in ((case.batch, 3), (case.heads, 2), (case.len_q, 1))
    )
    keys = torch.arange(case.len_k, device=x.q.device)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if case.group > 1:
            k, v = (t.repeat_interleave(case.group, 1) for t in (k, v))
        s = (q * case.softmax_scale) @ k.mT
        if case.softcap is not None:
            s = case.softcap * torch.tanh(s / case.softcap)
        if score is not None:
            s = score(s, batch, heads, rows, keys).to(s.dtype)
        if x.bias is not None:
            s = s + x.bias
        if hidden is not None:
            s = s.masked_fill(hidden, -torch.inf)
        if x.sinks is not None:
            s = torch.cat([s, x.sinks.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)], -1)
        return torch.softmax(s, -1)[..., : case.len_k] @ v

    return forward


def _eager(case: BenchCase, x: Tensors) -> Prepared:
    return Prepared(_textbook(case, x))


def _compiled(case: BenchCase, x: Tensors) -> Prepared:
    torch._dynamo.reset()
    keep_buffers()
    return Prepared(torch.compile(_textbook(case, x), dynamic=False))


def providers() -> list[Provider]:
    math = "PyTorch's math backend"
    return [
        Provider("torch-cudnn", "peer", "PyTorch's cuDNN backend", _sdpa("CUDNN_ATTENTION"), kernels="cudnn|sdpa"),
        Provider(
            "torch-flash",
            "peer",
            "PyTorch's flash backend (FlashAttention-2)",
            _sdpa("FLASH_ATTENTION"),
            kernels="flash",
        ),
        Provider(
            "torch-efficient",
            "peer",
            "PyTorch's memory-efficient backend (CUTLASS)",
            _sdpa("EFFICIENT_ATTENTION"),
            kernels="fmha|efficient|attention_kernel",
            functions=True,
        ),
        Provider(
            "torch-math",
            "standard",
            f"{math}, which computes 16-bit inputs in fp32",
            _sdpa("MATH"),
            matrices=lambda case: 8 * case.score_elements(),
            functions=True,
        ),
        Provider(
            "torch-math-half",
            "standard",
            f"{math} in half precision",
            _sdpa("MATH", half=True),
            matrices=two_matrices,
        ),
        Provider("eager", "standard", "softmax(q kᵀ) v in PyTorch", _eager, matrices=two_matrices, functions=True),
        Provider(
            "eager-compiled",
            "standard",
            "the same under torch.compile",
            _compiled,
            matrices=lambda case: two_matrices(case) // 2,
            skipped=costs_a_compilation,
            compiles=True,
        ),
    ]
