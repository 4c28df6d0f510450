"""A strategy cuts sequences among ranks: it gives each rank a set of positions.

Each takes the lengths of the documents, the number of ranks and a block: cuts are at multiples of the block, counted from
the beginning of what is cut. Lengths need not be multiples of anything; shards may be unequal or empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from strobe.distributed.spans import Spans, spans

Cut = Callable[[Sequence[int], int, int], list[Spans]]


def _pieces(length: int, count: int, block: int) -> list[tuple[int, int]]:
    """`count` neighbouring ranges, as equal as whole blocks allow."""
    blocks = -(-length // block)
    ends = [min(length, block * (i * blocks // count)) for i in range(count + 1)]
    return list(itertools.pairwise(ends))


def contiguous(lengths: Sequence[int], ranks: int, block: int) -> list[Spans]:
    """One part each, in the order of the ranks. Under a causal mask the last rank has nearly twice the average work."""
    return [spans([piece]) for piece in _pieces(sum(lengths), ranks, block)]


def zigzag(lengths: Sequence[int], ranks: int, block: int) -> list[Spans]:
    """Give rank r the parts r and 2P - 1 - r of 2P: an early one, which sees little, and a late one."""
    parts = _pieces(sum(lengths), 2 * ranks, block)
    return [spans([parts[r], parts[2 * ranks - 1 - r]]) for r in range(ranks)]


def documents(lengths: Sequence[int], ranks: int, block: int) -> list[Spans]:
    """A zig-zag within each document. Blocks that do not come out even go to the ranks that hold the fewest tokens."""
    held: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    start = 0
    for length in lengths:
        even, over = divmod(-(-length // block), 2 * ranks)
        sizes = [even] * (2 * ranks)
        # The late part of a rank first: a short document then lies with few ranks, in order.
        poorest = sorted(range(ranks), key=lambda r: tokens[r])
        for part in [2 * ranks - 1 - r for r in poorest[:over]] + poorest[: max(0, over - ranks)]:
            sizes[part] += 1
        end = 0
        for part, blocks in enumerate(sizes):
            begin, end = end, min(length, end + block * blocks)
            rank = min(part, 2 * ranks - 1 - part)
            held[rank].append((start + begin, start + end))
            tokens[rank] += end - begin
        start += length
    return [spans(ranges) for ranges in held]


def striped(lengths: Sequence[int], ranks: int, block: int) -> list[Spans]:
    """Blocks are dealt out like cards. A sequence that grows keeps the places of what it has, as a cache must."""
    total = sum(lengths)
    starts = (range(r * block, total, ranks * block) for r in range(ranks))
    return [spans((s, min(total, s + block)) for s in mine) for mine in starts]


STRATEGIES: dict[str, Cut] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "documents": documents,
    "striped": striped,
}
STRIPE = 128  # positions of a stripe, unless the caller says otherwise
