"""Exercises to be solved in CUDA C++: a guard, a barrier, FlashAttention itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from strobe.emulator import CompilerMissing
from strobe.learn.checking import Task, Verdict
from strobe.learn.run import run_kernel
from strobe.learn.simulator import KernelError


@dataclass(frozen=True)
class CudaCase:
    """One launch, and what a tensor should hold afterwards."""

    what: str
    grid: int
    block: int
    smem: int
    arguments: dict[str, Any]
    expected: dict[str, torch.Tensor]


@dataclass(frozen=True)
class CudaExercise(Task):
    stub: str
    solution: str
    cases: Callable[[], Iterator[CudaCase]]

    def check(self, source: str) -> Verdict:
        """Run the kernel on every case; stops at the first that fails."""
        count = 0
        for case in self.cases():
            try:
                run_kernel(
                    source=source,
                    grid=case.grid,
                    block=case.block,
                    smem=case.smem,
                    expected=case.expected,
                    **case.arguments,
                )
            except CompilerMissing:
                raise
            except (KernelError, ValueError, TypeError) as error:
                return Verdict(False, f"{self.name}, {case.what}:\n{error}")
            count += 1
        return Verdict(True, f"{self.name}, {count} cases")

    def show(self) -> str:
        """The task as a comment, and the stub: to be copied into a string."""
        return "\n".join([*(f"// {line}" for line in self.comment), self.stub.strip()])

    def show_solution(self) -> str:
        return self.solution.strip()


# ---- a negative: index and guard -------------------------------------------------------------------------------------

_NEGATIVE = """
__global__ void negative(const float* image, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = 1.0f - image[i];
}
"""


def _negative_cases() -> Iterator[CudaCase]:
    for n in (256, 1000):
        image = torch.rand(n, generator=torch.Generator().manual_seed(n))
        arguments = {"image": image, "out": torch.full((n,), torch.nan), "n": n}
        yield CudaCase(f"{n} numbers in blocks of 128", -(-n // 128), 128, 0, arguments, {"out": 1 - image})


NEGATIVE = CudaExercise(
    "negative",
    "Turn a picture into its negative: out[i] = 1 - image[i], for n numbers, one thread each.",
    (
        "The stub is right for the first block. Where does block 1 begin?",
        "1000 numbers in blocks of 128 need 8 blocks, so 1024 threads. What should the last 24 do?",
    ),
    """
__global__ void negative(const float* image, float* out, int n) {
  int i = threadIdx.x;
  out[i] = 1.0f - image[i];
}
""",
    _NEGATIVE,
    _negative_cases,
)


# ---- the maximum of a block: barriers --------------------------------------------------------------------------------

_BLOCK_MAX = """
__global__ void block_max(const float* x, float* largest, int n) {
  __shared__ float part[64];
  int i = threadIdx.x, t = blockIdx.x * blockDim.x + i;
  part[i] = t < n ? x[t] : -INFINITY;
  __syncthreads();
  for (int reach = 32; reach > 0; reach /= 2) {
    if (i < reach) part[i] = fmaxf(part[i], part[i + reach]);
    __syncthreads();
  }
  if (i == 0) largest[blockIdx.x] = part[0];
}
"""


def _block_max_cases() -> Iterator[CudaCase]:
    for n in (64, 150):
        x = torch.randn(n, generator=torch.Generator().manual_seed(n)) - 5  # the guard must not let a 0 win
        blocks = -(-n // 64)
        expected = torch.stack([part.max() for part in x.split(64)])
        arguments = {"x": x, "largest": torch.full((blocks,), torch.nan), "n": n}
        yield CudaCase(f"{n} numbers in blocks of 64", blocks, 64, 0, arguments, {"largest": expected})


BLOCK_MAX = CudaExercise(
    "block_max",
    "largest[b] is the largest of block b's 64 numbers: half of the threads compare with the other half, then a quarter, …",
    (
        "Who may read part[i + reach], and who may still be writing it? Two barriers are missing.",
        "A barrier is for all threads of the block: not inside the `if`.",
        "Which number is no larger than any other? It is what threads beyond the end contribute.",
    ),
    """
__global__ void block_max(const float* x, float* largest, int n) {
  __shared__ float part[64];
  int i = threadIdx.x, t = blockIdx.x * blockDim.x + i;
  part[i] = t < n ? x[t] : 0.0f;
  for (int reach = 32; reach > 0; reach /= 2) {
    if (i < reach) part[i] = fmaxf(part[i], part[i + reach]);
  }
  if (i == 0) largest[blockIdx.x] = part[0];
}
""",
    _BLOCK_MAX,
    _block_max_cases,
)


# ---- FlashAttention --------------------------------------------------------------------------------------------------

_FLASH = """
// Tiles of 16 keys; a thread owns a query. d is 8.
__global__ void flash(const float* q, const float* k, const float* v, float* o, int n, float scale) {
  __shared__ float k_tile[16][8], v_tile[16][8];
  int row = blockIdx.x * blockDim.x + threadIdx.x;
  float query[8], out[8], m = -INFINITY, l = 0.0f;
  for (int i = 0; i < 8; ++i) { query[i] = row < n ? q[row * 8 + i] : 0.0f; out[i] = 0.0f; }
  for (int start = 0; start < n; start += 16) {
    for (int e = threadIdx.x; e < 16 * 8; e += blockDim.x) {  // the block fetches the tile together
      int key = start + e / 8;
      k_tile[e / 8][e % 8] = key < n ? k[key * 8 + e % 8] : 0.0f;
      v_tile[e / 8][e % 8] = key < n ? v[key * 8 + e % 8] : 0.0f;
    }
    __syncthreads();
    for (int j = 0; j < 16 && start + j < n; ++j) {
      float s = 0.0f;
      for (int i = 0; i < 8; ++i) s += scale * query[i] * k_tile[j][i];
      float m_new = fmaxf(m, s), alpha = expf(m - m_new), p = expf(s - m_new);
      l = l * alpha + p;
      for (int i = 0; i < 8; ++i) out[i] = out[i] * alpha + p * v_tile[j][i];
      m = m_new;
    }
    __syncthreads();
  }
  if (row < n) for (int i = 0; i < 8; ++i) o[row * 8 + i] = out[i] / l;
}
"""


def _flash_cases() -> Iterator[CudaCase]:
    for n, gain in ((32, 1.0), (40, 60.0)):
        q, k, v = torch.randn(3, n, 8, generator=torch.Generator().manual_seed(n))
        q = gain * q
        scale = 1 / math.sqrt(8)
        expected = ((q.double() @ k.double().T) * scale).softmax(1) @ v.double()
        arguments = {"q": q, "k": k, "v": v, "o": torch.full((n, 8), torch.nan), "n": n, "scale": scale}
        what = f"{n} tokens" + (", scores in the hundreds" if gain > 1 else "")
        yield CudaCase(what, -(-n // 32), 32, 0, arguments, {"o": expected})


FLASH_CUDA = CudaExercise(
    "flash",
    "FlashAttention in CUDA C++: o = softmax(scale q kᵀ) v, a thread for each query, tiles of 16 keys in shared memory.",
    (
        "The stub sums e^s itself. What happens to scores in the hundreds? Keep the largest so far, and measure from it.",
        "When m grows, l and all of out are in the old unit: multiply them by alpha = expf(m - m_new).",
        "The last tile is not full: keys from n on must not count. And threads without a query still fetch and wait.",
    ),
    _FLASH.replace("float m_new = fmaxf(m, s), alpha = expf(m - m_new), p = expf(s - m_new);", "float p = expf(s);")
    .replace("l = l * alpha + p;", "l += p;")
    .replace("out[i] = out[i] * alpha + p * v_tile[j][i];", "out[i] += p * v_tile[j][i];")
    .replace("\n      m = m_new;", "")
    .replace(", m = -INFINITY, l = 0.0f;", ", l = 0.0f;"),
    _FLASH,
    _flash_cases,
)

CUDA = (NEGATIVE, BLOCK_MAX, FLASH_CUDA)
