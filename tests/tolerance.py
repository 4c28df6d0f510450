"""The tolerance rule of `strobe.measure.tolerance`, as an assertion."""

from __future__ import annotations

import torch

from strobe.measure.tolerance import FORWARD, GRADIENTS, compare, gradient_floor, lse_floor

__all__ = ["FORWARD", "GRADIENTS", "check", "gradient_floor", "lse_floor"]


def check(
    what: str,
    found: torch.Tensor,
    exact: torch.Tensor,
    same_dtype: torch.Tensor,
    factor: float = FORWARD,
    floor: float = 0.0,
) -> None:
    """Fails with numbers. `floor`: what is allowed beyond the rule (see `lse_floor` and `gradient_floor`)."""
    assert found.shape == exact.shape, f"{what}: shape {tuple(found.shape)}, should be {tuple(exact.shape)}"
    verdict = compare(what, found, exact, same_dtype, factor, floor)
    assert verdict.passed, str(verdict)
