"""One access to memory, and what follows from several: races, bank conflicts, sectors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

WARP = 32  # threads that execute together
BANKS = 32  # of shared memory, each 4 bytes wide; each serves one word at a time
_BANK_BYTES = 4
SECTOR_BYTES = 32  # the least that global memory moves


class Access(NamedTuple):
    """One access: who, when, where in the kernel."""

    block_name: str
    thread_name: str
    block: int
    lane: int  # of the thread in its block
    epoch: int  # barriers passed
    line: int
    writes: bool

    @property
    def verb(self) -> str:
        return "writes" if self.writes else "reads"

    def __str__(self) -> str:
        return f"thread {self.thread_name} of block {self.block_name}, line {self.line}"

    def unordered(self, other: Access) -> bool:
        """Return whether nothing decides which of the two comes first."""
        if self.block != other.block:
            return True
        return self.lane != other.lane and self.epoch == other.epoch


@dataclass
class History:
    """The accesses to one element that are needed to find a race: the last write, and reads by different threads."""

    write: Access | None = None
    reads: list[Access] = field(default_factory=list)  # the last two of this block, by different threads
    foreign_read: Access | None = None  # one of an earlier block

    def add(self, access: Access) -> Access | None:
        """The earlier access that this one races with, if any: of two unordered ones at least one is a write."""
        earlier = [self.write] + ([*self.reads, self.foreign_read] if access.writes else [])
        race = next((other for other in earlier if other is not None and other.unordered(access)), None)
        if access.writes:
            self.write = access
            return race
        if self.reads and self.reads[-1].block != access.block:
            self.foreign_read = self.reads[-1]
            self.reads = []
        self.reads = [other for other in self.reads if other.lane != access.lane][-1:] + [access]
        return race


def wavefronts(addresses: Iterable[int]) -> int:
    """Turns that shared memory needs for one instruction of a warp: different words in one bank queue up, equal ones do
    not."""
    words: dict[int, set[int]] = defaultdict(set)
    for address in addresses:
        word = address // _BANK_BYTES
        words[word % BANKS].add(word)
    return max(map(len, words.values()))


def sectors(addresses: Iterable[int]) -> int:
    """Sectors of global memory that one instruction of a warp touches: 32 neighbouring floats need four."""
    return len({address // SECTOR_BYTES for address in addresses})
