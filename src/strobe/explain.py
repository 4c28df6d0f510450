"""`strobe.explain`: which backend would run a call, why each other would not, and what the call costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from strobe.backends import dispatch
from strobe.problem import Problem, any_requires_grad
from strobe.problem.arguments import DEFAULT_LAYOUT, ROWS, Arguments, gradient_names, tensors_of
from strobe.problem.checks import with_longest
from strobe.problem.hints import refuse_three_axes, unknown_word
from strobe.problem.page_checks import entries_of, in_order
from strobe.problem.resolve import resolved, with_softcap
from strobe.variants.mask import causal


@dataclass(frozen=True)
class Explanation:
    """Plain data; `print` it for reading, `to_dict` it for machines."""

    backend: str
    summary: str
    backward: str | None  # the backend of the backward pass, if one may follow
    problem: str
    rejected: dict[str, str]  # the backends that would not run it, with the reason
    slower: tuple[str, ...]  # those that could, but are not chosen
    details: dict[str, object]  # tile sizes, threads, …
    flops: int
    ideal_bytes: int
    extra_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.problem}", f"runs on      {self.backend}: {self.summary}"]
        lines += [f"backward on  {self.backward}"] if self.backward else []
        lines += [f"with         {name} = {value}" for name, value in self.details.items()]
        lines += [f"also able    {name}" for name in self.slower]
        lines += [f"not          {name}: {reason}" for name, reason in self.rejected.items()]
        lines += [
            f"work         {_si(self.flops, 1000)}FLOP, at least {_si(self.ideal_bytes, 1024)}B to move",
            f"extra memory {_si(self.extra_bytes, 1024)}B besides inputs, output and LSE",
        ]
        return "\n".join(lines)


def _si(value: float, base: int) -> str:
    """1234567 -> '1.23 M' (base 1000) or '1.18 Mi' (base 1024)."""
    for unit in ("", "K", "M", "G", "T", "P"):
        if value < base or unit == "P":
            break
        value /= base
    return f"{value:.3g} {unit}{'i' if base == 1024 and unit else ''}"


def _of_pages(
    k: torch.Tensor, v: torch.Tensor, table: Any = None, layout: str = "nhd", **options: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The arguments of `attention_paged`, with its defaults, as an `Arguments` has them."""
    entries, indptr = entries_of(table)
    return *in_order(k, v, layout), {"mask": causal, "indptr": indptr, **options, "table": entries}


def explain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *cu: torch.Tensor, **arguments: Any) -> Explanation:
    """Takes the arguments of `strobe.attention` or `attention_varlen`, and computes nothing. With `table=` and `lengths=`, by
    name, it takes those of `attention_paged` but `tail` and `shared`."""
    paged = arguments.get("lengths") is not None
    if paged:
        k, v, arguments = _of_pages(k, v, **arguments)
    elif cu and getattr(cu[0], "ndim", None) != 1:
        raise ValueError("after v, explain takes cu_q and cu_k by position; give table= and lengths= by name")
    if not paged and ((arguments.get("cu_q") is None) != (arguments.get("cu_k") is None) or len(cu) not in (0, 2)):
        raise ValueError("cu_q and cu_k go together: give both, or neither")
    if (softcap := arguments.pop("softcap", None)) is not None:
        arguments["score"] = with_softcap(arguments.get("score"), softcap)
    if wrong := [name for name in arguments if name not in ROWS]:
        raise unknown_word("explain", wrong[0], (*ROWS, "softcap"))
    dense = not paged and not cu and arguments.get("cu_q") is None
    a = resolved(Arguments(q, k, v, *cu, **({"layout": DEFAULT_LAYOUT} if dense else {}) | arguments))
    refuse_three_axes(a)
    if a.cu_q is not None:
        a = with_longest(a)
    needs_grad = torch.is_grad_enabled() and any_requires_grad(a)
    problem, _ = Problem.of(a, needs_grad)
    chosen = dispatch.choose(problem, a.backend)
    backward = None
    if needs_grad:
        wanted = gradient_names(tuple(t is not None and t.requires_grad for t in tensors_of(a)))
        backward = dispatch.choose_backward(problem.backward(wanted), chosen)
    reasons = dispatch.rejections(problem)
    return Explanation(
        backend=chosen.name,
        summary=chosen.summary,
        backward=None if backward is None else backward.name,
        problem=problem.summary,
        rejected={name: reason for name, reason in reasons.items() if reason is not None},
        slower=tuple(name for name, reason in reasons.items() if reason is None and name != chosen.name),
        details=chosen.details(problem),
        flops=problem.flops(),
        ideal_bytes=problem.bytes(),
        extra_bytes=chosen.extra_bytes(problem),
    )
