"""A compiled kernel, ready to run block by block on the CPU."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

Mode = Literal["sync", "async"]
_SEEDS = 2**32
_REPORT_BYTES = 1 << 16


class EmulatorError(RuntimeError):
    """The kernel did something a GPU would not forgive; the message says what, which thread, and at which line."""


@dataclass(frozen=True)
class Buffer:
    """Global memory that the kernel may touch; anything else it reads or writes is an error."""

    name: str
    address: int
    nbytes: int
    writable: bool = True


@dataclass(frozen=True)
class Counters:
    """The counts of one launch. Bytes include asynchronous copies; `bank_conflicts` counts wavefronts beyond those
    needed."""

    global_bytes_read: int
    global_bytes_written: int
    shared_bytes_read: int
    shared_bytes_written: int
    bank_conflicts: int
    mma: int
    wgmma: int
    flops: int
    shuffles: int
    block_barriers: int
    exp2: int


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
    ]


class _Counters(ctypes.Structure):
    _fields_ = [(field.name, ctypes.c_uint64) for field in fields(Counters)]


class _Launch(ctypes.Structure):  # emu/driver.cuh
    _fields_ = [
        ("params", ctypes.c_char_p),
        ("params_bytes", ctypes.c_uint64),
        ("buffers", ctypes.POINTER(_Buffer)),
        *[
            (name, ctypes.c_uint32)
            for name in ("buffer_count", "grid", "threads", "smem", "is_async", "seed", "workers", "together")
        ],
        ("counters", ctypes.POINTER(_Counters)),
        ("report", ctypes.c_char_p),
        ("report_capacity", ctypes.c_uint64),
    ]


def mode_and_seed() -> tuple[Mode, int]:
    """The mode and the seed that STROBE_EMULATOR_MODE and STROBE_EMULATOR_SEED ask for; "sync" and 0 by default."""
    mode = os.environ.get("STROBE_EMULATOR_MODE", "").strip()
    seed = os.environ.get("STROBE_EMULATOR_SEED", "").strip()
    if mode not in ("", "sync", "async"):
        raise ValueError(f'STROBE_EMULATOR_MODE is {mode!r}; allowed are "sync" and "async"')
    if not re.fullmatch(r"[0-9]{0,10}", seed) or int(seed or 0) >= _SEEDS:
        raise ValueError(f"STROBE_EMULATOR_SEED is {seed!r}; allowed are whole numbers from 0 to {_SEEDS - 1}")
    return "async" if mode == "async" else "sync", int(seed or 0)


class Program:
    """One kernel as a shared library. `run` may be called any number of times, also after an error."""

    def __init__(self, library: Path, name: str) -> None:
        self.name = name
        self.library = library
        self._run = ctypes.CDLL(str(library)).strobe_emulator_run
        self._run.argtypes = [ctypes.POINTER(_Launch)]
        self._run.restype = ctypes.c_int

    def run(
        self,
        params: bytes,
        *,
        grid: int,
        threads: int,
        smem: int,
        buffers: Sequence[Buffer],
        mode: Mode = "sync",
        seed: int = 0,
        workers: int | None = None,
        together: int = 0,
    ) -> Counters:
        """Run `grid` blocks of `threads` threads with `smem` bytes of dynamic shared memory.

        `params` are the bytes of the kernel's Params. Blocks are shared out over `workers` host threads (default: the
        cores at hand); a block behaves the same whichever of them runs it.

        Blocks that wait for others (`together` > 0) share one host thread, so that their order can be repeated. In sync
        mode, `together` of them run at once: no more than the plan says they need. In async mode all of them do, and
        the seed decides who goes on.
        """
        if mode not in ("sync", "async"):
            raise ValueError(f'mode: {mode!r}; must be "sync" or "async"')
        for label, value in (("grid", grid), ("threads", threads), ("smem", smem)):
            if not 0 <= value < 2**31:
                raise ValueError(f"{label}: {value}; must be from 0 to 2^31-1")
        if not 0 <= seed < _SEEDS:
            raise ValueError(f"seed: {seed}; must be from 0 to 2^32-1")
        if workers is not None and workers < 1:
            raise ValueError(f"workers: {workers}; must be at least 1")
        views = (_Buffer * max(1, len(buffers)))(
            *[_Buffer(buffer.name.encode(), buffer.address, buffer.nbytes, buffer.writable) for buffer in buffers]
        )
        counters = _Counters()
        report = ctypes.create_string_buffer(_REPORT_BYTES)
        launch = _Launch(
            params=params,
            params_bytes=len(params),
            buffers=views,
            buffer_count=len(buffers),
            grid=grid,
            threads=threads,
            smem=smem,
            is_async=mode == "async",
            seed=seed,
            workers=1 if together else max(1, min(grid, workers or _cores())),
            together=max(1, grid if together and mode == "async" else together),
            counters=ctypes.pointer(counters),
            report=ctypes.cast(report, ctypes.c_char_p),
            report_capacity=_REPORT_BYTES,
        )
        if self._run(ctypes.byref(launch)):
            text = report.value.decode(errors="replace")
            raise EmulatorError(f"{self.name}: {text}\n  ({mode} mode, seed {seed})")
        return Counters(**{field.name: getattr(counters, field.name) for field in fields(Counters)})


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
