"""`allgather`: every rank gets all keys, a few key heads at a time, and takes one softmax over them: no merges.

The keys of the next heads are on their way while those of these heads are worked on, and so are the gradients of the heads
before. Any mask works alike. Memory grows with the whole length, divided by the number of stages.
"""

from __future__ import annotations

from typing import Any

import torch

from strobe.distributed import spans as sets
from strobe.distributed.method import Gradients, Result, Task, like, taken
from strobe.distributed.step import Keys, Rest, State, rows_of
from strobe.distributed.transport import Message, Pending, Transport
from strobe.problem.checks import lse_dtype

STAGES = 4  # at most; at least one key head each


class Gather:
    def __init__(self, task: Task, transport: Transport) -> None:
        self.task, self.transport = task, transport
        self.everything = sets.spans([(0, task.plan.total)])

    def kept_shapes(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[tuple[Any, ...]]:
        return []

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: bool) -> Result:
        stages, group = self._stages(k), q.shape[-2] // k.shape[-2]
        out = like(v, q.shape[-3], q.shape[-2])
        lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=lse_dtype(q.dtype))
        coming = self._gather(k, v, stages[0])
        for i, heads in enumerate(stages):
            keys = coming.keys(self.everything)
            if i + 1 < len(stages):
                coming = self._gather(k, v, stages[i + 1])
            of_q = slice(group * heads.start, group * heads.stop)
            task, state = self.task.of_heads(of_q.start, of_q.stop), State(q[..., of_q, :], v.shape[-1])
            task.step(self.everything).forward(task.steps, q[..., of_q, :], keys, state)
            out[..., of_q, :], lse[..., of_q, :], _ = task.finished(state)
        return Result(out, lse)

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rest: Rest, kept: tuple[torch.Tensor, ...]
    ) -> Gradients:
        stages, group, wide = self._stages(k), q.shape[-2] // k.shape[-2], lse_dtype(q.dtype)
        dq = torch.zeros_like(q, dtype=wide)
        down = Keys(*(torch.empty_like(t, dtype=wide) for t in (k, v)))
        coming, returning = self._gather(k, v, stages[0]), None
        for i, heads in enumerate(stages):
            keys = coming.keys(self.everything)
            if i + 1 < len(stages):
                coming = self._gather(k, v, stages[i + 1])
            of_q = slice(group * heads.start, group * heads.stop)
            task = self.task.of_heads(of_q.start, of_q.stop)
            of_heads = Rest(
                rest.out[..., of_q, :],
                rest.lse[..., of_q, :],
                rest.dout[..., of_q, :],
                None if rest.dlse is None else rest.dlse[..., of_q, :],
            )
            dkeys = Keys(*(torch.zeros_like(t, dtype=wide) for t in keys))
            step = task.step(self.everything)
            step.backward(task.steps, q[..., of_q, :], keys, of_heads, dq[..., of_q, :], dkeys)
            if returning is not None:
                returning.into(down)
            returning = self._return(dkeys, heads)
        assert returning is not None
        returning.into(down)
        return Gradients(dq, *down, self.task.gradient_of_sinks(rest))

    def _stages(self, k: torch.Tensor) -> list[slice]:
        """Return the key heads of each stage. Their number does not depend on the ranks: results should not."""
        heads = k.shape[-2]
        count = max(1, min(heads, STAGES))
        return [slice(i * heads // count, (i + 1) * heads // count) for i in range(count)]

    def _gather(self, k: torch.Tensor, v: torch.Tensor, heads: slice) -> _Gathering:
        """A collective takes equal parts, so shorter shards are padded."""
        plan, parts, pending = self.task.plan, [], []
        for t in (k, v):
            mine = t[..., heads, :]
            if plan.ranks == 1:
                parts.append(mine[None])
                continue
            if mine.shape[-3] < plan.largest or not mine.is_contiguous():
                room = like(mine, plan.largest)
                rows_of(room, (0, mine.shape[-3])).copy_(mine)
                mine = room
            into = mine.new_empty((plan.ranks, *mine.shape))
            pending.append(self.transport.all_gather(into, mine))
            parts.append(into)
        return _Gathering(self.task, parts, pending)

    def _return(self, dkeys: Keys, heads: slice) -> _Returning:
        """The gradients of all keys, to their ranks."""
        if self.task.plan.ranks == 1:
            return _Returning(heads, [[t] for t in dkeys], [])
        if self.task.template.deterministic:
            return self._return_in_order(dkeys, heads)
        plan, rows, sums, pending = self.task.plan, self.task.plan.rows(self.task.rank), [], []
        for t in dkeys:
            parts = t.new_zeros((plan.ranks, *like(t, plan.largest).shape))
            for rank, shard in enumerate(plan.shards):
                rows_of(parts[rank], (0, plan.rows(rank))).copy_(sets.take(t, shard, self.everything, t.dim() - 3))
            into = torch.empty_like(parts[0])
            pending.append(self.transport.reduce_scatter(into, parts))
            sums.append([rows_of(into, (0, rows))])
        return _Returning(heads, sums, pending)

    def _return_in_order(self, dkeys: Keys, heads: slice) -> _Returning:
        """Send gradients back by messages, to be added up in the order of the ranks."""
        plan, rank = self.task.plan, self.task.rank
        sends: list[Message] = []
        receives: list[Message] = []
        parts = []
        for t in dkeys:
            contributions = []
            for peer, shard in enumerate(plan.shards):
                part = taken(t, shard, self.everything)
                if peer == rank:
                    contributions.append(part)
                    continue
                contributions.append(like(t, plan.rows(rank)))
                sends.append((part, peer))
                receives.append((contributions[-1], peer))
            parts.append(contributions)
        return _Returning(heads, parts, [self.transport.exchange(sends, receives)])


class _Gathering:
    def __init__(self, task: Task, parts: list[torch.Tensor], pending: list[Pending]) -> None:
        self.task, self.parts, self.pending = task, parts, pending

    def keys(self, everything: sets.Spans) -> Keys:
        """Wait for the keys and return them in the order of their positions."""
        for pending in self.pending:
            pending.wait()
        return Keys(*(self._in_order(t) for t in self.parts))

    def _in_order(self, parts: torch.Tensor) -> torch.Tensor:
        plan = self.task.plan
        if plan.ranks == 1:
            return parts[0]
        ranges = plan.prepared.get("ranges")
        if ranges is None:
            of_each = (
                (span, rank, rows) for rank, s in enumerate(plan.shards) for span in s for rows in sets.rows((span,), s)
            )
            ranges = plan.prepared["ranges"] = [(rank, rows) for _, rank, rows in sorted(of_each)]
        tensors = [rows_of(parts[rank], rows) for rank, rows in ranges]
        return torch.cat(tensors, -3) if tensors else rows_of(parts[0], (0, 0))


class _Returning:
    def __init__(self, heads: slice, parts: list[list[torch.Tensor]], pending: list[Pending]) -> None:
        self.heads, self.parts, self.pending = heads, parts, pending

    def into(self, down: Keys) -> None:
        for pending in self.pending:
            pending.wait()
        for total, contributions in zip(down, self.parts, strict=True):
            mine = total[..., self.heads, :]
            mine.copy_(contributions[0])
            for more in contributions[1:]:
                mine.add_(more)
