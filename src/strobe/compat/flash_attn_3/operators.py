"""`torch.ops.flash_attn_3`: FlashAttention 3's operators, with its schemas, for code and exported models that call them.
They are there while strobe stands in for FlashAttention 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from strobe.compat import flash_attn_interface as interface
from strobe.problem.hints import raises_as_hosts

_Tensors = tuple[torch.Tensor, ...]

_LENGTHS = "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None"
_WINDOW = "bool is_causal=False, int window_size_left=-1, int window_size_right=-1"
_HINTS = "int num_splits=0, bool? pack_gqa=None, int sm_margin=0"
_SCHEMAS = {
    "fwd": "Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    f"{_LENGTHS}, Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    f"Tensor? v_descale=None, float? softmax_scale=None, {_WINDOW}, int attention_chunk=0, float softcap=0., "
    f"bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, {_HINTS}"
    ") -> (Tensor(out!), Tensor, Tensor, Tensor)",
    "bwd": "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    f"{_LENGTHS}, float? softmax_scale=None, {_WINDOW}, float softcap=0., bool deterministic=False, int sm_margin=0"
    ") -> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)",
    "fwd_combine": "Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, ScalarType? out_dtype=None"
    ") -> (Tensor(out!), Tensor)",
    "get_scheduler_metadata": "int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? leftpad_k=None, "
    f"int? page_size=None, int max_seqlen_k_new=0, {_WINDOW}, int attention_chunk=0, bool has_softcap=False, {_HINTS}"
    ") -> Tensor",
}


def library() -> torch.library.Library:
    """The operators, for as long as the library lives."""
    made = torch.library.Library("flash_attn_3", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.flash_attn_3, name):  # else FlashAttention 3 itself has been loaded
            made.define(f"{name}({schema}")
        for key in ("CUDA", "CPU"):
            made.impl(name, raises_as_hosts(_FUNCTIONS[name]), key)
    return made


def _by_name(operator: str, values: tuple[Any, ...], **renamed: str) -> dict[str, Any]:
    """An operator is called with positions, and without defaults at the end."""
    arguments, _ = _SCHEMAS[operator].split(") -> ")
    names = [argument.split()[-1].split("=")[0] for argument in arguments.split(", ")]
    return {renamed.get(name, name): value for name, value in zip(names, values, strict=False)}


def _forward(*values: Any) -> _Tensors:
    a = _by_name("fwd", values, q_v="qv", out="out_", is_causal="causal", is_rotary_interleaved="rotary_interleaved")
    return interface._flash_attn_forward(**{"rotary_interleaved": False} | a)


def _backward(*values: Any) -> _Tensors:
    """(dq, dk, dv, rowsum(dout * out)), and four that the original needs for itself, empty here."""
    a = _by_name("bwd", values, seqused_q="sequed_q", seqused_k="sequed_k")
    for name in "qkv":
        if a.get(f"d{name}") is None:
            a[f"d{name}"] = torch.empty_like(a[name])
    delta = interface._flash_attn_backward(**a)
    return a["dq"], a["dk"], a["dv"], delta, *(delta.new_empty(0) for _ in range(4))


def _scheduler_metadata(*values: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.int32, device=_by_name("get_scheduler_metadata", values)["seqused_k"].device)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "fwd": _forward,
    "bwd": _backward,
    "fwd_combine": interface.flash_attn_combine,
    "get_scheduler_metadata": _scheduler_metadata,
}
