"""`strobe.merge`: results over parts of the keys become the result over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strobe.merging import merged


def merge(
    outs: Sequence[torch.Tensor] | torch.Tensor,
    lses: Sequence[torch.Tensor] | torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all keys from states, that is results over parts of them: (out, lse).

    outs   one output per part, each (…, rows, heads, dim) as `strobe.attention` returns them; or one tensor with a first
           axis for the parts
    lses   their LSEs, each (…, heads, rows), natural log; -inf for a row that sees no key of a part. Its output may hold
           anything, NaN too
    sinks  (heads,): enter once, here. Parts that go into a merge must not have had them
    out    write the merged output here, rounded to its dtype

    Both results are in fp32, or fp64, unless `out` is given. Parts are merged in the order in which they are given, so the
    same parts give the same bits. `out` may be one of them, but must not overlap with them otherwise. Not differentiable.
    On a GPU up to 8 parts of one dtype, fp32 or 16 bits, are one launch.
    """
    if isinstance(outs, torch.Tensor):
        outs = outs.unbind()
    if isinstance(lses, torch.Tensor):
        lses = lses.unbind()
    if outs and outs[0].is_cuda and not torch.compiler.is_compiling():
        from strobe.cuda.merge import merge as by_kernel

        found = by_kernel(outs, lses, sinks, out)
        if found is not None:
            return found
    _check(outs, lses, sinks, out)
    return merged(outs, lses, sinks, out)


def _check(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], sinks: torch.Tensor | None, out: torch.Tensor | None
) -> None:
    if not len(outs) or len(outs) != len(lses):
        raise ValueError(f"outs and lses must be as many, and at least one; got {len(outs)} and {len(lses)}")
    for i, (part, lse) in enumerate(zip(outs, lses, strict=True)):
        if part.shape != outs[0].shape:
            raise ValueError(f"outs[{i}] has shape {tuple(part.shape)}, outs[0] has {tuple(outs[0].shape)}")
        if part.dim() < 3 or tuple(lse.shape) != (*part.shape[:-3], part.shape[-2], part.shape[-3]):
            wanted = f"(…, heads, rows) for outs[{i}] of shape (…, rows, heads, dim)"
            raise ValueError(f"lses[{i}] must be {wanted}; got {tuple(lse.shape)} and {tuple(part.shape)}")
    if sinks is not None and tuple(sinks.shape) != (outs[0].shape[-2],):
        raise ValueError(f"sinks must have shape (heads,) = ({outs[0].shape[-2]},), got {tuple(sinks.shape)}")
    if out is not None and out.shape != outs[0].shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, the result has {tuple(outs[0].shape)}")
