"""Ranks that are threads of one process: the same methods, without torch.distributed and without a second device.

For tests of many ranks, for trying out plans, and for running the CUDA kernels of several ranks on one GPU. Ranks share
the default stream there, so what one sends another reads in order.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from strobe.distributed.transport import Failed, Message, Pending, gather_by_messages, sum_by_messages

T = TypeVar("T")


class _Fabric:
    """The messages between all pairs of ranks that were sent and not yet taken. One rank runs at a time: it holds the
    lock until it has to wait for a message. So threads do not fight for the interpreter."""

    def __init__(self, ranks: int, timeout: float) -> None:
        self.lock = threading.RLock()
        self.arrived = [threading.Condition(self.lock) for _ in range(ranks)]
        self.boxes: dict[Any, deque[torch.Tensor]] = defaultdict(deque)
        self.timeout = timeout
        self.broken: str | None = None

    def put(self, dimension: int, sender: int, receiver: int, t: torch.Tensor) -> None:
        with self.lock:
            self.boxes[dimension, sender, receiver].append(t.clone())  # the sender may overwrite it once it has waited
            self.arrived[receiver].notify_all()

    def take(self, dimension: int, sender: int, receiver: int) -> torch.Tensor:
        with self.lock:
            box = self.boxes[dimension, sender, receiver]
            if not self.arrived[receiver].wait_for(lambda: box or self.broken, self.timeout):
                raise Failed(f"rank {receiver} waited {self.timeout:g} s for a message of rank {sender}")
            if not box:
                raise Failed(f"rank {receiver} waits for rank {sender}, but {self.broken}")
            return box.popleft()

    def fail(self, why: str) -> None:
        with self.lock:
            self.broken = self.broken or why
            for condition in self.arrived:
                condition.notify_all()


class _Arriving:
    def __init__(self, arrive: Callable[[], None]) -> None:
        self.arrive: Callable[[], None] | None = arrive

    def wait(self) -> None:
        arrive, self.arrive = self.arrive, None
        if arrive is not None:
            arrive()


class SimulatedTransport:
    """One dimension of a mesh: `ranks` are the threads that take part, of which this is one."""

    def __init__(self, fabric: _Fabric, dimension: int, ranks: Sequence[int], rank: int) -> None:
        self.fabric, self.dimension, self.ranks = fabric, dimension, ranks
        self.rank, self.size = rank, len(ranks)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Arriving:
        me = self.ranks[self.rank]
        for t, peer in sends:
            self.fabric.put(self.dimension, me, self.ranks[peer], t)

        def arrive() -> None:
            for t, peer in receives:
                received = self.fabric.take(self.dimension, self.ranks[peer], me)
                if received.shape != t.shape or received.dtype != t.dtype:
                    have, want = (f"{tuple(x.shape)} {x.dtype}" for x in (received, t))
                    raise Failed(f"rank {self.rank} got a message of {have} from rank {peer} and expected {want}")
                t.copy_(received)

        return _Arriving(arrive)

    def all_gather(self, into: torch.Tensor, mine: torch.Tensor) -> Pending:
        return gather_by_messages(self, into, mine)

    def reduce_scatter(self, into: torch.Tensor, parts: torch.Tensor) -> Pending:
        return sum_by_messages(self, into, parts)


def run(ranks: int, function: Callable[..., T], *, inner: int | None = None, timeout: float = 60.0) -> list[T]:
    """function(mesh) of each rank, in a thread of its own, and what they return. `mesh` is a transport or, with `inner`,
    a pair of them: the outer dimension, and the inner one of so many neighbours. If a rank fails, so do those that wait
    for it, and the first error is raised."""
    fabric = _Fabric(ranks, timeout)
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        mesh: Any = SimulatedTransport(fabric, 0, range(ranks), rank)
        if inner is not None:
            first = rank - rank % inner
            mesh = (
                SimulatedTransport(fabric, 0, range(rank % inner, ranks, inner), rank // inner),
                SimulatedTransport(fabric, 1, range(first, first + inner), rank % inner),
            )
        # Autograd has one thread for all backward passes of a GPU: a rank that waits there for a message would stop the
        # rank that is to send it. So each runs its backward pass in its own thread; the setting holds for one thread.
        with fabric.lock, torch.autograd.set_multithreading_enabled(False):
            try:
                results[rank] = function(mesh)
            except BaseException as error:  # handed to the caller below
                errors.append(error)
                fabric.fail(f"rank {rank} failed: {error}")

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
