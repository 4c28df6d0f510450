"""PyTorch's own fused CPU kernel, called directly on views, for what it really covers.

Its limits, as found by trying: any zero length ends in a division by zero that kills the process; key and value dims
must be equal; its causal mask is aligned top-left; it adds masks and knows no booleans; a row that sees no key gets the
LSE 0; there is no gradient for what is added, nor through the LSE."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from strobe.autograd import Plain
from strobe.backends.backend import Backend, Gradients
from strobe.backends.tiled import backward as tiled_backward
from strobe.mask import causal, causal_top_left, full
from strobe.problem import Inputs, Problem, from_bhsd, to_bhsd

_NAME = "_scaled_dot_product_flash_attention_for_cpu"
# Calling PyTorch's generated binding takes 4 us less than calling the same operation out of `torch.ops`.
_forward_op: Any = getattr(torch, _NAME, None) or getattr(torch.ops.aten, _NAME, None)
_backward_op: Any = getattr(torch.ops.aten, f"{_NAME}_backward", None)

# Older versions have not been tried with fewer key heads than query heads.
_GROUPS_SINCE = (2, 11)
_TAKES_GROUPS = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2]) >= _GROUPS_SINCE


def _is_causal(problem: Problem) -> bool:
    mask = problem.mask
    return mask is not full and (mask == causal_top_left or (mask == causal and problem.len_q == problem.len_k))


def supports(problem: Problem) -> str | None:
    if problem.device.type != "cpu":
        return f"it runs on CPUs only, the inputs are on {problem.device.type}"
    if _forward_op is None or _backward_op is None:
        return f"torch {torch.__version__} does not have the operator"
    if problem.packed:
        return "no packed sequences"
    if problem.empty:
        return "no empty tensors"
    if problem.dim != problem.dim_v:
        return f"key and value dims must be equal, got {problem.dim} and {problem.dim_v}"
    if problem.group != 1 and not _TAKES_GROUPS:
        return f"no grouped heads in torch {torch.__version__} (since {'.'.join(map(str, _GROUPS_SINCE))})"
    for present, what in (
        (problem.softcap is not None, "softcap"),
        (problem.dropout, "dropout"),
        (problem.has_sinks, "sinks"),
    ):
        if present:
            return f"no {what}"
    if problem.mask != full and not _is_causal(problem):
        why = " with unequal lengths (its diagonal starts at the top left)" if problem.mask == causal else ""
        return f"no {problem.mask!r} mask{why}"
    if problem.has_bias and problem.mask != full:
        return "no bias together with an interval mask"
    if problem.has_bias and problem.needs_grad:
        return "no gradient of the bias"
    return None


def _added(problem: Problem, inputs: Inputs) -> torch.Tensor | None:
    """The mask tensor and the bias as one tensor to be added to the scores, no larger than they are."""
    bias = inputs.bias
    if bias is not None and bias.dtype != problem.dtype:
        bias = bias.to(problem.lse_dtype)  # the kernel takes its own dtype, or fp32 beside 16-bit inputs
    if inputs.mask is None:
        return bias
    if bias is None:
        return torch.zeros(inputs.mask.shape, dtype=problem.dtype).masked_fill_(~inputs.mask, -torch.inf)
    return torch.where(inputs.mask, bias, -torch.inf)


def forward(problem: Problem, inputs: Inputs, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = inputs.q, inputs.k, inputs.v
    if not (problem.has_mask_tensor or problem.has_bias):
        result, lse = _forward_op(q, k, v, 0.0, _is_causal(problem), scale=problem.scale)
    else:
        added = _added(problem, inputs)
        assert added is not None
        result, lse = _forward_op(q, k, v, 0.0, False, attn_mask=added, scale=problem.scale)
        lse.masked_fill_(added.amax(-1) == -torch.inf, -torch.inf)
    return (result if out is None else out.copy_(result)), lse


def backward(
    problem: Problem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> Gradients:
    if dlse is not None:
        return tiled_backward.backward(problem, inputs, out, lse, dout, dlse)
    added = _added(problem, inputs)
    if added is not None:
        lse = lse.masked_fill(lse == -torch.inf, 0)  # what the kernel itself had written there
    gradients = _backward_op(
        dout, inputs.q, inputs.k, inputs.v, out, lse, 0.0, _is_causal(problem), attn_mask=added, scale=problem.scale
    )
    return Gradients(*gradients)


def _repeat(problem: Problem, inputs: Inputs, layout: str, return_lse: bool) -> Callable[..., Any] | None:
    """Further calls like this one, without mask tensor or bias: only views and the operation itself."""
    keywords: dict[str, Any] = {"is_causal": True} if _is_causal(problem) else {}
    if problem.scale != 1 / math.sqrt(problem.dim):
        keywords["scale"] = problem.scale
    op = functools.partial(_forward_op, **keywords) if keywords else _forward_op  # a number to parse costs 0.7 us
    attend: Callable[..., Any]
    if problem.needs_grad:
        if return_lse:
            return None
        backward_op, causal, scale = _backward_op.default, _is_causal(problem), problem.scale

        def backward(*tensors: torch.Tensor) -> Any:
            return backward_op(*tensors, 0.0, causal, scale=scale)

        attend = functools.partial(Plain.apply, (op, backward, BACKENDS["aten_cpu"], problem))
    else:

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return op(q, k, v)[0]

    def of_bshd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

    def with_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        out, lse = op(to_bhsd(q, layout), to_bhsd(k, layout), to_bhsd(v, layout))
        return from_bhsd(out, q, layout), lse

    return with_lse if return_lse else of_bshd if layout == "bshd" else attend


BACKENDS = {
    "aten_cpu": Backend(
        name="aten_cpu",
        summary="PyTorch's fused CPU kernel, for plain and causal attention",
        supports=supports,
        forward=forward,
        backward=backward,
        repeat=_repeat,
    )
}
