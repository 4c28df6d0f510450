"""Paged keys for backends made of PyTorch operations: where the queries and keys of each sequence are."""

from __future__ import annotations

from typing import NamedTuple

import torch

from strobe.problem import Problem, page_checks
from strobe.problem.arguments import Inputs


class Sequences(NamedTuple):
    """Some sequences of a paged problem. Each field but `number` is what a sequence has of it, int64."""

    number: torch.Tensor  # in the call
    first_q: torch.Tensor  # where its queries begin, among packed ones
    len_q: torch.Tensor
    first: torch.Tensor  # its first key that some query sees, counted in the table
    keys: torch.Tensor  # how many from there on
    position: torch.Tensor  # of that first key
    whole: torch.Tensor  # where the sequence ends: its last key stands before that position

    @staticmethod
    def of(problem: Problem, x: Inputs) -> Sequences:
        """All sequences of the problem. On a CPU the contents of the tables are checked. Elsewhere that would wait for the
        device, so lengths are clamped to what the table has room for."""
        pages = problem.k.pages
        assert pages is not None
        length = x.lengths.long().clamp(min=0, max=problem.k.length)
        if x.indptr is not None:
            length = torch.minimum(length, x.indptr.diff().long() * pages.size)
        number = torch.arange(problem.batch, device=length.device)
        if x.cu_q is None:
            first_q, len_q = number * problem.len_q, torch.full_like(number, problem.len_q)
        else:
            first_q, len_q = x.cu_q[:-1].long(), x.cu_q.diff().long()
        start = torch.zeros_like(length) if x.starts is None else x.starts.long()
        first, end = spans = page_checks.visible_spans(problem.mask, len_q, length, start)
        if x.lengths.is_cpu:
            page_checks.check_contents(x.table, x.indptr, x.lengths, pages.count, pages.size, spans)
        return Sequences(number, first_q, len_q, first, end - first, start + first, start + length)

    def take(self, index: torch.Tensor | slice) -> Sequences:
        return Sequences(*(t[index] for t in self))

    def to(self, device: torch.device | str) -> Sequences:
        return self if self.number.device == torch.device(device) else Sequences(*(t.to(device) for t in self))


def look_up(
    problem: Problem, x: Inputs, sequences: Sequences, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the page of each key, the row in it, and whether the key is there and in use, (sequences, keys) each.
    `keys` are counted from the first that is seen. A key that is not there gets some page that exists."""
    pages = problem.k.pages
    assert pages is not None
    row = sequences.first[:, None] + keys
    entry = row // pages.size
    if x.indptr is None:
        page = x.table[sequences.number[:, None], entry.clamp(max=x.table.shape[1] - 1)]
    else:
        page = x.table[(x.indptr[sequences.number][:, None] + entry).clamp(max=x.table.shape[0] - 1)]
    there = (keys < sequences.keys[:, None]) & (page >= 0) & (page < pages.count)
    return torch.where(there, page, 0).long(), row % pages.size, there


def gather(pool: torch.Tensor, page: torch.Tensor, row: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """(sequences, heads, keys, dim) of a pool (pages, heads, page, dim). What is not there is 0: unused rows of a page may
    hold NaN, and 0 times that would come out."""
    rows = pool.transpose(1, 2)[page, row]
    return rows.masked_fill_(~there[:, :, None, None], 0).transpose(1, 2)
