"""The forward kernel for Ampere and later (mma.sync, ldmatrix, cp.async): tiles, plan, variants.

The tiles for Hopper were swept on an H200 (docs/design/hopper-forward.md) but for head dim 192. The others are chosen for
shared memory and registers, and nobody has timed them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from strobe.backends.backend import Capabilities
from strobe.cuda.parts.architecture import AMPERE, generation
from strobe.cuda.parts.blocks import QUERY_TILE_FIELDS, query_tiles
from strobe.cuda.parts.element import BF16, CONST_TENSOR, Element
from strobe.cuda.parts.features import Features, common_features
from strobe.cuda.parts.kernel import TemplateKernel, flags
from strobe.cuda.parts.output import Output
from strobe.cuda.parts.params import Field, Struct, params
from strobe.cuda.parts.plan import (
    ANY_MACHINE,
    MAX_DIM,
    Dims,
    Launch,
    Machine,
    Plan,
    first_without_spills,
    forward_details,
    pack_group,
    padded_dims,
)
from strobe.cuda.parts.rows import Rows, stride_fields
from strobe.cuda.parts.shared_memory import Region, SharedMemory
from strobe.cuda.plans.planner import Planner
from strobe.problem import Problem, Strides

DIMS: list[Dims] = [(d, d) for d in range(32, MAX_DIM + 1, 32)] + [(192, 128)]


@functools.cache
def _params(output: Output, scores: tuple[Field, ...]) -> Struct:
    return params(
        [*(Field(t, CONST_TENSOR) for t in ("q", "k", "v")), Field("sinks", "const float*"), Field("seed", "u64")],
        stride_fields("q", "k", "v"),
        Rows.fields(tma=False),
        scores,
        QUERY_TILE_FIELDS,
        output.fields(),
    )


@dataclass(frozen=True)
class Tile:
    block_m: int  # query rows
    block_n: int  # keys at a time
    warps: int
    stages: int  # buffers for K and for V
    blocks_per_sm: int  # what the register allocation aims at
    lazy_rescale: bool = False  # lazy rescaling: keep the old row maximum while the new one is little larger

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} w{self.warps} s{self.stages}{' lazy' if self.lazy_rescale else ''}"

    @property
    def state_in_smem(self) -> bool:
        """Return whether registers are so scarce that the row statistics live in shared memory."""
        return self.block_m // self.warps > 16 or self.blocks_per_sm > 2

    def memory(self, dim: int, dim_v: int, positions: bool = False, element: Element = BF16) -> SharedMemory:
        statistics = self.block_m // 16 * 32 * 16 if self.state_in_smem else 0
        return SharedMemory(
            [
                Region("q", element.tile_bytes(self.block_m, max(dim, dim_v))),  # later O
                Region("k", element.tile_bytes(self.block_n, dim), self.stages),
                Region("v", element.tile_bytes(self.block_n, dim_v), self.stages),
                Region("statistics", statistics),
                Region("place", (64 if positions else 48) if self.state_in_smem else 0),  # where the tile lies
            ]
        )

    def smem(self, dim: int, dim_v: int) -> int:
        return self.memory(dim, dim_v).size

    def config(self) -> dict[str, int | bool]:
        return {
            "kBlockM": self.block_m,
            "kBlockN": self.block_n,
            "kWarps": self.warps,
            "kStages": self.stages,
            "kStateInSmem": self.state_in_smem,
            "kLazyRescale": self.lazy_rescale,
        }


# Head dim (up to) -> tile, by generation: they differ in shared memory, and ptxas fills their registers differently.
_TILES = {
    "sm_80": {
        64: Tile(128, 128, 4, 1, 2),
        128: Tile(128, 64, 4, 1, 2, lazy_rescale=True),
        192: Tile(64, 64, 4, 1, 2),
        256: Tile(128, 64, 8, 1, 1),
    },
    "sm_86": {
        64: Tile(128, 64, 4, 1, 2),
        128: Tile(128, 64, 4, 1, 1, lazy_rescale=True),
        192: Tile(64, 64, 4, 1, 1),
        256: Tile(64, 64, 4, 1, 1),
    },
    "sm_90": {
        64: Tile(128, 128, 4, 1, 2),
        96: Tile(128, 64, 4, 2, 2, lazy_rescale=True),
        128: Tile(128, 64, 4, 2, 2, lazy_rescale=True),
        192: Tile(64, 64, 4, 1, 2),
        256: Tile(64, 64, 4, 1, 2),
    },
    "sm_100": {
        64: Tile(128, 128, 4, 1, 2),
        96: Tile(128, 64, 4, 2, 2, lazy_rescale=True),
        128: Tile(128, 48, 4, 1, 2, lazy_rescale=True),
        192: Tile(64, 64, 4, 1, 2),
        256: Tile(64, 64, 4, 1, 2),
    },
}


def table_tile(dim: int, dim_v: int, arch: str, scored: bool = False) -> Tile:
    """`scored`: something happens to the scores or weights, which takes a few registers more than the largest tiles leave."""
    table = _TILES[generation(arch)]
    tile = table[min(limit for limit in table if limit >= max(dim, dim_v))]
    if scored:
        tile = dataclasses.replace(tile, block_n=48 if 64 < max(dim, dim_v) <= 128 else tile.block_n // 2)
    return tile


def choose_tile(features: Features, arch: str, machine: Machine = ANY_MACHINE) -> Tile:
    """A score function that no table knows gets the first tile whose kernel does not spill."""
    scores = features.scores
    tile = table_tile(features.dim, features.dim_v, arch, scores.dropout or scores.is_function)
    if not scores.is_unknown:
        return tile
    smaller = [dataclasses.replace(tile, block_n=n) for n in (32, 16) if n < tile.block_n]
    return first_without_spills([tile, *smaller], lambda t: kernel(features, t, arch, exact_dims=False), machine)


def kernel(features: Features, tile: Tile, arch: str, exact_dims: bool) -> TemplateKernel:
    """`exact_dims`: the head dims are not rounded up."""
    memory = tile.memory(features.dim, features.dim_v, features.rows.positions, features.element)
    config = {**features.config(), **tile.config(), "kThreads": 32 * tile.warps, "kExactDims": exact_dims}
    return features.kernel(
        "forward_sm80",
        tile,
        flags(padded=not exact_dims),
        arch=arch,
        params=_params(features.output, features.scores.fields()),
        threads=32 * tile.warps,
        config=config,
        memory=memory,
        blocks_per_sm=tile.blocks_per_sm,
        facts={"exact_dims": exact_dims},
    )


def plan(problem: Problem, strides: Mapping[str, Strides], machine: Machine, tile: Tile | None = None) -> Plan:
    packed, out_strides = pack_group(problem, strides["o"])
    dims, arch = padded_dims(DIMS, problem.dim, problem.dim_v), machine.arch.rstrip("af")
    features = Features.of(packed, dims)
    tile = tile or choose_tile(features, arch, machine)
    spec = kernel(features, tile, arch, dims == (problem.dim, problem.dim_v))
    schedule = query_tiles(packed, tile.block_m, machine.l2_bytes)
    by_name = dict(zip("qkvo", (*packed.strides, out_strides), strict=True))
    launch = Launch(spec, schedule["tiles"], features.values(packed, by_name, schedule, tma=False))
    return Plan((launch,), details=forward_details(spec, tile.block_m, tile.block_n, launch.grid))


def variants(arch: str, *, exhaustive: bool = False) -> Iterator[TemplateKernel]:
    """The kernels that calls ask for; head dims that are rounded up have kernels of their own."""
    for features in common_features(DIMS, exhaustive):
        tile = choose_tile(features, arch)
        for exact in (True, False) if exhaustive or not features.rows.varlen else (True,):
            yield kernel(features, tile, arch, exact)


PLANNER = Planner(
    name="forward_sm80",
    architecture=AMPERE,
    dims=DIMS,
    can=Capabilities(merges=True),
    plan=plan,
    variants=variants,
)
