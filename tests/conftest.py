"""Fixed seeds, one kernel cache for all tests, and the rule that tests/gpu needs a GPU."""

from __future__ import annotations

import os
import platform

# Before torch is loaded: sums of its AVX-512 code depend on how many rows a tensor has, those of AVX2 do not. So the same
# numbers come out on every x86 machine.
if platform.machine() in ("x86_64", "AMD64"):
    os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
    os.environ.setdefault(
        "ONEDNN_MAX_CPU_ISA", "AVX2"
    )  # else ATen asks oneDNN, which has more, and then lacks the code

import contextlib
import gc
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_ROOT = Path(__file__).resolve().parent.parent

# Kernels compiled by one run are found by the next. A cache is keyed by content, so this cannot hide a change.
os.environ.setdefault("STROBE_CACHE_DIR", str(_ROOT / ".cache" / "strobe"))
# Inductor's cache does not know the pin above: a graph that was cached without it steps 16 floats at a time, is then compiled
# for AVX2, and leaves every other 8 floats as they were. So the tests have a cache of their own.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_ROOT / ".cache" / "inductor"))

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))  # else the workers' threads fight for the cores

with contextlib.suppress(ImportError):
    import setuptools  # noqa: F401  before anybody imports distutils, which it replaces and inductor then asks for

try:
    import hypothesis
except ImportError:  # `make gpu-test` installs nothing and may not have it
    pass
else:
    # No deadline: the first example of a test compiles kernels. Derandomised: a red run can be repeated.
    hypothesis.settings.register_profile("strobe", deadline=None, derandomize=True, database=None)
    hypothesis.settings.load_profile("strobe")


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> Iterator[None]:
    """A full garbage collection visits a million objects of libraries, which takes a third of a second, and the benchmark asks
    for many. Frozen objects are not visited."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if _ROOT / "tests" / "gpu" in item.path.parents]
    missing = None if torch.cuda.is_available() else pytest.mark.skip(reason="no NVIDIA GPU")
    for item in gpu_tests:
        item.add_marker(pytest.mark.gpu)
    for item in items:
        if missing is not None and item.get_closest_marker("gpu") is not None:
            item.add_marker(missing)
