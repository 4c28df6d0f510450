"""Sets of positions as sorted, disjoint half-open ranges: which tokens a rank holds, which keys it sees, what is sent.

Positions count along one axis on which documents lie one after the other. Whatever is cut out of a sequence (a
contiguous part, two parts of a zig-zag, stripes, pieces of documents) is such a set, so a new way to cut is new data and
no new code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

Spans = tuple[tuple[int, int], ...]  # ((start, stop), …), start < stop <= the next start


def spans(ranges: Iterable[tuple[int, int]]) -> Spans:
    """Return the union of ranges in any order, which may touch, overlap or be empty."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return tuple(joined)


def size(a: Spans) -> int:
    return sum(stop - start for start, stop in a)


def union(a: Spans, b: Spans) -> Spans:
    return spans((*a, *b)) if a and b else a or b


def intersection(a: Spans, b: Spans) -> Spans:
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            common.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def difference(a: Spans, b: Spans) -> Spans:
    """Return the positions of `a` that are not in `b`."""
    if not a or not b:
        return a
    first, last = a[0][0], a[-1][1]
    gaps = zip([first, *(stop for _, stop in b)], [*(start for start, _ in b), last], strict=True)
    return intersection(a, tuple(gap for gap in gaps if gap[0] < gap[1]))


def rows(part: Spans, whole: Spans) -> tuple[tuple[int, int], ...]:
    """Return where the positions of `part` lie in a tensor that holds those of `whole`, in order. Ranges that touch
    there are joined."""
    places: list[tuple[int, int]] = []
    i, offset = 0, 0  # `offset`: rows of whole[:i]
    for start, stop in part:
        while whole[i][1] < stop:
            offset += whole[i][1] - whole[i][0]
            i += 1
        row = offset + start - whole[i][0]
        if places and places[-1][1] == row:
            places[-1] = places[-1][0], row + stop - start
        else:
            places.append((row, row + stop - start))
    return tuple(places)


def take(t: torch.Tensor, part: Spans, whole: Spans, dim: int) -> torch.Tensor:
    """The rows of `t`, which holds the positions of `whole` along `dim`, that belong to `part`. A view where those are
    one range."""
    parts = [t.narrow(dim, start, stop - start) for start, stop in rows(part, whole)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else t.narrow(dim, 0, 0)


def indices(a: Spans, device: torch.device | str = "cpu") -> torch.Tensor:
    """Every position, in order, int64."""
    ranges = [torch.arange(start, stop, device=device) for start, stop in a]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64, device=device)


def order(parts: Sequence[Spans]) -> torch.Tensor | None:
    """Return the permutation that sorts rows, which come part after part, by their positions; None if they are
    sorted."""
    positions = torch.cat([indices(p) for p in parts]) if parts else torch.empty(0, dtype=torch.int64)
    if bool((positions[1:] > positions[:-1]).all()):
        return None
    return positions.argsort()
