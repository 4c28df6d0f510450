"""Sequences with lengths and positions of their own: which of them are alike, and so can be worked on together."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from strobe.problem import Problem
from strobe.problem.arguments import Inputs
from strobe.variants.mask import Positions


def sequences_differ(problem: Problem) -> bool:
    return problem.varlen or problem.positions


def alike(problem: Problem, inputs: Inputs) -> Iterator[tuple[range, slice, slice, Positions | None]]:
    """Neighbouring sequences of the same lengths and positions: their numbers, and their rows and keys in the tensors."""
    if not sequences_differ(problem):
        yield range(problem.batch), slice(0, problem.len_q), slice(0, problem.len_k), None
        return
    starts_q, starts_k = _starts(inputs)
    # Parts of longer sequences one by one: bits of a shard must not depend on what else a call holds.
    apart = inputs.positions is not None
    by = operator.itemgetter(0) if apart else operator.itemgetter(1)
    kinds = _kinds(problem, inputs)
    for _, group in itertools.groupby(enumerate(kinds), by):
        same = [number for number, _ in group]
        first, end = same[0], same[-1] + 1
        at = kinds[first][2]
        if problem.varlen:
            yield range(first, end), slice(starts_q[first], starts_q[end]), slice(starts_k[first], starts_k[end]), at
        else:
            yield range(first, end), slice(0, problem.len_q), slice(0, problem.len_k), at


def _starts(inputs: Inputs) -> tuple[list[int], list[int]]:
    """Return where the rows and keys of packed sequences begin, and where the last ones end."""
    return ([], []) if inputs.cu_q is None or inputs.cu_k is None else (inputs.cu_q.tolist(), inputs.cu_k.tolist())


def _kinds(problem: Problem, inputs: Inputs) -> list[tuple[int, int, Positions | None]]:
    """The lengths and positions of each sequence."""
    lengths = [(problem.len_q, problem.len_k)] * problem.batch
    if problem.varlen:
        pairs = [[b - a for a, b in itertools.pairwise(starts)] for starts in _starts(inputs)]
        lengths = list(zip(*pairs, strict=True))
    at = [None] * problem.batch if inputs.positions is None else [Positions(*p) for p in inputs.positions.tolist()]
    return [(*length, where) for length, where in zip(lengths, at, strict=True)]


class Order(NamedTuple):
    """Packed sequences in another order, in which those that are alike are neighbours."""

    inputs: Inputs
    rows: torch.Tensor  # where each row of the new order lay
    keys: torch.Tensor

    @staticmethod
    def of(problem: Problem, inputs: Inputs) -> Order | None:
        """None where there is little to gain, or where something goes by the number of a sequence."""
        by_number = problem.has_mask_tensor or problem.has_bias or problem.dropout or problem.positions
        if not problem.varlen or by_number or "b" in problem.score.expr.variables():
            return None
        kinds = _kinds(problem, inputs)
        first: dict[Any, int] = {}
        for kind in kinds:
            first.setdefault(kind, len(first))
        if sum(a != b for a, b in itertools.pairwise(kinds)) < 2 * len(first):
            return None
        order = sorted(range(len(kinds)), key=lambda b: first[kinds[b]])
        device, moved = problem.device, []
        for starts in _starts(inputs):
            index = [torch.arange(starts[b], starts[b + 1]) for b in order]
            ends = itertools.accumulate((starts[b + 1] - starts[b] for b in order), initial=0)
            moved.append((torch.cat(index).to(device), torch.tensor(list(ends), dtype=torch.int32, device=device)))
        (rows, cu_q), (keys, cu_k) = moved
        q, k, v = inputs.q[:, :, rows], inputs.k[:, :, keys], inputs.v[:, :, keys]
        return Order(inputs._replace(q=q, k=k, v=v, cu_q=cu_q, cu_k=cu_k), rows, keys)
