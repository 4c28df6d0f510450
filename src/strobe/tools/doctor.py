"""`strobe doctor` reports, as plain data, what attention on this machine depends on, the libraries that call attention,
and what to do next."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import shutil
import stat
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import strobe
from strobe.backends import dispatch
from strobe.tools import support

# Libraries whose attention strobe can take over or stand in for: the name that is imported, and that of the package.
HOSTS = {
    "torch": "torch",
    "transformers": "transformers",
    "diffusers": "diffusers",
    "flash_attn": "flash-attn",
    "flash_attn_interface": "flash-attn-3",
    "xformers": "xformers",
    "torchtitan": "torchtitan",
    "vllm": "vllm",
    "sglang": "sglang",
}
NOT_ACTIVE = "not active"


def report() -> dict[str, Any]:
    """Everything is looked up, nothing is changed, and nothing that is missing is an error."""
    facts = {
        "strobe": strobe.__version__,
        "namesake": _namesake(),
        "python": platform.python_version(),
        "torch": _torch(),
        "gpus": _gpus(),
        "driver": _driver(),
        "nvrtc": _nvrtc(),
        "cuda-bindings": _version("cuda-bindings"),
        "cache": _cache(),
        "compiler": _compiler(),
        "backends": backends(),
        "hosts": hosts(),
    }
    return facts | {"next": next_steps(facts)}


def backends() -> dict[str, str | None]:
    """Return for each backend, fastest first: None if it is ready, else why not. Asked with the problem it is there
    for."""
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


def _namesake() -> str | None:
    """Return what to do if the distribution `strobe` is installed beside ours, `strobe-attention`. It is another
    project, and pip lets each of two packages with one import name write over the other's files."""
    try:
        files = metadata.distribution("strobe").files or ()
    except metadata.PackageNotFoundError:
        return None
    if "strobe/__init__.py" not in map(str, files):  # an editable installation shares no files
        return None
    return (
        "the package `strobe` is another project's, and its files lie over these: pip uninstall strobe, install again"
    )


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
    from strobe.cuda.runtime import driver

    problem = driver.available()
    version = None
    if problem is None and hasattr(torch._C, "_cuda_getDriverVersion"):
        number = torch._C._cuda_getDriverVersion()  # 13000 for CUDA 13.0
        version = f"CUDA {number // 1000}.{number % 1000 // 10}"
    return {"problem": problem, "version": version}


def _nvrtc() -> dict[str, Any]:
    from strobe.cuda.runtime import jit

    problem = jit.nvrtc_status()
    return {"problem": problem, "version": None if problem else ".".join(map(str, jit.nvrtc_version()))}


def _cache() -> dict[str, Any]:
    from strobe.cuda.runtime import cache, jit

    directory = cache.directory()
    problem = None
    if directory is None:
        problem = "no usable directory, so each process compiles anew; STROBE_CACHE_DIR names another"
    elif not os.access(directory, os.W_OK):
        problem = "not writable, so each process compiles anew; STROBE_CACHE_DIR names another"
    kernels, libraries = ([] if directory is None else _sizes(directory, kind) for kind in ("*.cubin", "*.so"))
    return {
        "problem": problem,
        "directory": None if directory is None else str(directory),
        "kernels": len(kernels),
        "libraries": len(libraries),
        "bytes": sum(kernels) + sum(libraries),
        "layers": [str(layer) for layer in jit.layers()],
    }


def _sizes(directory: Path, pattern: str) -> list[int]:
    sizes = []
    for path in directory.rglob(pattern):
        with contextlib.suppress(OSError):  # another process may have removed it
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                sizes.append(status.st_size)
    return sizes


def _compiler() -> dict[str, Any]:
    """The C++ compiler of the emulator."""
    from strobe.emulator.compiler import compiler, why_missing

    path = compiler()
    return {"problem": None if path else why_missing(), "path": path}


# ---- hosts -----------------------------------------------------------------------------------------------------------


def hosts() -> dict[str, dict[str, str | None]]:
    """Return for each library that calls attention: its version, None if it is not installed, and whether it uses
    strobe in this process."""
    status = _compat_status()
    packages = HOSTS | {name: name for name in status if name not in HOSTS}
    return {
        name: {"version": _version(package), "strobe": status.get(name, NOT_ACTIVE)}
        for name, package in packages.items()
    }


def _compat_status() -> dict[str, str]:
    """Return what `strobe.compat` says of each host; empty in a strobe that has no such module."""
    try:
        compat = importlib.import_module("strobe.compat")
    except ModuleNotFoundError:
        return {}
    return dict(compat.status())


# ---- what to do next -------------------------------------------------------------------------------------------------


def next_steps(report: dict[str, Any]) -> list[str]:
    """Return what stands in the way first, each with its remedy; then how to go on."""
    steps = [*filter(None, [report["namesake"]]), *_gpu_steps(report)]
    if report["cache"]["problem"]:
        steps.append(f"make a cache directory usable: {report['cache']['problem']}")
    if report["compiler"]["problem"]:
        steps.append(f"to run kernels without a GPU, give the emulator a C++ compiler: {report['compiler']['problem']}")
    return [*steps, "see it run: strobe demo", "measure it here: strobe bench --suite quick"]


def _gpu_steps(report: dict[str, Any]) -> list[str]:
    torch_, gpus = report["torch"], report["gpus"]
    if not gpus and torch_["cuda"] is None:
        if _has_nvidia_driver():
            return [f"install a CUDA build of torch: {torch_['version']} has no CUDA, but an NVIDIA driver is here"]
        return []
    if not gpus:
        return [f"torch is built for CUDA {torch_['cuda']} but finds no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES"]
    steps = [
        f"{gpu['name']} ({gpu['arch']}) runs tiled: the kernels need sm_80 or later" for gpu in gpus if _too_old(gpu)
    ]
    for part in ("driver", "nvrtc"):
        if report[part]["problem"]:
            steps.append(report[part]["problem"])
    return steps


def _too_old(gpu: dict[str, Any]) -> bool:
    return int(gpu["arch"].removeprefix("sm_")) < 80


def _has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
