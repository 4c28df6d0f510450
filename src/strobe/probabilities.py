"""True attention probabilities of some queries, for people who look at attention maps.

Attention never stores them. Here they are computed again for the rows that are asked for, by the reference's operations:
memory grows with rows x keys, not with the square of the length.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Never

import torch

from strobe.backends import reference
from strobe.call.attend import refuse_sharded
from strobe.call.autograd import cast_for_autocast, without_autocast
from strobe.problem import Problem
from strobe.problem.arguments import DEFAULT_LAYOUT, Arguments, Inputs
from strobe.problem.checks import checked_tensor
from strobe.problem.hints import refuse_three_axes, shows_known_keywords, unknown_keyword, warn_of_layout
from strobe.problem.resolve import resolved, with_softcap
from strobe.variants.mask import Mask, Positions
from strobe.variants.score import Score

EVERY_ROW = slice(None)


@shows_known_keywords
def probabilities(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    rows: slice | int | Sequence[int] | torch.Tensor = EVERY_ROW,
    mask: Mask | torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    score: Score | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    layout: str = DEFAULT_LAYOUT,
    **wrong: Never,
) -> torch.Tensor:
    """The attention probabilities of some rows of queries: (batch, heads, rows, len_k), in fp32 (fp64 of fp64 inputs).

    q and k are whole, and every argument but `rows` means what it means in `strobe.attention`: a row keeps its position,
    so it sees the keys that it sees there.

    rows           which queries: a slice, an index, or several; all by default. Negative ones count from the end

    Rows sum to 1; to less with `sinks`, which take a share; to 0 where a query sees no key. Dropout plays no part. Memory
    and time grow with rows * len_k. The result is differentiable. Axes that q leaves out are missing in it, too.
    """
    if wrong:
        raise unknown_keyword(probabilities, wrong)
    # Keys stand in for the values, which play no part, so that the checks of a call are those of `attention`.
    score = with_softcap(score, softcap)
    a = Arguments(q=q, k=k, v=k, mask=mask, scale=scale, score=score, bias=bias, sinks=sinks, layout=layout)
    refuse_sharded(a)
    a = cast_for_autocast(resolved(a))
    with without_autocast(checked_tensor("q", q).device):
        return _of_rows(a, rows)


def _of_rows(a: Arguments, rows: Any) -> torch.Tensor:
    refuse_three_axes(a)
    problem, layout = Problem.of(a)
    warn_of_layout(a)
    inputs, dtype = Inputs.of(a, layout), problem.lse_dtype
    parts = [_rows(problem, inputs, run, dtype) for run in _runs(_indices(rows, problem.len_q))]
    if not parts:
        parts = [inputs.q.new_zeros((problem.batch, problem.heads, 0, problem.len_k), dtype=dtype)]
    return layout.rows_outside(parts[0] if len(parts) == 1 else torch.cat(parts, 2))


def _rows(problem: Problem, inputs: Inputs, run: range, dtype: torch.dtype) -> torch.Tensor:
    """The probabilities of neighbouring rows."""

    def part(t: torch.Tensor | None) -> torch.Tensor | None:
        return t if t is None or t.shape[2] == 1 else t[:, :, run.start : run.stop]

    inputs = inputs._replace(q=inputs.q[:, :, run.start : run.stop], mask=part(inputs.mask), bias=part(inputs.bias))
    at = Positions(run.start, problem.len_q, 0, problem.len_k)
    return reference.weights(problem, inputs, range(problem.batch), at, dtype)[0]


def _indices(rows: Any, len_q: int) -> range | list[int]:
    if isinstance(rows, slice):
        return range(len_q)[rows]
    if isinstance(rows, torch.Tensor):
        if rows.dim() > 1 or rows.is_floating_point() or rows.dtype == torch.bool:
            raise TypeError(f"rows must be integers with one axis, got {rows.dtype} of shape {tuple(rows.shape)}")
        rows = rows.tolist()
    try:
        numbers = [operator.index(row) for row in (rows if isinstance(rows, Sequence | range) else [rows])]
    except TypeError:
        raise TypeError(f"rows must be a slice, an index or a sequence of indices, got {rows!r}") from None
    for row in numbers:
        if not -len_q <= row < len_q:
            raise IndexError(f"rows must be from {-len_q} to {len_q - 1}, the queries there are; got {row}")
    return [row % len_q for row in numbers]


def _runs(indices: range | list[int]) -> Iterator[range]:
    """Runs of neighbouring rows: one matrix product serves a run."""
    if isinstance(indices, range) and indices.step == 1:
        if indices:
            yield indices
        return
    for _, same in itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        run = [row for _, row in same]
        yield range(run[0], run[-1] + 1)
