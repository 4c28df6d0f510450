"""The shared memory of a kernel, laid out once: a list of regions, whose offsets are printed into its Config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Region(NamedTuple):
    """`buffers` neighbours of `bytes` each. Kernels know it as Offset::name and Bytes::name."""

    name: str
    bytes: int
    buffers: int = 1


class SharedMemory:
    """Regions one after the other. Tiles and rings are multiples of 16 bytes, so none needs padding."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self.regions = tuple(regions)
        self.offsets: dict[str, int] = {}
        at = 0
        for region in self.regions:
            if region.name in self.offsets:
                raise ValueError(f"two regions have the name {region.name!r}")
            self.offsets[region.name] = at
            at += region.bytes * region.buffers
        self.size = at

    def cpp(self) -> str:
        """Members of Config."""
        if not self.regions:
            return ""
        offsets = ", ".join(f"{name} = {at}" for name, at in self.offsets.items())
        sizes = ", ".join(f"{region.name} = {region.bytes}" for region in self.regions)
        return (
            f"  struct Offset {{\n    static constexpr u32 {offsets};\n  }};\n"
            f"  struct Bytes {{\n    static constexpr u32 {sizes};\n  }};\n"
        )


def ring_bytes(stages: int) -> int:
    """Two mbarriers a buffer (pipeline/ring.cuh)."""
    return 16 * stages
