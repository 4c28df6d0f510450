"""`ulysses`: ranks trade rows for heads. Each then attends to all rows with its share of the heads, and they trade back.

With a method inside (`hybrid`) the ranks of one dimension of a mesh trade, and the rows that they then hold together travel
along the other dimension. Heads need not divide evenly: ranks take as equal shares of the query heads as there are, and
the key heads that those look at, some of which may go to several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from strobe.call import piece
from strobe.distributed import spans as sets
from strobe.distributed.method import Gradients, Method, Result, Task, like, taken
from strobe.distributed.step import Rest
from strobe.distributed.transport import Message, Transport
from strobe.problem.arguments import Arguments
from strobe.problem.checks import lse_dtype

Heads = tuple[int, int]


class Share(NamedTuple):
    """The heads of one rank. `expand`: the key head of each query head, where groups do not come out even."""

    queries: Heads
    keys: Heads
    expand: tuple[int, ...] | None


def shares_of(heads: int, heads_k: int, ranks: int) -> list[Share]:
    return [_share(heads // heads_k, rank * heads // ranks, (rank + 1) * heads // ranks) for rank in range(ranks)]


def _share(group: int, start: int, stop: int) -> Share:
    keys = start // group, -(-stop // group)
    even = keys[1] - keys[0] == 1 or (start % group == 0 and stop % group == 0)
    return Share((start, stop), keys, None if even else tuple(h // group - keys[0] for h in range(start, stop)))


def is_shared(shares: Sequence[Share]) -> bool:
    """Return whether a key head goes to several ranks."""
    return any(a.keys[1] > b.keys[0] for a, b in zip(shares, shares[1:], strict=False))


class Ulysses:
    """`inside` makes the method that attends to the rows of all these ranks with the heads of one."""

    def __init__(self, task: Task, transport: Transport, inside: Callable[[Task], Method]) -> None:
        self.task, self.transport, self.inside = task, transport, inside
        neighbours = transport.size
        first = task.rank - transport.rank
        self.shards = task.plan.shards[first : first + neighbours]
        plan = task.plan.joined(neighbours)
        self.whole = replace(task, plan=plan, rank=first // neighbours)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: bool) -> Result:
        mine, shares = self._shares(q, k)
        q, k, v = self._to_heads([q, k, v], [[s.queries for s in shares], *[[s.keys for s in shares]] * 2])
        k, v = (_expanded(t, mine) for t in (k, v))
        out, lse, kept = self.inside(self.whole.of_heads(*mine.queries)).forward(q, k, v, keep)
        heads = [s.queries for s in shares]
        rows, columns = self._to_rows([out, lse.mT.unsqueeze(-1)], [heads, heads])
        return Result(rows, columns.squeeze(-1).mT.contiguous(), (q, k, v, out, lse, *kept) if keep else ())

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rest: Rest, kept: tuple[torch.Tensor, ...]
    ) -> Gradients:
        mine, shares = self._shares(q, k)
        q_all, k_all, v_all, out, lse, *more = kept
        heads, keys = [s.queries for s in shares], [s.keys for s in shares]
        columns = [] if rest.dlse is None else [rest.dlse.mT.unsqueeze(-1)]
        dout, *dlse = self._to_heads([rest.dout, *columns], [heads] * (1 + len(columns)))
        inner = Rest(out, lse, dout, dlse[0].squeeze(-1).mT if dlse else None)
        # Gradients of key heads that several ranks have looked at are summed up, so they come and travel in fp32.
        shared, wide = is_shared(shares), lse_dtype(q.dtype)
        task = self.whole.of_heads(*mine.queries)
        task = replace(task, template=task.template._replace(partial=shared and wide != q.dtype))
        dq, dk, dv, dsinks = self.inside(task).backward(q_all, k_all, v_all, inner, tuple(more))
        dk, dv = (_contracted(t, mine, wide).to(wide if shared else q.dtype) for t in (dk, dv))
        dq, dk, dv = self._to_rows([dq.to(q.dtype), dk, dv], [heads, keys, keys])
        if dsinks is not None:
            total = dsinks.new_zeros(q.shape[-2])
            total[slice(*mine.queries)] = dsinks
            dsinks = total
        return Gradients(dq, dk, dv, dsinks)

    def kept_shapes(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[tuple[Any, ...]]:
        mine, _ = self._shares(q, k)
        rows, lead = sets.size(self.whole.mine), tuple(q.shape[:-3])
        heads = mine.queries[1] - mine.queries[0]
        heads_k = heads if mine.expand is not None else mine.keys[1] - mine.keys[0]
        sizes = [(heads, q.shape[-1]), (heads_k, k.shape[-1]), (heads_k, v.shape[-1]), (heads, v.shape[-1])]
        shapes = [((*lead, rows, n, dim), q.dtype) for n, dim in sizes]
        return [*shapes, ((*lead, heads, rows), lse_dtype(q.dtype))]

    def _shares(self, q: torch.Tensor, k: torch.Tensor) -> tuple[Share, list[Share]]:
        shares = shares_of(q.shape[-2], k.shape[-2], self.transport.size)
        return shares[self.transport.rank], shares

    def _to_heads(self, tensors: Sequence[torch.Tensor], heads: Sequence[Sequence[Heads]]) -> list[torch.Tensor]:
        """Bring (…, my rows, all heads, dim) to (…, all rows, my heads, dim); heads[tensor][rank]."""
        rank, received = self.transport.rank, []
        sends: list[Message] = []
        receives: list[Message] = []
        for t, of_ranks in zip(tensors, heads, strict=True):
            parts = []
            for peer, (start, stop) in enumerate(of_ranks):
                part = t[..., start:stop, :].contiguous()
                if peer != rank:
                    sends.append((part, peer))
                    part = like(t, sets.size(self.shards[peer]), of_ranks[rank][1] - of_ranks[rank][0])
                    receives.append((part, peer))
                parts.append(part)
            received.append(parts)
        self.transport.exchange(sends, receives).wait()
        order = self._order(tensors[0].device)
        joined = [torch.cat(parts, -3) for parts in received]
        return joined if order is None else [t.index_select(t.dim() - 3, order) for t in joined]

    def _to_rows(self, tensors: Sequence[torch.Tensor], heads: Sequence[Sequence[Heads]]) -> list[torch.Tensor]:
        """Back: from (…, all rows, my heads, dim) to (…, my rows, all heads, dim). What several ranks have of a head is
        added up, in the order of the ranks."""
        rank, received = self.transport.rank, []
        sends: list[Message] = []
        receives: list[Message] = []
        for t, of_ranks in zip(tensors, heads, strict=True):
            parts = []
            for peer, (start, stop) in enumerate(of_ranks):
                part = taken(t, self.shards[peer], self.whole.mine)
                if peer != rank:
                    sends.append((part, peer))
                    part = like(t, sets.size(self.shards[rank]), stop - start)
                    receives.append((part, peer))
                parts.append(part)
            received.append(parts)
        self.transport.exchange(sends, receives).wait()
        return [_side_by_side(parts, of_ranks) for parts, of_ranks in zip(received, heads, strict=True)]

    def _order(self, device: torch.device) -> torch.Tensor | None:
        prepared, key = self.whole.plan.prepared, ("rows of neighbours", self.whole.rank, device)
        if key not in prepared:
            order = sets.order(self.shards)
            prepared[key] = None if order is None else order.to(device)
        return prepared[key]


def _side_by_side(parts: Sequence[torch.Tensor], heads: Sequence[Heads]) -> torch.Tensor:
    if all(a[1] == b[0] for a, b in zip(heads, heads[1:], strict=False)):
        return torch.cat(list(parts), -2)
    total = torch.zeros_like(like(parts[0], parts[0].shape[-3], max(stop for _, stop in heads)))
    for part, (start, stop) in zip(parts, heads, strict=True):
        total[..., start:stop, :] += part
    return total


def _expanded(t: torch.Tensor, mine: Share) -> torch.Tensor:
    return t if mine.expand is None else t.index_select(-2, torch.tensor(mine.expand, device=t.device))


def _contracted(t: torch.Tensor, mine: Share, wide: torch.dtype) -> torch.Tensor:
    """The gradient of what `_expanded` has expanded."""
    if mine.expand is None:
        return t
    total = torch.zeros_like(like(t, t.shape[-3], mine.keys[1] - mine.keys[0], wide))
    return total.index_add_(-2, torch.tensor(mine.expand, device=t.device), t.to(wide))


class Local:
    """All rows are here: a call of the core."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def kept_shapes(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[tuple[Any, ...]]:
        return []

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: bool) -> Result:
        out, lse, _ = piece.forward(self._arguments(q, k, v))
        return Result(out.contiguous(), lse.contiguous())

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rest: Rest, kept: tuple[torch.Tensor, ...]
    ) -> Gradients:
        a = self._arguments(q, k, v)
        wanted = ("q", "k", "v") if a.sinks is None else ("q", "k", "v", "sinks")
        gradients = piece.backward(a, rest.out, rest.lse, rest.dout, rest.dlse, wanted)
        assert gradients.q is not None and gradients.k is not None and gradients.v is not None
        return Gradients(gradients.q, gradients.k, gradients.v, gradients.sinks)

    def _arguments(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Arguments:
        plan = self.task.plan
        a = self.task.template._replace(q=q, k=k, v=v, mask=plan.mask, return_lse=True)
        if not self.task.documents:
            return a
        cu, longest = plan.offsets(q.device), max(plan.lengths)
        return a._replace(cu_q=cu, cu_k=cu, max_q=longest, max_k=longest)
