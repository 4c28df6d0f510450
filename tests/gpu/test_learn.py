"""A learner's CUDA C++ on the GPU: the results and the messages of the lessons."""

from __future__ import annotations

import pytest
import torch

from strobe.learn.run import gpu, run_kernel
from strobe.learn.simulator import KernelError

pytestmark = pytest.mark.skipif(gpu() is not None, reason=str(gpu()))

ADD = """
__global__ void add(const float* a, const float* b, float* c, int height, int width, float scale) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x < width && y < height) c[y * width + x] = scale * (a[y * width + x] + b[y * width + x]);
}
"""
REVERSE = """
__global__ void reverse(float* x) {
  extern __shared__ float part[];
  part[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = part[blockDim.x - 1 - threadIdx.x];
}
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_two_dimensions(device: str) -> None:
    a, b = torch.randn(2, 33, 50, device=device)
    c = torch.full((33, 50), torch.nan, device=device)
    given = {"a": a, "b": b, "c": c, "height": 33, "width": 50, "scale": 0.5}
    ran = run_kernel(source=ADD, grid=(4, 5), block=(16, 8), expected={"c": 0.5 * (a + b)}, **given)
    assert ran.milliseconds is not None and ran.milliseconds > 0 and ran.counters is None
    torch.testing.assert_close(c, 0.5 * (a + b))


def test_shared_memory_and_a_tensor_that_is_read_and_written() -> None:
    """The kernel is launched twice, and the tensor must not notice."""
    x = torch.arange(64.0)
    run_kernel(source=REVERSE, grid=1, block=64, smem=256, x=x)
    assert x.tolist() == [63.0 - i for i in range(64)]


def test_mistakes() -> None:
    a = torch.ones(8)
    given = {"a": a, "b": a, "c": torch.zeros(8), "height": 1, "width": 8, "scale": 1.0}
    with pytest.raises(KernelError, match=r"line 4: identifier \"bb\" is undefined"):
        run_kernel(source=ADD.replace("+ b[", "+ bb["), grid=1, block=8, **given)
    with pytest.raises(KernelError, match=r"8 of 8 elements of c are wrong"):
        run_kernel(source=ADD, grid=1, block=8, expected={"c": 3 * a}, **given)
