"""Caches longer than what is in use: written in place, turned by rotary embedding, read without a copy; flash-attn 2 and
FlashAttention 3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compat import textbook

import strobe
from strobe.compat import flash_attn, flash_attn_interface as fa3, kvcache
from strobe.compat.flash_attn.layers.rotary import apply_rotary_emb

BATCH, CAPACITY, HEADS, HEADS_K, DIM = 3, 24, 4, 2, 16
USED = [5, 0, 17]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def caches(batch: int = BATCH, used: list[int] | None = None) -> list[torch.Tensor]:
    """NaN wherever nothing has been written: nobody may look there."""
    found = []
    for seed in (1, 2):
        cache = random(batch, CAPACITY, HEADS_K, DIM, seed=seed)
        for i, n in enumerate(used or [CAPACITY] * batch):
            cache[i, n:] = torch.nan
        found.append(cache)
    return found


def rotary_tables(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(64, dtype=torch.float64)[:, None] * 100.0 ** -(torch.arange(dim // 2).double() / (dim // 2))
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("function", [flash_attn.flash_attn_with_kvcache, fa3.flash_attn_with_kvcache])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (6, -1)}, {"window": (7, 1), "softcap": 2.0}], ids=str
)
@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize("length", ["tensor", "int"])
def test_contiguous_cache(length: str, new: int, options: dict[str, Any], function: Any) -> None:
    used = USED if length == "tensor" else [5] * BATCH
    k_cache, v_cache = caches(used=used)
    before = k_cache.clone(), v_cache.clone()
    q = random(BATCH, 3, HEADS, DIM)
    k, v = (random(BATCH, new, HEADS_K, DIM, seed=s) if new else None for s in (3, 4))
    seqlens = torch.tensor(used, dtype=torch.int32) if length == "tensor" else used[0]
    names = {"window": "window_size"}
    theirs = {names.get(n, n): value for n, value in options.items()}
    out, lse, *_ = function(q, k_cache, v_cache, k, v, cache_seqlens=seqlens, return_softmax_lse=True, **theirs)
    alone = function(q, *(t.clone() for t in before), k, v, cache_seqlens=seqlens, **theirs)
    torch.testing.assert_close(alone, out)
    for i, n in enumerate(used):
        stop = n + new
        keys, values = before[0][i : i + 1, :n], before[1][i : i + 1, :n]
        if k is not None and v is not None:
            keys, values = torch.cat((keys, k[i : i + 1]), 1), torch.cat((values, v[i : i + 1]), 1)
        expected, expected_lse, _ = textbook.attention(q[i : i + 1], keys, values, **options)
        torch.testing.assert_close(out[i : i + 1], expected)
        if function is fa3.flash_attn_with_kvcache:  # there a row without keys has -inf
            expected_lse = torch.where(expected_lse == torch.inf, -torch.inf, expected_lse)
        torch.testing.assert_close(lse[i : i + 1], expected_lse)
        torch.testing.assert_close(k_cache[i, :stop], keys[0])
        torch.testing.assert_close(v_cache[i, :stop], values[0])
        assert k_cache[i, stop:].isnan().all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, DIM])
def test_rotary(rotary_dim: int, causal: bool, interleaved: bool) -> None:
    """A query counts as standing right behind the cache if there is no mask."""
    cos, sin = rotary_tables(rotary_dim)
    k_cache, v_cache = caches(used=USED)
    before = k_cache.clone(), v_cache.clone()
    q, k, v = (random(BATCH, 3, h, DIM, seed=s) for s, h in ((5, HEADS), (6, HEADS_K), (7, HEADS_K)))
    seqlens = torch.tensor(USED, dtype=torch.int32)
    out = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, seqlens, causal=causal, rotary_interleaved=interleaved
    )
    for i, n in enumerate(USED):
        turned_k = apply_rotary_emb(k[i : i + 1], cos, sin, interleaved, seqlen_offsets=n)
        if causal:
            turned_q = apply_rotary_emb(q[i : i + 1], cos, sin, interleaved, seqlen_offsets=n)
        else:
            rows = [
                apply_rotary_emb(q[i : i + 1, j : j + 1], cos, sin, interleaved, seqlen_offsets=n) for j in range(3)
            ]
            turned_q = torch.cat(rows, 1)
        keys = torch.cat((before[0][i : i + 1, :n], turned_k), 1)
        values = torch.cat((before[1][i : i + 1, :n], v[i : i + 1]), 1)
        torch.testing.assert_close(out[i : i + 1], textbook.attention(turned_q, keys, values, causal=causal)[0])
        torch.testing.assert_close(k_cache[i : i + 1, n : n + 3], turned_k)


@pytest.mark.parametrize("length", ["tensor", "int"])
def test_sequences_elsewhere_in_the_cache(length: str) -> None:
    where = [4, 0, 2]
    used = USED if length == "tensor" else [6] * BATCH
    k_cache, v_cache = caches(batch=5)
    before = k_cache.clone(), v_cache.clone()
    q, k, v = (random(BATCH, 2, h, DIM, seed=s) for s, h in ((5, HEADS), (6, HEADS_K), (7, HEADS_K)))
    out = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, causal=True, cache_batch_idx=torch.tensor(where, dtype=torch.int32),
        cache_seqlens=torch.tensor(used, dtype=torch.int32) if length == "tensor" else used[0],
    )  # fmt: skip
    for i, (at, n) in enumerate(zip(where, used, strict=True)):
        keys = torch.cat((before[0][at : at + 1, :n], k[i : i + 1]), 1)
        values = torch.cat((before[1][at : at + 1, :n], v[i : i + 1]), 1)
        torch.testing.assert_close(out[i : i + 1], textbook.attention(q[i : i + 1], keys, values, causal=True)[0])
        torch.testing.assert_close(k_cache[at, : n + 2], keys[0])
    untouched = [i for i in range(5) if i not in where]
    assert torch.equal(k_cache[untouched], before[0][untouched])


def test_left_padding() -> None:
    used, first = [9, 4, 24], [3, 0, 20]
    k_cache, v_cache = caches(used=used)
    for i, n in enumerate(first):
        k_cache[i, :n] = v_cache[i, :n] = torch.nan
    q = random(BATCH, 2, HEADS, DIM)
    for causal in (False, True):
        out = flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=torch.tensor(used, dtype=torch.int32), causal=causal,
            cache_leftpad=torch.tensor(first, dtype=torch.int32),
        )  # fmt: skip
        for i, (m, n) in enumerate(zip(first, used, strict=True)):
            expected, _, _ = textbook.attention(
                q[i : i + 1], k_cache[i : i + 1, m:n], v_cache[i : i + 1, m:n], causal=causal
            )
            torch.testing.assert_close(out[i : i + 1], expected)


def test_slopes_count_from_the_last_key_in_use() -> None:
    k_cache, v_cache = caches(used=[9, 12, 17])
    q, slopes = random(BATCH, 2, HEADS, DIM), torch.rand(BATCH, HEADS)
    seqlens = torch.tensor([9, 12, 17], dtype=torch.int32)
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=seqlens, alibi_slopes=slopes)
    for i, n in enumerate((9, 12, 17)):
        one = [t[i : i + 1] for t in (q, k_cache[:, :n], v_cache[:, :n])]
        torch.testing.assert_close(out[i : i + 1], textbook.attention(*one, slopes=slopes[i])[0])


def test_packed_queries_and_new_keys() -> None:
    """FlashAttention 3: sequences of different lengths against caches of different lengths."""
    lengths, cu = [2, 1, 4], torch.tensor([0, 2, 3, 7], dtype=torch.int32)
    k_cache, v_cache = caches(used=USED)
    before = k_cache.clone(), v_cache.clone()
    q, k, v = (random(7, h, DIM, seed=s) for s, h in ((5, HEADS), (6, HEADS_K), (7, HEADS_K)))
    cos, sin = rotary_tables(DIM)
    start = torch.tensor([1, 2, 3], dtype=torch.int32)
    out, lse, *partial = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=torch.tensor(USED, dtype=torch.int32),
        cu_seqlens_q=cu, cu_seqlens_k_new=cu, max_seqlen_q=4, rotary_seqlens=start, rotary_interleaved=False, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    assert lse.shape == (HEADS, 7) and partial == [None, None]
    for i, (n, m) in enumerate(zip(USED, lengths, strict=True)):
        rows = slice(int(cu[i]), int(cu[i + 1]))
        turned = [apply_rotary_emb(t[None, rows], cos, sin, seqlen_offsets=i + 1) for t in (q, k)]
        keys = torch.cat((before[0][i : i + 1, :n], turned[1]), 1)
        values = torch.cat((before[1][i : i + 1, :n], v[None, rows]), 1)
        expected, expected_lse, _ = textbook.attention(turned[0], keys, values, causal=True)
        torch.testing.assert_close(out[rows], expected[0])
        torch.testing.assert_close(lse[:, rows], expected_lse[0])
        torch.testing.assert_close(k_cache[i, : n + m], keys[0])


def test_errors_come_before_anything_is_written() -> None:
    k_cache, v_cache = caches()
    before = k_cache.clone()
    q, k = random(BATCH, 3, HEADS, DIM), random(BATCH, 3, HEADS_K, DIM)
    full = torch.tensor([20, 21, 22], dtype=torch.int32)
    with pytest.raises(ValueError, match="the cache holds 24 rows; cache_seqlens and the new keys come to 25"):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=full)
    with pytest.raises(ValueError, match="cache_seqlens must be given with k and v"):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, k)
    with pytest.raises(ValueError, match="k and v must be given together"):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, cache_seqlens=full)
    with pytest.raises(ValueError, match="batch size 3, q has 1"):
        flash_attn.flash_attn_with_kvcache(q[:1], k_cache, v_cache)
    with pytest.raises(ValueError, match="k and v must be given"):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, rotary_cos=q, rotary_sin=q)
    with pytest.raises(ValueError, match="the table of pages must be int32 of shape"):
        fa3.flash_attn_with_kvcache(q, k_cache, v_cache, page_table=full)
    assert torch.equal(k_cache, before)


def test_the_cache_is_read_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy of the cache, neither with a length for all nor with one for each."""
    seen: list[Any] = []
    monkeypatch.setattr(kvcache, "attend_to", lambda a: seen.append(a) or a.q)
    k_cache, v_cache = caches()
    q = random(BATCH, 3, HEADS, DIM)
    for seqlens in (7, torch.tensor(USED)):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=seqlens, causal=True)
        a = seen.pop()
        assert a.k.data_ptr() == k_cache.data_ptr() and a.v.data_ptr() == v_cache.data_ptr()
        assert a.bias is None and isinstance(a.mask, strobe.Mask)


FULL = torch.tensor([20, 20, 20], dtype=torch.int32)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_seqlens": -3}, "cache_seqlens must be from 0 to 24, got -3"),
        ({"cache_seqlens": 25}, "cache_seqlens must be from 0 to 24, got 25"),
        ({"cache_seqlens": ints(5, -3, 4)}, r"cache_seqlens must be from 0 to 24, got \[5, -3, 4\]"),
        ({"cache_seqlens": ints(5, 25, 4)}, "cache_seqlens must be from 0 to 24"),
        ({"cache_seqlens": ints(5, 4)}, r"cache_seqlens must be ints, one for each sequence, shape \(3,\)"),
        ({"cache_seqlens": torch.ones(3)}, "cache_seqlens must be ints"),
        ({"cache_seqlens": 5, "cache_batch_idx": ints(0, 1, -1)}, "cache_batch_idx must be from 0 to 2"),
        ({"cache_seqlens": 5, "cache_batch_idx": ints(0, 1, 3)}, "cache_batch_idx must be from 0 to 2"),
        ({"cache_seqlens": 5, "cache_leftpad": ints(0, -1, 2)}, "cache_leftpad must be from 0 to 5"),
        ({"cache_seqlens": 5, "cache_leftpad": ints(0, 6, 2)}, "cache_leftpad must be from 0 to 5"),
        ({"cache_seqlens": 5, "softcap": -1.0}, "softcap must be finite and at least 0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("function", [flash_attn.flash_attn_with_kvcache, fa3.flash_attn_with_kvcache])
def test_numbers_that_make_no_sense(function: Any, options: dict[str, Any], message: str) -> None:
    """Negative ones would count from the end of the cache."""
    with pytest.raises(ValueError, match=message) as found:
        function(random(BATCH, 3, HEADS, DIM), *caches(), **options)
    assert isinstance(found.value, RuntimeError)


def new(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return random(*shape).to(dtype)


@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        (new(1, 3, HEADS_K, DIM), new(1, 3, HEADS_K, DIM), r"k must be torch.float64 of shape \(3, 3, 2, 16\)"),
        (new(BATCH, 3, 1, DIM), new(BATCH, 3, 1, DIM), r"k must be torch.float64 of shape \(3, 3, 2, 16\)"),
        (new(BATCH, 3, HEADS_K, DIM), new(BATCH, 1, HEADS_K, DIM), r"v must be torch.float64 of shape \(3, 3, 2, 16\)"),
        (new(BATCH, 3, HEADS_K, DIM), new(BATCH, 3, HEADS_K, 1), r"v must be torch.float64 of shape \(3, 3, 2, 16\)"),
        (new(BATCH, 3, HEADS_K, DIM, dtype=torch.float32), new(BATCH, 3, HEADS_K, DIM), "k must be torch.float64"),
        (new(3, HEADS_K, DIM), new(3, HEADS_K, DIM), "k must be torch.float64 of shape"),
    ],
    ids=["batch", "heads", "length", "dim", "dtype", "axes"],
)
@pytest.mark.parametrize("seqlens", [5, ints(5, 0, 17)], ids=["int", "tensor"])
def test_new_keys_are_not_broadcast(seqlens: Any, k: torch.Tensor, v: torch.Tensor, message: str) -> None:
    k_cache, v_cache = caches()
    before = k_cache.clone(), v_cache.clone()
    for function in (flash_attn.flash_attn_with_kvcache, fa3.flash_attn_with_kvcache):
        with pytest.raises(ValueError, match=message):
            function(random(BATCH, 3, HEADS, DIM), k_cache, v_cache, k, v, cache_seqlens=seqlens)
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])


@pytest.mark.parametrize("missing", ["rotary_cos", "rotary_sin"])
def test_half_of_a_rotation_is_refused(missing: str) -> None:
    cos, sin = rotary_tables(DIM)
    tables = {"rotary_cos": cos, "rotary_sin": sin}
    del tables[missing]
    q, k = random(BATCH, 3, HEADS, DIM), random(BATCH, 3, HEADS_K, DIM)
    with pytest.raises(ValueError, match="rotary_cos and rotary_sin must be given together"):
        flash_attn.flash_attn_with_kvcache(q, *caches(), k, k, cache_seqlens=5, **tables)


@pytest.mark.parametrize("seqlens", [20, FULL], ids=["int", "tensor"])
def test_rotary_tables_that_end_too_early(seqlens: Any) -> None:
    cos, sin = (t[:21] for t in rotary_tables(DIM))
    k_cache, v_cache = caches()
    before = k_cache.clone()
    q, k = random(BATCH, 3, HEADS, DIM), random(BATCH, 3, HEADS_K, DIM)
    with pytest.raises(ValueError, match="rotary positions must be from 0 to 20, the rows of the tables; got 20 to 22"):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cos, sin, seqlens, causal=True)
    with pytest.raises(ValueError, match="rotary_seqlens must be from 0"):
        fa3.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, k, rotary_cos=cos, rotary_sin=sin, cache_seqlens=5, rotary_seqlens=ints(0, -1, 2)
        )
    assert torch.equal(k_cache, before)


def test_caches_and_queries_are_compared_before_anything_is_written() -> None:
    k_cache, v_cache = caches()
    before = k_cache.clone()
    q, k = random(BATCH, 3, HEADS, DIM), random(BATCH, 3, HEADS_K, DIM)
    with pytest.raises(ValueError, match="q and k_cache must have one dtype and one head dim"):
        flash_attn.flash_attn_with_kvcache(q[..., :8].contiguous(), k_cache, v_cache, k, k, cache_seqlens=5)
    with pytest.raises(ValueError, match="k_cache and v_cache must be"):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache[:, :8], k, k, cache_seqlens=5)
    with pytest.raises(ValueError, match="q has 3 heads, which is not a multiple of the 2"):
        flash_attn.flash_attn_with_kvcache(q[:, :, :3], k_cache, v_cache, k, k, cache_seqlens=5)
    assert torch.equal(k_cache, before)


@pytest.mark.parametrize("packed", [False, True])
def test_scores_of_queries_and_cached_values(packed: bool) -> None:
    """`qv`: absorbed attention."""
    k_cache, v_cache = caches(used=USED)
    before = k_cache.clone(), v_cache.clone()
    q, qv = random(BATCH, 3, HEADS, DIM), random(BATCH, 3, HEADS, DIM, seed=8)
    k, v = (random(BATCH, 3, HEADS_K, DIM, seed=s) for s in (3, 4))
    cos, sin = rotary_tables(DIM)
    options: dict[str, Any] = {"cu_seqlens_q": ints(0, 3, 6, 9), "max_seqlen_q": 3} if packed else {}
    queries = (q.flatten(0, 1), qv.flatten(0, 1)) if packed else (q, qv)
    out = fa3.flash_attn_with_kvcache(
        queries[0], k_cache, v_cache, k, v, queries[1], cos, sin, ints(*USED), causal=True, rotary_interleaved=False,
        **options,
    ).view(BATCH, 3, HEADS, DIM)  # fmt: skip
    for i, n in enumerate(USED):
        one = slice(i, i + 1)
        turned = [apply_rotary_emb(t[one], cos, sin, seqlen_offsets=n) for t in (q, k)]
        keys, values = torch.cat((before[0][one, :n], turned[1]), 1), torch.cat((before[1][one, :n], v[one]), 1)
        expected, _, _ = textbook.attention(
            torch.cat((turned[0], qv[one]), -1), torch.cat((keys, values), -1), values, causal=True
        )
        torch.testing.assert_close(out[one], expected)
    with pytest.raises(ValueError, match="qv must be torch.float64 of shape"):
        fa3.flash_attn_with_kvcache(q, k_cache, v_cache, qv=qv[:, :1], cache_seqlens=5)
