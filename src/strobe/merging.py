"""`strobe.merge`: outputs over parts of the keys become the output over all of them, by their LSE, in fp32.

Outputs are (…, rows, heads, dim), LSEs (…, heads, rows), as `strobe.attention` returns them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


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

        result = by_kernel(outs, lses, sinks, out)
        if result is not None:
            return result
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


@torch.no_grad()
def merged(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], sinks: torch.Tensor | None, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`strobe.merge` by PyTorch's operations; its arguments are checked. Rows of a part that see no key (LSE -inf) count
    as 0: nobody may have written them, and weight 0 times NaN would be NaN."""
    wide = torch.float64 if outs[0].dtype == torch.float64 else torch.float32
    total, total_lse = _with_zeros(outs[0].to(wide), lses[0]), lses[0].to(wide, copy=True)
    for part, lse in zip(outs[1:], lses[1:], strict=True):
        merge_(total, total_lse, _with_zeros(part.to(wide), lse), lse.to(wide))
    if sinks is not None:
        add_sinks_(total, total_lse, sinks)
    return total if out is None else out.copy_(total), total_lse


def _with_zeros(part: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """A copy, with zeros in rows that see no key."""
    return part.masked_fill((lse == -torch.inf).mT.unsqueeze(-1), 0)


def merge_(out: torch.Tensor, lse: torch.Tensor, out_new: torch.Tensor, lse_new: torch.Tensor) -> None:
    """Update (out, lse) by a result over other keys. Weights of the two sum to 1, so one `lerp` does it: it reads each
    output once. A part whose rows see no key (LSE -inf) has weight 0, also beside another such part; its output must be
    finite."""
    weight = torch.where(lse_new == -torch.inf, 0, torch.sigmoid(lse_new - lse))
    out.lerp_(out_new, weight.mT.unsqueeze(-1))
    torch.logaddexp(lse, lse_new, out=lse)


def add_sinks_(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """A sink is one more key, whose value is 0: it enters once, after the last merge."""
    logit = sinks.to(lse.dtype).unsqueeze(-1)  # (heads, 1)
    total = torch.logaddexp(lse, logit)
    kept = torch.where(lse == -torch.inf, 0, torch.exp(lse - total))
    out.mul_(kept.mT.unsqueeze(-1))
    lse.copy_(total)


def gradient_of_sinks(
    out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None, sinks: torch.Tensor
) -> torch.Tensor:
    """(heads,) in the dtype of the LSE, from the final results of some rows: -Σ p delta with the sink's share p of the
    softmax."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).mT  # (…, heads, rows)
    if dlse is not None:
        delta = delta - dlse
    logit = sinks.to(lse.dtype).unsqueeze(-1)
    # An infinite sink takes all of the softmax, or nothing.
    p = torch.where(lse == logit, 1, torch.exp(logit - lse)).masked_fill(logit == -torch.inf, 0)
    gradient = -(p * delta).sum(-1)
    return gradient.sum(0) if gradient.dim() == 2 else gradient
