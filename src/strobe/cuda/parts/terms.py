"""fp32 inputs as the kernels for Hopper read them: each tensor in three bf16 terms (tile/terms.cuh), which a small kernel
writes into the workspace before.

To the kernels that follow, the terms are tensors of bf16 whose rows are three times as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from strobe.cuda.parts.element import BF16, FP32, TENSOR
from strobe.cuda.parts.features import Features
from strobe.cuda.parts.kernel import TemplateKernel, flags, template_kernel
from strobe.cuda.parts.params import Field, Struct, params
from strobe.cuda.parts.plan import Dims, Launch
from strobe.cuda.parts.rows import stride_fields, stride_values
from strobe.cuda.parts.tensor_maps import tile_map
from strobe.cuda.runtime.driver import TensorMapSpec
from strobe.problem import Problem, Rows as RowsInMemory, Strides

TERMS = 3  # kTerms
INPUTS, ELEMENT = FP32.in_maps, BF16
DTYPES = {torch.float32: ELEMENT}
SCOPE = "with float32 inputs"  # of reasons
_ROWS = 64  # of a block of the kernel that splits
_FORWARD, _BACKWARD = ("q", "k", "v"), ("q", "k", "v", "d_o")
_OTHER_NAMES = {"d_o": "do"}  # of the fields for strides


def limits(problem: Problem) -> str | None:
    """Return what the kernels for fp32 inputs leave to others, in both directions, besides what their planners say."""
    if problem.dropout:
        return f"dropout {SCOPE}"
    return f"parts of longer sequences {SCOPE}" if problem.positions else None


def features_of(read: Problem, dims: Dims) -> Features:
    """The features of the problem that `as_terms` returns."""
    return replace(Features.of(read, dims), inputs=INPUTS)


def as_terms(problem: Problem, dim: int) -> Problem:
    """The problem whose q, k and v are the terms, with `dim` columns each."""
    q, k = (replace(rows, strides=(_strides(rows, dim),) * n) for rows, n in ((problem.q, 1), (problem.k, 2)))
    return replace(problem, dtype=torch.bfloat16, q=q, k=k)


def workspace(problem: Problem, dim: int, gradients: bool = False) -> dict[str, int]:
    size = {"q": problem.q, "k": problem.k, "v": problem.k, "d_o": problem.q}
    names = _BACKWARD if gradients else _FORWARD
    return {f"{n}_terms": ELEMENT.bytes * TERMS * dim * size[n].heads * size[n].total for n in names}


def terms_map(
    problem: Problem, kind: str, rows: RowsInMemory, dim: int, box_rows: int, *, one_box: bool
) -> TensorMapSpec:
    """Return the map of tiles of `box_rows`; `problem` is that of the terms."""
    width, strides = TERMS * dim, rows.strides[0]
    return tile_map(problem, kind, rows, width, strides, box_rows, width, one_box=one_box)


def launch(problem: Problem, dim: int, arch: str, strides: Mapping[str, Strides]) -> Launch:
    """`strides`: of the tensors that are split."""
    gradients = "d_o" in strides
    slices = 1 if problem.varlen else problem.batch
    values = {
        **stride_values({_OTHER_NAMES.get(name, name): s for name, s in strides.items()}),
        "batch": slices,
        "heads": problem.heads,
        "heads_k": problem.heads_k,
        "len_q": problem.q.total // slices,
        "len_k": problem.k.total // slices,
        "dim": problem.dim,
        "dim_v": problem.dim_v,
    }
    of_q, of_k = (rows.heads * slices * -(-rows.total // slices // _ROWS) for rows in (problem.q, problem.k))
    return Launch(kernel(dim, arch, gradients), (2 if gradients else 1) * of_q + 2 * of_k, values)


def products(features: Features, block: int) -> tuple[tuple[int, str, int], ...]:
    """Return the products of `gemm_terms` with `block` keys, or queries, and of `gemm_terms_t`."""
    dims = sorted({features.dim, features.dim_v})
    both = [(block, form, d // ELEMENT.mma_k) for form in ("ss_zero", "ss") for d in dims]
    return tuple(both + [(d, form, block // ELEMENT.mma_k) for form in ("rs_t_zero", "rs_t") for d in dims])


def kernel(dim: int, arch: str, gradients: bool) -> TemplateKernel:
    return template_kernel(
        "split_terms",
        f"{dim}{flags(gradients=gradients)}",
        arch=arch,
        params=_params(gradients),
        threads=256,
        element=ELEMENT.name,
        config={"kRows": _ROWS, "kColumns": dim, "kGradients": gradients},
        blocks_per_sm=4,
        facts={"inputs": INPUTS},
    )


def _params(gradients: bool) -> Struct:
    names = _BACKWARD if gradients else _FORWARD
    return params(
        [Field(name, "const float*") for name in names],
        [Field(f"{name}_terms", TENSOR) for name in names],
        stride_fields(*(_OTHER_NAMES.get(name, name) for name in names)),
        [Field(n, "int") for n in ("batch", "heads", "heads_k", "len_q", "len_k", "dim", "dim_v")],
    )


def _strides(rows: RowsInMemory, dim: int) -> Strides:
    """Return the strides of (slice, head, row, 3 * dim)."""
    row = TERMS * dim
    length = rows.total if rows.varlen else rows.length
    return rows.heads * length * row, length * row, row
