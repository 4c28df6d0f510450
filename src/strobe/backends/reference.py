"""Textbook attention, the oracle: the whole score matrix, in float64, with ordinary differentiable operations.

It defines what every other backend has to compute. Nothing here is fast or small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from strobe.backends.backend import Backend, Capabilities, binder
from strobe.backends.pages import Sequences, gather, look_up
from strobe.problem import Problem
from strobe.problem.arguments import Inputs
from strobe.variants import dropout
from strobe.variants.expression import WORKING_DTYPE, on_device
from strobe.variants.mask import Positions


def attention(
    problem: Problem, inputs: Inputs, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in `dtype`, differentiable; varlen problems give (1, heads, total_q, dim_v) and (1, heads, total_q)."""
    parts = [_one(problem, part, index, at, dtype) for index, at, part in _sequences(problem, inputs)]
    if not parts:
        rows = inputs.q.shape[:3]
        return inputs.q.new_zeros((*rows, problem.dim_v), dtype=dtype), inputs.q.new_zeros(rows, dtype=dtype)
    outs, lses = zip(*parts, strict=True)
    if len(parts) == 1:
        return outs[0], lses[0]
    axis = 2 if problem.q.varlen else 0
    return torch.cat(outs, axis), torch.cat(lses, axis)


def _one(
    problem: Problem, x: Inputs, batch: range, at: Positions | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    p, lse = weights(problem, x, batch, at, dtype)
    if problem.dropout:
        offset_q, _, offset_k, _ = at or (0, 0, 0, 0)
        heads = range(problem.first_head, problem.first_head + problem.heads)
        rows, keys = range(offset_q, offset_q + p.shape[2]), range(offset_k, offset_k + p.shape[3])
        kept = dropout.keep(x.seed, batch, heads, rows, keys, problem.dropout, p.device)
        p = torch.where(kept, p / dropout.kept_share(problem.dropout), 0)
    return p @ _for_each_head(problem, x.v.to(dtype)), lse


def _for_each_head(problem: Problem, t: torch.Tensor) -> torch.Tensor:
    return t.repeat_interleave(problem.group, 1) if problem.heads_k else t


def weights(
    problem: Problem, x: Inputs, batch: range, at: Positions | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The probabilities before dropout, (batch, heads, len_q, len_k), and their LSE, of sequences `batch` at positions `at`."""
    q, k = x.q.to(dtype), _for_each_head(problem, x.k.to(dtype))
    len_q, len_k = q.shape[2], k.shape[2]
    offset_q, whole_q, offset_k, whole_k = at or (0, len_q, 0, len_k)
    rows, keys = range(offset_q, offset_q + len_q), range(offset_k, offset_k + len_k)
    where: dict[Any, Any] = {"len_q": whole_q, "len_k": whole_k, WORKING_DTYPE: dtype}
    where["q"] = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
    where["k"] = torch.arange(keys.start, keys.stop, device=q.device)
    where["b"] = torch.arange(batch.start, batch.stop, device=q.device)[:, None, None, None]
    where["h"] = torch.arange(problem.heads, device=q.device)[:, None, None]
    where |= dict(enumerate(x.score_tensors))

    s = scores(problem, q @ k.mT, where, None if x.bias is None else x.bias.to(dtype))
    visible = s != -torch.inf
    if problem.k.pages is None:  # else `x.mask` has all of it
        visible = visible & problem.mask.dense(len_q, len_k, device=q.device, at=at)
    if x.mask is not None:
        visible = visible & x.mask
    return probabilities(s, visible, None if x.sinks is None else x.sinks.to(dtype)[:, None, None])


def scores(
    problem: Problem, product: torch.Tensor, where: Mapping[Any, Any], bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the scores that q kᵀ becomes before masks; `where` holds the positions and tensors that a score may look
    at."""
    s = product * problem.scale
    if not problem.score.is_identity:
        score = problem.score.expr.evaluate({**where, "s": s})
        s = on_device(score, s.device, s.dtype).expand(s.shape)  # it may not depend on all, or on `s`
    return s if bias is None else torch.where(s == -torch.inf, s, s + bias)  # hidden is hidden, even from NaN


def probabilities(
    s: torch.Tensor, visible: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The softmax over the visible keys and its LSE; 0 and -inf, without NaN in the gradients, for rows that see none.
    The sink, (heads, 1, 1) or the like, is one more key of the softmax, whose probability goes nowhere: all of it if the
    sink is infinite."""
    len_k, takes_all = s.shape[-1], None
    if sink is not None:
        takes_all = sink == torch.inf
        sink = torch.where(takes_all, 0.0, sink).to(s.dtype)
        s = torch.cat([s, sink.expand(*s.shape[:-1], 1)], -1)
        visible = torch.cat([visible.expand(*s.shape[:-1], len_k), s[..., -1:] != -torch.inf], -1)
        visible = visible & ~takes_all
    seen = visible.any(-1, keepdim=True)
    s = torch.where(visible, s, torch.where(seen, -torch.inf, 0.0).to(s.dtype))  # finite where nothing is seen
    if s.shape[-1] == 0:
        return s, s.sum(-1) - torch.inf  # differentiable, as ever
    p = torch.where(visible, s.softmax(-1), 0)[..., :len_k]
    # As `logsumexp`, whose gradient, exp(s - lse), has lost the sum beside a huge maximum.
    m = s.detach().amax(-1, keepdim=True)
    m = torch.where(m.isfinite(), m, 0)
    lse = torch.where(seen, (s - m).exp().sum(-1, keepdim=True).log() + m, -torch.inf)
    if takes_all is not None:
        lse = torch.where(takes_all, torch.inf, lse)
    return p, lse.squeeze(-1)


def _sequences(problem: Problem, inputs: Inputs) -> Iterator[tuple[range, Positions | None, Inputs]]:
    """The problem as it is or, where sequences have lengths or positions of their own, one after the other: with the
    index and the positions of each."""
    if problem.k.pages is not None:
        yield from _paged_sequences(problem, inputs)
        return
    at = [None] * problem.batch if inputs.positions is None else [Positions(*p) for p in inputs.positions.tolist()]
    if not problem.varlen:
        if inputs.positions is None:
            yield range(problem.batch), None, inputs
            return
        ends_q = ends_k = None
    else:
        assert inputs.cu_q is not None and inputs.cu_k is not None
        ends_q, ends_k = inputs.cu_q.tolist(), inputs.cu_k.tolist()
    for i in range(problem.batch):
        if ends_q is None or ends_k is None:
            batch, rows, keys = slice(i, i + 1), slice(0, problem.len_q), slice(0, problem.len_k)
        else:
            batch, rows, keys = slice(0, 1), slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])

        def corner(t: torch.Tensor | None, i: int = i, rows: slice = rows, keys: slice = keys) -> torch.Tensor | None:
            """Sequence i's part of a mask or bias (batch, heads, longest len_q, longest len_k), each axis of which may
            be 1."""
            if t is None:
                return None
            t = t if t.shape[0] == 1 else t[i : i + 1]
            t = t if t.shape[2] == 1 else t[:, :, : rows.stop - rows.start]
            return t if t.shape[3] == 1 else t[:, :, :, : keys.stop - keys.start]

        yield (
            range(i, i + 1),
            at[i],
            inputs._replace(
                q=inputs.q[batch, :, rows],
                k=inputs.k[batch, :, keys],
                v=inputs.v[batch, :, keys],
                mask=corner(inputs.mask),
                bias=corner(inputs.bias),
            ),
        )


def _paged_sequences(problem: Problem, inputs: Inputs) -> Iterator[tuple[range, Positions | None, Inputs]]:
    """One after the other, with the keys that some query sees and a mask of which query sees which."""
    every = Sequences.of(problem, inputs)
    for i, (first_q, len_q, keys, position, whole) in enumerate(zip(*(t.tolist() for t in _plain(every)), strict=True)):
        one, index = every.take(slice(i, i + 1)), torch.arange(keys, device=inputs.q.device)
        page, row, there = look_up(problem, inputs, one, index)
        batch, rows = (i, slice(None)) if inputs.cu_q is None else (0, slice(first_q, first_q + len_q))
        at = Positions(0, len_q, position, whole)
        visible = problem.mask.dense(len_q, keys, device=index.device, at=at)
        part = inputs._replace(
            q=inputs.q[batch : batch + 1, :, rows],
            k=gather(inputs.k, page, row, there),
            v=gather(inputs.v, page, row, there),
            mask=(visible & there[:, None])[:, None],
        )
        yield range(i, i + 1), at, part


def _plain(s: Sequences) -> tuple[torch.Tensor, ...]:
    return s.first_q, s.len_q, s.keys, s.position, s.whole


def _forward(problem: Problem, inputs: Inputs, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        result, lse = attention(problem, inputs)
        out = result.to(problem.out_dtype) if out is None else out.copy_(result)
        return out, lse.to(problem.lse_dtype)


BACKENDS = {
    "reference": Backend(
        name="reference",
        summary="textbook attention in float64; the oracle, for small problems",
        limits=lambda problem: "no gradients of its own" if problem.gradients else None,
        bind=binder(_forward),
        details=lambda problem: {"dtype": "float64"},
        extra_bytes=lambda problem: 3 * 8 * problem.batch * problem.heads * problem.len_q * problem.len_k,
        automatic=False,
        can=Capabilities(pages=True),
    )
}
