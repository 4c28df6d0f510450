"""Source and architecture in, cubin out: header resolution, NVRTC, a content-addressed cache. Knows nothing of torch.

The cache holds one cubin per kernel, named by what was asked for, by the compiler that made it and by the hash of its
content; its source lies beside it. A kernel is compiled in memory and never read back by the process that wrote it. A
file that is damaged, foreign or cannot be written costs a compilation and nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from strobe.cuda.runtime import cache
from strobe.cuda.runtime.verbose import say

Target = Literal["ptx", "emu"]

_SCHEMA = "1"  # changes when the meaning of a key does
ENTRY = "kernel"  # the name of the kernel in a text, unless the text says otherwise
_HEADERS = Path(__file__).parents[1] / "include"
# Denormals are flushed, as in the approximate instructions that kernels name; nothing else is relaxed unasked.
_BASE_OPTIONS = ("-std=c++17", "-ftz=true", "--ptxas-options=-v")
_INSTALL = 'install NVRTC with `pip install "strobe-attention[cu13]"` ([cu12] for a CUDA 12 build of torch)'


class CompileError(RuntimeError):
    """NVRTC rejected a kernel; the message holds its log and where the source was saved."""


class CompileForbidden(RuntimeError):
    """A kernel is in no cache and STROBE_NO_COMPILE forbids making it."""


@dataclass(frozen=True)
class Compiled:
    cubin: bytes
    log: str  # the assembler's: registers, spills, warnings
    seconds: float
    nvrtc: tuple[int, int]


@dataclass(frozen=True)
class Artifact:
    cubin: bytes
    key: str
    origin: Literal["memory", "layer", "disk", "compiled"]
    path: Path | None  # the file it came from or was published to
    seconds: float
    log: str  # empty unless compiled by this process
    source: str  # complete: every header of ours is in it


# ---- one text --------------------------------------------------------------------------------------------------------
_INCLUDE = re.compile(r"\s*#\s*include\s*<(strobe/[^>]+)>")
_PRAGMA_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")


def flatten(text: str, target: Target = "ptx", name: str = "kernel.cu") -> str:
    """The text with each `#include <strobe/...>` resolved once; `#line` markers let a compiler name the header.

    For target "emu" the emulated instructions (`strobe/emu/`) take the place of the real ones (`strobe/ptx/`). Any
    other include is left alone. A flattened text has nothing left to resolve and comes back unchanged.
    """
    if target not in ("ptx", "emu"):
        raise ValueError(f'target: {target!r} is not "ptx" or "emu"')
    return "".join(_resolve(text, name, target, set()))


def _resolve(text: str, name: str, target: Target, seen: set[str]) -> list[str]:
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        include = _INCLUDE.match(line)
        if _PRAGMA_ONCE.match(line):
            lines.append("\n")
        elif include is None:
            lines.append(line)
        else:
            header = include[1]
            if target == "emu":
                header = re.sub(r"^strobe/ptx/", "strobe/emu/", header)
            if header in seen:
                lines.append("\n")
                continue
            seen.add(header)
            body = _resolve(_read_header(header, f"{name}:{number}"), header, target, seen)
            lines += [f'#line 1 "{header}"\n', *body, f'#line {number + 1} "{name}"\n']
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    return lines


def _read_header(header: str, included_from: str) -> str:
    try:
        return _read_text(_HEADERS / header)
    except OSError:
        raise FileNotFoundError(f"{included_from}: #include <{header}>: strobe has no such header") from None


@functools.cache
def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# ---- the compiler ----------------------------------------------------------------------------------------------------
def compile(source: str, arch: str, *, name: str = "kernel", options: Sequence[str] = ()) -> Compiled:
    """Compile to machine code for one architecture ("sm_80", "sm_90a", …); no cache, no GPU needed."""
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise ValueError(f'arch: {arch!r} is not of the form "sm_80" or "sm_90a"')
    if (problem := nvrtc_status()) is not None:
        raise RuntimeError(f"cannot compile {name} for {arch}: {problem}")
    nvrtc = _nvrtc()

    source = flatten(source)
    version = nvrtc_version()
    flags = [f"-arch={arch}", *_BASE_OPTIONS, *options]
    if version >= (13, 0):
        flags.append("--no-cache")  # NVRTC's own cache goes through the driver; ours needs none
    start = time.perf_counter()
    program = _succeed(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        log_size = _succeed(nvrtc.nvrtcGetProgramLogSize(program))
        log_bytes = _filled(log_size, functools.partial(nvrtc.nvrtcGetProgramLog, program))
        log = log_bytes.decode(errors="replace").strip("\0\n ")
        if int(status):
            reason = log or _succeed(nvrtc.nvrtcGetErrorString(status)).decode()
            compiler = f"NVRTC {version[0]}.{version[1]}"
            saved = _save_rejected(source, arch, options)
            raise CompileError(f"{compiler} cannot compile {name} for {arch}; source: {saved}\n{reason}")
        cubin = _filled(_succeed(nvrtc.nvrtcGetCUBINSize(program)), functools.partial(nvrtc.nvrtcGetCUBIN, program))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Compiled(cubin, log, time.perf_counter() - start, version)


def nvrtc_version() -> tuple[int, int]:
    nvrtc = _nvrtc()

    error, major, minor = nvrtc.nvrtcVersion()
    if int(error):
        raise RuntimeError(f"nvrtcVersion: {error!r}")
    return major, minor


def nvrtc_status() -> str | None:
    """None if kernels can be compiled here, else why not and what to install."""
    try:
        nvrtc_version()
    except ImportError as error:
        return f"cuda-bindings cannot be imported ({error}); {_INSTALL}"
    except Exception as error:  # the library's own loader has exception types of its own
        return f"NVRTC cannot be loaded ({error}); {_INSTALL}"
    return None


def compiler_missing() -> str | None:
    """Return what `nvrtc_status` returns, but load no compiler that lies where pip puts it: kernels may all be in the
    cache."""
    return None if _toolchain() is not None else nvrtc_status()


def _succeed(result: tuple) -> Any:
    nvrtc = _nvrtc()

    error, *values = result
    if int(error):
        raise RuntimeError(f"NVRTC: {nvrtc.nvrtcGetErrorString(error)[1].decode()}")
    return values[0] if values else None


def _filled(size: int, write: Callable[[bytes], tuple]) -> bytes:
    """A bytes object of this size that NVRTC writes into."""
    buffer = b"\0" * (size + 2)  # never one of the shared one-byte objects, which must not be written to
    _succeed(write(buffer))
    return buffer[:size]


def _save_rejected(source: str, arch: str, options: Sequence[str]) -> Path | None:
    directory = cache.directory("rejected")
    with contextlib.suppress(OSError):
        if directory is not None:
            return cache.write(directory / f"{key_of(source, arch, options)}.cu", source.encode())
    with contextlib.suppress(OSError):
        handle, path = tempfile.mkstemp(prefix="strobe-", suffix=".cu")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(source)
        return Path(path)
    return None


@functools.cache
def _library() -> tuple[str, Path] | None:
    """(major version, the compiler's library) where pip puts it."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        major = metadata.version("cuda-bindings").split(".")[0]
        nvidia = importlib.util.find_spec("nvidia")
        for root in (nvidia.submodule_search_locations or ()) if nvidia else ():
            for folder in (f"cu{major}", "cuda_nvrtc"):
                library = Path(root, folder, "lib", f"libnvrtc.so.{major}")
                if library.is_file():
                    return major, library
    return None


def _nvrtc() -> Any:
    """The bindings. They look for their library in this environment alone; one that is seen through a path file, as
    when a virtual environment builds on another, has to be loaded for them."""
    from cuda.bindings import nvrtc

    _load_library()
    return nvrtc


@functools.cache
def _load_library() -> None:
    if (compiler := _library()) is not None:
        with contextlib.suppress(OSError):  # the bindings will say what is wrong
            for library in (*compiler[1].parent.glob("libnvrtc-builtins.so.*"), compiler[1]):
                ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


@functools.cache
def _toolchain() -> str | None:
    """A tag of the compiler's build: its major version and the size of its library (NVRTC reports no patch level).

    Found without loading the library, which would cost more than everything else on a cache hit. None: no compiler.
    """
    if (compiler := _library()) is not None:
        major, library = compiler
        return f"nvrtc{major}-{library.stat().st_size:x}"
    if nvrtc_status() is not None:
        return None
    from cuda.pathfinder import load_nvidia_dynamic_lib

    path = load_nvidia_dynamic_lib("nvrtc").abs_path
    return f"nvrtc{nvrtc_version()[0]}-{os.path.getsize(path) if path else 0:x}"


# ---- the cache -------------------------------------------------------------------------------------------------------
in_memory: dict[str, Artifact] = {}  # what this process has, by `key_of`
_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
_locks_guard = threading.Lock()


def key_of(source: str, arch: str, options: Sequence[str] = ()) -> str:
    """Return the name of a kernel in every cache: a digest of what is asked for, independent of the compiler at
    hand."""
    wanted = "\0".join([_SCHEMA, arch, *_BASE_OPTIONS, *options, "", flatten(source)])
    return hashlib.sha256(wanted.encode()).hexdigest()


def get(source: str, arch: str, *, name: str = "kernel", options: Sequence[str] = ()) -> Artifact:
    """The kernel from memory, the read-only layers, the user's cache, or the compiler: the first that has it."""
    source = flatten(source)
    key = key_of(source, arch, options)
    with _locks_guard:
        lock = _locks[key]
    with lock:  # two threads that want one kernel compile it once
        if key in in_memory:
            return replace(in_memory[key], origin="memory", seconds=0.0)
        artifact = _load(key, source) or _make(key, source, arch, name, options)
        in_memory[key] = artifact
    if artifact.origin != "compiled":
        say(f"loaded {name} for {arch} from {artifact.path} in {artifact.seconds * 1e3:.1f} ms")
    return artifact


def write_layer(directory: str | os.PathLike[str], artifact: Artifact) -> Path:
    """Put a kernel into a directory that STROBE_CUBIN_PATH may name; returns the cubin's path. It takes the place of
    what another compiler made of the same source."""
    place = Path(directory)
    place.mkdir(mode=0o755, parents=True, exist_ok=True)
    cache.write(place / f"{artifact.key}.cu", artifact.source.encode(), mode=0o644)
    path = cache.publish(place, artifact.key, ".cubin", artifact.cubin, mode=0o644)
    for former in cache.named(place, artifact.key, ".cubin"):
        if former != path:
            with contextlib.suppress(OSError):  # it does no harm
                former.unlink()
    return path


def layers() -> list[Path]:
    """Read-only directories of ahead-of-time kernels, from STROBE_CUBIN_PATH."""
    return [Path(entry) for entry in os.environ.get("STROBE_CUBIN_PATH", "").split(os.pathsep) if entry]


@dataclass(frozen=True)
class _Place:
    """A place where a kernel may lie: a directory, and how its name begins there."""

    origin: Literal["layer", "disk"]
    directory: Path
    stem: str


def _places(key: str) -> Iterator[_Place]:
    for layer in layers():
        yield _Place("layer", layer, key)
    directory = cache.directory(key[:2])
    if directory is not None:
        # Without a compiler at hand, whatever any compiler made will do.
        yield _Place("disk", directory, key if (made_by := _toolchain()) is None else f"{key}-{made_by}")


def _load(key: str, source: str) -> Artifact | None:
    start = time.perf_counter()
    for place in _places(key):
        # A layer is trusted because the user named it; it may belong to an administrator.
        for path, cubin in cache.intact(place.directory, place.stem, ".cubin", private=place.origin == "disk"):
            return Artifact(cubin, key, place.origin, path, time.perf_counter() - start, "", source)
    return None


def _make(key: str, source: str, arch: str, name: str, options: Sequence[str]) -> Artifact:
    if os.environ.get("STROBE_NO_COMPILE", "0") not in ("", "0"):
        raise CompileForbidden(_why_forbidden(key, arch, name))
    compiled = compile(source, arch, name=name, options=options)
    version = ".".join(map(str, compiled.nvrtc))
    say(f"compiled {name} for {arch} in {compiled.seconds:.2f} s (NVRTC {version})")
    path = None
    directory = cache.directory(key[:2])
    if directory is not None:
        stem = f"{key}-{_toolchain()}"
        with contextlib.suppress(OSError):  # read-only, full, stale: run from memory
            cache.write(directory / f"{stem}.cu", source.encode())
            path = cache.publish(directory, stem, ".cubin", compiled.cubin)
    return Artifact(compiled.cubin, key, "compiled", path, compiled.seconds, compiled.log, source)


def _why_forbidden(key: str, arch: str, name: str) -> str:
    looked = [str(place) for place in (*layers(), cache.directory()) if place is not None] or ["no directory"]
    damaged = [str(path) for place in _places(key) for path in cache.named(place.directory, place.stem, ".cubin")]
    note = f"; damaged: {', '.join(damaged)}" if damaged else ""
    return (
        f"STROBE_NO_COMPILE is set, and {name} for {arch} (key {key}) is in none of: {', '.join(looked)}{note}; "
        f"make it with `strobe compile --arch {arch} --out DIR` and set STROBE_CUBIN_PATH=DIR"
    )
