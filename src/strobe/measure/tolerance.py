"""The tolerance rule, one for the tests, the benchmark, the ladder and the demo.

A result passes if it is finite where the exact one is, and its largest error against float64 is at most twice that of
PyTorch's ordinary operations in the same dtype (three times, for gradients), plus a floor of a few roundings. `allowed`
has the floor that everything gets. The other floors are for what the comparison itself cannot know, and each says why:
`lse_floor`, `gradient_floor`, `summation_floor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from strobe.problem import Problem
from strobe.problem.arguments import Inputs
from strobe.variants import dropout

FORWARD, GRADIENTS = 2.0, 3.0
Parts = torch.Tensor | Sequence[torch.Tensor]  # a result, or what was picked of one


@dataclass(frozen=True)
class Verdict:
    """A result against float64."""

    what: str
    largest: float  # absolute error; NaN where there is a `problem`
    allowed: float
    relative: float = float("nan")  # ‖found − exact‖ / ‖exact‖ of the finite numbers; says how good, decides nothing
    problem: str | None = None  # what no rounding explains: NaN, a wrong infinity

    @property
    def passed(self) -> bool:
        return self.problem is None and self.largest <= self.allowed  # False for NaN

    def __str__(self) -> str:
        return f"{self.what}: {self.problem or f'error {self.largest:.3e}, allowed {self.allowed:.3e}'}"


def compare(
    what: str, result: Parts, exact: Parts, same_dtype: Parts, factor: float = FORWARD, floor: float = 0.0
) -> Verdict:
    """`exact`: in float64; `same_dtype`: what PyTorch finds in the dtype of the inputs. Infinities (the LSE of a row
    that sees nothing) must be where they belong; NaN never passes. `floor`: what is allowed beyond the rule."""
    result, exact, same_dtype = _parts(result), _parts(exact), _parts(same_dtype)
    limit = allowed(exact, same_dtype, result[0].dtype, factor) + floor
    largest = square = norm = 0.0
    for f, e in zip(result, exact, strict=True):
        if f.shape != e.shape:
            raise ValueError(f"{what} has shape {tuple(f.shape)}, should be {tuple(e.shape)}")
        finite = torch.isfinite(e)
        if (problem := _problem(f, e, finite)) is not None:
            return Verdict(what, float("nan"), limit, problem=problem)
        if finite.any():
            difference = (f.double() - e)[finite]
            largest = max(largest, difference.abs().max().item())
            square += difference.square().sum().item()
            norm += e[finite].square().sum().item()
    return Verdict(what, largest, limit, (square / max(norm, 1e-300)) ** 0.5)


def _problem(result: torch.Tensor, exact: torch.Tensor, finite: torch.Tensor) -> str | None:
    if bool((nan := result.isnan()).any()):
        return f"{int(nan.sum())} of {result.numel()} are NaN"
    if not torch.equal(result.double()[~finite], exact[~finite]):
        return "infinities are wrong"
    if not bool(torch.isfinite(result[finite]).all()):
        return "infinite where it should be finite"
    return None


def allowed(exact: Parts, same_dtype: Parts, dtype: torch.dtype, factor: float = FORWARD) -> float:
    """The largest error that passes. Its floor is two roundings of the result in its dtype, near 0.3: a sum that is put
    together in another order may end on the other side of a rounding boundary."""
    error = floor = top = 0.0
    for e, s in zip(_parts(exact), _parts(same_dtype), strict=True):
        finite = torch.isfinite(e)
        if not finite.any():
            continue
        rounded = e[finite].to(dtype)
        floor = max(floor, 2 * ((rounded + 0.3 - 0.3) - rounded).abs().max().item())
        error = max(error, (s.double() - e)[finite].abs().max().item())
        top = max(top, e[finite].abs().max().item())
    if dtype == torch.float64:  # there is nothing more exact to compare with
        return 1e-12 * max(1.0, top)
    return factor * error + floor


def _parts(t: Parts) -> Sequence[torch.Tensor]:
    return [t] if isinstance(t, torch.Tensor) else t


# ---- floors


def lse_floor(lse: torch.Tensor) -> float:
    """Two more roundings, in the dtype in which it is returned: kernels keep it in units of log2 and convert at the
    end."""
    return 2 * torch.finfo(lse.dtype).eps * _top(lse)


def summation_floor(exact: Parts, roundings: float, dtype: torch.dtype) -> float:
    """Return the floor for kernels that add one product after the other, where PyTorch adds in blocks: so many
    roundings of the largest number."""
    return roundings * torch.finfo(dtype).eps * max(_top(e) for e in _parts(exact)) if roundings else 0.0


def gradient_floor(
    name: str, problem: Problem, inputs: Inputs, lse: torch.Tensor, dout: torch.Tensor, exact: torch.Tensor
) -> float:
    """Return the error of what a backward that is given `out` and the LSE, both rounded, cannot know. A rounding of the
    LSE changes every p of its row by as much, relatively; delta = rowsum(dout * out) and dp = dout v, which textbook
    attention makes cancel exactly, come from different sums. It matters for fp32 only: these are roundings in the dtype
    of the LSE, and 16 bits hide them. The gradient of a sink, one number, is a sum of delta over all rows: there the
    rounding of `out` counts."""
    if problem.empty:
        return 0.0
    dp = dout.double().norm(dim=-1).max().item() * inputs.v.double().norm(dim=-1).max().item()
    dp /= dropout.kept_share(problem.dropout)
    scale = abs(problem.scale)
    reach = {"q": scale * _top(inputs.k), "k": scale * _top(inputs.q), "v": 0.0, "bias": 1.0}
    reach["sinks"] = problem.q.total**0.5
    floor = 3 * torch.finfo(lse.dtype).eps * (_top(lse) * _top(exact) + dp * reach[name])
    return floor + _noise_of_delta(problem, inputs, lse, dout) if name == "sinks" else floor


def _noise_of_delta(problem: Problem, inputs: Inputs, lse: torch.Tensor, dout: torch.Tensor) -> float:
    """Three standard deviations of the error of Σ p delta, a sum over rows with p the sink's weight, if every number of
    `out` is rounded on its own. `out` is taken to be as large as the values; it is a mean of them, hence no larger."""
    assert inputs.sinks is not None
    weights = (inputs.sinks.double()[:, None] - lse.double()).exp().nan_to_num(0.0, 0.0).clamp(max=1)
    rounding = torch.finfo(problem.dtype).eps / 12**0.5
    rms = [t.double().square().mean().sqrt().item() for t in (dout, inputs.v)]
    return 3 * rounding * rms[0] * rms[1] * problem.dim_v**0.5 * weights.square().sum((0, 2)).max().sqrt().item()


def _top(t: torch.Tensor) -> float:
    """The largest finite absolute value."""
    finite = t[torch.isfinite(t)]
    return finite.abs().max().item() if finite.numel() else 0.0
