"""A traced call (`torch.compile`, `torch.export`, `torch.jit.trace`, fake tensors, dispatch modes) is one operation of
the graph, `torch.ops.strobe.attention`, and so is its backward.

A tracer has no business in plans, caches and launches: it sees the operation's shapes, and what runs is the library as it
is called without a compiler. Operations take no objects: masks and scores travel as the text of their expressions, and
the numbers in them beside it, because window sizes and caps may be symbols of the tracer: a graph serves every window,
while PyTorch makes one for each value of a float. What an operation cannot express (`out=`, and a seed drawn for
dropout) breaks the graph of a compiled function and then runs as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from strobe.call import autograd, piece
from strobe.call.bound_call import bind
from strobe.problem import Unsupported, any_requires_grad
from strobe.problem.arguments import (
    GRADIENTS,
    ROWS,
    TENSORS,
    Arguments,
    gradient_names,
    in_tensor_order,
    layout_of_keys,
)
from strobe.problem.checks import check_qkv, check_shapes, lse_dtype, out_dtype
from strobe.problem.hints import refuse_three_axes
from strobe.problem.page_checks import NO_GRADIENTS
from strobe.problem.resolve import completed
from strobe.variants.mask import Mask, full, parse_mask
from strobe.variants.score import Score, identity, parse_score

_Maybe = torch.Tensor | None
# Name -> type in the schema of the operations: the rows of the table that can be traced. A mask that is no tensor travels
# as the text of its interval, a score as its text and its tensors; the numbers of both texts are lists.
_FIELDS: dict[str, str] = {n: row.schema for n in (*TENSORS, *ROWS) if (row := ROWS[n]).schema is not None}
_FIELDS |= {"score_tensors": "Tensor[]", "interval": "str", "interval_numbers": "SymInt[]", "score_numbers": "float[]"}
_NAMES = tuple(_FIELDS)
_SCORE_TENSORS = _NAMES.index("score_tensors")
_CALL = ", ".join(f"{kind} {name}" for name, kind in _FIELDS.items())
_library = torch.library.Library("strobe", "DEF")
_tags = tuple(getattr(torch.Tag, n) for n in ("pt2_compliant_tag", "needs_exact_strides") if hasattr(torch.Tag, n))
_library.define(f"attention({_CALL}, bool with_lse) -> (Tensor, Tensor)", tags=_tags)
_library.define(
    f"attention_backward(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, bool[] needs, {_CALL}) -> Tensor[]",
    tags=_tags,
)


def is_traced(t: Any) -> bool:
    """Return whether it stands for a tensor, outside of a compiled function."""
    return isinstance(t, (FakeTensor, FunctionalTensor))


def is_tracing(t: Any) -> bool:
    """Return whether a call with this tensor is traced, so that no contents may be read. `attend` asks the same,
    spelled out where a call would cost time."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._is_tracing() or is_traced(t))


def is_expressible(a: Arguments) -> bool:
    """Return whether the operation has all that the call asks for."""
    return not (
        a.out is not None
        or a.partial
        or (a.dropout and a.seed is None)
        or not (a.mask is None or isinstance(a.mask, (Mask, torch.Tensor)))
        or not (a.score is None or isinstance(a.score, Score))
    )


def attention(a: Arguments) -> Any:
    """`strobe.attention`, or `attention_varlen` if there is a `cu_q`, for a tracer."""
    if not is_expressible(a):
        raise Unsupported(
            "only masks and scores of ours, no `out`, dropout with a `seed` and no partial output in fp32 can be traced"
        )
    refuse_three_axes(a)
    a = autograd.cast_for_autocast(a)
    is_tensor = isinstance(a.mask, torch.Tensor)
    interval = full if a.mask is None or is_tensor else a.mask
    score = identity if a.score is None else a.score
    interval_text, interval_numbers = interval.text_and_numbers()
    score_text, score_numbers = score.text_and_numbers()
    needs_grad = torch.is_grad_enabled() and any_requires_grad(a)
    if a.paged and needs_grad:
        raise Unsupported(NO_GRADIENTS)
    seed = 0 if a.seed is None else a.seed
    if not -(1 << 63) <= seed < 1 << 63:
        seed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)  # 64 bits, as an operation takes them
    values = dict(zip(Arguments._fields, a, strict=True)) | {
        "mask": a.mask if is_tensor else None,
        "interval": interval_text,
        "interval_numbers": interval_numbers,
        "score": score_text,
        "score_numbers": score_numbers,
        "score_tensors": list(score.tensors),
        "seed": seed,
    }
    out, lse = torch.ops.strobe.attention(*[values[name] for name in _NAMES], a.return_lse or needs_grad)
    return (out, lse) if a.return_lse else out


def _arguments(values: Sequence[Any], with_lse: bool = True, fake: bool = False) -> Arguments:
    """The arguments of an operation as the library's. `fake`: their numbers may be symbols, and are not looked at."""
    x = dict(zip(_NAMES, values, strict=True))
    of_mask, of_score = (
        tuple(one for _ in x[name]) if fake else tuple(x[name])
        for name, one in (("interval_numbers", 1), ("score_numbers", 1.0))
    )
    mask = parse_mask(x["interval"], of_mask) if x["mask"] is None else x["mask"]
    score = parse_score(x["score"], of_score).with_tensors(x["score_tensors"])
    of_call = {name: x[name] for name in _NAMES if name in ROWS}
    of_call |= {"mask": mask, "score": None if score == identity else score}
    of_call |= {"seed": x["seed"] if x["dropout"] else None, "return_lse": with_lse}
    return Arguments(**of_call)


# ---- forward ---------------------------------------------------------------------------------------------------------


@getattr(torch, "_disable_dynamo", torch.compiler.disable)  # `_disable_dynamo` loads the compiler when it is needed
def _uncompiled(a: Arguments) -> piece.Result:
    return piece.forward(a)


def _forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *values, with_lse = arguments
    out, lse, _ = _uncompiled(_arguments(values, with_lse))
    if lse is None or not with_lse:
        lse = out.new_empty(0, dtype=lse_dtype(out.dtype))
    return out.contiguous(), lse.contiguous()  # as `_fake_forward` promises


def _fake_forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *values, with_lse = arguments
    a = _arguments(values, with_lse, fake=True)
    layout = check_qkv(a)
    of_keys = layout_of_keys(a, layout)
    check_shapes(layout.inside(a.q).shape, of_keys.inside(a.k).shape, of_keys.inside(a.v).shape, a.paged)
    shape = layout.rows_shape(tuple(a.q.shape)) if with_lse else (0,)
    out = a.q.new_empty((*a.q.shape[:-1], a.v.shape[-1]), dtype=out_dtype(a.q.dtype))
    return out, a.q.new_empty(shape, dtype=lse_dtype(a.q.dtype))


# ---- backward --------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _save_call(ctx, inputs[:-1], output)


def _save_call(ctx: Any, values: Sequence[Any], more: Sequence[_Maybe]) -> None:
    """Every tensor of the run, also those in the list, and `more`, are PyTorch's to save."""
    flat = [t for name, v in zip(_NAMES, values, strict=True) for t in (v if name == "score_tensors" else [v])]
    ctx.save_for_backward(*more, *(t for t in flat if isinstance(t, torch.Tensor)))
    ctx.more = len(more)
    ctx.values = [
        None if isinstance(v, torch.Tensor) else len(v) if name == "score_tensors" else v
        for name, v in zip(_NAMES, values, strict=True)
    ]
    ctx.is_tensor = [isinstance(v, torch.Tensor) for v in values]
    ctx.set_materialize_grads(False)


def _restore_call(ctx: Any) -> tuple[list[Any], list[Any]]:
    saved = list(ctx.saved_tensors)
    more, rest = saved[: ctx.more], iter(saved[ctx.more :])
    values = []
    for name, value, is_tensor in zip(_NAMES, ctx.values, ctx.is_tensor, strict=True):
        if name == "score_tensors":
            value = [next(rest) for _ in range(value)]
        values.append(next(rest) if is_tensor else value)
    return more, values


def _none_but(gradients: dict[str, Any], values: Sequence[Any]) -> tuple[Any, ...]:
    """The gradients of the call's values. Those of a list of tensors are a list of the same length; PyTorch takes an
    empty list of numbers for one of tensors."""
    return tuple(
        [gradients.get(f"score{i}") for i in range(len(value))]
        if name == "score_tensors" or (isinstance(value, list) and not value)
        else gradients.get(name)
        for name, value in zip(_NAMES, values, strict=True)
    )


def _differentiate(ctx: Any, dout: _Maybe, dlse: _Maybe) -> tuple[Any, ...]:
    (out, lse), values = _restore_call(ctx)
    of_score = ctx.needs_input_grad[_SCORE_TENSORS]
    needs = [bool(need) for need in in_tensor_order(ctx.needs_input_grad[: len(GRADIENTS)], of_score or ())]
    gradients = torch.ops.strobe.attention_backward(dout, dlse, out, lse, needs, *values)
    return *_none_but(dict(zip(gradient_names(tuple(needs)), gradients, strict=True)), values), None


def _wanted(needs: Sequence[bool], values: Sequence[Any]) -> list[torch.Tensor]:
    return [t for t, needed in zip(values, needs, strict=False) if needed]


def _tensors(values: Sequence[Any]) -> tuple[Any, ...]:
    """The tensors in the order of `tensors_of`."""
    return *values[: len(TENSORS)], *values[_SCORE_TENSORS]


def _backward(
    dout: _Maybe, dlse: _Maybe, out: torch.Tensor, lse: torch.Tensor, needs: Sequence[bool], *values: Any
) -> list[torch.Tensor]:
    a = _arguments(values)
    if lse.dim() == 1 and lse.numel() == 0 and out.numel():  # traced where no gradient was expected
        out, lse, _ = _uncompiled(a)
    gradients = piece.backward(a, out, lse, dout, dlse, gradient_names(tuple(needs)))
    wanted = _wanted(needs, gradients.in_tensor_order())  # a backend may compute more
    like = _wanted(needs, _tensors(values))
    return [g.to(t.dtype).contiguous() for g, t in zip(wanted, like, strict=True)]


def _fake_backward(
    dout: _Maybe, dlse: _Maybe, out: torch.Tensor, lse: torch.Tensor, needs: Sequence[bool], *values: Any
) -> list[torch.Tensor]:
    return [t.new_empty(t.shape) for t in _wanted(needs, _tensors(values))]


# ---- the backward of the backward ------------------------------------------------------------------------------------


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    dout, dlse, out, _, needs, *values = inputs
    _save_call(ctx, values, (dout, dlse, out))
    ctx.needs = tuple(needs)


def _differentiate_backward(ctx: Any, cotangents: Sequence[_Maybe]) -> tuple[Any, ...]:
    """The gradients of (dout, dlse), q, k, v, bias, sinks and captured tensors. Not an operation: no tracer follows a
    backward's backward. The results of the forward count as constants: second derivatives go through the
    recomputation."""
    (dout, dlse, out), values = _restore_call(ctx)
    if is_traced(out):
        raise Unsupported("second derivatives of strobe.attention cannot be traced")
    a = _arguments(values)
    bound = bind(completed(a), needs_grad=True)
    by_name = dict(zip(gradient_names(ctx.needs), cotangents, strict=False))
    names = (*GRADIENTS, *(f"score{i}" for i in range(len(a.score_tensors))))
    directions = [by_name.get(name) for name in names]
    dout_or_zeros = torch.zeros_like(out) if dout is None else dout
    of_dout, of_dlse, *gradients = autograd.second(bound, a, directions, dout_or_zeros, dlse)
    of_call = _none_but(dict(zip(names, gradients, strict=True)), values)
    return None if dout is None else of_dout, of_dlse, None, None, None, *of_call


for _name, _run, _fake in (
    ("attention", _forward, _fake_forward),
    ("attention_backward", _backward, _fake_backward),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"strobe::{_name}", _fake, lib=_library)
torch.library.register_autograd("strobe::attention", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd(
    "strobe::attention_backward", _differentiate_backward, setup_context=_save_backward, lib=_library
)
