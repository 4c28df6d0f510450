"""`ring` and `halo`: keys travel along chains, queries stay. The keys of the next tick are on their way while those of
this one are worked on; in the backward pass so are the gradients of the tick before."""

from __future__ import annotations

from typing import Any

import torch

from strobe.distributed import spans as sets
from strobe.distributed.method import Gradients, Result, Task, like, taken
from strobe.distributed.routes import Parcel, Tick, chains, ticks
from strobe.distributed.spans import Spans
from strobe.distributed.step import Keys, Rest, State, rows_of
from strobe.distributed.transport import Message, Pending, Transport
from strobe.problem.checks import lse_dtype

_Held = dict[int, tuple[Spans, Keys]]  # by chain


class Deliver:
    def __init__(self, task: Task, transport: Transport, kind: str) -> None:
        self.task, self.transport = task, transport
        key = ("ticks", kind, task.rank)
        prepared = task.plan.prepared
        if key not in prepared:
            prepared[key] = ticks(chains(task.plan, kind), task.rank)
        self.ticks: tuple[Tick, ...] = prepared[key]
        self.kind = kind

    def kept_shapes(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[tuple[Any, ...]]:
        return []

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: bool) -> Result:
        task, local, state = self.task, Keys(k, v), State(q, v.shape[-1])
        held: _Held = {}
        last = iter(self._last_calls())
        for t in range(len(self.ticks) + 1):
            coming, pending = self._send_keys(t, local, held)
            for spans, keys in held.values() if t else [(task.mine, local)]:
                task.step(spans).forward(task.steps, q, keys, state, next(last))
            pending.wait()
            held = coming
        return task.finished(state)

    def _last_calls(self) -> list[tuple[bool, ...]]:
        """Return `Task.last_calls` of the steps of `forward`, in their order."""
        task, prepared = self.task, self.task.plan.prepared
        key = ("last", self.kind, task.rank, task.positional, task.invariant, task.template.sinks is None)
        if key not in prepared:
            arriving = [parcel.spans for tick in self.ticks for parcel in tick.arriving]
            prepared[key] = task.last_calls([task.step(spans) for spans in (task.mine, *arriving)])
        return prepared[key]

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rest: Rest, kept: tuple[torch.Tensor, ...]
    ) -> Gradients:
        task, local, wide = self.task, Keys(k, v), lse_dtype(q.dtype)
        dq = torch.zeros_like(q, dtype=wide)
        down = Keys(*(torch.zeros_like(t, dtype=wide) for t in local))
        held: _Held = {}
        coming_back = _Nothing()
        for t in range(len(self.ticks) + 1):
            coming, pending = self._send_keys(t, local, held)
            if t == 0:
                task.step(task.mine).backward(task.steps, q, local, rest, dq, down)
            else:
                gradients: _Held = {}
                for chain, (spans, keys) in held.items():
                    gradients[chain] = spans, Keys(*(torch.zeros_like(x, dtype=wide) for x in keys))
                    task.step(spans).backward(task.steps, q, keys, rest, dq, gradients[chain][1])
                coming_back.add_to(gradients, down, task.mine)
                coming_back = self._send_gradients(self.ticks[t - 1], gradients, down)
            pending.wait()
            held = coming
        coming_back.add_to({}, down, task.mine)
        return Gradients(dq, *down, task.gradient_of_sinks(rest))

    def _send_keys(self, t: int, local: Keys, held: _Held) -> tuple[_Held, Pending]:
        """Those of the tick after t, and what arrives here for it."""
        if t == len(self.ticks):
            return {}, self.transport.exchange([], [])
        tick = self.ticks[t]
        sends: list[Message] = []
        for parcel in tick.leaving:
            spans, keys = held[parcel.chain] if t else (self.task.mine, local)
            sends += [(taken(x, parcel.spans, spans), parcel.peer) for x in keys]
        coming, receives = _room(tick.arriving, local)
        return coming, self.transport.exchange(sends, receives)

    def _send_gradients(self, tick: Tick, held: _Held, down: Keys) -> _Coming:
        """Send the gradients of the keys that were worked on in this tick: to the next stop, and home."""
        sends: list[Message] = []
        for kind in ("onward", "home"):
            for visit in tick.visits:
                parcel = getattr(visit, kind)
                if parcel is not None:
                    sends += [(taken(x, parcel.spans, visit.here), parcel.peer) for x in held[visit.chain][1]]
        onward, receives = _room(tick.gradients, down)
        home, more = _room(tick.returning, down)
        return _Coming(onward, home, self.transport.exchange(sends, receives + more))


def _room(parcels: tuple[Parcel, ...], like_these: Keys) -> tuple[_Held, list[Message]]:
    """Tensors for what arrives, and the messages that fill them."""
    room: _Held = {}
    receives: list[Message] = []
    for parcel in parcels:
        keys = Keys(*(like(t, sets.size(parcel.spans)) for t in like_these))
        room[parcel.chain] = parcel.spans, keys
        receives += [(t, parcel.peer) for t in keys]
    return room, receives


class _Nothing:
    def add_to(self, held: _Held, down: Keys, mine: Spans) -> None:
        pass


class _Coming(_Nothing):
    """Gradients on their way: those of chains whose next stop is this rank, and those of its own keys."""

    def __init__(self, onward: _Held, home: _Held, pending: Pending) -> None:
        self.onward, self.home, self.pending = onward, home, pending

    def add_to(self, held: _Held, down: Keys, mine: Spans) -> None:
        """Add the gradients that arrived in a fixed order: sums are the same each time."""
        self.pending.wait()
        for chain, (_, gradients) in self.onward.items():
            for total, x in zip(held[chain][1], gradients, strict=True):
                total.add_(x)
        for spans, gradients in self.home.values():
            for total, x in zip(down, gradients, strict=True):
                start = 0
                for rows in sets.rows(spans, mine):
                    n = rows[1] - rows[0]
                    rows_of(total, rows).add_(rows_of(x, (start, start + n)))
                    start += n
