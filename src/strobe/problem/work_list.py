"""`strobe.paged.Plan`: lists of work that paged calls share.

Kernels for paged keys take their work from a list in device memory, which a small kernel makes from the lengths
(cuda/plans/plan_work.py). Without a plan each call makes its own, with one more launch. A plan keeps lists for the layers of a
model: one for each kind of call that it meets, made once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from strobe.problem.page_checks import entries_of

KEPT_STEPS = 64  # that a list is kept for without being used
Ints = torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Kind:
    """Calls that can share a list, as a prepared call sees them: those with an equal `key`."""

    key: Hashable
    size: int  # bytes of a list
    room: int  # bytes for partial results
    fill: Callable[[torch.Tensor, Ints, Ints, Ints, torch.Tensor], None]  # (lengths, cu_q, starts, indptr, list)
    describe: Callable[[torch.Tensor], str]


@dataclass
class WorkList:
    kind: Kind  # of the call that it was made for
    memory: torch.Tensor
    room: torch.Tensor
    sequences: int
    passed: tuple[bool, ...]  # whether calls have a cu_q, starts, an indptr
    step: int = -1  # of the plan, in which it was filled
    used: int = -1  # step in which a call last asked for it
    captured: bool = False  # a graph may read or fill it

    def fill(self, step: int, lengths: torch.Tensor, cu_q: Ints, starts: Ints, indptr: Ints) -> None:
        cu_q, starts, indptr = (t if t is None else t.contiguous() for t in (cu_q, starts, indptr))
        self.kind.fill(lengths.contiguous(), cu_q, starts, indptr, self.memory)
        self.step = step


class Plan:
    """The work of a step, for all layers. Call `update` once a step, and pass the plan as `plan=`: the first call of each kind
    (mask, heads, head dim, page size) makes its list, later layers find it, and `update` fills it for the next step. Lists
    stay where they are, so a captured CUDA graph finds them, whether `update` is captured or called before each replay; keep
    the plan as long as the graph. Nothing is read back. Calls that share a plan run one after the other, on one stream.
    Backends that need no list ignore it."""

    def __init__(self) -> None:
        self._lists: dict[Hashable, WorkList] = {}
        self._rooms: dict[torch.device, torch.Tensor] = {}  # the largest so far: calls leave nothing there
        self._levels: list[Plan] = []
        self._levels_used = 0  # in this step; the others keep their lists, which captured graphs may read
        self.by_kind: dict[Kind, WorkList] = {}  # what `list_for` returned
        self.step = -1  # how often it was updated, less one

    def update(
        self,
        lengths: torch.Tensor,
        cu_q: Ints = None,
        *,
        starts: Ints = None,
        indptr: Ints = None,
        shared: Sequence[Any] = (),
    ) -> None:
        """A new step, with the `lengths`, `cu_q`, `starts` and `shared` that its calls will have. `indptr`, that of their
        table, clamps lengths to it; without it they must fit. Without `shared`, the levels (`strobe.paged.Level`), each call
        lists the work of its levels itself."""
        if lengths.dim() != 1 or lengths.dtype != torch.int32:
            raise ValueError(
                f"lengths must be int32, (sequences,); got {lengths.dtype} of shape {tuple(lengths.shape)}"
            )
        more = len(lengths) + 1
        for name, t, size in (("cu_q", cu_q, more), ("starts", starts, len(lengths)), ("indptr", indptr, more)):
            if t is not None and (tuple(t.shape) != (size,) or t.dtype != torch.int32 or t.device != lengths.device):
                got = f"{t.dtype} of shape {tuple(t.shape)} on {t.device}"
                raise ValueError(f"{name} must be int32 of shape ({size},) on {lengths.device}; got {got}")
        self.step += 1
        capturing = lengths.is_cuda and torch.cuda.is_current_stream_capturing()
        for key, work in [*self._lists.items()]:
            idle = self.step - work.used
            *packed_and_moved, ragged = work.passed
            if idle > KEPT_STEPS and not work.captured:
                del self._lists[key]
                self.by_kind = {kind: other for kind, other in self.by_kind.items() if other is not work}
            elif (
                (idle == 1 or work.captured)
                and work.sequences == len(lengths)
                and packed_and_moved == [cu_q is not None, starts is not None]
                and work.memory.device == lengths.device
            ):
                work.fill(self.step, lengths, cu_q, starts, indptr if ragged else None)
                work.captured |= capturing
        self._levels += [Plan() for _ in shared[len(self._levels) :]]
        self._levels_used = len(shared)
        for plan, level in zip(self._levels, shared, strict=False):
            plan.update(level.lengths, level.cu_q, indptr=entries_of(level.table)[1])

    def of_level(self, index: int) -> Plan | None:
        """The work of a level of keys that sequences share, if this step was told of it."""
        return self._levels[index] if index < self._levels_used else None

    def check_call(self) -> None:
        if self.step < 0:
            raise ValueError("plan has no work yet: call plan.update(lengths, cu_q) first")

    def list_for(self, kind: Kind, lengths: torch.Tensor, cu_q: Ints, starts: Ints, indptr: Ints) -> WorkList:
        """The list of calls of this kind, filled now if this step has not met such a call."""
        passed = tuple(t is not None for t in (cu_q, starts, indptr))
        work = self._lists.get((kind.key, passed))
        if work is None:
            memory = torch.empty(kind.size // 4, dtype=torch.int32, device=lengths.device)
            work = WorkList(kind, memory, self._room(kind.room, lengths.device), len(lengths), passed)
            self._lists[kind.key, passed] = work
        if work.step != self.step:
            work.fill(self.step, lengths, cu_q, starts, indptr)
        self.by_kind[kind] = work
        return work

    def _room(self, size: int, device: torch.device) -> torch.Tensor:
        """Return memory for partial results, which are merged before the next call begins. Lists that were made before
        keep theirs; it doubles, so that there are few."""
        room = self._rooms.get(device)
        if room is None or room.numel() < size:
            size = max(size, 2 * room.numel()) if room is not None else size
            room = self._rooms[device] = torch.empty(size, dtype=torch.uint8, device=device)
        return room

    def describe(self) -> str:
        """The lists that there are. Waits for the device."""
        lists = [work for plan in (self, *self._levels) for work in plan._lists.values()]
        if not lists:
            return "no lists yet: no kernel has asked for one"
        return "\n".join(work.kind.describe(work.memory) for work in lists)
