"""`strobe.paged.Plan`: the work of a batch of sequences, cut into even pieces, as a list in device memory.

A tile is up to ROWS rows (queries times heads of a group) of one sequence and key head, and the blocks of BLOCK keys that
they may look at. Tiles are laid one behind the other, key heads outermost, and the whole is cut into pieces of the same
number of blocks, one for each part of the machine. An item is what a piece has of a tile. A tile in several items has
partial results, each in a slot: a piece cuts at most its first and its last tile, so two slots for each piece suffice.

Everything is computed where the lengths are, with operations whose shapes do not depend on them: nothing is read back, and
a CUDA graph may capture it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

ROWS, BLOCK = 64, 128


class Items(NamedTuple):
    """int32, one entry for each item; unused ones at the end have no blocks."""

    sequence: torch.Tensor
    head: torch.Tensor  # of the keys
    rows: torch.Tensor  # number of the first row among queries times group
    first: torch.Tensor  # block of keys
    end: torch.Tensor
    slot: torch.Tensor  # of its partial result; -1: the item has its tile to itself
    parts: torch.Tensor  # items of its tile
    piece: torch.Tensor


class Plan:
    """Room for the work of up to `max_sequences` sequences with up to `max_rows` queries in all. `update` fills it, once for
    all layers whose heads are these. Without a plan every call makes its own. Kernels for decoding will take their work
    from it; the backends of today need no list and take it on trust."""

    def __init__(
        self,
        max_sequences: int,
        max_rows: int,
        *,
        heads: int,
        heads_k: int,
        dim: int,
        pieces: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        for name, value in (
            ("max_sequences", max_sequences),
            ("max_rows", max_rows),
            ("heads_k", heads_k),
            ("dim", dim),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        if heads % heads_k:
            raise ValueError(f"heads must be a multiple of heads_k = {heads_k}, got {heads}")
        self.max_sequences, self.max_rows = max_sequences, max_rows
        self.heads, self.heads_k, self.dim = heads, heads_k, dim
        self.device = (
            torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else torch.device(device)
        )
        self.pieces = pieces or _parts_of(self.device)
        self.group = heads // heads_k
        # Each sequence may end with a tile that is not full.
        self.max_tiles = heads_k * (max_sequences + self.group * max_rows // ROWS)
        size = self.max_tiles + self.pieces
        self.items = Items(*(torch.zeros(size, dtype=torch.int32, device=self.device) for _ in Items._fields))
        self.updated = False

    def update(self, lengths: torch.Tensor, cu_q: torch.Tensor | None = None) -> None:
        """For sequences with these `lengths` (sequences,), and the queries that `cu_q` (sequences + 1,) says, or one each.
        The list stays where it is, so that a captured graph finds it."""
        sequences = lengths.numel()
        if lengths.dim() != 1 or sequences > self.max_sequences:
            raise ValueError(f"lengths must be (sequences,), at most {self.max_sequences}; got {tuple(lengths.shape)}")
        if cu_q is not None and cu_q.numel() != sequences + 1:
            raise ValueError(f"cu_q must have shape ({sequences + 1},), got {tuple(cu_q.shape)}")
        length = lengths.to(self.device).long().clamp(min=0)
        queries = torch.ones_like(length) if cu_q is None else cu_q.to(self.device).diff().long()
        for into, found in zip(self.items, self._even(length, queries), strict=True):
            into.copy_(found)
        self.updated = True

    def _even(self, length: torch.Tensor, queries: torch.Tensor) -> Items:
        row_tiles = (queries * self.group + ROWS - 1) // ROWS  # of a sequence and key head
        per_head = row_tiles.cumsum(0)
        tile = torch.arange(self.max_tiles, device=self.device)
        tiles = per_head[-1]  # of one key head; a number on the device
        head, number = tile // tiles.clamp(min=1), tile % tiles.clamp(min=1)
        sequence = torch.searchsorted(per_head, number, right=True).clamp(max=len(length) - 1)
        row = (number - (per_head - row_tiles)[sequence]) * ROWS
        blocks = ((length[sequence] + BLOCK - 1) // BLOCK).clamp(min=1)  # one without keys still has rows to write
        blocks = torch.where(head < self.heads_k, blocks, 0).masked_fill(tiles == 0, 0)
        ends = blocks.cumsum(0)
        total = ends[-1]
        cuts = torch.arange(self.pieces, device=self.device) * total // self.pieces
        begins = torch.cat((ends - blocks, cuts)).sort().values
        stops = torch.cat((begins[1:], total[None]))
        owner = torch.searchsorted(ends, begins, right=True).clamp(max=self.max_tiles - 1)
        piece = torch.searchsorted(cuts, begins, right=True) - 1
        used = stops > begins
        order = (~used).to(torch.int8).sort(stable=True).indices  # used ones in front
        begins, stops, owner, piece, used = (t[order] for t in (begins, stops, owner, piece, used))
        origin = (ends - blocks)[owner]
        parts = torch.zeros_like(blocks).scatter_add_(0, owner, used.long())[owner]
        slot = torch.where(parts > 1, 2 * piece + (begins > cuts[piece]).long(), -1)
        found = (sequence[owner], head[owner], row[owner], begins - origin, stops - origin, slot, parts, piece)
        return Items(*(torch.where(used, t, 0) for t in found))

    def check_call(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """Of queries (…, heads, dim) and a pool (pages, page, heads_k, dim)."""
        mine, theirs = (self.heads, self.heads_k, self.dim), (q.shape[-2], k.shape[2], q.shape[-1])
        if mine != theirs:
            raise ValueError(f"plan is for (heads, heads_k, dim) = {mine}, the call has {theirs}")
        if not self.updated:
            raise ValueError("plan has no work yet: call plan.update(lengths, cu_q) first")

    def describe(self) -> str:
        """Waits for the device."""
        items = Items(*(t.cpu() for t in self.items))
        used = items.end > items.first
        blocks = (items.end - items.first)[used]
        cut = int((items.parts[used] > 1).sum())
        load = torch.zeros(self.pieces, dtype=torch.long).scatter_add_(0, items.piece[used].long(), blocks.long())
        return (
            f"{int(used.sum())} items of {int(blocks.sum())} blocks of {BLOCK} keys in {self.pieces} pieces, "
            f"{int(load.min())} to {int(load.max())} blocks each; {cut} items are parts of tiles"
        )


def _parts_of(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return torch.get_num_threads()
