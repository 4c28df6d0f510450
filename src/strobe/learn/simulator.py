"""A GPU's grid of threads in Python, for lessons: slow, and it notices everything.

A kernel is a function of one thread. If it waits for its block anywhere it is a generator, and `yield` is the barrier:

    def kernel(t, x, y):
        tile = t.shared("tile", 4)
        tile[t.thread_idx.x] = x[t.thread]
        yield                                    # __syncthreads()
        y[t.thread] = tile[3 - t.thread_idx.x]

    x, y = Array("x", range(8)), Array("y", shape=8)
    print(launch(kernel, 2, 4, x, y))            # 2 blocks of 4 threads

Every access to memory is counted. What a GPU would punish is reported with block, thread and line: accesses out of
bounds, races between two barriers, barriers that only some threads reach, shared memory read before it is written. What
a GPU would merely be slow at is counted: bank conflicts in shared memory, sectors of 32 bytes moved from and to global
memory."""

from __future__ import annotations

import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from strobe.learn.access import BANKS, SECTOR_BYTES, WARP, Access, History, sectors, wavefronts

_MOST_THREADS = 1024  # per block, on every GPU
_MOST_PROBLEMS = 20  # one mistake is usually made by every thread


class KernelError(RuntimeError):
    """The kernel did what a GPU would not forgive; the message says what, where, and which thread of which block."""


class Dim3(NamedTuple):
    x: int
    y: int = 1
    z: int = 1

    @property
    def size(self) -> int:
        return self.x * self.y * self.z

    def named(self, index: Dim3) -> str:
        """An index into a grid of this size, with as many coordinates as the grid has."""
        axes = 3 if self.z > 1 else 2 if self.y > 1 else 1
        return str(index.x) if axes == 1 else str(tuple(index[:axes]))

    def at(self, index: int) -> Dim3:
        """The coordinates of the index-th: x runs fastest."""
        return Dim3(index % self.x, index // self.x % self.y, index // (self.x * self.y))


def _dim3(name: str, size: int | Sequence[int]) -> Dim3:
    dims = Dim3(size) if isinstance(size, int) else Dim3(*size)
    if min(dims) < 1:
        raise ValueError(f"{name}: {size!r}; sizes are at least 1")
    return dims


class Array:
    """Memory of the device: a kernel indexes it, the host fills it when it is made and copies it back with
    `to_host()`."""

    def __init__(
        self,
        name: str,
        values: Iterable[Any] | None = None,
        shape: int | Sequence[int] | None = None,
        itemsize: int = 4,
    ) -> None:
        """`values` may be nested lists; without them the array is full of NaN, as memory fresh from an allocator may
        be."""
        if values is None and shape is None:
            raise ValueError(f"array {name!r} needs values or a shape")
        flat, nested_shape = _flatten(values) if values is not None else ([], ())
        self.name = name
        self.shape: tuple[int, ...] = (
            nested_shape if shape is None else (shape,) if isinstance(shape, int) else tuple(shape)
        )
        size = math.prod(self.shape)
        if values is not None and len(flat) != size:
            raise ValueError(f"array {name!r}: {len(flat)} values do not fill shape {self.shape}")
        self.itemsize = itemsize
        self.data: list[Any] = flat if values is not None else [math.nan] * size
        self.first_byte = 0  # of shared arrays: where the block's memory continues
        self.is_shared = False
        self._running: _Launch | None = None
        self._history: dict[int, History] = {}
        self._writers: dict[int, Access] = {}

    def to_host(self) -> Any:
        """The contents as nested lists."""
        values: list[Any] = list(self.data)
        for size in reversed(self.shape[1:]):
            values = [values[i : i + size] for i in range(0, len(values), size)]
        return values

    def writer(self, *index: int) -> Access | None:
        """Return who wrote this element last, in the last launch; None if nobody did."""
        return self._writers.get(self._offset(index))

    def __getitem__(self, index: int | tuple[int, ...]) -> Any:
        offset, access = self._access(index, writes=False)
        value = self.data[offset]
        if value is None:
            assert self._running is not None
            self._running.report(access, f"reads {self._element(index)} of shared memory before anyone has written it")
            return math.nan
        return value

    def __setitem__(self, index: int | tuple[int, ...], value: Any) -> None:
        offset, access = self._access(index, writes=True)
        self.data[offset] = value
        self._writers[offset] = access

    def _access(self, index: int | tuple[int, ...], *, writes: bool) -> tuple[int, Access]:
        running = self._running
        if running is None or running.thread is None:
            where = "lies in the device's memory: on the host, copy it with"
            raise KernelError(f"{self._element(index)} {where} {self.name}.to_host()")
        t = running.thread
        access = Access(
            t.block_name, t.name, t.block, t.lane_of_block, running.epoch, sys._getframe(2).f_lineno, writes
        )
        try:
            offset = self._offset(index if isinstance(index, tuple) else (index,))
        except IndexError as error:
            raise KernelError(f"{access}: {access.verb} {self._element(index)} out of bounds: {error}") from None
        other = self._history.setdefault(offset, History()).add(access)
        if other is not None:
            order = "blocks run in any order" if other.block != access.block else "there is no barrier between them"
            both = f"this thread {access.verb} it, {other}, {other.verb} it"
            running.report(access, f"race on {self._element(index)}: {both}, and {order}")
        running.count(self, offset, access)
        return offset, access

    def _offset(self, index: tuple[int, ...]) -> int:
        if len(index) == 1 and len(self.shape) > 1:  # a flat index, as a pointer in C++ takes it
            if not 0 <= index[0] < len(self.data):
                raise IndexError(f"flat indices run from 0 to {len(self.data) - 1}")
            return index[0]
        if len(index) != len(self.shape):
            raise IndexError(f"{len(index)} indices for shape {self.shape}")
        offset = 0
        for axis, (i, size) in enumerate(zip(index, self.shape, strict=True)):
            if not 0 <= i < size:  # a negative index is a mistake here, unlike in Python
                raise IndexError(f"index {i} of axis {axis} is not in 0 to {size - 1}")
            offset = offset * size + i
        return offset

    def _element(self, index: int | tuple[int, ...]) -> str:
        inside = ", ".join(map(str, index)) if isinstance(index, tuple) else str(index)
        return f"{self.name}[{inside}]"


def _flatten(values: Iterable[Any]) -> tuple[list[Any], tuple[int, ...]]:
    rows = list(values)
    if not rows or not isinstance(rows[0], (list, tuple)):
        return rows, (len(rows),)
    parts = [_flatten(row) for row in rows]
    if len({shape for _, shape in parts}) > 1:
        raise ValueError(f"rows of different shapes: {sorted({shape for _, shape in parts})}")
    return [x for flat, _ in parts for x in flat], (len(rows), *parts[0][1])


class Thread:
    """A thread of a kernel, as the kernel sees it. The names are CUDA's; `thread` and `block` are the flat numbers."""

    def __init__(self, launch: _Launch, block: int, index: int) -> None:
        self._launch = launch
        self.block_dim, self.grid_dim = launch.block_dim, launch.grid_dim
        self.block_idx, self.thread_idx = launch.grid_dim.at(block), launch.block_dim.at(index)
        self.block, self.lane_of_block = block, index
        self.thread = block * launch.block_dim.size + index  # in the whole grid
        self.block_name, self.name = self.grid_dim.named(self.block_idx), self.block_dim.named(self.thread_idx)

    def shared(self, name: str, shape: int | Sequence[int]) -> Array:
        """Shared memory of this block: every thread that asks for the same name gets the same array."""
        return self._launch.shared(name, shape)


@dataclass
class Report:
    """The counts of one launch. Loads and stores are counted in elements, per array."""

    grid: Dim3
    block: Dim3
    loads: Counter[str] = field(default_factory=Counter)
    stores: Counter[str] = field(default_factory=Counter)
    shared_loads: int = 0
    shared_stores: int = 0
    shared_bytes: int = 0  # of one block
    barriers: int = 0
    bank_conflicts: int = 0  # turns of a warp at shared memory beyond the first
    sectors: int = 0  # of 32 bytes, moved between global memory and the chip
    warp_accesses: int = 0  # instructions of a warp that touched global memory
    problems: list[str] = field(default_factory=list)

    @property
    def threads(self) -> int:
        return self.grid.size * self.block.size

    @property
    def warps(self) -> int:
        return self.grid.size * -(-self.block.size // WARP)

    @property
    def idle_lanes(self) -> int:
        """Lanes that exist because warps have 32, without a thread in them."""
        return self.warps * WARP - self.threads

    def __str__(self) -> str:
        def listed(counts: Counter[str]) -> str:
            return f"{counts.total()}" + (
                f" ({', '.join(f'{n} {name}' for name, n in counts.items())})" if counts else ""
            )

        lines = [
            f"{self.grid.size} blocks of {self.block.size} threads: {self.warps} warps, {self.idle_lanes} idle lanes",
            f"global   {listed(self.loads)} loads, {listed(self.stores)} stores, {self.sectors} sectors",
            f"shared   {self.shared_loads} loads, {self.shared_stores} stores, {self.bank_conflicts} bank conflicts, "
            f"{self.shared_bytes} bytes a block",
            f"barriers {self.barriers}",
        ]
        return "\n".join(lines + [f"PROBLEM  {problem}" for problem in self.problems])


class _Launch:
    def __init__(self, grid: Dim3, block: Dim3) -> None:
        self.grid_dim, self.block_dim = grid, block
        self.thread: Thread | None = None
        self.epoch = 0  # how many barriers this block has passed
        self.counts = Report(grid, block)
        self._shared: dict[str, Array] = {}
        # What a warp does in one instruction: its lanes are simulated one by one, so accesses that belong together are
        # found by the line of the kernel and how often the lane has been there since the last barrier.
        self._together: dict[tuple[Any, ...], list[int]] = {}
        self._visits: Counter[tuple[Any, ...]] = Counter()
        self._seen: set[tuple[int, str]] = set()

    def report(self, access: Access, what: str) -> None:
        kind = (access.line, what.split("[")[0])
        if kind not in self._seen and len(self.counts.problems) < _MOST_PROBLEMS:
            self._seen.add(kind)
            self.counts.problems.append(f"{access}: {what}")

    def count(self, array: Array, offset: int, access: Access) -> None:
        counts = self.counts
        if array.is_shared:
            counts.shared_loads += not access.writes
            counts.shared_stores += access.writes
        else:
            (counts.stores if access.writes else counts.loads)[array.name] += 1
        place = (array.name, access.line, access.writes)
        self._visits[(access.lane, *place)] += 1
        instruction = (array.is_shared, access.lane // WARP, *place, self._visits[(access.lane, *place)])
        self._together.setdefault(instruction, []).append(array.first_byte + offset * array.itemsize)

    def shared(self, name: str, shape: int | Sequence[int]) -> Array:
        array = self._shared.get(name)
        if array is None:
            array = self._shared[name] = Array(name, shape=shape)
            array.first_byte = sum(a.itemsize * len(a.data) for a in self._shared.values() if a is not array)
            array.data = [None] * len(array.data)  # nobody has written yet
            array.is_shared, array._running = True, self
        return array

    def run_block(self, kernel: Callable[..., Any], block: int, arguments: Sequence[Any]) -> None:
        self._shared = {}
        self.epoch = 0
        threads = [Thread(self, block, i) for i in range(self.block_dim.size)]
        waiting: dict[int, Generator[Any, Any, Any]] = {}
        for t in threads:
            self.thread = t
            body = kernel(t, *arguments)
            if inspect.isgenerator(body):
                waiting[t.lane_of_block] = body
        while waiting:
            arrived: dict[int, Generator[Any, Any, Any]] = {}
            for index, body in waiting.items():
                self.thread = threads[index]
                try:
                    next(body)
                except StopIteration:
                    continue
                arrived[index] = body
            if arrived:
                self._check_barrier(threads, waiting, arrived)
                self.counts.barriers += 1
            self._end_epoch()
            waiting = arrived
        self._end_epoch()
        self.counts.shared_bytes = sum(a.itemsize * len(a.data) for a in self._shared.values())

    def _check_barrier(self, threads: list[Thread], waiting: dict[int, Any], arrived: dict[int, Any]) -> None:
        lines: dict[int, list[int]] = {}
        for index, body in arrived.items():
            lines.setdefault(body.gi_frame.f_lineno, []).append(index)
        finished = [index for index in waiting if index not in arrived]
        if len(lines) == 1 and not finished:
            return
        groups = [f"{_names(threads, indices)} at the barrier in line {line}" for line, indices in lines.items()]
        groups += [f"{_names(threads, finished)} already finished"] if finished else []
        raise KernelError(
            f"divergent barrier in block {threads[0].block_name}: {'; '.join(groups)}. "
            "Every thread of a block must reach the same yield"
        )

    def _end_epoch(self) -> None:
        for (is_shared, *_), bytes_touched in self._together.items():
            if is_shared:
                self.counts.bank_conflicts += wavefronts(bytes_touched) - 1
            else:
                self.counts.sectors += sectors(bytes_touched)
                self.counts.warp_accesses += 1
        self._together.clear()
        self._visits.clear()
        self.epoch += 1


def _names(threads: list[Thread], indices: list[int]) -> str:
    shown = ", ".join(threads[i].name for i in indices[:3])
    more = f" and {len(indices) - 3} more" if len(indices) > 3 else ""
    return f"thread{'s' if len(indices) > 1 else ''} {shown}{more}"


def launch(
    kernel: Callable[..., Any],
    grid: int | Sequence[int],
    block: int | Sequence[int],
    *arguments: Any,
    strict: bool = True,
) -> Report:
    """Run the kernel in every thread of `grid` blocks of `block` threads: `kernel<<<grid, block>>>(arguments)` in CUDA
    C++.

    Blocks run one after the other, and inside a block each thread runs to the next barrier before the next one starts.
    A correct kernel does not notice. With `strict` problems raise `KernelError`; without, those that one can continue
    after are in the report."""
    run = _Launch(_dim3("grid", grid), _dim3("block", block))
    if run.block_dim.size > _MOST_THREADS:
        raise ValueError(f"block: {block!r} has {run.block_dim.size} threads; a block has at most {_MOST_THREADS}")
    arrays = [a for a in arguments if isinstance(a, Array)]
    for array in arrays:
        array._running, array._history, array._writers = run, {}, {}
    try:
        for index in range(run.grid_dim.size):
            run.run_block(kernel, index, arguments)
    except Exception as error:
        if not isinstance(error, KernelError) and run.thread is not None:
            error.add_note(f"in thread {run.thread.name} of block {run.thread.block_name}")
        raise
    finally:
        for array in arrays:
            array._running = None
    if strict and run.counts.problems:
        raise KernelError("\n".join(run.counts.problems))
    return run.counts


__all__ = ["BANKS", "SECTOR_BYTES", "WARP", "Array", "Dim3", "KernelError", "Report", "Thread", "launch"]
