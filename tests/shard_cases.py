"""Cases of context parallel attention: what is attended to, and what has to come out, computed in one process."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch

import strobe
from strobe.distributed import ShardPlan, join, shard

MASKS = {
    "full": strobe.full,
    "causal": strobe.causal,
    "window": strobe.window(6, 2),
    "causal window": strobe.causal & strobe.window(9, 0),
    "prefix": strobe.prefix(5),
    "chunked": strobe.chunked(8) & strobe.causal,
}
DENSE, PACKED = (37,), (5, 0, 20, 3, 9)  # no multiple of anything; a document that is empty


@dataclass(frozen=True)
class Case:
    mask: str = "causal"
    lengths: tuple[int, ...] = DENSE
    heads: tuple[int, int] = (6, 2)
    dims: tuple[int, int] = (8, 5)
    dtype: torch.dtype = torch.float64
    sinks: bool = False
    dropout: float = 0.0
    softcap: float | None = None
    alibi: bool = False  # packed documents have slopes of their own
    strategy: str = "zigzag"
    block: int | None = None
    batch: int = 2

    def plan(self, ranks: int) -> ShardPlan:
        lengths = self.lengths[0] if len(self.lengths) == 1 else self.lengths
        return ShardPlan(lengths, ranks=ranks, mask=MASKS[self.mask], strategy=self.strategy, block=self.block)

    @property
    def axis(self) -> int:
        """The axis of the positions in q, k and v."""
        return 1 if len(self.lengths) == 1 else 0


# Grouping, sinks, dropout and scores, each pair of them somewhere.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"heads": (6, 6)},
    {"heads": (6, 2), "sinks": True},
    {"heads": (4, 1), "dropout": 0.3},
    {"heads": (6, 3), "dropout": 0.2, "sinks": True},  # no number of ranks divides these evenly
    {"heads": (6, 3), "softcap": 2.0, "sinks": True},
    {"heads": (6, 2), "alibi": True},
    {"heads": (8, 2), "alibi": True, "dropout": 0.4, "sinks": True},
)


@dataclass
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None
    options: dict[str, Any]
    dout: torch.Tensor
    dlse: torch.Tensor


@functools.lru_cache(maxsize=16)
def inputs(case: Case) -> Inputs:
    """Return inputs that are the same on each rank. Numbers do not depend on the mask, the options or the plan."""
    generator = torch.Generator().manual_seed(1)
    lead = (case.batch, sum(case.lengths)) if len(case.lengths) == 1 else (sum(case.lengths),)
    (heads, heads_k), (dim, dim_v) = case.heads, case.dims

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)

    q, k, v = made(*lead, heads, dim), made(*lead, heads_k, dim), made(*lead, heads_k, dim_v)
    dout = made(*lead, heads, dim_v)
    rows = (*lead[:-1], heads, lead[-1])
    dlse = made(*rows).to(torch.float64 if case.dtype == torch.float64 else torch.float32)
    sinks = made(heads) if case.sinks else None
    options: dict[str, Any] = {"softcap": case.softcap}
    if case.dropout:
        options |= {"dropout": case.dropout, "seed": 17}
    if case.alibi:
        documents = () if len(case.lengths) == 1 else (len(case.lengths),)
        options["score"] = strobe.alibi(torch.rand((*documents, heads), generator=generator, dtype=torch.float64))
    return Inputs(q, k, v, sinks, options, dout, dlse)


def leaves_of(x: Inputs, *qkv: torch.Tensor) -> list[torch.Tensor]:
    tensors = [*qkv, *([] if x.sinks is None else [x.sinks])]
    return [t.detach().clone().requires_grad_() for t in tensors]


def objective(out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor) -> torch.Tensor:
    """Return a number whose gradients go through the output and the LSE; rows that see nothing have a constant LSE."""
    return (out * dout).sum() + (torch.where(torch.isfinite(lse), lse, 0) * dlse).sum()


@functools.lru_cache(maxsize=16)
def expected(case: Case) -> dict[str, torch.Tensor]:
    """Return out, lse and the gradients, computed in one process."""
    x = inputs(case)
    leaves = leaves_of(x, x.q, x.k, x.v)
    q, k, v, *sinks = leaves
    options = {**x.options, "mask": MASKS[case.mask], "sinks": sinks[0] if sinks else None, "return_lse": True}
    if len(case.lengths) == 1:
        out, lse = strobe.attention(q, k, v, **options)
    else:
        cu = torch.tensor([0, *itertools.accumulate(case.lengths)], dtype=torch.int32)
        out, lse = strobe.attention_varlen(q, k, v, cu, cu, **options)
    gradients = torch.autograd.grad(objective(out, lse, x.dout, x.dlse), leaves)
    names = ("q", "k", "v", "sinks")
    return {"out": out.detach(), "lse": lse.detach()} | {
        f"d{name}": g for name, g in zip(names, gradients, strict=False)
    }


def on_one_rank(
    case: Case,
    mesh: Any,
    rank: int,
    plan: ShardPlan,
    method: str,
    gradients: bool = True,
    through_lse: bool = True,
    **keywords: Any,
) -> dict[str, torch.Tensor]:
    """Return what this rank computes from its shards."""
    x = inputs(case)
    leaves = leaves_of(x, *shard(plan, x.q, x.k, x.v, rank=rank, dim=case.axis))
    q, k, v, *sinks = leaves
    (dout,) = shard(plan, x.dout, rank=rank, dim=case.axis)
    (dlse,) = shard(plan, x.dlse, rank=rank, dim=case.axis + 1)
    with torch.set_grad_enabled(gradients):
        out, lse = strobe.distributed.attention(
            q, k, v, mesh=mesh, plan=plan, method=method, sinks=sinks[0] if sinks else None, return_lse=True,
            **x.options, **keywords,
        )  # fmt: skip
    found = {"out": out.detach(), "lse": lse.detach()}
    if gradients:
        total = objective(out, lse, dout, dlse) if through_lse else (out * dout).sum()
        each = torch.autograd.grad(total, leaves)
        found |= {f"d{name}": g for name, g in zip(("q", "k", "v", "sinks"), each, strict=False)}
    return found


def joined(case: Case, plan: ShardPlan, parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The whole, from what the ranks found. Gradients of sinks are contributions: they add up."""
    found = {}
    for name in parts[0]:
        each = [part[name] for part in parts]
        if name == "dsinks":
            found[name] = torch.stack(each).sum(0)
        else:
            found[name] = join(plan, each, case.axis + 1 if name == "lse" else case.axis)
    return found


def compare(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: object, atol: float = 1e-12) -> None:
    for name, t in found.items():
        torch.testing.assert_close(
            t, wanted[name], atol=atol, rtol=atol, msg=lambda m, name=name: f"{name} of {what}: {m}"
        )
