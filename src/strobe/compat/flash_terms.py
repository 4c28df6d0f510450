"""The terms in which flash-attn describes attention, in ours: windows, chunks, soft caps, slopes, lengths in use."""

from __future__ import annotations

import functools
import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import torch

from strobe.call import piece
from strobe.problem import Unsupported
from strobe.problem.arguments import Arguments
from strobe.problem.hints import InvalidArgument
from strobe.variants.expression import LEN_K, LEN_Q, Expr, Q, S
from strobe.variants.mask import Mask, causal, full, used_keys
from strobe.variants.ready_made import chunked, window
from strobe.variants.score import Score, alibi, softcap

_0, _1 = (Expr("literal", (n,)) for n in (0, 1))
# Only the queries that the whole sequence has, as positions say: those from len_q on see the keys from len_k on, none.
used_queries = Mask(Expr("min", (Expr("max", (Q - LEN_Q + _1, _0)), _1)) * LEN_K, None, "used_queries")


# ---- numbers ---------------------------------------------------------------------------------------------------------


def integer(name: str, value: Any) -> int:
    """The int in an int, a numpy number or a tensor with one element, as transformers passes lengths (on a GPU this
    waits)."""
    if isinstance(value, (int, torch.SymInt)):
        return value  # type: ignore[return-value]
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point():
        return int(value.item())
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name} must be an int, got {value!r}") from None


def number(name: str, value: Any) -> float:
    """The float in a number or a tensor with one element."""
    if isinstance(value, (float, torch.SymFloat)):
        return value  # type: ignore[return-value]
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.item())
    if not isinstance(value, numbers.Real):
        raise InvalidArgument(f"{name} must be a number, got {value!r}")
    return float(value)


def scale_of(softmax_scale: Any, dim: int) -> float:
    return dim**-0.5 if softmax_scale is None else number("softmax_scale", softmax_scale)


def longest(name: str, value: Any) -> int | None:
    """A `max_seqlen`; None: to be found."""
    return None if value is None else integer(name, value)


def check_counts(name: str, counts: Any, batch: int, least: Any, most: Any) -> None:
    """`counts` of rows, an int or a tensor (batch,), are between `least` and `most`, which are ints or such tensors.
    Values are looked at where that does not wait for a GPU."""
    if isinstance(counts, torch.Tensor) and (counts.shape != (batch,) or counts.is_floating_point()):
        found = f"{counts.dtype} of shape {tuple(counts.shape)}"
        raise InvalidArgument(f"{name} must be ints, one for each sequence, shape ({batch},); got {found}")
    tensors = [t for t in (counts, least, most) if isinstance(t, torch.Tensor)]
    if torch.compiler.is_compiling() or not all(t.is_cpu for t in tensors):
        return
    wrong = (counts < least) | (counts > most)
    if wrong.any() if tensors else wrong:
        least, counts, most = (t.tolist() if isinstance(t, torch.Tensor) else t for t in (least, counts, most))
        raise InvalidArgument(f"{name} must be from {least} to {most}, got {counts}")


# ---- masks and scores ------------------------------------------------------------------------------------------------


def mask_of(is_causal: bool, left: Any, right: Any, chunk: Any = 0) -> Mask:
    """A window counts from the diagonal that ends at the last query and the last key; negative is unbounded. `chunk`:
    keys of the same chunk alone; 0: any."""
    left, right = integer("window_size[0]", left), integer("window_size[1]", right)
    chunk = integer("attention_chunk", chunk)
    if chunk < 0:
        raise InvalidArgument(f"attention_chunk must be at least 0, got {chunk}")
    made = _made if torch.compiler.is_dynamo_compiling() else _remembered  # the compiler looks through caches and warns
    return made(is_causal, left, right, chunk)


def _made(is_causal: bool, left: int, right: int, chunk: int) -> Mask:
    if is_causal:
        right = 0
    if left < 0 and right < 0:
        mask = full
    elif left < 0 and right == 0:
        mask = causal
    else:
        mask = window(None if left < 0 else left, None if right < 0 else right)
    return mask & chunked(chunk) if chunk else mask


_remembered = functools.lru_cache(maxsize=256)(_made)
_remembered_softcap = functools.lru_cache(maxsize=64)(softcap)


def score_of(cap: Any, slopes: torch.Tensor | None) -> Score | None:
    """The cap comes first, then the slopes."""
    cap = number("softcap", cap)
    if not 0 <= cap < math.inf:
        raise InvalidArgument(f"softcap must be finite and at least 0 (no cap), got {cap}")
    capping = softcap if torch.compiler.is_compiling() else _remembered_softcap  # symbols of a tracer have no hash
    if slopes is None:
        return capping(cap) if cap else None
    biased = alibi(slopes.detach().float())
    if not cap:
        return biased
    capped = capping(cap)
    return Score(biased.expr.replaced(S, capped.expr), f"{capped.title} with alibi", biased.tensors, capped.sizes)


# ---- tensors ---------------------------------------------------------------------------------------------------------


def last_axis_contiguous(t: Any) -> Any:
    return t if t is None or t.stride(-1) == 1 or t.shape[-1] < 2 else t.contiguous()


def padded(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Head dims as the CUDA kernels have them, multiples of 8. Zeros change no score and add columns of 0 to the
    output; the caller has to give a scale and to cut the output."""
    if not tensors[0].is_cuda:
        return tensors
    return tuple(torch.nn.functional.pad(t, (0, -t.shape[-1] % 8)) if t.shape[-1] % 8 else t for t in tensors)


def positions_of(
    batch: int, len_q: Any, len_k: Any, first_key: Any, device: torch.device, row: Any = 0
) -> torch.Tensor:
    """`positions` of sequences whose keys in use are the `len_k` from `first_key` on. The first query of the call stands
    at `row` of `len_q`. Each is an int or a tensor (batch,)."""
    found = torch.empty((batch, 4), dtype=torch.int32, device=device)
    for column, value in enumerate((row, len_q, 0, len_k)):
        found[:, column] = value
    found[:, 2].sub_(first_key)
    return found


def in_use(a: Arguments, used_q: Any = None, used_k: Any = None, first_key: Any = None) -> Arguments:
    """Restrict each sequence to its first `used_q` queries and the keys from `first_key` to `used_k`: ints or tensors
    (batch,), None: all. Other queries see nothing and send no gradient."""
    if used_q is None and used_k is None and first_key is None:
        return a
    batch = a.q.shape[0] if a.cu_q is None else a.cu_q.numel() - 1
    len_q: Any = a.q.shape[1] if a.cu_q is None else a.cu_q.diff()
    len_k: Any = a.k.shape[1] if a.cu_k is None else a.cu_k.diff()
    if used_k is not None:
        check_counts("seqused_k", used_k, batch, 0, len_k)
        len_k = used_k
    first: Any = 0
    if first_key is not None:
        check_counts("leftpad_k", first_key, batch, 0, len_k)
        first = first_key
    mask = a.mask & used_keys
    if used_q is not None:
        check_counts("seqused_q", used_q, batch, 0, len_q)
        len_q, mask = used_q, mask & used_queries
    return a._replace(mask=mask, positions=positions_of(batch, len_q, len_k - first, first, a.q.device))


def in_pages(a: Arguments, table: torch.Tensor, used_k: Any, first_key: Any = None) -> Arguments:
    """Keys and values lie in pages (pages, page, heads_k, dim), which `table` (batch, width) lists. Of each sequence the keys
    from `first_key` to `used_k` are in use: ints or tensors (batch,). Sends no gradient, as in flash-attn."""
    batch = a.q.shape[0] if a.cu_q is None else a.cu_q.numel() - 1
    if not isinstance(used_k, torch.Tensor):
        used_k = torch.full((batch,), used_k, dtype=torch.int32, device=a.q.device)
    starts = None
    if first_key is not None:
        check_counts("leftpad_k", first_key, batch, 0, used_k)
        starts = -(first_key if isinstance(first_key, torch.Tensor) else torch.full_like(used_k, first_key)).int()
    return a._replace(
        q=a.q.detach(), k=a.k.detach(), v=a.v.detach(), cu_k=None, max_k=None, table=table, lengths=used_k.int(),
        starts=starts,
    )  # fmt: skip


def rotary_rows(cos: torch.Tensor, sin: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of the tables for each position of `at`. `index_select` refuses positions that the tables do not have,
    also on a GPU; an index in brackets would count negative ones from the end."""
    if at.is_cpu and at.numel() and not torch.compiler.is_compiling():
        first, last = int(at.min()), int(at.max())
        if first < 0 or last >= cos.shape[0]:
            raise InvalidArgument(
                f"rotary positions must be from 0 to {cos.shape[0] - 1}, the rows of the tables; got {first} to {last}"
            )
    return tuple(t.index_select(0, at.flatten()).unflatten(0, at.shape) for t in (cos, sin))  # type: ignore[return-value]


def write_gradients(
    a: Arguments, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, into: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Writes the gradients of q, k and v into the tensors of `into` that are there; returns rowsum(dout * out),
    (batch, heads, len_q) or (heads, total_q)."""
    dout, out = (last_axis_contiguous(t).detach() for t in (dout, out))
    gradients = piece.backward(a, out, lse, dout)
    with torch.no_grad():
        for to, gradient in zip(into, (gradients.q, gradients.k, gradients.v), strict=True):
            if to is not None and gradient is not None:
                to.copy_(gradient)
        return (dout.float() * out.float()).sum(-1).transpose(-1, -2)


# ---- what is not built -----------------------------------------------------------------------------------------------


def refuse(**arguments: Any) -> None:
    """Raise `Unsupported` for what is not built and was passed: `name=(value, why)`."""
    for name, (value, why) in arguments.items():
        if value is not None:
            raise Unsupported(f"{name} was given, but {why}")


NO_FP8 = "there are no 8-bit kernels yet; pass float16 or bfloat16 without descale factors"
NO_GENERATOR = "the seed of dropout follows torch.manual_seed; pass None"
