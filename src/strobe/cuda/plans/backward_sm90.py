"""The backward kernels for Hopper, head dims up to 128: tiles, plan, variants.

Three launches: `delta` prepares the statistics of rows and zeros for the sums of dQ, `backward_sm90` computes, and
`convert_dq` rounds the sums. If key blocks take turns, the sums need no zeros and the last turn rounds: two launches.
`deterministic=True` asks for turns, and calls with few keys always use them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from strobe.backends.backend import Capabilities
from strobe.cuda.parts import tuned
from strobe.cuda.parts.architecture import HOPPER
from strobe.cuda.parts.blocks import KEY_TILE_FIELDS, key_tiles
from strobe.cuda.parts.element import BF16, Element
from strobe.cuda.parts.features import Features, common_features
from strobe.cuda.parts.kernel import TemplateKernel
from strobe.cuda.parts.params import Field, Struct, params
from strobe.cuda.parts.plan import ANY_MACHINE, Dims, Launch, Machine, Plan, first_without_spills, padded_dims
from strobe.cuda.parts.rows import Rows, stride_fields
from strobe.cuda.parts.shared_memory import Region, SharedMemory, ring_bytes
from strobe.cuda.parts.tensor_maps import tile_map, tma_limits
from strobe.cuda.plans import block_map
from strobe.cuda.plans.backward_plan import (
    CONVERT_DQ,
    KINDS,
    OTHER_REGISTERS,
    REGISTERS,
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
from strobe.cuda.plans.forward_sm90 import ARCH, SMEM_BYTES
from strobe.cuda.plans.planner import Planner, Tuning
from strobe.cuda.runtime.driver import TensorMapSpec
from strobe.problem import Problem, Rows as ProblemRows, Strides
from strobe.variants.mask import causal, full

__all__ = [
    "DIMS",
    "PLANNER",
    "TILES",
    "Tile",
    "candidates",
    "choose_tile",
    "fits",
    "kernels",
    "plan",
    "variants",
]

DIMS: list[Dims] = [(d, d) for d in (64, 96, 128)]
BLOCK_N = 128  # keys of a block, 64 a consumer
TURNS_UP_TO = 1024  # keys: with so few, waiting for turns takes less time than zeros and a third launch


@functools.cache
def _params(scores: tuple[Field, ...]) -> Struct:
    return params(
        SUMS_OF_DQ,
        [Field("dq", "float*"), *stride_fields("dq")],  # where it goes as fp32; else a tensor map says it
        gradients_of_keys("float*"),
        STATISTICS,
        Rows.fields(tma=True),
        [SCALE_GRAD, *scores],
        KEY_TILE_FIELDS,
        [Field(f"map_{t}", "TensorMap") for t in ("q", "k", "v", "d_o", "dk", "dv", "dq")],
    )


@dataclass(frozen=True)
class Tile:
    block_m: int  # queries at a time: 128 or 64, so that a consumer has 64 x 64 numbers of dQ

    def __str__(self) -> str:
        return f"{self.block_m}x{BLOCK_N}"

    @property
    def dim_q(self) -> int:
        """Columns of the sums of dQ."""
        return 64 if self.block_m == 128 else 128

    def memory(self, dim: int, dim_v: int, dropout: bool, pairs: bool = False, element: Element = BF16) -> SharedMemory:
        m, row = self.block_m, 4 * self.block_m
        return SharedMemory(
            [
                Region("k", element.tile_bytes(BLOCK_N, dim)),  # later dK
                Region("v", element.tile_bytes(BLOCK_N, dim_v)),  # later dV
                Region("q", element.tile_bytes(m, dim), 2),
                Region("d_o", element.tile_bytes(m, dim_v), 2),
                Region("ds", element.tile_bytes(BLOCK_N, m), 2),
                Region("dq", 64 * 64 * 4, 2),  # one a consumer
                Region("lse", row, 2),
                Region("delta", row, 2),
                Region("dropout", row, 2 if dropout else 0),
                Region("keys", 64 * 8, 2),  # which queries see each key of a consumer
                Region("pairs", m * 32, 8 if pairs else 0),  # of a bias: a warp's 16 keys
                Region("kv_barriers", 16),
                Region("ring_q", ring_bytes(2)),
                Region("ring_do", ring_bytes(2)),
                Region("ring_ds", ring_bytes(2)),
            ]
        )

    def smem(self, dim: int, dim_v: int, dropout: bool) -> int:
        return self.memory(dim, dim_v, dropout).size


TILES = {(64, 64): Tile(128), (96, 96): Tile(64), (128, 128): Tile(64)}


def fits(tile: Tile, dim: int, dim_v: int, pairs: bool = False) -> bool:
    """Return whether the sums of dQ have columns enough, shared memory suffices, also with dropout, and the registers
    of a consumer hold dK and dV, S and dP, and its part of dQ."""
    accumulators = (dim + dim_v) // 2 + tile.block_m + 32
    possible = tile.block_m in (64, 128) and dim <= tile.dim_q and accumulators + OTHER_REGISTERS <= REGISTERS[1]
    return possible and tile.memory(dim, dim_v, dropout=True, pairs=pairs).size <= SMEM_BYTES


def candidates(features: Features, arch: str = ARCH) -> list[Tile]:
    """Every tile that fits; the first is the one that is used."""
    dims = features.dim, features.dim_v
    return list(dict.fromkeys([choose_tile(features), *(t for t in (Tile(128), Tile(64)) if fits(t, *dims))]))


def choose_tile(features: Features, machine: Machine = ANY_MACHINE) -> Tile:
    """A score function that no table knows gets the first tile whose kernel does not spill."""
    dims = features.dim, features.dim_v
    tile = tuned.tile(tuned_name(features, HOPPER, ARCH), Tile, lambda tile: fits(tile, *dims)) or TILES[dims]
    if not features.scores.is_unknown:
        return tile
    if any(e.learnt for e in features.scores.entries):
        return Tile(64)  # sums take registers, and some kernels for 128 queries at a time spill
    tiles = [t for t in dict.fromkeys((tile, Tile(64))) if fits(t, *dims, features.scores.printed.staged)]
    one_box = features.one_box()
    return first_without_spills(tiles, lambda t: kernels(features, t, Wanted(), one_box)[1], machine)


def rotates(problem: Problem, sms: int) -> bool:
    """Return whether key blocks begin with different queries: for deterministic sums without a mask. They wait for one
    another, so all of a head must be on the GPU together."""
    together = problem.mask == full and not problem.varlen and -(-problem.len_k // BLOCK_N) <= sms
    return problem.deterministic and "q" in problem.gradients and together


def all_rows_see_keys(problem: Problem) -> bool:
    """Return whether every row sees a key, as far as is known without reading lengths and positions."""
    each_sees_one = problem.mask == full or (problem.mask == causal and problem.len_q <= problem.len_k)
    return each_sees_one and not problem.varlen and not problem.positions


def kernels(
    features: Features,
    tile: Tile,
    wanted: Wanted,
    one_box: bool,
    rotate: bool = False,
    clear_dq: bool = False,
    parts: bool = False,
) -> tuple[TemplateKernel, ...]:
    """(delta, main, convert, if sums of dQ are to be rounded). The sinks are in the LSE: only `delta` knows them, if they
    have a gradient. `clear_dq`: there may be rows that see no key, and no turn writes their dQ. `parts`: groups of query
    heads are divided."""
    features = features.without_sinks()
    memory = tile.memory(
        features.dim, features.dim_v, features.scores.dropout, features.scores.printed.staged, features.element
    )
    turns, partial = wanted.turns, features.output.partial
    config = {
        **features.config(),
        "kPartialOut": partial or parts,  # of dK and dV
        "kPartialDq": partial,
        "kStatBlock": tile.block_m,
        "kBlockM": tile.block_m,
        "kBlockN": BLOCK_N,
        "kThreads": 384,
        "kRegsProducer": REGISTERS[0],
        "kRegsConsumer": REGISTERS[1],
        "kOneBoxPerTile": one_box,
        "kTurns": turns,
        "kRotate": rotate,
        "kLastFirst": turns and not rotate,
        "kWantQ": wanted.dq,
        "kWantKV": wanted.dkv,
        "kGroupParts": parts,
    }
    dim, dim_v, m, k = features.dim, features.dim_v, tile.block_m, features.element.mma_k
    products = {(m, "ss_zero", dim // k), (m, "ss_zero", dim_v // k), (64, "ss_tt_zero", BLOCK_N // k)}
    products |= {(dim, "rs_t", m // k), (dim_v, "rs_t", m // k)}
    main = features.kernel(
        "backward_sm90",
        tile,
        wanted.flags(rotate=rotate, parts=parts, panels=not one_box),
        arch=ARCH,
        params=_params(features.scores.fields()),
        threads=384,
        config=config,
        memory=memory,
        products=sorted(products),
        label={"deterministic": turns},
        facts={**vars(wanted), "one_box": one_box, "rotate": rotate},
    )
    zeros = m * tile.dim_q if wanted.dq and not turns else 0
    delta = delta_kernel(features, wanted, ARCH, m, zeros, turns=turns, clear_dq=turns and clear_dq)
    if turns or not wanted.dq:
        return delta, main
    smem = m * (features.element.bytes * tile.dim_q + 16)
    of_sums: dict[str, int | bool | str] = {"kStatBlock": m, "kPartialOut": partial}
    return delta, main, side_kernel("convert_dq", features, ARCH, CONVERT_DQ, of_sums, smem)


def plan(problem: Problem, strides: Mapping[str, Strides], machine: Machine, tile: Tile | None = None) -> Plan:
    problem = replace(problem, deterministic=problem.deterministic or problem.len_k <= TURNS_UP_TO)
    dims = padded_dims(DIMS, problem.dim, problem.dim_v)
    wanted, rotate = Wanted.of(problem), rotates(problem, machine.sms)
    features = Features.of(problem, dims)
    tile = tile or choose_tile(features, machine)
    turns = wanted.turns
    sparse = not turns and problem.group_parts == 1 and block_map.pays(problem)
    features = replace(features, scores=replace(features.scores, sparse=sparse))
    one_box = features.one_box() and (problem.dim, problem.dim_v) == dims
    parts, clear_dq = in_parts(problem), not all_rows_see_keys(problem)
    delta, main, *convert = kernels(features, tile, wanted, one_box, rotate, clear_dq, parts=problem.group_parts > 1)
    statistics = Statistics.of(problem, tile.block_m)
    schedule = key_tiles(parts, BLOCK_N, machine.sms, alone=turns)
    values = values_of(problem, parts, features, statistics, strides, ("dk", "dv", "dq"), schedule, tma=True)
    maps = backward_maps(problem, features, strides, one_box, tile.block_m, BLOCK_N, wanted.dkv)
    if turns and not problem.partial:
        kind = features.rows.queries
        maps["dq"] = tile_map(problem, kind, problem.q, problem.dim, strides["dq"], 64, dims[0], one_box=False)
    grid = schedule["key_blocks"] * problem.batch * parts.heads_k
    together = 0 if not turns else schedule["key_blocks"] if rotate else 1
    launches = [
        delta_launch(problem, delta, statistics, strides),
        Launch(main, grid, values, maps, overlaps=True, together=together),
    ]
    workspace = dict(statistics.workspace)
    if convert:
        rounding = convert_values(problem, statistics, strides)
        launches.append(Launch(convert[0], launches[0].grid, rounding, overlaps=True))
    if sparse:
        bits = block_map.block_map(problem, features, ARCH, tile.block_m, BLOCK_N, transposed=True)
        launches[1] = replace(launches[1], values=values | bits.values)
        launches, workspace = [bits.launch, *launches], workspace | bits.workspace
    if wanted.dq:
        workspace["dq_sum"] = statistics.workspace["delta"] * tile.dim_q
    if turns:
        workspace["turns"] = 2 * statistics.workspace["delta"] // tile.block_m
    details = {"backward kernel": main.name, "backward tile": f"{tile.block_m} queries x {BLOCK_N} keys"}
    return Plan(tuple(launches), workspace, {**details, "backward blocks": grid})


def backward_maps(
    problem: Problem,
    features: Features,
    strides: Mapping[str, Strides],
    one_box: bool,
    rows: int,
    keys: int,
    dkv: bool,
    parts: int = 1,
) -> dict[str, TensorMapSpec]:
    """Tiles of `rows` queries and `keys` keys are loaded, 64 rows of a gradient are stored, its columns in `parts`."""
    of_q, of_k, (dim, dim_v) = features.rows.queries, features.rows.keys, (features.dim, features.dim_v)
    q, k, v = problem.strides

    def made(kind: str, of: ProblemRows, width: int, strides: Strides, box: int, columns: int) -> TensorMapSpec:
        return tile_map(problem, kind, of, width, strides, box, columns, one_box=one_box)

    maps = {
        "q": made(of_q, problem.q, problem.dim, q, rows, dim),
        "d_o": made(of_q, problem.q, problem.dim_v, strides["d_o"], rows, dim_v),
        "k": made(of_k, problem.k, problem.dim, k, keys, dim),
        "v": made(of_k, problem.k, problem.dim_v, v, keys, dim_v),
    }
    if dkv and not problem.partial and problem.group_parts == 1:
        stored = "varlen" if of_k == "varlen" else "dense"  # as `Stored` in rows.cuh
        maps["dk"] = made(stored, problem.k, problem.dim, strides["dk"], 64, dim // parts)
        maps["dv"] = made(stored, problem.k, problem.dim_v, strides["dv"], 64, dim_v // parts)
    return maps


def variants(arch: str = ARCH, *, exhaustive: bool = False) -> Iterator[TemplateKernel]:
    """The kernels that calls ask for."""
    every = [(Wanted(), False), (Wanted(deterministic=True), False), (Wanted(deterministic=True), True)]
    if exhaustive:
        every += [(Wanted(dkv=False), False), (Wanted(dq=False), False), (Wanted(sinks=True), False)]
    for features in common_features(DIMS, exhaustive, backward=True):
        tile, whole = choose_tile(features), features.one_box()
        mask = features.scores.mask
        for wanted, rotate in every:
            if rotate and (mask != full or features.rows.varlen):
                continue
            boxes = (True, False) if whole and exhaustive else (whole,)
            parts = (False, True) if exhaustive or (mask is causal and wanted == Wanted()) else (False,)
            for one_box, clear_dq, part in itertools.product(boxes, (False, True), parts):
                yield from kernels(features, tile, wanted, one_box, rotate, clear_dq, part)


PLANNER = Planner(
    name="backward_sm90",
    architecture=HOPPER,
    gradients=True,
    dims=DIMS,
    can=Capabilities(captured_gradients=True),
    further_limits=tma_limits,
    plan=plan,
    variants=variants,
    tuning=Tuning(KINDS, DIMS, candidates),
)
