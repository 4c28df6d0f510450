"""From a problem to a launch: which kernel variant, how many blocks, which arguments. Facts and tables; no CUDA, no
tensors.

A `Variant` is everything that changes code, and prints the source that is compiled. A `Plan` adds what changes from
problem to problem without changing code: lengths, strides, scale, window sizes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from strobe.cuda import wgmma
from strobe.cuda.driver import TensorMapSpec
from strobe.cuda.params import Field, Struct
from strobe.cuda.tiles import DIMS, TileSm80, TileSm90, choose_sm80, choose_sm90, padded_dims, split_tiles
from strobe.mask import MAX_CONSTANTS, Mask, causal, full, window
from strobe.problem import Problem
from strobe.score import kernel_constants

ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}

# Pointers first: they change with every call and are patched together.
_COMMON = [
    Field("q", "const u16*"),
    Field("k", "const u16*"),
    Field("v", "const u16*"),
    Field("o", "u16*"),
    Field("lse", "float*"),  # may be null
    Field("sinks", "const float*"),
    Field("cu_q", "const int*"),
    Field("cu_k", "const int*"),
    Field(
        "counter", "u32*"
    ),  # zeros before and after each launch: one hands out tiles, the others count parts of tiles
    Field("partial", "float*"),  # where the parts of a tile whose keys are split meet
    *(Field(f"{t}_{axis}", "i64") for t in "qkvo" for axis in ("batch", "head", "row")),  # strides in elements
    Field("lse_batch", "i64"),
    Field("lse_head", "i64"),
    Field("scale_before", "float"),  # of the scores, before the softcap
    Field("scale_log2", "float"),  # after it, in units of log 2
    *(Field(n, "int") for n in ("batch", "heads", "group", "len_q", "len_k", "dim", "dim_v")),
    *(Field(n, "int") for n in ("row_blocks", "section", "splits", "tiles")),
    Field("mask", "int", MAX_CONSTANTS),
]
POINTERS = ("q", "k", "v", "o", "lse", "sinks", "cu_q", "cu_k", "counter", "partial")
PARAMS = {
    "forward_sm80": Struct("Params", _COMMON),
    "forward_sm90": Struct("Params", [*_COMMON, *(Field(f"map_{t}", "TensorMap") for t in "qkvo")]),
}


@dataclass(frozen=True)
class Variant:
    """One kernel as it is compiled. Two problems with equal variants share a cubin."""

    arch: str
    element: str
    tile: TileSm80 | TileSm90
    dim: int
    dim_v: int
    mask: Mask  # only its shape counts, see Mask.cpp
    packed: bool = False
    softcap: bool = False
    sinks: bool = False
    split: bool = False  # keys are split among blocks (sm90)
    fold: int = 1  # heads of a group that are rows of one tile (sm90)
    whole_dims: bool = True  # the head dims are not rounded up (sm80), or are whole panels of 64 columns (sm90)

    @property
    def kernel(self) -> str:
        """The header and function under include/strobe/kernels."""
        return self.tile.kernel

    @property
    def name(self) -> str:
        flags = "".join(f" {flag}" for flag in ("packed", "softcap", "sinks", "split") if getattr(self, flag))
        flags += f" fold{self.fold}" if self.fold > 1 else ""
        dims = f"{self.dim}" if self.dim == self.dim_v else f"{self.dim}/{self.dim_v}"
        return f"{self.kernel}[{self.element} {dims} {self.tile} {self.mask.name}{flags}{'' if self.whole_dims else ' padded'}]"

    @property
    def threads(self) -> int:
        return self.tile.threads

    @property
    def smem(self) -> int:
        return self.tile.smem(self.dim, self.dim_v)

    @property
    def part_floats(self) -> int:
        """What one part of a tile whose keys are split leaves in memory: O, m and l of every row."""
        return 0 if isinstance(self.tile, TileSm80) else self.tile.block_m * (self.dim_v + 2)

    @property
    def params(self) -> Struct:
        return PARAMS[self.kernel]

    @functools.cached_property
    def source(self) -> str:
        """The seam between host and device: the few generated lines that turn a kernel template into a kernel."""
        numbers = {"kDim": self.dim, "kDimV": self.dim_v, "kThreads": self.threads, "kSmem": self.smem}
        numbers |= {"kFold": self.fold, "kPartFloats": self.part_floats}
        numbers |= self.tile.numbers()
        flags = {"kPacked": self.packed, "kSoftcap": self.softcap, "kSinks": self.sinks, "kSplit": self.split}
        flags |= self.tile.flags()
        flags["kWholePanels" if isinstance(self.tile, TileSm90) else "kWholeDims"] = self.whole_dims
        return (
            f"// {self.kernel} for {self.arch}\n"
            f"#include <strobe/kernels/{self.kernel}.cuh>\n"
            f"{self._products() if isinstance(self.tile, TileSm90) else ''}"
            "namespace strobe {\n"
            "struct Config {\n"
            f"  using Element = {self.element};\n"
            f"  static constexpr int {', '.join(f'{k} = {v}' for k, v in numbers.items())};\n"
            f"  static constexpr bool {', '.join(f'{k} = {str(v).lower()}' for k, v in flags.items())};\n"
            "};\n"
            f"{self.mask.cpp}"
            f"{self.params.cpp()}"
            "}  // namespace strobe\n"
            f"STROBE_KERNEL({self.threads}, {self.tile.blocks_per_sm}) kernel(STROBE_GRID_CONSTANT strobe::Params p) {{\n"
            f"  strobe::{self.kernel}<strobe::Config, strobe::Mask>(p);\n"
            "}\n"
        )

    def _products(self) -> str:
        """The Hopper kernel's matrix products: S of a block of keys or of half of one, and O."""
        keys = self.tile.block_n
        scores = [keys // 2, keys] if keys % 32 == 0 else [keys]
        shapes = wgmma.shapes(self.element, [(n, [("ss_zero", self.dim // 16)]) for n in scores])
        return shapes + wgmma.accumulators(self.element, self.dim_v, keys // 16)


@dataclass(frozen=True)
class Plan:
    """A launch without its addresses: they are patched in at each call, everything else stays."""

    variant: Variant
    grid: int
    values: dict[str, object]  # of the variant's params; pointers are 0, tensor maps are missing
    maps: dict[str, TensorMapSpec] = field(default_factory=dict)  # of q, k, v, o; without addresses
    workspace: int = 0  # floats: the parts of tiles whose keys are split

    def describe(self) -> dict[str, object]:
        t, splits = self.variant.tile, self.values["splits"]
        unusual = {"heads as rows of a tile": self.variant.fold, "parts of the keys": splits}
        return {
            "kernel": self.variant.name,
            "arch": self.variant.arch,
            "tile": f"{t.block_m} queries x {t.block_n} keys",
            "threads": self.variant.threads,
            "blocks": self.grid,
            "shared memory": f"{self.variant.smem} bytes",
            **{name: number for name, number in unusual.items() if number != 1},
        }


def shape_of(mask: Mask) -> Mask:
    """One representative for all masks that print the same code, so that `Variant`s compare by code."""
    return _shapes.setdefault(mask.cpp, mask)


_shapes: dict[str, Mask] = {}
Strides = tuple[int, ...]  # (batch, head, row) in elements
FAR = 1 << 30  # see _tensor_map; also in forward_sm90.cuh


def _sees_everything(problem: Problem) -> bool:
    """Whether the only query of each sequence sees all keys."""
    return problem.mask.bounds(0, 1, problem.len_k) == (0, problem.len_k)


def fold_group(problem: Problem, out_strides: Strides) -> tuple[Problem, Strides]:
    """One query a sequence and several heads to a key head, as in decoding: the heads of a group become the rows of one
    tile, and their keys are read once instead of once for each of them. By strides alone, so for any kernel and group,
    but only where all keys are visible, so that rows need not be told apart, and without sinks, which belong to
    heads."""
    if problem.len_q != 1 or problem.group == 1 or problem.packed or problem.has_sinks or not _sees_everything(problem):
        return problem, out_strides
    group = problem.group

    def folded(strides: Strides) -> Strides:
        batch, head, _ = strides
        return batch, group * head, head

    q, k, v = problem.strides
    rows = {"heads": problem.heads_k, "len_q": group, "total_q": problem.batch * group}
    return replace(problem, **rows, mask=full, strides=(folded(q), k, v)), folded(out_strides)  # type: ignore[arg-type]


def plan_sm80(
    problem: Problem, arch: str, out_strides: Strides, tile: TileSm80 | None = None, l2_bytes: int = 32 << 20
) -> Plan:
    problem, out_strides = fold_group(problem, out_strides)
    dim, dim_v = padded_dims("sm80", problem.dim, problem.dim_v)
    tile = tile or choose_sm80(dim, dim_v, arch, problem.softcap is not None)
    variant = _variant(problem, arch, tile, dim, dim_v, 1, (dim, dim_v) == (problem.dim, problem.dim_v))
    values = _values(problem, out_strides, tile.block_m, 1, l2_bytes)
    return Plan(variant, values["tiles"], values)


def fold_of(problem: Problem) -> int:
    """Heads that the Hopper kernel itself takes as rows of one tile: those of a group, where queries are too few to
    fill tiles. The boxes that it copies hold whole queries, so only groups that divide their 64 rows."""
    able = not problem.packed and problem.len_q < 128 and 64 % problem.group == 0
    return problem.group if able else 1


def plan_sm90(
    problem: Problem, out_strides: Strides, sms: int, tile: TileSm90 | None = None, l2_bytes: int = 32 << 20
) -> Plan:
    fold, len_q = fold_of(problem), problem.len_q
    if fold == 1:
        problem, out_strides = fold_group(problem, out_strides)
    else:
        mask = full if len_q == 1 and _sees_everything(problem) else problem.mask
        rows = {"heads": problem.heads_k, "len_q": len_q * fold, "total_q": problem.total_q * fold}
        problem = replace(problem, **rows, mask=mask)  # type: ignore[arg-type]
    dim, dim_v = padded_dims("sm90", problem.dim, problem.dim_v)
    if tile is None:
        tile, splits = _tile_and_splits(problem, dim, dim_v, sms)
    else:
        splits = _splits(problem, tile, sms, tile.block_n)
    whole_panels = problem.dim % 64 == 0 and problem.dim_v % 64 == 0 and not problem.packed and fold == 1
    variant = replace(_variant(problem, "sm_90a", tile, dim, dim_v, splits, whole_panels), fold=fold)
    values = _values(problem, out_strides, tile.block_m, splits, l2_bytes)
    store_columns = 64 * tile.store_panels or dim_v
    tensors = {  # name: (heads, length, rows in all, head dim, strides, rows of a box, columns of a tile)
        "q": (problem.heads, problem.len_q, problem.total_q, problem.dim, problem.strides[0], 64, dim),
        "k": (problem.heads_k, problem.len_k, problem.total_k, problem.dim, problem.strides[1], tile.block_n, dim),
        "v": (problem.heads_k, problem.len_k, problem.total_k, problem.dim_v, problem.strides[2], tile.block_n, dim_v),
        "o": (problem.heads, problem.len_q, problem.total_q, problem.dim_v, out_strides, 64, store_columns),
    }
    maps = {name: _tensor_map(problem, whole_panels, variant.element, *facts) for name, facts in tensors.items()}
    if fold > 1:
        values["lse_head"] = len_q
        for name, columns, strides in (("q", problem.dim, problem.strides[0]), ("o", problem.dim_v, out_strides)):
            maps[name] = _folded_map(problem, fold, len_q, variant.element, columns, strides)
    workspace = values["tiles"] * variant.part_floats if splits > 1 else 0
    return Plan(variant, min(values["tiles"], sms), values, maps, workspace)


PART_COUNTERS = 1023  # that a launch finds behind the one for tiles: a consumer of a split tile has one
# Where parts meet, every row of the tile is written and read once more. Tried out on an H200, but not swept as tiles
# are:
LEAST_PART = 2  # key blocks; twice that where rows are more than a few
FEW_ROWS = 16
FEWEST_PARTS = 3  # keys that do not suffice for as many stay together


def _tile_and_splits(problem: Problem, dim: int, dim_v: int, sms: int) -> tuple[TileSm90, int]:
    """Tiles that are meant for parts of the keys may have fewer rows than others, and be too many to be split where the
    others would leave half of the multiprocessors idle. How many keys make a part is said by the former."""
    bounded, softcap = problem.mask.hi is not None, problem.softcap is not None
    for_parts = split_tiles(dim, dim_v, bounded, softcap)
    for tile in for_parts:
        if (splits := _splits(problem, tile, sms, for_parts[0].block_n)) > 1:
            return tile, splits
    return choose_sm90(dim, dim_v, bounded, softcap=softcap), 1


def _splits(problem: Problem, tile: TileSm90, sms: int, block_n: int) -> int:
    """Parts of a tile's keys, of LEAST_PART blocks of `block_n` or more, so that few tiles keep all multiprocessors
    busy: one query against a long cache, or a short piece of a long prompt."""
    tiles = _row_blocks(problem, tile.block_m) * problem.batch * problem.heads
    least = LEAST_PART * block_n * (1 if problem.len_q <= FEW_ROWS else 2)
    if problem.len_k < FEWEST_PARTS * least or tiles * tile.consumers > PART_COUNTERS:
        return 1
    return max(1, min(sms // max(1, tiles), problem.len_k // least))


def _tensor_map(
    problem: Problem,
    whole_panels: bool,
    element: str,
    heads: int,
    length: int,
    total: int,
    dim: int,
    strides: Strides,
    box_rows: int,
    columns: int,
) -> TensorMapSpec:
    """(columns, rows, panels, heads, batch); see `Box` in forward_sm90.cuh.

    Packed sequences end anywhere, and a box must not run into the next one: keys there may hold anything, and output
    there is another's. Their maps are (columns, rows in a box, heads, rows in memory, far away). A row is addressed by
    the sum of two coordinates. The first counts to the height of a box and no further: started at c instead of 0, the
    box ends c rows early. The second says where in memory the box begins, c rows before its place, which may be before
    the tensor. Coordinates must not be negative, though, so it is raised by FAR, and the last coordinate, also FAR,
    takes that back: its stride of 2^34 bytes less a row, FAR = 2^30 times, is less than nothing by FAR rows, modulo the
    2^64 of an address. (The obvious way, to encode an address before the tensor, faults if no memory is mapped there.)
    """
    batch_stride, head_stride, row_stride = (2 * s for s in strides)
    # A dimension of size 1 may have any stride, and the hardware wants a multiple of 16.
    row_stride = row_stride if (total if problem.packed else length) > 1 else 128
    head_stride = head_stride if heads > 1 else row_stride
    batch_stride = batch_stride if problem.batch > 1 else row_stride
    if problem.packed:
        dims: tuple[int, ...] = (dim, box_rows, heads, 2 * FAR, FAR + 1)
        strides, box = (row_stride, head_stride, row_stride, (1 << 34) - row_stride), (64, box_rows, 1, 1, 1)
    elif whole_panels:
        dims = (64, length, dim // 64, heads, problem.batch)
        strides, box = (row_stride, 128, head_stride, batch_stride), (64, box_rows, -(-columns // 64), 1, 1)
    else:
        dims = (dim, length, 1, heads, problem.batch)
        strides, box = (row_stride, 128, head_stride, batch_stride), (64, box_rows, 1, 1, 1)
    return TensorMapSpec(0, 2, dims, strides, box, 128, element)  # type: ignore[arg-type]


def _folded_map(problem: Problem, fold: int, len_q: int, element: str, dim: int, strides: Strides) -> TensorMapSpec:
    """(columns, heads of a group, queries, groups, batch): a box is 64 rows, each query's heads one after the other."""
    batch_stride, head_stride, row_stride = (2 * s for s in strides)
    dims = (dim, fold, len_q, problem.heads_k, problem.batch)
    wanted = (head_stride, row_stride, fold * head_stride, batch_stride)
    known = tuple(s if n > 1 else 128 for n, s in zip(dims[1:], wanted, strict=True))  # a size of 1 may have any stride
    return TensorMapSpec(0, 2, dims, known, (64, fold, 64 // fold, 1, 1), 128, element)  # type: ignore[arg-type]


def _variant(
    problem: Problem, arch: str, tile: TileSm80 | TileSm90, dim: int, dim_v: int, splits: int, whole_dims: bool
) -> Variant:
    return Variant(
        arch,
        ELEMENTS[problem.dtype],
        tile,
        dim,
        dim_v,
        shape_of(problem.mask),
        problem.packed,
        problem.softcap is not None,
        problem.has_sinks,
        splits > 1,
        1,
        whole_dims,
    )


def _row_blocks(problem: Problem, block_m: int) -> int:
    return -(-problem.len_q // block_m)


def _values(problem: Problem, out_strides: Strides, block_m: int, splits: int, l2_bytes: int) -> dict:
    before, after = kernel_constants(problem.scale, problem.softcap)
    constants = problem.mask.constants
    row_blocks = _row_blocks(problem, block_m)
    values: dict[str, object] = dict.fromkeys(POINTERS, 0)
    for t, strides in zip("qkvo", (*problem.strides, out_strides), strict=True):
        values |= {f"{t}_{axis}": s for axis, s in zip(("batch", "head", "row"), strides, strict=True)}
    rows = problem.total_q if problem.packed else problem.len_q
    return values | {
        "lse_batch": problem.heads * rows,
        "lse_head": rows,
        "scale_before": before,
        "scale_log2": after,
        "batch": problem.batch,
        "heads": problem.heads,
        "group": problem.group,
        "len_q": problem.len_q,
        "len_k": problem.len_k,
        "dim": problem.dim,
        "dim_v": problem.dim_v,
        "row_blocks": row_blocks,
        "section": _section(problem, l2_bytes),
        "splits": splits,
        "tiles": row_blocks * problem.batch * problem.heads * splits,
        "mask": constants + (0,) * (MAX_CONSTANTS - len(constants)),
    }


def _section(problem: Problem, l2_bytes: int) -> int:
    """Heads that run together (pipeline/schedule.cuh). Where all rows cost the same, one head at a time reuses its keys
    best; else as many as the L2 holds, so that the longest rows of all of them can go first. A few in any case, 16 at
    head dim 128: some eight blocks of a large GPU then share the keys of a head at any time, and memory keeps up
    without the
    L2."""
    if problem.mask.lo is not None or problem.mask.hi is None:
        return 1
    width = problem.dim + problem.dim_v
    per_head = max(1, problem.len_k * width * problem.dtype.itemsize)
    return min(problem.batch * problem.heads, max(16, 4096 // width, l2_bytes // per_head) * problem.group)


def variants(arch: str, *, exhaustive: bool = False) -> Iterator[Variant]:
    """The variants that calls produce, for compiling ahead of time and for tests. Masks have infinitely many shapes;
    these are the common ones. `exhaustive` adds every combination of features."""
    sm90 = arch == "sm_90a"
    choices = [(False, True), (False, True), (False, True), (False, True) if sm90 else (False,)]
    combinations = list(itertools.product(*choices))  # of packed, softcap, sinks, split
    flags = combinations if exhaustive else [combinations[0], combinations[-1]]
    for element in ELEMENTS.values():
        for dim, dim_v in DIMS["sm90" if sm90 else "sm80"]:
            for mask in (full, causal, window(1, 1)):
                for packed, softcap, sinks, split in flags:
                    facts = (shape_of(mask), packed, softcap, sinks, split)
                    # Head dims that are rounded up to (dim, dim_v) have a kernel too. On Hopper only panels matter.
                    able = not sm90 or (dim % 64 == 0 and dim_v % 64 == 0 and not packed)
                    for tile in _tiles(arch, dim, dim_v, mask.hi is not None, softcap, split, exhaustive):
                        for whole_dims in [True, False] if able and (exhaustive or not packed) else [able]:
                            yield Variant(arch, element, tile, dim, dim_v, *facts, whole_dims=whole_dims)
                        if (
                            sm90 and not packed and (exhaustive or (dim, dim_v) == (128, 128))
                        ):  # folded heads: one of many
                            yield Variant(arch, element, tile, dim, dim_v, *facts, fold=8, whole_dims=False)


def _tiles(
    arch: str, dim: int, dim_v: int, bounded: bool, softcap: bool, split: bool, exhaustive: bool
) -> list[TileSm80] | list[TileSm90]:
    if arch != "sm_90a":
        return [choose_sm80(dim, dim_v, arch, softcap)]
    if not split:
        return [choose_sm90(dim, dim_v, bounded, softcap=softcap)]
    return split_tiles(dim, dim_v, bounded, softcap)[: None if exhaustive else 1]
