"""Every case that the kernels support, both kernels, both dtypes, against float64, from outputs full of NaN."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from cases import CASES, Case
from gpu.kernels import DTYPES, KERNELS, attend, check, compile_together, kernels_here, problem_of, references
from kernel_cases import SUPPORTED
from oracle import prepare

import strobe
from strobe.backends import dispatch
from strobe.variants.mask import causal, causal_top_left
from strobe.variants.ready_made import chunked, prefix, window

# Many blocks, many rounds, and lengths at which a tile table may switch.
LARGE = [
    Case("g_64", 1024, 1024, batch=4, heads=16, heads_k=16, dim=64),
    Case("g_64_causal", 2048, 2048, batch=2, heads=12, heads_k=4, dim=64, mask=causal),
    Case("g_96_causal", 1500, 1700, heads=8, heads_k=8, dim=96, mask=causal),
    Case("g_128", 1024, 1024, batch=4, heads=16, heads_k=16, dim=128),
    Case("g_128_causal", 3000, 3000, batch=1, heads=16, heads_k=2, dim=128, mask=causal),
    Case("g_128_long_keys", 300, 5000, batch=1, heads=8, heads_k=1, dim=128, mask=causal),
    Case("g_128_window", 4096, 4096, batch=1, heads=4, heads_k=4, dim=128, mask=window(1024, 0)),
    Case("g_128_window_both", 2000, 2500, batch=1, heads=4, heads_k=4, dim=128, mask=window(300, 200)),
    Case("g_128_prefix", 1500, 1500, batch=1, heads=4, heads_k=4, dim=128, mask=prefix(700)),
    Case("g_128_chunked", 1500, 1500, batch=1, heads=4, heads_k=4, dim=128, mask=chunked(512) & causal),
    Case("g_128_top_left", 1500, 900, batch=1, heads=4, heads_k=4, dim=128, mask=causal_top_left),
    Case(
        "g_128_softcap_sinks", 1500, 1500, batch=1, heads=8, heads_k=2, dim=128, mask=causal, softcap=15.0, sinks=True
    ),
    Case(
        "g_128_packed",
        0,
        0,
        heads=8,
        heads_k=2,
        dim=128,
        mask=causal,
        lengths=((1000, 1000), (1, 1), (0, 0), (513, 700), (128, 2000), (0, 5), (2000, 128), (77, 77)),
    ),
    Case("g_192_128_causal", 1500, 1500, batch=1, heads=16, heads_k=16, dim=192, dim_v=128, mask=causal),
    Case("g_192", 1000, 1000, batch=2, heads=8, heads_k=8, dim=192),
    Case("g_256_causal", 1500, 1500, batch=2, heads=8, heads_k=8, dim=256, mask=causal),
    Case("g_80", 1000, 1300, batch=2, heads=6, heads_k=2, dim=80, mask=causal),
    Case("g_one_query", 1, 4000, batch=8, heads=16, heads_k=2, dim=128),
    # from here on keys are split among blocks
    Case("g_one_query_long", 1, 30000, batch=1, heads=64, heads_k=8, dim=128),
    Case("g_192_rows", 192, 3000, batch=1, heads=60, heads_k=60, dim=64, mask=causal),
    Case("g_192_rows_softcap_sinks", 150, 2000, batch=2, heads=30, heads_k=15, dim=96, softcap=8.0, sinks=True),
    Case("g_one_query_group_of_7", 1, 9000, batch=2, heads=14, heads_k=2, dim=128),
    Case("g_one_query_window_sinks", 1, 9000, batch=2, heads=16, heads_k=4, dim=64, mask=window(5000, 0), sinks=True),
    Case("g_few_queries", 9, 8000, batch=2, heads=32, heads_k=4, dim=128, mask=causal),
    Case("g_few_queries_96", 5, 7000, batch=1, heads=8, heads_k=8, dim=96, mask=causal, softcap=20.0),
    Case("g_few_queries_256", 16, 5000, batch=1, heads=8, heads_k=1, dim=256, mask=causal),
    Case("g_few_queries_192_128", 3, 5000, batch=1, heads=16, heads_k=4, dim=192, dim_v=128),
    Case("g_piece_of_a_prompt", 256, 16000, batch=1, heads=8, heads_k=1, dim=128, mask=causal),
    Case(
        "g_packed_caches", 0, 0, heads=8, heads_k=2, dim=128, mask=causal, lengths=((1, 7000), (0, 9), (3, 900), (1, 1))
    ),
    Case("g_rising", 256, 4096, batch=1, heads=4, heads_k=4, dim=128, scores="rising"),
    Case("g_falling", 256, 4096, batch=1, heads=4, heads_k=4, dim=128, scores="falling", mask=causal),
    Case("g_huge", 300, 2000, batch=1, heads=4, heads_k=4, dim=128, scores="huge", mask=causal),
]
ALL = [*SUPPORTED, *LARGE]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> Iterator[None]:
    compile_together((kernel, problem_of(case, dtype)) for case in ALL for dtype in DTYPES for kernel in kernels_here())
    yield
    expected.cache_clear()


@functools.lru_cache(maxsize=4)  # the kernels of one case follow each other
def expected(case: Case, dtype: torch.dtype) -> tuple:
    return references(*prepare(case, dtype, "cuda"))


@pytest.mark.parametrize("case", ALL, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("kernel", KERNELS)
def test_case(kernel: str, dtype: torch.dtype, case: Case) -> None:
    reason = dispatch.get(kernel).supports(problem_of(case, dtype))
    if reason is not None and "compute capability" in reason:
        pytest.skip(reason)
    assert reason is None
    check(*attend(case, dtype, kernel), expected(case, dtype))


@pytest.mark.parametrize("case", [c for c in CASES if c not in SUPPORTED], ids=str)
def test_what_the_kernels_leave_to_others_works_all_the_same(case: Case) -> None:
    """Chosen automatically, and never wrong; dropout keeps the same weights on every device."""
    from cases import make

    q, k, v, kwargs = make(case, torch.bfloat16, "cuda")
    call = strobe.attention if case.lengths is None else strobe.attention_varlen
    out, lse = call(q, k, v, **kwargs, return_lse=True)
    if case.lengths is not None:
        out, lse = out[None], lse[None]
    problem, inputs = prepare(case, torch.bfloat16, "cuda")
    if problem.empty:
        assert not out.any() and lse.shape == (problem.batch, problem.heads, problem.len_q)
    else:
        check(out.transpose(1, 2), lse, references(problem, inputs))


@pytest.mark.parametrize("kernel", KERNELS)
def test_layouts_agree(kernel: str) -> None:
    """Equal numbers in bshd and bhsd memory, and in leading axes left out, give the same bits."""
    if kernel not in kernels_here():
        pytest.skip("no Hopper GPU")
    q, k, v = (torch.randn(2, 200, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out = strobe.attention(q, k, v, mask=causal, backend=kernel)
    bhsd = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    other = strobe.attention(*bhsd, mask=causal, layout="bhsd", backend=kernel)
    assert torch.equal(out, other.transpose(1, 2)) and other.is_contiguous() and out.is_contiguous()
    assert torch.equal(strobe.attention(q[0], k[0], v[0], mask=causal, layout="bshd", backend=kernel), out[0])
    single = strobe.attention(*(t[0, :, 0].contiguous() for t in (q, k, v)), mask=causal, backend=kernel)
    assert torch.equal(single, out[0, :, 0])
