"""Tile shapes: how a block of threads cuts the work, by head dim and GPU.

The tables for Hopper, of both kernels, were swept on an H200 (docs/design/hopper-forward.md) but for sm80's 192. The
others are chosen for shared memory and registers, and nobody has timed them."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path

MAX_DIM = 256
# (dim, dim_v) that have kernels of their own. Others use the next larger ones: the columns in between are zeros that
# never touch memory.
DIMS = {
    "sm80": [(d, d) for d in range(32, MAX_DIM + 1, 32)] + [(192, 128)],
    "sm90": [(d, d) for d in (64, 96, 128, 192, 256)] + [(192, 128)],
}


def padded_dims(family: str, dim: int, dim_v: int) -> tuple[int, int]:
    able = [(d, dv) for d, dv in DIMS[family] if d >= dim and dv >= dim_v]
    return min(able, key=lambda pair: pair[0] + pair[1])


def tile_bytes(rows: int, columns: int) -> int:
    """Panels of 64 columns, 128 bytes a row, as in tile/swizzle.cuh."""
    return -(-columns // 64) * rows * 128


# ---- mma.sync --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TileSm80:
    block_m: int  # query rows
    block_n: int  # keys at a time
    warps: int
    stages: int  # buffers for K and for V
    blocks_per_sm: int  # what the register allocation aims at
    skip: bool = False  # leave the row maximum behind while it grows little

    kernel = "forward_sm80"

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} w{self.warps} s{self.stages}{' skip' if self.skip else ''}"

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def smem(self, dim: int, dim_v: int) -> int:
        keys_and_values = tile_bytes(self.block_n, dim) + tile_bytes(self.block_n, dim_v)
        resting = self.block_m // 16 * 32 * 16 + 48 if self.rests else 0
        return tile_bytes(self.block_m, max(dim, dim_v)) + self.stages * keys_and_values + resting

    def numbers(self) -> dict[str, int]:
        return {"kBlockM": self.block_m, "kBlockN": self.block_n, "kWarps": self.warps, "kStages": self.stages}

    @property
    def rests(self) -> bool:
        """Whether registers are so scarce that the row statistics rest in shared memory."""
        return self.block_m // self.warps > 16 or self.blocks_per_sm > 2

    def flags(self) -> dict[str, bool]:
        return {"kRest": self.rests, "kSkip": self.skip}


# Head dim (up to) -> tile, by generation: they differ in shared memory, and ptxas fills their registers differently.
_SM80 = {
    "sm_80": {
        64: TileSm80(128, 128, 4, 1, 2), 128: TileSm80(128, 64, 4, 1, 2, skip=True), 192: TileSm80(64, 64, 4, 1, 2),
        256: TileSm80(128, 64, 8, 1, 1),
    },
    "sm_86": {
        64: TileSm80(128, 64, 4, 1, 2), 128: TileSm80(128, 64, 4, 1, 1, skip=True), 192: TileSm80(64, 64, 4, 1, 1),
        256: TileSm80(64, 64, 4, 1, 1),
    },
    "sm_90": {
        64: TileSm80(128, 128, 4, 1, 2), 96: TileSm80(128, 64, 4, 2, 2, skip=True), 128: TileSm80(128, 64, 4, 2, 2, skip=True),
        192: TileSm80(64, 64, 4, 1, 2), 256: TileSm80(64, 64, 4, 1, 2),
    },
    "sm_100": {
        64: TileSm80(128, 128, 4, 1, 2), 96: TileSm80(128, 64, 4, 2, 2, skip=True), 128: TileSm80(128, 48, 4, 1, 2, skip=True),
        192: TileSm80(64, 64, 4, 1, 2), 256: TileSm80(64, 64, 4, 1, 2),
    },
}  # fmt: skip
SMEM_BYTES = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}  # of one block


def generation(arch: str) -> str:
    """The oldest architecture with the same tiles: consumer Ampere, Ada and consumer Blackwell have little shared
    memory."""
    number = int("".join(c for c in arch if c.isdigit()))
    if number in (86, 89) or number >= 120:
        return "sm_86"
    return "sm_80" if number < 90 else "sm_90" if number < 100 else "sm_100"


def choose_sm80(dim: int, dim_v: int, arch: str, softcap: bool = False) -> TileSm80:
    table = _SM80[generation(arch)]
    tile = table[min(limit for limit in table if limit >= max(dim, dim_v))]
    if softcap:  # tanh needs a few registers more than the largest tiles leave
        tile = dataclasses.replace(tile, block_n=48 if 64 < max(dim, dim_v) <= 128 else tile.block_n // 2)
    return tile


# ---- wgmma -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TileSm90:
    consumers: int  # warpgroups of 64 query rows each; one more fetches
    block_n: int  # keys at a time
    stages: int = 2  # buffers for K and for V
    q_slots: int = 2  # query tiles in shared memory
    hold: int = 0  # weights computed before the wait for P V; 0: where ptxas puts them
    ping_pong: bool = False  # consumers take turns at issuing products
    store_panels: int = 0  # 64-column panels of O staged at a time in a buffer of their own; 0: all of them, over Q

    kernel = "forward_sm90"
    blocks_per_sm = 1

    def __str__(self) -> str:
        switches = f"{' pp' if self.ping_pong else ''}{f' o{self.store_panels}' if self.store_panels else ''}"
        return f"{self.block_m}x{self.block_n} s{self.stages} q{self.q_slots} h{self.hold}{switches}"

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread of the producer and of a consumer: together they fill the register file."""
        return {1: (56, 256), 2: (40, 232), 3: (32, 160)}[self.consumers]

    def smem(self, dim: int, dim_v: int) -> int:
        queries = self.q_slots * self.consumers * tile_bytes(64, dim)
        keys_and_values = tile_bytes(self.block_n, dim) + tile_bytes(self.block_n, dim_v)
        output = self.consumers * tile_bytes(64, 64 * self.store_panels)
        barriers, mailboxes = 16 * self.q_slots + 32 * self.stages, 32 * self.q_slots
        return queries + self.stages * keys_and_values + output + barriers + mailboxes

    def numbers(self) -> dict[str, int]:
        producer, consumer = self.registers
        return {
            "kBlockM": self.block_m, "kBlockN": self.block_n, "kConsumers": self.consumers, "kStages": self.stages,
            "kQSlots": self.q_slots, "kHold": self.hold, "kRegsProducer": producer, "kRegsConsumer": consumer,
            "kStorePanels": self.store_panels,
        }  # fmt: skip

    def flags(self) -> dict[str, bool]:
        return {"kPingPong": self.ping_pong}


# Swept with NVRTC 13.0: benchmarks/results/h200/studies/tiles.json. Another ptxas may want others: `strobe tune`.
_SM90 = {
    (64, 64): TileSm90(3, 128, stages=3, hold=8),
    (96, 96): TileSm90(3, 112, ping_pong=True),
    (128, 128): TileSm90(2, 128, hold=32, ping_pong=True),
    (192, 192): TileSm90(2, 64, q_slots=1, store_panels=2, ping_pong=True),
    (192, 128): TileSm90(2, 128, q_slots=1, store_panels=1, hold=24, ping_pong=True),
    (256, 256): TileSm90(2, 64, q_slots=1, store_panels=2),
}


# Where another tile is better: softcap and putting parts together take registers.
_SM90_OTHER = {
    "softcap": {
        (64, 64): TileSm90(3, 128, stages=3), (96, 96): TileSm90(3, 96, ping_pong=True),
        (192, 192): TileSm90(2, 96, q_slots=1, store_panels=1, ping_pong=True),
        (256, 256): TileSm90(2, 64, q_slots=1, store_panels=2, ping_pong=True),
    },
    "split": {
        (64, 64): TileSm90(2, 128, stages=3, hold=16, ping_pong=True), (96, 96): TileSm90(2, 128, hold=16, ping_pong=True),
        (128, 128): TileSm90(2, 128, hold=24, ping_pong=True),
        (192, 192): TileSm90(2, 64, q_slots=1, store_panels=2, hold=8, ping_pong=True),
        (192, 128): TileSm90(2, 96, q_slots=1, store_panels=1, hold=24, ping_pong=True),
        (256, 256): TileSm90(2, 64, q_slots=1, store_panels=2, ping_pong=True),
    },
    "softcap-split": {
        (96, 96): TileSm90(2, 96, hold=16, ping_pong=True), (128, 128): TileSm90(2, 96, hold=24, ping_pong=True),
    },
}  # fmt: skip


@functools.cache
def _overrides() -> dict[str, TileSm90]:
    """What `strobe tune` found on this machine, if STROBE_TILES names its file."""
    path = os.environ.get("STROBE_TILES")
    if not path:
        return {}
    try:
        found = json.loads(Path(path).read_text())["best"]
        return {name: TileSm90(**tile) for name, tile in found.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"STROBE_TILES={path}: not a file written by `strobe tune` ({error})") from error


# Kernels that differ so much that each may want a tile of its own, and what a kernel must have to be one; the last that
# applies counts. bounded: the mask hides keys from the right; split: keys among blocks.
KINDS: dict[str, set[str]] = {
    "full": set(), "bounded": {"bounded"}, "softcap": {"softcap"}, "split": {"split"}, "softcap-split": {"softcap", "split"},
}  # fmt: skip


def tile_name(dim: int, dim_v: int, kind: str) -> str:
    """The key of a tile in the file that `strobe tune` writes."""
    return f"{dim}/{dim_v} {kind}"


def choose_sm90(dim: int, dim_v: int, bounded: bool = False, *, softcap: bool = False, split: bool = False) -> TileSm90:
    applies = {name for name, does in {"bounded": bounded, "softcap": softcap, "split": split}.items() if does}
    kind = [kind for kind, needs in KINDS.items() if needs <= applies][-1]
    for name in (
        (kind, "split") if kind == "softcap-split" else (kind,)
    ):  # where it has none of its own, that for split keys
        found = _overrides().get(tile_name(dim, dim_v, name)) or _SM90_OTHER.get(name, {}).get((dim, dim_v))
        if found is not None:
            return found
    return _SM90[dim, dim_v]


def split_tiles(dim: int, dim_v: int, bounded: bool, softcap: bool) -> list[TileSm90]:
    """For keys that are split: the tile that is meant for it, and one with more rows if there is such, that for keys
    which are not split. Putting parts together takes the registers in which that one would hold weights. Not swept, as
    the others
    are."""
    found = choose_sm90(dim, dim_v, bounded, softcap=softcap, split=True)
    wide = dataclasses.replace(choose_sm90(dim, dim_v, bounded, softcap=softcap), hold=0)
    return [found, wide] if wide.block_m > found.block_m else [found]
