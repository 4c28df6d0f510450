"""`strobe.paged.Plan`: lists of work that paged calls share.

Kernels for paged keys take their work from a list in device memory, which a small kernel makes from the lengths
(cuda/plan_work.py). Without a plan each call makes its own, with one more launch. A plan keeps lists for the layers of a
model: one for each kind of call that it meets, made once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from strobe.page_checks import entries_of

Ints = torch.Tensor | None
# Fills a list: (lengths, cu_q, starts, indptr, memory).
Planner = Callable[[torch.Tensor, Ints, Ints, Ints, torch.Tensor], None]


@dataclass
class WorkList:
    fill: Planner
    describe: Callable[[torch.Tensor], str]
    memory: torch.Tensor  # the list, and behind it room for partial results
    sequences: int
    packed: bool  # queries have a cu_q
    ragged: bool  # the table has an indptr
    step: int = -1  # of the plan, in which it was filled


class Plan:
    """The work of a step, for all layers. Call `update` once a step, and pass the plan as `plan=`: the first call of each kind
    (mask, heads, head dim, page size) makes its list, later layers and steps find it. Lists stay where they are, so a
    captured CUDA graph finds them, whether `update` is captured or called before each replay. Nothing is read back. Calls
    that share a plan run one after the other, on one stream. Backends that need no list ignore it."""

    def __init__(self) -> None:
        self._lists: dict[Hashable, WorkList] = {}
        self._levels: list[Plan] = []
        self._levels_used = 0  # in this step; the others keep their lists, which captured graphs may read
        self.step = -1  # how often it was updated, less one

    def update(
        self,
        lengths: torch.Tensor,
        cu_q: torch.Tensor | None = None,
        *,
        starts: torch.Tensor | None = None,
        indptr: torch.Tensor | None = None,
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
                found = f"{t.dtype} of shape {tuple(t.shape)} on {t.device}"
                raise ValueError(f"{name} must be int32 of shape ({size},) on {lengths.device}; got {found}")
        self.step += 1
        for known in self._lists.values():
            same = known.sequences == len(lengths) and known.packed == (cu_q is not None)
            if same and known.memory.device == lengths.device:
                known.fill(lengths, cu_q, starts, indptr if known.ragged else None, known.memory)
                known.step = self.step
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

    def list_for(
        self,
        key: Hashable,
        fill: Planner,
        describe: Callable[[torch.Tensor], str],
        size: int,
        lengths: torch.Tensor,
        cu_q: Ints,
        starts: Ints,
        indptr: Ints,
    ) -> WorkList:
        """The list of calls with this key, in `size` bytes; filled now if this step has not met such a call."""
        known = self._lists.get(key)
        if known is None:
            memory = torch.empty(size // 4, dtype=torch.int32, device=lengths.device)
            known = self._lists[key] = WorkList(
                fill, describe, memory, len(lengths), packed=cu_q is not None, ragged=indptr is not None
            )
        if known.step != self.step:
            known.fill(lengths, cu_q, starts, indptr, known.memory)
            known.step = self.step
        return known

    def describe(self) -> str:
        """The lists that there are. Waits for the device."""
        lists = [known for plan in (self, *self._levels) for known in plan._lists.values()]
        if not lists:
            return "no lists yet: no kernel has asked for one"
        return "\n".join(known.describe(known.memory) for known in lists)
