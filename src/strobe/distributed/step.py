"""One step: the queries of a rank with some keys, forward and backward, as calls of the core with positions.

A step is a list of pieces. Dense tensors, (batch, rows, heads, dim), take one call for each piece, on views. Packed
documents, (rows, heads, dim), take one varlen call for each round of pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from strobe.call import piece
from strobe.call.bound_call import lookup
from strobe.distributed import spans as sets
from strobe.distributed.pieces import Piece, Range, rounds
from strobe.merging import merge_
from strobe.problem.arguments import Arguments
from strobe.problem.checks import lse_dtype
from strobe.variants.mask import Mask, Positions


class Keys(NamedTuple):
    k: torch.Tensor  # (…, keys, heads_k, dim)
    v: torch.Tensor  # (…, keys, heads_k, dim_v)


def rows_of(t: torch.Tensor, rows: Range) -> torch.Tensor:
    """Return these rows of a tensor (…, rows, heads, dim)."""
    return t.narrow(-3, rows[0], rows[1] - rows[0])


class State:
    """The output and the LSE of all rows over the keys seen so far, in fp32 (fp64 for fp64). The output of a row
    without a result is undefined: the first result is written there, later ones are merged into it. Rows whose last
    result was rounded where it was computed are finished: their output is in the dtype of q, in a tensor of its own."""

    def __init__(self, q: torch.Tensor, dim_v: int) -> None:
        self._everything = 0, q.shape[-3]
        self._untouched = sets.spans([self._everything])  # rows without a result
        wide = lse_dtype(q.dtype)
        self._room = q, (*q.shape[:-1], dim_v), wide  # from which `_written_to` makes `_out`
        self._out: torch.Tensor | None = None
        self._rounded: torch.Tensor | None = None
        self._finished: sets.Spans = ()  # rows whose output is in `_rounded`
        self._lse = q.new_full((*q.shape[:-3], q.shape[-2], q.shape[-3]), -torch.inf, dtype=wide)

    def add(self, rows: Range, out: torch.Tensor, lse: torch.Tensor) -> None:
        """A result of these rows over other keys. The state may keep the tensors, and write into them."""
        if self._out is None and rows == self._everything:
            self._out, self._lse = out, lse.contiguous()
        else:
            total, total_lse = self._rows(self._written_to(), self._lse, rows)
            for part in sets.intersection((rows,), self._untouched):
                at = part[0] - rows[0], part[1] - rows[0]
                for to, new in zip(self._rows(total, total_lse, at), self._rows(out, lse, at), strict=True):
                    to.copy_(new)
            for part in sets.difference((rows,), self._untouched):
                at = part[0] - rows[0], part[1] - rows[0]
                merge_(*self._rows(total, total_lse, at), *self._rows(out, lse, at))
        self._untouched = sets.difference(self._untouched, (rows,))

    def is_empty(self, rows: Range) -> bool:
        """Return whether none of these rows has a result."""
        return not sets.difference((rows,), self._untouched)

    def rows_to_write_to(self, rows: Range) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of these rows, for whoever writes their first result there."""
        self._untouched = sets.difference(self._untouched, (rows,))
        return self._rows(self._written_to(), self._lse, rows)

    def rows_to_merge_into(self, rows: Range) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of these rows, for whoever merges a result into them. Where the LSE is -inf, out is finite."""
        for part in sets.intersection((rows,), self._untouched):
            rows_of(self._written_to(), part).zero_()
        return self.rows_to_write_to(rows)

    def rows_to_finish(self, rows: Range) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of these rows, out in the dtype of q, for whoever rounds their last result."""
        self._untouched = sets.difference(self._untouched, (rows,))
        self._finished = sets.union(self._finished, (rows,))
        return self._rows(self._final(), self._lse, rows)

    def rounded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse) after the last result, out in the dtype of q and contiguous."""
        if not self._finished:
            out, lse = self.results()
            return out.to(self._room[0].dtype).contiguous(), lse
        out = self._final()
        for rows in self._untouched:
            rows_of(out, rows).zero_()
        for rows in sets.difference((self._everything,), sets.union(self._finished, self._untouched)):
            rows_of(out, rows).copy_(rows_of(self._written_to(), rows))
        return out, self._lse

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse) after the last result, where no row is finished. Rows that have no result saw no key."""
        out = self._written_to()
        for rows in self._untouched:
            rows_of(out, rows).zero_()
        return out, self._lse

    def _written_to(self) -> torch.Tensor:
        if self._out is None:
            like, shape, dtype = self._room
            self._out = like.new_empty(shape, dtype=dtype)
        return self._out

    def _final(self) -> torch.Tensor:
        if self._rounded is None:
            like, shape, _ = self._room
            self._rounded = like.new_empty(shape, dtype=like.dtype)
        return self._rounded

    @staticmethod
    def _rows(out: torch.Tensor, lse: torch.Tensor, rows: Range) -> tuple[torch.Tensor, torch.Tensor]:
        return rows_of(out, rows), lse[..., rows[0] : rows[1]]


@dataclass
class Step:
    """The pieces of a step, ready to run: what depends on them alone is made once for each device."""

    pieces: tuple[Piece, ...]
    mask: Mask
    documents: int  # 0: dense
    apart: bool = False  # never two documents in one call
    _groups: dict[tuple[torch.device, int], list[_Group]] = field(default_factory=dict)  # by device and batch

    def forward(
        self, template: Arguments, q: torch.Tensor, keys: Keys, state: State, last: Sequence[bool] = ()
    ) -> None:
        """`template`: what the caller asked for, without tensors. `last`: of each call whether no later one, of this step
        or another, has any of its rows (`last_calls`); nothing: not known."""
        groups = self._prepared(q)
        for group, is_last in zip(groups, last or [False] * len(groups), strict=True):
            a = group.arguments(template, q, keys)
            if len(group.places) == 1 and (bound := lookup(a)).merges:
                ((rows, _),) = group.places
                _run_in_place(a, rows, state, is_last and bound.rounds_states)
                continue
            out, lse, _ = piece.forward(a)
            for rows, part in group.places:
                state.add(rows, rows_of(out, part), lse[..., part[0] : part[1]])

    def backward(
        self,
        template: Arguments,
        q: torch.Tensor,
        keys: Keys,
        rest: Rest,
        dq: torch.Tensor,
        dkeys: Keys,
    ) -> None:
        """Adds to dq and dkeys, which are in fp32, what these keys contribute, given the final results."""
        for group in self._prepared(q):
            a = group.arguments(template, q, keys)
            out, dout = (_gather(t, group.places) for t in (rest.out, rest.dout))
            lse, dlse = (None if t is None else _gather_lse(t, group.places) for t in (rest.lse, rest.dlse))
            assert lse is not None
            gradients = piece.backward(a, out, lse, dout, dlse)
            for total, gradient, places in (
                (dq, gradients.q, group.places),
                (dkeys.k, gradients.k, group.key_places),
                (dkeys.v, gradients.v, group.key_places),
            ):
                assert gradient is not None
                for at, part in places:
                    rows_of(total, at).add_(rows_of(gradient, part))

    def _prepared(self, q: torch.Tensor) -> list[_Group]:
        if not self.pieces:
            return []
        key = q.device, 0 if self.documents else q.shape[0]
        if key not in self._groups:
            self._groups[key] = [_Group.of(pieces, self, q) for pieces in self._rounds()]
        return self._groups[key]

    @property
    def rows(self) -> list[sets.Spans]:
        """The rows of each call, in their order."""
        return [sets.spans(p.rows for p in pieces) for pieces in self._rounds()] if self.pieces else []

    def _rounds(self) -> Sequence[tuple[Piece, ...]]:
        return rounds(self.pieces) if self.documents and not self.apart else [(p,) for p in self.pieces]


def _run_in_place(a: Arguments, rows: Range, state: State, finish: bool) -> None:
    """A call that reads and writes these rows of the state itself. `finish`: it is their last one, and rounds."""
    if state.is_empty(rows):
        out, lse = state.rows_to_finish(rows) if finish else state.rows_to_write_to(rows)
        lse.copy_(piece.forward(a._replace(out=out, partial=not finish)).lse)
        return
    out, lse = state.rows_to_merge_into(rows)
    if finish:
        a, out = a._replace(state_out=out, partial=False), state.rows_to_finish(rows)[0]
    piece.forward(a._replace(out=out, state_lse=lse))


def last_calls(steps: Sequence[Step]) -> list[tuple[bool, ...]]:
    """Return for each call of the steps, in the order in which they run, whether it is the last one of all its rows."""
    last: list[tuple[bool, ...]] = []
    later: sets.Spans = ()
    for step in reversed(steps):
        flags = []
        for rows in reversed(step.rows):
            flags.append(not sets.intersection(rows, later))
            later = sets.union(later, rows)
        last.append(tuple(reversed(flags)))
    return last[::-1]


class Rest(NamedTuple):
    """The tensors of all rows of a rank that a backward pass needs besides q, k and v."""

    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None


@dataclass
class _Group:
    """The pieces of one call: their rows and keys, and for each range of them where it lies in the tensors of the call."""

    rows: list[Range]
    keys: list[Range]
    mask: Mask | None
    positions: torch.Tensor | None
    cu: tuple[torch.Tensor, torch.Tensor] | None

    @staticmethod
    def of(pieces: Sequence[Piece], step: Step, q: torch.Tensor) -> _Group:
        rows, keys = [p.rows for p in pieces], [p.keys for p in pieces]
        if not step.documents:
            (piece,) = pieces
            if piece.at is None:
                return _Group(rows, keys, None, None, None)
            local = piece.at == piece.local  # without positions a call counts from its own first row and key
            return _Group(rows, keys, step.mask, None if local else _ints([piece.at] * q.shape[0], q.device), None)
        at_each: list[Sequence[int]] = [Positions(0, 0, 0, 0)] * step.documents
        lengths = [[0, 0] for _ in range(step.documents)]
        for p in pieces:
            assert p.at is not None
            at_each[p.document] = p.at
            lengths[p.document] = [p.rows[1] - p.rows[0], p.keys[1] - p.keys[0]]
        ends = torch.tensor([[0, 0], *lengths]).cumsum(0).to(torch.int32)
        cu = ends[:, 0].contiguous().to(q.device), ends[:, 1].contiguous().to(q.device)
        return _Group(rows, keys, step.mask, _ints(at_each, q.device), cu)

    @functools.cached_property
    def places(self) -> list[tuple[Range, Range]]:
        return _places(self.rows)

    @functools.cached_property
    def key_places(self) -> list[tuple[Range, Range]]:
        return _places(self.keys)

    def arguments(self, template: Arguments, q: torch.Tensor, keys: Keys) -> Arguments:
        q, k, v = _gather(q, self.places), *(_gather(t, self.key_places) for t in keys)
        a = template._replace(q=q, k=k, v=v, mask=self.mask, positions=self.positions, partial=True, return_lse=True)
        if self.cu is None:
            return a
        longest_q, longest_k = (max(stop - start for start, stop in ranges) for ranges in (self.rows, self.keys))
        return a._replace(cu_q=self.cu[0], cu_k=self.cu[1], max_q=longest_q, max_k=longest_k)


def _ints(values: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    return torch.tensor([tuple(v) for v in values], dtype=torch.int32).to(device)


def _places(ranges: Sequence[Range]) -> list[tuple[Range, Range]]:
    """Return each range with its place when all lie one after the other. Those that follow one another are one."""
    places: list[tuple[Range, Range]] = []
    at = 0
    for start, stop in ranges:
        if places and places[-1][0][1] == start:
            (first, _), (begin, _) = places[-1]
            places[-1] = (first, stop), (begin, at + stop - start)
        else:
            places.append(((start, stop), (at, at + stop - start)))
        at += stop - start
    return places


def _gather(t: torch.Tensor, places: Sequence[tuple[Range, Range]]) -> torch.Tensor:
    """The rows of a tensor (…, rows, heads, dim) in these ranges; a view where that is one."""
    parts = [rows_of(t, rows) for rows, _ in places]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -3)


def _gather_lse(t: torch.Tensor, places: Sequence[tuple[Range, Range]]) -> torch.Tensor:
    parts = [t[..., start:stop] for (start, stop), _ in places]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
