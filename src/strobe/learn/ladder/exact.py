"""Is a rung right? Against float64, by the rule of `measure.tolerance`; the floors that rungs need are named here."""

from __future__ import annotations

import torch

from strobe.backends import reference
from strobe.learn.ladder.execute import Tensors, problem_of
from strobe.learn.ladder.rung import Rung, Shape
from strobe.measure.tolerance import FORWARD, GRADIENTS, Verdict, compare, gradient_floor, summation_floor

# Roundings of fp32 beyond PyTorch's: the LSE is kept in units of log 2, and gradients are made from an LSE and an output
# that were rounded.
_ROUNDINGS = 8
# Of O when it is divided by the row sum: l * alpha, the product with O, 1 / l, the product with that.
_DIVISION = 4


def roundings(rung: Rung, len_k: int) -> float:
    """Return the roundings of fp32 that the way in which a rung adds up explains beyond PyTorch's."""
    divisions = len_k / rung.divides_every if rung.divides_every else 0.0
    # One product after the other; PyTorch sums in blocks.
    sums = 0.5 * len_k**0.5 if rung.dtype == torch.float32 else 0.0
    return _ROUNDINGS + sums + _DIVISION * divisions**0.5  # they go either way: random walks


def judge(rung: Rung, shape: Shape, x: Tensors) -> Verdict:
    """Judge the first and the last slice: return the first result that is wrong, or the one with the largest error."""
    verdicts = []
    for index in sorted({0, shape.slices - 1}):
        exact, same = (_expected(rung, shape, x, index, dtype) for dtype in (torch.float64, rung.dtype))
        for name, result in x.results(rung).items():
            factor = GRADIENTS if rung.backward else FORWARD
            floor = _floor(name, rung, shape, x, index, exact[name])
            verdicts.append(compare(name, result[index], exact[name], same[name], factor, floor))
    return next((v for v in verdicts if not v.passed), max(verdicts, key=lambda v: v.largest))


def _floor(name: str, rung: Rung, shape: Shape, x: Tensors, index: int, exact: torch.Tensor) -> float:
    floor = 0.0
    if name == "lse" or rung.dtype == torch.float32:
        floor += summation_floor(exact, roundings(rung, shape.len_k), torch.float32)
    if rung.backward:
        assert x.d_o is not None
        q, k, v, d_o, lse = (t[index : index + 1] for t in (x.q, x.k, x.v, x.d_o, x.lse))
        problem, inputs = problem_of(shape, q, k, v)
        floor += gradient_floor(name[1:], problem, inputs, lse, d_o, exact)
    return floor


def _expected(rung: Rung, shape: Shape, x: Tensors, index: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Textbook attention of one slice in `dtype`, the LSE at least in fp32; or its gradients by autograd."""
    leaves = [t[index : index + 1].detach().to(dtype).requires_grad_(rung.backward) for t in (x.q, x.k, x.v)]
    problem, inputs = problem_of(shape, *leaves)
    out, lse = reference.attention(problem, inputs, dtype)
    if rung.backward:
        assert x.d_o is not None
        gradients = torch.autograd.grad((out[0, 0] * x.d_o[index].to(dtype)).sum(), leaves)
        return {name: gradient[0] for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True)}
    if dtype == torch.bfloat16:
        _, lse = reference.attention(problem, inputs, torch.float32)
    return {"o": out[0, 0], "lse": lse[0, 0]}
