"""Tensors as the kernels want them, on a GPU and in the emulator: aligned inputs, room for results, and the gradients in what
the kernels have written."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from strobe.backends.backend import Gradients
from strobe.cuda.launch import address
from strobe.cuda.parts.scores import Scores
from strobe.cuda.plans.backward_plan import Wanted, group_parts
from strobe.problem import Problem, Strides, captured_strides
from strobe.problem.arguments import ALIGN, ROWS, Arguments, Layout, four_axes
from strobe.variants.text import MOST_TENSORS

_Maybe = torch.Tensor | None


def is_aligned(t: torch.Tensor) -> bool:
    """Return whether its address and its strides but the last are multiples of what the kernels move at a time."""
    step = ALIGN // t.element_size()
    strides = (s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1)
    return t.data_ptr() % ALIGN == 0 and all(s % step == 0 for s in strides)


def aligned(t: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy if it is not aligned, or if its memory holds the negated numbers."""
    t = t.resolve_neg()
    return t if is_aligned(t) else t.clone(memory_format=torch.contiguous_format)


def in_step(t: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The tensor itself, or a copy if whole rows do not lead from one sequence to the next (`tensor_maps.buffer_rows`)."""
    batch, _, rows = inside_strides(t, layout)
    regular = t.shape[0] == 1 or layout.inside(t).shape[2] <= 1 or (rows > 0 and batch % rows == 0)
    return t if regular else t.clone(memory_format=torch.contiguous_format)


def inside_strides(t: torch.Tensor, layout: Layout) -> Strides:
    return layout.inside(t).stride()[:3]  # type: ignore[return-value]


def _contiguous(t: torch.Tensor) -> torch.Tensor:
    return t.resolve_neg().contiguous()


def _as_floats(t: torch.Tensor) -> torch.Tensor:
    return t.detach().resolve_neg().float().contiguous()


# ---- the arguments that kernels read, in both directions ---------------------------------------------------------------


class Read(NamedTuple):
    """The two steps that lead to an argument as kernels read it."""

    of_call: Callable[[Arguments], Any]  # as the caller has it; None: the call has none
    form: Callable[[Any], Any]  # as kernels read it


def _score_tensor(number: int, a: Arguments) -> torch.Tensor | None:
    tensors = a.score_tensors
    return tensors[number] if number < len(tensors) else None


_FORMS: dict[str, Callable[[Any], Any]] = {
    "floats": _as_floats,
    "contiguous": _contiguous,
    "strided": lambda t: t.detach(),
    "unsigned": lambda seed: seed & ((1 << 64) - 1),
}
# The arguments besides q, k and v, by the name that plans have for them.
READ: dict[str, Read] = {
    **{name: Read(attrgetter(name), _FORMS[row.read]) for name, row in ROWS.items() if row.read is not None},
    **{f"score{i}": Read(functools.partial(_score_tensor, i), _FORMS["strided"]) for i in range(MOST_TENSORS)},
    "mask_tensor": Read(attrgetter("mask_tensor"), lambda t: t),
}


def read_by_kernels(a: Arguments) -> dict[str, Any]:
    """The arguments of READ that the call has."""
    return {name: read.form(t) for name, read in READ.items() if (t := read.of_call(a)) is not None}


class Slots:
    """The order in which a launch takes addresses, by name. The first call of a kind derives it from the tensors that it has
    prepared (`prepare`, `prepare_backward`); later ones pick theirs by the same names."""

    def __init__(self, prepared: Mapping[str, Any]) -> None:
        self.tensors = tuple(name for name in prepared if name not in READ)
        self.read = tuple(name for name in prepared if name in READ)
        self.names = (*self.tensors, *self.read)
        self.pick = operator.itemgetter(*self.tensors)  # from tensors by name

    def addresses(self, prepared: Mapping[str, Any]) -> list[int]:
        return [address(prepared[name]) for name in self.names]

    def addresses_read(self, a: Arguments) -> list[int]:
        """The addresses of arguments of READ, as the caller has them; a seed is a number."""
        return [READ["seed"].form(a.seed) if name == "seed" else READ[name].of_call(a).data_ptr() for name in self.read]


# ---- forward ---------------------------------------------------------------------------------------------------------


def with_strides(problem: Problem, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Problem:
    """The problem with the strides that q, k and v have now."""
    of_keys = Layout.BSHD if problem.k.pages is not None else layout
    q, k, v = (inside_strides(tensors[n], of) for n, of in (("q", layout), ("k", of_keys), ("v", of_keys)))
    return replace(problem, q=replace(problem.q, strides=(q,)), k=replace(problem.k, strides=(k, v)))


def prepare(problem: Problem, layout: Layout, a: Arguments) -> tuple[dict[str, Any], Problem]:
    """The tensors of a forward plan by name, aligned, outputs allocated; and the problem with the strides they have."""
    x: dict[str, Any] = {"q": aligned(a.q), "k": aligned(a.k), "v": aligned(a.v)}
    if problem.k.positions and not problem.k.varlen and problem.k.pages is None:
        x |= {name: in_step(x[name], layout) for name in ("k", "v")}
    shape, rows = (*a.q.shape[:-1], problem.dim_v), layout.rows_shape(tuple(a.q.shape))
    x["o"] = torch.empty(shape, dtype=problem.out_dtype, device=a.q.device) if a.out is None else aligned(a.out)
    if a.state_lse is not None:
        x["lse"] = a.state_lse
    elif problem.lse:
        x["lse"] = torch.empty(rows, dtype=torch.float32, device=a.q.device)
    x |= read_by_kernels(a)
    problem = with_strides(problem, layout, x)
    if a.state_out is not None:
        assert problem.state is not None
        x["state"] = aligned(a.state_out)
        problem = replace(problem, state=replace(problem.state, out=inside_strides(x["state"], layout)))
    return x, problem


# ---- backward --------------------------------------------------------------------------------------------------------


def prepare_backward(
    problem: Problem,
    layout: Layout,
    a: Arguments,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: Any,
    sms: int,
) -> tuple[dict[str, Any], Problem, dict[str, Strides]]:
    """The tensors of a backward plan by name, gradients allocated; the problem with the strides that they have, and the
    strides of those that it does not know. Groups of heads are divided into parts for `sms` multiprocessors."""
    x: dict[str, Any] = {
        name: aligned(t.detach().to(problem.dtype))  # a merged `out` is fp32
        for name, t in (("q", a.q), ("k", a.k), ("v", a.v), ("o", out))
    }
    if problem.k.positions and not problem.k.varlen:
        x |= {name: in_step(x[name], layout) for name in ("k", "v")}
    d_o = dout.to(problem.dtype)
    x["d_o"] = aligned(d_o if d_o.stride(-1) == 1 else d_o.contiguous())
    x["lse"] = _contiguous(lse)  # the LSE of some rows of a shard has gaps
    if dlse is not None:
        x["dlse"] = _contiguous(dlse)
    wanted, device = problem.gradients, a.q.device
    if Wanted.of(problem).dq:
        x["dq"] = torch.empty(a.q.shape, dtype=problem.out_dtype, device=device)
    problem = replace(problem, group_parts=group_parts(problem, sms))
    if "k" in wanted or "v" in wanted:  # one kernel computes both
        for name, t in (("dk", a.k), ("dv", a.v)):
            shape, dtype = room_for_parts(t, layout, problem)
            x[name] = torch.empty(shape, dtype=dtype, device=device)
    if "sinks" in wanted:
        x["dsink"] = torch.empty_like(x["lse"])
    x |= read_by_kernels(a)
    named = ("o", "d_o", "dq", "dk", "dv")
    strides: dict[str, Any] = {n: inside_strides(x[n], layout) for n in named if n in x}
    problem, more = _add_summed(problem, a, x)
    return x, with_strides(problem, layout, x), strides | more


def room_for_parts(t: torch.Tensor, layout: Layout, problem: Problem) -> tuple[torch.Size, torch.dtype]:
    """The shape and dtype of dK or dV, which is like `t`: one for each part of a group of query heads."""
    shape, parts = t.shape, problem.group_parts
    if parts == 1:
        return shape, problem.out_dtype
    heads = layout.value.index("h")
    return torch.Size((*shape[:heads], shape[heads] * parts, *shape[heads + 1 :])), torch.float32


def sum_of_parts(t: torch.Tensor | None, layout: Layout, problem: Problem) -> torch.Tensor | None:
    """Adds up dK or dV of the parts, if there are several."""
    heads = layout.value.find("h")
    if t is None or heads < 0 or t.shape[heads] == problem.heads_k:
        return t
    return t.unflatten(heads, (problem.heads_k, -1)).sum(heads + 1).to(problem.out_dtype)


def gradients_of(problem: Problem, layout: Layout, x: Mapping[str, Any], a: Arguments) -> Gradients:
    """The gradients that the problem names, in the caller's layout and dtypes."""
    q, k, v = (x.get(f"d{n}") if n in problem.gradients else None for n in ("q", "k", "v"))
    sinks = sum_of_rows(x["dsink"], layout, a) if "sinks" in problem.gradients else None
    bias, score = _summed(problem, a, x)
    return Gradients(q, sum_of_parts(k, layout, problem), sum_of_parts(v, layout, problem), bias, sinks, score)


def sum_of_rows(dsink: torch.Tensor, layout: Layout, a: Arguments) -> torch.Tensor:
    return layout.rows_inside(dsink).sum((0, 2)).to(a.sinks.dtype)


# ---- gradients of a bias and of what a score captures: kernels write them entry by entry, or add to them by atomics -------


def _add_summed(problem: Problem, a: Arguments, x: dict[str, Any]) -> tuple[Problem, dict[str, tuple[int, ...]]]:
    """Adds those gradients to the tensors `x` of a backward plan. Returns the problem with the strides that captured tensors
    have there, and the strides of the other gradients."""
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


def _summed(problem: Problem, a: Arguments, x: Mapping[str, Any]) -> tuple[_Maybe, tuple[_Maybe, ...] | None]:
    """The gradients of the bias and of all captured tensors, in their dtypes."""
    bias = x["dbias"].to(a.bias.dtype) if "bias" in problem.gradients else None
    if not problem.learnt:
        return bias, None
    factor = Scores.of(problem).printed.factor_of_gradients(problem.scale)
    score: list[_Maybe] = [None] * problem.captured
    for i in problem.learnt:
        total = x[f"dscore{i}"]
        score[i] = (total if factor == 1 else total * factor).to(a.score_tensors[i].dtype)
    return bias, tuple(score)
