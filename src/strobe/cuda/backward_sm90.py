"""The backward kernels for Hopper, head dims up to 128: tiles, limits, plan, variants.

Three launches: `delta` prepares the statistics of rows and zeros for the sums of dQ, `backward_sm90` computes, and
`convert_dq` rounds the sums. Sums that are taken by turns need no zeros, and the last turn rounds: two launches. Turns
are what `deterministic=True` asks for, and few keys always take them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from strobe.cuda import tuned
from strobe.cuda.backward_plan import (
    BACKWARD_FIELDS,
    CONVERT_DQ,
    GRADIENTS_OF_KEYS,
    OTHER_REGISTERS,
    PART_FIELDS,
    REGISTERS,
    STATISTICS,
    TENSORS,
    Statistics,
    Wanted,
    backward_values,
    convert_flags,
    convert_values,
    delta_kernel,
    delta_launch,
    gradient_strides,
    in_parts,
    sections_of_keys,
    side_kernel,
    tuned_name,
)
from strobe.cuda.driver import TensorMapSpec
from strobe.cuda.features import Features, common_features
from strobe.cuda.forward_sm90 import ARCH, SMEM_BYTES, tma_limits
from strobe.cuda.kernel import TemplateKernel
from strobe.cuda.params import Field, Struct
from strobe.cuda.plan import Dims, Launch, Machine, Plan, padded_dims, stride_fields, tile_bytes
from strobe.cuda.tensor_maps import tile_map
from strobe.mask import causal, full
from strobe.problem import Problem, Strides

__all__ = [
    "DIMS",
    "TENSORS",
    "TILES",
    "Tile",
    "candidates",
    "choose_tile",
    "fits",
    "kernels",
    "limits",
    "plan",
    "variants",
]

DIMS: list[Dims] = [(d, d) for d in (64, 96, 128)]
BLOCK_N = 128  # keys of a block, 64 a consumer
TURNS_UP_TO = 1024  # keys: with so few, waiting for turns takes less time than zeros and a third launch

_MAIN = Struct(
    "Params",
    [
        Field("dq_sum", "float*"),
        Field("turns", "u32*"),  # for deterministic sums
        *GRADIENTS_OF_KEYS,
        *(Field(t, "const int*") for t in ("cu_q", "cu_k", "positions")),
        *STATISTICS,
        *(Field(n, "int") for n in ("key_blocks", "section", "sections")),
        *BACKWARD_FIELDS,
        *(Field(f"map_{t}", "TensorMap") for t in ("q", "d_o", "k", "v", "dk", "dv", "dq")),
        Field("dq", "float*"),
        *stride_fields("dq"),
        *PART_FIELDS,
    ],
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

    def smem(self, dim: int, dim_v: int, dropout: bool) -> int:
        keys = tile_bytes(BLOCK_N, dim) + tile_bytes(BLOCK_N, dim_v)
        queries = 2 * (tile_bytes(self.block_m, dim) + tile_bytes(self.block_m, dim_v))
        ds, dq = 2 * tile_bytes(BLOCK_N, self.block_m), 2 * 64 * 64 * 4
        statistics, barriers = 2 * 4 * self.block_m * (3 if dropout else 2) + 2 * 64 * 8, 16 + 3 * 32
        return keys + queries + ds + dq + statistics + barriers


TILES = {(64, 64): Tile(128), (96, 96): Tile(64), (128, 128): Tile(64)}


def fits(tile: Tile, dim: int, dim_v: int) -> bool:
    """The sums of dQ have columns enough, shared memory suffices, with dropout, too, and so do the registers of a
    consumer: dK and dV, S and dP, and its part of dQ."""
    accumulators = (dim + dim_v) // 2 + tile.block_m + 32
    able = tile.block_m in (64, 128) and dim <= tile.dim_q and accumulators + OTHER_REGISTERS <= REGISTERS[1]
    return able and tile.smem(dim, dim_v, dropout=True) <= SMEM_BYTES


def candidates(features: Features, arch: str = ARCH) -> list[Tile]:
    """Every tile that fits; the first is the one that is used."""
    dims = features.dim, features.dim_v
    return list(dict.fromkeys([choose_tile(features), *(t for t in (Tile(128), Tile(64)) if fits(t, *dims))]))


def choose_tile(features: Features) -> Tile:
    dims = features.dim, features.dim_v
    return tuned.tile(tuned_name(features, ARCH), Tile, lambda tile: fits(tile, *dims)) or TILES[dims]


def limits(problem: Problem) -> str | None:
    if not problem.gradients:
        return "no forward kernel"
    if max(problem.dim, problem.dim_v) > DIMS[-1][0]:
        return f"head dim {max(problem.dim, problem.dim_v)}; it takes head dims up to {DIMS[-1][0]}"
    return tma_limits(problem)


def rotates(problem: Problem, sms: int) -> bool:
    """Deterministic sums without a mask: blocks of keys begin with different queries and wait for one another, so all of
    a head must be on the GPU together."""
    together = problem.mask == full and not problem.varlen and -(-problem.len_k // BLOCK_N) <= sms
    return problem.deterministic and "q" in problem.gradients and together


def all_rows_see_keys(problem: Problem) -> bool:
    """As far as is known without reading lengths and positions."""
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
    features = replace(features, sinks=False)
    smem = tile.smem(features.dim, features.dim_v, features.dropout)
    turns = wanted.turns
    config = {
        **features.config(),
        "kPartialOut": features.partial_out or parts,  # of dK and dV
        "kPartialDq": features.partial_out,
        "kStatBlock": tile.block_m,
        "kBlockM": tile.block_m,
        "kBlockN": BLOCK_N,
        "kThreads": 384,
        "kSmem": smem,
        "kRegsProducer": REGISTERS[0],
        "kRegsConsumer": REGISTERS[1],
        "kPackGqa": 1,
        "kOneBoxPerTile": one_box,
        "kTurns": turns,
        "kRotate": rotate,
        "kLastFirst": turns and not rotate,
        "kWantQ": wanted.dq,
        "kWantKV": wanted.dkv,
        "kGroupParts": parts,
    }
    dim, dim_v, m = features.dim, features.dim_v, tile.block_m
    products = {(m, "ss_zero", dim // 16), (m, "ss_zero", dim_v // 16), (64, "ss_tt_zero", BLOCK_N // 16)}
    products |= {(dim, "rs_t", m // 16), (dim_v, "rs_t", m // 16)}
    only = {(True, False): " dq", (False, True): " dkv"}.get((wanted.dq, wanted.dkv), "")
    order = f"{' deterministic' if turns else ''}{' rotate' if rotate else ''}{' parts' if parts else ''}"
    main = TemplateKernel(
        name=f"backward_sm90[{features.name} {tile}{only}{order}{'' if one_box else ' panels'}]",
        arch=ARCH,
        params=_MAIN,
        threads=384,
        smem=smem,
        header="backward_sm90",
        template="backward_sm90",
        element=features.element,
        config=tuple(config.items()),
        types=features.types(),
        products=tuple(sorted(products)),
        facts={**features.facts(), **vars(wanted), "tile": str(tile), "one_box": one_box, "rotate": rotate},
    )
    zeros = m * tile.dim_q if wanted.dq and not turns else 0
    delta = delta_kernel(features, wanted, ARCH, m, zeros, turns=turns, clear_dq=turns and clear_dq)
    if turns or not wanted.dq:
        return delta, main
    smem = m * (2 * tile.dim_q + 16)
    shared: dict[str, int | bool] = {"kStatBlock": m, "kSmem": smem, **convert_flags(features)}
    return delta, main, side_kernel("convert_dq", "convert_dq", features, ARCH, CONVERT_DQ, shared, smem)


def plan(problem: Problem, strides: dict[str, Strides], machine: Machine, tile: Tile | None = None) -> Plan:
    """`strides`: of o, d_o and the gradients."""
    problem = replace(problem, deterministic=problem.deterministic or problem.len_k <= TURNS_UP_TO)
    dims = padded_dims(DIMS, problem.dim, problem.dim_v)
    features, wanted, rotate = Features.of(problem, dims), Wanted.of(problem), rotates(problem, machine.sms)
    tile = tile or choose_tile(features)
    one_box = problem.dim % 64 == 0 and problem.dim_v % 64 == 0 and not problem.varlen
    parts, clear_dq = in_parts(problem), not all_rows_see_keys(problem)
    delta, main, *convert = kernels(features, tile, wanted, one_box, rotate, clear_dq, parts=problem.group_parts > 1)
    statistics = Statistics.of(problem, tile.block_m)
    key_blocks = -(-problem.len_k // BLOCK_N)
    turns = wanted.turns
    values = {
        **backward_values(parts),
        **statistics.values(),
        **gradient_strides(strides, "dk", "dv", "dq"),
        "key_blocks": key_blocks,
        **sections_of_keys(parts, key_blocks, machine.sms, alone=turns),
        "group_parts": problem.group_parts,
    }
    maps = backward_maps(problem, strides, dims, one_box, tile.block_m, BLOCK_N, wanted.dkv)
    if turns and not problem.partial:
        of_q = (problem.heads, problem.len_q, problem.q.total)
        maps["dq"] = tile_map(problem, False, *of_q, problem.dim, strides["dq"], 64, dims[0])
    grid = key_blocks * problem.batch * parts.heads_k
    together = 0 if not turns else key_blocks if rotate else 1
    launches = [
        delta_launch(problem, delta, statistics, strides),
        Launch(main, grid, values, maps, overlaps=True, together=together),
    ]
    workspace = dict(statistics.workspace)
    if convert:
        rounding = convert_values(problem, statistics, strides)
        launches.append(Launch(convert[0], launches[0].grid, rounding, overlaps=True))
    if wanted.dq:
        workspace["dq_sum"] = statistics.workspace["delta"] * tile.dim_q
    if turns:
        workspace["turns"] = 2 * statistics.workspace["delta"] // tile.block_m
    details = {"backward kernel": main.name, "backward tile": f"{tile.block_m} queries x {BLOCK_N} keys"}
    return Plan(tuple(launches), TENSORS, workspace, {**details, "backward blocks": grid})


def backward_maps(
    problem: Problem, strides: dict[str, Strides], dims: Dims, one_box: bool, rows: int, keys: int, dkv: bool
) -> dict[str, TensorMapSpec]:
    """Tiles of `rows` queries and `keys` keys are loaded, 64 rows of a gradient are stored."""
    of_q = (problem.heads, problem.len_q, problem.q.total)
    of_k = (problem.heads_k, problem.len_k, problem.k.total)
    q, k, v = problem.strides
    maps = {
        "q": tile_map(problem, one_box, *of_q, problem.dim, q, rows, dims[0]),
        "d_o": tile_map(problem, one_box, *of_q, problem.dim_v, strides["d_o"], rows, dims[1]),
        "k": tile_map(problem, one_box, *of_k, problem.dim, k, keys, dims[0]),
        "v": tile_map(problem, one_box, *of_k, problem.dim_v, v, keys, dims[1]),
    }
    if dkv and not problem.partial and problem.group_parts == 1:
        maps["dk"] = tile_map(problem, one_box, *of_k, problem.dim, strides["dk"], 64, dims[0])
        maps["dv"] = tile_map(problem, one_box, *of_k, problem.dim_v, strides["dv"], 64, dims[1])
    return maps


def variants(arch: str = ARCH, *, exhaustive: bool = False) -> Iterator[TemplateKernel]:
    """The kernels that calls ask for."""
    seen: set[TemplateKernel] = set()
    every = [(Wanted(), False), (Wanted(deterministic=True), False), (Wanted(deterministic=True), True)]
    if exhaustive:
        every += [(Wanted(dkv=False), False), (Wanted(dq=False), False), (Wanted(sinks=True), False)]
    for features in common_features(DIMS, exhaustive, backward=True):
        tile, able = choose_tile(features), features.dim % 64 == 0 and not features.varlen
        for wanted, rotate in every:
            if rotate and (features.mask != full or features.varlen):
                continue
            boxes = (True, False) if able and exhaustive else (able,)
            parts = (False, True) if exhaustive or (features.mask is causal and wanted == Wanted()) else (False,)
            for one_box, clear_dq, part in itertools.product(boxes, (False, True), parts):
                for kernel in kernels(features, tile, wanted, one_box, rotate, clear_dq, part):
                    if kernel not in seen:
                        seen.add(kernel)
                        yield kernel
