"""Users' functions of scores and masks: traced, evaluated, differentiated, split into intervals, remembered and sent."""

from __future__ import annotations

import function_cases
import pytest
import torch

import strobe
import strobe.tiled


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("name", function_cases.CASES)
def test_against_plain_torch(name: str, backend: str) -> None:
    case = function_cases.small(function_cases.CASES[name])
    with strobe.tiled.block_sizes(32, 48):  # several tiles, some of them ragged
        function_cases.check(case, case.tensors(dtype=torch.float64), backend, 1e-6)


# ---- captured tensors that learn -------------------------------------------------------------------------------------

LEARNING = [n for n, c in function_cases.SCORES.items() if c.captured is not None and n not in ("packed", "hidden")]


@pytest.mark.parametrize("backend", ["tiled", "reference", None])
@pytest.mark.parametrize("name", [*LEARNING, "mask_both"])
def test_gradients_of_captured_tensors(name: str, backend: str | None) -> None:
    """Those that no function reads stay without one, as in torch."""
    case = function_cases.small(function_cases.CASES[name])
    x, captured = case.tensors(dtype=torch.float64)
    used = {n: t.double() if t.is_floating_point() else t for n, t in captured.items() if n in _read_by(name)}
    with strobe.tiled.block_sizes(32, 48):
        function_cases.check(case, (x, captured | function_cases.learning(used)), backend, 1e-6)


def _read_by(name: str) -> tuple[str, ...]:
    more = {"gaussian": ("sigma",), "swin": ("swin",), "t5": ("buckets",), "mask_both": ("table", "ids")}
    more |= {"relative": ("table",), "one_query": ("table",)}
    more |= dict.fromkeys(("tempered", "tempered_varlen"), ("slope", "temperature"))
    return more.get(name, ("slope",))
