"""compute-sanitizer over both kernels, where the tool is at hand: no access outside the tensors, no race in shared
memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu.kernels import KERNELS, kernels_here

import strobe
from strobe.cuda.parts.kernel import PREFIX

TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
pytestmark = pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not on the path")

# Ragged everywhere: tails of keys and rows, a head dim that is rounded up, packed sequences of length 0, several
# rounds.
_SCRIPT = """
import sys, torch, strobe
kernel = sys.argv[1]
def some(*shape): return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
for dim, mask in ((64, strobe.causal), (128, strobe.window(70, 5)), (72, strobe.full)):
    k = some(1, 200, 1, dim)
    strobe.attention(some(1, 131, 3, dim), k, some(1, 200, 1, dim), mask=mask, backend=kernel, return_lse=True)
k = some(1, 3000, 2, 128)
strobe.attention(some(1, 3, 8, 128), k, some(1, 3000, 2, 128), mask=strobe.causal, backend=kernel, return_lse=True)
cu_q, cu_k = (torch.tensor(x, device="cuda", dtype=torch.int32) for x in ([0, 65, 65, 70, 199], [0, 130, 133, 133, 190]))
strobe.attention_varlen(some(199, 2, 128), some(190, 2, 128), some(190, 2, 128), cu_q, cu_k, max_q=129, max_k=130,
                        mask=strobe.causal, backend=kernel, return_lse=True)
torch.cuda.synchronize()
print("done")
"""

# Two warps write to shared memory, and each reads what the other one wrote, without a barrier in between.
_RACE = """
import sys, torch
from strobe.cuda.runtime import driver, jit
name = sys.argv[1]
source = 'extern "C" __global__ void ' + name + '(int* out) {'
source += '__shared__ int x[64]; x[threadIdx.x] = threadIdx.x; out[threadIdx.x] = x[63 - threadIdx.x]; }'
out = torch.zeros(64, device="cuda", dtype=torch.int32)
arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
function = driver.Kernel(jit.get(source, arch, name=name).cubin, name).function(0)
driver.Launch(function, 1, 64, 0, out.data_ptr().to_bytes(8, "little")).launch(0)
torch.cuda.synchronize()
print("done")
"""
_SUMMARY = re.compile(r"RACECHECK SUMMARY: (?P<hazards>\d+) hazards? displayed \((?P<errors>\d+) errors?")


def sanitize(tool: str, script: str, argument: str) -> str:
    assert TOOL is not None
    # Without torch's pool every tensor is an allocation of its own, and reading behind it shows.
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": str(Path(strobe.__file__).parent.parent),
    }
    # torch asks the driver for functions that it may not have: an error to the tool, not to us.
    filters = ["--kernel-name", f"kernel_substring={PREFIX}"] if tool == "racecheck" else ["--report-api-errors", "no"]
    command = [TOOL, "--tool", tool, *filters, sys.executable, "-c", script, argument]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    output = done.stdout + done.stderr
    assert "done" in output, output[-4000:]
    return output


@pytest.mark.parametrize("kernel", KERNELS)
def test_memcheck(kernel: str) -> None:
    if kernel not in kernels_here():
        pytest.skip("no Hopper GPU")
    output = sanitize("memcheck", _SCRIPT, kernel)
    assert re.search(r"ERROR SUMMARY: 0 errors", output), output[-4000:]


@pytest.mark.parametrize("kernel", KERNELS)
def test_racecheck(kernel: str) -> None:
    if kernel not in kernels_here():
        pytest.skip("no Hopper GPU")
    output = sanitize("racecheck", _SCRIPT, kernel)
    summary = _SUMMARY.search(output)
    assert summary is not None and summary["errors"] == "0", output[-4000:]


@pytest.mark.parametrize(("name", "checked"), [(f"{PREFIX}race", True), ("race", False)])
def test_racecheck_checks_kernels_with_our_names(name: str, checked: bool) -> None:
    """A filter that matches no kernel would find no race in any."""
    output = sanitize("racecheck", _RACE, name)
    summary = _SUMMARY.search(output)
    assert summary is not None and (summary["hazards"] != "0") == checked, output[-4000:]
