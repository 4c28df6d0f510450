"""Standard attention in CUDA of our own, as three unfused kernels, naive and on the matrix units: to show what the N x
N matrix costs.

The kernels go through the same compiler, cache and launcher as the library's, and run on the emulator as well.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from strobe.bench.case import BenchCase
from strobe.bench.inputs import Tensors
from strobe.bench.provider import Prepare, Prepared, Provider, Refusal, refuse, two_matrices
from strobe.cuda.parts import print_mask
from strobe.cuda.parts.params import Field, Struct
from strobe.cuda.parts.plan import ELEMENTS, MAX_DIM, padded_dims
from strobe.cuda.parts.shared_memory import tile_bytes
from strobe.cuda.plans import forward_sm80
from strobe.cuda.runtime import driver, jit
from strobe.problem import Problem
from strobe.variants.mask import MAX_CONSTANTS, Mask

KERNELS = Path(__file__).with_name("kernels")
STEPS = ("scores", "softmax", "values")
_KEYS = 64  # of a tile in standard_mma_values


@dataclass(frozen=True)
class Kernel:
    """One of the three steps, as it is compiled."""

    style: str  # "naive" or "mma"
    step: str
    element: str  # bf16, fp16, float
    dim: int  # rounded up; the naive kernels do not care
    mask: Mask

    @property
    def name(self) -> str:
        return f"standard_{self.style}_{self.step}[{self.element} {self.dim} {self.mask.name}]"

    @property
    def threads(self) -> int:
        return 256 if self.style == "naive" else 128

    @property
    def block_m(self) -> int:
        """Rows of a tile: as many as leave a warp's results in its registers."""
        return 64 if self.step == "values" and self.dim > 128 else 128

    @property
    def block_n(self) -> int:
        return 128 if self.dim <= 128 else 64

    @property
    def smem(self) -> int:
        if self.style == "naive":
            return 2 * 16 * 17 * 4
        if self.step == "scores":
            return max(
                tile_bytes(self.block_m, self.dim) + tile_bytes(self.block_n, self.dim),
                tile_bytes(self.block_m, self.block_n),
            )
        if self.step == "values":
            return 2 * (tile_bytes(self.block_m, _KEYS) + tile_bytes(_KEYS, self.dim))
        return 0

    @property
    def params(self) -> Struct:
        element, matrix = (
            ("float", "float") if self.element == "float" else ("u16", "float" if self.style == "naive" else "u16")
        )
        return Struct(
            "Params",
            [
                *(Field(t, f"const {element}*") for t in "qkv"),
                Field("o", f"{element}*"),
                Field("s", f"{matrix}*"),
                Field("p", f"{matrix}*"),
                *(Field(f"{t}_{axis}", "i64") for t in "qkvo" for axis in ("batch", "head", "row")),
                Field("scale", "float"),
                *(
                    Field(name, "int")
                    for name in ("batch", "heads", "group", "len_q", "len_k", "dim", "dim_v", "stride_s")
                ),
                Field("mask", "int", MAX_CONSTANTS),
            ],
        )

    @functools.cached_property
    def source(self) -> str:
        function = f"standard_{self.style}_{self.step}"
        return (
            f"// {function}\n"
            f"{_text(self.style)}"
            "namespace strobe {\n"
            "struct Config {\n"
            f"  using Element = {self.element};\n"
            f"  static constexpr int kBlockM = {self.block_m}, kBlockN = {self.block_n}, kDim = {self.dim};\n"
            "};\n"
            f"{print_mask.struct(self.mask)}"
            f"{self.params.cpp()}"
            "}  // namespace strobe\n"
            f"STROBE_KERNEL({self.threads}, 1) {function}(STROBE_GRID_CONSTANT strobe::Params p) {{\n"
            f"  strobe::{function}<strobe::Config, strobe::Mask>(p);\n"
            "}\n"
        )

    def grid(self, problem: Problem) -> int:
        slices = problem.batch * problem.heads
        down = -(-problem.len_q // (16 if self.style == "naive" else self.block_m))
        if self.step == "softmax":
            rows = slices * problem.len_q
            return rows if self.style == "naive" else -(-rows // 4)
        if self.style == "naive":
            return slices * down * -(-(row_stride(problem) if self.step == "scores" else problem.dim_v) // 16)
        return slices * down * (-(-row_stride(problem) // self.block_n) if self.step == "scores" else 1)


@functools.cache
def _text(style: str) -> str:
    """Part of the source, not included by it: the headers of the library are what `#include <strobe/...>` finds."""
    return (KERNELS / f"standard_{style}.cuh").read_text(encoding="utf-8")


def row_stride(problem: Problem) -> int:
    """Of the score matrix: 16 bytes of 16-bit numbers are moved at a time."""
    return -(-problem.len_k // 8) * 8


def feature_limits(problem: Problem, style: str) -> str | None:
    if style == "mma" and problem.dtype not in ELEMENTS:
        return f"{str(problem.dtype).removeprefix('torch.')} inputs; the matrix units take bfloat16 and float16"
    if style == "mma" and (problem.dim % 8 or problem.dim_v % 8 or max(problem.dim, problem.dim_v) > MAX_DIM):
        return f"head dims {problem.dim} and {problem.dim_v}; multiples of 8 up to {MAX_DIM} are taken"
    if problem.dtype not in (*ELEMENTS, torch.float32):
        return f"{problem.dtype} inputs"
    return None


def kernels(problem: Problem, style: str) -> list[Kernel]:
    element = ELEMENTS.get(problem.dtype, "float")
    if style == "naive":
        return [Kernel(style, step, element, 0, problem.mask) for step in STEPS]
    dims = {"scores": problem.dim, "softmax": 32, "values": problem.dim_v}
    return [
        Kernel(style, step, element, padded_dims(forward_sm80.DIMS, dim, dim)[0], problem.mask)
        for step, dim in dims.items()
    ]


def values(problem: Problem, strides: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> dict[str, object]:
    """The kernels' arguments; strides are (batch, head, row) of q, k, v, o."""
    constants = problem.mask.constants
    found: dict[str, object] = dict(addresses)
    for t, s in strides.items():
        found |= {f"{t}_{axis}": stride for axis, stride in zip(("batch", "head", "row"), s, strict=True)}
    return found | {
        "scale": problem.scale,
        "batch": problem.batch,
        "heads": problem.heads,
        "group": problem.group,
        "len_q": problem.len_q,
        "len_k": problem.len_k,
        "dim": problem.dim,
        "dim_v": problem.dim_v,
        "stride_s": row_stride(problem),
        "mask": constants + (0,) * (MAX_CONSTANTS - len(constants)),
    }


def matrices(problem: Problem, style: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """S and P."""
    dtype = torch.float32 if style == "naive" else problem.dtype
    shape = (problem.batch * problem.heads, problem.len_q, row_stride(problem))
    return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)


# ---- on a GPU
# ----------------------------------------------------------------------------------------------------------


@functools.cache
def _loaded(kernel_source: str, arch: str, name: str, function: str, smem: int) -> driver.Kernel:
    return driver.Kernel(jit.get(jit.flatten(kernel_source), arch, name=name).cubin, function, smem)


def _prepare(style: str) -> Prepare:
    def prepare(case: BenchCase, x: Tensors) -> Prepared:
        device = x.q.device
        if device.type != "cuda":
            raise Refusal(
                "unsupported", f"needs an NVIDIA GPU, the tensors are on {device.type}; tests run it on the emulator"
            )
        refuse(case, softcap="no softcap", sinks="no sinks", bias="no bias", gradients="no gradients")
        problem = case.problem(device)
        if (reason := feature_limits(problem, style) or driver.available() or jit.compiler_missing()) is not None:
            raise Refusal("unsupported", reason)
        index = device.index or 0
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        strides: dict[str, tuple[int, ...]] = dict(zip("qkv", problem.strides, strict=True))
        strides["o"] = (case.len_q * case.heads * case.value_dim, case.value_dim, case.heads * case.value_dim)
        nowhere = dict.fromkeys(("q", "k", "v", "o", "s", "p"), 0)
        launches = []
        for kernel in kernels(problem, style):
            loaded = _loaded(kernel.source, arch, kernel.name, f"standard_{style}_{kernel.step}", kernel.smem)
            packed = kernel.params.pack(values(problem, strides, nowhere))
            launch = driver.Launch(loaded.function(index), kernel.grid(problem), kernel.threads, kernel.smem, packed)
            launches.append((launch, kernel.params.patcher(launch.params, "q", "k", "v", "o", "s", "p")))

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = torch.empty((case.batch, case.len_q, case.heads, case.value_dim), dtype=q.dtype, device=q.device)
            s, p = matrices(problem, style, q.device)
            addresses = [t.data_ptr() for t in (q, k, v, out, s, p)]
            stream = torch._C._cuda_getCurrentRawStream(index)
            for launch, patch in launches:
                patch(*addresses)
                launch.launch(stream)
            return out

        return Prepared(forward, "bshd")

    return prepare


def providers() -> list[Provider]:
    def slow(case: BenchCase, device: torch.device) -> str | None:
        work = case.score_elements() * case.dim
        return (
            "scalar arithmetic: it would take seconds; name it to time it"
            if device.type == "cuda" and work > 1 << 34
            else None
        )

    return [
        Provider(
            "cuda-naive",
            "standard",
            "our three CUDA kernels, scalar fp32",
            _prepare("naive"),
            matrices=lambda c: 8 * c.score_elements(),
            kernels="standard_naive",
            differentiable=False,
            skipped=slow,
            device="cuda",
        ),
        Provider(
            "cuda-mma",
            "standard",
            "our three CUDA kernels on the matrix units",
            _prepare("mma"),
            matrices=two_matrices,
            kernels="standard_mma",
            differentiable=False,
            device="cuda",
        ),
    ]
