"""Where PyTorch traces (`torch.compile`, `torch.export`, fake tensors) attention is one operation of the graph,
`torch.ops.strobe.attention`, and so is its backward.

A tracer has no business in plans, caches and launches: it sees the operation's shapes, and what runs is the library as
it is called without a compiler. Operations take no objects, hence interval masks travel by name. What an operation
cannot express (`out=`, and a seed drawn for dropout) breaks the graph of a compiled function and then runs as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from strobe import autograd
from strobe.backends import dispatch
from strobe.mask import Mask, full, named
from strobe.problem import Unsupported, check, from_bhsd, lse_dtype, to_bhsd

_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? sinks, Tensor? cu_q, Tensor? cu_k, SymInt? max_q, "
    "SymInt? max_k, str interval, float? scale, float? softcap, float dropout, int seed, str layout, bool deterministic, "
    "str? backend"
)
_Maybe = torch.Tensor | None
_TENSORS = ("q", "k", "v", "bias", "sinks")  # that can have gradients, in the order of `Gradients`
_NAMES = [argument.split()[-1] for argument in _CALL.split(", ")]
_library = torch.library.Library("strobe", "DEF")
_tags = tuple(
    getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "needs_exact_strides") if hasattr(torch.Tag, name)
)
_library.define(f"attention({_CALL}, bool with_lse) -> (Tensor, Tensor)", tags=_tags)
_library.define(
    f"attention_backward(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, bool[] needs, {_CALL}) -> Tensor[]",
    tags=_tags,
)


def is_traced(t: Any) -> bool:
    """Whether it stands for a tensor, outside of a compiled function."""
    return isinstance(t, (FakeTensor, FunctionalTensor))


def attention(cu: tuple[Any, ...] | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """`strobe.attention`, or `attention_varlen` if `cu` = (cu_q, cu_k, max_q, max_k), for a tracer."""
    mask, dropout, seed = options["mask"], options["dropout"], options["seed"]
    is_tensor = isinstance(mask, torch.Tensor)
    if (
        options["out"] is not None
        or (dropout and seed is None)
        or not (mask is None or is_tensor or isinstance(mask, Mask))
    ):
        if not torch.compiler.is_dynamo_compiling():
            raise Unsupported(
                "only a mask of ours or a boolean tensor, no `out`, and dropout with a `seed` can be traced"
            )
        return _uncompiled(cu, q, k, v, options)
    bias, sinks, return_lse = options["bias"], options["sinks"], options["return_lse"]
    cu_q, cu_k, max_q, max_k = cu or (None, None, None, None)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, bias, sinks))
    out, lse = torch.ops.strobe.attention(
        q,
        k,
        v,
        mask if is_tensor else None,
        bias,
        sinks,
        cu_q,
        cu_k,
        max_q,
        max_k,
        full.name if mask is None or is_tensor else mask.name,
        options["scale"],
        options["softcap"],
        dropout,
        seed or 0,
        options.get("layout", "bshd"),
        options["deterministic"],
        options["backend"],
        return_lse or needs_grad,
    )
    return (out, lse) if return_lse else out


@getattr(torch, "_disable_dynamo", torch.compiler.disable)  # the former does not import the compiler until it is needed
def _uncompiled(
    cu: tuple[Any, ...] | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> Any:
    from strobe import api

    if cu is None:
        return api.attention(q, k, v, **options)
    return api.attention_varlen(q, k, v, cu[0], cu[1], max_q=cu[2], max_k=cu[3], **options)


def _options(call: dict[str, Any]) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
    """The arguments of an operation as the functions of the library take them: (cu, keywords)."""
    cu = None if call["cu_q"] is None else (call["cu_q"], call["cu_k"], call["max_q"], call["max_k"])
    mask = named(call["interval"]) if call["mask"] is None else call["mask"]
    passed = ("bias", "sinks", "scale", "softcap", "dropout", "deterministic", *(() if cu else ("layout",)))
    seed = call["seed"] if call["dropout"] else None
    return cu, {"mask": mask, "seed": seed} | {name: call[name] for name in passed}


# ---- forward
# ---------------------------------------------------------------------------------------------------------------


def _forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *values, with_lse = arguments
    call = dict(zip(_NAMES, values, strict=True))
    cu, options = _options(call)
    options |= {"return_lse": with_lse, "backend": call["backend"], "out": None}
    with torch.no_grad():
        found = _uncompiled(cu, call["q"], call["k"], call["v"], options)
    out, lse = found if with_lse else (found, call["q"].new_empty(0, dtype=lse_dtype(call["q"].dtype)))
    return out.contiguous(), lse.contiguous()  # what `_fake_forward` promises


def _fake_forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *values, with_lse = arguments
    call = dict(zip(_NAMES, values, strict=True))
    q = call["q"]
    lead = q.shape[:-1]
    if call["cu_q"] is not None:
        rows = [lead[1], lead[0]]
    else:
        rows = [*lead[:-2], lead[-1], lead[-2]] if len(lead) > 1 and call["layout"] == "bshd" else lead
    return q.new_empty((*lead, call["v"].shape[-1])), q.new_empty(rows if with_lse else (0,), dtype=lse_dtype(q.dtype))


# ---- backward
# --------------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    call = dict(zip(_NAMES, inputs[:-1], strict=True))
    tensors = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}
    ctx.save_for_backward(*output, *tensors.values())
    ctx.names = list(tensors)
    ctx.call = {name: value for name, value in call.items() if name not in tensors}
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: _Maybe, dlse: _Maybe) -> tuple[_Maybe, ...]:
    out, lse, *tensors = ctx.saved_tensors
    call = ctx.call | dict(zip(ctx.names, tensors, strict=True))
    needs = [ctx.needs_input_grad[_NAMES.index(name)] for name in _TENSORS]
    found = iter(torch.ops.strobe.attention_backward(dout, dlse, out, lse, needs, *(call[name] for name in _NAMES)))
    gradients = {name: next(found) for name, needed in zip(_TENSORS, needs, strict=True) if needed}
    return *(gradients.get(name) for name in _NAMES), None


def _backward(
    dout: _Maybe, dlse: _Maybe, out: torch.Tensor, lse: torch.Tensor, needs: Sequence[bool], *values: Any
) -> list[torch.Tensor]:
    call = dict(zip(_NAMES, values, strict=True))
    cu, options = _options(call)
    layout = call["layout"]
    q, k, v = call["q"], call["k"], call["v"]
    with torch.no_grad():
        problem, inputs = check(q, k, v, cu=cu, **options, return_lse=True)
        problem = replace(problem, needs_grad=True)
        wanted = [call[name] for name, needed in zip(_TENSORS, needs, strict=True) if needed]
        if problem.empty:
            return [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in wanted]

        def inside(t: torch.Tensor) -> torch.Tensor:
            return to_bhsd(t, layout) if cu is None else t.transpose(0, 1).unsqueeze(0)

        def outside(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
            return from_bhsd(t, like, layout) if cu is None else t[0].transpose(0, 1)

        tensors = [inputs.q, inputs.k, inputs.v, inputs.bias, inputs.sinks]
        found = autograd.gradients(
            dispatch.choose(problem, call["backend"]),
            problem,
            inputs,
            tuple(needs),
            inside(out),
            lse.view(inputs.q.shape[:3]),
            inside(torch.zeros_like(out) if dout is None else dout),
            None if dlse is None else dlse.reshape(inputs.q.shape[:3]),
            tensors,
        )
        moved = [outside(g, t) for g, t in zip(found[:3], (q, k, v), strict=True) if g is not None]
        moved += [g.reshape(call[name].shape) for g, name in zip(found[3:], _TENSORS[3:], strict=True) if g is not None]
        return [g.to(t.dtype).contiguous() for g, t in zip(moved, wanted, strict=True)]


def _fake_backward(
    dout: _Maybe, dlse: _Maybe, out: torch.Tensor, lse: torch.Tensor, needs: Sequence[bool], *values: Any
) -> list[torch.Tensor]:
    call = dict(zip(_NAMES, values, strict=True))
    return [call[name].new_empty(call[name].shape) for name, needed in zip(_TENSORS, needs, strict=True) if needed]


for _name, _run, _fake in (("attention", _forward, _fake_forward), ("attention_backward", _backward, _fake_backward)):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"strobe::{_name}", _fake, lib=_library)
torch.library.register_autograd("strobe::attention", _differentiate, setup_context=_save, lib=_library)
