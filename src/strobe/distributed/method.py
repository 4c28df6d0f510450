"""A method of context parallel attention is a forward and a backward of one rank's shards.

Tensors are (batch, rows, heads, dim) or, for several documents, (rows, heads, dim); LSEs (…, heads, rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from strobe.distributed import spans as sets
from strobe.distributed.pieces import Axis, pieces
from strobe.distributed.shard_plan import ShardPlan
from strobe.distributed.spans import Spans
from strobe.distributed.step import Rest, State, Step, last_calls
from strobe.merging import add_sinks_, gradient_of_sinks
from strobe.problem.arguments import Arguments


class Result(NamedTuple):
    out: torch.Tensor  # in the dtype of q
    lse: torch.Tensor
    kept: tuple[torch.Tensor, ...] = ()  # what the backward pass wants to find again, besides inputs and results


class Gradients(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None  # of the rows, or of the heads, that this rank has worked on


@dataclass(frozen=True)
class Task:
    """A call as one rank sees it. `template`: the arguments without q, k, v and mask."""

    plan: ShardPlan  # its mask is that of the call
    rank: int
    template: Arguments
    invariant: bool = False

    @property
    def documents(self) -> int:
        """The number of packed documents; 0 for one sequence, whose tensors have a batch."""
        return len(self.plan.lengths) if len(self.plan.lengths) > 1 else 0

    @property
    def mine(self) -> Spans:
        return self.plan.shards[self.rank]

    @property
    def positional(self) -> bool:
        score = self.template.score
        return bool(self.template.dropout) or (score is not None and not score.pointwise)

    def step(self, keys: Spans) -> Step:
        """The queries of this rank with the keys at these positions."""
        plan = self.plan
        key = ("step", self.rank, keys, self.positional, self.invariant)
        if key not in plan.prepared:
            axis, block = Axis(plan.lengths, plan.starts), plan.block if self.invariant else None
            positional = self.positional or bool(self.documents)  # a varlen call has positions for all, or for none
            calls = pieces(self.mine, keys, axis, axis, plan.mask, positional=positional, block=block)
            plan.prepared[key] = Step(calls, plan.mask, self.documents, self.invariant)
        return plan.prepared[key]

    def of_heads(self, start: int, stop: int) -> Task:
        """Return the same task for some of the query heads."""
        a = self.template
        score = a.score
        if score is not None:
            score = score.with_first_head(start)
        sinks = None if a.sinks is None else a.sinks[start:stop]
        return replace(self, template=a._replace(score=score, sinks=sinks, first_head=a.first_head + start))

    def last_calls(self, steps: Sequence[Step]) -> list[tuple[bool, ...]]:
        """Return, for each call of the steps in the order in which they run, whether it may round the rows that it has:
        no later one has any of them. Empty: no call may round, because sinks are added later or the result must not
        depend on the cut."""
        if self.invariant or self.template.sinks is not None:
            return [()] * len(steps)
        return last_calls(steps)

    def finished(self, state: State) -> Result:
        """Finish a state after the last merge: add the sinks, once, and round, to the dtype of q, the rows that are not
        rounded yet."""
        if self.template.sinks is not None:
            add_sinks_(*state.results(), self.template.sinks)
        return Result(*state.rounded())

    def gradient_of_sinks(self, rest: Rest) -> torch.Tensor | None:
        sinks = self.template.sinks
        return None if sinks is None else gradient_of_sinks(*rest, sinks)

    @property
    def steps(self) -> Arguments:
        """The arguments of each step: sinks are not among them."""
        return self.template._replace(sinks=None)


class Method(Protocol):
    task: Task

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: bool) -> Result:
        """`keep`: a backward pass may follow."""

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rest: Rest, kept: tuple[torch.Tensor, ...]
    ) -> Gradients:
        """Return the gradients, in fp32 or the dtype of the inputs."""

    def kept_shapes(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[tuple[Any, ...]]:
        """(shape, dtype) of each tensor that `forward` keeps."""


def taken(t: torch.Tensor, part: Spans, whole: Spans) -> torch.Tensor:
    """The rows of `part`, contiguous, of a tensor (…, rows, heads, dim) that holds those of `whole`."""
    return sets.take(t, part, whole, t.dim() - 3).contiguous()


def like(t: torch.Tensor, rows: int, heads: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Room for other rows, and perhaps heads, of a tensor (…, rows, heads, dim)."""
    shape = (*t.shape[:-3], rows, t.shape[-2] if heads is None else heads, t.shape[-1])
    return t.new_empty(shape, dtype=dtype)
