"""Slabs of paged keys: sequences with as many queries and about as many keys are worked on together, and each tile of keys
is looked up in the table. Keys count from the first that some query of the sequence sees.

Where lengths may be read back, a slab visits only the tiles that it needs. While a CUDA graph is captured nothing is
read: one slab has all sequences and every tile that the table has room for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from strobe.backends.pages import Sequences, gather, look_up
from strobe.backends.tiled.slab import Slab, choose_blocks
from strobe.problem import Problem
from strobe.problem.arguments import Inputs
from strobe.problem.page_checks import with_numbers_on
from strobe.variants.expression import WORKING_DTYPE
from strobe.variants.mask import Positions


@dataclass
class PagedSlab(Slab):
    """`batch` counts the sequences of the slab. While a graph is captured there are also rows after the last query of a
    sequence; they are not stored."""

    sequences: Sequences = field(kw_only=True)
    read: Sequences | None = field(kw_only=True)  # the same on the host; None: they must not be read
    most_keys: int = field(kw_only=True)
    packed: bool = field(kw_only=True)  # the queries of the call

    def __post_init__(self) -> None:
        super().__post_init__()
        self._looked_up: Any = None
        self.bounds = self._bounds(self.sequences)  # (b, len_q) each
        self._read_bounds = None
        if self.read is not None:
            self._read_bounds = self.bounds if self.bounds[0].is_cpu else self._bounds(self.read)

    def _bounds(self, s: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        """The interval mask of each row: from, to."""
        rows = torch.arange(self.len_q, device=s.number.device).expand(len(self.batch), -1)
        at = Positions(0, s.len_q[:, None], s.position[:, None], s.whole[:, None])  # type: ignore[arg-type]
        return with_numbers_on(self.problem.mask, rows.device).bounds(rows, self.len_q, self.most_keys, at)

    def of_keys(self, t: torch.Tensor) -> torch.Tensor:
        return t  # the pool, of which `keys_of` looks up a tile

    def keys_of(self, t: torch.Tensor, keys: range) -> torch.Tensor:
        rows = gather(t, *self._places(keys))[:, self.heads.start : self.heads.stop]
        return rows.to(self.operand).flatten(0, 1)

    def _places(self, keys: range) -> Any:
        """Look up the places of k and of v, once for the same keys."""
        if self._looked_up is None or self._looked_up[0] != keys:
            index = torch.arange(keys.start, keys.stop, device=self.problem.device)
            self._looked_up = keys, look_up(self.problem, self.inputs, self.sequences, index)
        return self._looked_up[1]

    def environment(self, rows: range, keys: range) -> dict[Any, Any]:
        if self.problem.score.pointwise:
            return {WORKING_DTYPE: self.accumulate}
        s, wide = self.sequences, (slice(None), *(None,) * 4)

        def count(r: range) -> torch.Tensor:
            return torch.arange(r.start, r.stop, device=self.problem.device)

        env: dict[Any, Any] = {"len_q": s.len_q[wide], "len_k": s.whole[wide]}
        env |= {"q": count(rows)[:, None], "k": s.position[wide] + count(keys)}
        env["b"] = s.number[wide]
        env["h"] = count(self.query_heads).unflatten(0, (len(self.heads), self.group))[..., None, None]
        return env | {WORKING_DTYPE: self.accumulate} | dict(enumerate(self.inputs.score_tensors))

    def _within_bounds(self, s: torch.Tensor, rows: range, keys: range) -> torch.Tensor:
        lo, hi = (bound[:, rows.start : rows.stop, None] for bound in self.bounds)
        index = torch.arange(keys.start, keys.stop, device=s.device)
        visible = (lo <= index) & (index < hi) & self._places(keys)[2][:, None]
        return self._hide(s, visible[:, None, None], rows)

    def key_tiles(self, rows: range, block_k: int) -> Iterator[tuple[range, bool]]:
        if self.read is None or self._read_bounds is None:
            for start in range(0, self.most_keys, block_k):
                yield range(start, min(start + block_k, self.most_keys)), False
            return
        lo, hi = self._read_bounds
        first, end = int(lo[:, rows.start].min()), int(hi[:, rows.stop - 1].max())
        all_from, all_to = int(lo[:, rows.stop - 1].max()), int(hi[:, rows.start].min())
        # Entries were checked on a CPU alone; elsewhere one may be missing.
        certain = self.problem.device.type == "cpu"
        for start in range(first - first % block_k, end, block_k):
            keys = range(max(start, first), min(start + block_k, end))
            yield keys, certain and all_from <= keys.start and keys.stop <= all_to

    # ---- rows
    # ------------------------------------------------------------------------------------------------------------

    def put(self, t: torch.Tensor, part: torch.Tensor) -> None:
        """Write the results of the slab, (b, heads, len_q, …), to those of the call, (batch, heads, len_q, …)."""
        s = self.sequences
        if not self.packed:
            t[s.number] = part
        elif self.read is not None:
            t[0][:, _rows_of(s, self.len_q)] = part.transpose(0, 1)
        else:  # every row of the call takes its own: rows that are there twice would race
            row = torch.arange(t.shape[2], device=t.device)
            ends = s.first_q + s.len_q
            owner = torch.bucketize(row, ends, right=True)
            inside = (owner < len(ends)).view(-1, *(1,) * (t.dim() - 2))
            owner = owner.clamp(max=len(ends) - 1)
            values = part[owner, :, (row - s.first_q[owner]).clamp(0, self.len_q - 1)]
            values = torch.where(inside, values, 0 if t.dim() == 4 else -torch.inf)
            t[0].copy_(values.transpose(0, 1))


def _rows_of(s: Sequences, len_q: int) -> torch.Tensor:
    return s.first_q[:, None] + torch.arange(len_q, device=s.number.device)


def paged_slabs(problem: Problem, inputs: Inputs) -> Iterator[tuple[PagedSlab, int, int]]:
    """Yield slabs with the sizes of their tiles, query positions and keys. Every sequence that has queries is in
    one."""
    every, pages = Sequences.of(problem, inputs), problem.k.pages
    assert pages is not None
    if problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        yield make_slab(problem, inputs, every, None, problem.len_q, problem.k.length)
        return
    read = every.to("cpu")
    kinds = sorted(zip(read.len_q.tolist(), read.keys.tolist(), range(problem.batch), strict=True))
    blocks = choose_blocks(problem)
    start = 0
    while start < len(kinds):
        len_q, least, _ = kinds[start]
        row = problem.heads * min(blocks.q, max(1, len_q)) * max(blocks.k, problem.dim + problem.dim_v)
        room = max(1, blocks.scores // row)
        most, end = max(2 * least, least + blocks.k // 2), start + 1
        while end < min(len(kinds), start + room) and kinds[end][0] == len_q and kinds[end][1] <= most:
            end += 1
        if len_q:
            index = torch.tensor([number for _, _, number in kinds[start:end]])
            part = every.take(index.to(problem.device))
            yield make_slab(problem, inputs, part, read.take(index), len_q, kinds[end - 1][1])
        start = end


def make_slab(
    problem: Problem, inputs: Inputs, s: Sequences, read: Sequences | None, len_q: int, keys: int
) -> tuple[PagedSlab, int, int]:
    """Return a slab of the sequences `s`, which have `len_q` queries and at most `keys` keys that they see, and the
    sizes of its tiles. `read`: the same sequences on the host, or None if they must not be read."""
    blocks = choose_blocks(problem)
    if not problem.q.varlen:
        q = inputs.q[s.number]
    else:
        rows = _rows_of(s, len_q).clamp(max=inputs.q.shape[2] - 1)
        q = inputs.q[0][:, rows].transpose(0, 1)
    dense = replace(problem, batch=len(s.number), q=replace(problem.q, length=len_q, varlen=False))
    slab = PagedSlab(
        problem=dense, inputs=inputs._replace(q=q), batch=range(len(s.number)), heads=range(problem.heads_k),
        rows=slice(0, len_q), keys=slice(0, keys), sequences=s, read=read, most_keys=keys,
        packed=problem.q.varlen,
    )  # fmt: skip
    return slab, min(blocks.q, len_q), min(blocks.k, max(1, keys))
