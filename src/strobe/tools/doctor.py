"""What `strobe doctor` reports: the pieces that attention on this machine depends on, each with its state, as plain
data."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import torch

import strobe
from strobe.backends import dispatch
from strobe.tools import support


def report() -> dict[str, Any]:
    """Everything is looked up, nothing is changed, and nothing that is missing is an error."""
    return {
        "strobe": strobe.__version__,
        "python": platform.python_version(),
        "torch": _torch(),
        "gpus": _gpus(),
        "driver": _driver(),
        "nvrtc": _nvrtc(),
        "cuda-bindings": _version("cuda-bindings"),
        "cache": _cache(),
        "compiler": _compiler(),
        "backends": backends(),
    }


def backends() -> dict[str, str | None]:
    """For each backend, fastest first: None if it is ready, else why not. Asked with the problem it is there for."""
    return {name: _why_not(name) for name in dispatch.NAMES}


def _why_not(backend: str) -> str | None:
    problem = support.home_problem(backend)
    if problem.device.type == "cuda" and not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU"
    return dispatch.get(backend).supports(problem)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, Any]:
    return {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {
            "name": p.name,
            "arch": f"sm_{p.major}{p.minor}",
            "memory": p.total_memory,
            "multiprocessors": p.multi_processor_count,
        }
        for p in properties
    ]


def _driver() -> dict[str, Any]:
    from strobe.cuda import driver

    problem = driver.available()
    version = None
    if problem is None and hasattr(torch._C, "_cuda_getDriverVersion"):
        number = torch._C._cuda_getDriverVersion()  # 13000 for CUDA 13.0
        version = f"CUDA {number // 1000}.{number % 1000 // 10}"
    return {"problem": problem, "version": version}


def _nvrtc() -> dict[str, Any]:
    from strobe.cuda import jit

    problem = jit.nvrtc_status()
    return {"problem": problem, "version": None if problem else ".".join(map(str, jit.nvrtc_version()))}


def _cache() -> dict[str, Any]:
    from strobe.cuda import jit

    directory = jit.cache_dir()
    problem = None
    if directory is None:
        problem = "no usable directory, so each process compiles anew; STROBE_CACHE_DIR names another"
    elif not os.access(directory, os.W_OK):
        problem = "not writable, so each process compiles anew; STROBE_CACHE_DIR names another"
    sizes = [] if directory is None else [path.stat().st_size for path in directory.rglob("*.cubin")]
    return {
        "problem": problem,
        "directory": None if directory is None else str(directory),
        "kernels": len(sizes),
        "bytes": sum(sizes),
        "layers": [str(layer) for layer in jit.layers()],
    }


def _compiler() -> dict[str, Any]:
    """The C++ compiler of the emulator."""
    from strobe import emulator

    path = emulator.compiler()
    problem = None if path else "none found; the emulator needs one: install g++ or clang++, or name yours in $CXX"
    return {"problem": problem, "path": path}
