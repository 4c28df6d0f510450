"""A checked call bound to its backends, and the one cache of such calls.

Checking arguments in Python costs more than launching a kernel. So a checked call becomes a `BoundCall`, a function of the
tensors alone, and the next call with the same `signature` goes straight there: with or without gradients, dense or
varlen, traced or not.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from strobe.backends import dispatch, slow_path
from strobe.backends.backend import Gradients, Pass
from strobe.problem import Problem, any_requires_grad
from strobe.problem.arguments import (
    ALIGN,
    DEFAULT_LAYOUT,
    PLAIN,
    ROWS,
    Arguments,
    tensor_facts,
    with_tensors,
    without_tensors,
)
from strobe.problem.hints import refuse_three_axes, warn_of_layout
from strobe.problem.overlap import same_storage
from strobe.variants.score import Score

_MOST = 1024  # bound calls that a thread remembers
_is_grad_enabled = torch.is_grad_enabled
_strided = torch.strided


class _Remembered(threading.local):
    """BoundCall calls hold launch buffers that are written at each call, so each thread has its own."""

    def __init__(self) -> None:
        self.calls: dict[Any, BoundCall] = {}


remembered = _Remembered()


class BoundCall:
    """`forward.run` is a function of the arguments; backward passes are bound when they are needed. `differentiable`: some
    of the tensors need a gradient. `merges`: the same call could merge its result with a state (`Arguments.state_lse`);
    `rounds_states`: and round it on its way to another tensor (`Arguments.state_out`)."""

    def __init__(self, a: Arguments, needs_grad: bool) -> None:
        self.problem, self.layout = Problem.of(a, needs_grad)
        self.differentiable, self._template = needs_grad, without_tensors(a)
        self._behind_qkv = self._template[3:]
        self.backend = dispatch.choose(self.problem, a.backend)
        if a.backend is None:
            slow_path.report(self.problem, self.backend)
        self.forward: Pass = dispatch.bind(self.backend, self.problem, self.layout)
        self.merges = self.backend.can_merge(self.problem) and not needs_grad
        self._backward: dict[tuple[str, ...], Pass] = {}

    @functools.cached_property
    def rounds_states(self) -> bool:
        return self.merges and self.backend.rounds_states(self.problem)

    def arguments(self, seed: int | None, tensors: Sequence[Any], blocks: Any = None) -> Arguments:
        """The arguments of the call with these tensors (`tensors_of`), as a backward pass has them; the LSE is asked
        for."""
        if seed is None and len(tensors) == 3 and blocks is None:
            return Arguments._make((*tensors, *self._behind_qkv))
        return with_tensors(self._template, seed, tensors, blocks)

    def backward(
        self,
        gradients: tuple[str, ...],
        a: Arguments,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
    ) -> Gradients:
        """The gradients of these names (`arguments.gradient_names`)."""
        bound = self._backward.get(gradients)
        if bound is None:
            problem = self.problem.backward(gradients)
            chosen = dispatch.choose_backward(problem, self.backend)
            if self.backend.device_type == "cuda":
                slow_path.report(problem, chosen)
            bound = self._backward[gradients] = dispatch.bind(chosen, problem, self.layout)
        return bound.run(a, out, lse, torch.zeros_like(out) if dout is None else dout, dlse)


_SPECIAL = ("q", "k", "v", "mask", "score", "seed", "blocks", "plan")
_UNALIGNED = ALIGN - 1  # the bits of an address that an aligned tensor does not have


def _getter(names: Iterable[str]) -> operator.itemgetter:
    """These fields of Arguments, by their places: an attrgetter takes longer."""
    return operator.itemgetter(*map(Arguments._fields.index, names))


_tensors = _getter(n for n, row in ROWS.items() if row.tensor and n not in _SPECIAL)
_values = _getter(n for n, row in ROWS.items() if not row.tensor and n not in _SPECIAL)
_read = _getter([*(n for n, row in ROWS.items() if row.tensor and not row.written), "state_out"])


def signature(a: Arguments) -> tuple[Any, ...] | None:
    """Everything that a bound call depends on: all facts about the arguments but the addresses and contents of tensors.
    None for tensors of a kind that is not remembered. Numbers come with their classes, since 1 == True == Decimal(1)."""
    q, k, v = a[:3]
    if q.__class__ not in PLAIN or k.__class__ not in PLAIN or v.__class__ not in PLAIN:
        return None
    dtype = q.dtype
    if k.dtype is not dtype or v.dtype is not dtype or q.layout is not _strided:
        return None
    if q.is_cpu and k.is_cpu and v.is_cpu:
        place: Any = None
    elif q.is_neg() or k.is_neg() or v.is_neg():
        return None  # memory holds the negated numbers, which kernels must not read
    else:
        ends: Any = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & _UNALIGNED
        if ends:  # the ones that are not aligned are copied, so it counts which they are
            ends = q.data_ptr() & _UNALIGNED, k.data_ptr() & _UNALIGNED, v.data_ptr() & _UNALIGNED
        place = q.device, k.device, v.device, ends
    needs_grad = _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    mask, score, more = a.mask, a.score, None
    for t in _tensors(a):
        if t is not None:
            more = _more(a)
            if more is None:
                return None
            needs_grad = needs_grad or more[0]
            break
    if isinstance(mask, torch.Tensor):
        if mask.__class__ not in PLAIN:
            return None
        mask = tensor_facts(mask)
    if score is not None:
        if not isinstance(score, Score):
            return None
        if tensors := score.tensors:
            if not all(t.__class__ in PLAIN for t in tensors):
                return None
            needs_grad = needs_grad or (_is_grad_enabled() and any(t.requires_grad for t in tensors))
        score = score.structure, tuple(map(tensor_facts, tensors))
    values = _values(a)
    return (
        q.shape, q.is_contiguous() or q.stride(), k.shape, k.is_contiguous() or k.stride(),
        v.shape, v.is_contiguous() or v.stride(), dtype, place, needs_grad, mask, score, values,
        tuple(map(type, values)), a.seed.__class__, a.plan is None, a.layout is DEFAULT_LAYOUT, more,
    )  # fmt: skip


def _more(a: Arguments) -> tuple[Any, ...] | None:
    """The part of the signature that most calls do not have: facts about other tensors than q, k and v. First: whether
    one of them needs a gradient."""
    facts: list[Any] = []
    for t in _tensors(a):
        if t is None:
            facts.append(None)
        elif t.__class__ not in PLAIN or t.layout is not _strided:
            return None
        else:
            facts.append(tensor_facts(t))
    out, state_out = a.out, a.state_out
    if out is not None:
        if any(t is not None and t.__class__ in PLAIN and same_storage(t, out) for t in _read(a)):
            return None  # whether they overlap depends on their addresses
        facts.append(out.data_ptr() & _UNALIGNED)
    if state_out is not None:
        facts.append(state_out.data_ptr() & _UNALIGNED)
    return _is_grad_enabled() and any_requires_grad(a), tuple(facts)


def lookup(a: Arguments) -> BoundCall:
    """The bound call of an earlier, equal-looking one, or a new one."""
    try:
        key = signature(a)
        bound = remembered.calls.get(key)
    except (RuntimeError, TypeError):  # without strides, or not to be hashed: the checks say what is wrong
        key = bound = None
    if bound is None:
        bound = bind(a)
        if key is not None:
            remember(key, bound)
    return bound


def remember(key: Any, bound: BoundCall) -> None:
    if len(remembered.calls) >= _MOST:
        remembered.calls.clear()
    remembered.calls[key] = bound


def bind(a: Arguments, needs_grad: bool | None = None) -> BoundCall:
    """Check the arguments and bind them; nothing is remembered. If `needs_grad` is None, the tensors decide."""
    refuse_three_axes(a)
    bound = BoundCall(a, _is_grad_enabled() and any_requires_grad(a) if needs_grad is None else needs_grad)
    warn_of_layout(a)
    return bound
