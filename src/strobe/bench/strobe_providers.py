"""Our backends as providers."""

from __future__ import annotations

from typing import Any

import torch

import strobe
from strobe.backends import dispatch
from strobe.bench import variants
from strobe.bench.case import BenchCase
from strobe.bench.inputs import Tensors
from strobe.bench.provider import Prepare, Prepared, Provider, Reason, Refusal
from strobe.cuda.parts.kernel import PREFIX

_NEEDS = {"sm80": "cuda", "sm90": "cuda", "aten_cpu": "cpu", "emulator": "cpu"}


def _prepare(backend: str) -> Prepare:
    def prepare(case: BenchCase, x: Tensors) -> Prepared:
        device = x.q.device
        chosen = dispatch.get(backend)
        if (reason := chosen.supports(case.problem(device))) is not None:
            raise Refusal("unsupported", reason)
        note = None
        if case.direction != "forward":
            wanted = ("q", "k", "v", "bias") if case.learns_bias else ("q", "k", "v")
            backward = dispatch.choose_backward(case.problem(device).backward(wanted), chosen)
            note = None if backward is chosen else f"the gradients are computed by the backend {backward.name}"
        options: dict[str, Any] = {
            "mask": _mask(case, device),
            "score": variants.functions(case, device).score,
            "softcap": case.softcap,
            "bias": x.bias,
            "sinks": x.sinks,
            "layout": "bshd",
            "backend": backend,
        }
        return Prepared(lambda q, k, v: strobe.attention(q, k, v, **options), "bshd", note=note)

    return prepare


def _mask(case: BenchCase, device: torch.device) -> Any:
    """Blocks of a function are found once, before anything is timed, as FlexAttention's are."""
    functions = variants.functions(case, device)
    if functions.mask is None:
        return case.mask
    if functions.tensor is not None:
        return functions.tensor
    mask = case.mask & strobe.mask_function(functions.mask)
    return strobe.block_mask(mask, case.batch, case.heads, case.len_q, case.len_k)


def _slow_unless_named(backend: str) -> Reason:
    def why(case: BenchCase, device: torch.device) -> str | None:
        if backend == "emulator":
            return "emulated, thousands of times slower than anything else; name it to time it"
        if backend == "reference" and case.len_q * case.len_k > 1 << 18:
            return "the oracle stores the whole matrix in float64; name it to time it"
        if backend == "tiled" and device.type == "cuda" and case.suite != "quick":
            return "on a GPU the tiles written in PyTorch stand in for missing features; name it to time it"
        return None

    return why


def providers() -> list[Provider]:
    return [
        Provider(
            f"strobe-{name}",
            "ours",
            dispatch.get(name).summary,
            _prepare(name),
            skipped=_slow_unless_named(name),
            matrices=(lambda case: 16 * case.score_elements()) if name == "reference" else (lambda case: 0),
            kernels=f"^{PREFIX}" if _NEEDS.get(name) == "cuda" else None,
            functions=True,
            device=_NEEDS.get(name),
        )
        for name in dispatch.NAMES
    ]
