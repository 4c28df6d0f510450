"""Ranks talk by messages between pairs, and two collectives. Every method is written against `Transport` alone, so it
runs unchanged over torch.distributed, inside one process (`simulator.py`), counted, delayed or traced.

A call never blocks: it returns something to wait for. All ranks of a transport make matching calls in the same order.
"""

from __future__ import annotations

import datetime
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

_GRACE = datetime.timedelta(seconds=0.5)  # for a peer that failed to say why
Message = tuple[torch.Tensor, int]  # a contiguous tensor, and the rank to which it goes or from which it comes


class Pending(Protocol):
    def wait(self) -> None:
        """Wait until what was received can be read, and what was sent can be written. On a GPU: by what is queued
        next."""


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


_Started = tuple[Any, str, int | None]  # a work, what it does, and with which rank, where that is one


class GroupTransport:
    """A transport over a process group of torch.distributed, whatever its backend. On a CPU collectives are messages,
    too, since the error of a message names a peer and that of a collective does not."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        sends, receives = ([(t, peer) for t, peer in messages if t.numel()] for messages in (sends, receives))
        if not sends and not receives:
            return Done()
        if (sends or receives)[0][0].device.type == "cpu":
            started = [self._send(t, peer) for t, peer in sends] + [self._receive(t, peer) for t, peer in receives]
            return _Works(self, started, (sends, receives))
        # A GPU starts them together: else ranks that send first would wait for one another.
        ops = [dist.P2POp(dist.isend, t, group=self.group, group_peer=peer) for t, peer in sends]
        ops += [dist.P2POp(dist.irecv, t, group=self.group, group_peer=peer) for t, peer in receives]
        peers = ", ".join(map(str, sorted({peer for _, peer in (*sends, *receives)})))
        return self._together(lambda: dist.batch_isend_irecv(ops), f"exchange messages with rank {peers}", ops)

    def all_gather(self, into: torch.Tensor, mine: torch.Tensor) -> Pending:
        if mine.device.type == "cpu":
            return gather_by_messages(self, into, mine)
        start = lambda: [_all_gather(into.view(-1), mine.view(-1), group=self.group, async_op=True)]  # noqa: E731
        return self._together(start, f"gather from {self.size} ranks", (into, mine))

    def reduce_scatter(self, into: torch.Tensor, parts: torch.Tensor) -> Pending:
        if parts.device.type == "cpu":
            return sum_by_messages(self, into, parts)
        start = lambda: [_reduce_scatter(into.view(-1), parts.view(-1), group=self.group, async_op=True)]  # noqa: E731
        return self._together(start, f"sum up over {self.size} ranks", (into, parts))

    def _send(self, t: torch.Tensor, peer: int) -> _Started:
        what = f"send to {_name(self.group, peer)}"
        return self.tried(lambda: dist.isend(_bytes(t), group=self.group, group_dst=peer), what, peer), what, peer

    def _receive(self, t: torch.Tensor, peer: int) -> _Started:
        what = f"receive from {_name(self.group, peer)}"
        return self.tried(lambda: dist.irecv(_bytes(t), group=self.group, group_src=peer), what, peer), what, peer

    def _together(self, start: Callable[[], Sequence[Any]], what: str, keep: Any) -> Pending:
        return _Works(self, [(work, what, None) for work in self.tried(start, what, None)], keep)

    def tried(self, function: Callable[[], Any], what: str, peer: int | None) -> Any:
        """Return what the function returns. An error says `what` it does, and with which rank, where that is one."""
        try:
            return function()
        except RuntimeError as error:
            why = f"{_name(self.group, self.rank)} could not {what}: {_reason(error)}"
            raise Failed("; ".join([why, *_reasons_of_others(self, why, peer)])) from error


class _Works(NamedTuple):
    transport: GroupTransport
    started: Sequence[_Started]
    keep: Any  # tensors, until the transfer is over

    def wait(self) -> None:
        for work, what, peer in self.started:
            self.transport.tried(work.wait, what, peer)


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: gloo does not know every dtype."""
    return t.view(-1).view(torch.uint8)


def _reason(error: RuntimeError) -> str:
    """The first line, without the place in gloo's source and its advice."""
    return re.sub(r"^\[\S+\] |\. This is typically caused by .*", "", str(error).splitlines()[0])


def _name(group: dist.ProcessGroup, rank: int) -> str:
    everywhere = dist.get_global_rank(group, rank)
    return f"rank {rank}" if everywhere == rank else f"rank {rank} (of all ranks {everywhere})"


def _reasons_of_others(transport: GroupTransport, reason_here: str, peer: int | None) -> list[str]:
    """Return what the peer of a transfer says, if it has failed as well, then what its own peer says, up to a rank that
    says nothing: that one is gone. Ranks leave word in the store of all, under their numbers among all: a mesh has
    several groups."""
    rank, after = (-1 if r is None else dist.get_global_rank(transport.group, r) for r in (transport.rank, peer))
    reasons: list[str] = []
    asked = {rank, -1}
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(_key(rank), f"{after} {reason_here}")
        while after not in asked:
            asked.add(after)
            store.wait([_key(after)], _GRACE)
            number, reason = store.get(_key(after)).decode().split(" ", 1)
            reasons.append(reason)
            after = int(number)
    except RuntimeError:  # nothing is said, or the store went with the rank that kept it
        pass
    return reasons


def _key(rank: int) -> str:
    return f"strobe: why rank {rank} failed"


def gather_by_messages(transport: Transport, into: torch.Tensor, mine: torch.Tensor) -> Pending:
    """`Transport.all_gather` by messages from each rank to each."""
    into[transport.rank].copy_(mine)
    others = [peer for peer in range(transport.size) if peer != transport.rank]
    return transport.exchange([(mine, peer) for peer in others], [(into[peer], peer) for peer in others])


def sum_by_messages(transport: Transport, into: torch.Tensor, parts: torch.Tensor) -> Pending:
    """`Transport.reduce_scatter` likewise; sums are in the order of the ranks."""
    arrived = torch.empty_like(parts)
    arrived[transport.rank].copy_(parts[transport.rank])
    others = [peer for peer in range(transport.size) if peer != transport.rank]
    arriving = transport.exchange([(parts[peer], peer) for peer in others], [(arrived[peer], peer) for peer in others])
    return _Summed(arriving, arrived, into)


class _Summed(NamedTuple):
    arriving: Pending
    arrived: torch.Tensor
    into: torch.Tensor

    def wait(self) -> None:
        self.arriving.wait()
        torch.sum(self.arrived, 0, out=self.into)


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
    if isinstance(mesh, dist.ProcessGroup):  # first: a compiler lets nobody ask a group for what it has not
        return [mesh.group_name]
    if hasattr(mesh, "get_group"):
        if mesh.ndim > 2:
            raise ValueError(
                f"mesh has {mesh.ndim} dimensions; select the one or two of context parallelism: mesh['cp']"
            )
        return [mesh.get_group(i).group_name for i in range(mesh.ndim)]
    if not all(hasattr(mesh, name) for name in ("rank", "size", "exchange")):
        allowed = "a DeviceMesh, a ProcessGroup, a pair of those or a strobe.distributed.Transport"
        raise TypeError(f"mesh must be {allowed}, got {mesh!r}")
    name = f"strobe:{id(mesh)}"
    _named[name] = mesh
    return [name]


def sizes_of(mesh: Any) -> list[int]:
    """Return how many ranks each of the transports of `names_of` has."""
    if isinstance(mesh, tuple):
        return [size for one in mesh for size in sizes_of(one)]
    if isinstance(mesh, dist.ProcessGroup):
        return [mesh.size()]
    return [mesh.size(i) for i in range(mesh.ndim)] if hasattr(mesh, "get_group") else [mesh.size]


def only(mesh: Any) -> Transport:
    """The transport of a mesh of one dimension."""
    names = names_of(mesh)
    if len(names) != 1:
        raise ValueError(f"mesh has {len(names)} dimensions; it must have one")
    return resolve(names[0])


def resolve(name: str) -> Transport:
    if name.startswith("strobe:"):
        return _named[name]
    return GroupTransport(dist.distributed_c10d._resolve_process_group(name))  # type: ignore[arg-type]
