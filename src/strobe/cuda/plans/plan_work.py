"""The work of paged calls, planned on the device before the kernel that does it: a list of items in memory, so that neither
lengths nor tables are ever read back (kernels/plan_work.cuh).

`strobe.paged.Plan` keeps lists for several calls; without one each call makes its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from strobe.cuda.parts.features import Features
from strobe.cuda.parts.kernel import TemplateKernel, flags, template_kernel
from strobe.cuda.parts.params import COUNTERS, Field, params
from strobe.cuda.parts.plan import Launch
from strobe.cuda.parts.rows import Rows
from strobe.cuda.parts.scores import Scores
from strobe.cuda.parts.shared_memory import Region, SharedMemory
from strobe.problem import Problem

THREADS = 1024
RECORD = 64  # bytes
COUNTED = 16  # bytes of the counters of an item, which invariant kernels count in: two for each consumer
MOST_CONSUMERS = COUNTED // 8

# Where invariant kernels cut keys (`FixedSplits` in plan_work.cuh): twice FOR_EACH_DOUBLING splits of FIRST_SPLITS keys,
# then FOR_EACH_DOUBLING for each time that the keys double. Other numbers are other bits.
FIRST_SPLITS = 4096
FOR_EACH_DOUBLING = 16


def fields(invariant: bool) -> list[Field]:
    """The fields of the kernel that follows. An invariant one counts behind the list."""
    return [Field("work", "int*" if invariant else "const int*")]


@dataclass(frozen=True)
class Work:
    """The list of a call, and what its kernel leaves in slots, for tiles of `block_m` rows and blocks of `block_n` keys."""

    problem: Problem  # whose heads are those of tiles
    block_m: int
    block_n: int
    pack: int  # heads that are rows of one tile
    pieces: int  # one for each block of the kernel that follows

    @staticmethod
    def of(problem: Problem, block_m: int, block_n: int, pack: int, blocks: int) -> Work:
        """Return work of as many pieces as blocks run at once, with a counter for each consumer of a slot: 64 rows, or
        all if they are fewer."""
        return Work(problem, block_m, block_n, pack, min(blocks, (COUNTERS - 1) // (2 * max(1, block_m // 64))))

    @property
    def split_blocks(self) -> int:
        """Blocks of keys in the first splits of an invariant call; 0 for others, which are cut anywhere."""
        return max(1, FIRST_SPLITS // self.block_n) if self.problem.invariant else 0

    @property
    def items(self) -> int:
        """The upper bound: full tiles, one partial tile a sequence, and either cuts or, if invariant, fixed splits. A
        longer sequence has fewer splits for its keys, so where the room for keys is divided freely among sequences there
        are most, but for a part of one each, if all have as much of it."""
        more, batch, pages = self.problem.q.total // self.block_m, self.problem.batch, self.problem.k.pages
        if not self.problem.invariant or pages is None:
            return self.pieces + self.problem.heads * (more + batch)
        # A sequence may begin inside of a split.
        longest, each = (
            split_of(-(-keys // self.block_n), self.split_blocks) + 1 + pages.starts
            for keys in (self.problem.len_k, -(-self.problem.k.total // max(1, batch)))
        )
        return self.problem.heads * (batch * min(longest, each + (pages.width is None)) + more * longest)

    @property
    def slot_rows(self) -> int:
        """Rows of a slot of an invariant call: its longest tile; even, so that slots are aligned."""
        return min(self.block_m, self.problem.len_q + self.problem.len_q % 2)

    @property
    def slots(self) -> int:
        return self.items if self.problem.invariant else 2 * self.pieces

    def workspace(self, dim_v: int) -> dict[str, int]:
        """Bytes: a record for each piece and each item, and the O, m and l of the rows of each slot."""
        rows = self.slot_rows if self.problem.invariant else self.block_m
        counted = COUNTED * self.items if self.problem.invariant else 0
        return {
            "partial": 4 * self.slots * rows * (dim_v + 2),
            "work": RECORD * (self.pieces + self.items) + counted,
        }

    def values(self) -> dict[str, int]:
        """The values of the fields of the kernel that follows."""
        return {"items": self.items, "slot_rows": self.slot_rows} if self.problem.invariant else {}

    def launch(self, features: Features, arch: str) -> Launch:
        fields = {"mask": Scores.values(self.problem)["mask"], "pieces": self.pieces, "items": self.items}
        values: dict[str, Any] = {**features.rows.values(self.problem, tma=False), **fields}
        return Launch(self._kernel(features, arch), self.problem.heads, values)

    def _kernel(self, features: Features, arch: str) -> TemplateKernel:
        config = {
            **features.rows.config(self.pack),
            "kBlockM": self.block_m,
            "kBlockN": self.block_n,
            "kThreads": THREADS,
            "kSplitBlocks": self.split_blocks,
        }
        fields = [Field("work", "u32*"), Field("pieces", "int"), Field("items", "int")]
        mask = [f for f in Scores.FIELDS if f.name == "mask"]
        invariant = flags(invariant=self.split_blocks > 0)
        return template_kernel(
            "plan_work",
            f"{features.scores.mask.name} {self.block_m}x{self.block_n} {features.rows.queries}{invariant}",
            arch=arch,
            params=params(Rows.fields(tma=False, paged=True), mask, fields),
            threads=THREADS,
            element=features.element.name,
            config=config,
            memory=SharedMemory([Region("sums", 128, 3)]),
            types=features.types()[:1],  # the mask
        )


def described(memory: torch.Tensor, pieces: int, items: int) -> str:
    """A list in `memory` of int32, with room for so many items. Waits for the device."""
    records = memory[: RECORD // 4 * (pieces + items)].view(-1, RECORD // 4).cpu()
    spans = [(int(first), int(end)) for first, end in records[:pieces, 12:14] if end > first]
    listed = torch.cat([records[pieces + first : pieces + end] for first, end in spans] or [records[:0]])
    blocks, cut = int((listed[:, 5] - listed[:, 4]).sum()), int((listed[:, 7] > 1).sum())
    return f"{len(listed)} items of {blocks} blocks of keys in {len(spans)} pieces; {cut} are parts of tiles"


def split_of(block: int, unit: int) -> int:
    """Return the split of a block of keys in an invariant call, where the first splits have `unit` blocks."""
    blocks = block // unit
    doublings = max(0, blocks.bit_length() - FOR_EACH_DOUBLING.bit_length())
    return doublings * FOR_EACH_DOUBLING + (blocks >> doublings)
