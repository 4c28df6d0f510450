"""Biases, mask tensors and captured tensors in the kernels, against fp64."""

from __future__ import annotations

from dataclasses import replace

import pair_cases
import pytest
import torch

import strobe

LONG = {
    "bias": (1000, 1500),
    "mask": (1000, 1500),
    "alibi": (1024, 1024),
    "bias_by_head": (700, 600),
    "bias_wide": (500, 700),
}


@pytest.mark.parametrize("backend", ["sm90", "sm80"])
@pytest.mark.parametrize("name", [*pair_cases.CASES, *(f"{name} long" for name in LONG)])
def test_against_fp64(name: str, backend: str) -> None:
    short, _, long = name.partition(" ")
    case = pair_cases.CASES[short]
    if long:
        case = replace(case, len_q=LONG[short][0], len_k=LONG[short][1])
    if backend == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    pair_cases.check(case, case.tensors("cuda"), backend)


def test_kernels_are_chosen() -> None:
    q, k, v = (torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    tensors = {
        "bias": torch.randn(4, 256, 256, device="cuda"),
        "mask": torch.ones(256, 256, device="cuda").tril().bool(),
    }
    tensors |= {"score": strobe.alibi(torch.rand(4, device="cuda"))}
    for name, t in tensors.items():
        assert strobe.explain(q, k, v, **{name: t}).backend in ("sm90", "sm80"), name


def test_a_second_call_sees_other_tensors() -> None:
    """Repeated calls are launched with new addresses: bias and slopes are not those of the first."""
    q, k, v = (torch.randn(1, 200, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for _ in range(3):
        bias, slopes = torch.randn(4, 200, 200, device="cuda"), torch.rand(4, device="cuda")
        for options in ({"bias": bias}, {"score": strobe.alibi(slopes)}):
            found = strobe.attention(q, k, v, **options)
            exact = strobe.attention(q.float(), k.float(), v.float(), **options)
            assert (found.float() - exact).abs().max() < 0.03
