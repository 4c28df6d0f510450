"""`Blocks`, one of the four parts of a kernel: which tiles there are, in which order blocks of the GPU take them, and
which blocks of keys (or of queries) each of them visits.

The C++ half is pipeline/schedule.cuh and blocks.cuh. Which blocks are visited follows from the mask there; here is what the
host decides: how many tiles, which heads run together, and into how many splits keys are divided.
"""

from __future__ import annotations

from strobe.cuda.parts.params import COUNTERS, Field
from strobe.problem import Problem

# ---- tiles of queries ------------------------------------------------------------------------------------------------

QUERY_TILE_FIELDS = [Field(n, "int") for n in ("row_blocks", "section", "splits", "tiles")]


def row_blocks(problem: Problem, block_m: int) -> int:
    return -(-problem.len_q // block_m)


def query_tiles(problem: Problem, block_m: int, l2_bytes: int, splits: int = 1) -> dict[str, int]:
    """The values of QUERY_TILE_FIELDS."""
    blocks = row_blocks(problem, block_m)
    tiles = blocks * problem.batch * problem.heads * splits
    return {"row_blocks": blocks, "section": section(problem, l2_bytes), "splits": splits, "tiles": tiles}


def costs_differ(problem: Problem) -> bool:
    """Return whether tiles differ in cost: under a right bound alone later rows see more keys, and earlier keys are
    seen by more rows."""
    return problem.mask.lo is None and problem.mask.hi is not None


def section(problem: Problem, l2_bytes: int) -> int:
    """Heads that run together (pipeline/schedule.cuh). Where all rows cost the same, one head at a time reuses its keys
    best; else about as many as half of the L2 holds, so that the longest rows of all of them can go first. A few in any
    case, 16 at head dim 128: some eight blocks of a large GPU then share the keys of a head at any time, and memory keeps
    up without the L2. Sections are alike: a small one at the end would leave multiprocessors idle."""
    if not costs_differ(problem):
        return 1
    width = problem.dim + problem.dim_v
    per_head = max(1, problem.len_k * width * problem.dtype.itemsize)
    heads, wanted = problem.batch * problem.heads_k, max(16, 4096 // width, l2_bytes // 2 // per_head)
    return -(-heads // max(1, round(heads / wanted))) * problem.group


# Where splits are merged, every row of the tile is written and read once more. Tried out on an H200, but not swept as
# tiles are:
LEAST_SPLIT = 2  # key blocks; twice that where rows are more than a few
FEW_ROWS = 16
FEWEST_SPLITS = 3  # with too few keys for this many splits, nothing is split


def may_split(problem: Problem) -> bool:
    """No kernel with dropout, or that rounds a merged state, splits."""
    return not problem.dropout and (problem.state is None or problem.state.out is None)


def splits_of_tiles(problem: Problem, block_m: int, sms: int, block_n: int) -> int:
    """Splits of a tile's keys, of LEAST_SPLIT blocks of `block_n` or more, so that few tiles keep all multiprocessors
    busy: decode, or chunked prefill. Pages have none: their work is a list (`plan_work.py`)."""
    tiles = row_blocks(problem, block_m) * problem.batch * problem.heads
    least = LEAST_SPLIT * block_n * (1 if problem.len_q <= FEW_ROWS else 2)
    few = problem.len_k < FEWEST_SPLITS * least
    if few or tiles * max(1, block_m // 64) >= COUNTERS or problem.k.pages is not None or not may_split(problem):
        return 1
    return max(1, min(sms // max(1, tiles), problem.len_k // least))


# ---- tiles of keys ---------------------------------------------------------------------------------------------------

KEY_TILE_FIELDS = [Field(n, "int") for n in ("key_blocks", "section", "sections", "heads_k", "group_parts")]


def key_tiles(problem: Problem, block_n: int, sms: int, *, alone: bool = False) -> dict[str, int]:
    """The values of KEY_TILE_FIELDS. `problem` has a key head for each part of a group (`in_parts`).

    Key heads of a section run together; the last section takes the rest. One head at a time where all blocks of keys cost
    the same, or if they run `alone`. Under a right bound the first block of a head has the most queries, so several heads
    begin together; as few as occupy half of the GPU, because blocks that share queries and sums of dQ meet in the L2. The
    last section is twice as large, so that it ends with short blocks."""
    key_blocks, heads = -(-problem.len_k // block_n), problem.batch * problem.heads_k
    uneven = costs_differ(problem) and not alone
    together = max(4, sms // (2 * max(1, key_blocks))) if uneven else 1
    return {
        "key_blocks": key_blocks,
        "section": together,
        "sections": max(1, heads // together - 1) if uneven else heads,
        "heads_k": problem.heads_k,
        "group_parts": problem.group_parts,
    }
