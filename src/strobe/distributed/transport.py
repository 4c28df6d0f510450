"""How ranks talk: messages between pairs, and two collectives. Every method is written against `Transport` alone, so it
runs unchanged over torch.distributed, inside one process (`simulator.py`), counted, delayed or traced.

A call never blocks: it returns something to wait for. All ranks of a transport make matching calls in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

Message = tuple[torch.Tensor, int]  # a contiguous tensor, and the rank to which it goes or from which it comes


class Pending(Protocol):
    def wait(self) -> None:
        """Until what was received can be read, and what was sent can be written. On a GPU: by what is queued next."""


class Transport(Protocol):
    rank: int
    size: int

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Messages between the same two ranks arrive in the order in which they are listed."""

    def all_gather(self, into: torch.Tensor, mine: torch.Tensor) -> Pending:
        """`into` is (size, *mine.shape)."""

    def reduce_scatter(self, into: torch.Tensor, parts: torch.Tensor) -> Pending:
        """The sum over ranks of parts[rank], `parts` being (size, *into.shape), in an order of the library's own."""


class Done:
    """Nothing to wait for."""

    def wait(self) -> None:
        pass


class Failed(RuntimeError):
    """Ranks could not talk. Says who, to whom and about what."""


# Their names until torch 2.12; they are deprecated since.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Works(NamedTuple):
    works: Sequence[Any]
    tensors: Any  # kept until the transfer is over
    what: str

    def wait(self) -> None:
        for work in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise Failed(f"{self.what}: {str(error).splitlines()[0]}") from error


class GroupTransport:
    """Over a process group of torch.distributed, whatever its backend."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        ops = [dist.P2POp(dist.isend, t, group=self.group, group_peer=peer) for t, peer in sends if t.numel()]
        ops += [dist.P2POp(dist.irecv, t, group=self.group, group_peer=peer) for t, peer in receives if t.numel()]
        if not ops:
            return Done()
        peers = sorted({peer for _, peer in (*sends, *receives)})
        what = f"rank {self.rank} could not exchange messages with rank {', '.join(map(str, peers))}"
        return self._start(lambda: dist.batch_isend_irecv(ops), (sends, receives), what)

    def all_gather(self, into: torch.Tensor, mine: torch.Tensor) -> Pending:
        what = f"rank {self.rank} could not gather from {self.size} ranks"
        flat = into.view(-1)
        start = lambda: [_all_gather(flat, mine.view(-1), group=self.group, async_op=True)]  # noqa: E731
        return self._start(start, (into, mine), what)

    def reduce_scatter(self, into: torch.Tensor, parts: torch.Tensor) -> Pending:
        what = f"rank {self.rank} could not sum up over {self.size} ranks"
        flat = into.view(-1)
        start = lambda: [_reduce_scatter(flat, parts.view(-1), group=self.group, async_op=True)]  # noqa: E731
        return self._start(start, (into, parts), what)

    def _start(self, start: Any, tensors: Any, what: str) -> Pending:
        try:
            return _Works(start(), tensors, what)
        except RuntimeError as error:
            raise Failed(f"{what}: {str(error).splitlines()[0]}") from error


class Counted:
    """Another transport, and how many bytes this rank has sent through it. A collective counts as its ring algorithm:
    each rank passes on all parts but one."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.sent = 0
        self.messages = 0

    def _count(self, messages: int, size: int) -> None:
        self.messages += messages
        self.sent += size

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        self._count(len(sends), sum(t.numel() * t.element_size() for t, _ in sends))
        return self.inner.exchange(sends, receives)

    def all_gather(self, into: torch.Tensor, mine: torch.Tensor) -> Pending:
        self._count(self.size - 1, (self.size - 1) * mine.numel() * mine.element_size())
        return self.inner.all_gather(into, mine)

    def reduce_scatter(self, into: torch.Tensor, parts: torch.Tensor) -> Pending:
        self._count(self.size - 1, (self.size - 1) * into.numel() * into.element_size())
        return self.inner.reduce_scatter(into, parts)


# ---- names -----------------------------------------------------------------------------------------------------------
# Operations of a compiled graph take no objects: a process group travels as its name, which torch.distributed resolves.
# Other transports are found here for as long as somebody holds them.

_named: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def names_of(mesh: Any) -> list[str]:
    """The names of the transports of a 1-D or 2-D `DeviceMesh`, a process group, a transport, or a pair of those."""
    if isinstance(mesh, tuple):
        return [name for one in mesh for name in names_of(one)]
    if hasattr(mesh, "get_group"):
        if mesh.ndim > 2:
            raise ValueError(
                f"mesh has {mesh.ndim} dimensions; select the one or two of context parallelism: mesh['cp']"
            )
        return [mesh.get_group(i).group_name for i in range(mesh.ndim)]
    if isinstance(mesh, dist.ProcessGroup):
        return [mesh.group_name]
    if not all(hasattr(mesh, name) for name in ("rank", "size", "exchange")):
        allowed = "a DeviceMesh, a ProcessGroup, a pair of those or a strobe.distributed.Transport"
        raise TypeError(f"mesh must be {allowed}, got {mesh!r}")
    name = f"strobe:{id(mesh)}"
    _named[name] = mesh
    return [name]


def sizes_of(mesh: Any) -> list[int]:
    """How many ranks each of the transports of `names_of` has."""
    if isinstance(mesh, tuple):
        return [size for one in mesh for size in sizes_of(one)]
    if hasattr(mesh, "get_group"):
        return [mesh.size(i) for i in range(mesh.ndim)]
    return [mesh.size() if isinstance(mesh, dist.ProcessGroup) else mesh.size]


def resolve(name: str) -> Transport:
    if name.startswith("strobe:"):
        return _named[name]
    return GroupTransport(dist.distributed_c10d._resolve_process_group(name))  # type: ignore[arg-type]
