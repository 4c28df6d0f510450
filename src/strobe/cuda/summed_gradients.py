"""Gradients that kernels write entry by entry, or sum up by atomic additions: of a bias and of the tensors that a score
captures. Room for them, full of zeros, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from strobe.cuda.parts.scores import Scores
from strobe.problem import Problem, captured_strides
from strobe.problem.arguments import Arguments, four_axes

_Maybe = torch.Tensor | None


def add_room(problem: Problem, a: Arguments, x: dict[str, Any]) -> tuple[Problem, dict[str, tuple[int, ...]]]:
    """Adds to the tensors `x` of a backward plan. The problem with the strides that captured tensors have there, and those
    of the other gradients."""
    strides = {}
    if "bias" in problem.gradients:
        x["dbias"], strides["dbias"] = _of_bias(problem, a)
    loads = list(problem.loads)
    for i in problem.learnt:
        x[f"dscore{i}"], x[f"score{i}"] = _of_captured(x[f"score{i}"])
        loads[i] = replace(loads[i], strides=captured_strides(x[f"score{i}"]))
    return replace(problem, loads=tuple(loads)), strides


def _of_bias(problem: Problem, a: Arguments) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The gradient of the bias, 0 where pairs are hidden, and its strides by pair; fp32 where it is summed up."""
    bias = next(load for load in problem.loads if load.name == "bias")
    gradient = torch.zeros(a.bias.shape, dtype=torch.float32 if bias.shared else a.bias.dtype, device=a.q.device)
    view = four_axes(gradient)
    assert view is not None
    return gradient, view.expand(problem.batch, problem.heads, problem.len_q, problem.len_k).stride()


def _of_captured(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient, and the tensor, both with the same strides, by which every entry has a place of its own: a kernel
    computes one index for both."""
    gradient = torch.zeros_like(t, dtype=torch.float32)
    if gradient.stride() == t.stride():
        return gradient, t
    t = t.clone(memory_format=torch.contiguous_format)
    return torch.zeros_like(t, dtype=torch.float32), t


def results(problem: Problem, a: Arguments, x: Mapping[str, Any]) -> tuple[_Maybe, tuple[_Maybe, ...] | None]:
    """The gradients of the bias and of all captured tensors, in their dtypes."""
    bias = x["dbias"].to(a.bias.dtype) if "bias" in problem.gradients else None
    if not problem.learnt:
        return bias, None
    factor = Scores.of(problem).printed.factor_of_gradients(problem.scale)
    found: list[_Maybe] = [None] * problem.captured
    for i in problem.learnt:
        total = x[f"dscore{i}"]
        found[i] = (total if factor == 1 else total * factor).to(a.score_tensors[i].dtype)
    return bias, tuple(found)
