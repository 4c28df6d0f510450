"""Attention to paged keys gives what attention to the same keys in a row gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_cases import dense, pool, queries

import strobe
from strobe.backends.tiled.slab import block_sizes

LENGTHS = [37, 0, 150, 100, 99, 1, 16]
COUNTS = [1, 2, 40, 1, 0, 1, 5]  # decodes beside chunks of a prompt; one with more queries than keys is below
MASKS = [
    strobe.causal,
    None,
    strobe.window(20, 0),
    strobe.window(7, 3),
    strobe.prefix(9),
    strobe.chunked(16) & strobe.causal,
    strobe.causal_top_left,
]


STRIPES = strobe.causal & strobe.mask_function(lambda b, h, q, k: (q - k) % 3 != 1)


def same(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("page", [1, 16, 100])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_pages_in_any_order(mask: strobe.Mask | None, page: int, backend: str) -> None:
    p, (q, cu) = pool(LENGTHS, page), queries(COUNTS)
    found = strobe.attention_paged(q, p.k, p.v, p.table, p.lengths, cu, mask=mask, return_lse=True, backend=backend)
    same(found, dense(q, cu, p, mask=mask))


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, -torch.inf])},
        {"score": strobe.alibi(torch.tensor([0.5, 0.25, 0.1, 0.0]))},
        {"scale": 0.3, "mask": strobe.window(11, 0), "sinks": torch.zeros(4)},
        {"mask": STRIPES, "score": strobe.score_function(lambda s, b, h, q, k: s - 0.1 * (h + 1) * (q - k))},
    ],
    ids=lambda options: "-".join(options),
)
def test_what_happens_to_a_score(options: dict[str, Any], backend: str) -> None:
    p, (q, cu) = pool(LENGTHS, 16), queries(COUNTS)
    options = {"mask": strobe.causal} | options
    found = strobe.attention_paged(q, p.k, p.v, p.table, p.lengths, cu, return_lse=True, backend=backend, **options)
    same(found, dense(q, cu, p, **options))


def test_a_slope_for_each_sequence_and_head() -> None:
    p, (q, _) = pool([20, 33, 5], 4), queries([2, 2, 2])
    slopes = torch.rand(3, 4, dtype=torch.float64)
    found = strobe.attention_paged(
        q.view(3, 2, 4, 8), p.k, p.v, p.table, p.lengths, score=strobe.alibi(slopes), return_lse=True
    )
    for i in range(3):
        one = strobe.attention(
            q[None, 2 * i : 2 * i + 2], *p.keys(i), mask=strobe.causal, score=strobe.alibi(slopes[i]), return_lse=True
        )
        same([t[i : i + 1] for t in found], one)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_dense_queries_an_output_and_the_list_form_of_a_table(backend: str) -> None:
    p, (q, cu) = pool([30, 0, 64, 7], 5), queries([3] * 4)
    expected, lse = dense(q, cu, p, mask=strobe.causal)
    batched = q.view(4, 3, 4, 8)
    out = torch.full((4, 3, 4, 8), torch.nan, dtype=q.dtype)
    given = strobe.attention_paged(batched, p.k, p.v, p.table, p.lengths, out=out, return_lse=True, backend=backend)
    assert given[0] is out
    same((out.flatten(0, 1), given[1].transpose(0, 1).flatten(1)), (expected, lse))
    counts = -(-p.lengths // p.page)
    indptr = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    indices = torch.cat([row[:n] for row, n in zip(p.table, counts.tolist(), strict=True)])
    listed = strobe.attention_paged(batched, p.k, p.v, (indptr, indices), p.lengths, return_lse=True, backend=backend)
    same(listed, given)
    out = torch.empty_like(q)
    assert strobe.attention_paged(q, p.k, p.v, p.table, p.lengths, cu, out=out, backend=backend) is out
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_layouts_and_strides(backend: str) -> None:
    p, (q, cu) = pool(LENGTHS, 16, dim_v=8), queries(COUNTS)
    expected = strobe.attention_paged(q, p.k, p.v, p.table, p.lengths, cu, return_lse=True)
    together = torch.stack((p.k, p.v), 1)  # keys and values of a page side by side
    ways = {
        "side by side": (together[:, 0], together[:, 1], "nhd"),
        "heads first": (p.k.transpose(1, 2).contiguous(), p.v.transpose(1, 2).contiguous(), "hnd"),
        "one row of both": (*torch.cat((p.k, p.v), -1).transpose(1, 2).split(8, -1), "hnd"),
    }
    for k, v, layout in ways.values():
        found = strobe.attention_paged(q, k, v, p.table, p.lengths, cu, layout=layout, return_lse=True, backend=backend)
        same(found, expected)
    wide = torch.stack((p.table, p.table - 100), -1)[..., 0]
    same(strobe.attention_paged(q, p.k, p.v, wide, p.lengths, cu, return_lse=True, backend=backend), expected)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_values_are_a_view_of_the_keys(backend: str) -> None:
    """MLA has such views: its keys are 576 and its values 512 of the same numbers."""
    p, (q, cu) = pool([40, 13], 8, heads_k=1, dim=24), queries([1, 4], heads=6, dim=24)
    p.v = p.k[..., :16]
    found = strobe.attention_paged(q, p.k, p.v, p.table, p.lengths, cu, return_lse=True, backend=backend)
    same(found, dense(q, cu, p, mask=strobe.causal))


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("mask", [strobe.causal, None, strobe.window(10, 0)], ids=str)
@pytest.mark.parametrize("score", [None, strobe.alibi(torch.tensor([0.5, 0.25, 0.1, 0.0]))])
def test_starts(score: Any, mask: strobe.Mask | None, backend: str) -> None:
    """Pages in front that were given back, and rows in front that are padding."""
    p, (q, cu) = pool([45, 64, 80], 16), queries([2, 1, 3])
    options = {"mask": mask, "score": score, "return_lse": True}
    whole = dense(q, cu, p, mask=mask, score=score)
    if mask is not None and mask != strobe.causal:  # 48 keys of each are gone but for those that the window shows
        gone = torch.tensor([32, 48, 64], dtype=torch.int32)
        short = p.table.clone()
        for i, n in enumerate((gone // 16).tolist()):
            short[i] = torch.cat((p.table[i, n:], p.table[i, :n] * 0 - 1))
        found = strobe.attention_paged(
            q, p.k, p.v, short, p.lengths - gone, cu, starts=gone, backend=backend, **options
        )
        same(found, whole)
    padding = [3, 0, 20]
    starts = -torch.tensor(padding, dtype=torch.int32)
    found = strobe.attention_paged(q, p.k, p.v, p.table, p.lengths, cu, starts=starts, backend=backend, **options)
    outs, lses = [], []
    for i, (a, b) in enumerate(zip(cu.tolist(), cu.tolist()[1:], strict=False)):
        out, lse = strobe.attention(q[None, a:b], *p.keys(i, padding[i]), **options)
        outs.append(out[0])
        lses.append(lse[0])
    same(found, (torch.cat(outs), torch.cat(lses, 1)))


def test_entries_that_no_query_looks_at_may_be_anything() -> None:
    """Pages before a window were given back: their entries are stale, and may be those of others, filled with NaN."""
    p, (q, cu) = pool([150, 40], 16), queries([1, 2])
    mask = strobe.window(20, 0)
    expected = dense(q, cu, p, mask=mask)
    p.table[0, :8] = torch.tensor([-1, 10**6, -5, 0, 0, -1, -1, 2])
    for backend in ("tiled", "reference"):
        found = strobe.attention_paged(q, p.k, p.v, p.table, p.lengths, cu, mask=mask, return_lse=True, backend=backend)
        same(found, expected)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_more_queries_than_keys(backend: str) -> None:
    p, (q, cu) = pool([3, 9], 4), queries([5, 9])
    found = strobe.attention_paged(q, p.k, p.v, p.table, p.lengths, cu, return_lse=True, backend=backend)
    same(found, dense(q, cu, p, mask=strobe.causal))
    assert (found[0][:2] == 0).all() and (found[1][:, :2] == -torch.inf).all()


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("mask", [strobe.causal, strobe.window(3, 0), STRIPES], ids=str)
@pytest.mark.parametrize("sizes", [(None, None), (2, 5)])
def test_trees(sizes: Any, mask: Any, backend: str) -> None:
    """A tail says which of the new keys each query sees; the mask is for those before."""
    counts, lengths = [6, 1, 64, 3], [30, 12, 80, 2]
    p, (q, cu) = pool(lengths, 8), queries(counts)
    generator = torch.Generator().manual_seed(2)
    tail = torch.randint(-(1 << 62), 1 << 62, (len(q),), generator=generator)
    with block_sizes(*sizes):
        found = strobe.attention_paged(
            q, p.k, p.v, p.table, p.lengths, cu, tail=tail, mask=mask, return_lse=True, backend=backend
        )
    outs, lses = [], []
    for i, (n, length) in enumerate(zip(counts, lengths, strict=True)):
        rows, visible = slice(int(cu[i]), int(cu[i + 1])), mask.dense(n, length).view(n, length)
        for j in range(min(n, length)):
            visible[:, max(0, length - n) + j] = ((tail[rows] >> j) & 1).bool()
        out, lse = strobe.attention(q[None, rows], *p.keys(i), mask=visible, return_lse=True)
        outs.append(out[0])
        lses.append(lse[0])
    same(found, (torch.cat(outs), torch.cat(lses, 1)))
    with pytest.raises(ValueError, match="tail has 64 bits"):
        q, cu = queries([65])
        strobe.attention_paged(q, p.k, p.v, p.table[2:3], p.lengths[2:3], cu, tail=torch.zeros(65).long())


@pytest.mark.parametrize("sizes", [(None, None), (2, 5), (1, 1)])
def test_tiles_of_any_size(sizes: Any) -> None:
    p, (q, cu) = pool(LENGTHS, 16), queries(COUNTS)
    for mask in (strobe.causal, strobe.window(20, 4)):
        with block_sizes(*sizes):
            found = strobe.attention_paged(
                q, p.k, p.v, p.table, p.lengths, cu, mask=mask, return_lse=True, backend="tiled"
            )
        same(found, dense(q, cu, p, mask=mask))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_types(dtype: torch.dtype) -> None:
    p, (q, cu) = pool(LENGTHS, 16, dtype=dtype, dim=64, dim_v=32), queries(COUNTS, dim=64, dtype=dtype)
    out, lse = strobe.attention_paged(q, p.k, p.v, p.table, p.lengths, cu, return_lse=True)
    expected, expected_lse = dense(q, cu, p, mask=strobe.causal)
    assert out.dtype == dtype and lse.dtype == torch.float32
    error = (out.double() - expected.double()).abs().max()
    assert error <= 4 * torch.finfo(dtype).eps  # outputs are of the order of 1
    torch.testing.assert_close(lse, expected_lse, atol=2e-3 if dtype.itemsize == 2 else 1e-5, rtol=1e-5)


def test_it_is_one_operation_of_a_graph() -> None:
    p, (q, cu) = pool([37, 0, 50], 16, dtype=torch.float32), queries([1, 2, 1], dtype=torch.float32)

    @torch.compile(fullgraph=True, backend="eager")
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> Any:
        return strobe.attention_paged(q, k, v, table, lengths, cu, max_q=2, mask=strobe.window(9, 0)) * 2

    expected = strobe.attention_paged(q, p.k, p.v, p.table, p.lengths, cu, mask=strobe.window(9, 0)) * 2
    torch.testing.assert_close(step(q, p.k, p.v, p.table, p.lengths), expected)


@pytest.mark.parametrize("mask", [m for m in MASKS if m is not None], ids=str)
def test_numbers_of_a_mask_move_to_the_device(mask: strobe.Mask) -> None:
    """No number of the host is left to be compared with a tensor there, and the mask means the same."""
    from strobe.problem.page_checks import with_numbers_on

    there = with_numbers_on(mask, torch.device("meta"))
    rows = torch.zeros(3, dtype=torch.int64, device="meta")
    assert all(bound.is_meta for bound in there.bounds(rows, 3, 9))
    numbers = [e for end in (there.lo, there.hi) if end is not None for e in numbers_of(end)]
    assert all(isinstance(n, torch.Tensor) and n.is_meta for n in numbers)
    assert numbers or mask == strobe.full


def numbers_of(e: Any) -> list[Any]:
    if e.op in ("const", "literal"):
        return [e.args[0]]
    return [] if e.op == "var" else [n for a in e.args for n in numbers_of(a)]


def test_what_a_captured_graph_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read while a CUDA graph is captured: one slab has all sequences, and every tile of the table."""
    from strobe.backends.tiled import forward, paged_slab
    from strobe.problem import Problem, page_checks
    from strobe.problem.arguments import Arguments, Inputs

    monkeypatch.setattr(page_checks, "check_contents", lambda *_: None)
    p, (q, cu) = pool(LENGTHS, 16), queries(COUNTS)
    p.k, p.v = p.k.nan_to_num(), p.v.nan_to_num()
    lengths, table = p.lengths.clone(), p.table.clone()
    lengths[3] = 10**6  # clamped to the table: nobody has checked it
    table[3, 2], table[3, 7:] = -1, 10**6  # missing pages
    mask = strobe.window(150, 0)
    a = Arguments(q, p.k, p.v, cu, max_q=41, mask=mask, table=table, lengths=lengths)
    problem, layout = Problem.of(a)
    x = Inputs.of(a, layout)
    out, lse = torch.empty_like(x.q), torch.empty(x.q.shape[:3], dtype=q.dtype)
    every = paged_slab.Sequences.of(problem, x)
    unread = [paged_slab.make_slab(problem, x, every, None, problem.len_q, problem.k.length)]
    forward.run_slabs(problem, unread, out, lse)
    expected, expected_lse = dense(q, cu, p, mask=mask)
    row, there = int(cu[3]), ((table[3] >= 0) & (table[3] < 10**6)).repeat_interleave(16)
    assert len(there) == 176  # so the window begins with key 25
    there[:25] = False
    p.lengths[3] = 112
    k, v = p.keys(3)
    one = strobe.attention(q[None, row : row + 1], k, v, mask=there[:112], return_lse=True)
    expected[row], expected_lse[:, row] = one[0][0, 0], one[1][0, :, 0]
    same((out[0].transpose(0, 1), lse[0]), (expected, expected_lse))
