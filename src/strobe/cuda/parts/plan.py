"""A plan turns a problem into launches; the plans of all kernels share this module. Facts and tables; no CUDA, no
tensors.

A `Plan` is a list of launches and a workspace. Tensors are named, not passed: `launch.py` runs a plan on a GPU and
`emulator/backend.py` the same plan on a CPU. The module of each kernel (`forward_sm90.py`, …) holds its tiles, its
planner (`plans/planner.py`), which says what it can do and makes its plans.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from strobe.cuda.parts.kernel import KernelSpec
from strobe.cuda.parts.params import COUNTER
from strobe.cuda.runtime.driver import TensorMapSpec
from strobe.problem import Problem, State, Strides
from strobe.variants.mask import full

MAX_DIM = 256  # of kernels with all columns of a tile at once
MAP = "block_map"  # in a workspace: the bits of blocks, which the first launch makes
_map_keys: dict[Any, int] = {}


@dataclass(frozen=True)
class Machine:
    """The facts of a GPU that plans depend on."""

    arch: str  # "sm_80", "sm_90a", …
    sms: int  # multiprocessors
    l2_bytes: int
    smem_bytes: int  # shared memory that one block may have
    spills: Callable[[KernelSpec], bool] = field(default=lambda kernel: False, compare=False)  # the compiled kernel
    compile: Callable[[Sequence[KernelSpec]], None] = field(default=lambda kernels: None, compare=False)  # side by side


ANY_MACHINE = Machine("", 1, 1, 1)  # where a table says all


Tile = TypeVar("Tile")


def first_without_spills(tiles: Sequence[Tile], kernel: Callable[[Tile], KernelSpec], machine: Machine) -> Tile:
    """The first tile whose kernel does not spill; the last one if all spill."""
    machine.compile([kernel(tile) for tile in tiles])
    return next((tile for tile in tiles if not machine.spills(kernel(tile))), tiles[-1])


@dataclass(frozen=True)
class Launch:
    """One kernel launch without addresses. A pointer of the kernel's arguments has the name of a tensor, and so has a
    tensor map after its "map_"."""

    kernel: KernelSpec
    grid: int
    values: Mapping[str, Any]  # the other fields of the arguments
    maps: Mapping[str, TensorMapSpec] = field(default_factory=dict)  # by the name of the tensor
    offsets: Mapping[str, int] = field(default_factory=dict)  # tensors that begin so many bytes further on, by name
    overlaps: bool = False  # may start before the launch before it has ended; waits where its code says so
    together: int = 0  # so many blocks must be on the GPU at once, since they wait for others; 0: none waits


@dataclass(frozen=True)
class Plan:
    launches: tuple[Launch, ...]
    workspace: Mapping[str, int] = field(default_factory=dict)  # name -> bytes, allocated for the call
    details: Mapping[str, object] = field(default_factory=dict)  # for `explain`

    @functools.cached_property
    def tensors(self) -> tuple[str, ...]:
        """The names of the tensors that its launches read and write, and perhaps a seed: the caller that runs the plan
        provides them. A tensor that is not there is null."""
        internal = {COUNTER, *self.workspace}
        names = [f.name for launch in self.launches for f in launch.kernel.params.fields if f.is_address]
        names += [name for launch in self.launches for name in launch.maps]
        return tuple(name for name in dict.fromkeys(names) if name not in internal)

    @functools.cached_property
    def map_key(self) -> int | None:
        """A number for the map of blocks that the first launch makes: with the same tensors, the same number is the same
        map. None: there is no map."""
        if MAP not in self.workspace:
            return None
        first = self.launches[0]
        return _map_keys.setdefault((first.kernel.source, tuple(first.values.items())), len(_map_keys))

    @property
    def workspace_bytes(self) -> int:
        return laid_out(self.workspace.values())[1]


def forward_details(kernel: KernelSpec, block_m: int, block_n: int, blocks: int) -> dict[str, object]:
    """The details of a forward plan with tiles of `block_m` queries, each of which visits `block_n` keys at a time."""
    return {
        "kernel": kernel.name,
        "arch": kernel.arch,
        "tile": f"{block_m} queries x {block_n} keys",
        "threads": kernel.threads,
        "blocks": blocks,
        "shared memory": f"{kernel.smem} bytes",
    }


def padded(size: int, to: int = 256) -> int:
    return -(-size // to) * to


def laid_out(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return where each part of a workspace begins, and how long it is."""
    ends = list(itertools.accumulate(map(padded, sizes), initial=0))
    return ends[:-1], ends[-1]


# ---- head dims -------------------------------------------------------------------------------------------------------

Dims = tuple[int, int]  # of queries and keys, and of values


def padded_dims(dims: list[Dims], dim: int, dim_v: int) -> Dims:
    """The smallest pair of `dims` that holds both. The columns in between are zeros that never touch memory."""
    return min(((d, dv) for d, dv in dims if d >= dim and dv >= dim_v), key=sum)


# ---- packed GQA by strides -------------------------------------------------------------------------------------------


def pack_group(problem: Problem, out_strides: Strides) -> tuple[Problem, Strides]:
    """One query a sequence and several heads to a key head, as in decoding: the heads of a group become the rows of one
    tile, and their keys are read once instead of once for each of them. By strides alone, so for any kernel and group,
    but only where all keys are visible, so that rows need not be told apart, and without sinks and dropout, which
    belong to heads. The LSE of a state must have its heads one after the other, since they become rows."""
    if (
        problem.len_q != 1
        or (problem.state is not None and problem.state.lse[1] != 1)
        or problem.group == 1
        or problem.varlen
        or problem.per_head
        or problem.dropout
        or problem.mask != full
        or not problem.logit.pointwise
    ):
        return problem, out_strides
    group = problem.group

    def packed(strides: Strides) -> Strides:
        batch, head, _ = strides
        return batch, group * head, head

    rows = replace(
        problem.q,
        heads=problem.heads_k,
        length=group,
        total=problem.batch * group,
        strides=(packed(problem.q.strides[0]),),
    )
    state = problem.state
    if state is not None:
        state = State((state.lse[0], group), None if state.out is None else packed(state.out))
    return replace(problem, q=rows, state=state), packed(out_strides)
