"""Is a rung right? Against float64, by the library's rule: finite, and no further off than twice what PyTorch's
ordinary operations in the same dtype are, plus a few roundings; three times for gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strobe.backends import reference
from strobe.learn.ladder.execute import Tensors, problem_of
from strobe.learn.ladder.rung import Rung, Shape

_FORWARD, _GRADIENTS = 2.0, 3.0
_ROUNDINGS = (
    8  # of fp32: the LSE is kept in units of log 2, and gradients are made from an LSE and an output that were rounded
)
_DIVISION = (
    4  # roundings of O when it is divided by the row sum: l * alpha, the product with O, 1 / l, the product with that
)


@dataclass(frozen=True)
class Error:
    """The largest difference from float64, and what rounding explains."""

    what: str
    largest: float  # NaN if anything is
    allowed: float

    @property
    def passed(self) -> bool:
        return self.largest <= self.allowed


def roundings(rung: Rung, len_k: int) -> float:
    """Of fp32, that the way in which a rung adds up explains beyond PyTorch's."""
    divisions = len_k / rung.divides_every if rung.divides_every else 0.0
    sums = (
        0.5 * len_k**0.5 if rung.dtype == torch.float32 else 0.0
    )  # one product after the other; PyTorch sums in blocks
    return _ROUNDINGS + sums + _DIVISION * divisions**0.5  # they go either way: random walks


def judge(rung: Rung, shape: Shape, x: Tensors) -> Error:
    """Of the first and the last slice: the first result that is wrong, or the largest error."""
    allowed = roundings(rung, shape.len_k)
    errors = [
        _compare(
            name, found[index], exact[name], same[name], rung.backward, allowed, _unknowable(name, shape, x, index)
        )
        for index in sorted({0, shape.slices - 1})
        for exact, same in [
            (_expected(rung, shape, x, index, torch.float64), _expected(rung, shape, x, index, rung.dtype))
        ]
        for name, found in x.results(rung).items()
    ]
    return next((e for e in errors if not e.passed), max(errors, key=lambda e: e.largest))


def _unknowable(name: str, shape: Shape, x: Tensors, index: int) -> float:
    """What a backward pass cannot know that is given `o` and the LSE, both rounded: delta and dP, which textbook
    attention makes cancel exactly, come from different sums."""
    if x.d_o is None or name == "dv":
        return 0.0
    dp = x.d_o[index].norm(dim=-1).max().item() * x.v[index].norm(dim=-1).max().item()
    other = x.k if name == "dq" else x.q
    return 3 * torch.finfo(torch.float32).eps * dp * shape.scale * other[index].abs().max().item()


def _compare(
    name: str,
    found: torch.Tensor,
    exact: torch.Tensor,
    same: torch.Tensor,
    gradient: bool,
    roundings: float,
    unknowable: float,
) -> Error:
    finite = torch.isfinite(exact)
    infinities_wrong = bool((found.double() != exact)[~finite].any())  # the LSE of a row that sees nothing
    if infinities_wrong or not bool(torch.isfinite(found[finite]).all()):
        return Error(name, float("nan"), 0.0)
    if not finite.any():
        return Error(name, 0.0, 0.0)
    exact = exact[finite]
    rounded = exact.to(same.dtype)
    floor = 2 * ((rounded + 0.3 - 0.3) - rounded).abs().max().item()
    if same.dtype == torch.float32:
        floor += roundings * torch.finfo(torch.float32).eps * exact.abs().max().item()
    distance = (_GRADIENTS if gradient else _FORWARD) * (same[finite].double() - exact).abs().max().item()
    return Error(name, (found[finite].double() - exact).abs().max().item(), distance + floor + unknowable)


def _expected(rung: Rung, shape: Shape, x: Tensors, index: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Textbook attention of one slice in `dtype`, the LSE at least in fp32; or its gradients by autograd."""
    leaves = [t[index : index + 1].detach().to(dtype).requires_grad_(rung.backward) for t in (x.q, x.k, x.v)]
    problem, inputs = problem_of(shape, *leaves)
    out, lse = reference.attention(problem, inputs, dtype)
    if rung.backward:
        assert x.d_o is not None
        found = torch.autograd.grad((out[0, 0] * x.d_o[index].to(dtype)).sum(), leaves)
        return {name: gradient[0] for name, gradient in zip(("dq", "dk", "dv"), found, strict=True)}
    if dtype == torch.bfloat16:
        _, lse = reference.attention(problem, inputs, torch.float32)
    return {"o": out[0, 0], "lse": lse[0, 0]}
