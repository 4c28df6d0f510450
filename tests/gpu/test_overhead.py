"""What a call costs besides the kernel: the first one, one from the cache of kernels, and each of many."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu.kernels import KERNELS, kernels_here

import strobe

FIRST_S, CACHED_S = 2.0, 0.05
CPU_US = {"sm80": 20.0, "sm90": 25.0}

each_kernel = pytest.mark.parametrize(
    "kernel", [pytest.param(k, marks=() if k in kernels_here() else pytest.mark.skip("no Hopper GPU")) for k in KERNELS]
)

_FIRST_CALL = """
import sys, time
import torch, strobe
from strobe.cuda import backend, driver
driver.available()
q = torch.randn(1, 512, 8, 128, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
start = time.perf_counter()
strobe.attention(q, q, q, mask=strobe.causal, backend=sys.argv[1])
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def in_new_process(script: str, kernel: str, **environment: str) -> float:
    """The number that it prints last."""
    environment = os.environ | {"PYTHONPATH": str(Path(strobe.__file__).parent.parent)} | environment
    command = [sys.executable, "-c", script, kernel]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


@each_kernel
def test_first_call_and_cached_call(kernel: str, tmp_path: Path) -> None:
    cache = {"STROBE_CACHE_DIR": str(tmp_path / "cache")}
    first = in_new_process(_FIRST_CALL, kernel, **cache)
    cached = min(in_new_process(_FIRST_CALL, kernel, **cache) for _ in range(3))
    print(f"{kernel}: first call {first:.2f} s, from the cache {1000 * cached:.0f} ms")
    assert first <= FIRST_S and cached <= CACHED_S


_MANY_CALLS = """
import sys, time
import torch, strobe
q = torch.randn(1, 64, 1, 64, device="cuda", dtype=torch.bfloat16)  # so small that the GPU is never behind
best = float("inf")
for _ in range(30):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(100):
        strobe.attention(q, q, q, mask=strobe.causal, backend=sys.argv[1])
    best = min(best, (time.perf_counter() - start) / 100)
torch.cuda.synchronize()
print(best)
"""


@each_kernel
def test_cpu_time_of_a_call(kernel: str) -> None:
    """In a process of its own, where nobody has left hooks or garbage."""
    best = in_new_process(_MANY_CALLS, kernel)
    print(f"{kernel}: {best * 1e6:.1f} µs of CPU time a call")
    assert best * 1e6 <= CPU_US[kernel]
