"""Users' score and mask functions in the kernels, against fp64."""

from __future__ import annotations

from dataclasses import replace

import function_cases
import pytest
import torch

import strobe

LONG = {
    "alibi": (1000, 1500),
    "packed": (700, 900),
    "rounding": (1000, 1000),
    "mask_causal_document": (1024, 1024),
    "mask_neighbourhood": (1024, 1024),
    "mask_late": (500, 700),
}


@pytest.mark.parametrize("backend", ["sm90", "sm80"])
@pytest.mark.parametrize("name", [*function_cases.CASES, *(f"{name} long" for name in LONG)])
def test_against_plain_torch(name: str, backend: str) -> None:
    short, _, long = name.partition(" ")
    case = function_cases.CASES[short]
    if long:
        case = replace(case, len_q=LONG[short][0], len_k=LONG[short][1])
    if backend == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    function_cases.check(case, case.tensors("cuda"), backend)


def test_kernels_are_chosen() -> None:
    q, k, v = (torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ids = torch.arange(256, device="cuda") // 60
    functions = {
        "score": lambda s, b, h, q, k: s - 0.1 * (q - k).abs(),
        "mask": lambda b, h, q, k: ids[q] == ids[k],
    }
    for name, function in functions.items():
        assert strobe.explain(q, k, v, **{name: function}).backend in ("sm90", "sm80"), name


def test_a_second_call_sees_other_tensors_and_numbers() -> None:
    """Repeated calls are launched with new addresses, and numbers are arguments of the same kernel."""
    q, k, v = (torch.randn(1, 200, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for i in range(3):
        ids, table = torch.arange(200, device="cuda") // (30 + i), torch.randn(4, 399, device="cuda")
        options = {
            "mask": strobe.mask_function(lambda b, h, q, k, ids=ids: ids[q] == ids[k]),
            "score": strobe.score_function(lambda s, b, h, q, k, t=table, i=i: 0.5 * (i + 1) * s + t[h, k - q + 199]),
        }
        found = strobe.attention(q, k, v, **options)
        exact = strobe.attention(q.float(), k.float(), v.float(), **options)
        assert (found.float() - exact).abs().max() < 0.03
