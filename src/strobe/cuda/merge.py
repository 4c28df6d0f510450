"""`strobe.merge` in one launch: up to 8 parts, each read once (kernels/merge.cuh)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from strobe.cuda.parts.element import ELEMENTS, FP32
from strobe.cuda.parts.kernel import TemplateKernel
from strobe.cuda.parts.params import MOST_PARTS, Field
from strobe.cuda.parts.plan import Launch, Plan
from strobe.cuda.small_calls import THREADS, Launchers, blocks, in_chunks, kernel, two_axes
from strobe.problem.arguments import ALIGN

_TYPES = {torch.float32: FP32, **ELEMENTS}
_launchers = Launchers()


def merge(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], sinks: torch.Tensor | None, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The result of `strobe.merge`; None where no kernel can compute it."""
    tensors = (*outs, *lses, sinks, out)
    result: torch.Tensor = outs[0] if out is None else out  # or one like it
    lse = lses[0]
    launcher = _launchers.get(
        tensors,
        len(outs),
        names(len(outs), sinks is not None),
        lambda arch: plan(outs, lses, sinks, _new(outs[0]) if out is None else out, _new(lse), arch),
    )
    if launcher is None:
        return None
    if out is None:
        result = _new(result)
    lse = _new(lse)
    parts = [t.data_ptr() for t in outs]
    to = result.data_ptr()
    if to in parts or any([address % ALIGN for address in (*parts, to)]):  # loads need memory that no thread writes
        return None
    addresses = [*parts, *[t.data_ptr() for t in lses], to, lse.data_ptr()]
    if sinks is not None:
        addresses.append(sinks.data_ptr())
    launcher(*addresses)
    return result, lse


def _new(t: torch.Tensor) -> torch.Tensor:
    return t.new_empty(t.shape, dtype=torch.float32)


@functools.cache
def names(parts: int, has_sinks: bool) -> tuple[str, ...]:
    """The names of the tensors of a plan, in the order of a call."""
    of_parts = (f"{name}{i}" for name in ("part", "part_lse") for i in range(parts))
    return (*of_parts, "o", "lse", *(("sinks",) if has_sinks else ()))


def plan(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    arch: str,
) -> Plan | None:
    """None for what the kernel cannot do, and for what `strobe.merge` refuses. `lse`: where the LSE goes."""
    shape = outs[0].shape
    if len(outs) != len(lses) or len(outs) > MOST_PARTS or len(shape) < 3 or shape[-1] % 8:
        return None
    if any(t.shape != shape for t in (*outs, out)) or any(t.dtype != outs[0].dtype for t in outs):
        return None
    *leading, rows, heads, dim = shape
    if any(t.shape != (*leading, heads, rows) or t.dtype != torch.float32 for t in (*lses, lse)):
        return None
    if outs[0].dtype not in _TYPES or out.dtype not in _TYPES or not all(in_chunks(t) for t in (*outs, out)):
        return None
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype not in _TYPES or not sinks.is_contiguous()):
        return None
    if any(n > 1 and step == 0 for n, step in zip(shape, out.stride(), strict=True)):
        return None  # several rows in one place
    of_outs = [t.stride()[:-2] for t in (*outs, out)]
    of_lses = [(*t.stride()[:-2], t.stride(-1)) for t in (*lses, lse)]
    axes, grid = two_axes((*leading, rows), [*of_outs, *of_lses]), blocks(THREADS, shape.numel() // 8)
    if axes is None or grid is None:
        return None
    inner, steps = axes
    strides = [(*two, t.stride(-2)) for two, t in zip(steps, (*outs, out, *lses, lse), strict=True)]
    (*of_parts, of_out), (*of_part_lses, of_lse) = strides[: len(outs) + 1], strides[len(outs) + 1 :]
    values = {
        "part_strides": [s for t in of_parts for s in t],
        "part_lse_strides": [s for t in of_part_lses for s in t],
        "out_strides": of_out,
        "lse_strides": of_lse,
        "new_rows": shape.numel() // (heads * dim),
        "inner_rows": inner,
        "heads": heads,
        "dim": dim,
    }
    of_sinks = None if sinks is None else sinks.dtype
    return Plan((Launch(_kernel(len(outs), outs[0].dtype, out.dtype, of_sinks, arch), grid, values),))


@functools.cache
def _kernel(parts: int, part: torch.dtype, out: torch.dtype, sinks: torch.dtype | None, arch: str) -> TemplateKernel:
    of_sinks = sinks or torch.float32
    config: dict[str, Any] = {"kParts": parts, "kSinks": sinks is not None}
    fields = [
        *(Field(f"part{i}", f"const {_TYPES[part]}*") for i in range(MOST_PARTS)),
        *(Field(f"part_lse{i}", "const float*") for i in range(MOST_PARTS)),
        *(Field("sinks", f"const {_TYPES[of_sinks]}*"), Field("o", f"{_TYPES[out]}*"), Field("lse", "float*")),
        *(Field(f"{name}_strides", "i64", 3 * parts) for name in ("part", "part_lse")),
        *(Field(f"{name}_strides", "i64", 3) for name in ("out", "lse")),
        *(Field(name, "int") for name in ("new_rows", "inner_rows", "heads", "dim")),
    ]
    kind = f"{parts} {str(part).removeprefix('torch.')}{' sinks' if sinks is not None else ''}"
    return kernel("merge", kind, arch, _TYPES[out].name, config, fields)
