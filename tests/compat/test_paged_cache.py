"""Caches in pages under flash-attn 2, FlashAttention 3 and PyTorch's own operator: what the same functions compute of the
same cache in a row, and what they write into it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compat import textbook

from strobe.compat import aten_flash, flash_attn, flash_attn_2_cuda, flash_attn_interface as fa3
from strobe.compat.flash_attn import kernels

BATCH, HEADS, HEADS_K, DIM = 3, 4, 2, 16
USED = [5, 0, 17]
FUNCTIONS = {flash_attn.flash_attn_with_kvcache: "block_table", fa3.flash_attn_with_kvcache: "page_table"}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def caches(page: int, capacity: int = 24) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Contiguous ones, the same in pages, and the table. NaN wherever nothing has been written."""
    width = -(-capacity // page)
    table = torch.randperm(BATCH * width + 2, generator=torch.Generator().manual_seed(9))[: BATCH * width]
    table = table.view(BATCH, width).int()
    contiguous, paged = [], []
    for seed in (1, 2):
        cache = random(BATCH, width * page, HEADS_K, DIM, seed=seed)
        for i, n in enumerate(USED):
            cache[i, n:] = torch.nan
        pool = torch.full((BATCH * width + 2, page, HEADS_K, DIM), torch.nan, dtype=torch.float64)
        pool[table.long()] = cache.unflatten(1, (width, page))
        contiguous.append(cache)
        paged.append(pool)
    return contiguous, paged, table


def rotary_tables(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(64, dtype=torch.float64)[:, None] * 100.0 ** -(torch.arange(dim // 2).double() / (dim // 2))
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (6, -1)}, {"window_size": (7, 1), "softcap": 2.0}, {"leftpad": True}],
    ids=str,
)
@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize("page", [1, 8, 10])
def test_pages_are_a_cache(page: int, new: int, options: dict[str, Any], function: Any) -> None:
    contiguous, paged, table = caches(page)
    q = random(BATCH, 3, HEADS, DIM)
    k, v = (random(BATCH, new, HEADS_K, DIM, seed=s) if new else None for s in (3, 4))
    seqlens = torch.tensor(USED, dtype=torch.int32)
    options = dict(options)
    if options.pop("leftpad", False):
        options["cache_leftpad"] = torch.tensor([2, 0, 4], dtype=torch.int32)
    if new:
        cos, sin = rotary_tables(DIM)
        options |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": page == 8}
    options |= {"cache_seqlens": seqlens, "return_softmax_lse": True}
    expected = function(q, *contiguous, k, v, **options)
    found = function(q, *paged, k, v, **options, **{FUNCTIONS[function]: table})
    for a, b in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(a, b)
    for pool, cache in zip(paged, contiguous, strict=True):
        torch.testing.assert_close(pool[table.long()].flatten(1, 2), cache, equal_nan=True)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("new", [0, 3])
def test_an_index_picks_rows_of_the_table(new: int, function: Any) -> None:
    contiguous, paged, table = caches(8)
    where = torch.tensor([2, 0], dtype=torch.int32)
    q = random(2, 3, HEADS, DIM)
    k, v = (random(2, new, HEADS_K, DIM, seed=s) if new else None for s in (3, 4))
    options: dict[str, Any] = {"cache_seqlens": torch.tensor(USED, dtype=torch.int32)[where.long()], "causal": True}
    expected = function(q, *contiguous, k, v, **options, cache_batch_idx=where)
    found = function(q, *paged, k, v, **options, cache_batch_idx=where, **{FUNCTIONS[function]: table})
    torch.testing.assert_close(found, expected)
    for pool, cache in zip(paged, contiguous, strict=True):
        torch.testing.assert_close(pool[table.long()].flatten(1, 2), cache, equal_nan=True)


def test_one_length_for_all_and_slopes() -> None:
    contiguous, paged, table = caches(8)
    contiguous, paged = ([t.nan_to_num() for t in ts] for ts in (contiguous, paged))
    q, slopes = random(BATCH, 2, HEADS, DIM), torch.rand(HEADS)
    for seqlens in (11, None):
        options: dict[str, Any] = {"cache_seqlens": seqlens, "alibi_slopes": slopes, "causal": True}
        expected = flash_attn.flash_attn_with_kvcache(q, *contiguous, **options)
        found = flash_attn.flash_attn_with_kvcache(q, *paged, **options, block_table=table)
        torch.testing.assert_close(found, expected)


def test_packed_queries_and_new_keys() -> None:
    lengths = [1, 4, 2]
    cu = torch.tensor([0, 1, 5, 7], dtype=torch.int32)
    contiguous, paged, table = caches(8)
    q, k, v = random(7, HEADS, DIM), random(7, HEADS_K, DIM, seed=3), random(7, HEADS_K, DIM, seed=4)
    options: dict[str, Any] = {
        "cache_seqlens": torch.tensor(USED, dtype=torch.int32), "cu_seqlens_q": cu, "cu_seqlens_k_new": cu,
        "max_seqlen_q": max(lengths), "causal": True, "return_softmax_lse": True,
    }  # fmt: skip
    expected = fa3.flash_attn_with_kvcache(q, *contiguous, k, v, **options)
    found = fa3.flash_attn_with_kvcache(q, *paged, k, v, **options, page_table=table)
    for a, b in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(paged[0][table.long()].flatten(1, 2), contiguous[0], equal_nan=True)


@pytest.mark.parametrize("page", [1, 8, 256])
def test_varlen_functions(page: int) -> None:
    """The calls are those of flash-attn's own suite: inputs that require gradients get an output, and no gradient."""
    contiguous, paged, table = caches(page)
    counts = [2, 1, 6]
    q = random(sum(counts), HEADS, DIM).requires_grad_()
    cu_q = torch.tensor([0, 2, 3, 9], dtype=torch.int32)
    cu_k = torch.tensor([0, *USED]).cumsum(0).int()
    k, v = (t.requires_grad_() for t in paged)
    found, lse, _ = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 6, 17, causal=True, block_table=table, return_attn_probs=True
    )
    assert not found.requires_grad
    alone = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 6, 17, causal=True, block_table=table)
    packed = [torch.cat([t[i, :n] for i, n in enumerate(USED)]) for t in contiguous]
    with torch.no_grad():
        expected = flash_attn.flash_attn_varlen_func(q, *packed, cu_q, cu_k, 6, 17, causal=True, return_attn_probs=True)
    torch.testing.assert_close((found, lse), expected[:2])
    torch.testing.assert_close(alone, found)
    used = torch.tensor(USED, dtype=torch.int32)
    options = (0.0, DIM**-0.5, True)
    below = kernels._flash_attn_varlen_forward(q, k, v, cu_q, cu_k, 6, 17, *options, block_table=table)
    torch.testing.assert_close(below[:2], expected[:2])
    below = flash_attn_2_cuda.varlen_fwd(
        q, k, v, None, cu_q, cu_k, used, None, table, None, 6, 17, 0.0, DIM**-0.5, False, True, -1, -1, 0.0, False
    )
    torch.testing.assert_close(below[0], expected[0])
    out, lse, *_ = fa3._flash_attn_forward(
        q, k, v, cu_seqlens_q=cu_q, seqused_k=used, max_seqlen_q=6, page_table=table, causal=True
    )
    torch.testing.assert_close(out, expected[0])
    out, lse, *_ = aten_flash._flash_forward(
        q.detach(), k.detach(), v.detach(), cu_q, cu_k, 6, 17, 0.0, True, False, seqused_k=used, block_table=table
    )
    torch.testing.assert_close(out, expected[0])
    one, one_lse, _ = textbook.attention(q[None, 3:], *(t[2:3, :17] for t in contiguous), causal=True)
    torch.testing.assert_close(found[3:], one[0].detach())


def test_the_extension_module_takes_pages() -> None:
    contiguous, paged, table = caches(8)
    q, used = random(BATCH, 2, HEADS, DIM), torch.tensor(USED, dtype=torch.int32)
    rest: Any = (None, None, 0.25, True, -1, -1, 0.0, True, 0)
    expected = flash_attn_2_cuda.fwd_kvcache(q, *contiguous, None, None, used, None, None, None, None, None, *rest)
    found = flash_attn_2_cuda.fwd_kvcache(q, *paged, None, None, used, None, None, None, None, table, *rest)
    torch.testing.assert_close(found, expected)


def test_errors_come_before_anything_is_written() -> None:
    _, paged, table = caches(8)
    before = paged[0].clone()
    q, k = random(BATCH, 3, HEADS, DIM), random(BATCH, 3, HEADS_K, DIM)
    call = flash_attn.flash_attn_with_kvcache
    full = torch.tensor([20, 21, 22], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="the cache holds 24 rows; cache_seqlens and the new keys come to 25"):
        call(q, *paged, k, k, cache_seqlens=full, block_table=table)
    with pytest.raises(RuntimeError, match="cache_batch_idx must be from 0 to 2"):
        call(q, *paged, cache_seqlens=full, block_table=table, cache_batch_idx=full)
    with pytest.raises(RuntimeError, match="the table of pages must be int32"):
        call(q, *paged, cache_seqlens=full, block_table=table.long())
    with pytest.raises(RuntimeError, match="entry 1 of sequence 2 is 99"):
        wrong = table.clone()
        wrong[2, 1] = 99
        call(q, *paged, cache_seqlens=torch.tensor(USED).int(), block_table=wrong)
    wrong[0, 0] = -1
    with pytest.raises(RuntimeError, match="the table has no page for some of the new keys"):
        call(q, *paged, k, k, cache_seqlens=torch.tensor(USED).int() * 0, block_table=wrong)
    with pytest.raises(RuntimeError, match="dropout"):
        cu = torch.tensor([0, 3, 6, 9], dtype=torch.int32)
        flash_attn.flash_attn_varlen_func(q.flatten(0, 1), *paged, cu, cu, 3, 3, 0.5, block_table=table)
    torch.testing.assert_close(paged[0], before, equal_nan=True)
