"""The emulator's 128-byte tensor map; `emu/tma.cuh` reads it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strobe.cuda.runtime.driver import TensorMapSpec

_LAYOUT = struct.Struct("<4sBBBxQ5I5I4Q")
_BYTES = 128


def encode_tensor_map(spec: TensorMapSpec) -> bytes:
    """The counterpart of `spec.encode()`, which needs a driver: the bytes that an emulated kernel takes as its
    `TensorMap`."""
    spec.validate()
    row_bytes = spec.box[0] * spec.element_bytes
    if spec.swizzle and row_bytes != spec.swizzle:
        raise ValueError(
            f"box[0]: {spec.box[0]} elements are {row_bytes} bytes; the emulator wants the whole swizzle of {spec.swizzle}"
        )
    sizes = (*_padded(spec.dims, 5, 1), *_padded(spec.box, 5, 1), *_padded(spec.strides, 4, 0))
    header = (b"STRB", len(spec.dims), spec.element_bytes, spec.swizzle, spec.address)
    return _LAYOUT.pack(*header, *sizes).ljust(_BYTES, b"\0")


def _padded(values: Sequence[int], length: int, fill: int) -> list[int]:
    return [*values, *[fill] * (length - len(values))]
