"""Context parallel attention as PyTorch sees it: differentiable and, where it traces, one operation of the graph,
`torch.ops.strobe.context_parallel`, with its backward.

A tracer sees shapes; what runs is the method, as in an eager call. Operations take no objects, so plans and masks travel
as text, process groups as names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from strobe.call.attend import attend
from strobe.call.autograd import without_autocast
from strobe.call.traced import is_traced
from strobe.distributed.agreement import agree, short_text
from strobe.distributed.choose_method import check_name, chosen, make, rank_of, shape_of
from strobe.distributed.method import Method, Task
from strobe.distributed.shard_plan import ShardPlan, parse_plan
from strobe.distributed.step import Rest
from strobe.distributed.transport import Transport, resolve
from strobe.problem import Problem
from strobe.problem.arguments import Arguments
from strobe.problem.checks import lse_dtype
from strobe.variants.mask import parse_mask
from strobe.variants.score import identity, parse_score

_Maybe = torch.Tensor | None
# Name -> type in the schema of the operations.
_FIELDS = {
    "q": "Tensor", "k": "Tensor", "v": "Tensor", "sinks": "Tensor?", "score_tensors": "Tensor[]", "groups": "str[]",
    "plan": "str", "mask": "str", "score": "str", "scale": "float?", "dropout": "float", "seed": "int", "method": "str",
    "deterministic": "bool", "invariant": "bool", "backend": "str?", "check": "int", "keep": "bool",
}  # fmt: skip
_CALL = ", ".join(f"{kind} {name}" for name, kind in _FIELDS.items())
_library = torch.library.Library("strobe", "FRAGMENT")
_tags = tuple(getattr(torch.Tag, n) for n in ("pt2_compliant_tag", "needs_exact_strides") if hasattr(torch.Tag, n))
_library.define(f"context_parallel({_CALL}) -> (Tensor, Tensor, Tensor[])", tags=_tags)
_library.define(
    f"context_parallel_backward(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, Tensor[] kept, {_CALL}) -> Tensor[]",
    tags=_tags,
)
is_compiling = torch.compiler.is_dynamo_compiling
dispatch_modes = torch._C._len_torch_dispatch_stack
NAME = "strobe.distributed.attention"
CHECKS = {None: 0, True: 1, False: 2}  # of `check`
_CHECK = {number: check for check, number in CHECKS.items()}


class Call(NamedTuple):
    """The arguments of the operation, one field each."""

    q: Any  # tensors; None where they are saved apart
    k: Any
    v: Any
    sinks: _Maybe
    score_tensors: Sequence[torch.Tensor]
    groups: Sequence[str]
    plan: str
    mask: str
    score: str
    scale: float | None
    dropout: float
    seed: int
    method: str
    deterministic: bool
    invariant: bool
    backend: str | None
    check: int
    keep: bool

    def template(self) -> Arguments:
        score = parse_score(self.score).with_tensors(self.score_tensors)
        return Arguments(
            None, None, None, scale=self.scale, score=None if score == identity else score, dropout=self.dropout,
            seed=self.seed if self.dropout else None, sinks=self.sinks, deterministic=self.deterministic,
            backend=self.backend,
        )  # fmt: skip

    def whole_plan(self) -> ShardPlan:
        plan = parse_plan(self.plan)
        return plan.with_mask(parse_mask(self.mask)) if self.mask else plan

    def task(self, transports: Sequence[Transport]) -> Task:
        return Task(self.whole_plan(), rank_of(transports), self.template(), self.invariant)


def attention(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), differentiable in q, k, v and the sinks through both."""
    if is_compiling() or dispatch_modes() or is_traced(call.q):
        return torch.ops.strobe.context_parallel(*call)[:2]
    return _Attention.apply(*call)


def alone(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank holds everything: the core's own call, with all that it can do."""
    check_name(call.method)
    plan = call.whole_plan()
    a = call.template()._replace(q=call.q, k=call.k, v=call.v, mask=plan.mask, return_lse=True)
    if len(plan.lengths) > 1:
        cu, longest = torch.tensor(plan.starts, dtype=torch.int32, device=call.q.device), max(plan.lengths)
        a = a._replace(cu_q=cu, cu_k=cu, max_q=longest, max_k=longest)
    return attend(a)


def method_of(call: Call, transports: Sequence[Transport]) -> Method:
    task = call.task(transports)
    name = chosen(call.method, task, transports, shape_of(call.q, call.k, call.v), call.keep)
    return make(name, task, transports)


def _agreed_method(call: Call, transports: Sequence[Transport]) -> Method:
    """The method, once all ranks have checked their arguments and mean the same call."""
    method: Method | None = None
    error: Exception | None = None
    try:
        _check(call, transports)
        method = method_of(call, transports)
    except Exception as found:
        error = found
    agree(transports, _facts(call), error, call.q.device, _CHECK[call.check])
    assert method is not None
    return method


def tell(groups: Sequence[str], error: Exception, device: torch.device, check: bool | None) -> None:
    """Raises an error that this rank has found before there was a call, and tells the others, which would wait for it."""
    agree([resolve(name) for name in groups], {"function": NAME}, error, device, check)


def _facts(call: Call) -> dict[str, Any]:
    """Return the facts on which all ranks must agree; how many rows each has is the plan's business."""
    q, k, v = call.q, call.k, call.v
    shapes = {name: (*t.shape[:-3], "rows", *t.shape[-2:]) for name, t in (("q", q), ("k", k), ("v", v))}
    sinks = None if call.sinks is None else tuple(call.sinks.shape)
    elsewhere = ("q", "k", "v", "sinks", "groups", "plan", "score_tensors", "check")
    rest = {name: value for name, value in call._asdict().items() if name not in elsewhere}
    gradients = {"a gradient is needed": rest.pop("keep")}
    return {
        "function": NAME,
        **shapes,
        "dtype": q.dtype,
        "sinks": sinks,
        "plan": short_text(call.plan),
        **rest,
        **gradients,
    }


def _check(call: Call, transports: Sequence[Transport]) -> None:
    plan, rank = call.whole_plan(), rank_of(transports)
    ranks = 1
    for transport in transports:
        ranks *= transport.size
    if plan.ranks != ranks:
        raise ValueError(f"plan is for {plan.ranks} ranks, mesh has {ranks}")
    axes = 3 if len(plan.lengths) > 1 else 4
    for name, t in (("q", call.q), ("k", call.k), ("v", call.v)):
        if t.dim() != axes:
            raise ValueError(f"{name} has {t.dim()} axes, inside it must have {axes}")
        if t.shape[-3] != plan.rows(rank):
            raise ValueError(
                f"{name} has {t.shape[-3]} rows, but rank {rank} holds {plan.rows(rank)} of the {plan.total} positions "
                f"of the plan"
            )
    a = call.template()._replace(q=call.q, k=call.k, v=call.v)
    if axes == 3:  # tensors of a score may have an entry for each document
        cu, longest = plan.offsets(call.q.device), max(plan.lengths)
        a = a._replace(cu_q=cu, cu_k=cu, max_q=longest, max_k=longest)
    Problem.of(a, needs_grad=call.keep)


# ---- forward ---------------------------------------------------------------------------------------------------------


def _forward(*values: Any) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    call = Call(*values)
    with torch.no_grad(), without_autocast(call.q.device):
        transports = [resolve(name) for name in call.groups]
        method = _agreed_method(call, transports)
        out, lse, kept = method.forward(call.q, call.k, call.v, call.keep)
        return out, lse, list(kept)


def _fake_forward(*values: Any) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    call = Call(*values)
    q, v = call.q, call.v
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=lse_dtype(q.dtype))
    if not call.keep:
        return out, lse, []
    method = method_of(call, [resolve(name) for name in call.groups])
    return out, lse, [q.new_empty(shape, dtype=dtype) for shape, dtype in method.kept_shapes(q, call.k, v)]


# ---- backward --------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """A method that keeps tensors of its own does not need the inputs, only their shapes without rows."""
    call, (out, lse, kept) = Call(*inputs), output
    tensors = [call.q, call.k, call.v, out, lse]
    if kept:
        tensors = [t.new_empty((*t.shape[:-3], 0, *t.shape[-2:])) for t in tensors[:4]] + [lse.new_empty(0)]
    ctx.save_for_backward(*tensors, call.sinks, *kept, *call.score_tensors)
    ctx.kept = len(kept)
    ctx.call = call._replace(q=None, k=None, v=None, sinks=None, score_tensors=())
    ctx.set_materialize_grads(False)


def _restored(ctx: Any) -> tuple[Call, tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]]:
    q, k, v, out, lse, sinks, *more = ctx.saved_tensors
    call = ctx.call._replace(q=q, k=k, v=v, sinks=sinks, score_tensors=more[ctx.kept :])
    return call, (out, lse, more[: ctx.kept])


def _by_field(call: Call, gradients: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """The gradient of each argument: of q, k, v and, if there are, of the sinks."""
    dsinks = None if call.sinks is None else gradients[3]
    return *gradients[:3], dsinks, *(None,) * (len(_FIELDS) - 4)


def _differentiate(ctx: Any, dout: _Maybe, dlse: _Maybe, dkept: Any) -> tuple[Any, ...]:
    if dout is None and dlse is None:
        return (None,) * len(_FIELDS)
    call, results = _restored(ctx)
    results_of_call = torch.ops.strobe.context_parallel_backward(dout, dlse, *results, *call)
    gradients = list(_by_field(call, results_of_call))
    gradients[4] = [None] * len(call.score_tensors)  # an operation wants a list for a list
    return tuple(gradients)


def _backward(
    dout: _Maybe, dlse: _Maybe, out: torch.Tensor, lse: torch.Tensor, kept: Sequence[torch.Tensor], *values: Any
) -> list[torch.Tensor]:
    call = Call(*values)
    with torch.no_grad(), without_autocast(call.q.device):
        method = method_of(call, [resolve(name) for name in call.groups])
        if dout is None:
            assert dlse is not None
            dout = out.new_zeros((*dlse.shape[:-2], dlse.shape[-1], *out.shape[-2:]))
        rest = Rest(out, lse, dout.contiguous(), dlse)
        gradients = method.backward(call.q, call.k, call.v, rest, tuple(kept))
        like = (call.q, call.k, call.v, call.sinks)
        pairs = [(g, t) for g, t in zip(gradients, like, strict=True) if t is not None and g is not None]
        return [g.to(t.dtype).contiguous() for g, t in pairs]


def _fake_backward(dout: _Maybe, dlse: _Maybe, out: Any, lse: Any, kept: Any, *values: Any) -> list[torch.Tensor]:
    call = Call(*values)
    rows = dout.shape[-3] if dout is not None else dlse.shape[-1]  # type: ignore[union-attr]
    shards = [t.new_empty((*t.shape[:-3], rows, *t.shape[-2:])) for t in (call.q, call.k, call.v)]
    return shards if call.sinks is None else [*shards, torch.empty_like(call.sinks)]


class _Attention(torch.autograd.Function):
    """The operation as autograd sees it where nothing traces."""

    @staticmethod
    def forward(ctx: Any, *values: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, kept = _forward(*values)
        _save(ctx, values, (out, lse, kept))
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: _Maybe, dlse: _Maybe) -> tuple[Any, ...]:
        if dout is None and dlse is None:
            return (None,) * len(_FIELDS)
        call, results = _restored(ctx)
        return _by_field(call, _backward(dout, dlse, *results, *call))


# `_disable_dynamo` loads the compiler when it is needed.
_untraced = getattr(torch, "_disable_dynamo", torch.compiler.disable)
for _name, _run, _fake in (
    ("context_parallel", _untraced(_forward), _fake_forward),
    ("context_parallel_backward", _untraced(_backward), _fake_backward),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"strobe::{_name}", _fake, lib=_library)
torch.library.register_autograd("strobe::context_parallel", _differentiate, setup_context=_save, lib=_library)
