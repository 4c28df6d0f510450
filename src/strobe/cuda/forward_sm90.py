"""The forward kernel for Hopper (TMA, wgmma, warp specialisation): tiles, limits, plan, variants."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace

from strobe.cuda import tuned
from strobe.cuda.features import Features, common_features
from strobe.cuda.kernel import TemplateKernel
from strobe.cuda.params import Field, Struct
from strobe.cuda.plan import (
    COUNTER,
    COUNTERS,
    PROBLEM_FIELDS,
    Dims,
    Launch,
    Machine,
    Plan,
    common_limits,
    lse_values,
    merge_fields,
    merge_values,
    pack_group,
    padded_dims,
    problem_values,
    row_blocks,
    section,
    stride_fields,
    stride_values,
    tile_bytes,
)
from strobe.cuda.tensor_maps import buffer_rows, packed_gqa_map, tile_map
from strobe.problem import Problem, Strides

ARCH = "sm_90a"
SMEM_BYTES = 227 << 10  # of one block
DIMS: list[Dims] = [(d, d) for d in (64, 96, 128, 192, 256)] + [(192, 128)]

POINTERS = ("q", "k", "v", "o", "lse", "sinks", "cu_q", "cu_k", "positions", "seed")


def _params(partial_out: bool, finishes: bool) -> Struct:
    return Struct(
        "Params",
        [  # pointers first: they change with every call and are patched together
            *(Field(t, "const u16*") for t in ("q", "k", "v")),
            Field("o", "float*" if partial_out else "u16*"),
            Field("lse", "float*"),  # may be null
            Field("sinks", "const float*"),
            *(Field(t, "const int*") for t in ("cu_q", "cu_k", "positions")),
            Field("seed", "u64"),  # of the dropout
            Field(COUNTER, "u32*"),  # one hands out tiles, the others count the splits of a tile
            Field("partial", "float*"),  # where the splits of a tile leave O, m and l
            *stride_fields("q", "k", "v", "o"),
            Field("lse_batch", "i64"),
            Field("lse_head", "i64"),
            *(Field(n, "int") for n in ("row_blocks", "section", "splits", "tiles", "k_batch_rows", "v_batch_rows")),
            *merge_fields(partial_out or finishes),
            *PROBLEM_FIELDS,
            *(Field(f"map_{t}", "TensorMap") for t in (*"qkvo", *(("earlier",) if finishes else ()))),
        ],
    )


PARAMS = {kind: _params(*kind) for kind in ((False, False), (True, False), (False, True))}


@dataclass(frozen=True)
class Tile:
    consumers: int  # warpgroups of 64 query rows each; one more loads
    block_n: int  # keys at a time
    stages: int = 2  # buffers for K and for V
    q_slots: int = 2  # query tiles in shared memory
    exps_before_wait: int = 0  # exponentials issued before the wait for P V; 0: where ptxas puts them
    ping_pong: bool = False  # consumers take turns at issuing products
    store_panels: int = 0  # 64-column panels of O staged at a time in a buffer of their own; 0: all of them, over Q

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

    def smem(self, dim: int, dim_v: int) -> int:
        queries = self.q_slots * self.consumers * tile_bytes(64, dim)
        keys_and_values = tile_bytes(self.block_n, dim) + tile_bytes(self.block_n, dim_v)
        output = self.consumers * tile_bytes(64, 64 * self.store_panels)
        barriers, tile_info = 16 * self.q_slots + 32 * self.stages, 32 * self.q_slots
        return queries + self.stages * keys_and_values + output + barriers + tile_info

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
        }


# Swept with NVRTC 13.0: benchmarks/results/h200/studies/tiles.json. Another ptxas may want others: `strobe tune`.
_TILES = {
    (64, 64): Tile(3, 128, stages=3, exps_before_wait=8),
    (96, 96): Tile(3, 112, ping_pong=True),
    (128, 128): Tile(2, 128, exps_before_wait=32, ping_pong=True),
    (192, 192): Tile(2, 64, q_slots=1, store_panels=2, ping_pong=True),
    (192, 128): Tile(2, 128, q_slots=1, store_panels=1, exps_before_wait=24, ping_pong=True),
    (256, 256): Tile(2, 64, q_slots=1, store_panels=2),
}


# Where another tile is better: a score function and merging splits take registers.
_OTHER_TILES = {
    "softcap": {
        (64, 64): Tile(3, 128, stages=3),
        (96, 96): Tile(3, 96, ping_pong=True),
        (192, 192): Tile(2, 96, q_slots=1, store_panels=1, ping_pong=True),
        (256, 256): Tile(2, 64, q_slots=1, store_panels=2, ping_pong=True),
    },
    "split": {
        (64, 64): Tile(2, 128, stages=3, exps_before_wait=16, ping_pong=True),
        (96, 96): Tile(2, 128, exps_before_wait=16, ping_pong=True),
        (128, 128): Tile(2, 128, exps_before_wait=24, ping_pong=True),
        (192, 192): Tile(2, 64, q_slots=1, store_panels=2, exps_before_wait=8, ping_pong=True),
        (192, 128): Tile(2, 96, q_slots=1, store_panels=1, exps_before_wait=24, ping_pong=True),
        (256, 256): Tile(2, 64, q_slots=1, store_panels=2, ping_pong=True),
    },
    "softcap-split": {
        (96, 96): Tile(2, 96, exps_before_wait=16, ping_pong=True),
        (128, 128): Tile(2, 96, exps_before_wait=24, ping_pong=True),
    },
}


# Kernels that differ so much that each may want a tile of its own, and what a kernel must have to be one; the last that
# applies counts. bounded: the mask hides keys from the right; softcap: a score function; split: split-KV.
KINDS: dict[str, set[str]] = {
    "full": set(),
    "bounded": {"bounded"},
    "softcap": {"softcap"},
    "split": {"split"},
    "softcap-split": {"softcap", "split"},
}


def choose_tile(
    dim: int, dim_v: int, bounded: bool = False, *, softcap: bool = False, split: bool = False, dropout: bool = False
) -> Tile:
    if dropout:  # the softmax takes longer than the products: who waits for a turn, or holds exponentials, loses time
        plain = choose_tile(dim, dim_v, bounded, softcap=softcap, split=split)
        return dataclasses.replace(plain, exps_before_wait=0, ping_pong=False)
    applies = {name for name, does in {"bounded": bounded, "softcap": softcap, "split": split}.items() if does}
    kind = [kind for kind, needs in KINDS.items() if needs <= applies][-1]
    for name in (kind, "split") if kind == "softcap-split" else (kind,):  # where it has none, that for split-KV
        found = tuned.tile(tuned.tile_name(dim, dim_v, name), Tile) or _OTHER_TILES.get(name, {}).get((dim, dim_v))
        if found is not None:
            return found
    return _TILES[dim, dim_v]


def split_tiles(dim: int, dim_v: int, bounded: bool, softcap: bool) -> list[Tile]:
    """For split-KV: the tile that is meant for it, and one with more rows if there is such, that for keys which are not
    split. Merging takes the registers in which that one would hold exponentials. Not swept, as the others are."""
    found = choose_tile(dim, dim_v, bounded, softcap=softcap, split=True)
    wide = dataclasses.replace(choose_tile(dim, dim_v, bounded, softcap=softcap), exps_before_wait=0)
    return [found, wide] if wide.block_m > found.block_m else [found]


def limits(problem: Problem) -> str | None:
    return "no backward kernel" if problem.gradients else tma_limits(problem)


def tma_limits(problem: Problem) -> str | None:
    """What the Hopper kernels of both directions leave to others."""
    if (reason := common_limits(problem)) is not None:
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
    dim, dim_v, keys = features.dim, features.dim_v, tile.block_n
    smem = tile.smem(dim, dim_v) + (16 * tile.q_slots if features.positions else 0)
    merging = features.partial_out or features.finishes
    if merging and not split:
        smem += 16 * earlier_parts(tile, dim_v)
    config = {
        **features.config(),
        **tile.config(),
        "kThreads": tile.threads,
        "kSmem": smem,
        "kPackGqa": pack_gqa,
        "kPartialFloats": partial_floats(tile, dim_v),
        "kSplit": split,
        "kMerge": merging,
        "kOneBoxPerTile": one_box,
    }
    flags = f"{' split' if split else ''}{f' pack_gqa{pack_gqa}' if pack_gqa > 1 else ''}{'' if one_box else ' panels'}"
    widths = [keys // 2, keys] if keys % 32 == 0 else [keys]  # S of a block of keys, or of half of one
    return TemplateKernel(
        name=f"forward_sm90[{features.name} {tile}{flags}]",
        arch=ARCH,
        params=PARAMS[features.partial_out, features.finishes],
        threads=tile.threads,
        smem=smem,
        header="forward_sm90",
        template="forward_sm90",
        element=features.element,
        config=tuple(config.items()),
        types=features.types(),
        products=tuple((n, "ss_zero", dim // 16) for n in widths),
        accumulators=((dim_v, keys // 16),),
        facts={**features.facts(), "tile": str(tile), "split": split, "pack_gqa": pack_gqa, "one_box": one_box},
    )


def partial_floats(tile: Tile, dim_v: int) -> int:
    """What one split of a tile leaves in memory: O, m and l of every row."""
    return tile.block_m * (dim_v + 2)


def earlier_parts(tile: Tile, dim_v: int) -> int:
    """In how many parts the O of an earlier result comes into the buffers of V (pipeline/earlier_parts.cuh)."""
    panels, fit = -(-dim_v // 32), tile_bytes(tile.block_n, dim_v) // tile_bytes(64, 64)
    return tile.consumers * -(-panels // fit) if fit and tile.q_slots <= 2 else 0


def pack_gqa_of(problem: Problem) -> int:
    """Heads that the kernel itself takes as rows of one tile: those of a group, where queries are too few to fill tiles.
    The boxes that it copies hold whole queries, so only groups that divide their 64 rows."""
    able = not problem.varlen and not problem.dropout and problem.len_q < 128 and 64 % problem.group == 0
    return problem.group if able else 1


def plan(problem: Problem, out_strides: Strides, machine: Machine, tile: Tile | None = None) -> Plan:
    pack, len_q = pack_gqa_of(problem), problem.len_q
    if pack == 1:
        problem, out_strides = pack_group(problem, out_strides)
    else:
        rows = replace(problem.q, heads=problem.heads_k, length=len_q * pack, total=problem.q.total * pack)
        problem = replace(problem, q=rows)
    dims = padded_dims(DIMS, problem.dim, problem.dim_v)
    if tile is None:
        tile, splits = _tile_and_splits(problem, dims, machine.sms)
    else:
        splits = _splits(problem, tile, machine.sms, tile.block_n)
    if problem.earlier_out is not None and not earlier_parts(tile, dims[1]):
        tile = _TILES[dims]  # has room for the parts of an earlier O
    clipped = problem.varlen or problem.positions
    one_box = problem.dim % 64 == 0 and problem.dim_v % 64 == 0 and not clipped and pack == 1
    spec = kernel(Features.of(problem, dims), tile, split=splits > 1, pack_gqa=pack, one_box=one_box)
    blocks = row_blocks(problem, tile.block_m)
    tiles = blocks * problem.batch * problem.heads * splits
    q, k, v = problem.strides
    values = {
        **problem_values(problem),
        **stride_values({"q": q, "k": k, "v": v, "o": out_strides}),
        **lse_values(problem, pack),
        **merge_values(problem),
        "row_blocks": blocks,
        "section": section(problem, machine.l2_bytes),
        "splits": splits,
        "tiles": tiles,
        "k_batch_rows": buffer_rows(problem.len_k, k) if problem.positions else 0,
        "v_batch_rows": buffer_rows(problem.len_k, v) if problem.positions else 0,
    }
    of_q = (problem.heads, problem.len_q, problem.q.total)
    of_k = (problem.heads_k, problem.len_k, problem.k.total)
    store_columns = 64 * tile.store_panels or dims[1]
    maps = {
        "q": tile_map(problem, one_box, *of_q, problem.dim, q, 64, dims[0]),
        "k": tile_map(problem, one_box, *of_k, problem.dim, k, tile.block_n, dims[0], clipped),
        "v": tile_map(problem, one_box, *of_k, problem.dim_v, v, tile.block_n, dims[1], clipped),
        "o": tile_map(problem, one_box, *of_q, problem.dim_v, out_strides, 64, store_columns, fp32=problem.partial),
    }
    if pack > 1:
        maps["q"] = packed_gqa_map(problem, pack, len_q, problem.dim, q)
        maps["o"] = packed_gqa_map(problem, pack, len_q, problem.dim_v, out_strides, fp32=problem.partial)
    if (earlier := problem.earlier_out) is not None and pack > 1:
        maps["earlier"] = packed_gqa_map(problem, pack, len_q, problem.dim_v, earlier, fp32=True)
    elif earlier is not None:
        maps["earlier"] = tile_map(problem, one_box, *of_q, problem.dim_v, earlier, 64, dims[1], fp32=True)
    grid = min(tiles, machine.sms)
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
    workspace = {"partial": 4 * tiles * partial_floats(tile, dims[1])} if splits > 1 else {}
    tensors = POINTERS if problem.earlier_out is None else (*POINTERS, "earlier")
    return Plan((Launch(spec, grid, values, maps),), tensors, workspace, details)


def splits_of(plan: Plan) -> int:
    return int(plan.launches[0].values["splits"])


# Where splits are merged, every row of the tile is written and read once more. Tried out on an H200, but not swept as
# tiles are:
LEAST_SPLIT = 2  # key blocks; twice that where rows are more than a few
FEW_ROWS = 16
FEWEST_SPLITS = 3  # keys that do not suffice for as many are not split


def _tile_and_splits(problem: Problem, dims: Dims, sms: int) -> tuple[Tile, int]:
    """Tiles that are meant for split-KV may have fewer rows than others, and be too many to be split where the others
    would leave half of the multiprocessors idle. How many keys make a split is said by the former."""
    bounded, scored = problem.mask.hi is not None, not problem.score.is_identity
    meant_for_it = split_tiles(*dims, bounded, scored)
    for tile in meant_for_it:
        if (splits := _splits(problem, tile, sms, meant_for_it[0].block_n)) > 1:
            return tile, splits
    return choose_tile(*dims, bounded, softcap=scored, dropout=problem.dropout > 0), 1


def _splits(problem: Problem, tile: Tile, sms: int, block_n: int) -> int:
    """Splits of a tile's keys, of LEAST_SPLIT blocks of `block_n` or more, so that few tiles keep all multiprocessors
    busy: decode, or chunked prefill."""
    tiles = row_blocks(problem, tile.block_m) * problem.batch * problem.heads
    least = LEAST_SPLIT * block_n * (1 if problem.len_q <= FEW_ROWS else 2)
    whole = problem.dropout or problem.earlier_out is not None  # no kernel for them splits
    if whole or problem.len_k < FEWEST_SPLITS * least or tiles * tile.consumers >= COUNTERS:
        return 1
    return max(1, min(sms // max(1, tiles), problem.len_k // least))


def variants(arch: str = ARCH, *, exhaustive: bool = False) -> Iterator[TemplateKernel]:
    """The kernels that calls ask for. Head dims that are no multiples of 64 fetch a tile panel by panel, and so do
    packed sequences and packed GQA; eight heads stand for all groups."""
    for features in common_features(DIMS, exhaustive, finishes=True):
        dims, scored = (features.dim, features.dim_v), not features.score.is_identity
        bounded = features.mask.hi is not None
        one_box = dims[0] % 64 == 0 and dims[1] % 64 == 0 and not features.varlen and not features.positions
        plain = not features.varlen and not scored and not features.sinks
        whole = choose_tile(*dims, bounded, softcap=scored, dropout=features.dropout)
        splits = (False,) if features.dropout or features.finishes else (False, True) if exhaustive else (not plain,)
        for split in splits:
            tiles = split_tiles(*dims, bounded, scored) if split else [whole]
            for tile in tiles if exhaustive else tiles[:1]:
                for box in (True, False) if one_box and (exhaustive or plain) else (one_box,):
                    yield kernel(features, tile, split=split, pack_gqa=1, one_box=box)
                if not features.varlen and not features.dropout and (exhaustive or dims == (128, 128)):
                    yield kernel(features, tile, split=split, pack_gqa=8, one_box=False)
