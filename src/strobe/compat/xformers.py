"""strobe under xformers: `memory_efficient_attention` and its parts with their signatures, axes and `attn_bias` classes.

The classes are recognised by name and attributes, so this module needs no xformers. `install()` puts the function into an
xformers that is there; `uninstall()` puts xformers' own back.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from strobe.call import piece
from strobe.call.attend import attend
from strobe.compat import flash_terms
from strobe.merging import merge
from strobe.problem import Unsupported
from strobe.problem.arguments import Arguments
from strobe.problem.hints import InvalidArgument, raises_as_hosts
from strobe.variants.expression import Expr, Q
from strobe.variants.mask import Mask, causal, causal_top_left, full
from strobe.variants.ready_made import window

# ---- the function ----------------------------------------------------------------------------------------------------


@raises_as_hosts
def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """softmax(scale * query key^T + attn_bias) value, as `xformers.ops.memory_efficient_attention` says it: tensors are
    (batch, length, heads, dim), (batch, length, dim), or (batch, length, groups, heads of a group, dim). Heads that were
    expanded are read once where no gradient is wanted. `attn_bias` is a tensor, which may have a gradient, or an object of
    xformers' classes. `p` drops weights. `op`, which names a kernel of xformers, and paged keys raise `strobe.Unsupported`."""
    p = flash_terms.number("p", p)
    if not 0 <= p <= 1:
        raise InvalidArgument(f"p must be from 0 to 1, got {p}")
    _refuse(op, output_dtype, query)
    a = _arguments(query, key, value, attn_bias, scale)._replace(dropout=0.0 if p == 1 else p)
    out = attend(a)
    if p == 1:  # nothing is left, whatever the scores are
        out = out.masked_fill(torch.ones((), dtype=torch.bool, device=out.device), 0)
    return _outside(out, query, value)


def memory_efficient_attention_forward(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`memory_efficient_attention` without gradients."""
    with torch.no_grad():
        return memory_efficient_attention(*args, **kwargs)


@raises_as_hosts
def memory_efficient_attention_partial(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, LSE) over some of the keys, for `merge_attentions`, both differentiable. The LSE is (batch, heads, length) or
    (batch, groups, heads of a group, length); with a block-diagonal `attn_bias` batch is 1."""
    _refuse(op, output_dtype, query)
    _refuse_dropout(p)
    out, lse = attend(_arguments(query, key, value, attn_bias, scale)._replace(return_lse=True))
    lse = lse[None] if lse.dim() == 2 else lse
    return _outside(out, query, value), lse.unflatten(1, query.shape[2:4]) if query.dim() == 5 else lse


def memory_efficient_attention_forward_requires_grad(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, LSE) without gradients, for `memory_efficient_attention_backward`."""
    with torch.no_grad():
        return memory_efficient_attention_partial(*args, **kwargs)


@raises_as_hosts
def memory_efficient_attention_backward(
    grad: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value. Output and LSE are those over all keys, of which `key` may be a part."""
    _refuse(op, None, query)
    _refuse_dropout(p)
    with torch.enable_grad():  # of what is done to them before they are attended to
        leaves = tuple(t.detach().requires_grad_() for t in (query, key, value))
        a = _arguments(leaves[0], leaves[1], leaves[2], attn_bias, scale)
    with torch.no_grad():
        inside = [t.reshape(*a.q.shape[:-1], t.shape[-1]) for t in (output, grad)]
        out, dout = (torch.nn.functional.pad(t, (0, a.v.shape[-1] - t.shape[-1])) for t in inside)
        bias = None if a.bias is None else a.bias.detach()
        detached = a._replace(q=a.q.detach(), k=a.k.detach(), v=a.v.detach(), bias=bias)
        rows = (*a.q.shape[:-3], a.q.shape[-2], a.q.shape[-3])
        found = piece.backward(detached, out, lse.reshape(rows), dout)
    dq, dk, dv = torch.autograd.grad((a.q, a.k, a.v), leaves, (found.q, found.k, found.v))
    return dq, dk, dv


@raises_as_hosts
def merge_attentions(
    attn_split: Sequence[torch.Tensor] | torch.Tensor,
    lse_split: Sequence[torch.Tensor] | torch.Tensor,
    write_lse: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(output, LSE) over all keys from those over parts, each as `memory_efficient_attention_partial` returns them. Without
    `write_lse` the LSE is None."""
    outs, lses = list(attn_split), list(lse_split)
    if not outs or len(outs) != len(lses):
        raise InvalidArgument(f"attn_split and lse_split must be as many, at least one; got {len(outs)}, {len(lses)}")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*outs, *lses)):
        out, lse = _merged(outs, lses)
    else:
        grouped = outs[0].dim() == 5
        flat = [(t.flatten(2, 3), of.flatten(1, 2)) if grouped else (t, of) for t, of in zip(outs, lses, strict=True)]
        out, lse = merge([t for t, _ in flat], [of for _, of in flat])
        out, lse = out.reshape(outs[0].shape), lse.reshape(lses[0].shape)
    return out.to(outs[0].dtype if output_dtype is None else output_dtype), lse if write_lse else None


def _merged(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`strobe.merge` in operations that PyTorch differentiates. Parts without keys have no weight and no gradient."""
    stacked = torch.stack([lse.to(torch.promote_types(lse.dtype, torch.float32)) for lse in lses])
    empty = stacked == -torch.inf
    nothing = empty.all(0)
    lse = stacked.masked_fill(nothing, 0).logsumexp(0)
    weights = (stacked - lse).exp().masked_fill(empty, 0)
    parts = [
        t.to(stacked.dtype).masked_fill(hidden.movedim(-1, 1)[..., None], 0) * w.movedim(-1, 1)[..., None]
        for t, hidden, w in zip(outs, empty, weights, strict=True)
    ]
    return sum(parts[1:], parts[0]), lse.masked_fill(nothing, -torch.inf)


def _refuse(op: Any, output_dtype: torch.dtype | None, query: torch.Tensor) -> None:
    flash_terms.refuse(op=(op, "kernels are strobe's own choice; pass None"))
    if output_dtype not in (None, query.dtype):
        raise Unsupported(f"output_dtype is {output_dtype}, but the output has the dtype of query, {query.dtype}")


def _refuse_dropout(p: float) -> None:
    if flash_terms.number("p", p):
        raise Unsupported(
            f"p is {p}; only memory_efficient_attention drops weights: this function has no seed to repeat"
        )


def _arguments(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: Any, scale: Any) -> Arguments:
    """Those of `attend`, with dims that kernels have."""
    _check_shapes(query, key, value)
    asked = _asked(attn_bias)
    q, k, v = _four_axes(query, key, value)
    bias = None if asked.bias is None else _bias_of_heads(asked.bias, query.dim())
    scale = q.shape[-1] ** -0.5 if scale is None else flash_terms.number("scale", scale)
    q, k, v = flash_terms.padded(*map(flash_terms.last_axis_contiguous, (q, k, v)))
    if asked.rows is not None:
        return _packed(asked, q, k, v)._replace(scale=scale)
    return Arguments(q, k, v, mask=asked.mask, scale=scale, bias=bias, layout="bshd")


def _outside(out: torch.Tensor, query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    dim_v = value.shape[-1]
    return out[..., :dim_v].reshape(*query.shape[:-1], dim_v)


def _check_shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """xformers broadcasts nothing: fewer key heads are expanded by the caller."""
    shapes = [tuple(t.shape) for t in (query, key, value)]
    found = f"query {shapes[0]}, key {shapes[1]}, value {shapes[2]}"
    if query.dim() not in (3, 4, 5) or not query.dim() == key.dim() == value.dim():
        raise InvalidArgument(f"query, key and value must have 3, 4 or 5 axes, all as many; got {found}")
    batch_and_heads = {(shape[0], shape[2:-1]) for shape in shapes}
    if len(batch_and_heads) > 1 or shapes[1][:2] != shapes[2][:2] or shapes[0][-1] != shapes[1][-1]:
        raise InvalidArgument(
            f"query, key and value must agree in batch and heads, key and value in length; got {found}"
        )


def _four_axes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(batch, length, heads, dim), with fewer key heads where the caller expanded them. With gradients they stay as many:
    the gradient of each of them may be asked for, and a view of the first head would send the sum of all there."""
    if q.dim() == 3:
        return q.unsqueeze(2), k.unsqueeze(2), v.unsqueeze(2)
    learns = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
    if not learns and q.shape[-2] > 1 and k.stride(-2) == v.stride(-2) == 0:
        k, v = k[..., :1, :], v[..., :1, :]
    return (q, k, v) if q.dim() == 4 else (q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3))


def _bias_of_heads(bias: torch.Tensor, axes: int) -> torch.Tensor:
    """(batch, heads, len_q, len_k) of a bias beside tensors with so many axes."""
    if bias.dim() != axes:
        raise InvalidArgument(f"attn_bias must have {axes} axes, as query has; got shape {tuple(bias.shape)}")
    return bias.unsqueeze(1) if axes == 3 else bias.flatten(1, 2) if axes == 5 else bias


# ---- what a bias asks for --------------------------------------------------------------------------------------------


class _Asked(NamedTuple):
    mask: Mask = full
    bias: torch.Tensor | None = None
    rows: Any = None  # the bias, if it says where sequences lie that were packed into one


def _window_top_left(size: int) -> Mask:
    """The last `size` keys up to the one with the query's own index in its block."""
    return Mask(Q - Expr.of(size - 1), None, "window_top_left(?)", (size - 1,)) & causal_top_left


def _local(b: Any) -> Mask:
    return window(int(b._window_size) - 1, 0)


def _two_sided(b: Any) -> Mask:
    return window(int(b.window_left), int(b.window_right))


# Class of xformers -> the mask that an object of it means. The table of packed ones: inside each of the sequences.
_DENSE: dict[str, Callable[[Any], Mask]] = {
    "LowerTriangularMask": lambda b: causal_top_left,
    "LowerTriangularMaskWithTensorBias": lambda b: causal_top_left,
    "LowerTriangularFromBottomRightMask": lambda b: causal,
    "LowerTriangularFromBottomRightLocalAttentionMask": _local,
    "LocalAttentionFromBottomRightMask": _two_sided,
}
_WITH_TENSOR = frozenset(("LowerTriangularMaskWithTensorBias",))
_PACKED: dict[str, Callable[[Any], Mask]] = {
    "BlockDiagonalMask": lambda b: full,
    "BlockDiagonalCausalMask": lambda b: causal_top_left,
    "BlockDiagonalCausalFromBottomRightMask": lambda b: causal,
    "BlockDiagonalCausalLocalAttentionMask": lambda b: _window_top_left(int(b._window_size)),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _local,
    "BlockDiagonalPaddedKeysMask": lambda b: full,
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": lambda b: causal,
    "BlockDiagonalLocalAttentionPaddedKeysMask": _two_sided,
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": _local,
    "BlockDiagonalGappyKeysMask": lambda b: full,
    "BlockDiagonalCausalWithOffsetGappyKeysMask": lambda b: causal,
}


def _asked(attn_bias: Any) -> _Asked:
    if attn_bias is None:
        return _Asked()
    name = type(attn_bias).__name__  # of a subclass nothing is known: it may hide other keys
    if name in _DENSE:
        return _Asked(_DENSE[name](attn_bias), _tensor_of(attn_bias) if name in _WITH_TENSOR else None)
    if name in _PACKED:
        return _Asked(_PACKED[name](attn_bias), None, attn_bias)
    if isinstance(attn_bias, torch.Tensor) and not hasattr(attn_bias, "_subtensor"):  # which xformers' own classes have
        return _Asked(full, attn_bias)
    if name.startswith("Paged"):
        raise Unsupported(
            f"attn_bias is a {name}, whose pages are not read here; strobe.attention_paged takes paged keys"
        )
    raise Unsupported(f"attn_bias is a {name}; known are tensors, {', '.join((*_DENSE, *_PACKED))}")


def _tensor_of(attn_bias: Any) -> torch.Tensor:
    """Finds it under the name that it has in the installed xformers."""
    for name in ("_bias", "_subtensor"):
        if isinstance(found := getattr(attn_bias, name, None), torch.Tensor):
            return found
    raise Unsupported(f"attn_bias is a {type(attn_bias).__name__} without _bias, the tensor that is added")


def _packed(asked: _Asked, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Arguments:
    """The sequences of a block-diagonal bias. Those with padded or gappy keys use the first `seqlen` keys of theirs, which
    are read in place where no sequence reaches into the next one."""
    if q.shape[0] != 1 or k.shape[0] != 1:
        found = f"query {tuple(q.shape)}, key {tuple(k.shape)}"
        raise InvalidArgument(
            f"a block-diagonal attn_bias goes with batch 1, its sequences one after the other; got {found}"
        )
    rows, keys = asked.rows.q_seqinfo, asked.rows.k_seqinfo
    starts, used = list(keys.seqstart_py), getattr(keys, "seqlen", None)
    rooms = [after - before for before, after in zip(starts, starts[1:], strict=False)]
    k, v, cu_k = k[0], v[0], _offsets(keys.seqstart, q)
    if used is not None and any(n > room for n, room in zip(keys.seqlen_py, rooms, strict=True)):
        rooms = (
            used.tolist()
        )  # keys in any order, perhaps of several sequences: copies stand in the order of the sequences
        places = [range(start, start + n) for start, n in zip(keys.seqstart.tolist(), rooms, strict=False)]
        index = torch.tensor(list(itertools.chain(*places)), dtype=torch.long, device=q.device)
        k, v = k.index_select(0, index), v.index_select(0, index)
        ends = list(itertools.accumulate(rooms, initial=0))
        cu_k, used = torch.tensor(ends, dtype=torch.int32, device=q.device), None
    else:
        k, v, cu_k = k[starts[0] : starts[-1]], v[starts[0] : starts[-1]], cu_k - starts[0]
    a = Arguments(
        q=q[0], k=k, v=v, cu_q=_offsets(rows.seqstart, q), cu_k=cu_k,
        max_q=int(rows.max_seqlen), max_k=max(rooms, default=0), mask=asked.mask,
    )  # fmt: skip
    return a if used is None else flash_terms.in_use(a, used_k=used.to(q.device, torch.int32))


def _offsets(starts: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return starts.to(q.device, torch.int32)


# ---- the plug-in -----------------------------------------------------------------------------------------------------

_OURS = {
    f.__name__: f
    for f in (
        memory_efficient_attention,
        memory_efficient_attention_forward,
        memory_efficient_attention_forward_requires_grad,
        memory_efficient_attention_partial,
        memory_efficient_attention_backward,
        merge_attentions,
    )
}
_HOSTS = ("xformers.ops", "xformers.ops.fmha")
_replaced: list[tuple[ModuleType, str, Any]] | None = None  # None: not installed


def install() -> None:
    """Make `xformers.ops.memory_efficient_attention` strobe's, on any device. Code that imported the function by name
    before keeps xformers' own. A second call changes nothing."""
    global _replaced
    if _replaced is not None:
        return
    try:
        hosts = [importlib.import_module(name) for name in _HOSTS]
    except ImportError as error:
        way_out = "call strobe.compat.xformers.memory_efficient_attention, which needs none"
        raise Unsupported(f"xformers cannot be imported ({error}); {way_out}") from error
    _replaced = [(host, name, getattr(host, name)) for host in hosts for name in _OURS if hasattr(host, name)]
    for host, name, _ in _replaced:
        setattr(host, name, _OURS[name])


def uninstall() -> None:
    """Restores xformers as it was before `install()`."""
    global _replaced
    for host, name, theirs in _replaced or ():
        setattr(host, name, theirs)
    _replaced = None


def status() -> str | None:
    return None if _replaced is None else "memory_efficient_attention is strobe's"
