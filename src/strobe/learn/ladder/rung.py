"""One rung: its file, what its header says, its launches, and the source that is compiled."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from strobe.cuda.parts import wgmma
from strobe.cuda.parts.params import Field, Struct
from strobe.cuda.runtime.driver import TENSOR_MAP_BYTES, TensorMapSpec

KERNELS = Path(__file__).resolve().parent / "kernels"
_LIBRARY_KERNELS = Path(__file__).resolve().parents[2] / "cuda" / "include" / "strobe" / "kernels"
DIMS = (64, 128)
_INCLUDE = '#include "ladder.cuh"\n'

POINTERS = ("q", "k", "v", "o", "lse", "workspace", "d_o", "dq", "dk", "dv")
PARAMS = Struct(
    "Params",
    [
        *(Field(name, "const Element*") for name in "qkv"),
        Field("o", "Element*"),
        Field("lse", "float*"),
        Field(
            "workspace", "float*"
        ),  # what a rung has to keep in memory besides: S, or m and l, or delta and the sums of dQ
        Field("d_o", "const Element*"),
        *(Field(name, "Element*") for name in ("dq", "dk", "dv")),
        Field("scale", "float"),
        Field("scale_log2", "float"),  # the same in units of log 2
        *(Field(name, "int") for name in ("slices", "len_q", "len_k", "causal")),
        Field("stage", "int"),  # which of a rung's kernels
        *(Field(f"map_{name}", "TensorMap") for name in "qkv"),
    ],
)


@dataclass(frozen=True)
class Shape:
    """The shape of a problem: a slice is one head of one sequence."""

    slices: int
    len_q: int
    len_k: int
    dim: int
    causal: bool = False

    def __post_init__(self) -> None:
        if self.dim not in DIMS:
            raise ValueError(f"dim: {self.dim}; the rungs are made for head dims {' and '.join(map(str, DIMS))}")
        for name in ("slices", "len_q", "len_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}; must be at least 1")

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs."""
        if not self.causal:
            return self.slices * self.len_q * self.len_k
        offset = self.len_k - self.len_q
        return self.slices * sum(max(0, min(self.len_k, row + offset + 1)) for row in range(self.len_q))

    def flops(self, backward: bool = False) -> int:
        """Return the operations of the products that the formulas need: two forward, five backward."""
        return (10 if backward else 4) * self.dim * self.pairs


Count = Callable[[Shape], int]


@dataclass(frozen=True)
class Rung:
    number: str
    file: str
    grids: tuple[Count, ...]  # blocks of each of its kernels, launched one after the other
    smem: Callable[[int], int]  # by head dim
    threads: int = 256
    element: str = "float"
    workspace: Count = lambda shape: 0  # floats
    # The model of its traffic: numbers for each (query, key) pair, by head dim; queries (backward: keys) come in tiles
    # of `rows`; tensors that move once, but for those that a shape does not need.
    moves: Callable[[int], float] = lambda dim: 0.0
    rows: Callable[[int], int] = lambda dim: 1
    once: int = 0
    spared: Count = lambda shape: 0
    keys: int = 0  # of a tile; of interest to rungs with tensor maps
    divides_every: int = 0  # keys after which O is divided by the row sum, and so rounded; 0: once, at the end
    hopper: bool = False
    library: str = ""  # the header of the library's kernel that it is, which the library plans and launches
    forward: str = ""  # of a backward rung: the forward rung whose gradient it is
    against: str | None = None  # the rung that its prediction speaks of

    @property
    def path(self) -> Path:
        return KERNELS / self.file

    @functools.cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def backward(self) -> bool:
        return bool(self.forward)

    @property
    def library_kernel(self) -> Path:
        return _LIBRARY_KERNELS / self.library

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.element == "bf16" else torch.float32

    @property
    def title(self) -> str:
        return self.text.split("\n", 1)[0].removeprefix(f"// {self.number}").strip()

    @property
    def name(self) -> str:
        return f"ladder {self.number} {self.title}"

    @functools.cached_property
    def header(self) -> dict[str, str]:
        """The sections in which the file describes itself: "What changed", "Why it should help", "Predicted",
        "Measured", "What limits it now"."""
        sections: dict[str, str] = {}
        current = ""
        for line in self.text.splitlines()[2:]:
            if not line.startswith("// "):
                break
            if match := re.match(
                r"// (What changed|Why it should help|Predicted|Measured|What limits it now): (.*)", line
            ):
                current = match[1]
                sections[current] = match[2]
            else:
                sections[current] += " " + line[2:].strip()
        return sections

    @property
    def predicted(self) -> float:
        """The speed, as a multiple of that of the rung before (or `against`)."""
        match = re.match(r"x ([\d.]+)", self.header["Predicted"])
        if match is None:
            raise ValueError(
                f'{self.file}: the prediction should begin with "x <number>": {self.header["Predicted"]!r}'
            )
        return float(match[1])

    def predicted_bytes(self, shape: Shape) -> float | None:
        """Return the bytes to and from global memory, caches left out. None for causal problems, for which the model
        would need to know more."""
        if shape.causal:
            return None
        rows = self.rows(shape.dim)
        tiled, other = (shape.len_k, shape.len_q) if self.backward else (shape.len_q, shape.len_k)
        pairs = -(-tiled // rows) * rows * other
        once = (self.once - self.spared(shape)) * max(shape.len_q, shape.len_k) * shape.dim
        return (self.moves(shape.dim) * pairs + once) * shape.slices * self.dtype.itemsize

    def source(self, dim: int) -> str:
        """The file with what Python prints in place of its first include."""
        element = "u16" if self.element == "bf16" else "float"
        shapes = [(self.keys, [("ss_zero", dim // 16)]), (dim, [("rs_t", self.keys // 16)])]
        preamble = (
            "#include <strobe/ptx/tma.cuh>\n"
            f"{'#include <strobe/ptx/wgmma.cuh>' if self.hopper else ''}\n"
            f"{wgmma.shapes('bf16', shapes) if self.hopper else ''}"
            "namespace strobe {\n"
            f"typedef {element} Element;\n"
            f"constexpr int kDim = {dim}, kSmem = {self.smem(dim)};\n"
            f"{PARAMS.cpp()}"
            "}  // namespace strobe\n"
        )
        shared = (KERNELS / "ladder.cuh").read_text(encoding="utf-8")
        before, include, after = self.text.partition(_INCLUDE)
        assert include, f"{self.file} does not include ladder.cuh"
        next_line = before.count("\n") + 2
        return f'{before}{preamble}#line 1 "ladder.cuh"\n{shared}#line {next_line} "{self.file}"\n{after}'

    def values(self, shape: Shape, stage: int, addresses: dict[str, int], maps: dict[str, bytes]) -> dict[str, object]:
        """The arguments of one launch."""
        return {
            **dict.fromkeys(POINTERS, 0),
            **addresses,
            "scale": shape.scale,
            "scale_log2": shape.scale / math.log(2),
            "slices": shape.slices,
            "len_q": shape.len_q,
            "len_k": shape.len_k,
            "causal": int(shape.causal),
            "stage": stage,
            **{f"map_{name}": maps.get(name, bytes(TENSOR_MAP_BYTES)) for name in "qkv"},
        }

    def maps(self, shape: Shape, addresses: dict[str, int]) -> dict[str, TensorMapSpec]:
        """(64 columns, rows, panels of columns, slices, 1), as tile/swizzle.cuh lays tiles out."""
        if not self.hopper:
            return {}
        row = 2 * shape.dim
        maps = {}
        for name, length, rows in (
            ("q", shape.len_q, 64),
            ("k", shape.len_k, self.keys),
            ("v", shape.len_k, self.keys),
        ):
            dims = (64, length, shape.dim // 64, shape.slices, 1)
            strides = (row, 128, length * row, length * row)
            maps[name] = TensorMapSpec(addresses[name], 2, dims, strides, (64, rows, shape.dim // 64, 1, 1))
        return maps
