"""The backward kernels for Hopper, head dims above 128, up to 512: limits, plan, variants.

Three launches: `delta` prepares the statistics of rows, `dq_sm90` and `dkv_sm90` compute S and P each for themselves. That
is seven products instead of five, but all accumulators stay in registers, nothing is summed up in memory, and the results
are always deterministic.

Above head dim 256 registers hold half of the columns of a gradient. The two consumers of `dq_sm90` have a half each, and
`dkv_sm90` has a block for each half. S and dP are computed for both: eleven products instead of five.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from strobe.cuda.parts import tuned
from strobe.cuda.parts.blocks import KEY_TILE_FIELDS, QUERY_TILE_FIELDS, key_tiles, query_tiles
from strobe.cuda.parts.features import Features, common_features, wide_features
from strobe.cuda.parts.kernel import TemplateKernel
from strobe.cuda.parts.params import Field, Struct, params
from strobe.cuda.parts.plan import (
    ANY_MACHINE,
    MAX_DIM_SM90,
    Dims,
    Launch,
    Machine,
    Plan,
    first_without_spills,
    padded_dims,
)
from strobe.cuda.parts.rows import Rows, stride_fields
from strobe.cuda.parts.shared_memory import Region, SharedMemory, ring_bytes, tile_bytes
from strobe.cuda.parts.tensor_maps import tile_map
from strobe.cuda.plans import backward_sm90
from strobe.cuda.plans.backward_plan import (
    OTHER_REGISTERS,
    REGISTERS,
    SCALE_GRAD,
    STATISTICS,
    Statistics,
    Wanted,
    bias_gradient_values,
    delta_kernel,
    delta_launch,
    gradient_strides,
    gradients_of_keys,
    in_parts,
    score_values,
    tuned_name,
)
from strobe.cuda.plans.backward_sm90 import backward_maps
from strobe.cuda.plans.forward_sm90 import ARCH, SMEM_BYTES, tma_limits
from strobe.problem import Problem, Strides
from strobe.variants.mask import causal

__all__ = ["DIMS", "WIDE_DIMS", "DkvTile", "DqTile", "candidates", "choose_tile", "fits", "limits", "plan", "variants"]

DIMS: list[Dims] = [(192, 128), (192, 192), (256, 256)]
WIDE_DIMS: list[Dims] = [(384, 384), (512, 512)]  # the columns of gradients in two parts
_INPUTS = ("q", "k", "v", "d_o")


@functools.cache
def dq_params(scores: tuple[Field, ...], maps: tuple[str, ...], *, buffers: bool) -> Struct:
    """`maps`: the tensors that have one; `buffers`: keys may lie in buffers that they do not fill."""
    return params(
        [Field("dq", "float*"), *stride_fields("dq")],  # where it goes as fp32; else a tensor map says it
        [Field("seed", "u64")],
        STATISTICS,
        Rows.fields(tma=buffers),
        [SCALE_GRAD, *scores],
        QUERY_TILE_FIELDS,
        [Field(f"map_{t}", "TensorMap") for t in maps],
    )


@functools.cache
def dkv_params(scores: tuple[Field, ...], maps: tuple[str, ...], *, buffers: bool) -> Struct:
    """See `dq_params`."""
    return params(
        gradients_of_keys("float*"),
        STATISTICS,
        Rows.fields(tma=buffers),
        [SCALE_GRAD, *scores],
        KEY_TILE_FIELDS,
        [Field(f"map_{t}", "TensorMap") for t in maps],
    )


STAT_BLOCK = 64


@dataclass(frozen=True)
class DqTile:
    """128 queries, 64 for each of two consumers, or 64 for both, with half of the columns of dQ each."""

    block_n: int = 64  # keys at a time
    stages: int = 2  # buffers for K
    stages_v: int = 1
    block_m: int = 128

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} s{self.stages}{self.stages_v}"

    @property
    def parts(self) -> int:
        """How many parts the columns of dQ have."""
        return 128 // self.block_m

    def config(self) -> dict[str, int | bool | str]:
        return {
            "kBlockM": self.block_m,
            "kBlockN": self.block_n,
            "kStages": self.stages,
            "kStagesV": self.stages_v,
            "kColumnParts": self.parts,
        }

    def memory(self, dim: int, dim_v: int) -> SharedMemory:
        return SharedMemory(
            [
                Region("q", tile_bytes(64, dim), self.block_m // 64),  # later dQ
                Region("d_o", tile_bytes(64, dim_v), self.block_m // 64),
                Region("k", tile_bytes(self.block_n, dim), self.stages),
                Region("v", tile_bytes(self.block_n, dim_v), self.stages_v),
                Region("q_barrier", 16),
                Region("ring_k", ring_bytes(self.stages)),
                Region("ring_v", ring_bytes(self.stages_v)),
            ]
        )

    def smem(self, dim: int, dim_v: int) -> int:
        return self.memory(dim, dim_v).size


@dataclass(frozen=True)
class DkvTile:
    """64 keys."""

    block_m: int = 64  # queries at a time
    stages: int = 2  # buffers for Q and for dO
    parts: int = 1  # of the columns of dK and dV, one a block

    def __str__(self) -> str:
        return f"{self.block_m}x64"

    def config(self) -> dict[str, int | bool | str]:
        return {"kBlockM": self.block_m, "kBlockN": 64, "kStages": self.stages, "kColumnParts": self.parts}

    def memory(self, dim: int, dim_v: int, dropout: bool) -> SharedMemory:
        row = 4 * self.block_m
        return SharedMemory(
            [
                Region("k", tile_bytes(64, dim)),  # later dK
                Region("v", tile_bytes(64, dim_v)),  # later dV
                Region("q", tile_bytes(self.block_m, dim), self.stages),
                Region("d_o", tile_bytes(self.block_m, dim_v), self.stages),
                Region("p", self.block_m * 64 * 4),
                Region("lse", row, 2),
                Region("delta", row, 2),
                Region("dropout", row, 4 if dropout else 0),  # with Q, and with dO
                Region("keys", 64 * 8),  # which queries see each key
                Region("kv_barriers", 16),
                Region("ring_q", ring_bytes(self.stages)),
                Region("ring_do", ring_bytes(self.stages)),
                Region("ring_p", ring_bytes(1)),
            ]
        )


TILES = {
    (192, 128): DqTile(stages_v=2),
    (192, 192): DqTile(stages_v=2),
    (256, 256): DqTile(),
    (384, 384): DqTile(48, block_m=64),
    (512, 512): DqTile(32, block_m=64),
}
WIDE_DKV_TILES = {(384, 384): DkvTile(32, parts=2), (512, 512): DkvTile(32, stages=1, parts=2)}


def dkv_tile(features: Features) -> DkvTile:
    return WIDE_DKV_TILES.get((features.dim, features.dim_v), DkvTile())


def fits(tile: DqTile, dim: int, dim_v: int) -> bool:
    """Whether shared memory suffices, and the registers of a consumer hold dQ, S and dP."""
    able = tile.block_n % 16 == 0 and dim // tile.parts // 2 + tile.block_n + OTHER_REGISTERS <= REGISTERS[1]
    return able and tile.smem(dim, dim_v) <= SMEM_BYTES


def candidates(features: Features, arch: str = ARCH) -> list[DqTile]:
    """Tiles of `dq_sm90` that fit; the first is the one that is used. `dkv_sm90` has one."""
    every = itertools.product((32, 48, 64, 80, 96, 128), ((1, 1), (2, 1), (2, 2), (3, 2)))
    near = [tile for n, stages in every if fits(tile := DqTile(n, *stages), features.dim, features.dim_v)]
    return list(dict.fromkeys([choose_tile(features), *near]))


def choose_tile(features: Features, machine: Machine = ANY_MACHINE) -> DqTile:
    """A score function that no table knows gets the first tile whose kernel does not spill."""
    dims = features.dim, features.dim_v
    tile = tuned.tile(tuned_name(features, ARCH), DqTile, lambda tile: fits(tile, *dims)) or TILES[dims]
    if not features.scores.is_unknown:
        return tile
    able = [tile, *(replace(tile, block_n=n) for n in (48, 32) if n < tile.block_n)]
    return first_without_spills(able, lambda t: dq_kernel(features, t, one_box=False), machine)


def limits(problem: Problem) -> str | None:
    if not problem.gradients:
        return "no forward kernel"
    if (reason := tma_limits(problem, MAX_DIM_SM90)) is None and problem.learnt:
        dim = max(problem.dim, problem.dim_v)
        return f"gradients of tensors that a score function captures with head dim {dim}; up to {backward_sm90.DIMS[-1][0]}"
    return reason


def common_config(features: Features, one_box: bool) -> dict[str, int | bool | str]:
    return {
        **features.config(),
        "kStatBlock": STAT_BLOCK,
        "kThreads": 384,
        "kRegsProducer": REGISTERS[0],
        "kRegsConsumer": REGISTERS[1],
        "kLastFirst": False,
        "kOneBoxPerTile": one_box,
    }


def dq_kernel(features: Features, tile: DqTile, one_box: bool) -> TemplateKernel:
    dim, dim_v, n = features.dim, features.dim_v, tile.block_n
    memory = tile.memory(dim, dim_v)
    return TemplateKernel(
        name=f"dq_sm90[{features.name} {tile}{'' if one_box else ' panels'}]",
        arch=ARCH,
        params=dq_params(features.scores.fields(), (*_INPUTS, "dq"), buffers=True),
        threads=384,
        smem=memory.size,
        header="dq_sm90",
        template="dq_sm90",
        label=features.label(),
        element=features.element,
        config=tuple({**common_config(features, one_box), **tile.config()}.items()),
        memory=memory,
        types=features.types(),
        products=tuple(sorted({(n, "ss_zero", dim // 16), (n, "ss_zero", dim_v // 16)})),
        accumulators=((dim // tile.parts, n // 16),),
        facts={**features.facts(), "tile": str(tile), "one_box": one_box},
    )


def dkv_kernel(features: Features, one_box: bool, parts: bool = False) -> TemplateKernel:
    dim, dim_v, tile = features.dim, features.dim_v, dkv_tile(features)
    m, memory = tile.block_m, tile.memory(dim, dim_v, features.scores.dropout)
    sizes = tile.config() | {"kGroupParts": parts, "kPartialOut": features.output.partial or parts}
    return TemplateKernel(
        name=f"dkv_sm90[{features.name} {tile}{' parts' if parts else ''}{'' if one_box else ' panels'}]",
        arch=ARCH,
        params=dkv_params(features.scores.fields(), (*_INPUTS, "dk", "dv"), buffers=True),
        threads=384,
        smem=memory.size,
        header="dkv_sm90",
        template="dkv_sm90",
        label=features.label(),
        element=features.element,
        config=tuple({**common_config(features, one_box), **sizes}.items()),
        memory=memory,
        types=features.types(),
        products=tuple(sorted({(m, "ss_zero", dim // 16), (m, "ss_zero", dim_v // 16)})),
        accumulators=tuple(sorted({(d // tile.parts, m // 16) for d in (dim, dim_v)}, reverse=True)),
        facts={**features.facts(), "tile": str(tile), "one_box": one_box},
    )


def plan(problem: Problem, strides: dict[str, Strides], machine: Machine, tile: DqTile | None = None) -> Plan:
    """`strides`: of o, d_o and the gradients."""
    dims = padded_dims([*DIMS, *WIDE_DIMS], problem.dim, problem.dim_v)
    features, wanted = Features.of(problem, dims).without_sinks(), Wanted.of(problem)
    one_box = problem.dim % 64 == 0 and problem.dim_v % 64 == 0 and not features.rows.clipped
    tile = tile or choose_tile(features, machine)
    statistics = Statistics.of(problem, STAT_BLOCK)
    delta = delta_kernel(features, wanted, ARCH, STAT_BLOCK, 0)
    launches = [delta_launch(problem, delta, statistics, strides)]
    shared, parts = {**score_values(problem), **statistics.values()}, in_parts(problem)
    details: dict[str, object] = {}
    if wanted.dkv:
        plain = replace(features, scores=replace(features.scores, bias_gradient=""))  # dq_sm90 computes that
        kernel, schedule = dkv_kernel(plain, one_box, problem.group_parts > 1), key_tiles(parts, 64, machine.sms)
        of_keys = dkv_tile(features)
        grid = schedule["key_blocks"] * problem.batch * parts.heads_k * of_keys.parts
        own = {**features.rows.values(parts, tma=True), **schedule, **gradient_strides(strides, "dk", "dv")}
        maps = backward_maps(problem, features, strides, one_box, of_keys.block_m, 64, True, of_keys.parts)
        launches.append(Launch(kernel, grid, shared | own, maps, overlaps=True))
        details |= {"backward kernel for dK, dV": kernel.name}
    if wanted.dq:
        kernel, schedule = dq_kernel(features, tile, one_box), query_tiles(problem, tile.block_m, machine.l2_bytes)
        own = {**features.rows.values(problem, tma=True), **schedule, **gradient_strides(strides, "dq")}
        own |= bias_gradient_values(problem, strides)
        maps = backward_maps(problem, features, strides, one_box, 64, tile.block_n, False)
        if not problem.partial:
            kind, dq = features.rows.queries, strides["dq"]
            width = dims[0] // tile.parts
            maps["dq"] = tile_map(problem, kind, problem.q, problem.dim, dq, 64, width, one_box=one_box)
        launches.append(Launch(kernel, schedule["tiles"], shared | own, maps, overlaps=not wanted.dkv))
        details |= {"backward kernel for dQ": kernel.name}
    return Plan(tuple(launches), statistics.workspace, details)


def variants(arch: str = ARCH, *, exhaustive: bool = False) -> Iterator[TemplateKernel]:
    """The kernels that calls ask for."""
    seen: set[TemplateKernel] = set()
    every = [*common_features(DIMS, exhaustive, backward=True), *wide_features(WIDE_DIMS, exhaustive)]
    for features in every:
        features = features.without_sinks()
        able = features.dim % 64 == 0 and features.dim_v % 64 == 0 and not features.rows.clipped
        for one_box in (True, False) if able and exhaustive else (able,):
            made = [dq_kernel(features, choose_tile(features), one_box), dkv_kernel(features, one_box)]
            if exhaustive or features.scores.mask is causal:
                made.append(dkv_kernel(features, one_box, parts=True))
            made += [delta_kernel(features, Wanted(sinks=sinks), ARCH, STAT_BLOCK, 0) for sinks in (False, True)]
            for kernel in made:
                if kernel not in seen:
                    seen.add(kernel)
                    yield kernel
