"""Users' functions at their edges in the kernels: what is hidden stays hidden, and integers are those of `tiled`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from everyday import everyday

import strobe
from strobe.emulator import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

EVEN = torch.arange(100) % 2 == 0
SMALL = torch.arange(100, dtype=torch.int8)
CASES: dict[str, dict[str, Any]] = {
    # A slope of 1 / 0 where nobody sees: hidden by the interval, and by the condition.
    "steep": {"score": lambda s, b, h, q, k: s / (q - k), "mask": lambda b, h, q, k: k < q},
    "steep_condition": {"score": lambda s, b, h, q, k: s / (q - k), "mask": lambda b, h, q, k: q != k},
    "bias": {"mask": lambda b, h, q, k: k % 2 == 0, "bias": True},
    "integers": {"mask": lambda b, h, q, k: (k * 900_000_000 < 0) | (SMALL[q] + SMALL[k] > 128)},
    "table": {"score": lambda s, b, h, q, k: 2.0 * s + SMALL[(s * 4.0).floor().int() + 50]},
}
FAMILIES = {"sm90": ("sm90", 64), "two_kernels": ("sm90", 192), "sm80": ("sm80", 64)}
EVERYDAY = ["steep sm90", "steep sm80", "bias sm90"]


def results(tensors: list[torch.Tensor], backend: str, options: dict[str, Any]) -> list[torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    if "bias" in options:
        bias = torch.randn(70, 100, generator=torch.Generator().manual_seed(2)).masked_fill(~EVEN, torch.nan)
        options = options | {"bias": bias.to(leaves[0].dtype)}
    out = strobe.attention(*leaves, backend=backend, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    return [out, *torch.autograd.grad((out.double() * weights).sum(), leaves)]


@pytest.mark.parametrize("name", everyday([f"{case} {family}" for case in CASES for family in FAMILIES], EVERYDAY))
def test_against_fp64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, family = name.split()
    family, dim = FAMILIES[family]
    monkeypatch.setenv("STROBE_EMULATE", family)
    generator = torch.Generator().manual_seed(1)
    tensors = [
        torch.randn(1, n, heads, dim, generator=generator).bfloat16() for n, heads in ((70, 2), (100, 1), (100, 1))
    ]
    found = results(tensors, "emulator", CASES[case])
    exact = results([t.double() for t in tensors], "tiled", CASES[case])
    for f, e in zip(found, exact, strict=True):
        assert (f.double() - e).norm() <= 0.02 * e.norm()
