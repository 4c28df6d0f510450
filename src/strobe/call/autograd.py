"""Attention as a differentiable operation of PyTorch, whatever backend computes it.

First derivatives come from a backend's backward pass. For second derivatives the backward is an operation in its own
right: it is written down once more in ordinary differentiable formulas (`second_derivatives`), and PyTorch differentiates
those. Each operation has a rule for `vmap`, so that `torch.func` works: a call for each example, or one for all of them
where they can be put into one batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from strobe.call.bound_call import BoundCall, bind
from strobe.call.second_derivatives import second_derivatives
from strobe.problem import Unsupported
from strobe.problem.arguments import (
    GRADIENTS,
    Arguments,
    Layout,
    gradient_names,
    in_tensor_order,
    tensors_of,
    with_tensors,
    without_tensors,
)

_Maybe = torch.Tensor | None
_transforming = torch._C._are_functorch_transforms_active
_autocasting = torch._C._is_any_autocast_enabled
_GRADIENTS = len(GRADIENTS)  # the first tensors of each operation; those of a score are the last
_NO_FORWARD_MODE = "strobe.attention has no forward-mode derivative; reverse mode (torch.func.grad, vjp, jacrev) works"


def attention(bound: BoundCall, a: Arguments) -> Any:
    """(out, lse), differentiable in q, k, v, bias, sinks and what a score captures, through both; `out` alone if no LSE is
    to be returned."""
    return _apply(bound, a, *tensors_of(a))


def attention_in_transforms(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) and their transformations by `torch.func`, for a call that is not bound yet."""
    return _InTransforms.apply(bind(a, needs_grad=True), a, *tensors_of(a))


def cast_for_autocast(a: Arguments) -> Arguments:
    """The arguments themselves where autocast is off; else with q, k and v as autocast hands them to PyTorch's own
    attention: 64-bit tensors and tensors on other devices stay as they are."""
    if not isinstance(a.q, torch.Tensor) or not torch.is_autocast_enabled(a.q.device.type):
        return a
    dtype = torch.get_autocast_dtype(a.q.device.type)

    def cast(t: Any) -> Any:
        eligible = isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype != torch.float64
        return t.to(dtype) if eligible and t.device.type == a.q.device.type else t

    return a._replace(q=cast(a.q), k=cast(a.k), v=cast(a.v))


@contextlib.contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Autocast applies to the arguments of attention, not to the operations of which a backend is made."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield


class _Attention(torch.autograd.Function):
    """Outside of `torch.func`: `forward` with a context costs less than `forward` and `setup_context`."""

    @staticmethod
    def forward(ctx: Any, bound: BoundCall, a: Arguments, *tensors: _Maybe) -> Any:
        out, lse = bound.forward.run(a)
        _keep(ctx, bound, a, tensors, (out, lse))
        return (out, lse) if a.return_lse else out  # PyTorch takes time for each result, even for None

    @staticmethod
    def backward(ctx: Any, dout: _Maybe, dlse: _Maybe = None) -> Any:  # type: ignore[override]
        needs = ctx.needs_input_grad
        if dout is None and dlse is None:
            return (None,) * len(needs)
        out, lse, *tensors = ctx.saved_tensors
        bound, seed, blocks = ctx.call
        wanted = gradient_names(needs[2:])
        if torch.is_grad_enabled() or _transforming():  # perhaps somebody asks for second derivatives
            results = _Backward.apply(bound, seed, wanted, out.detach(), lse.detach(), dout, dlse, *tensors)
            gradients = in_tensor_order(results[:_GRADIENTS], results[_GRADIENTS:])
        else:
            a = bound.arguments(seed, tensors, blocks)
            if _autocasting():
                with without_autocast(out.device):
                    gradients = bound.backward(wanted, a, out, lse, dout, dlse).in_tensor_order()
            else:
                gradients = bound.backward(wanted, a, out, lse, dout, dlse).in_tensor_order()
        return _fitted((None, None, *gradients), len(needs))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise Unsupported(_NO_FORWARD_MODE)


class _InTransforms(_Attention):
    """Inside of `torch.func`, which asks for `setup_context`."""

    @staticmethod
    def forward(bound: BoundCall, a: Arguments, *tensors: _Maybe) -> Any:  # type: ignore[override]
        same = a.q is tensors[0]  # a transformation hands over others
        return bound.forward.run(a if same else _with_others(a, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        bound, a, *tensors = inputs
        _keep(ctx, bound, a, tensors, output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], bound: BoundCall, a: Arguments, *tensors: _Maybe) -> Any:
        dims = in_dims[2:]
        counted = a.dropout or "b" in bound.problem.score.expr.variables()  # sequences are, and would be once more
        if bound.layout in (Layout.BSHD, Layout.BHSD) and not counted and len(tensors) == 3:
            q, k, v = (_batched(t, d, info.batch_size) for t, d in zip(tensors, dims, strict=True))
            results = _attend(a, (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)))
            return tuple(t.view(*q.shape[:2], *t.shape[1:]) for t in results), (0, 0)
        return _one_by_one(lambda *one: _attend(a, one), info, dims, tensors)


def _keep(ctx: Any, bound: BoundCall, a: Arguments, tensors: Sequence[_Maybe], output: tuple[Any, Any]) -> None:
    ctx.save_for_backward(*output, *tensors)  # so that PyTorch notices what is changed in place
    ctx.call = bound, a.seed, a.blocks
    ctx.set_materialize_grads(False)


def _fitted(gradients: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Exactly `count` gradients: padded with None for inputs that have none, or cut off."""
    return (gradients + (None,) * count)[:count]


def _with_others(a: Arguments, tensors: Sequence[_Maybe]) -> Arguments:
    return with_tensors(without_tensors(a), a.seed, tensors)


def _attend(a: Arguments, tensors: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to tensors of other shapes than those that the call was bound for."""
    return attention_in_transforms(_with_others(a, tensors))


# PyTorch's own `apply` of each pass first looks for a transformation, and for a `backward`. Here no transformation is
# active and there is a `backward`, so both are skipped.
_apply: Any = super(torch.autograd.Function, _Attention).apply  # type: ignore[misc]
if hasattr(_Attention, "_backward_cls"):
    _Attention._backward_cls.apply = _Attention.backward  # type: ignore[attr-defined]


def _batched(t: _Maybe, dim: int | None, size: int) -> torch.Tensor:
    """The tensor with the examples along the first axis."""
    assert t is not None
    return t.unsqueeze(0).expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def _one_by_one(function: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
    """A function of tensors, for each example in turn. Results are stacked."""
    results = [
        function(*(t if d is None else t.select(d, i) for t, d in zip(args, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    stacked = tuple(None if one[0] is None else torch.stack(one) for one in zip(*results, strict=True))
    return stacked, tuple(None if t is None else 0 for t in stacked)


class _Backward(torch.autograd.Function):
    """The gradients of q, k, v, bias, sinks and captured tensors as a function of (dout, dlse) and these. The results of
    the forward are passed as constants: second derivatives go through the recomputation."""

    @staticmethod
    def forward(
        bound: BoundCall,
        seed: int | None,
        wanted: tuple[str, ...],
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: _Maybe,
        dlse: _Maybe,
        *tensors: _Maybe,
    ) -> Any:
        with without_autocast(out.device):
            a = bound.arguments(seed, tensors)
            gradients = bound.backward(wanted, a, out, lse, dout, dlse)
            return *gradients[:_GRADIENTS], *(gradients.score or (None,) * bound.problem.captured)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        bound, seed, _, out, _, dout, dlse, *tensors = inputs
        dout = torch.zeros_like(out) if dout is None else dout
        ctx.save_for_backward(dout, dlse, *tensors)
        ctx.call = bound, seed
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: _Maybe) -> Any:
        """`cotangents` belong to the gradients of q, k, v, bias, sinks and captured tensors."""
        needs = ctx.needs_input_grad  # not of a `dout` that was None, and has become zeros
        dout, dlse, *second = _Second.apply(*ctx.call, *cotangents, *ctx.saved_tensors)
        of_tensors = in_tensor_order(second[:_GRADIENTS], second[_GRADIENTS:])
        gradients = _fitted((*(None,) * 5, dout, dlse, *of_tensors), len(needs))
        return tuple(g if need else None for g, need in zip(gradients, needs, strict=True))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise Unsupported(_NO_FORWARD_MODE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], bound: BoundCall, seed: Any, wanted: Any, *tensors: _Maybe) -> Any:
        apply = _Backward.apply
        return _one_by_one(lambda *one: apply(bound, seed, wanted, *one), info, in_dims[3:], tensors)


class _Second(torch.autograd.Function):
    """The gradients of <cotangents, gradients of attention> for (dout, dlse, q, k, v, bias, sinks) and captured tensors.
    Refuses to be differentiated any further."""

    @staticmethod
    def forward(bound: BoundCall, seed: int | None, *tensors: _Maybe) -> Any:
        count = _GRADIENTS + bound.problem.captured
        cotangents, (dout, dlse, *rest) = tensors[:count], tensors[count:]
        a = bound.arguments(seed, rest)
        with without_autocast(a.q.device):
            return second_derivatives(bound.problem, bound.layout, a, cotangents, dout, dlse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: _Maybe) -> Any:
        raise Unsupported("strobe.attention has first and second derivatives, but no third")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], bound: BoundCall, seed: Any, *tensors: _Maybe) -> Any:
        return _one_by_one(lambda *one: _Second.apply(bound, seed, *one), info, in_dims[2:], tensors)


def second(
    bound: BoundCall, a: Arguments, cotangents: Sequence[_Maybe], dout: torch.Tensor, dlse: _Maybe
) -> tuple[_Maybe, ...]:
    """The gradients of <cotangents, gradients of attention> for (dout, dlse, q, k, v, bias, sinks) and captured
    tensors. There is a cotangent for each of those gradients."""
    return _Second.apply(bound, a.seed, *cotangents, dout, dlse, *tensors_of(a))
