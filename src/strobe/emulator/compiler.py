"""Kernel source to shared library, with the system's C++ compiler and a content-addressed cache."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from strobe.cuda import jit
from strobe.emulator.program import Program

_CANDIDATES = ("c++", "g++", "clang++")
# No contraction: sums come out the same on every machine. Hidden symbols: many kernels live in one process.
_OPTIONS = (
    *("-std=c++17", "-O2", "-ftree-vectorize", "-ffp-contract=off", "-fno-math-errno", "-fno-exceptions"),
    *("-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-w"),
)
_LIMIT_S = 600


class CompilerMissing(RuntimeError):
    """There is no C++ compiler; the message says how to get one."""


def compiler() -> str | None:
    """The C++ compiler the emulator would use: $CXX, else the first of c++, g++, clang++ on the path; None without
    one."""
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        return chosen if shutil.which(shlex.split(chosen)[0]) else None
    return next((path for name in _CANDIDATES if (path := shutil.which(name))), None)


def build(source: str, *, name: str = "kernel") -> Program:
    """The kernel of `source` (flattened or not) as a program for this machine; compiled once per text and compiler."""
    command = compiler()
    if command is None:
        raise CompilerMissing(how_to_install())
    text = jit.flatten(source, "emu") + "\n" + jit.flatten("#include <strobe/emu/driver.cuh>\n", "emu")
    options = (*_OPTIONS, *_machine_options())
    key = hashlib.sha256("\0".join((text, _version(command), *options)).encode()).hexdigest()[:32]
    return _load(key, text, command, options, name)


@functools.cache
def _load(key: str, text: str, command: str, options: tuple[str, ...], name: str) -> Program:
    directory = _directory()
    library = directory / f"{key}.so"
    if library.exists():
        with contextlib.suppress(OSError):  # a damaged file: make it again
            return Program(library, name)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        source_file, product = Path(scratch, f"{key}.cpp"), Path(scratch, f"{key}.so")
        source_file.write_text(text, encoding="utf-8")
        arguments = [*shlex.split(command), *options, str(source_file), "-o", str(product)]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=_LIMIT_S)
        if done.returncode:
            raise RuntimeError(f"{command} cannot compile {name} for the emulator:\n{done.stderr.strip()}")
        os.replace(source_file, directory / source_file.name)
        os.replace(product, library)
    return Program(library, name)


def _directory() -> Path:
    """Where libraries are kept: beside the cubins, or, where that cannot be written, in a directory of this process."""
    cache = jit.cache_dir()
    if cache is not None:
        with contextlib.suppress(OSError):
            kept = cache / "emulator"
            kept.mkdir(mode=0o700, exist_ok=True)
            with tempfile.TemporaryFile(dir=kept):
                return kept
    return Path(_temporary_directory().name)


@functools.cache
def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="strobe-emulator-")  # removed when the process ends


@functools.cache
def _version(command: str) -> str:
    done = subprocess.run([*shlex.split(command), "--version"], capture_output=True, text=True, timeout=60)
    return done.stdout or done.stderr


@functools.cache
def _machine_options() -> tuple[str, ...]:
    """AVX2 where the CPU has it: the matrix products are a few times faster."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    with contextlib.suppress(OSError):
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split())
        if {"avx2", "fma", "f16c"} <= flags:
            return ("-mavx2", "-mfma", "-mf16c")
    return ()


def how_to_install() -> str:
    chosen = os.environ.get("CXX", "").strip()
    found = (
        f"$CXX is {chosen!r}, which cannot be found"
        if chosen
        else f"none of {', '.join(_CANDIDATES)} is on the path and $CXX is not set"
    )
    return (
        f"the emulator needs a C++17 compiler: {found}. Install one:\n"
        "  Debian, Ubuntu:  sudo apt install g++\n"
        "  Fedora:          sudo dnf install gcc-c++\n"
        "  macOS:           xcode-select --install\n"
        "  Windows:         use WSL, then as for Ubuntu"
    )
