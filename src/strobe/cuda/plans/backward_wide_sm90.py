"""The backward kernels for Hopper, head dims above 128, up to 512: tiles, plan, variants.

Three launches: `delta` prepares the statistics of rows, `dq_sm90` and `dkv_sm90` compute S and P each for themselves. That
is seven products instead of five, but all accumulators stay in registers, nothing is summed up in memory, and the results
are always deterministic.

Above head dim 256 registers hold half of the columns of a gradient. The two consumers of `dq_sm90` have a half each, and
`dkv_sm90` has a block for each half. S and dP are computed for both: eleven products instead of five.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from strobe.backends.backend import Capabilities
from strobe.cuda.parts import tuned
from strobe.cuda.parts.architecture import HOPPER
from strobe.cuda.parts.blocks import KEY_TILE_FIELDS, QUERY_TILE_FIELDS
from strobe.cuda.parts.element import BF16, Element
from strobe.cuda.parts.features import Features, common_features, wide_features
from strobe.cuda.parts.kernel import TemplateKernel, flags
from strobe.cuda.parts.params import Field, Struct, params
from strobe.cuda.parts.plan import (
    ANY_MACHINE,
    Dims,
    Machine,
    Plan,
    first_without_spills,
    padded_dims,
)
from strobe.cuda.parts.rows import Rows, stride_fields
from strobe.cuda.parts.shared_memory import Region, SharedMemory, ring_bytes
from strobe.cuda.parts.tensor_maps import tile_map, tma_limits
from strobe.cuda.plans import backward_sm90
from strobe.cuda.plans.backward_plan import (
    KINDS,
    OTHER_REGISTERS,
    REGISTERS,
    SCALE_GRAD,
    STATISTICS,
    Half,
    Statistics,
    Wanted,
    delta_kernel,
    delta_launch,
    dkv_then_dq,
    gradients_of_keys,
    tuned_name,
    without_bias_gradient,
)
from strobe.cuda.plans.backward_sm90 import backward_maps
from strobe.cuda.plans.forward_sm90 import ARCH, SMEM_BYTES
from strobe.cuda.plans.planner import Planner, Tuning
from strobe.problem import Problem, Strides
from strobe.variants.mask import causal

__all__ = ["DIMS", "PLANNER", "WIDE_DIMS", "DkvTile", "DqTile", "candidates", "choose_tile", "fits", "plan", "variants"]

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
        """Return how many parts the columns of dQ have."""
        return 128 // self.block_m

    def config(self) -> dict[str, int | bool | str]:
        return {
            "kBlockM": self.block_m,
            "kBlockN": self.block_n,
            "kStages": self.stages,
            "kStagesV": self.stages_v,
            "kColumnParts": self.parts,
        }

    def memory(self, dim: int, dim_v: int, element: Element = BF16) -> SharedMemory:
        return SharedMemory(
            [
                Region("q", element.tile_bytes(64, dim), self.block_m // 64),  # later dQ
                Region("d_o", element.tile_bytes(64, dim_v), self.block_m // 64),
                Region("k", element.tile_bytes(self.block_n, dim), self.stages),
                Region("v", element.tile_bytes(self.block_n, dim_v), self.stages_v),
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

    def memory(self, dim: int, dim_v: int, dropout: bool, element: Element = BF16) -> SharedMemory:
        row = 4 * self.block_m
        return SharedMemory(
            [
                Region("k", element.tile_bytes(64, dim)),  # later dK
                Region("v", element.tile_bytes(64, dim_v)),  # later dV
                Region("q", element.tile_bytes(self.block_m, dim), self.stages),
                Region("d_o", element.tile_bytes(self.block_m, dim_v), self.stages),
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
    """Return whether shared memory suffices, and the registers of a consumer hold dQ, S and dP."""
    possible = tile.block_n % 16 == 0 and dim // tile.parts // 2 + tile.block_n + OTHER_REGISTERS <= REGISTERS[1]
    return possible and tile.smem(dim, dim_v) <= SMEM_BYTES


def candidates(features: Features, arch: str = ARCH) -> list[DqTile]:
    """Tiles of `dq_sm90` that fit; the first is the one that is used. `dkv_sm90` has one."""
    every = itertools.product((32, 48, 64, 80, 96, 128), ((1, 1), (2, 1), (2, 2), (3, 2)))
    near = [tile for n, stages in every if fits(tile := DqTile(n, *stages), features.dim, features.dim_v)]
    return list(dict.fromkeys([choose_tile(features), *near]))


def choose_tile(features: Features, machine: Machine = ANY_MACHINE) -> DqTile:
    """A score function that no table knows gets the first tile whose kernel does not spill."""
    dims = features.dim, features.dim_v
    tile = tuned.tile(tuned_name(features, HOPPER, ARCH), DqTile, lambda tile: fits(tile, *dims)) or TILES[dims]
    if not features.scores.is_unknown:
        return tile
    tiles = [tile, *(replace(tile, block_n=n) for n in (48, 32) if n < tile.block_n)]
    return first_without_spills(tiles, lambda t: dq_kernel(features, t, one_box=False), machine)


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
    memory, k = tile.memory(dim, dim_v, features.element), features.element.mma_k
    return features.kernel(
        "dq_sm90",
        tile,
        flags(panels=not one_box),
        arch=ARCH,
        params=dq_params(features.scores.fields(), (*_INPUTS, "dq"), buffers=True),
        threads=384,
        config={**common_config(features, one_box), **tile.config()},
        memory=memory,
        products=sorted({(n, "ss_zero", dim // k), (n, "ss_zero", dim_v // k)}),
        accumulators=[(dim // tile.parts, n // k)],
        facts={"one_box": one_box},
    )


def dkv_kernel(features: Features, one_box: bool, parts: bool = False) -> TemplateKernel:
    dim, dim_v, tile = features.dim, features.dim_v, dkv_tile(features)
    m, k = tile.block_m, features.element.mma_k
    memory = tile.memory(dim, dim_v, features.scores.dropout, features.element)
    sizes = tile.config() | {"kGroupParts": parts, "kPartialOut": features.output.partial or parts}
    return features.kernel(
        "dkv_sm90",
        tile,
        flags(parts=parts, panels=not one_box),
        arch=ARCH,
        params=dkv_params(features.scores.fields(), (*_INPUTS, "dk", "dv"), buffers=True),
        threads=384,
        config={**common_config(features, one_box), **sizes},
        memory=memory,
        products=sorted({(m, "ss_zero", dim // k), (m, "ss_zero", dim_v // k)}),
        accumulators=sorted({(d // tile.parts, m // k) for d in (dim, dim_v)}, reverse=True),
        facts={"one_box": one_box},
    )


def plan(problem: Problem, strides: Mapping[str, Strides], machine: Machine, tile: DqTile | None = None) -> Plan:
    """`tile`: of the kernel of dQ."""
    dims = padded_dims([*DIMS, *WIDE_DIMS], problem.dim, problem.dim_v)
    features, wanted = Features.of(problem, dims).without_sinks(), Wanted.of(problem)
    one_box = features.one_box(problem)
    tile = tile or choose_tile(features, machine)
    statistics = Statistics.of(problem, STAT_BLOCK)
    dkv = dq = None
    if wanted.dkv:
        of_keys = dkv_tile(features)
        kernel = dkv_kernel(without_bias_gradient(features), one_box, problem.group_parts > 1)
        maps = backward_maps(problem, features, strides, one_box, of_keys.block_m, 64, True, of_keys.parts)
        dkv = Half(kernel, 64, maps, of_keys.parts)
    if wanted.dq:
        maps = backward_maps(problem, features, strides, one_box, 64, tile.block_n, False)
        if not problem.partial:
            rows, width = features.rows.queries, dims[0] // tile.parts
            maps["dq"] = tile_map(problem, rows, problem.q, problem.dim, strides["dq"], 64, width, one_box=one_box)
        dq = Half(dq_kernel(features, tile, one_box), tile.block_m, maps)
    delta = delta_kernel(features, wanted, ARCH, STAT_BLOCK, 0)
    launches, details = dkv_then_dq(problem, features, statistics, strides, machine, dkv, dq, tma=True)
    return Plan((delta_launch(problem, delta, statistics, strides), *launches), statistics.workspace, details)


def variants(arch: str = ARCH, *, exhaustive: bool = False) -> Iterator[TemplateKernel]:
    """The kernels that calls ask for."""
    every = [*common_features(DIMS, exhaustive, backward=True), *wide_features(WIDE_DIMS, exhaustive)]
    for features in (f.without_sinks() for f in every):
        whole = features.one_box()
        for one_box in (True, False) if whole and exhaustive else (whole,):
            yield dq_kernel(features, choose_tile(features), one_box)
            yield dkv_kernel(features, one_box)
            if exhaustive or features.scores.mask is causal:
                yield dkv_kernel(features, one_box, parts=True)
            for sinks in (False, True):
                yield delta_kernel(features, Wanted(sinks=sinks), ARCH, STAT_BLOCK, 0)


PLANNER = Planner(
    name="backward_wide_sm90",
    architecture=HOPPER,
    gradients=True,
    dims=[*DIMS, *WIDE_DIMS],
    scope=f"above head dim {backward_sm90.DIMS[-1][0]}",
    can=Capabilities(),
    further_limits=tma_limits,
    plan=plan,
    variants=variants,
    tuning=Tuning(KINDS, DIMS, candidates),
)
