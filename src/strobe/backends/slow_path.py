"""Calls on an NVIDIA GPU that no kernel of ours runs, which makes them many times slower: each reason gets one warning, with
a way out. With STROBE_VERBOSE=1 there is a line for each such call that is bound."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch

from strobe.backends import dispatch
from strobe.backends.backend import Backend
from strobe.cuda.runtime.verbose import say
from strobe.problem import Problem
from strobe.problem.hints import callers_level

SILENCE = "STROBE_NO_SLOW_WARNING"
_warned: set[str] = set()


def report(problem: Problem, chosen: Backend) -> None:
    """Say that `chosen`, which nobody named, runs the problem, if tensors are on a GPU and the backend is not for them."""
    if problem.device.type != "cuda" or problem.empty or chosen.device_type == "cuda":
        return
    reasons = {name: dispatch.get(name).supports(problem) for name in _for_gpus()}
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    say(f"{chosen.name} runs the {problem.direction} pass of {problem.summary}, and no kernel ({why})")
    if why in _warned or os.environ.get(SILENCE, "0") not in ("", "0"):
        return
    _warned.add(why)
    warnings.warn(
        f"the {problem.direction} pass of {problem.summary} runs on {chosen.name!r}, in PyTorch operations, and not in a CUDA "
        f"kernel, which is many times faster. {why}. {_way_out(problem)}; {SILENCE}=1 silences this warning",
        stacklevel=callers_level(),
    )


def _for_gpus() -> Iterator[str]:
    return (name for name in dispatch.NAMES if dispatch.get(name).device_type == "cuda")


def _way_out(problem: Problem) -> str:
    """The first change of the call with which a kernel would run it."""
    dim, dim_v = (-(-n // 8) * 8 for n in (problem.dim, problem.dim_v))
    padded = replace(problem, dim=dim, dim_v=dim_v)
    changes = {
        "Cast q, k and v to bfloat16 or float16": replace(problem, dtype=torch.bfloat16),
        f"Pad the head dims with zeros to {dim} and {dim_v}, with the scale that you have now": padded,
        "Do both: cast to bfloat16 or float16, and pad the head dims with zeros to a multiple of 8": replace(
            padded, dtype=torch.bfloat16
        ),
        "Leave out deterministic=True": replace(problem, deterministic=False),
    }
    for advice, changed in changes.items():
        if any(dispatch.get(name).supports(changed) is None for name in _for_gpus()):
            return advice
    return "strobe.explain says which calls have a kernel"
