"""Tiny kernels for tests of the emulator itself: a body, some arrays, and the line numbers of the body in the
reports."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from strobe.cuda.runtime.driver import TensorMapSpec
from strobe.emulator import Buffer, Counters, build, encode_tensor_map

_HEADERS = "".join(
    f"#include <strobe/ptx/{name}.cuh>\n" for name in ("base", "math", "memory", "mma", "tma", "warp", "wgmma")
)
_CTYPES = {"uint16": "u16", "uint32": "u32", "float32": "float", "int32": "int"}


@dataclass
class Toy:
    """`kernel` is the text from the first helper function to the end of the kernel; its first line counts as toy.cu:1.

    Params holds `TensorMap`s named in `maps`, a pointer for each array, then an int for each scalar.
    """

    kernel: str
    arrays: dict[str, str]  # name -> numpy dtype
    scalars: tuple[str, ...] = ()
    maps: tuple[str, ...] = ()
    threads: int = 32
    smem: int = 4096
    read_only: frozenset[str] = field(default_factory=frozenset)

    def source(self) -> str:
        members = "".join(f"  strobe::TensorMap {name};\n" for name in self.maps)
        members += "".join(f"  {_CTYPES[dtype]}* {name};\n" for name, dtype in self.arrays.items())
        members += "".join(f"  int {name};\n" for name in self.scalars)
        align = "alignas(64) " if self.maps else ""
        kernel = self.kernel.lstrip("\n")
        return f'{_HEADERS}struct {align}Params {{\n{members}}};\nusing namespace strobe;\n#line 1 "toy.cu"\n{kernel}'

    def mutate(self, old: str, new: str) -> Toy:
        assert self.kernel.count(old) == 1, f"{old!r} occurs {self.kernel.count(old)} times"
        return Toy(
            self.kernel.replace(old, new), self.arrays, self.scalars, self.maps, self.threads, self.smem, self.read_only
        )

    def line(self, text: str) -> str:
        """Return where `text` stands, as the reports name it."""
        lines = [i for i, line in enumerate(self.kernel.lstrip("\n").splitlines(), start=1) if text in line]
        assert len(lines) == 1, f"{text!r} is on lines {lines}"
        return f"toy.cu:{lines[0]}"

    def run(
        self,
        *,
        grid: int = 1,
        mode: str = "sync",
        seed: int = 0,
        specs: dict[str, TensorMapSpec] | None = None,
        workers: int | None = None,
        together: int = 0,
        **values: object,
    ) -> Counters:
        packed = b"".join(encode_tensor_map((specs or {})[name]) for name in self.maps)
        buffers = []
        for name, dtype in self.arrays.items():
            array = values[name]
            assert isinstance(array, np.ndarray) and array.dtype == dtype and array.flags.c_contiguous
            packed += array.ctypes.data.to_bytes(8, "little")
            buffers.append(Buffer(name, array.ctypes.data, array.nbytes, writable=name not in self.read_only))
        packed += b"".join(int(values[name]).to_bytes(4, "little", signed=True) for name in self.scalars)  # type: ignore[call-overload]
        align = 64 if self.maps else 8 if self.arrays else 4
        packed += bytes(-len(packed) % align)
        program = build(self.source(), name="toy")
        return program.run(
            packed,
            grid=grid,
            threads=self.threads,
            smem=self.smem,
            buffers=buffers,
            mode=mode,
            seed=seed,
            workers=workers,
            together=together,
        )  # type: ignore[arg-type]


# ---- 16-bit numbers as numpy sees them -------------------------------------------------------------------------------
def to_bits(x: np.ndarray, element: str) -> np.ndarray:
    """Round to nearest even; finite inputs only."""
    if element == "fp16":
        return x.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bits(bits: np.ndarray, element: str) -> np.ndarray:
    if element == "fp16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def aligned(shape: tuple[int, ...] | int, dtype: str) -> np.ndarray:
    """Zeros at a 128-byte boundary, as GPU allocations are."""
    count = int(np.prod(shape))
    size = np.dtype(dtype).itemsize
    raw = np.zeros(count * size + 128, dtype=np.uint8)
    start = -raw.ctypes.data % 128
    return raw[start : start + count * size].view(dtype).reshape(shape)


def place(x: np.ndarray) -> np.ndarray:
    copy = aligned(x.shape, str(x.dtype))
    copy[...] = x
    return copy
