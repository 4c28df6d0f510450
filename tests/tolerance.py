"""The tolerance rule, one for all backends: finite, and no further from float64 than twice what PyTorch's ordinary
operations in the same dtype are (three times, for gradients), plus a few roundings."""

from __future__ import annotations

import torch

from strobe.arguments import Inputs
from strobe.problem import Problem

FORWARD, GRADIENTS = 2.0, 3.0


def allowed(exact: torch.Tensor, same_dtype: torch.Tensor, dtype: torch.dtype, factor: float = FORWARD) -> float:
    """The largest error that passes. `exact`: in float64; `same_dtype`: what PyTorch finds in `dtype`."""
    finite = torch.isfinite(exact)
    if not finite.any():
        return 0.0
    if dtype == torch.float64:  # there is nothing more exact to compare with
        return 1e-12 * max(1.0, exact[finite].abs().max().item())
    rounded = exact[finite].to(dtype)
    floor = 2 * ((rounded + 0.3 - 0.3) - rounded).abs().max().item()
    error = (same_dtype.double() - exact)[finite].abs().max().item()
    return factor * error + floor


def check(
    what: str,
    found: torch.Tensor,
    exact: torch.Tensor,
    same_dtype: torch.Tensor,
    factor: float = FORWARD,
    floor: float = 0.0,
) -> None:
    """Fails with numbers. Infinities (the LSE of a row that sees nothing) must be where they belong; NaN never passes.
    `floor`: what is allowed beyond the rule (see `lse_floor` and `gradient_floor`)."""
    assert found.shape == exact.shape, f"{what}: shape {tuple(found.shape)}, should be {tuple(exact.shape)}"
    assert not found.isnan().any(), f"{what}: {int(found.isnan().sum())} of {found.numel()} are NaN"
    finite = torch.isfinite(exact)
    assert torch.equal(found.double()[~finite], exact[~finite]), f"{what}: infinities are wrong"
    assert torch.isfinite(found[finite]).all(), f"{what}: infinite where it should be finite"
    if not finite.any():
        return
    error = (found.double() - exact)[finite].abs().max().item()
    limit = allowed(exact, same_dtype, found.dtype, factor) + floor
    assert error <= limit, f"{what}: error {error:.3e}, allowed {limit:.3e}"


def lse_floor(lse: torch.Tensor) -> float:
    """Two more roundings, in the dtype in which it is returned: kernels keep it in units of log2 and convert at the
    end."""
    finite = lse[torch.isfinite(lse)]
    return 2 * torch.finfo(lse.dtype).eps * finite.abs().max().item() if finite.numel() else 0.0


def gradient_floor(
    name: str, problem: Problem, inputs: Inputs, lse: torch.Tensor, dout: torch.Tensor, exact: torch.Tensor
) -> float:
    """What a backward that is given `out` and the LSE, both rounded, cannot know. A rounding of the LSE changes every p
    of its row by as much, relatively; delta = rowsum(dout * out) and dp = dout v, which textbook attention makes cancel
    exactly, come from different sums. Of interest for fp32 only: these are roundings in the dtype of the LSE, and 16
    bits hide
    them."""
    if problem.empty:
        return 0.0
    eps = torch.finfo(lse.dtype).eps

    def largest(t: torch.Tensor) -> float:
        return t.abs().max().item()

    dp = dout.double().norm(dim=-1).max().item() * inputs.v.double().norm(dim=-1).max().item() / (1 - problem.dropout)
    scale = abs(problem.scale)
    reach = {"q": scale * largest(inputs.k), "k": scale * largest(inputs.q), "v": 0.0, "bias": 1.0}
    reach["sinks"] = problem.q.total**0.5
    finite = lse[torch.isfinite(lse)]
    return 3 * eps * ((largest(finite) if finite.numel() else 0.0) * largest(exact) + dp * reach[name])
