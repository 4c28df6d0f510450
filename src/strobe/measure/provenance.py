"""The provenance of a result: device, driver, versions, commit, command, date."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import strobe

_PEERS = (
    "triton",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "xformers",
    "flashinfer-python",
    "megatron-core",
    "apex",
    "nvidia-ml-py",
)


def collect(device: torch.device, seed: int, command: str | None = None) -> dict[str, Any]:
    return {
        "strobe": strobe.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command or command_line(),
        "seed": seed,
        "git": _git(),
        "device": device_facts(device),
        "driver": _driver(device),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "nvrtc": _nvrtc(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "host_cpu": cpu_name(),
        "host_cores": cores(),
        "host_load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,  # before the run
        "packages": {name: version for name in _PEERS if (version := _version(name))},
        "environment": {name: value for name, value in sorted(os.environ.items()) if _matters(name)},
    }


def busy_machine(provenance: dict[str, Any]) -> str | None:
    """A warning for results of a CPU that others used as well; None if it was free."""
    load, cores = provenance.get("host_load") or 0.0, provenance.get("host_cores") or 1
    if provenance["device"]["kind"] != "cpu" or load <= cores / 4:
        return None
    return f"Other work ran on this machine when the run began (load {load} on {cores} cores): the times are noisy."


def command_line() -> str:
    """Return the command as typed, but without the directories of this machine."""
    program = "strobe" if Path(sys.argv[0]).name in ("strobe", "__main__.py") else Path(sys.argv[0]).name
    return shlex.join([program, *(Path(word).name if word.startswith("/") else word for word in sys.argv[1:])])


def _matters(name: str) -> bool:
    ours = name.startswith("STROBE_") and not name.endswith(("_DIR", "_PATH"))
    return ours or name in ("OMP_NUM_THREADS", "CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE")


def device_facts(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        return {
            "kind": "cuda",
            "name": p.name,
            "arch": f"sm_{p.major}{p.minor}",
            "memory_bytes": p.total_memory,
            "multiprocessors": p.multi_processor_count,
            "l2_bytes": getattr(p, "L2_cache_size", None),
        }
    return {
        "kind": device.type,
        "name": f"{cpu_name()}, {torch.get_num_threads()} threads",
        "memory_bytes": _host_memory(),
    }


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    try:
        return cpu_name_in(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return cpu_name_in("")


def cpu_name_in(cpuinfo: str) -> str:
    """x86 has a name there, Arm two numbers that stand for one."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    facts = {key.strip(): value.strip() for key, _, value in lines}
    if "model name" in facts:
        return facts["model name"]
    numbers = [f"{what} {facts[f'CPU {what}']}" for what in ("implementer", "part") if f"CPU {what}" in facts]
    return ", ".join([platform.processor() or platform.machine(), *numbers])


def _host_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    try:
        return driver_version(Path("/proc/driver/nvidia/version").read_text(encoding="utf-8"))
    except OSError:
        return None


def driver_version(text: str) -> str | None:
    """Return the version in the kernel module's own line: "… Kernel Module  535.54.03 …", or "… Open Kernel Module for
    x86_64  580.95 …"."""
    match = re.search(r"Kernel Module\b.*?\s(\d+\.\d+(?:\.\d+)?)\b", text)
    return match.group(1) if match else None


def _nvrtc() -> str | None:
    from strobe.cuda.runtime import jit

    return None if jit.nvrtc_status() is not None else ".".join(map(str, jit.nvrtc_version()))


def _git() -> dict[str, Any]:
    """Return the commit of the source that runs, which need not be the current directory."""
    root = Path(__file__).resolve().parent

    def ask(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if told := os.environ.get(
        "STROBE_COMMIT"
    ):  # by whoever copied the source here: the copy's own history may be another
        return {"commit": told, "dirty": None}
    status = ask("status", "--porcelain", "--untracked-files=no")
    return {"commit": ask("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}
