"""Small kernels that serving calls between the attention of two layers: each call is one launch and costs the host a few
microseconds, since everything but addresses is looked at only once for tensors of the same kind."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from strobe.cuda.backend import machine_of, missing
from strobe.cuda.launch import Launcher
from strobe.cuda.parts.architecture import AMPERE
from strobe.cuda.parts.kernel import TemplateKernel, template_kernel
from strobe.cuda.parts.params import Field, params
from strobe.cuda.parts.plan import Plan
from strobe.problem.arguments import ALIGN, PLAIN, tensor_facts

THREADS = 128
_MOST = 512  # launchers that a thread remembers
_UNKNOWN = object()


def facts(tensors: Sequence[Any]) -> tuple[Any, ...] | None:
    """All that a launch depends on but addresses and contents. None where a tensor is of a kind that may have no memory."""
    entries: list[Any] = []
    for t in tensors:
        if t is None:
            entries.append(None)
        elif t.__class__ not in PLAIN:
            return None
        else:
            entries.append(tensor_facts(t))
    return tuple(entries)


def can_run(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a kernel can read and write them: tensors on one GPU that has kernels."""
    device = tensors[0].device
    there = all(t.device == device and not t.is_neg() and t.numel() for t in tensors)
    return there and missing(device, AMPERE) is None


class Launchers(threading.local):
    """Launchers by the facts of a call. Each thread has its own, since a launcher writes into its buffer."""

    def __init__(self) -> None:
        self._made: dict[Any, Launcher | None] = {}

    def get(
        self, tensors: Sequence[Any], also: Any, names: Sequence[str], plan: Callable[[str], Plan | None]
    ) -> Launcher | None:
        """None where no kernel can do it. `also`: what it depends on besides. `names`: of the tensors in a launch."""
        of_tensors = facts(tensors)
        if of_tensors is None:
            return None
        key = (of_tensors, also)
        launcher: Any = self._made.get(key, _UNKNOWN)
        if launcher is _UNKNOWN:
            there = [t for t in tensors if t is not None]
            device = there[0].device
            its_plan = plan(machine_of(device).arch) if can_run(there) else None
            if len(self._made) >= _MOST:
                self._made.clear()
            launcher = self._made[key] = None if its_plan is None else Launcher(its_plan, device.index or 0, names)
        return launcher


def kernel(
    template: str, kind: str, arch: str, element: str, config: Mapping[str, int | bool | str], fields: Iterable[Field]
) -> TemplateKernel:
    """`template` of kernels/<template>.cuh, without shared memory. `kind`: for its name."""
    settings = {**config, "kThreads": THREADS}
    return template_kernel(
        template, kind, arch=arch, params=params(fields), threads=THREADS, element=element, config=settings
    )


def in_chunks(t: torch.Tensor) -> bool:
    """Return whether the last axis can be read 16 bytes at a time; addresses differ from call to call."""
    step = ALIGN // t.element_size()
    steps = [t.shape[-1], *(s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1)]
    return t.stride(-1) == 1 and all(s % step == 0 for s in steps)


def two_axes(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[int, list[tuple[int, int]]] | None:
    """Axes that several tensors have in common as an outer and an inner one: the length of the inner one, and both strides
    of each tensor. None where that takes more than two."""
    axes: list[tuple[int, tuple[int, ...]]] = []
    for n, steps in zip(shape, zip(*strides, strict=True), strict=True):
        if n == 1:
            continue
        if axes and all(before == n * step for before, step in zip(axes[-1][1], steps, strict=True)):
            axes[-1] = axes[-1][0] * n, steps
        else:
            axes.append((n, steps))
    if len(axes) > 2:
        return None
    nothing = (1, (0,) * len(strides))
    (_, outer), (length, inner) = [*[nothing] * (2 - len(axes)), *axes]
    return length, list(zip(outer, inner, strict=True))


def blocks(threads: int, *shape: int) -> int | None:
    """The blocks of a grid with a thread for each entry of `shape`; None if the entries are too many to be counted."""
    wanted = math.prod(shape)
    return -(-wanted // threads) if wanted + threads < 2**31 else None
