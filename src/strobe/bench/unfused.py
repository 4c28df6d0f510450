"""Standard attention in CUDA: the ladder's rungs 01 and b0, which write the N x N matrices to memory."""

from __future__ import annotations

from typing import Any

import torch

from strobe.bench.case import BenchCase
from strobe.bench.inputs import Tensors
from strobe.bench.provider import Prepared, Provider, Refusal, lacking
from strobe.learn.ladder import exact, execute, rungs
from strobe.learn.ladder.rung import Shape

_FORWARD, _BACKWARD = rungs.get("01"), rungs.get("b0")
_MOST_WORK = 1 << 34  # products for the scores of a call; more take seconds


def cannot(case: BenchCase, device: torch.device) -> str | None:
    """Return why the rungs do not run the case on this device; None if they do."""
    if device.type != "cuda":
        return f"needs an NVIDIA GPU, the tensors are on {device.type}; `strobe ladder` counts what a rung does there"
    reason = lacking(
        case,
        softcap="no softcap",
        sinks="no sinks",
        score="no score functions",
        bias="no bias",
        window="no windows: a rung knows full and causal masks",
        unequal=f"head dims {case.dim} and {case.value_dim}; a rung has one for keys and values",
    )
    if reason is not None:
        return reason
    if case.heads_k != case.heads:
        return f"{case.heads_k} key heads for {case.heads} query heads; a rung takes as many of both"
    try:
        _shape(case)
    except ValueError as error:
        return str(error)
    return execute.cannot_run(_FORWARD, device)


def _shape(case: BenchCase) -> Shape:
    """Raises ValueError for a head dim that no rung is made for."""
    return Shape(case.batch * case.heads, case.len_q, case.len_k, case.dim, case.causal)


class _Attention(torch.autograd.Function):
    """Takes and returns fp32, (batch, heads, length, dim) without gaps."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Shape, calls: Any) -> torch.Tensor:
        o, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
        calls[0](execute.Tensors(q, k, v, o, lse, q.new_empty(_FORWARD.workspace(shape))))
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.shape, ctx.calls = shape, calls
        return o

    @staticmethod
    def backward(ctx: Any, d_o: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, o, lse = ctx.saved_tensors
        gradients = [torch.empty_like(t) for t in (q, k, v)]
        workspace = q.new_empty(_BACKWARD.workspace(ctx.shape))
        ctx.calls[1](execute.Tensors(q, k, v, o, lse, workspace, d_o.contiguous(), *gradients))
        return (*gradients, None, None)


def _prepare(case: BenchCase, x: Tensors) -> Prepared:
    if (reason := cannot(case, x.q.device)) is not None:
        raise Refusal("unsupported", reason)
    shape, used = _shape(case), (_FORWARD,) if case.direction == "forward" else (_FORWARD, _BACKWARD)
    calls = [execute.Call(rung, shape, x.q.device) for rung in used]

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Attention.apply(q.float(), k.float(), v.float(), shape, calls)
        return out.to(q.dtype)

    return Prepared(forward)


def _slow(case: BenchCase, device: torch.device) -> str | None:
    work = case.score_elements() * case.dim
    return "scalar arithmetic: it would take seconds; name it to time it" if work > _MOST_WORK else None


def providers() -> list[Provider]:
    return [
        Provider(
            "cuda-unfused",
            "standard",
            "the ladder's rungs 01 and b0: a kernel for each step, scalar fp32",
            _prepare,
            matrices=lambda case: (4 if case.direction == "forward" else 8) * case.score_elements(),
            kernels="^kernel$",
            cannot=cannot,
            skipped=_slow,
            roundings=lambda case: exact.roundings(_FORWARD, case.len_k) if case.dtype == "float32" else 0.0,
            device="cuda",
        )
    ]
