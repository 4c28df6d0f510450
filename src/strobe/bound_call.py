"""A checked call bound to its backends, and the one cache of such calls.

Checking arguments in Python costs more than launching a kernel. So a checked call becomes a `BoundCall`, a function of the
tensors alone, and the next call with the same `signature` goes straight there: with or without gradients, dense or
varlen, traced or not.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from strobe.arguments import Arguments, with_tensors, without_tensors
from strobe.backends import dispatch
from strobe.backends.backend import Backward, Forward, Gradients
from strobe.overlap import same_storage
from strobe.problem import GRADIENTS, Problem, any_requires_grad
from strobe.score import Score

_MOST = 1024  # bound calls that a thread remembers
_is_grad_enabled = torch.is_grad_enabled
_strided = torch.strided
PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Remembered(threading.local):
    """BoundCall calls hold launch buffers that are written at each call, so each thread has its own."""

    def __init__(self) -> None:
        self.calls: dict[Any, BoundCall] = {}


remembered = _Remembered()


class BoundCall:
    """`forward` is a function of the arguments; backward passes are bound when they are needed. `differentiable`: some
    of the tensors need a gradient. `merges`: the same call could merge its result into an earlier one
    (`Arguments.earlier_lse`); `finishes`: and round it on its way to another tensor (`Arguments.earlier_out`)."""

    def __init__(self, a: Arguments, needs_grad: bool) -> None:
        self.problem, self.layout = Problem.of(a, needs_grad)
        self.differentiable, self._template = needs_grad, without_tensors(a)
        self._behind_qkv = self._template[3:]
        self.backend = dispatch.choose(self.problem, a.backend)
        self.forward: Forward = dispatch.bind(self.backend, self.problem, self.layout)
        self.merges = self.backend.can_merge(self.problem) and not needs_grad
        self._backward: dict[tuple[bool, ...], Backward] = {}

    @functools.cached_property
    def finishes(self) -> bool:
        return self.merges and self.backend.finishes(self.problem)

    def arguments(self, seed: int | None, tensors: Sequence[Any]) -> Arguments:
        """Of the call, with these tensors (`tensors_of`), as a backward pass has them; with the LSE."""
        if seed is None and len(tensors) == 3:
            return Arguments._make((*tensors, *self._behind_qkv))
        return with_tensors(self._template, seed, tensors)

    def backward(
        self,
        needs: tuple[bool, ...],
        a: Arguments,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
    ) -> Gradients:
        """`needs`: which of GRADIENTS are wanted; the last ones may be missing."""
        run = self._backward.get(needs)
        if run is None:
            problem = self.problem.backward(tuple(n for n, need in zip(GRADIENTS, needs, strict=False) if need))
            chosen = dispatch.choose_backward(problem, self.backend)
            run = self._backward[needs] = dispatch.bind(chosen, problem, self.layout)
        return run(a, out, lse, torch.zeros_like(out) if dout is None else dout, dlse)


def signature(a: Arguments) -> tuple[Any, ...] | None:
    """Everything that a bound call depends on: all facts about the arguments but the addresses and contents of tensors.
    None for tensors of a kind that is not remembered. Numbers come with their classes, since 1 == True == Decimal(1)."""
    (
        q, k, v, cu_q, _, _, _, mask, scale, softcap, score, bias, dropout, seed, sinks, layout, out, return_lse,
        deterministic, backend, positions, partial, first_head, _, _,
    ) = a  # fmt: skip
    if q.__class__ not in PLAIN or k.__class__ not in PLAIN or v.__class__ not in PLAIN:
        return None
    dtype = q.dtype
    if k.dtype is not dtype or v.dtype is not dtype or q.layout is not _strided:
        return None
    if q.is_cpu and k.is_cpu and v.is_cpu:
        place: Any = None
    else:
        place = q.device, k.device, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
    needs_grad = _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    rest = None
    more = bias is not None or sinks is not None or out is not None or cu_q is not None or score is not None
    if more or positions is not None or partial:
        rest = _rest(a)
        if rest is None:
            return None
        needs_grad = needs_grad or rest[0]
    if mask is not None and mask.__class__ in PLAIN:
        mask = mask.__class__, mask.shape, mask.stride(), mask.dtype, mask.device
    if softcap is not None or dropout.__class__ is not float or dropout or seed is not None:
        softcap = softcap, softcap.__class__, dropout, dropout.__class__, seed.__class__, first_head
    return (
        q.shape, q.is_contiguous() or q.stride(), k.shape, k.is_contiguous() or k.stride(),
        v.shape, v.is_contiguous() or v.stride(), dtype, place, needs_grad, mask, scale, scale.__class__, softcap,
        layout, return_lse, deterministic, backend, rest,
    )  # fmt: skip


def _rest(a: Arguments) -> tuple[Any, ...] | None:
    """The part of the signature that most calls do not have. First: whether the bias or the sinks need a gradient."""
    bias, sinks, out, score = a.bias, a.sinks, a.out, a.score
    if score is not None and not isinstance(score, Score):
        return None
    facts: list[Any] = []
    tensors = () if score is None else score.tensors
    for t in (bias, sinks, a.cu_q, a.cu_k, out, a.earlier_lse, a.earlier_out, a.positions, *tensors):
        if t is None:
            facts.append(None)
        elif t.__class__ in PLAIN and t.layout is _strided:
            facts += t.shape, t.is_contiguous() or t.stride(), t.dtype, t.device
        else:
            return None
    if out is not None:
        if any(t is not None and same_storage(t, out) for t in (a.q, a.k, a.v, bias, sinks, a.earlier_out)):
            return None  # whether they overlap depends on their addresses
        facts.append(out.data_ptr() & 15)
    if a.earlier_out is not None:
        facts.append(a.earlier_out.data_ptr() & 15)
    needs_grad = (bias is not None and bias.requires_grad) or (sinks is not None and sinks.requires_grad)
    structure = None if score is None else score.structure
    return needs_grad and _is_grad_enabled(), tuple(facts), a.max_q, a.max_k, a.partial, structure


def lookup(a: Arguments) -> BoundCall:
    """The bound call of an earlier, equal-looking one, or a new one."""
    try:
        key = signature(a)
        found = remembered.calls.get(key)
    except (RuntimeError, TypeError):  # without strides, or not to be hashed: the checks say what is wrong
        key = found = None
    if found is None:
        found = bind(a)
        if key is not None:
            remember(key, found)
    return found


def remember(key: Any, bound: BoundCall) -> None:
    if len(remembered.calls) >= _MOST:
        remembered.calls.clear()
    remembered.calls[key] = bound


def bind(a: Arguments, needs_grad: bool | None = None) -> BoundCall:
    """Check the arguments and bind them; nothing is remembered. `needs_grad`: None: as the tensors say."""
    return BoundCall(a, _is_grad_enabled() and any_requires_grad(a) if needs_grad is None else needs_grad)
