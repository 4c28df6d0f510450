"""Pieces cover the pairs that queries of one set of positions see of keys of another: rectangles, each one attention
call.

A piece is a run of queries and a run of keys of the same document, of which some pair is visible. Rows and keys that see
nothing of each other are cut off. Where the mask hides nothing and scores do not depend on positions, neighbouring pieces
become one larger rectangle, which needs no positions at all. All rows and keys are one piece where the mask would show the
same pairs if it counted them from the start of their tensors: so for a zig-zag shard with itself, under a causal mask.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from strobe.distributed import spans as sets
from strobe.distributed.shard_plan import Run, runs
from strobe.distributed.spans import Spans
from strobe.variants.mask import Mask, Positions

Range = tuple[int, int]


class Piece(NamedTuple):
    rows: Range  # of the tensor that holds the queries
    keys: Range  # of the tensor that holds the keys
    document: int
    at: Positions | None  # None: every query sees every key, wherever they are

    @property
    def local(self) -> Positions:
        """Return where the rows and keys would lie if they were all there are."""
        return _local(self.rows[1] - self.rows[0], self.keys[1] - self.keys[0])


def _local(rows: int, keys: int) -> Positions:
    return Positions(0, rows, 0, keys)


class Axis(NamedTuple):
    """The lengths of the documents along the axis of queries or of keys, and where each begins."""

    lengths: Sequence[int]
    starts: Sequence[int]


def pieces(
    queries: Spans, keys: Spans, axis_q: Axis, axis_k: Axis, mask: Mask, *, positional: bool, block: int | None = None
) -> tuple[Piece, ...]:
    """`positional`: scores or dropout depend on positions. `block`: cut queries at each multiple of it, and join
    nothing, so that a call does not depend on how sequences are cut."""
    by_document: dict[int, list[Run]] = {}
    for run in runs(keys, axis_k.starts):
        by_document.setdefault(run.document, []).append(run)
    pairs: list[tuple[Piece, bool]] = []
    for q in runs(queries, axis_q.starts):
        len_q, len_k = axis_q.lengths[q.document], axis_k.lengths[q.document]
        for part in [q] if block is None else _blocks(q, block):
            pairs += _of_run(part, by_document.get(q.document, ()), len_q, len_k, mask)
    if positional or block is not None:
        return tuple(p for p, _ in pairs)
    joined = _joined(pairs)
    if all(p.at is None for p in joined) or not _counts_alike(queries, keys, axis_q, axis_k, mask):
        return joined
    rows, columns = sets.size(queries), sets.size(keys)
    return (Piece((0, rows), (0, columns), joined[0].document, _local(rows, columns)),)


def _counts_alike(queries: Spans, keys: Spans, axis_q: Axis, axis_k: Axis, mask: Mask) -> bool:
    """Return whether the mask shows the same pairs if rows and keys are counted from the start of their tensors.
    Counted either way, a row sees an interval of keys: its ends are compared."""
    found_q, found_k = runs(queries, axis_q.starts), runs(keys, axis_k.starts)
    if len({run.document for run in (*found_q, *found_k)}) != 1:
        return False
    document = found_q[0].document
    len_q, len_k = axis_q.lengths[document], axis_k.lengths[document]
    rows, columns = sets.size(queries), sets.size(keys)
    at_q, at_k = (sets.indices(x) - a.starts[document] for x, a in ((queries, axis_q), (keys, axis_k)))
    # The first and the last row, which mostly decide; then all.
    for some in (torch.tensor([0, rows - 1], device="cpu"), torch.arange(rows, device="cpu")):
        bounds = mask.bounds(at_q[some], len_q, len_k)
        lo, hi = (torch.searchsorted(at_k, end.contiguous()) for end in bounds)
        lo_local, hi_local = mask.bounds(some, rows, columns)
        same = ((lo == lo_local) & (hi == hi_local)) | ((lo >= hi) & (lo_local >= hi_local))
        if not bool(same.all()):
            return False
    return True


def _blocks(run: Run, block: int) -> list[Run]:
    ends = [run.start, *range((run.start // block + 1) * block, run.stop, block), run.stop]
    return [Run(run.document, a, b, run.row + a - run.start) for a, b in zip(ends, ends[1:], strict=False)]


def _of_run(q: Run, keys: Sequence[Run], len_q: int, len_k: int, mask: Mask) -> Iterator[tuple[Piece, bool]]:
    """Yield, for each run of keys that a run of queries sees, the smallest rectangle that holds every visible pair, and
    whether all of its pairs are visible."""

    def lo(row: int) -> int:
        return mask.bounds(row, len_q, len_k)[0]

    def hi(row: int) -> int:
        return mask.bounds(row, len_q, len_k)[1]

    rows = range(q.start, q.stop)
    any_lo, any_hi, all_lo, all_hi = lo(q.start), hi(q.stop - 1), lo(q.stop - 1), hi(q.start)
    for k in keys:
        if k.stop <= any_lo or any_hi <= k.start:
            continue
        start, stop, key, end = q.start, q.stop, k.start, k.stop
        whole = all_lo <= key and end <= all_hi
        if not whole:
            first = bisect.bisect_right(rows, key, key=hi)  # the first row that sees beyond the first key
            last = bisect.bisect_left(rows, end, lo=first, key=lo)  # the first that begins to see behind the last key
            if first == last:
                continue
            start, stop = rows[first], rows[last - 1] + 1
            key, end = max(key, lo(start)), min(end, hi(stop - 1))
            whole = lo(stop - 1) <= key and end <= hi(start)
        if key < end:
            row, keys_at = q.row + start - q.start, k.row + key - k.start
            at = Positions(start, len_q, key, len_k)
            yield Piece((row, row + stop - start), (keys_at, keys_at + end - key), q.document, at), whole


def _joined(pairs: Sequence[tuple[Piece, bool]]) -> tuple[Piece, ...]:
    """Whole pieces lose their positions; those that touch along the keys, then those that touch along the rows, become
    one. Pieces of a document are neighbours in the list."""
    wide: list[Piece] = []
    for p in (p._replace(at=None) if whole else p for p, whole in pairs):
        before = wide[-1] if wide else None
        if before and _alike(before, p) and before.rows == p.rows and before.keys[1] == p.keys[0]:
            wide[-1] = p._replace(keys=(before.keys[0], p.keys[1]))
        else:
            wide.append(p)
    tall: list[Piece] = []
    for p in wide:
        i = len(tall) - 1
        while i >= 0 and tall[i].document == p.document and tall[i].rows[1] >= p.rows[0]:
            if _alike(tall[i], p) and tall[i].keys == p.keys and tall[i].rows[1] == p.rows[0]:
                tall[i] = p._replace(rows=(tall[i].rows[0], p.rows[1]))
                break
            i -= 1
        else:
            tall.append(p)
    return tuple(tall)


def _alike(a: Piece, b: Piece) -> bool:
    return a.at is None and b.at is None and a.document == b.document


def rounds(parts: Sequence[Piece]) -> tuple[tuple[Piece, ...], ...]:
    """The pieces in groups with at most one of each document, in the order of documents: what one varlen call can do.
    Sequence i of the call is document i, as dropout and the tensors of a score count them."""
    groups: list[dict[int, Piece]] = []
    for p in parts:
        group = next((g for g in groups if p.document not in g), None)
        if group is None:
            groups.append(group := {})
        group[p.document] = p
    return tuple(tuple(g[d] for d in sorted(g)) for g in groups)
