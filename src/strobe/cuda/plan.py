"""From a problem to launches: what the plans of all kernels share. Facts and tables; no CUDA, no tensors.

A `Plan` is a list of launches and a workspace. Tensors are named, not passed: `launch.py` runs a plan on a GPU and
`emulator/backend.py` the same plan on a CPU. The module of each kernel (`forward_sm90.py`, …) holds its tiles, its
limits, its plans and the list of its variants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from strobe import dropout
from strobe.cuda.driver import TensorMapSpec
from strobe.cuda.kernel import KernelSpec
from strobe.cuda.params import Field
from strobe.mask import MAX_CONSTANTS, full
from strobe.problem import Problem, Strides
from strobe.score import LOG2E, MAX_CONSTANTS as MAX_SCORE_CONSTANTS

ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
MAX_DIM = 256
ALIGN = 16  # bytes: what one asynchronous copy moves


@dataclass(frozen=True)
class Machine:
    """What a plan has to know of a GPU."""

    arch: str  # "sm_80", "sm_90a", …
    sms: int  # multiprocessors
    l2_bytes: int
    smem_bytes: int  # shared memory that one block may have


@dataclass(frozen=True)
class Launch:
    """One kernel launch without addresses. A pointer of the kernel's arguments has the name of a tensor, and so has a
    tensor map behind its "map_"."""

    kernel: KernelSpec
    grid: int
    values: Mapping[str, Any]  # the other fields of the arguments
    maps: Mapping[str, TensorMapSpec] = field(default_factory=dict)  # by the name of the tensor
    overlaps: bool = False  # may start before the launch in front of it has ended; waits where its code says so
    together: int = 0  # so many blocks must be on the GPU at once, since they wait for others; 0: none waits


@dataclass(frozen=True)
class Plan:
    launches: tuple[Launch, ...]
    tensors: tuple[str, ...]  # that whoever runs the plan provides, in the order in which it passes them; or a seed
    workspace: Mapping[str, int] = field(default_factory=dict)  # name -> bytes, allocated for the call
    details: Mapping[str, object] = field(default_factory=dict)  # for `explain`

    @property
    def workspace_bytes(self) -> int:
        return sum(padded(size) for size in self.workspace.values())


COUNTER = "counter"  # a tensor that no caller provides: COUNTERS zeros, zero again when the launch has ended
COUNTERS = 1024  # the first hands out tiles; a consumer of a tile whose keys are split has one of the others


def padded(size: int, to: int = 256) -> int:
    return -(-size // to) * to


# ---- head dims -------------------------------------------------------------------------------------------------------

Dims = tuple[int, int]  # of queries and keys, and of values


def padded_dims(able: list[Dims], dim: int, dim_v: int) -> Dims:
    """The smallest pair that has a kernel. The columns in between are zeros that never touch memory."""
    return min(((d, dv) for d, dv in able if d >= dim and dv >= dim_v), key=sum)


def tile_bytes(rows: int, columns: int) -> int:
    """Panels of 64 columns, 128 bytes a row, as in tile/swizzle.cuh."""
    return -(-columns // 64) * rows * 128


# ---- arguments that kernels share ------------------------------------------------------------------------------------

PROBLEM_FIELDS = [
    Field("score", "float", MAX_SCORE_CONSTANTS),  # numbers of the printed Score
    Field("scale_log2", "float"),  # of its result, in units of log 2
    Field("dropout_scale", "float"),  # of the weights that are kept
    Field("dropout_threshold", "u32"),  # see tile/dropout.cuh
    *(Field(n, "int") for n in ("batch", "heads", "group", "len_q", "len_k", "dim", "dim_v")),
    Field("mask", "int", MAX_CONSTANTS),  # numbers of the printed Mask
]


def problem_values(problem: Problem) -> dict[str, Any]:
    """The values of PROBLEM_FIELDS."""
    constants, numbers = problem.mask.constants, problem.score.constants(problem.scale)
    return {
        "score": numbers + (0.0,) * (MAX_SCORE_CONSTANTS - len(numbers)),
        "scale_log2": problem.score.kernel_form(problem.scale).after * LOG2E,
        "dropout_scale": 1 / dropout.kept_share(problem.dropout),
        "dropout_threshold": 0x10001 * dropout.threshold_bits(problem.dropout),  # the same in both halves of 32 bits
        "batch": problem.batch,
        "heads": problem.heads,
        "group": problem.group,
        "len_q": problem.len_q,
        "len_k": problem.len_k,
        "dim": problem.dim,
        "dim_v": problem.dim_v,
        "mask": constants + (0,) * (MAX_CONSTANTS - len(constants)),
    }


def stride_fields(*tensors: str) -> list[Field]:
    return [Field(f"{t}_{axis}", "i64") for t in tensors for axis in ("batch", "head", "row")]


def stride_values(strides: Mapping[str, Strides]) -> dict[str, int]:
    return {f"{t}_{a}": s for t, axes in strides.items() for a, s in zip(("batch", "head", "row"), axes, strict=True)}


def lse_values(problem: Problem, pack_gqa: int = 1) -> dict[str, int]:
    """Strides of the LSE: those of the earlier result, or those of a new contiguous tensor. `pack_gqa`: so many heads are
    counted as rows."""
    rows = problem.q.total if problem.varlen else problem.len_q
    batch, head = problem.earlier_lse or (problem.heads * rows, rows // pack_gqa)
    return {"lse_batch": batch, "lse_head": head}


def merge_fields(merging: bool) -> list[Field]:
    """Of forward kernels: only those that can merge ask whether to do so (pipeline/output_rows.cuh)."""
    return [Field("merge", "int"), Field("unscale", "float")] if merging else []


def merge_values(problem: Problem) -> dict[str, float]:
    if not problem.partial and problem.earlier_out is None:
        return {}
    return {
        "merge": int(problem.earlier_lse is not None),
        "unscale": 1 / problem.score.kernel_form(problem.scale).after,
    }


# ---- what no kernel of ours can do -----------------------------------------------------------------------------------


def common_limits(problem: Problem) -> str | None:
    """Why none of the kernels can compute this, on any GPU; None if some can."""
    if problem.dtype not in ELEMENTS:
        return f"{str(problem.dtype).removeprefix('torch.')} inputs; the kernels take bfloat16 and float16"
    for name, dim in (("head dim", problem.dim), ("value head dim", problem.dim_v)):
        if dim % 8 or not 0 < dim <= MAX_DIM:
            return f"{name} {dim}; the kernels take multiples of 8 up to {MAX_DIM}"
    if problem.has_mask_tensor:
        return "a mask tensor; the kernels take interval masks (strobe.causal, strobe.window, …)"
    if problem.has_bias:
        return "a bias; the kernels have none"
    if problem.dropout > dropout.LARGEST:
        return f"dropout {problem.dropout}; the kernels drop up to {dropout.LARGEST:.3f}"
    if problem.dropout and (problem.positions or problem.first_head):
        return "dropout of a part of a sequence or of its heads; the kernels count from the first"
    if not problem.score.pointwise:
        return f"{problem.score!r}; the kernels take scores that do not depend on positions"
    if problem.score.kernel_form(problem.scale).after <= 0:
        return f"scale {problem.scale}; the kernels' running maximum needs a scale greater than 0"
    return None


# ---- packed GQA by strides -------------------------------------------------------------------------------------------


def pack_group(problem: Problem, out_strides: Strides) -> tuple[Problem, Strides]:
    """One query a sequence and several heads to a key head, as in decoding: the heads of a group become the rows of one
    tile, and their keys are read once instead of once for each of them. By strides alone, so for any kernel and group,
    but only where all keys are visible, so that rows need not be told apart, and without sinks and dropout, which
    belong to heads. An earlier LSE must have its heads one behind the other, since they become rows."""
    if (
        problem.len_q != 1
        or (problem.earlier_lse is not None and problem.earlier_lse[1] != 1)
        or problem.group == 1
        or problem.varlen
        or problem.has_sinks
        or problem.dropout
        or problem.mask != full
    ):
        return problem, out_strides
    group = problem.group

    def packed(strides: Strides) -> Strides:
        batch, head, _ = strides
        return batch, group * head, head

    rows = replace(
        problem.q,
        heads=problem.heads_k,
        length=group,
        total=problem.batch * group,
        strides=(packed(problem.q.strides[0]),),
    )
    earlier = None if problem.earlier_lse is None else (problem.earlier_lse[0], group)
    earlier_out = None if problem.earlier_out is None else packed(problem.earlier_out)
    return replace(problem, q=rows, earlier_lse=earlier, earlier_out=earlier_out), packed(out_strides)


# ---- the order of tiles ----------------------------------------------------------------------------------------------


def row_blocks(problem: Problem, block_m: int) -> int:
    return -(-problem.len_q // block_m)


def costs_differ(problem: Problem) -> bool:
    """Under a right bound alone later rows see more keys, and earlier keys are seen by more rows."""
    return problem.mask.lo is None and problem.mask.hi is not None


def section(problem: Problem, l2_bytes: int) -> int:
    """Heads that run together (pipeline/schedule.cuh). Where all rows cost the same, one head at a time reuses its keys
    best; else about as many as half of the L2 holds, so that the longest rows of all of them can go first. A few in any
    case, 16 at head dim 128: some eight blocks of a large GPU then share the keys of a head at any time, and memory keeps
    up without the L2. Sections are alike: a small one at the end would leave multiprocessors idle."""
    if not costs_differ(problem):
        return 1
    width = problem.dim + problem.dim_v
    per_head = max(1, problem.len_k * width * problem.dtype.itemsize)
    heads, wanted = problem.batch * problem.heads_k, max(16, 4096 // width, l2_bytes // 2 // per_head)
    return -(-heads // max(1, round(heads / wanted))) * problem.group
