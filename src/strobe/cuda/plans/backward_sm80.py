"""The backward kernels for Ampere and later (mma.sync, ldmatrix, cp.async): tiles, plan, variants.

Three launches: `delta` prepares the statistics of rows and zeros for the sums of dQ, `backward_sm80` computes, and
`convert_dq_sm80` rounds the sums.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from strobe.backends.backend import Capabilities
from strobe.cuda.parts import tuned
from strobe.cuda.parts.architecture import AMPERE, SMEM_BYTES, generation
from strobe.cuda.parts.blocks import KEY_TILE_FIELDS, key_tiles
from strobe.cuda.parts.element import BF16, CONST_TENSOR, TENSOR, Element
from strobe.cuda.parts.features import Features, common_features
from strobe.cuda.parts.kernel import TemplateKernel
from strobe.cuda.parts.params import Field, Struct, params
from strobe.cuda.parts.plan import ANY_MACHINE, Launch, Machine, Plan, first_without_spills, padded_dims
from strobe.cuda.parts.rows import Rows, stride_fields, stride_values
from strobe.cuda.parts.shared_memory import Region, SharedMemory
from strobe.cuda.plans.backward_plan import (
    CONVERT_DQ,
    KINDS,
    OTHER_REGISTERS,
    SCALE_GRAD,
    STATISTICS,
    SUMS_OF_DQ,
    Statistics,
    Wanted,
    convert_values,
    delta_kernel,
    delta_launch,
    gradients_of_keys,
    in_parts,
    side_kernel,
    tuned_name,
    values_of,
)
from strobe.cuda.plans.forward_sm80 import DIMS
from strobe.cuda.plans.planner import Planner, Tuning
from strobe.problem import Problem, Strides
from strobe.variants.mask import causal

__all__ = ["DIMS", "PLANNER", "Tile", "candidates", "choose_tile", "fits", "kernels", "plan", "variants"]


@functools.cache
def _params(scores: tuple[Field, ...]) -> Struct:
    return params(
        [Field(t, CONST_TENSOR) for t in ("q", "k", "v", "d_o")],
        stride_fields("q", "k", "v", "do"),
        gradients_of_keys(TENSOR),
        SUMS_OF_DQ,
        STATISTICS,
        Rows.fields(tma=False),
        [SCALE_GRAD, *scores],
        KEY_TILE_FIELDS,
    )


@dataclass(frozen=True)
class Tile:
    """The warps form a grid for each product. What is not said to be along its rows is along its columns."""

    block_m: int  # queries at a time
    block_n: int  # keys of a block
    warps: int
    warps_s: int  # along the queries of S and dP
    warps_kv: int  # along the keys of dK and dV
    warps_q: int  # along the queries of dQ
    stages_q: int = 2  # buffers of Q
    stages_do: int = 2  # of dO
    blocks_per_sm: int = 1  # what the register allocation aims at
    early: bool = False  # P of the next block is computed during the products of this one
    apart: bool = False  # products do not overlap, and dQ is computed in halves: fewer registers

    def __str__(self) -> str:
        grids = f"w{self.warps} {self.warps_s}/{self.warps_kv}/{self.warps_q}"
        flags = f"{' early' if self.early else ''}{' apart' if self.apart else ''}"
        return f"{self.block_m}x{self.block_n} {grids} s{self.stages_q}{self.stages_do} b{self.blocks_per_sm}{flags}"

    def memory(self, dim: int, dim_v: int, dropout: bool, element: Element = BF16) -> SharedMemory:
        row = 4 * self.block_m
        return SharedMemory(
            [
                Region("k", element.tile_bytes(self.block_n, dim)),  # later dK
                Region("v", element.tile_bytes(self.block_n, dim_v)),  # later dV
                Region("q", element.tile_bytes(self.block_m, dim), self.stages_q),
                Region("d_o", element.tile_bytes(self.block_m, dim_v), self.stages_do),
                Region("p", element.tile_bytes(self.block_m, self.block_n)),
                Region("ds", element.tile_bytes(self.block_m, self.block_n)),
                Region("lse", row, self.stages_q),
                Region("delta", row, self.stages_do),
                Region("dropout", row, self.stages_q if dropout else 0),
            ]
        )

    def smem(self, dim: int, dim_v: int, dropout: bool) -> int:
        return self.memory(dim, dim_v, dropout).size

    def config(self) -> dict[str, int | bool]:
        return {
            "kStatBlock": self.block_m,
            "kBlockM": self.block_m,
            "kBlockN": self.block_n,
            "kWarps": self.warps,
            "kThreads": 32 * self.warps,
            "kWarpsS": self.warps_s,
            "kWarpsKV": self.warps_kv,
            "kWarpsQ": self.warps_q,
            "kStagesQ": self.stages_q,
            "kStagesDo": self.stages_do,
            "kEarly": self.early,
            "kApart": self.apart,
        }


# Head dim (up to) -> tiles by generation, the chosen one first; the others are worth a measurement. Generations differ in
# shared memory.
_LARGE = {
    32: [Tile(128, 128, 8, 4, 4, 4)],
    64: [
        Tile(128, 128, 8, 4, 4, 4),
        Tile(128, 128, 8, 4, 4, 4, early=True),
        Tile(64, 128, 8, 2, 4, 2),
        Tile(64, 64, 4, 2, 2, 2, blocks_per_sm=2),
        Tile(128, 64, 4, 4, 2, 4, 2, 1, blocks_per_sm=2),
    ],
    96: [Tile(64, 128, 8, 2, 4, 4)],
    128: [
        Tile(64, 128, 8, 2, 4, 2),
        Tile(64, 128, 8, 2, 4, 2, early=True),
        Tile(64, 64, 4, 2, 2, 2, 2, 1, blocks_per_sm=2),
        Tile(64, 64, 4, 2, 2, 2, blocks_per_sm=2),
    ],
    160: [Tile(64, 64, 8, 4, 4, 4)],
    192: [Tile(64, 64, 8, 4, 2, 2), Tile(64, 96, 8, 4, 2, 2)],
    224: [Tile(64, 64, 8, 4, 4, 4)],
    256: [Tile(64, 64, 8, 4, 2, 2, apart=True), Tile(64, 64, 8, 4, 2, 2), Tile(32, 64, 8, 2, 2, 2)],
}
_TILES: dict[str, dict[int, list[Tile]]] = {
    "sm_80": {
        **_LARGE,
        64: _LARGE[64][:4],
        128: [*_LARGE[128][:2], Tile(64, 64, 4, 2, 2, 2, 1, 1, blocks_per_sm=2)],
        192: _LARGE[192][:1],
        224: [Tile(64, 64, 8, 4, 4, 4, 1, 1)],
        256: [Tile(64, 64, 8, 4, 2, 2, 1, 1, apart=True), Tile(32, 64, 8, 2, 2, 2)],
    },
    "sm_86": {
        32: [Tile(64, 128, 8, 2, 4, 4)],
        64: [Tile(64, 128, 8, 2, 4, 2)],
        96: [Tile(64, 64, 8, 4, 4, 4, 2, 1)],
        128: [Tile(64, 64, 8, 4, 2, 2, 2, 1)],
        160: [Tile(32, 32, 4, 2, 2, 2)],
        192: [Tile(32, 64, 8, 2, 2, 2, 2, 1)],
        256: [Tile(32, 32, 4, 2, 2, 2, 2, 1)],
    },
    "sm_90": {  # swept on an H200: 64, 128, 256
        **_LARGE,
        64: [_LARGE[64][4], *_LARGE[64][:4]],
        128: [_LARGE[128][2], *_LARGE[128][:2], _LARGE[128][3]],
        256: [Tile(64, 64, 8, 4, 2, 2, 2, 1), Tile(64, 64, 8, 2, 2, 2, 2, 1), *_LARGE[256]],
    },
    "sm_100": _LARGE,
}


# Scores that are a function take a few registers more than the largest tiles leave; for data center Blackwell, ptxas has
# none to spare for varlen and dropout either.
_SMALLER: dict[str, dict[int, Tile]] = {
    "sm_90": {64: Tile(64, 128, 8, 2, 4, 2), 128: Tile(32, 128, 8, 2, 4, 2), 256: Tile(32, 64, 8, 2, 2, 2)},
    "sm_100": {64: Tile(64, 128, 8, 2, 4, 2), 128: Tile(32, 128, 8, 2, 4, 2), 256: Tile(32, 64, 8, 2, 2, 2)},
}


def table(dim: int, dim_v: int, arch: str) -> list[Tile]:
    """Tiles for head dims that have a kernel; the first is the one that is used."""
    of = _TILES[generation(arch)]
    return of[min(limit for limit in of if limit >= max(dim, dim_v))]


def fits(tile: Tile, dim: int, dim_v: int, arch: str) -> bool:
    """Return whether each warp has whole 16 x 16 tiles of every product, shared memory suffices, also with dropout, and
    a thread's registers hold dK and dV, and either S and dP or dQ."""
    keys, rest, dims = (tile.warps // n for n in (tile.warps_s, tile.warps_kv, tile.warps_q))
    shares = [(tile.block_m, tile.warps_s), (tile.block_n, keys), (tile.block_n, tile.warps_kv), (dim, rest)]
    shares += [(dim_v, rest), (tile.block_m, tile.warps_q), (dim, 2 * dims if tile.apart else dims)]
    if any(size < 16 * warps or size % (16 * warps) for size, warps in shares) or (tile.early and tile.stages_q < 2):
        return False
    room, threads = SMEM_BYTES[generation(arch)], 32 * tile.warps
    each = (room + 1024) // tile.blocks_per_sm - 1024  # every block takes 1 KB more
    if tile.smem(dim, dim_v, dropout=True) > room or tile.smem(dim, dim_v, dropout=False) > each:
        return False
    scores, dq = tile.block_m * tile.block_n // threads, tile.block_m * dim // threads
    beside = max(2 * scores + (scores // 2 if tile.early else 0), dq // 2 if tile.apart else dq)
    accumulators = tile.block_n * (dim + dim_v) // threads + beside
    return accumulators + OTHER_REGISTERS <= min(255, 65536 // (threads * tile.blocks_per_sm))


def candidates(features: Features, arch: str) -> list[Tile]:
    """The tile that is used, those of the table, and neighbours that fit: sizes, warps, buffers and switches changed one
    at a time."""
    dims = features.dim, features.dim_v
    best = choose_tile(features, arch)
    near = [*table(*dims, arch), *_SMALLER.get(generation(arch), {}).values()]
    near += [replace(best, block_m=m) for m in (32, 64, 128)] + [replace(best, block_n=n) for n in (32, 64, 96, 128)]
    near += [replace(best, warps_s=w) for w in (1, 2, 4, 8)] + [replace(best, warps_kv=w) for w in (1, 2, 4, 8)]
    near += [replace(best, warps_q=w) for w in (1, 2, 4, 8)]
    near += [replace(best, stages_q=q, stages_do=do) for q in (1, 2) for do in (1, 2)]
    near += [replace(best, blocks_per_sm=3 - best.blocks_per_sm), replace(best, early=not best.early)]
    near += [replace(best, apart=not best.apart)]
    divisible = [t for t in near if not t.warps % t.warps_s and not t.warps % t.warps_kv and not t.warps % t.warps_q]
    return list(dict.fromkeys([best, *(t for t in divisible if fits(t, *dims, arch))]))


def choose_tile(features: Features, arch: str, machine: Machine = ANY_MACHINE) -> Tile:
    """A score function that no table knows gets the first tile whose kernel does not spill."""
    name, dims, scores = generation(arch), (features.dim, features.dim_v), features.scores
    needs_room = scores.is_function or (name == "sm_100" and (features.rows.varlen or scores.dropout))
    smaller = _SMALLER.get(name, {}).get(max(dims)) if needs_room else None
    if not needs_room or scores.is_function:
        best = tuned.tile(tuned_name(features, AMPERE, arch), Tile, lambda tile: fits(tile, *dims, arch))
    else:  # tuned tiles leave no registers for that
        best = None
    tile = best or smaller or table(*dims, arch)[0]
    if not scores.is_unknown:
        return tile
    # The tiles of sm_90 in _SMALLER are the smallest; larger ones have no room for an unknown score either.
    small = _SMALLER["sm_90"][min(dim for dim in _SMALLER["sm_90"] if dim >= max(dims))]
    smaller_tiles = [small, *(replace(tile, block_m=m, block_n=n) for m, n in ((32, tile.block_n), (32, 32)))]
    tiles = [tile, *(t for t in smaller_tiles if fits(t, *dims, arch))]
    return first_without_spills(tiles, lambda t: kernels(features, t, Wanted(), arch, False)[1], machine)


def has_dependent_launch(arch: str) -> bool:
    """Return whether it is Hopper or later, which also add four numbers at once."""
    return int(arch.removeprefix("sm_")) >= 90


def kernels(
    features: Features, tile: Tile, wanted: Wanted, arch: str, exact_dims: bool, parts: bool = False
) -> tuple[TemplateKernel, TemplateKernel, TemplateKernel]:
    """(delta, main, convert). The sinks are in the LSE: only `delta` knows them, if they have a gradient. `exact_dims`:
    the head dims are not rounded up. `parts`: groups of query heads are divided."""
    features = features.without_sinks()
    memory = tile.memory(features.dim, features.dim_v, features.scores.dropout, features.element)
    turns, partial = wanted.turns, features.output.partial
    vector = has_dependent_launch(arch)
    config = {
        **features.config(),
        "kPartialOut": partial or parts,
        **tile.config(),
        "kExactDims": exact_dims,
        "kVector": vector,
        "kDeterministic": turns,
        "kLastFirst": turns,
        "kWantQ": wanted.dq,
        "kWantKV": wanted.dkv,
        "kGroupParts": parts,
    }
    main = features.kernel(
        "backward_sm80",
        tile,
        wanted.flags(parts=parts, padded=not exact_dims),
        arch=arch,
        params=_params(features.scores.fields()),
        threads=32 * tile.warps,
        config=config,
        memory=memory,
        blocks_per_sm=tile.blocks_per_sm,
        label={"deterministic": turns},
        facts={**vars(wanted), "exact_dims": exact_dims},
    )
    zeros = tile.block_m * features.dim if wanted.dq else 0
    delta = delta_kernel(features, wanted, arch, tile.block_m, zeros, turns=turns)
    smem = tile.block_m * (features.element.bytes * features.dim + 16)
    of_sums: dict[str, int | bool | str] = {
        "kStatBlock": tile.block_m,
        "kDim": features.dim,
        "kWarps": tile.warps,
        "kWarpsQ": tile.warps_q,
        "kPartialOut": partial,
        "kVector": vector,
    }
    return delta, main, side_kernel("convert_dq_sm80", features, arch, CONVERT_DQ, of_sums, smem)


def plan(problem: Problem, strides: Mapping[str, Strides], machine: Machine, tile: Tile | None = None) -> Plan:
    dims = padded_dims(DIMS, problem.dim, problem.dim_v)
    arch = machine.arch.rstrip("af")
    features, wanted = Features.of(problem, dims), Wanted.of(problem)
    tile = tile or choose_tile(features, arch, machine)
    exact, parts = dims == (problem.dim, problem.dim_v), in_parts(problem)
    delta, main, convert = kernels(features, tile, wanted, arch, exact, parts=problem.group_parts > 1)
    statistics = Statistics.of(problem, tile.block_m)
    turns = wanted.turns
    q, k, v = problem.strides
    schedule = key_tiles(parts, tile.block_n, machine.sms, alone=turns)
    values = values_of(problem, parts, features, statistics, strides, ("dk", "dv"), schedule, tma=False)
    values |= stride_values({"q": q, "k": k, "v": v, "do": strides["d_o"]})
    grid, overlaps = schedule["key_blocks"] * problem.batch * parts.heads_k, has_dependent_launch(arch)
    launches = [
        delta_launch(problem, delta, statistics, strides),
        Launch(main, grid, values, overlaps=overlaps, together=int(turns)),  # each waits for those before it
    ]
    workspace = dict(statistics.workspace)
    if wanted.dq:
        rounding = convert_values(problem, statistics, strides)
        launches.append(Launch(convert, launches[0].grid, rounding, overlaps=overlaps))
        workspace["dq_sum"] = statistics.workspace["delta"] * dims[0]
    if turns:
        workspace["turns"] = 2 * statistics.workspace["delta"] // tile.block_m
    details = {"backward kernel": main.name, "backward tile": f"{tile.block_m} queries x {tile.block_n} keys"}
    return Plan(tuple(launches), workspace, {**details, "backward blocks": grid})


def variants(arch: str, *, exhaustive: bool = False) -> Iterator[TemplateKernel]:
    """The kernels that calls ask for; head dims that are rounded up have kernels of their own."""
    every = [Wanted(), Wanted(deterministic=True)]
    if exhaustive:
        every += [Wanted(dkv=False), Wanted(dq=False), Wanted(sinks=True)]
    for features in common_features(DIMS, exhaustive, backward=True):
        tile = choose_tile(features, arch)
        for wanted in every:
            special = features.rows.varlen or features.scores.dropout or wanted.deterministic
            exacts = (True, False) if exhaustive or not special else (True,)
            parts = (False, True) if exhaustive or (features.scores.mask is causal and not special) else (False,)
            for exact, part in itertools.product(exacts, parts):
                yield from kernels(features, tile, wanted, arch, exact, part)


PLANNER = Planner(
    name="backward_sm80",
    architecture=AMPERE,
    gradients=True,
    dims=DIMS,
    can=Capabilities(captured_gradients=True),
    plan=plan,
    variants=variants,
    tuning=Tuning(KINDS, DIMS, candidates),
)
