"""Textbook attention, the oracle: the whole score matrix, in float64, with ordinary differentiable operations.

It defines what every other backend has to compute. Nothing here is fast or small.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from strobe import dropout
from strobe.backends.backend import Backend
from strobe.problem import Inputs, Problem
from strobe.score import softcapped


def attention(
    problem: Problem, inputs: Inputs, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in `dtype`, differentiable; packed problems give (1, heads, total_q, dim_v) and (1, heads,
    total_q)."""
    parts = [_one(problem, part, index, dtype) for index, part in _sequences(problem, inputs)]
    if not parts:
        rows = inputs.q.shape[:3]
        return inputs.q.new_zeros((*rows, problem.dim_v), dtype=dtype), inputs.q.new_zeros(rows, dtype=dtype)
    outs, lses = zip(*parts, strict=True)
    return (outs[0], lses[0]) if len(parts) == 1 else (torch.cat(outs, 2), torch.cat(lses, 2))


def _one(problem: Problem, x: Inputs, batch: range, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    q = x.q.to(dtype)
    k, v = (t.to(dtype).repeat_interleave(problem.group, 1) if problem.heads_k else t.to(dtype) for t in (x.k, x.v))
    len_q, len_k = q.shape[2], k.shape[2]

    s = softcapped(q @ k.mT * problem.scale, problem.softcap)  # (batch, heads, len_q, len_k)
    if x.bias is not None:
        s = s + x.bias.to(dtype)
    visible = problem.mask.dense(len_q, len_k, q.device) & (s > -torch.inf)
    if x.mask is not None:
        visible = visible & x.mask

    p, lse = probabilities(s, visible, None if x.sinks is None else x.sinks.to(dtype)[:, None, None])
    if problem.dropout:
        kept = dropout.keep(x.seed, batch, range(problem.heads), range(len_q), range(len_k), problem.dropout, q.device)
        p = torch.where(kept, p / (1 - problem.dropout), 0)
    return p @ v, lse


def probabilities(
    s: torch.Tensor, visible: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The softmax over the visible keys and its LSE; 0 and -inf, without NaN in the gradients, for rows that see none.
    The sink, (heads, 1, 1) or the like, is one more key of the softmax, whose probability goes nowhere."""
    len_k = s.shape[-1]
    if sink is not None:
        s = torch.cat([s, sink.expand(*s.shape[:-1], 1)], -1)
        visible = torch.cat([visible.expand(*s.shape[:-1], len_k), s[..., -1:] > -torch.inf], -1)
    seen = visible.any(-1, keepdim=True)
    s = torch.where(visible, s, torch.where(seen, -torch.inf, 0.0).to(s.dtype))  # finite where nothing is seen
    if s.shape[-1] == 0:
        return s, s.new_full(s.shape[:-1], -torch.inf)
    p = torch.where(visible, s.softmax(-1), 0)[..., :len_k]
    return p, torch.where(seen, s.logsumexp(-1, keepdim=True), -torch.inf).squeeze(-1)


def _sequences(problem: Problem, inputs: Inputs) -> Iterator[tuple[range, Inputs]]:
    """The problem as it is or, when it is packed, one sequence after the other, with the index of each."""
    if not problem.packed:
        yield range(problem.batch), inputs
        return
    assert inputs.cu_q is not None and inputs.cu_k is not None
    ends_q, ends_k = inputs.cu_q.tolist(), inputs.cu_k.tolist()
    for i in range(problem.batch):
        rows, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])

        def corner(t: torch.Tensor | None, i: int = i, rows: slice = rows, keys: slice = keys) -> torch.Tensor | None:
            """Of a mask or bias (batch, heads, longest len_q, longest len_k), each axis perhaps 1, the part of sequence
            i."""
            if t is None:
                return None
            t = t if t.shape[0] == 1 else t[i : i + 1]
            t = t if t.shape[2] == 1 else t[:, :, : rows.stop - rows.start]
            return t if t.shape[3] == 1 else t[:, :, :, : keys.stop - keys.start]

        yield (
            range(i, i + 1),
            Inputs(
                inputs.q[:, :, rows],
                inputs.k[:, :, keys],
                inputs.v[:, :, keys],
                corner(inputs.mask),
                corner(inputs.bias),
                inputs.sinks,
                inputs.seed,
            ),
        )


def _forward(problem: Problem, inputs: Inputs, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        result, lse = attention(problem, inputs)
        out = result.to(problem.dtype) if out is None else out.copy_(result)
        return out, lse.to(problem.lse_dtype)


BACKENDS = {
    "reference": Backend(
        name="reference",
        summary="textbook attention in float64; the oracle, for small problems",
        supports=lambda problem: None,
        forward=_forward,
        details=lambda problem: {"dtype": "float64"},
        extra_bytes=lambda problem: 3 * 8 * problem.batch * problem.heads * problem.len_q * problem.len_k,
        automatic=False,
    )
}
