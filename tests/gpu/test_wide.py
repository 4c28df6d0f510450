"""Head dims above 256 on Hopper, both ways, both dtypes, against float64."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from gpu import test_autograd
from gpu.kernels import DTYPES, attend, check, check_repeats, compile_together, hopper, problem_of, references
from kernel_cases import WIDE_CASES
from oracle import prepare

from strobe.backends import dispatch
from strobe.variants.mask import causal
from strobe.variants.ready_made import window

pytestmark = pytest.mark.skipif(not hopper(), reason="no Hopper GPU")

LARGE = [
    Case("g_512", 1000, 1100, batch=2, heads=4, heads_k=2, dim=512),
    Case("g_512_causal", 1500, 1500, batch=1, heads=8, heads_k=1, dim=512, mask=causal),
    Case("g_512_window", 1500, 1500, batch=1, heads=4, heads_k=4, dim=512, mask=window(300, 0)),
    Case("g_320_causal", 1000, 1300, batch=2, heads=6, heads_k=2, dim=320, mask=causal),
    Case("g_384_softcap_sinks", 700, 900, batch=1, heads=8, heads_k=2, dim=384, mask=causal, softcap=15.0, sinks=True),
    Case("g_512_packed", 0, 0, heads=8, heads_k=2, dim=512, mask=causal,
         lengths=((1000, 1000), (1, 1), (0, 0), (513, 700), (0, 5), (700, 128))),
]  # fmt: skip
DECODE = [
    Case("g_512_one_query", 1, 9000, batch=2, heads=16, heads_k=4, dim=512, mask=causal),
    Case("g_512_few_queries", 9, 5000, batch=1, heads=8, heads_k=2, dim=512, mask=causal),
]
ALL = [*WIDE_CASES, *LARGE]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    for which in (problem_of, test_autograd.backward_problem):
        compile_together(("sm90", which(case, dtype)) for case in ALL for dtype in DTYPES)


@pytest.mark.parametrize("case", [*ALL, *DECODE], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_forward(dtype: torch.dtype, case: Case) -> None:
    assert dispatch.get("sm90").supports(problem_of(case, dtype)) is None
    check(*attend(case, dtype, "sm90"), references(*prepare(case, dtype, "cuda")))


@pytest.mark.parametrize("case", ALL, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_gradients(dtype: torch.dtype, case: Case) -> None:
    test_autograd.test_gradients("sm90", dtype, case)


def test_repeated_calls_and_graphs_have_the_same_bits() -> None:
    """Launches differ in where V and O begin; a later call and a captured one have other addresses."""
    q, k, v = (torch.randn(1, 700, n, 512, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2))
    check_repeats(q, k, v)
