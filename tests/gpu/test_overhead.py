"""Measure what a call costs besides the kernel, beside something else of the same run: hosts differ, ratios hardly do.
The benchmark has the times (`strobe bench --suite overhead`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu.kernels import KERNELS, kernels_here

import strobe

CACHED_SHARE = 0.25  # of the first call, if the kernel is on disk
OF_SDPA = 1.2  # a call's CPU time, of PyTorch's flash backend's: 0.6 to 1.0 on the hosts seen so far

pytestmark = pytest.mark.alone

each_kernel = pytest.mark.parametrize(
    "kernel", [pytest.param(k, marks=() if k in kernels_here() else pytest.mark.skip("no Hopper GPU")) for k in KERNELS]
)

_FIRST_CALL = """
import sys, time
import torch, strobe
from strobe.cuda.runtime import driver
driver.available()
q = torch.randn(1, 512, 8, 128, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
start = time.perf_counter()
strobe.attention(q, q, q, mask=strobe.causal, backend=sys.argv[1])
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def in_new_process(script: str, kernel: str, **environment: str) -> list[float]:
    """The numbers in its last line."""
    environment = os.environ | {"PYTHONPATH": str(Path(strobe.__file__).parent.parent)} | environment
    command = [sys.executable, "-c", script, kernel]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.splitlines()[-1].split()]


@each_kernel
def test_a_kernel_on_disk_is_not_compiled_again(kernel: str, tmp_path: Path) -> None:
    cache = {"STROBE_CACHE_DIR": str(tmp_path / "cache")}
    (first,) = in_new_process(_FIRST_CALL, kernel, **cache)
    cached = min(in_new_process(_FIRST_CALL, kernel, **cache)[0] for _ in range(3))
    print(f"{kernel}: first call {first:.2f} s, with the kernel on disk {1000 * cached:.0f} ms")
    assert cached <= CACHED_SHARE * first


_MANY_CALLS = """
import sys, time
import torch, strobe
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

q = torch.randn(1, 64, 1, 64, device="cuda", dtype=torch.bfloat16)  # so small that the GPU is never behind
p = q.transpose(1, 2)
calls = [lambda: strobe.attention(q, q, q, mask=strobe.causal, backend=sys.argv[1]), lambda: sdpa(p, p, p, is_causal=True)]
best = [float("inf")] * 2
with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
    for turn in range(60):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            calls[turn % 2]()
        best[turn % 2] = min(best[turn % 2], (time.perf_counter() - start) / 100)
torch.cuda.synchronize()
print(*best)
"""


@each_kernel
def test_cpu_time_of_a_call(kernel: str) -> None:
    """The time is taken in a process of its own, where nobody has left hooks or garbage."""
    ours, sdpa = in_new_process(_MANY_CALLS, kernel)
    print(f"{kernel}: {ours * 1e6:.1f} µs of CPU time a call, PyTorch's flash backend {sdpa * 1e6:.1f} µs")
    assert ours <= OF_SDPA * sdpa
