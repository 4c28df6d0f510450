"""PyTorch's own fused CPU kernel, called directly on views, for what it really covers.

Its limits, as found by trying: any zero length ends in a division by zero that kills the process; key and value dims
must be equal; its causal mask is aligned top-left, and multiplies -inf by the scale; it adds masks and knows no
booleans; a row that sees no key gets the LSE 0; there is no gradient for what is added, nor through the LSE; its
gradients of rows whose scores are all huge (finfo.min, say) are too large; with fewer keys than a vector has lanes, a row
whose scores are all NaN gets the output 0 and the LSE 0; its gradients of 16 bits are rounded after every block that is added.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from strobe.backends.backend import Backend, Gradients, Pass, bind_backward
from strobe.backends.tiled import backward as tiled_backward, forward as tiled_forward
from strobe.problem import Problem
from strobe.problem.arguments import Arguments, Inputs, Layout, four_axes
from strobe.variants.mask import causal, causal_top_left, full

_NAME = "_scaled_dot_product_flash_attention_for_cpu"
# Calling PyTorch's generated binding takes 4 us less than calling the same operation out of `torch.ops`.
_forward_op: Any = getattr(torch, _NAME, None) or getattr(torch.ops.aten, _NAME, None)
_backward_op: Any = getattr(torch.ops.aten, f"{_NAME}_backward", None)

# Older versions have not been tried with fewer key heads than query heads.
_GROUPS_SINCE = (2, 11)
_TAKES_GROUPS = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2]) >= _GROUPS_SINCE
_MOST_LANES = 16  # of a vector of fp32
_BLOCK_K = 512  # keys for which its backward adds to dQ at once
_MOST_SUMS = 16  # in 16 bits; the error grows with their square root, and is then three times that of tiles
_LEAST_SCALE, _MOST_SCALE = torch.finfo(torch.float32).tiny, 1e30


def _is_causal(problem: Problem) -> bool:
    mask = problem.mask
    return mask is not full and (mask == causal_top_left or (mask == causal and problem.len_q == problem.len_k))


def _sums(problem: Problem) -> int:
    """The blocks that its backward adds up in an entry of a gradient, at most."""
    block_q = 256 if problem.len_q >= 768 else 64 if problem.len_q >= 192 else 32
    return max(problem.group * -(-problem.len_q // block_q), -(-problem.len_k // _BLOCK_K))


def limits(problem: Problem) -> str | None:
    if _forward_op is None or _backward_op is None:
        return f"torch {torch.__version__} does not have the operator"
    for present, what in (
        (problem.varlen, "packed sequences"),
        (problem.positions, "parts of sequences"),
        (problem.partial, "output in fp32"),
        (problem.empty or not problem.dim_v, "empty tensors"),
        (problem.dropout, "dropout"),
        (problem.per_head, ", ".join(sorted(problem.per_head))),
        (not problem.score.is_identity, f"{problem.score.name.split('(')[0]}"),
        ("bias" in problem.gradients, "gradient of the bias"),
    ):
        if present:
            return f"no {what}"
    if problem.dim != problem.dim_v:
        return f"key and value dims must be equal, got {problem.dim} and {problem.dim_v}"
    if problem.group != 1 and not _TAKES_GROUPS:
        return f"no grouped heads in torch {torch.__version__} (since {'.'.join(map(str, _GROUPS_SINCE))})"
    if problem.mask != full and not _is_causal(problem):
        why = " with unequal lengths (its diagonal starts at the top left)" if problem.mask == causal else ""
        return f"no {problem.mask!r} mask{why}"
    if problem.has_bias and problem.mask != full:
        return "no bias together with an interval mask"
    if abs(problem.scale) > _MOST_SCALE or (problem.mask != full and problem.scale < _LEAST_SCALE):
        return f"scale {problem.scale}, by which it multiplies what is masked"
    if problem.gradients and problem.dtype.itemsize == 2 and _sums(problem) > _MOST_SUMS:
        return f"its backward adds {_sums(problem)} blocks in {problem.dtype}, which is exact enough for {_MOST_SUMS}"
    return None


def _machine(device: torch.device) -> str | None:
    return None if device.type == "cpu" else f"it runs on CPUs only, the inputs are on {device.type}"


def _added(problem: Problem, mask: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The mask tensor and the bias as one tensor to be added to the scores, no larger than they are."""
    if bias is not None and bias.dtype != problem.dtype:
        bias = bias.to(problem.lse_dtype)  # the kernel takes its own dtype, or fp32 beside 16-bit inputs
    if mask is None:
        return bias
    if bias is None:
        return torch.zeros(mask.shape, dtype=problem.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    return torch.where(mask, bias, -torch.inf)


def _bind(problem: Problem, layout: Layout) -> Pass:
    if problem.gradients:
        return Pass(_bind_backward(problem, layout))
    keywords: dict[str, Any] = {"is_causal": True} if _is_causal(problem) else {}
    if problem.scale != 1 / math.sqrt(problem.dim):
        keywords["scale"] = problem.scale
    op = functools.partial(_forward_op, **keywords) if keywords else _forward_op  # a number to parse costs 0.7 us
    added, few_keys = problem.has_mask_tensor or problem.has_bias, problem.len_k < _MOST_LANES
    inside, outside, rows = layout.inside, layout.outside, layout.rows_outside

    def run(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = inside(a.q), inside(a.k), inside(a.v)
        if added:
            to_add = _added(problem, four_axes(a.mask_tensor), four_axes(a.bias))
            assert to_add is not None
            out, lse = op(q, k, v, attn_mask=to_add)
            lse.masked_fill_(to_add.amax(-1) == -torch.inf, -torch.inf)
        else:
            out, lse = op(q, k, v)
        if few_keys and not lse.all():  # perhaps NaN that was swallowed
            out, lse = tiled_forward.forward(problem, Inputs.of(a, layout))
        return (outside(out) if a.out is None else a.out.copy_(outside(out))), rows(lse)

    def run_plain(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
        """The usual case without a call for each tensor: what small problems take is Python's time."""
        out, lse = op(a.q.transpose(1, 2), a.k.transpose(1, 2), a.v.transpose(1, 2))
        out = out.transpose(1, 2)
        return (out if a.out is None else a.out.copy_(out)), lse

    return Pass(run_plain if layout is Layout.BSHD and not added and not few_keys else run)


def _bind_backward(problem: Problem, layout: Layout) -> Callable[..., Any]:
    on_views = bind_backward(problem, layout, _backward)
    if problem.has_mask_tensor or problem.has_bias:
        return on_views
    op, is_causal, scale = _backward_op.default, _is_causal(problem), problem.scale
    inside, outside = layout.inside, layout.outside

    def run(a: Arguments, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
        if dlse is not None or tiled_backward.lse_loses_sums(lse):
            return on_views(a, out, lse, dout, dlse)
        q, k, v, out, dout = (inside(t) for t in (a.q, a.k, a.v, out, dout))
        gradients = op(dout, q, k, v, out, layout.rows_inside(lse), 0.0, is_causal, scale=scale)
        dq, dk, dv = map(outside, gradients)
        return Gradients(dq, dk, dv)

    return run


def _backward(
    problem: Problem, x: Inputs, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None
) -> Gradients:
    if dlse is not None or tiled_backward.lse_loses_sums(lse):
        return tiled_backward.backward(problem, x, out, lse, dout, dlse)
    added = _added(problem, x.mask, x.bias)
    lse = lse.masked_fill(lse == -torch.inf, 0)  # what the kernel itself had written there
    is_causal = _is_causal(problem)
    gradients = _backward_op(dout, x.q, x.k, x.v, out, lse, 0.0, is_causal, attn_mask=added, scale=problem.scale)
    return Gradients(*gradients)


BACKENDS = {
    "aten_cpu": Backend(
        name="aten_cpu",
        summary="PyTorch's fused CPU kernel, for plain and causal attention",
        limits=limits,
        machine=_machine,
        bind=_bind,
    )
}
