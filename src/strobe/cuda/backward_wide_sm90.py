"""The backward kernels for Hopper, head dims above 128: limits, plan, variants.

Three launches: `delta` prepares the statistics of rows, `dq_sm90` and `dkv_sm90` compute S and P each for themselves. That
is seven products instead of five, but all accumulators stay in registers, nothing is summed up in memory, and the results
are always deterministic.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from strobe.cuda import tuned
from strobe.cuda.backward_plan import (
    BACKWARD_FIELDS,
    GRADIENTS_OF_KEYS,
    OTHER_REGISTERS,
    PART_FIELDS,
    REGISTERS,
    STATISTICS,
    TENSORS,
    Statistics,
    Wanted,
    backward_values,
    delta_kernel,
    delta_launch,
    gradient_strides,
    in_parts,
    sections_of_keys,
    tuned_name,
)
from strobe.cuda.backward_sm90 import backward_maps
from strobe.cuda.features import Features, common_features
from strobe.cuda.forward_sm90 import ARCH, SMEM_BYTES, tma_limits
from strobe.cuda.kernel import TemplateKernel
from strobe.cuda.params import Field, Struct
from strobe.cuda.plan import Dims, Launch, Machine, Plan, padded_dims, row_blocks, section, stride_fields, tile_bytes
from strobe.cuda.tensor_maps import tile_map
from strobe.mask import causal
from strobe.problem import Problem, Strides

__all__ = ["DIMS", "TENSORS", "DqTile", "candidates", "choose_tile", "fits", "limits", "plan", "variants"]

DIMS: list[Dims] = [(192, 128), (192, 192), (256, 256)]
_INTS = [Field(t, "const int*") for t in ("cu_q", "cu_k", "positions")]
_DQ = Struct(
    "Params",
    [
        *_INTS,
        *STATISTICS,
        Field("seed", "u64"),
        Field("dq", "float*"),  # where it goes as fp32; else a tensor map says it
        *stride_fields("dq"),
        *(Field(n, "int") for n in ("row_blocks", "section", "splits")),
        *BACKWARD_FIELDS,
        *(Field(f"map_{t}", "TensorMap") for t in ("q", "d_o", "k", "v", "dq")),
    ],
)
_DKV = Struct(
    "Params",
    [
        *_INTS,
        *STATISTICS,
        *GRADIENTS_OF_KEYS,
        *(Field(n, "int") for n in ("key_blocks", "section", "sections")),
        *BACKWARD_FIELDS,
        *(Field(f"map_{t}", "TensorMap") for t in ("q", "d_o", "k", "v", "dk", "dv")),
        *PART_FIELDS,
    ],
)
STAT_BLOCK = 64


@dataclass(frozen=True)
class DqTile:
    """128 queries, 64 for each of two consumers."""

    block_n: int = 64  # keys at a time
    stages: int = 2  # buffers for K
    stages_v: int = 1

    def __str__(self) -> str:
        return f"128x{self.block_n} s{self.stages}{self.stages_v}"

    def smem(self, dim: int, dim_v: int) -> int:
        queries = 2 * (tile_bytes(64, dim) + tile_bytes(64, dim_v))
        keys = self.stages * tile_bytes(self.block_n, dim) + self.stages_v * tile_bytes(self.block_n, dim_v)
        return queries + keys + 16 + 16 * (self.stages + self.stages_v)


TILES = {(192, 128): DqTile(stages_v=2), (192, 192): DqTile(stages_v=2), (256, 256): DqTile()}


def fits(tile: DqTile, dim: int, dim_v: int) -> bool:
    """Shared memory suffices, and so do the registers of a consumer: dQ, S and dP."""
    able = tile.block_n % 16 == 0 and dim // 2 + tile.block_n + OTHER_REGISTERS <= REGISTERS[1]
    return able and tile.smem(dim, dim_v) <= SMEM_BYTES


def candidates(features: Features, arch: str = ARCH) -> list[DqTile]:
    """Tiles of `dq_sm90` that fit; the first is the one that is used. `dkv_sm90` has one."""
    every = itertools.product((32, 48, 64, 80, 96, 128), ((1, 1), (2, 1), (2, 2), (3, 2)))
    near = [tile for n, stages in every if fits(tile := DqTile(n, *stages), features.dim, features.dim_v)]
    return list(dict.fromkeys([choose_tile(features), *near]))


def choose_tile(features: Features) -> DqTile:
    dims = features.dim, features.dim_v
    return tuned.tile(tuned_name(features, ARCH), DqTile, lambda tile: fits(tile, *dims)) or TILES[dims]


def limits(problem: Problem) -> str | None:
    if not problem.gradients:
        return "no forward kernel"
    return tma_limits(problem)


def _common(features: Features, one_box: bool) -> dict[str, int | bool]:
    return {
        **features.config(),
        "kStatBlock": STAT_BLOCK,
        "kThreads": 384,
        "kRegsProducer": REGISTERS[0],
        "kRegsConsumer": REGISTERS[1],
        "kPackGqa": 1,
        "kSplit": False,
        "kLastFirst": False,
        "kOneBoxPerTile": one_box,
    }


def dq_kernel(features: Features, tile: DqTile, one_box: bool) -> TemplateKernel:
    dim, dim_v, n = features.dim, features.dim_v, tile.block_n
    smem = tile.smem(dim, dim_v)
    sizes = {"kBlockM": 128, "kBlockN": n, "kStages": tile.stages, "kStagesV": tile.stages_v, "kSmem": smem}
    return TemplateKernel(
        name=f"dq_sm90[{features.name} {tile}{'' if one_box else ' panels'}]",
        arch=ARCH,
        params=_DQ,
        threads=384,
        smem=smem,
        header="dq_sm90",
        template="dq_sm90",
        element=features.element,
        config=tuple({**_common(features, one_box), **sizes}.items()),
        types=features.types(),
        products=tuple(sorted({(n, "ss_zero", dim // 16), (n, "ss_zero", dim_v // 16)})),
        accumulators=((dim, n // 16),),
        facts={**features.facts(), "tile": str(tile), "one_box": one_box},
    )


def dkv_kernel(features: Features, one_box: bool, parts: bool = False) -> TemplateKernel:
    dim, dim_v = features.dim, features.dim_v
    tiles = 3 * (tile_bytes(64, dim) + tile_bytes(64, dim_v)) + 64 * 64 * 4
    smem = tiles + 2 * 4 * 64 * (4 if features.dropout else 2) + 64 * 8 + 16 + 2 * 32 + 16
    sizes = {"kBlockM": 64, "kBlockN": 64, "kSmem": smem, "kGroupParts": parts}
    sizes |= {"kPartialOut": features.partial_out or parts}
    return TemplateKernel(
        name=f"dkv_sm90[{features.name} 64x64{' parts' if parts else ''}{'' if one_box else ' panels'}]",
        arch=ARCH,
        params=_DKV,
        threads=384,
        smem=smem,
        header="dkv_sm90",
        template="dkv_sm90",
        element=features.element,
        config=tuple({**_common(features, one_box), **sizes}.items()),
        types=features.types(),
        products=tuple(sorted({(64, "ss_zero", dim // 16), (64, "ss_zero", dim_v // 16)})),
        accumulators=tuple(sorted({(dim, 4), (dim_v, 4)}, reverse=True)),
        facts={**features.facts(), "tile": "64x64", "one_box": one_box},
    )


def plan(problem: Problem, strides: dict[str, Strides], machine: Machine, tile: DqTile | None = None) -> Plan:
    """`strides`: of o, d_o and the gradients."""
    dims = padded_dims(DIMS, problem.dim, problem.dim_v)
    one_box = problem.dim % 64 == 0 and problem.dim_v % 64 == 0 and not problem.varlen
    features, wanted = replace(Features.of(problem, dims), sinks=False), Wanted.of(problem)
    tile = tile or choose_tile(features)
    statistics = Statistics.of(problem, STAT_BLOCK)
    delta = delta_kernel(features, wanted, ARCH, STAT_BLOCK, 0)
    launches = [delta_launch(problem, delta, statistics, strides)]
    values, parts = {**backward_values(problem), **statistics.values()}, in_parts(problem)
    details: dict[str, object] = {}
    if wanted.dkv:
        kernel, key_blocks = dkv_kernel(features, one_box, problem.group_parts > 1), -(-problem.len_k // 64)
        grid = key_blocks * problem.batch * parts.heads_k
        schedule = {"key_blocks": key_blocks, **sections_of_keys(parts, key_blocks, machine.sms)}
        schedule |= {**gradient_strides(strides, "dk", "dv"), **backward_values(parts)}
        schedule |= {"group_parts": problem.group_parts}
        maps = backward_maps(problem, strides, dims, one_box, 64, 64, True)
        launches.append(Launch(kernel, grid, {**values, **schedule}, maps, overlaps=True))  # type: ignore[arg-type]
        details |= {"backward kernel for dK, dV": kernel.name}
    if wanted.dq:
        kernel, blocks = dq_kernel(features, tile, one_box), row_blocks(problem, 128)
        grid = blocks * problem.batch * problem.heads
        schedule = {"row_blocks": blocks, "section": section(problem, machine.l2_bytes), "splits": 1}
        schedule |= gradient_strides(strides, "dq")
        maps = backward_maps(problem, strides, dims, one_box, 64, tile.block_n, False)
        of_q = (problem.heads, problem.len_q, problem.q.total)
        if not problem.partial:
            maps["dq"] = tile_map(problem, one_box, *of_q, problem.dim, strides["dq"], 64, dims[0])
        launches.append(Launch(kernel, grid, {**values, **schedule}, maps, overlaps=not wanted.dkv))  # type: ignore[arg-type]
        details |= {"backward kernel for dQ": kernel.name}
    return Plan(tuple(launches), TENSORS, statistics.workspace, details)


def variants(arch: str = ARCH, *, exhaustive: bool = False) -> Iterator[TemplateKernel]:
    """The kernels that calls ask for."""
    seen: set[TemplateKernel] = set()
    for features in common_features(DIMS, exhaustive, backward=True):
        features = replace(features, sinks=False)
        able = features.dim % 64 == 0 and features.dim_v % 64 == 0 and not features.varlen
        for one_box in (True, False) if able and exhaustive else (able,):
            made = [dq_kernel(features, choose_tile(features), one_box), dkv_kernel(features, one_box)]
            if exhaustive or features.mask is causal:
                made.append(dkv_kernel(features, one_box, parts=True))
            made += [delta_kernel(features, Wanted(sinks=sinks), ARCH, STAT_BLOCK, 0) for sinks in (False, True)]
            for kernel in made:
                if kernel not in seen:
                    seen.add(kernel)
                    yield kernel
