"""`strobe.paged.append` in one launch: new keys are rotated and written, with new values, to slots that the device
reads (kernels/append.cuh)."""

from __future__ import annotations

import functools
from typing import Any

import torch

from strobe.cuda.parts.element import BF16, CONST_TENSOR, ELEMENTS, TENSOR
from strobe.cuda.parts.kernel import TemplateKernel
from strobe.cuda.parts.params import Field
from strobe.cuda.parts.plan import Launch, Plan
from strobe.cuda.small_calls import THREADS, Launchers, blocks, in_chunks, kernel, two_axes
from strobe.problem.arguments import ALIGN

NAMES = ("k_new", "v_new", "k", "v", "slots", "cos", "sin", "positions")
_INDICES = {torch.int32: "int", torch.int64: "i64"}
_launchers = Launchers()


def append(
    k_new: torch.Tensor, v_new: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, rotary: Any
) -> bool:
    """Append with a kernel, and return whether there is one for it. Pools are views (pages, page, heads, dim); `rotary`
    is a `strobe.paged.Rotary` or None."""
    tensors = (k_new, v_new, k, v, slots) if rotary is None else (k_new, v_new, k, v, slots, *rotary[:3])
    interleaved = rotary is not None and bool(rotary[3])
    launcher = _launchers.get(
        tensors, interleaved, NAMES[: len(tensors)], lambda arch: plan(k_new, v_new, k, v, slots, rotary, arch)
    )
    if launcher is None:
        return False
    addresses = [t.data_ptr() for t in tensors]
    from_k, from_v, to_k, to_v, *_ = addresses
    wide = (
        from_k | from_v | to_k | to_v if rotary is None else from_k | from_v | to_k | to_v | addresses[5] | addresses[6]
    )
    if wide % ALIGN or -2 * v.shape[-1] < to_v - to_k < 2 * k.shape[-1]:  # values in keys: the order of writes matters
        return False
    launcher(*addresses)
    return True


def plan(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    rotary: Any,
    arch: str,
) -> Plan | None:
    """None for what the kernel cannot do, and for what `strobe.paged.append` refuses."""
    new = ((k_new, k), (v_new, v))
    if any(n.shape != (*slots.shape, *pool.shape[2:]) or n.dtype != pool.dtype or not n.numel() for n, pool in new):
        return None
    if k.dtype not in ELEMENTS or v.dtype != k.dtype or k.shape[:2] != v.shape[:2] or slots.dtype not in _INDICES:
        return None
    if not all(in_chunks(t) for t in (k_new, v_new, k, v)) or k.shape[0] * k.shape[1] >= 2**31:
        return None
    leading = [k_new.stride()[:-2], v_new.stride()[:-2], slots.stride()]
    values: dict[str, Any] = {
        "positions_strides": (0, 0),
        "cos_row": 0,
        "sin_row": 0,
        "rotary_rows": 0,
        "rotary_half": 0,
    }
    if rotary is not None:
        if not _can_turn(k_new, rotary):
            return None
        leading.append(rotary.positions.stride())
        values |= {"cos_row": rotary.cos.stride(0), "sin_row": rotary.sin.stride(0)}
        values |= {"rotary_rows": rotary.cos.shape[0], "rotary_half": rotary.cos.shape[1]}
    axes = two_axes(slots.shape, leading)
    chunks = [n.shape[-2] * n.shape[-1] // 8 for n in (k_new, v_new)]
    grid = blocks(THREADS, slots.numel(), sum(chunks))
    if axes is None or grid is None:
        return None
    values["inner_rows"], strides = axes
    if rotary is not None:
        values["positions_strides"] = strides[3]
    for name, t, steps in (("k", k_new, strides[0]), ("v", v_new, strides[1])):
        values[f"{name}_new_strides"] = (*steps, t.stride(-2))
    for name, pool in (("k", k), ("v", v)):
        values |= {f"{name}_{axis}": pool.stride(i) for i, axis in enumerate(("batch", "row", "head"))}
    values |= {"slots_strides": strides[2], "new_rows": slots.numel(), "pages": k.shape[0], "page_size": k.shape[1]}
    values |= {"dim": k.shape[-1], "dim_v": v.shape[-1], "key_chunks": chunks[0], "value_chunks": chunks[1]}
    element = BF16.name  # without rotary bits are copied, whatever they mean
    turned: tuple[Any, ...] = (None,) * 3
    if rotary is not None:
        element, turned = ELEMENTS[k.dtype].name, (rotary.positions.dtype, rotary.cos.dtype, bool(rotary.interleaved))
    return Plan((Launch(_kernel(element, slots.dtype, *turned, arch), grid, values),))


def _can_turn(k_new: torch.Tensor, rotary: Any) -> bool:
    """Return whether pairs lie in whole chunks, and tables can be read in chunks."""
    cos, sin, at, interleaved = rotary
    if cos.dim() != 2 or cos.shape != sin.shape or cos.dtype != sin.dtype or 2 * cos.shape[1] > k_new.shape[-1]:
        return False
    if at.shape != k_new.shape[:-2] or at.dtype not in _INDICES or cos.dtype not in (torch.float32, k_new.dtype):
        return False
    return cos.shape[1] % (4 if interleaved else 8) == 0 and in_chunks(cos) and in_chunks(sin)


@functools.cache
def _kernel(
    element: str,
    slots: torch.dtype,
    positions: torch.dtype | None,
    tables: torch.dtype | None,
    interleaved: bool | None,
    arch: str,
) -> TemplateKernel:
    slot, position = _INDICES[slots], _INDICES[positions or torch.int32]
    table = "float" if tables in (None, torch.float32) else element
    turned = {None: "", False: " rotary", True: " interleaved"}[interleaved]
    config: dict[str, int | bool | str] = {
        "Slot": slot,
        "Position": position,
        "Table": table,
        "kRotary": interleaved is not None,
        "kInterleaved": bool(interleaved),
    }
    fields = [
        *(Field(name, CONST_TENSOR) for name in ("k_new", "v_new")),
        *(Field(name, TENSOR) for name in ("k", "v")),
        *(Field("slots", f"const {slot}*"), Field("positions", f"const {position}*")),
        *(Field(name, f"const {table}*") for name in ("cos", "sin")),
        *(Field(f"{t}_{axis}", "i64") for t in ("k", "v") for axis in ("batch", "row", "head")),
        *(Field(f"{t}_strides", "i64", 3) for t in ("k_new", "v_new")),
        *(Field(f"{t}_strides", "i64", 2) for t in ("slots", "positions")),
        *(Field(name, "i64") for name in ("cos_row", "sin_row", "rotary_rows")),
        *(Field(name, "int") for name in ("rotary_half", "inner_rows", "new_rows", "key_chunks", "value_chunks")),
        *(Field(name, "int") for name in ("page_size", "pages", "dim", "dim_v")),
    ]
    return kernel("append", f"{element} {slot}{turned}", arch, element, config, fields)
