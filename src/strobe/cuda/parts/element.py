"""The element of a tile: its names, and how many elements the units of the hardware hold. The C++ half is
tile/element.cuh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

PANEL_BYTES = 128  # of a row of a panel (tile/swizzle.cuh)
TENSOR, CONST_TENSOR = "Config::Element*", "const Config::Element*"  # fields that point to elements
_CHUNK_BYTES = 16  # that one copy moves
_MMA_BYTES = 32  # of a row of an operand, in one mma or wgmma


@dataclass(frozen=True)
class Element:
    name: str  # the C++ type
    bytes: int
    in_ptx: str  # the type in instructions
    in_maps: Literal["bf16", "fp16", "fp32"]  # the type in tensor maps

    def __str__(self) -> str:
        return self.name

    @property
    def chunk(self) -> int:
        """Elements of a chunk."""
        return _CHUNK_BYTES // self.bytes

    @property
    def panel(self) -> int:
        """Columns of a panel."""
        return PANEL_BYTES // self.bytes

    @property
    def mma_k(self) -> int:
        """Summands of one mma or wgmma."""
        return _MMA_BYTES // self.bytes

    def panels(self, columns: int) -> int:
        """Return how many panels hold so many columns."""
        return -(-columns // self.panel)

    def fills_panels(self, *dims: int) -> bool:
        """Return whether one TMA box can hold a tile: a panel that is not full takes a box of its own."""
        return all(dim % self.panel == 0 for dim in dims)

    def tile_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a tile in shared memory."""
        return self.panels(columns) * rows * PANEL_BYTES


BF16 = Element("bf16", 2, "bf16", "bf16")
FP16 = Element("fp16", 2, "f16", "fp16")
FP32 = Element("float", 4, "f32", "fp32")  # of results; no product takes it
ELEMENTS = {torch.bfloat16: BF16, torch.float16: FP16}  # of the operands of products
BY_NAME = {element.name: element for element in ELEMENTS.values()}
