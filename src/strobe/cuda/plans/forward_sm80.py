"""The forward kernel for Ampere and later (mma.sync, ldmatrix, cp.async): tiles, limits, plan, variants.

The tiles for Hopper were swept on an H200 (docs/design/hopper-forward.md) but for head dim 192. The others are chosen for
shared memory and registers, and nobody has timed them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from strobe.cuda.parts.blocks import QUERY_TILE_FIELDS, query_tiles
from strobe.cuda.parts.features import Features, common_features
from strobe.cuda.parts.kernel import TemplateKernel
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
    pack_group,
    padded_dims,
    shape_limits,
)
from strobe.cuda.parts.rows import Rows, stride_fields, stride_values
from strobe.cuda.parts.scores import Scores
from strobe.cuda.parts.shared_memory import Region, SharedMemory, tile_bytes
from strobe.problem import Problem, Strides

DIMS: list[Dims] = [(d, d) for d in range(32, MAX_DIM + 1, 32)] + [(192, 128)]


@functools.cache
def _params(output: Output, scores: tuple[Field, ...]) -> Struct:
    return params(
        [*(Field(t, "const u16*") for t in ("q", "k", "v")), Field("sinks", "const float*"), Field("seed", "u64")],
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
        """Whether registers are so scarce that the row statistics live in shared memory."""
        return self.block_m // self.warps > 16 or self.blocks_per_sm > 2

    def memory(self, dim: int, dim_v: int, positions: bool = False) -> SharedMemory:
        statistics = self.block_m // 16 * 32 * 16 if self.state_in_smem else 0
        return SharedMemory(
            [
                Region("q", tile_bytes(self.block_m, max(dim, dim_v))),  # later O
                Region("k", tile_bytes(self.block_n, dim), self.stages),
                Region("v", tile_bytes(self.block_n, dim_v), self.stages),
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
SMEM_BYTES = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}  # of one block


def generation(arch: str) -> str:
    """The oldest architecture with the same tiles: consumer Ampere, Ada and consumer Blackwell have little shared
    memory."""
    number = int("".join(c for c in arch if c.isdigit()))
    if number in (86, 89) or number >= 120:
        return "sm_86"
    return "sm_80" if number < 90 else "sm_90" if number < 100 else "sm_100"


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


def limits(problem: Problem) -> str | None:
    if problem.gradients:
        return "no backward kernel"
    reason = shape_limits(problem) or Scores.limits(problem)
    if problem.k.pages is not None:
        return reason or Rows.limits_of_copies(problem) or "paged keys"
    return reason


def kernel(features: Features, tile: Tile, arch: str, exact_dims: bool) -> TemplateKernel:
    """`exact_dims`: the head dims are not rounded up."""
    memory = tile.memory(features.dim, features.dim_v, features.rows.positions)
    config = {**features.config(), **tile.config(), "kThreads": 32 * tile.warps, "kExactDims": exact_dims}
    return TemplateKernel(
        name=f"forward_sm80[{features.name} {tile}{'' if exact_dims else ' padded'}]",
        arch=arch,
        params=_params(features.output, features.scores.fields()),
        threads=32 * tile.warps,
        smem=memory.size,
        header="forward_sm80",
        template="forward_sm80",
        label=features.label(),
        element=features.element,
        config=tuple(config.items()),
        memory=memory,
        types=features.types(),
        blocks_per_sm=tile.blocks_per_sm,
        facts={**features.facts(), "tile": str(tile), "exact_dims": exact_dims},
    )


def plan(problem: Problem, out_strides: Strides, machine: Machine, tile: Tile | None = None) -> Plan:
    problem, out_strides = pack_group(problem, out_strides)
    dims = padded_dims(DIMS, problem.dim, problem.dim_v)
    arch = machine.arch.rstrip("af")
    features = Features.of(problem, dims)
    tile = tile or choose_tile(features, arch, machine)
    spec = kernel(features, tile, arch, dims == (problem.dim, problem.dim_v))
    schedule = query_tiles(problem, tile.block_m, machine.l2_bytes)
    values = {
        **features.rows.values(problem, tma=False),
        **Scores.values(problem),
        **schedule,
        **features.output.values(problem),
        **stride_values(dict(zip("qkvo", (*problem.strides, out_strides), strict=True))),
    }
    details = {
        "kernel": spec.name,
        "arch": spec.arch,
        "tile": f"{tile.block_m} queries x {tile.block_n} keys",
        "threads": spec.threads,
        "blocks": schedule["tiles"],
        "shared memory": f"{spec.smem} bytes",
    }
    return Plan((Launch(spec, schedule["tiles"], values),), details=details)


def variants(arch: str, *, exhaustive: bool = False) -> Iterator[TemplateKernel]:
    """The kernels that calls ask for; head dims that are rounded up have kernels of their own."""
    for features in common_features(DIMS, exhaustive):
        tile = choose_tile(features, arch)
        for exact in (True, False) if exhaustive or not features.rows.varlen else (True,):
            yield kernel(features, tile, arch, exact)
