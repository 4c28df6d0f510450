"""A provider says why it cannot run a case, or prepares a forward call in its own layout. What it raises later becomes
its row as well."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from strobe.bench import variants
from strobe.bench.case import BenchCase
from strobe.bench.inputs import Tensors
from strobe.variants.mask import full

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Scope = Callable[[], contextlib.AbstractContextManager[Any]]


class Refusal(Exception):
    """A provider does not run a case; `status` is one of results.STATUSES."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass
class Prepared:
    """A forward call in the provider's own layout, and what has to be set while it runs."""

    forward: Forward
    layout: str = "bhsd"  # "bhsd", "bshd", "sbhd"
    scope: Scope = contextlib.nullcontext
    note: str | None = None


Prepare = Callable[[BenchCase, Tensors], Prepared]  # raises Refusal
Reason = Callable[[BenchCase, torch.device], str | None]


def _never(case: BenchCase, device: torch.device) -> str | None:
    return None


@dataclass(frozen=True)
class Provider:
    name: str
    kind: str  # one of palette.KINDS
    summary: str
    prepare: Prepare
    matrices: Callable[[BenchCase], int] = lambda case: 0  # bytes of the N x N matrices it holds at one time, at least
    kernels: str | None = None  # a regular expression that some kernel's name on a GPU must match
    differentiable: bool = True
    cannot: Reason = _never  # known without tensors
    skipped: Reason = _never  # why not, unless it is named
    roundings: Callable[[BenchCase], float] = lambda case: 0.0  # see tolerance.summation_floor
    compiles: bool = False  # each new shape costs seconds
    functions: bool = False  # can take the variants of bench/variants.py
    models: bool = False  # runs steps of whole models, and nothing else
    device: str | None = None  # the only kind it runs on
    install: str | None = None  # how to get it, if PyTorch does not bring it along


# ---- layouts

_TO = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}
_BACK = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}


def to_layout(t: torch.Tensor, layout: str) -> torch.Tensor:
    """Bring (batch, heads, length, dim) into another order, in which the result is contiguous."""
    return t.permute(_TO[layout]).contiguous()


def from_layout(t: torch.Tensor, layout: str) -> torch.Tensor:
    return t.permute(_BACK[layout])


# ---- what providers have in common


def dense_mask(case: BenchCase, device: torch.device) -> torch.Tensor | None:
    """Return the mask for those who can only be told it in full; None if nothing is hidden."""
    interval = None if case.mask == full else case.mask.dense(case.len_q, case.len_k, device=device)
    condition = variants.dense_mask(case, device)
    return condition if interval is None else interval if condition is None else interval & condition


def lacking(case: BenchCase, **features: str) -> str | None:
    """The reason given for the first of these features that a case has: softcap, sinks, score, bias, window, unequal, …"""
    has = {
        "softcap": case.softcap is not None,
        "sinks": case.sinks,
        "score": variants.functions(case, torch.device("meta")).score is not None,
        "bias": case.bias is not None,
        "window": case.window is not None,
        "unequal": case.dim != case.value_dim,
        "gradients": case.direction != "forward",
        "float32": case.dtype == "float32",
    }
    return next((reason for feature, reason in features.items() if has[feature]), None)


def refuse(case: BenchCase, **features: str) -> None:
    """Raises for what a provider lacks, with the reasons of `lacking`."""
    if (reason := lacking(case, **features)) is not None:
        raise Refusal("unsupported", reason)


def needs_gpu(x: Tensors) -> None:
    if x.q.device.type != "cuda":
        raise Refusal("unsupported", f"needs an NVIDIA GPU, the tensors are on {x.q.device.type}")


def costs_a_compilation(case: BenchCase, device: torch.device) -> str | None:
    return "compiling takes seconds per shape; name it to time it"


def keep_buffers() -> None:
    """Compiled backward passes may overwrite what the forward saved, which forbids timing them again and again."""
    from torch._functorch import config

    config.donated_buffer = False


def two_matrices(case: BenchCase) -> int:
    """S and P, in the dtype of the inputs."""
    return 2 * case.torch_dtype.itemsize * case.score_elements()
