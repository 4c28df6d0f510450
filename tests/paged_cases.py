"""Pools of pages in random order, and the dense calls on gathered keys that paged ones have to agree with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

import strobe


@dataclass
class Pool:
    k: torch.Tensor  # (pages, page, heads_k, dim)
    v: torch.Tensor
    table: torch.Tensor  # (sequences, width)
    lengths: torch.Tensor

    @property
    def page(self) -> int:
        return self.k.shape[1]

    def keys(self, i: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of a sequence, (1, length, heads_k, dim)."""
        rows = self.table[i].long()
        k, v = (torch.cat([t[page] for page in rows] or [t[0, :0]]) for t in (self.k, self.v))
        return k[None, first : int(self.lengths[i])], v[None, first : int(self.lengths[i])]


def pool(
    lengths: list[int],
    page: int,
    heads_k: int = 2,
    dim: int = 8,
    dim_v: int = 8,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    spare: int = 3,
) -> Pool:
    """Pages in random order. Rows that no sequence uses, and spare pages, hold NaN; unused entries are no pages."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // page) for n in lengths]
    width, pages = max(counts) + 1, sum(counts) + spare
    order = iter(torch.randperm(pages, generator=generator).tolist())
    table = torch.full((len(lengths), width), -7, dtype=torch.int32)
    k = torch.full((pages, page, heads_k, dim), torch.nan, dtype=dtype)
    v = torch.full((pages, page, heads_k, dim_v), torch.nan, dtype=dtype)
    for i, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        for entry in range(count):
            at = table[i, entry] = next(order)
            rows = min(page, n - entry * page)
            for t in (k, v):
                t[at, :rows] = torch.randn(rows, *t.shape[2:], dtype=torch.float64, generator=generator).to(dtype)
    return Pool(k, v, table, torch.tensor(lengths, dtype=torch.int32))


NO_PAGES = (-1, None, 2**31 - 1, -(2**31))  # None: the number of pages


def without_keys(p: Pool, missing: dict[int, Iterable[int]]) -> Pool:
    """Entries of these keys of each sequence, and so all keys of their pages, are no pages. The first and the last page of
    the pool, which they could be taken for, hold NaN."""
    k, v = (torch.cat([torch.full_like(t[:1], torch.nan), t, torch.full_like(t[:1], torch.nan)]) for t in (p.k, p.v))
    table = torch.where(p.table < 0, p.table, p.table + 1)
    for sequence, keys in missing.items():
        for i, entry in enumerate(sorted({key // p.page for key in keys})):
            value = NO_PAGES[i % len(NO_PAGES)]
            table[sequence, entry] = len(k) if value is None else value
    return Pool(k, v, table, p.lengths)


def queries(counts: list[int], heads: int = 4, dim: int = 8, dtype: torch.dtype = torch.float64) -> Any:
    """Packed ones, and where each sequence's begin."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(sum(counts), heads, dim, dtype=torch.float64, generator=generator).to(dtype)
    return q, torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def dense(q: torch.Tensor, cu_q: torch.Tensor, p: Pool, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by the textbook, sequence by sequence, on contiguous keys: (total, heads, dim), (heads, total)."""
    outs, lses = [], []
    for i, (a, b) in enumerate(zip(cu_q.tolist(), cu_q.tolist()[1:], strict=False)):
        out, lse = strobe.attention(q[None, a:b], *p.keys(i), return_lse=True, backend="reference", **options)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)
