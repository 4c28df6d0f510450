"""`strobe.attention_paged`: attention to keys that lie in pages, as engines that serve models keep them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never

import torch

from strobe.call.attend import attend
from strobe.call.traced import is_tracing
from strobe.merging import merge
from strobe.paged.pool import Level, Table
from strobe.problem import Unsupported
from strobe.problem.arguments import Arguments
from strobe.problem.checks import with_longest
from strobe.problem.hints import shows_known_keywords, unknown_keyword
from strobe.problem.page_checks import check_tail, entries_of, in_order
from strobe.problem.resolve import with_softcap
from strobe.problem.work_list import Plan
from strobe.variants.block_mask import BlockMask
from strobe.variants.mask import Mask, causal, full
from strobe.variants.score import Score
from strobe.variants.tail import with_tail
from strobe.variants.user_function import traced_mask


@shows_known_keywords
def attention_paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: Table,
    lengths: torch.Tensor,
    cu_q: torch.Tensor | None = None,
    *,
    max_q: int | None = None,
    starts: torch.Tensor | None = None,
    tail: torch.Tensor | None = None,
    shared: Sequence[Level] = (),
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    plan: Plan | None = None,
    invariant: bool = False,
    layout: str = "nhd",
    mask: Mask | None = causal,
    scale: float | None = None,
    softcap: float | None = None,
    score: Score | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **wrong: Never,
) -> Any:
    """`attention` to keys in pages: k and v are a pool (pages, page, heads_k, dim), and each sequence has a list of pages.
    Pages may have any size from 1, and pools any strides: v may be a view of k. `layout="hnd"` takes
    (pages, heads_k, page, dim).

    q          (batch, queries, heads, dim); or (total, heads, dim) with `cu_q`, as in `attention_varlen`
    table      (sequences, width), int32: the pages of each sequence; or (indptr, indices), int32: the pages of sequence i
               are indices[indptr[i] : indptr[i + 1]]
    lengths    (sequences,), int32: how many rows of its pages a sequence uses, new keys included; 0 is fine
    cu_q       (sequences + 1,), int32: where the queries of each sequence begin and end
    max_q      the most queries of a sequence; with it, packed queries on a GPU are not looked at
    starts     (sequences,), int32: the position of the first row of the table. Where pages in front were given back it is
               how many keys are gone; where the first rows are padding it is their number, negated: rows at positions
               below 0 are hidden
    tail       int64, one number for each query, for trees of at most 64 new tokens: bit j says whether the query sees the
               j-th of the last keys of its sequence, as many as it has queries. The mask is for the keys before them
    shared     `strobe.paged.Level`s: keys in front that consecutive sequences have in common. With `causal` or no mask
    k_scale    and v_scale: of 8-bit keys and values, which are not built yet
    plan       a `strobe.paged.Plan`: the work of a step, which its layers share; told of `shared`, that of its levels, too
    invariant  the same bits for a row whatever is beside it in the batch or the chunk, and however its keys lie in pages; CUDA
               kernels alone promise it. Takes more memory: see docs/serving.md
    mask       `causal` by default; any mask but a tensor. The last query stands opposite the last key

    The other arguments are those of `attention`; the LSE is (batch, heads, queries) or (heads, total). Only pages that some
    query sees are looked at: table entries outside of a window, and rows behind `lengths`, may hold anything. On a CPU the
    contents of tables are checked at every call. On a GPU that would wait: lengths are clamped to the table, keys whose
    entry is no page of the pool are missing, as if no query saw them, and `strobe.paged.check` says what is wrong. No
    gradients.
    """
    if wrong:
        raise unknown_keyword(attention_paged, wrong)
    if k_scale is not None or v_scale is not None:
        name = "v_scale" if k_scale is None else "k_scale"
        raise Unsupported(f"{name} was given, but there are no 8-bit keys and values yet")
    k, v = in_order(k, v, layout)
    if plan is not None:
        plan.check_call()
    entries, indptr = (table, None) if isinstance(table, torch.Tensor) else entries_of(table)
    if lengths is None:
        raise TypeError("lengths must be a torch.Tensor, got NoneType")
    a = Arguments(
        q=q, k=k, v=v, cu_q=cu_q, max_q=max_q, mask=mask, scale=scale, score=with_softcap(score, softcap), sinks=sinks, out=out,
        return_lse=return_lse, backend=backend, table=entries, indptr=indptr, lengths=lengths, starts=starts, plan=plan,
        invariant=invariant,
    )  # fmt: skip
    if tail is not None and max_q is None and isinstance(cu_q, torch.Tensor) and not (cu_q.is_cpu or is_tracing(q)):
        a = with_longest(a)  # `tail` has no bits for more; the call would read it back later
    call = a if tail is None else a._replace(mask=_with_tail(a, tail))
    return attend(call) if not shared else _with_levels(a, call, shared)


def _with_tail(a: Arguments, tail: torch.Tensor) -> Any:
    """The mask, also for the new keys; one that no tail goes with as it is: the checks say what is wrong with it."""
    if isinstance(a.q, torch.Tensor) and a.q.dim() == (4 if a.cu_q is None else 3):
        check_tail(tail, a.q, a.cu_q, a.max_q)
    mask = full if a.mask is None else a.mask
    if not isinstance(mask, (Mask, BlockMask, torch.Tensor)) and callable(mask):
        mask = traced_mask(mask)
    return with_tail(mask, tail, a.cu_q) if isinstance(mask, Mask) else mask


def _with_levels(a: Arguments, call: Arguments, levels: Sequence[Level]) -> Any:
    """A state over each sequence's own keys and one for each level, merged. Sinks enter once, in the merge. `call`: the
    arguments, with the mask of the own keys."""
    if a.mask is not None and a.mask not in (causal, full):
        way_out = "put the shared pages into each sequence's table instead"
        raise Unsupported(f"shared keys have no {a.mask!r} mask, only causal and full: {way_out}")
    if a.score is not None and not a.score.pointwise:
        way_out = "put the shared pages into each sequence's table instead"
        raise Unsupported(f"shared keys have no {a.score!r}, which looks at positions: {way_out}")
    if torch.is_grad_enabled() and a.sinks is not None and a.sinks.requires_grad:
        raise Unsupported("shared keys have no gradient of the sinks; call it under torch.no_grad()")
    call = call._replace(sinks=None, out=None, partial=True, return_lse=True)
    states = [attend(call)]
    dense, q = a.cu_q is None, a.q
    rows = q.flatten(0, 1) if dense else q
    for i, level in enumerate(levels):
        entries, indptr = entries_of(level.table)
        out, lse = attend(
            call._replace(
                q=rows, cu_q=level.cu_q, max_q=None if rows.is_cpu else rows.shape[0], mask=full, table=entries,
                indptr=indptr, lengths=level.lengths, starts=None, plan=a.plan and a.plan.of_level(i),
            )
        )  # fmt: skip
        if dense:
            out, lse = out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
        states.append((out, lse))
    outs, lses = zip(*states, strict=True)
    result = a.out if a.out is not None else q.new_empty((*q.shape[:-1], a.v.shape[-1]))
    _, total = merge(outs, lses, sinks=a.sinks, out=result)
    return (result, total) if a.return_lse else result
