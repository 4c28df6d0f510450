"""Kernel source to shared library, with the system's C++ compiler and a content-addressed cache."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from strobe.cuda.runtime import cache, jit
from strobe.cuda.runtime.jit import ENTRY
from strobe.emulator.program import Program

_CANDIDATES = ("c++", "g++", "clang++")
# No contraction: sums come out the same on every machine. Hidden symbols: many kernels live in one process.
_OPTIONS = (
    *("-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-exceptions"),
    *("-fPIC", "-fvisibility=hidden", "-pthread", "-w"),
)
# The engine is the same in every program, so it is compiled once and linked to each: time to optimise it. A kernel takes
# longer to compile than to run.
_OF_ENGINE = ("-O2", "-ftree-vectorize", "-c")
_OF_KERNEL = ("-O1", "-shared")
_LIMIT_S = 600


class CompilerMissing(RuntimeError):
    """There is no C++ compiler; the message says how to get one."""


class FrameError(RuntimeError):
    """A function has too large a frame for an emulated thread's stack (`bytes`), or one whose size is not known when it
    is compiled (None)."""

    def __init__(self, line: int, bytes: int | None) -> None:
        super().__init__(f"line {line}: a frame of {bytes} bytes")
        self.line, self.bytes = line, bytes


# ---- the compiler ----------------------------------------------------------------------------------------------------
def compiler() -> str | None:
    """The C++ compiler the emulator would use: $CXX, else the first of c++, g++, clang++ on the path; None without
    one."""
    if chosen := _cxx():
        return chosen if _problem_with_cxx(chosen) is None else None
    return next((path for name in _CANDIDATES if (path := shutil.which(name))), None)


def why_missing() -> str:
    """Say in one line why `compiler()` is None."""
    if chosen := _cxx():
        return f"CXX is {chosen!r}, {_problem_with_cxx(chosen)}"
    return f"none of {', '.join(_CANDIDATES)} is on the path and CXX is not set"


def how_to_install() -> str:
    return (
        f"the emulator needs a C++17 compiler: {why_missing()}. Install one, or name yours in CXX:\n"
        "  Debian, Ubuntu:  sudo apt install g++\n"
        "  Fedora:          sudo dnf install gcc-c++\n"
        "  macOS:           xcode-select --install\n"
        "  Windows:         use WSL, then as for Ubuntu"
    )


def _cxx() -> str:
    return os.environ.get("CXX", "").strip()


def _problem_with_cxx(chosen: str) -> str | None:
    try:
        program = shlex.split(chosen)[0]
    except ValueError as error:
        return f"which is not a command line: {error}"
    return None if shutil.which(program) else "which cannot be found"


def _called(command: str) -> str:
    """The compiler as errors name it."""
    return f"CXX={command}" if command == _cxx() else command


# ---- the cache -------------------------------------------------------------------------------------------------------
def build(source: str, *, name: str = ENTRY, entry: str = ENTRY, frame_limit: tuple[str, int] | None = None) -> Program:
    """The kernel `entry` of `source` (flattened or not) as a program for this machine; compiled once per text and compiler.

    `frame_limit` is (file, bytes): a function of that file whose frame is larger raises `FrameError`. A frame that is
    larger than the guard beside a stack would step over it."""
    command = compiler()
    if command is None:
        raise CompilerMissing(how_to_install())
    driver = jit.flatten("#include <strobe/emu/driver.cuh>\n", "emu")
    text = f"{jit.flatten(source, 'emu')}\n#define STROBE_ENTRY {entry}\n{driver}"
    options = (*_OPTIONS, *_machine_options())
    limit = () if frame_limit is None else map(str, frame_limit)
    compiled_by = (_version(command), *shlex.split(command)[1:], platform.machine())
    for_engine = _key(_engine_text(), *compiled_by, *_OF_ENGINE, *options)
    key = _key(text, for_engine, *_OF_KERNEL, *limit)
    return _load(key, for_engine, text, command, options, name, frame_limit)


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@functools.cache
def _load(
    key: str,
    for_engine: str,
    text: str,
    command: str,
    options: tuple[str, ...],
    name: str,
    frame_limit: tuple[str, int] | None,
) -> Program:
    kept = cache.directory("emulator")
    if kept is not None:
        # The loader trusts what it maps: a damaged library would end the process, so its content is checked first.
        for library, _ in cache.intact(kept, key, ".so"):
            with contextlib.suppress(OSError):  # of a machine that shares this cache and is unlike this one
                return Program(library, name)
    engine = _engine(for_engine, command, options)
    product = _compile(text, command, (*_OF_KERNEL, *options), name, "kernel.so", engine, frame_limit)
    if kept is not None:
        with contextlib.suppress(OSError):  # read-only or full, or nothing may be executed there
            cache.write(kept / f"{key}.cpp", text.encode())
            return Program(cache.publish(kept, key, ".so", product), name)
    library = cache.publish(Path(_temporary_directory().name), key, ".so", product)
    try:
        return Program(library, name)
    except OSError as error:
        raise RuntimeError(f"{_called(command)} made a library that cannot be loaded: {error}") from error


@functools.cache
def _engine_text() -> str:
    return jit.flatten("#include <strobe/emu/engine/engine.cuh>\n", "emu")


@functools.cache
def _engine(key: str, command: str, options: tuple[str, ...]) -> bytes:
    """Return the object file with which every program is linked."""
    kept = cache.directory("emulator")
    if kept is not None:
        for _, content in cache.intact(kept, key, ".o"):
            return content
    product = _compile(_engine_text(), command, (*_OF_ENGINE, *options), "the engine", "engine.o")
    if kept is not None:
        with contextlib.suppress(OSError):
            cache.publish(kept, key, ".o", product)
    return product


def _compile(
    text: str,
    command: str,
    options: tuple[str, ...],
    name: str,
    file_name: str,
    engine: bytes | None = None,
    frame_limit: tuple[str, int] | None = None,
) -> bytes:
    """The file that the compiler makes of this text."""
    with tempfile.TemporaryDirectory(prefix="strobe-") as scratch:
        source, product = Path(scratch, "kernel.cpp"), Path(scratch, file_name)
        source.write_text(text, encoding="utf-8")
        inputs = [str(source)]
        if engine is not None:
            Path(scratch, "engine.o").write_bytes(engine)
            inputs.append(str(Path(scratch, "engine.o")))
        counting = () if frame_limit is None else ("-fstack-usage",)
        done = _run(command, *options, *counting, *inputs, "-o", str(product), limit_s=_LIMIT_S)
        if done.returncode:
            raise RuntimeError(f"{_called(command)} cannot compile {name} for the emulator:\n{done.stderr.strip()}")
        if frame_limit is not None:
            for listed in Path(scratch).glob("*.su"):
                _check_frames(listed.read_text(encoding="utf-8"), *frame_limit)
        try:
            return product.read_bytes()
        except FileNotFoundError:
            raise RuntimeError(f"{_called(command)} made nothing of {name}: is it a C++ compiler?") from None


def _check_frames(listed: str, file: str, most: int) -> None:
    """`listed` is what -fstack-usage writes, a line for each function: `file:line:column:name`, bytes, kind."""
    for line, size, kind in re.findall(rf"^{re.escape(file)}:(\d+):[^\t]*\t(\d+)\t(\S+)$", listed, re.MULTILINE):
        if int(size) > most or kind == "dynamic":
            raise FrameError(int(line), None if kind == "dynamic" else int(size))


def _run(command: str, *arguments: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    whole = [*shlex.split(command), *arguments]
    try:
        return subprocess.run(
            whole, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit_s
        )
    except OSError as error:
        raise RuntimeError(f"{_called(command)} cannot be run: {error.strerror or error}") from error
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{_called(command)} did not finish within {limit_s:g} s") from None


@functools.cache
def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="strobe-emulator-")  # removed when the process ends


@functools.cache
def _version(command: str) -> str:
    done = _run(command, "--version", limit_s=60)
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
