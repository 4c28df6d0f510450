"""Running a plan on a GPU: its kernels compiled or taken from the cache, its launches prepared, addresses patched in."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from strobe.cuda.parts.kernel import KernelSpec
from strobe.cuda.parts.params import COUNTER, COUNTERS
from strobe.cuda.parts.plan import MAP, Launch, Plan, laid_out
from strobe.cuda.plans.plan_work import described
from strobe.cuda.runtime import driver, jit
from strobe.problem.work_list import Kind
from strobe.variants.block_mask import BlockMask

_SOMEWHERE = 1 << 30  # tensor maps want an address when they are encoded; each call moves them to its own


@functools.cache
def kernel(spec: KernelSpec) -> driver.Kernel:
    """The kernel, compiled or taken from the cache, and loaded."""
    artifact = jit.get(spec.source, spec.arch, name=spec.name)
    return driver.Kernel(artifact.cubin, spec.entry, spec.smem)


def compile_together(specs: Sequence[KernelSpec]) -> None:
    """Compile kernels into the cache, in parallel: a compilation takes a second or two on one core."""
    if len(specs := list(dict.fromkeys(specs))) > 1:
        with ThreadPoolExecutor(len(specs)) as pool:
            list(pool.map(lambda spec: jit.get(spec.source, spec.arch, name=spec.name), specs))


def spills(device: int, spec: KernelSpec) -> bool:
    """Return whether the compiled kernel has more live values than registers."""
    with torch.cuda.device(device):
        driver.have_context(device)
        return kernel(spec).local_bytes(device) > 0


def address(t: Any) -> int:
    """0 for a tensor that is not there. A seed is a number."""
    return 0 if t is None else t if isinstance(t, int) else t.data_ptr()


def addresses_of(plan: Plan, tensors: Mapping[str, Any]) -> tuple[int, ...]:
    """The addresses of the plan's tensors, which are given by name, in the order of the plan."""
    return tuple(address(tensors.get(name)) for name in plan.tensors)


def allocator(shape: Sequence[int], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """`torch.empty` of this shape on the current GPU. Where PyTorch has it, it is the function with which code made by
    torch.compile allocates: parsing and dispatching the arguments of `torch.empty` takes longer than the allocation."""
    empty_strided = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if empty_strided is None:
        return functools.partial(torch.empty, *shape, dtype=dtype, device="cuda")
    return functools.partial(empty_strided, tuple(shape), torch.empty(shape, device="meta").stride(), dtype)


class Launcher:
    """A plan that is ready for all calls that differ in nothing but addresses. Belongs to one thread.

    `names`: the tensors that are there, in the order in which a call passes their addresses. Others stay null."""

    def __init__(self, plan: Plan, device: int, names: Sequence[str] | None = None) -> None:
        self._device = device
        self._workspace, size = laid_out(plan.workspace.values())
        self._new_workspace = allocator((size,), torch.uint8) if size else None
        self._map_key = None if plan.map_key is None else (device, plan.map_key)
        if self._map_key is not None:
            self._map_part = tuple(plan.workspace).index(MAP)
            self._new_map = allocator((plan.workspace[MAP],), torch.uint8)
        used = {f.name for launch in plan.launches for f in launch.kernel.params.fields}
        self._counts = COUNTER in used
        tensors = plan.tensors if names is None else names
        order: tuple[Any, ...] = (*tensors, *((COUNTER,) if self._counts else ()), *plan.workspace)
        moved = dict.fromkeys(item for launch in plan.launches for item in launch.offsets.items())
        self._moved = [(order.index(name), offset) for name, offset in moved]
        order = (*order, *moved)
        compile_together([launch.kernel for launch in plan.launches])
        with torch.cuda.device(device):
            driver.have_context(device)
            self._launches = [_prepared(launch, order, device) for launch in plan.launches]

    def __call__(self, *addresses: int, blocks: BlockMask | None = None) -> None:
        """`blocks`: keeps the map of blocks, so that its launch is left out the next time."""
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                return self(*addresses, blocks=blocks)
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        if self._counts:
            counter = None if torch._C._cuda_isCurrentStreamCapturing() else _zeros.get((self._device, stream))
            if counter is None:
                counter, _alive = zeros(self._device, stream)
            addresses = (*addresses, counter)
        launches: Sequence[_Prepared] = self._launches
        new_map: _Map | None = None
        if self._new_workspace is not None:
            workspace = self._new_workspace()
            start = workspace.data_ptr()
            parts = [start + offset for offset in self._workspace]
            if blocks is not None and self._map_key is not None:
                launches, new_map = self._with_map(blocks, stream, parts)
            addresses = (*addresses, *parts)
        if self._moved:
            addresses = (*addresses, *[addresses[index] + offset for index, offset in self._moved])
        for launch, words, places, slots in launches:
            for word, index in places:
                words[word] = addresses[index]
            for slot, index in slots:
                slot.point_to(addresses[index])
            if stream != launch.stream:
                launch.move_to(stream)
            if error := launch.enqueue():
                launch.failed(error)
        if new_map is not None and blocks is not None:
            new_map.ready.record()
            blocks.maps[self._map_key] = new_map

    def _with_map(self, blocks: BlockMask, stream: int, parts: list[int]) -> tuple[Sequence[_Prepared], _Map | None]:
        """Puts the map's address into the workspace. Returns the launches to make, and a map to be kept after them. One
        whose launch is captured in a graph exists only after the graph has run, so it is not kept."""
        kept, capturing = blocks.maps.get(self._map_key), torch._C._cuda_isCurrentStreamCapturing()
        if kept is None and capturing:
            return self._launches, None
        used = _Map(self._new_map(), stream, torch.cuda.Event()) if kept is None else kept
        if used.stream != stream and not capturing:
            used.ready.wait()
            used.bits.record_stream(torch.cuda.current_stream(self._device))
        parts[self._map_part] = used.bits.data_ptr()
        return (self._launches, used) if kept is None else (self._launches[1:], None)


class _Map(NamedTuple):
    """A map of blocks that a `BlockMask` keeps."""

    bits: torch.Tensor
    stream: int  # where it was made
    ready: torch.cuda.Event


class Planned:
    """The launch of a plan that makes a list of work (cuda/plans/plan_work.py), apart from the others: calls that share a
    `strobe.paged.Plan` fill the list once. That plan has the memory for it, and for the workspace of the others."""

    names = ("work", "partial")

    def __init__(self, plan: Plan, device: int) -> None:
        first, *others = plan.launches
        size, room = (plan.workspace[name] for name in self.names)
        launcher = Launcher(Plan((first,)), device, ("lengths", "cu_q", "starts", "indptr", "work"))
        self._kind = Kind(
            key=(device, first.kernel, first.grid, tuple(sorted(first.values.items())), size, room),
            size=size,
            room=room,
            fill=lambda *tensors: launcher(*map(address, tensors)),
            describe=functools.partial(described, pieces=first.values["pieces"], items=first.values["items"]),
        )
        self.rest = dataclasses.replace(plan, launches=tuple(others), workspace={})

    def addresses(self, a: Any) -> list[int]:
        """The addresses of `names`, for a call with these arguments."""
        plan = a.plan
        work = plan.by_kind.get(self._kind)
        if work is None or work.step != plan.step:
            work = plan.list_for(self._kind, a.lengths, a.cu_q, a.starts, a.indptr)
        work.used = plan.step
        if torch._C._cuda_isCurrentStreamCapturing():
            work.captured = True
        return [work.memory.data_ptr(), work.room.data_ptr()]


# A launch, its parameters as words, and which of all addresses go to which word, or into which tensor map that the driver
# has to move.
_Prepared = tuple[driver.Launch, Any, list[tuple[int, int]], list[tuple[driver.TensorMapSlot, int]]]


def _prepared(launch: Launch, names: tuple[Any, ...], device: int) -> _Prepared:
    """`names`: of all addresses, in their order; of those that are moved, (name, offset)."""
    spec = launch.kernel
    pointers = [f.name for f in spec.params.fields if f.is_address]
    maps = {f"map_{t}": dataclasses.replace(m, address=_SOMEWHERE).encode() for t, m in launch.maps.items()}
    packed = spec.params.pack({**dict.fromkeys(pointers, 0), **launch.values, **maps})
    function = kernel(spec).function(device)
    enqueued = driver.Launch(function, launch.grid, spec.threads, spec.smem, packed, pdl=launch.overlaps)
    offsets = spec.params.offsets

    def index(name: str) -> int:
        return names.index((name, launch.offsets[name]) if name in launch.offsets else name)

    at = [(offsets[name], name) for name in pointers if name in names]
    of_maps = [(offsets[f"map_{t}"], t) for t in launch.maps]
    slots: list[tuple[driver.TensorMapSlot, int]] = []
    if of_maps and driver.address_is_first_word():  # GPUs before Hopper have no tensor maps to try it out with
        at += of_maps
    else:
        slots = [(driver.TensorMapSlot(enqueued.params, o), index(t)) for o, t in of_maps]
    places = [(offset // 8, index(name)) for offset, name in at]
    return enqueued, memoryview(enqueued.params).cast("Q"), places, slots


# ---- zeros that launches count with ----------------------------------------------------------------------------------

_BYTES = 4 * COUNTERS
_RESERVE = 1024  # such zeros, 4 MB: for every stream, and for every stream of every captured graph
_zeros: dict[tuple[int, ...], int] = {}
_spare: dict[int, list[int]] = {}


def zeros(device: int, stream: int) -> tuple[int, torch.Tensor | None]:
    """The address of zeros that a launch on this stream may count with, and a tensor that must live until it is
    enqueued. Launches on a stream run one after the other and leave them zero, so all of them can use the same. A graph
    may be replayed beside anything: in a capture, each stream gets zeros of its own, which its first launch sets.
    Nothing can be allocated then, so they come from a reserve, and, if that is used up, from the graph's memory, to be
    set for this launch alone. The reserve is no memory of torch's, which would miss it in pools that it manages for
    others; nor do the zeros come from `torch.zeros`, whose kernel would have to be loaded in the first call of a
    process."""
    capturing = torch._C._cuda_isCurrentStreamCapturing()
    key = (device, stream, driver.capture_id(stream)) if capturing else (device, stream)
    counters = _zeros.get(key)
    if counters is not None:
        return counters, None
    spare = _spare.setdefault(device, [])
    if not spare and capturing:
        memory = torch.empty(_BYTES, dtype=torch.uint8, device=device)
        driver.zero(memory.data_ptr(), _BYTES, stream)
        return memory.data_ptr(), memory
    if not spare:
        reserve = driver.allocate(_RESERVE * _BYTES)
        spare += range(reserve, reserve + _RESERVE * _BYTES, _BYTES)
    counters = _zeros[key] = spare.pop()
    driver.zero(counters, _BYTES, stream)
    return counters, None
