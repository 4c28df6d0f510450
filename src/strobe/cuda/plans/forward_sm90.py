"""The forward kernel for Hopper (TMA, wgmma, warp specialisation): tiles, plan, variants."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from strobe.backends.backend import Capabilities
from strobe.cuda.parts import architecture, tuned
from strobe.cuda.parts.blocks import QUERY_TILE_FIELDS, may_split, query_tiles, splits_of_tiles
from strobe.cuda.parts.element import BF16, CONST_TENSOR, FP32, Element
from strobe.cuda.parts.features import Features, common_features
from strobe.cuda.parts.kernel import TemplateKernel, flags
from strobe.cuda.parts.output import Output
from strobe.cuda.parts.params import Field, Struct, params
from strobe.cuda.parts.plan import (
    ANY_MACHINE,
    Dims,
    Launch,
    Machine,
    Plan,
    first_without_spills,
    forward_details,
    pack_group,
    padded_dims,
)
from strobe.cuda.parts.rows import Rows, group_as_rows, pack_gqa_of, stride_fields
from strobe.cuda.parts.shared_memory import Region, SharedMemory, ring_bytes
from strobe.cuda.parts.tensor_maps import packed_gqa_map, tile_map, tma_limits
from strobe.cuda.plans import block_map, plan_work
from strobe.cuda.plans.plan_work import Work
from strobe.cuda.plans.planner import Planner, Tuning
from strobe.cuda.runtime.driver import TensorMapSpec
from strobe.problem import Problem, Strides

ARCH = architecture.HOPPER.target((9, 0))
SMEM_BYTES = architecture.SMEM_BYTES["sm_90"]
DIMS: list[Dims] = [(d, d) for d in (64, 96, 128, 192, 256)] + [(192, 128)]


@functools.cache
def _params(output: Output, scores: tuple[Field, ...], paged: bool) -> Struct:
    return params(
        [*(Field(t, CONST_TENSOR) for t in ("q", "k", "v")), Field("sinks", "const float*"), Field("seed", "u64")],
        stride_fields("q", "k", "v"),
        Rows.fields(tma=True, paged=paged),
        plan_work.fields(output.invariant) if paged else (),
        scores,
        QUERY_TILE_FIELDS,
        output.fields(),
        Output.SPLIT_FIELDS,
        [Field(f"map_{t}", "TensorMap") for t in (*"qkvo", *(("state",) if output.rounds_state else ()))],
    )


@dataclass(frozen=True)
class Tile:
    consumers: int  # warpgroups of 64 query rows each; one more loads
    block_n: int  # keys at a time
    stages: int = 2  # buffers for K and for V
    q_slots: int = 2  # query tiles in shared memory
    exps_before_wait: int = 0  # exponentials issued before the wait for P V; 0: where ptxas puts them
    ping_pong: bool = False  # consumers take turns at issuing products
    store_panels: int = 0  # 64-column panels of O staged at a time in a buffer of their own; 0: all of them, over Q
    rolled: bool = False  # one loop without code of its own for the first key block: half the code
    skips_after: bool = False  # key blocks that rows do not see are skipped behind the main loop, too

    def __str__(self) -> str:
        switches = f"{' pp' if self.ping_pong else ''}{f' o{self.store_panels}' if self.store_panels else ''}"
        return f"{self.block_m}x{self.block_n} s{self.stages} q{self.q_slots} h{self.exps_before_wait}{switches}"

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    @property
    def registers(self) -> tuple[int, int]:
        """The registers of a thread of the producer and of a consumer: together they fill the register file."""
        return {1: (56, 256), 2: (40, 232), 3: (32, 160)}[self.consumers]

    def memory(
        self, dim: int, dim_v: int, page: int = 0, positions: bool = False, parts: int = 0, element: Element = BF16
    ) -> SharedMemory:
        """`parts`: see `state_parts`. O has a region of its own if it is staged some panels at a time, else it lies over Q."""
        return SharedMemory(
            [
                Region("q", element.tile_bytes(64, dim), self.q_slots * self.consumers),
                Region("k", element.tile_bytes(self.block_n, dim), self.stages),
                Region("v", element.tile_bytes(self.block_n, dim_v), self.stages),
                Region("o", element.tile_bytes(64, element.panel * self.store_panels), self.consumers),
                Region("ring_q", ring_bytes(self.q_slots)),
                Region("ring_k", ring_bytes(self.stages)),
                Region("ring_v", ring_bytes(self.stages)),
                Region("state_barriers", 16 * parts),
                Region("tile_info", 64 if page else 48 if positions else 32, self.q_slots),
                *([Region("missing", 4, self.stages)] if page else []),
            ]
        )

    def smem(self, dim: int, dim_v: int) -> int:
        return self.memory(dim, dim_v).size

    def config(self) -> dict[str, int | bool]:
        producer, consumer = self.registers
        return {
            "kBlockM": self.block_m,
            "kBlockN": self.block_n,
            "kConsumers": self.consumers,
            "kStages": self.stages,
            "kQSlots": self.q_slots,
            "kExpsBeforeWait": self.exps_before_wait,
            "kRegsProducer": producer,
            "kRegsConsumer": consumer,
            "kStorePanels": self.store_panels,
            "kPingPong": self.ping_pong,
            "kRolled": self.rolled,
            "kSkipsAfter": self.skips_after,
        }


# Swept on an H200 with NVRTC 13.0. Another ptxas may want others: `strobe tune`.
_TILES = {
    (64, 64): Tile(3, 128, stages=3, exps_before_wait=8, skips_after=True),
    (96, 96): Tile(3, 112, ping_pong=True),
    (128, 128): Tile(2, 128, exps_before_wait=32, ping_pong=True),
    (192, 192): Tile(2, 64, q_slots=1, store_panels=2, ping_pong=True),
    (192, 128): Tile(2, 128, q_slots=1, store_panels=1, exps_before_wait=24, ping_pong=True),
    (256, 256): Tile(2, 64, q_slots=1, store_panels=2),
}


# Where another tile is better: a score function and merging splits take registers. Kernels with split-KV are faster
# rolled; those with a score function lose a few percent for half the code.
_OTHER_TILES = {
    "softcap": {
        (64, 64): Tile(3, 128, stages=3, rolled=True, skips_after=True),
        (96, 96): Tile(3, 96, ping_pong=True, rolled=True, skips_after=True),
        (128, 128): replace(_TILES[128, 128], rolled=True, skips_after=True),
        (192, 192): Tile(2, 96, q_slots=1, store_panels=1, ping_pong=True, rolled=True, skips_after=True),
        (192, 128): replace(_TILES[192, 128], rolled=True, skips_after=True),
        (256, 256): Tile(2, 64, q_slots=1, store_panels=2, ping_pong=True, rolled=True, skips_after=True),
    },
    "split": {
        (64, 64): Tile(2, 128, stages=3, exps_before_wait=16, ping_pong=True, rolled=True, skips_after=True),
        (96, 96): Tile(2, 128, exps_before_wait=16, ping_pong=True, rolled=True),
        (128, 128): Tile(2, 128, exps_before_wait=24, ping_pong=True, rolled=True),
        (192, 192): Tile(2, 64, q_slots=1, store_panels=2, exps_before_wait=8, ping_pong=True, rolled=True),
        (192, 128): Tile(2, 96, q_slots=1, store_panels=1, exps_before_wait=24, ping_pong=True, rolled=True),
        (256, 256): Tile(2, 64, q_slots=1, store_panels=2, ping_pong=True, rolled=True),
    },
    "softcap-split": {
        (96, 96): Tile(2, 96, exps_before_wait=16, ping_pong=True, rolled=True),
        (128, 128): Tile(2, 96, exps_before_wait=24, ping_pong=True, rolled=True),
    },
}


# Kernels that differ so much that each may want a tile of its own, and what a kernel must have to be one; the last that
# applies counts. bounded: the mask hides keys from the right; softcap: that score function; split: split-KV.
KINDS: dict[str, set[str]] = {
    "full": set(),
    "bounded": {"bounded"},
    "softcap": {"softcap"},
    "split": {"split"},
    "softcap-split": {"softcap", "split"},
}


def table_tile(dim: int, dim_v: int, bounded: bool = False, *, softcap: bool = False, split: bool = False) -> Tile:
    """That of `strobe tune`, or that of the tables."""
    applies = {name for name, does in {"bounded": bounded, "softcap": softcap, "split": split}.items() if does}
    kind = [kind for kind, needs in KINDS.items() if needs <= applies][-1]
    for name in (kind, "split") if kind == "softcap-split" else (kind,):  # where it has none, that for split-KV
        tile = tuned.tile(tuned.tile_name(dim, dim_v, name), Tile) or _OTHER_TILES.get(name, {}).get((dim, dim_v))
        if tile is not None:
            return tile
    return _TILES[dim, dim_v]


def choose_tile(features: Features, machine: Machine = ANY_MACHINE) -> Tile:
    """A score function that no table knows gets the first tile whose kernel does not spill."""
    scores, dims = features.scores, (features.dim, features.dim_v)
    tile = table_tile(*dims, scores.bounded, softcap=scores.is_function)
    if scores.dropout:  # the softmax takes longer than the products: turns and exponentials that are held lose time
        tile = replace(tile, exps_before_wait=0, ping_pong=False)
    return _without_spills(tile, features, machine, split=False) if scores.is_unknown else tile


def split_tiles(features: Features) -> list[Tile]:
    """Return the tiles for split-KV: the one that is meant for it, and one with more rows if there is such, that for
    keys which are not split. Merging takes the registers in which that one would hold exponentials. Not swept, as the
    others are."""
    scores, dims = features.scores, (features.dim, features.dim_v)
    tile = table_tile(*dims, scores.bounded, softcap=scores.is_function, split=True)
    wide = table_tile(*dims, scores.bounded, softcap=scores.is_function)
    wide = replace(wide, exps_before_wait=0, rolled=True, skips_after=features.dim < 96)
    return [tile, wide] if wide.block_m > tile.block_m else [tile]


def _without_spills(tile: Tile, features: Features, machine: Machine, split: bool) -> Tile:
    """The tile, or the first of those that leave more registers."""
    calm = replace(tile, exps_before_wait=0, rolled=True, skips_after=True)
    tiles = [tile, calm, *(replace(calm, block_n=n) for n in (96, 64, 48, 32) if n < tile.block_n)]
    return first_without_spills(tiles, lambda t: kernel(features, t, split=split, pack_gqa=1, one_box=False), machine)


def kernel(features: Features, tile: Tile, *, split: bool, pack_gqa: int, one_box: bool) -> TemplateKernel:
    """`pack_gqa`: heads of a group that are rows of one tile. `one_box`: one TMA box fetches a whole tile, all panels of
    it, because the head dims fill them."""
    features = replace(features, output=replace(features.output, split=split))
    dim, dim_v, keys, k = features.dim, features.dim_v, tile.block_n, features.element.mma_k
    parts = state_parts(tile, dim_v) if features.output.can_merge and not split else 0
    memory = tile.memory(dim, dim_v, features.rows.page, features.rows.positions, parts, features.element)
    config = {
        **features.config(pack_gqa),
        **tile.config(),
        "kThreads": tile.threads,
        "kPartialFloats": partial_floats(tile, dim_v),
        "kOneBoxPerTile": one_box,
    }
    if features.rows.page and tile.consumers == 2:  # all threads of the producer load, and know a table
        config |= {"kRegsProducer": 72, "kRegsConsumer": 216}
    packed = f" pack_gqa{pack_gqa}" if pack_gqa > 1 else ""
    widths = [keys // 2, keys] if keys % 32 == 0 else [keys]  # S of a block of keys, or of half of one
    return features.kernel(
        "forward_sm90",
        tile,
        f"{flags(split=split)}{packed}{flags(panels=not one_box)}",
        arch=ARCH,
        params=_params(replace(features.output, split=False), features.scores.fields(), bool(features.rows.page)),
        threads=tile.threads,
        config=config,
        memory=memory,
        products=[(n, "ss_zero", dim // k) for n in widths],
        accumulators=[(dim_v, keys // k)],
        label={"pack_gqa": pack_gqa > 1},
        facts={"split": split, "pack_gqa": pack_gqa, "one_box": one_box},
    )


def partial_floats(tile: Tile, dim_v: int) -> int:
    """Return the floats that one split of a tile leaves in memory: O, m and l of every row."""
    return tile.block_m * (dim_v + 2)


def state_parts(tile: Tile, dim_v: int) -> int:
    """Return in how many parts the O of a state comes into the buffers of V (pipeline/state_parts.cuh)."""
    panels, fit = FP32.panels(dim_v), BF16.tile_bytes(tile.block_n, dim_v) // FP32.tile_bytes(64, FP32.panel)
    return tile.consumers * -(-panels // fit) if fit and tile.q_slots <= 2 else 0


@dataclass(frozen=True)
class _Choice:
    """The decisions of a plan before it writes values."""

    problem: Problem  # the heads of a group may be rows
    out_strides: Strides
    pack: int  # heads that the kernel itself takes as rows of a tile
    features: Features
    tile: Tile
    splits: int

    @staticmethod
    def of(problem: Problem, out_strides: Strides, machine: Machine, tile: Tile | None, dims: Dims | None) -> _Choice:
        pack = pack_gqa_of(problem, PLANNER.packed_heads)
        packed, out_strides = (
            pack_group(problem, out_strides) if pack == 1 else (group_as_rows(problem, pack), out_strides)
        )
        features = Features.of(packed, dims or padded_dims(DIMS, problem.dim, problem.dim_v))
        if tile is None:
            tile, splits = _tile_and_splits(packed, features, machine)
        else:
            splits = splits_of_tiles(packed, tile.block_m, machine.sms, tile.block_n)
        if features.output.rounds_state and not state_parts(tile, features.dim_v):
            tile = _TILES[features.dim, features.dim_v]  # has room for the parts of a state's O
        elif problem.invariant:
            tile = replace(tile, rolled=True)  # the first block of keys goes the way of all others
        sparse = splits == 1 and pack == 1 and features.output.plain and block_map.pays(packed)
        features = replace(features, scores=replace(features.scores, sparse=sparse))
        return _Choice(packed, out_strides, pack, features, tile, splits)


def plan(
    problem: Problem,
    strides: Mapping[str, Strides],
    machine: Machine,
    tile: Tile | None = None,
    dims: Dims | None = None,
) -> Plan:
    """`dims`: other head dims of the kernel than those of DIMS."""
    choice = _Choice.of(problem, strides["o"], machine, tile, dims)
    packed, features, tile = choice.problem, choice.features, choice.tile
    work = Work.of(packed, tile.block_m, tile.block_n, choice.pack, machine.sms) if features.rows.page else None
    one_box = choice.pack == 1 and features.one_box(problem)
    split = choice.splits > 1 or work is not None
    spec = kernel(features, tile, split=split, pack_gqa=choice.pack, one_box=one_box)
    schedule = query_tiles(packed, tile.block_m, machine.l2_bytes, choice.splits)
    by_name = dict(zip("qkvo", (*packed.strides, choice.out_strides), strict=True))
    values = features.values(packed, by_name, schedule, tma=True, pack=choice.pack)
    maps = _maps(choice, one_box, problem.len_q)
    grid = min(schedule["tiles"], machine.sms) if work is None else work.pieces
    unusual = {"packed GQA": choice.pack, "splits of the keys": choice.splits}
    details = forward_details(spec, tile.block_m, tile.block_n, grid)
    details |= {name: number for name, number in unusual.items() if number != 1}
    if work is not None:
        launch = Launch(spec, grid, values | work.values(), maps)
        return Plan((work.launch(features, ARCH), launch), work.workspace(features.dim_v), details)
    if features.scores.sparse:
        bits = block_map.block_map(packed, features, ARCH, tile.block_m, tile.block_n, transposed=False)
        return Plan((bits.launch, Launch(spec, grid, values | bits.values, maps)), bits.workspace, details)
    partial = 4 * schedule["tiles"] * partial_floats(tile, features.dim_v)
    workspace = {"partial": partial} if choice.splits > 1 else {}
    return Plan((Launch(spec, grid, values, maps),), workspace, details)


# Rows that meet each key, up to which reading K and V takes longer than the products. Then the L2 cache fetches 128 bytes
# at a time: with 256 fewer bytes arrive per second.
BOUND_BY_MEMORY = 128


def _maps(choice: _Choice, one_box: bool, len_q: int) -> dict[str, TensorMapSpec]:
    """`len_q`: the queries of a sequence, whose heads may be rows."""
    problem, features, tile, pack = choice.problem, choice.features, choice.tile, choice.pack
    queries, keys, dims = features.rows.queries, features.rows.keys, (features.dim, features.dim_v)
    q, k, v = problem.strides

    def of_queries(dim: int, strides: Strides, columns: int, element: Element | None = None) -> TensorMapSpec:
        if pack > 1:
            return packed_gqa_map(problem, pack, len_q, dim, strides, element)
        return tile_map(problem, queries, problem.q, dim, strides, 64, columns, one_box=one_box, element=element)

    def of_keys(dim: int, strides: Strides, columns: int) -> TensorMapSpec:
        rows = features.rows.box_rows(tile.block_n) if keys == "paged" else tile.block_n
        tiles = tile_map(problem, keys, problem.k, dim, strides, rows, columns, one_box=one_box)
        bound_by_memory = keys == "paged" or problem.len_q * problem.group <= BOUND_BY_MEMORY
        return replace(tiles, promotion=128) if bound_by_memory else tiles

    columns = features.element.panel * tile.store_panels or dims[1]  # of O, stored at a time
    maps = {
        "q": of_queries(problem.dim, q, dims[0]),
        "k": of_keys(problem.dim, k, dims[0]),
        "v": of_keys(problem.dim_v, v, dims[1]),
        "o": of_queries(problem.dim_v, choice.out_strides, columns, FP32 if problem.partial else None),
    }
    if problem.state is not None and problem.state.out is not None:
        maps["state"] = of_queries(problem.dim_v, problem.state.out, dims[1], FP32)
    return maps


def _tile_and_splits(problem: Problem, features: Features, machine: Machine) -> tuple[Tile, int]:
    """Try the tile for split-KV first, then the ordinary one: small tiles may already fill the GPU where larger ones would
    not, and still need no split. The first says how many keys make a split."""
    meant_for_it = split_tiles(features) if may_split(problem) else []
    for tile in meant_for_it:
        splits = splits_of_tiles(problem, tile.block_m, machine.sms, meant_for_it[0].block_n)
        if splits > 1 or features.rows.page:
            if problem.invariant:  # one tile, whatever the queries and pages are
                features = replace(features, rows=Rows("varlen", "paged", True, 1))
            unknown = features.scores.is_unknown
            return _without_spills(tile, features, machine, split=True) if unknown else tile, splits
    return choose_tile(features, machine), 1


def variants(arch: str = ARCH, *, exhaustive: bool = False) -> Iterator[TemplateKernel]:
    """The kernels that calls ask for. Head dims that do not fill whole panels fetch a tile panel by panel, and so do
    packed sequences and packed GQA; eight heads stand for all groups."""
    for features in common_features(DIMS, exhaustive, states=True):
        dims, scores, rows = (features.dim, features.dim_v), features.scores, features.rows
        one_box = features.one_box()
        plain = not rows.varlen and not scores.is_function and not scores.sinks
        whole = scores.dropout or features.output.rounds_state
        splits = (False,) if whole else (False, True) if exhaustive else (not plain,)
        for split in splits:
            tiles = split_tiles(features) if split else [choose_tile(features)]
            for tile in tiles if exhaustive else tiles[:1]:
                for box in (True, False) if one_box and (exhaustive or plain) else (one_box,):
                    yield kernel(features, tile, split=split, pack_gqa=1, one_box=box)
                if not rows.varlen and not scores.dropout and (exhaustive or dims == (128, 128)):
                    yield kernel(features, tile, split=split, pack_gqa=8, one_box=False)


PLANNER = Planner(
    name="forward_sm90",
    architecture=architecture.HOPPER,
    dims=DIMS,
    can=Capabilities(pages=True, invariant=True, merges=True),
    splits=lambda problem, machine: _Choice.of(problem, problem.strides[0], machine, None, None).splits,
    packed_heads=64,  # rows of a TMA box
    rounds_states=True,
    further_limits=lambda problem: Rows.limits(problem) or tma_limits(problem),
    plan=plan,
    variants=variants,
    tuning=Tuning(tuple(KINDS), DIMS),
)
