"""Transports around another one that show what a method does with them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from strobe.distributed.transport import Message, Pending, Transport


class _Pending:
    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


class Late:
    """Messages that arrive as late as they may: what is received is NaN until it is waited for, and nobody may write what
    was sent before that. Calls take random times, so ranks drift apart."""

    def __init__(self, inner: Transport, seed: int, longest: float = 0.003) -> None:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.random, self.longest = random.Random(seed), longest

    def _sleep(self) -> None:
        time.sleep(self.random.random() * self.longest)

    def _late(
        self, start: Callable[[list[torch.Tensor]], Pending], sent: Sequence[torch.Tensor], got: Sequence[torch.Tensor]
    ) -> Pending:
        self._sleep()
        copies, shadows = [t.clone() for t in sent], [torch.empty_like(t) for t in got]
        for t in got:
            t.fill_(torch.nan if t.is_floating_point() else 77)
        pending = start(shadows)

        def wait() -> None:
            self._sleep()
            for t, copy in zip(sent, copies, strict=True):
                # Bits: the padding of a shard may hold NaN, which equals nothing.
                assert torch.equal(t.view(torch.uint8), copy.view(torch.uint8)), (
                    "what was sent was written to before the transfer was over"
                )
            pending.wait()
            for t, shadow in zip(got, shadows, strict=True):
                t.copy_(shadow)

        return _Pending(wait)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        peers = [peer for _, peer in receives]

        def start(shadows: list[torch.Tensor]) -> Pending:
            return self.inner.exchange(sends, list(zip(shadows, peers, strict=True)))

        return self._late(start, [t for t, _ in sends], [t for t, _ in receives])

    def all_gather(self, into: torch.Tensor, mine: torch.Tensor) -> Pending:
        return self._late(lambda shadows: self.inner.all_gather(shadows[0], mine), [mine], [into])

    def reduce_scatter(self, into: torch.Tensor, parts: torch.Tensor) -> Pending:
        return self._late(lambda shadows: self.inner.reduce_scatter(shadows[0], parts), [parts], [into])


class Traced:
    """Writes down when transfers start and when they are waited for."""

    def __init__(self, inner: Transport, events: list[str]) -> None:
        self.inner, self.rank, self.size, self.events = inner, inner.rank, inner.size, events
        self.started = 0

    def _trace(self, pending: Pending) -> Pending:
        self.started += 1
        number = self.started
        self.events.append(f"start {number}")

        def wait() -> None:
            self.events.append(f"wait {number}")
            pending.wait()

        return _Pending(wait)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        pending: Any = self.inner.exchange(sends, receives)
        return self._trace(pending) if sends or receives else pending

    def all_gather(self, into: torch.Tensor, mine: torch.Tensor) -> Pending:
        return self._trace(self.inner.all_gather(into, mine))

    def reduce_scatter(self, into: torch.Tensor, parts: torch.Tensor) -> Pending:
        return self._trace(self.inner.reduce_scatter(into, parts))
