"""The forward kernel for Ampere and later where queries are few or keys lie in pages: tiles, limits, plan, variants.

Keys are split among blocks, the heads of a group are rows of one tile, and warps share keys only where rows are many. Nobody
has swept the tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from strobe.backends.backend import Capabilities
from strobe.cuda.parts.architecture import AMPERE, SMEM_BYTES, generation
from strobe.cuda.parts.blocks import QUERY_TILE_FIELDS, may_split, query_tiles, splits_of_tiles
from strobe.cuda.parts.element import BF16, CONST_TENSOR, Element
from strobe.cuda.parts.features import Features, common_features
from strobe.cuda.parts.kernel import TemplateKernel, flags
from strobe.cuda.parts.output import Output
from strobe.cuda.parts.params import Field, Struct, params
from strobe.cuda.parts.plan import (
    ANY_MACHINE,
    Launch,
    Machine,
    Plan,
    first_without_spills,
    forward_details,
    padded_dims,
)
from strobe.cuda.parts.rows import Rows, group_as_rows, stride_fields
from strobe.cuda.parts.shared_memory import Region, SharedMemory
from strobe.cuda.plans import plan_work
from strobe.cuda.plans.forward_sm80 import DIMS
from strobe.cuda.plans.plan_work import Work
from strobe.cuda.plans.planner import Planner
from strobe.problem import Problem, Strides
from strobe.variants.mask import used_keys

WARPS = 4
MOST_QUERIES = 64  # of a sequence whose keys are not in pages; `forward_sm80` has tiles for more
LEAST_KEYS = 256  # fewer are read before a split has begun


@functools.cache
def _params(output: Output, scores: tuple[Field, ...], paged: bool) -> Struct:
    return params(
        [*(Field(t, CONST_TENSOR) for t in ("q", "k", "v")), Field("sinks", "const float*"), Field("seed", "u64")],
        stride_fields("q", "k", "v"),
        Rows.fields(tma=False, paged=paged),
        plan_work.fields(output.invariant) if paged else (),
        scores,
        QUERY_TILE_FIELDS,
        output.fields(),
        Output.SPLIT_FIELDS,
    )


@dataclass(frozen=True)
class Tile:
    block_m: int  # rows: heads of a group for some queries
    team: int  # warps that share keys, each with its part of the rows
    keys: int  # that a warp copies at a time
    stages: int  # buffers for K and for V of each team
    blocks_per_sm: int = 2
    warps: int = WARPS

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} t{self.team} s{self.stages} b{self.blocks_per_sm}"

    @property
    def teams(self) -> int:
        return self.warps // self.team

    @property
    def block_n(self) -> int:
        return self.warps * self.keys

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def memory(self, dim: int, dim_v: int, element: Element = BF16) -> SharedMemory:
        keys, buffers = self.keys * self.team, self.stages * self.teams
        regions = [
            Region("q", element.tile_bytes(self.block_m, dim)),
            Region("k", element.tile_bytes(keys, dim), buffers),
            Region("v", element.tile_bytes(keys, dim_v), buffers),
        ]
        copied = sum(r.bytes * r.buffers for r in regions)
        parts = self.teams * self.block_m * 4 * (dim_v + 8)  # of O, m and l, which later lie over those
        return SharedMemory(
            [*regions, Region("parts", max(0, parts - copied)), Region("missing", 4 * self.team, max(buffers, 4))]
        )

    def smem(self, dim: int, dim_v: int) -> int:
        return self.memory(dim, dim_v).size

    def config(self) -> dict[str, int | bool]:
        return {
            "kBlockM": self.block_m,
            "kBlockN": self.block_n,
            "kWarps": self.warps,
            "kTeam": self.team,
            "kStages": self.stages,
            "kConsumers": 1,  # of a slot
            "kThreads": self.threads,
        }


MOST_STAGES = 4
RESERVED = 1 << 10  # bytes of shared memory that every block of an SM takes beside its own


def table_tile(rows: int, dim: int, dim_v: int, arch: str, *, invariant: bool = False) -> Tile:
    """Return the tile for so many rows that see the same keys. It has two blocks of an SM if their buffers fit, else
    one, with as many stages as fit; with little shared memory and wide rows a block has two warps. Invariant calls have
    one tile for all rows: which warp sums up which keys must not depend on them. The tile for 16 rows on Hopper was
    timed on an H200 at head dim 128; the others are computed."""
    room = SMEM_BYTES[generation(arch)]
    most = 32 if dim_v <= 192 else 16  # rows of which one warp has O in its registers
    few = rows <= most and not invariant
    block_m = (16 if rows <= 16 else 32) if few else 64
    keys = 16 if few or dim > 64 else 32
    if few and block_m == 16 and 64 < max(dim, dim_v) <= 128 and generation(arch) == "sm_90":
        return Tile(16, 1, 32, 2, 1)
    for blocks in (2, 1):
        for stages in range(MOST_STAGES, 1, -1):
            tile = Tile(block_m, 1 if few else WARPS, keys, stages, blocks)
            if tile.smem(dim, dim_v) + RESERVED <= (room + RESERVED) // blocks:
                return tile
    return Tile(block_m if few else 32, 1 if few else 2, 16, 2, 1, warps=2)


def choose_tile(features: Features, rows: int, arch: str, machine: Machine = ANY_MACHINE) -> Tile:
    """A score function that no table knows gets the first tile whose kernel does not spill."""
    tile = table_tile(rows, features.dim, features.dim_v, arch, invariant=features.output.invariant)
    if not features.scores.is_unknown or tile.blocks_per_sm == 1:
        return tile
    tiles = [tile, replace(tile, blocks_per_sm=1)]
    return first_without_spills(
        tiles, lambda t: kernel(features, t, arch, split=True, pack=1, exact_dims=False), machine
    )


def kernel(features: Features, tile: Tile, arch: str, *, split: bool, pack: int, exact_dims: bool) -> TemplateKernel:
    """`pack`: heads of a group that are rows of one tile. `exact_dims`: the head dims are not rounded up."""
    features = replace(features, output=replace(features.output, split=split))
    memory = tile.memory(features.dim, features.dim_v, features.element)
    config = {
        **features.config(pack),
        **tile.config(),
        "kPartialFloats": partial_floats(tile, features.dim_v),
        "kExactDims": exact_dims,
    }
    packed = f" pack_gqa{pack}" if pack > 1 else ""
    return features.kernel(
        "decode_sm80",
        tile,
        f"{flags(split=split)}{packed}{flags(padded=not exact_dims)}",
        arch=arch,
        params=_params(replace(features.output, split=False), features.scores.fields(), bool(features.rows.page)),
        threads=tile.threads,
        config=config,
        memory=memory,
        blocks_per_sm=tile.blocks_per_sm,
        label={"pack_gqa": pack > 1},
        facts={"split": split, "pack_gqa": pack, "exact_dims": exact_dims},
    )


def partial_floats(tile: Tile, dim_v: int) -> int:
    """Return the floats that one split of a tile leaves in memory: O, m and l of every row."""
    return tile.block_m * (dim_v + 2)


def plan(problem: Problem, strides: Mapping[str, Strides], machine: Machine, tile: Tile | None = None) -> Plan:
    pack = problem.group  # rows are copied one by one, so any group fits
    packed = group_as_rows(problem, pack) if pack > 1 else problem
    dims, arch = padded_dims(DIMS, problem.dim, problem.dim_v), machine.arch.rstrip("af")
    features = Features.of(packed, dims)
    features = replace(features, rows=features.rows.gathered())
    tile = tile or choose_tile(features, packed.len_q, arch, machine)
    blocks = machine.sms * tile.blocks_per_sm  # at once
    splits = splits_of_tiles(packed, tile.block_m, blocks, tile.block_n)
    work = Work.of(packed, tile.block_m, tile.block_n, pack, blocks) if features.rows.page else None
    exact = dims == (problem.dim, problem.dim_v)
    spec = kernel(features, tile, arch, split=splits > 1 or work is not None, pack=pack, exact_dims=exact)
    schedule = query_tiles(packed, tile.block_m, machine.l2_bytes, splits)
    by_name = dict(zip("qkvo", (*packed.strides, strides["o"]), strict=True))
    values = features.values(packed, by_name, schedule, tma=False, pack=pack)
    grid = schedule["tiles"] if work is None else work.pieces
    unusual = {"packed GQA": pack, "splits of the keys": splits}
    details = forward_details(spec, tile.block_m, tile.block_n, grid)
    details |= {name: number for name, number in unusual.items() if number != 1}
    if work is not None:
        launch = Launch(spec, grid, values | work.values())
        return Plan((work.launch(features, arch), launch), work.workspace(features.dim_v), details)
    partial = 4 * schedule["tiles"] * partial_floats(tile, features.dim_v)
    return Plan((Launch(spec, grid, values),), {"partial": partial} if splits > 1 else {}, details)


def variants(arch: str, *, exhaustive: bool = False) -> Iterator[TemplateKernel]:
    """The kernels that calls ask for: a few dense queries of keys in one piece and in pages, packed ones of pages. Groups of
    four heads stand for all."""
    for features in common_features(DIMS, exhaustive):
        rows, scores = features.rows, features.scores
        if scores.dropout:
            continue
        queries = "varlen" if rows.varlen else "dense"
        in_pages = replace(scores, mask=scores.mask & used_keys)
        paged = replace(features, rows=Rows(queries, "paged", True, 1), scores=in_pages)
        kinds = [features] if rows.positions else [features, paged] if exhaustive or not rows.varlen else [paged]
        for kind in kinds:
            sizes = (16, 32, 64) if exhaustive else (64,) if kind.rows.queries == "varlen" else (16,)
            for size in sizes:
                yield kernel(kind, choose_tile(kind, size, arch), arch, split=True, pack=4, exact_dims=True)


def _limits(problem: Problem) -> str | None:
    if problem.dropout:
        return "dropout where queries are few"
    if problem.k.pages is None and problem.len_q > MOST_QUERIES:
        return f"{problem.len_q} queries; this kernel takes {MOST_QUERIES} where keys are not in pages"
    if problem.k.pages is None and problem.len_k < LEAST_KEYS:
        return f"{problem.len_k} keys; this kernel takes {LEAST_KEYS} or more"
    if not may_split(problem):
        return "a state that is merged and rounded"
    return Rows.limits_of_copies(problem)


PLANNER = Planner(
    name="decode_sm80",
    architecture=AMPERE,
    dims=DIMS,
    can=Capabilities(pages=True, invariant=True, merges=True),
    further_limits=_limits,
    plan=plan,
    variants=variants,
)
