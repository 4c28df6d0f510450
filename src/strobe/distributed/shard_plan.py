"""`ShardPlan`: which rank holds which positions of a sequence, or of several documents, and what each rank has to see.

Pure data: it communicates nothing and touches no tensor but those that `shard` is given.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import numbers
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from strobe.distributed import spans as sets
from strobe.distributed.shard_strategies import STRATEGIES, STRIPE
from strobe.distributed.spans import Spans
from strobe.variants.mask import Mask, full, parse_mask


class Run(NamedTuple):
    """Neighbouring positions of one document: from `start` to `stop` in it, the first of them in row `row` of a shard."""

    document: int
    start: int
    stop: int
    row: int


def runs(shard: Spans, starts: Sequence[int]) -> list[Run]:
    """A shard document by document. `starts`: where documents begin, and where the last one ends."""
    pieces, row = [], 0
    for start, stop in shard:
        document = bisect.bisect_right(starts, start) - 1
        while start < stop:
            end = min(stop, starts[document + 1])
            if start < end:
                pieces.append(Run(document, start - starts[document], end - starts[document], row))
                row += end - start
            start, document = end, document + 1
    return pieces


class ShardPlan:
    """A plan says how `lengths` (one length, or those of documents packed one after the other) are cut among `ranks`.

    strategy  "contiguous", "zigzag" (an early and a late part each: equal work under a causal mask), "documents" (a
              zig-zag within each document) or "striped" (blocks dealt out in turn)
    block     cuts are at multiples of this many positions; 1 by default, for "striped" 128
    mask      what the work, the bytes and the balance are counted for, and the default of `attention`. None: no mask

    Any length is cut for any number of ranks, without padding. Rows of a shard are in the order of their positions."""

    def __init__(
        self,
        lengths: int | Sequence[int] | torch.Tensor,
        *,
        ranks: int,
        mask: Mask | None = None,
        strategy: str = "zigzag",
        block: int | None = None,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(map(repr, STRATEGIES))}, got {strategy!r}")
        documents = _lengths(lengths)
        block = (STRIPE if strategy == "striped" else 1) if block is None else _count("block", block, 1)
        shards = tuple(STRATEGIES[strategy](documents, _count("ranks", ranks, 1), block))
        self._set(documents, shards, strategy, block, mask)

    def _set(
        self, lengths: tuple[int, ...], shards: tuple[Spans, ...], strategy: str, block: int, mask: Mask | None
    ) -> None:
        if mask is None:
            mask = full
        if not isinstance(mask, Mask) or mask.rest is not None:
            raise TypeError(f"mask must be a strobe mask (strobe.causal, strobe.window(…), …) or None, got {mask!r}")
        self.lengths, self.shards, self.strategy, self.block, self.mask = lengths, shards, strategy, block, mask
        self.ranks = len(shards)
        self.starts = (0, *itertools.accumulate(lengths))  # of the documents, and the end of the last one
        self.total = self.starts[-1]
        self.text = _text(lengths, shards, strategy, block, mask)
        self.prepared: dict[Any, Any] = {}  # what others derive from the plan, each under a key of its own

    @staticmethod
    def of_shards(
        lengths: int | Sequence[int] | torch.Tensor,
        shards: Sequence[Sequence[tuple[int, int]]],
        *,
        mask: Mask | None = None,
        block: int = 1,
    ) -> ShardPlan:
        """A cut of one's own: for each rank the (start, stop) ranges that it holds."""
        documents, held = _lengths(lengths), tuple(sets.spans(ranges) for ranges in shards)
        everything = sets.spans(r for shard in held for r in shard)
        total = sum(documents)
        if everything != sets.spans([(0, total)]) or sum(map(sets.size, held)) != total:
            raise ValueError(f"shards must hold each of the positions 0 to {total - 1} once, got {list(shards)}")
        plan = ShardPlan.__new__(ShardPlan)
        plan._set(documents, held, "custom", _count("block", block, 1), mask)
        return plan

    def with_mask(self, mask: Mask | None) -> ShardPlan:
        """Return the same cut for another mask; None: for this one."""
        if mask is None or mask == self.mask:
            return self
        return self._derived(("mask", mask), self.shards, self.strategy, mask)

    def joined(self, neighbours: int) -> ShardPlan:
        """The plan of fewer ranks, each of which holds what so many neighbours hold here."""
        groups = [self.shards[r : r + neighbours] for r in range(0, self.ranks, neighbours)]
        shards = tuple(sets.spans(r for shard in group for r in shard) for group in groups)
        return self._derived(("joined", neighbours), shards, "custom", self.mask)

    def _derived(self, key: Any, shards: tuple[Spans, ...], strategy: str, mask: Mask) -> ShardPlan:
        if key not in self.prepared:
            plan = ShardPlan.__new__(ShardPlan)
            plan._set(self.lengths, shards, strategy, self.block, mask)
            self.prepared[key] = plan
        return self.prepared[key]

    def __repr__(self) -> str:
        lengths = self.lengths[0] if len(self.lengths) == 1 else list(self.lengths)
        return (
            f"ShardPlan({lengths}, ranks={self.ranks}, mask={self.mask!r}, strategy={self.strategy!r}, "
            f"block={self.block})"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardPlan) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    # ---- who holds what -------------------------------------------------------------------------------------------------

    def rows(self, rank: int) -> int:
        """Return how many positions a rank holds."""
        return sets.size(self.shards[self._rank(rank)])

    @functools.cached_property
    def largest(self) -> int:
        """Rows of the largest shard."""
        return max(map(sets.size, self.shards))

    def runs(self, rank: int) -> list[Run]:
        return runs(self.shards[self._rank(rank)], self.starts)

    def index(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """The positions of a rank on the axis of all documents, int64."""
        return sets.indices(self.shards[self._rank(rank)], device)

    def offsets(self, device: torch.device) -> torch.Tensor:
        """Where documents begin, and where the last one ends, as `cu_q` and `cu_k` have it; made once for each device."""
        if (key := ("offsets", device)) not in self.prepared:
            self.prepared[key] = torch.tensor(self.starts, dtype=torch.int32).to(device)
        return self.prepared[key]

    def position_ids(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """The positions of a rank, each counted from the beginning of its document: what a rotary embedding needs."""
        ranges = [torch.arange(run.start, run.stop, device=device) for run in self.runs(rank)]
        return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64, device=device)

    def _rank(self, rank: int) -> int:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank must be at least 0 and less than {self.ranks}, got {rank}")
        return rank

    # ---- who sees what --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def seen(self) -> tuple[Spans, ...]:
        """The keys, for each rank, that some query of it sees. Neither end of a mask ever moves left, so the first row
        of a run has the lowest bound and the last row the highest."""
        spans = []
        for rank in range(self.ranks):
            ranges = []
            for run in self.runs(rank):
                begin, length = self.starts[run.document], self.lengths[run.document]
                lo, _ = self.mask.bounds(run.start, length, length)
                _, hi = self.mask.bounds(run.stop - 1, length, length)
                ranges.append((begin + lo, begin + hi))
            spans.append(sets.spans(ranges))
        return tuple(spans)

    @functools.cached_property
    def pairs(self) -> tuple[int, ...]:
        """The number, for each rank, of visible (query, key) pairs of one head: its exact work."""
        ends: dict[int, list[tuple[int, int, int]]] = {}  # by the length of the document: rank, start, stop
        for rank in range(self.ranks):
            for run in self.runs(rank):
                ends.setdefault(self.lengths[run.document], []).append((rank, run.start, run.stop))
        counts = [0] * self.ranks
        for length, parts in ends.items():
            lo, hi = self.mask.bounds(torch.arange(length), length, length)
            before = torch.zeros(length + 1, dtype=torch.int64)
            torch.cumsum((hi - lo).clamp(min=0), 0, out=before[1:])
            _, start, stop = (torch.tensor(column) for column in zip(*parts, strict=True))
            for (rank, *_), count in zip(parts, (before[stop] - before[start]).tolist(), strict=True):
                counts[rank] += count
        return tuple(counts)

    @property
    def balance(self) -> float:
        """The average work of a rank by the largest: 1 is perfect, and the rest of the time ranks wait."""
        return sum(self.pairs) / (self.ranks * max(self.pairs)) if max(self.pairs) else 1.0


def shard(plan: ShardPlan, *tensors: torch.Tensor, rank: int, dim: int = 1) -> tuple[torch.Tensor, ...]:
    """The part of each tensor that a rank holds. `dim` is the axis of positions; tensors that lack it (1-D position ids,
    say) are cut along their last axis. Labels must be shifted before they are cut."""
    mine = plan.shards[plan._rank(rank)]
    shards = []
    for t in tensors:
        axis = axis_of(t, dim)
        if t.shape[axis] != plan.total:
            raise ValueError(
                f"a tensor has shape {tuple(t.shape)}; axis {axis} must have the {plan.total} positions of the plan"
            )
        shards.append(sets.take(t, mine, sets.spans([(0, plan.total)]), axis))
    return tuple(shards)


def axis_of(t: torch.Tensor, dim: int) -> int:
    """The axis of positions of a tensor: `dim`, or the last one where it has fewer."""
    if not t.dim() or dim < -t.dim():
        raise ValueError(f"dim is {dim}, but a tensor has shape {tuple(t.shape)}")
    return min(dim, t.dim() - 1) if dim >= 0 else dim + t.dim()


def join(plan: ShardPlan, shards: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
    """The whole, from the shards of all ranks in their order: the inverse of `shard`, in one process."""
    if len(shards) != plan.ranks:
        raise ValueError(f"shards has {len(shards)} tensors, the plan {plan.ranks} ranks")
    dim = axis_of(shards[0], dim)
    for rank, t in enumerate(shards):
        if t.shape[dim] != plan.rows(rank):
            raise ValueError(
                f"shard {rank} has shape {tuple(t.shape)}; axis {dim} must have {plan.rows(rank)} positions"
            )
    whole = torch.cat(list(shards), dim)
    order = plan.prepared.get("order")
    if order is None:
        order = plan.prepared["order"] = (sets.order(plan.shards),)
    return whole if order[0] is None else whole.index_select(dim, order[0].to(whole.device))


_MOST_RANKS = 1 << 16  # that a text can ask for: a plan holds something for each
_TEXT = re.compile(r"[0-9,]*\|[a-z]+\|[0-9]{1,18}\|[0-9]{1,18}\|[0-9,/-]*\|.*", re.DOTALL)


@functools.lru_cache(maxsize=64)
def parse_plan(text: str) -> ShardPlan:
    """The plan that has this `text`, which may come from anywhere."""
    if not _TEXT.fullmatch(text):
        raise ValueError(f"{text!r:.80} is not the text of a plan: lengths|strategy|ranks|block|shards|mask")
    lengths, strategy, ranks, block, held, mask = text.split("|", 5)
    documents = [int(n) for n in lengths.split(",") if n]
    if int(ranks) > _MOST_RANKS:
        raise ValueError(f"a plan has {ranks} ranks; a text may ask for {_MOST_RANKS} at most")
    if strategy != "custom":
        return ShardPlan(documents, ranks=int(ranks), strategy=strategy, block=int(block), mask=parse_mask(mask))
    shards = [[_range(r) for r in shard.split(",") if r] for shard in held.split("/")]
    return ShardPlan.of_shards(documents, shards, block=int(block), mask=parse_mask(mask))


def _range(text: str) -> tuple[int, int]:
    start, stop = text.split("-")
    return int(start), int(stop)


def _text(lengths: tuple[int, ...], shards: tuple[Spans, ...], strategy: str, block: int, mask: Mask) -> str:
    """Return a plan as text, which travels where objects cannot."""
    held = "/".join(",".join(f"{a}-{b}" for a, b in shard) for shard in shards) if strategy == "custom" else ""
    return f"{','.join(map(str, lengths))}|{strategy}|{len(shards)}|{block}|{held}|{mask.text()}"


def _lengths(lengths: Any) -> tuple[int, ...]:
    if isinstance(lengths, torch.Tensor):
        lengths = lengths.tolist()
    if isinstance(lengths, numbers.Integral):
        return (_count("lengths", lengths, 0),)
    sizes = tuple(_count("lengths", n, 0) for n in lengths)
    if not sizes:
        raise ValueError("lengths must name at least one document, got none")
    return sizes


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)
