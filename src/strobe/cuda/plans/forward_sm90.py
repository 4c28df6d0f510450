"""The forward kernel for Hopper (TMA, wgmma, warp specialisation): tiles, limits, plan, variants."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from strobe.cuda.parts import tuned
from strobe.cuda.parts.blocks import QUERY_TILE_FIELDS, may_split, query_tiles, splits_of_tiles
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
from strobe.cuda.parts.rows import Rows, pack_gqa_of, stride_fields, stride_values
from strobe.cuda.parts.scores import Scores
from strobe.cuda.parts.shared_memory import Region, SharedMemory, ring_bytes, tile_bytes
from strobe.cuda.parts.tensor_maps import packed_gqa_map, tile_map
from strobe.cuda.plans import block_map, plan_work
from strobe.cuda.plans.plan_work import Work
from strobe.cuda.runtime.driver import TensorMapSpec
from strobe.problem import Problem, Strides

ARCH = "sm_90a"
SMEM_BYTES = 227 << 10  # of one block
DIMS: list[Dims] = [(d, d) for d in (64, 96, 128, 192, 256)] + [(192, 128)]


@functools.cache
def _params(output: Output, scores: tuple[Field, ...], paged: bool) -> Struct:
    return params(
        [*(Field(t, "const u16*") for t in ("q", "k", "v")), Field("sinks", "const float*"), Field("seed", "u64")],
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
        """Of a thread of the producer and of a consumer: together they fill the register file."""
        return {1: (56, 256), 2: (40, 232), 3: (32, 160)}[self.consumers]

    def memory(
        self, dim: int, dim_v: int, page: int = 0, positions: bool = False, state_parts: int = 0
    ) -> SharedMemory:
        """`state_parts`: see that function."""
        return SharedMemory(
            [
                Region("q", tile_bytes(64, dim), self.q_slots * self.consumers),
                Region("k", tile_bytes(self.block_n, dim), self.stages),
                Region("v", tile_bytes(self.block_n, dim_v), self.stages),
                Region("o", tile_bytes(64, 64 * self.store_panels), self.consumers),  # if it has a buffer of its own
                Region("ring_q", ring_bytes(self.q_slots)),
                Region("ring_k", ring_bytes(self.stages)),
                Region("ring_v", ring_bytes(self.stages)),
                Region("state_barriers", 16 * state_parts),
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


# Swept with NVRTC 13.0: benchmarks/results/h200/studies/tiles.json. Another ptxas may want others: `strobe tune`.
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
        (128, 128): dataclasses.replace(_TILES[128, 128], rolled=True, skips_after=True),
        (192, 192): Tile(2, 96, q_slots=1, store_panels=1, ping_pong=True, rolled=True, skips_after=True),
        (192, 128): dataclasses.replace(_TILES[192, 128], rolled=True, skips_after=True),
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
        found = tuned.tile(tuned.tile_name(dim, dim_v, name), Tile) or _OTHER_TILES.get(name, {}).get((dim, dim_v))
        if found is not None:
            return found
    return _TILES[dim, dim_v]


def choose_tile(features: Features, machine: Machine = ANY_MACHINE) -> Tile:
    """A score function that no table knows gets the first tile whose kernel does not spill."""
    scores, dims = features.scores, (features.dim, features.dim_v)
    tile = table_tile(*dims, scores.bounded, softcap=scores.is_function)
    if scores.dropout:  # the softmax takes longer than the products: turns and exponentials that are held lose time
        tile = dataclasses.replace(tile, exps_before_wait=0, ping_pong=False)
    return _without_spills(tile, features, machine, split=False) if scores.is_unknown else tile


def split_tiles(features: Features) -> list[Tile]:
    """For split-KV: the tile that is meant for it, and one with more rows if there is such, that for keys which are not
    split. Merging takes the registers in which that one would hold exponentials. Not swept, as the others are."""
    scores, dims = features.scores, (features.dim, features.dim_v)
    found = table_tile(*dims, scores.bounded, softcap=scores.is_function, split=True)
    wide = table_tile(*dims, scores.bounded, softcap=scores.is_function)
    wide = dataclasses.replace(wide, exps_before_wait=0, rolled=True, skips_after=features.dim < 96)
    return [found, wide] if wide.block_m > found.block_m else [found]


def _without_spills(tile: Tile, features: Features, machine: Machine, split: bool) -> Tile:
    """The tile, or the first of those that leave more registers."""
    calm = dataclasses.replace(tile, exps_before_wait=0, rolled=True, skips_after=True)
    tiles = [tile, calm, *(dataclasses.replace(calm, block_n=n) for n in (96, 64, 48, 32) if n < tile.block_n)]
    return first_without_spills(tiles, lambda t: kernel(features, t, split=split, pack_gqa=1, one_box=False), machine)


def limits(problem: Problem) -> str | None:
    return "no backward kernel" if problem.gradients else tma_limits(problem)


def tma_limits(problem: Problem, most: int = MAX_DIM) -> str | None:
    """What the Hopper kernels of both directions leave to others."""
    if (reason := shape_limits(problem, most) or Scores.limits(problem) or Rows.limits(problem)) is not None:
        return reason
    lengths = (problem.len_q, problem.len_k, problem.len_k)
    heads = (problem.heads, problem.heads_k, problem.heads_k)
    sizes = zip(problem.strides, heads, lengths, strict=True)
    if any((head == 0 and n > 1) or (row == 0 and length > 1) for (_, head, row), n, length in sizes):
        return "an expanded tensor (a stride is 0); TMA needs memory that is there"
    return None


def kernel(features: Features, tile: Tile, *, split: bool, pack_gqa: int, one_box: bool) -> TemplateKernel:
    """`pack_gqa`: heads of a group that are rows of one tile. `one_box`: one TMA box fetches a whole tile, all panels of
    it, because the head dims are multiples of 64."""
    features = replace(features, output=replace(features.output, split=split))
    dim, dim_v, keys = features.dim, features.dim_v, tile.block_n
    parts = state_parts(tile, dim_v) if features.output.can_merge and not split else 0
    memory = tile.memory(dim, dim_v, features.rows.page, features.rows.positions, parts)
    config = {
        **features.config(pack_gqa),
        **tile.config(),
        "kThreads": tile.threads,
        "kPartialFloats": partial_floats(tile, dim_v),
        "kOneBoxPerTile": one_box,
    }
    if features.rows.page and tile.consumers == 2:  # all threads of the producer load, and know a table
        config |= {"kRegsProducer": 72, "kRegsConsumer": 216}
    flags = f"{' split' if split else ''}{f' pack_gqa{pack_gqa}' if pack_gqa > 1 else ''}{'' if one_box else ' panels'}"
    widths = [keys // 2, keys] if keys % 32 == 0 else [keys]  # S of a block of keys, or of half of one
    return TemplateKernel(
        name=f"forward_sm90[{features.name} {tile}{flags}]",
        arch=ARCH,
        params=_params(replace(features.output, split=False), features.scores.fields(), bool(features.rows.page)),
        threads=tile.threads,
        smem=memory.size,
        header="forward_sm90",
        template="forward_sm90",
        label=features.label(pack_gqa=pack_gqa > 1),
        element=features.element,
        config=tuple(config.items()),
        memory=memory,
        types=features.types(),
        products=tuple((n, "ss_zero", dim // 16) for n in widths),
        accumulators=((dim_v, keys // 16),),
        facts={**features.facts(), "tile": str(tile), "split": split, "pack_gqa": pack_gqa, "one_box": one_box},
    )


def partial_floats(tile: Tile, dim_v: int) -> int:
    """What one split of a tile leaves in memory: O, m and l of every row."""
    return tile.block_m * (dim_v + 2)


def state_parts(tile: Tile, dim_v: int) -> int:
    """In how many parts the O of a state comes into the buffers of V (pipeline/state_parts.cuh)."""
    panels, fit = -(-dim_v // 32), tile_bytes(tile.block_n, dim_v) // tile_bytes(64, 64)
    return tile.consumers * -(-panels // fit) if fit and tile.q_slots <= 2 else 0


def plan(
    problem: Problem, out_strides: Strides, machine: Machine, tile: Tile | None = None, dims: Dims | None = None
) -> Plan:
    pack, len_q = pack_gqa_of(problem), problem.len_q
    if pack == 1:
        problem, out_strides = pack_group(problem, out_strides)
    else:
        rows = replace(problem.q, heads=problem.heads_k, length=len_q * pack, total=problem.q.total * pack)
        problem = replace(problem, q=rows)
    dims = dims or padded_dims(DIMS, problem.dim, problem.dim_v)
    features = Features.of(problem, dims)
    listed = features.rows.page > 0  # pages take their work from a list
    if tile is None:
        tile, splits = _tile_and_splits(problem, features, machine)
    else:
        splits = splits_of_tiles(problem, tile.block_m, machine.sms, tile.block_n)
    if problem.invariant:
        tile = replace(tile, rolled=True)  # the first block of keys goes the way of all others
    sparse = splits == 1 and pack == 1 and features.output.plain and block_map.pays(problem)
    features = replace(features, scores=replace(features.scores, sparse=sparse))
    if features.output.rounds_state and not state_parts(tile, dims[1]):
        tile = _TILES[dims]  # has room for the parts of a state's O
    one_box = problem.dim % 64 == 0 and problem.dim_v % 64 == 0 and not features.rows.clipped and pack == 1
    spec = kernel(features, tile, split=splits > 1 or listed, pack_gqa=pack, one_box=one_box)
    schedule = query_tiles(problem, tile.block_m, machine.l2_bytes, splits)
    values = {
        **features.rows.values(problem, tma=True),
        **Scores.values(problem),
        **schedule,
        **features.output.values(problem, pack),
        **stride_values(dict(zip("qkvo", (*problem.strides, out_strides), strict=True))),
    }
    work = Work.of(problem, tile.block_m, tile.block_n, pack, machine.sms) if listed else None
    values |= {} if work is None else work.values()
    grid = min(schedule["tiles"], machine.sms) if work is None else work.pieces
    unusual = {"packed GQA": pack, "splits of the keys": splits}
    details = {
        "kernel": spec.name,
        "arch": spec.arch,
        "tile": f"{tile.block_m} queries x {tile.block_n} keys",
        "threads": spec.threads,
        "blocks": grid,
        "shared memory": f"{spec.smem} bytes",
        **{name: number for name, number in unusual.items() if number != 1},
    }
    launch = Launch(spec, grid, values, _maps(problem, features, tile, out_strides, one_box, pack, len_q))
    if work is not None:
        return Plan((work.launch(features, ARCH), launch), work.workspace(dims[1]), details)
    workspace = {"partial": 4 * schedule["tiles"] * partial_floats(tile, dims[1])} if splits > 1 else {}
    if not sparse:
        return Plan((launch,), workspace, details)
    found = block_map.block_map(problem, features, ARCH, tile.block_m, tile.block_n, transposed=False)
    return Plan((found.launch, replace(launch, values=values | found.values)), found.workspace, details)


# Rows that meet each key, up to which reading K and V takes longer than the products. Then the L2 cache fetches 128 bytes
# at a time: with 256 fewer bytes arrive per second.
BOUND_BY_MEMORY = 128


def _maps(
    problem: Problem, features: Features, tile: Tile, out_strides: Strides, one_box: bool, pack: int, len_q: int
) -> dict[str, TensorMapSpec]:
    queries, keys, dims = features.rows.queries, features.rows.keys, (features.dim, features.dim_v)
    q, k, v = problem.strides

    def of_queries(dim: int, strides: Strides, columns: int, fp32: bool = False) -> TensorMapSpec:
        if pack > 1:
            return packed_gqa_map(problem, pack, len_q, dim, strides, fp32=fp32)
        return tile_map(problem, queries, problem.q, dim, strides, 64, columns, one_box=one_box, fp32=fp32)

    def of_keys(dim: int, strides: Strides, columns: int) -> TensorMapSpec:
        rows = features.rows.box_rows(tile.block_n) if keys == "paged" else tile.block_n
        found = tile_map(problem, keys, problem.k, dim, strides, rows, columns, one_box=one_box)
        bound_by_memory = keys == "paged" or problem.len_q * problem.group <= BOUND_BY_MEMORY
        return replace(found, promotion=128) if bound_by_memory else found

    maps = {
        "q": of_queries(problem.dim, q, dims[0]),
        "k": of_keys(problem.dim, k, dims[0]),
        "v": of_keys(problem.dim_v, v, dims[1]),
        "o": of_queries(problem.dim_v, out_strides, 64 * tile.store_panels or dims[1], problem.partial),
    }
    if problem.state is not None and problem.state.out is not None:
        maps["state"] = of_queries(problem.dim_v, problem.state.out, dims[1], fp32=True)
    return maps


def splits_of(plan: Plan) -> int:
    return int(plan.launches[-1].values["splits"])


def _tile_and_splits(problem: Problem, features: Features, machine: Machine) -> tuple[Tile, int]:
    """Tiles that are meant for split-KV may have fewer rows than others, and be too many to be split where the others
    would leave half of the multiprocessors idle. The first of them says how many keys make a split."""
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
    """The kernels that calls ask for. Head dims that are no multiples of 64 fetch a tile panel by panel, and so do
    packed sequences and packed GQA; eight heads stand for all groups."""
    for features in common_features(DIMS, exhaustive, states=True):
        dims, scores, rows = (features.dim, features.dim_v), features.scores, features.rows
        one_box = dims[0] % 64 == 0 and dims[1] % 64 == 0 and not rows.clipped
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
