"""Paged keys on a GPU, by the kernels and by `tiled`: what they compute, what they do with bad tables, CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.kernels import kernels_here
from paged_cases import Pool, dense, pool, queries, without_keys

import strobe
from strobe.problem import page_checks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
KERNELS = kernels_here() if torch.cuda.is_available() else []
LENGTHS, COUNTS = [37, 0, 150, 100, 99, 1, 16], [1, 2, 40, 1, 0, 1, 5]


def on_gpu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.cuda() for t in tensors]


def close(found: Any, expected: Any, dtype: torch.dtype = torch.bfloat16) -> None:
    """Outputs are of the order of 1."""
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu().double(), b.double(), atol=4 * torch.finfo(dtype).eps, rtol=1e-3)


@pytest.mark.parametrize("dense_queries", [False, True])
@pytest.mark.parametrize("page", [1, 8, 12, 16, 48, 64, 256])
@pytest.mark.parametrize("mask", [strobe.causal, strobe.window(20, 0), None], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernel_reads_pages(mask: strobe.Mask | None, page: int, dense_queries: bool, kernel: str) -> None:
    p = pool(LENGTHS, page, dim=128, dim_v=128, dtype=torch.bfloat16)
    q, cu = queries([2] * 7 if dense_queries else COUNTS, dim=128, dtype=torch.bfloat16)
    a, last = on_gpu(q, p.k, p.v, p.table, p.lengths), [cu.cuda()]
    if dense_queries:
        a[0], last = a[0].view(7, 2, 4, 128), []
    out, lse = strobe.attention_paged(*a, *last, mask=mask, return_lse=True, backend=kernel)
    if dense_queries:
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    close((out, lse), dense(q, cu, p, mask=mask))


@pytest.mark.parametrize("mask", [strobe.causal, strobe.window(20, 0), None], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_trees(mask: strobe.Mask | None, kernel: str) -> None:
    lengths, counts = [37, 150, 3, 900], [5, 64, 4, 1]
    p = pool(lengths, 16, dim=128, dim_v=128, dtype=torch.bfloat16)
    q, cu = queries(counts, dim=128, dtype=torch.bfloat16)
    tail = torch.randint(-(1 << 62), 1 << 62, (len(q),), generator=torch.Generator().manual_seed(2))
    given, options = (q, p.k, p.v, p.table, p.lengths, cu), {"mask": mask, "return_lse": True}
    found = strobe.attention_paged(*on_gpu(*given), tail=tail.cuda(), backend=kernel, **options)
    close(found, strobe.attention_paged(*given, tail=tail, backend="reference", **options))


@pytest.mark.parametrize("page", [1, 16, 64, 256])
@pytest.mark.parametrize("kernel", KERNELS)
def test_long_sequences_are_split(page: int, kernel: str) -> None:
    p = pool([30000, 1, 21000], page, dim=128, dim_v=128, dtype=torch.bfloat16)
    q, cu = queries([1, 1, 1], dim=128, dtype=torch.bfloat16)
    q_, k, v, table, lengths = on_gpu(q.view(3, 1, 4, 128), p.k, p.v, p.table, p.lengths)
    out, lse = strobe.attention_paged(q_, k, v, table, lengths, return_lse=True, backend=kernel)
    close((out.flatten(0, 1), lse.transpose(0, 1).flatten(1)), dense(q, cu, p, mask=strobe.causal))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"mask": strobe.window(1500, 0), "softcap": 40.0}], ids=["", "window_softcap"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_invariant_rows_have_the_same_bits(options: dict[str, Any], dim: int, kernel: str) -> None:
    """A query in a piece of a prompt, alone, and beside others; in pages of several sizes, with and without a plan."""
    first, end = 20000, 20100  # positions of the piece's queries
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, end, 2, dim, generator=generator).to(torch.bfloat16).cuda()
    q = (torch.randn(end - first, 4, dim, generator=generator) * 4).to(torch.bfloat16).cuda()

    def attend(spans: list[tuple[int, int]], page: int = 16, planned: bool = False) -> dict[int, Any]:
        """Each span is one sequence, whose keys end with its queries."""
        width = -(-end // page)
        pool_k, pool_v = torch.nn.functional.pad(keys, (0, 0, 0, 0, 0, width * page - end)).unflatten(1, (-1, page))
        table = torch.arange(width, dtype=torch.int32, device="cuda").expand(len(spans), -1).contiguous()
        lengths = torch.tensor([b for _, b in spans], dtype=torch.int32, device="cuda")
        counts = [b - a for a, b in spans]
        cu = torch.tensor([0, *counts], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)
        rows = torch.cat([q[a - first : b - first] for a, b in spans])
        plan = None
        if planned:
            plan = strobe.paged.Plan()
            plan.update(lengths, cu)
        results = [
            strobe.attention_paged(
                rows, pool_k, pool_v, table, lengths, cu, max_q=max(counts), return_lse=True, invariant=True, plan=plan,
                backend=kernel, **options,
            )
            for _ in range(3 if planned else 1)
        ]  # fmt: skip
        out, lse = results[-1]
        positions = [at for a, b in spans for at in range(a, b)]
        return {at: (out[i], lse[:, i]) for i, at in enumerate(positions)}

    expected = attend([(first, end)])
    alone = [(at, at + 1) for at in (20000, 20007, 20050, 20099)]
    several = [*alone, (20010, 20014)]
    ways = [attend([span]) for span in alone]
    ways += [attend(several), attend(several[::-1], planned=True), attend(several, page=1), attend(several, page=64)]
    ways += [attend([(20003, 20090)]), attend(several * 9)]
    for found in ways:
        for at, rows in found.items():
            assert all(map(torch.equal, rows, expected[at])), at


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_plan_serves_decodes_and_prefill_in_turns(invariant: bool, kernel: str) -> None:
    """An update fills all lists of as many sequences, also those that have no room for this step's work."""
    lengths, plan = [3000, 5000], strobe.paged.Plan()
    p = pool(lengths, 16, dim=128, dim_v=128, dtype=torch.bfloat16)
    a = on_gpu(p.k, p.v, p.table, p.lengths)
    for counts in ([1, 1], [2000, 2000], [1, 1], [2000, 1]):
        q, cu = queries(counts, dim=128, dtype=torch.bfloat16)
        q_, cu_ = on_gpu(q, cu)
        plan.update(a[3], cu_)
        found = strobe.attention_paged(
            q_, *a, cu_, max_q=max(counts), plan=plan, invariant=invariant, return_lse=True, backend=kernel
        )
        close(found, dense(q, cu, p, mask=strobe.causal))
    assert len(plan.describe().splitlines()) == 3


@pytest.mark.parametrize("page", [1, 16, 100])
@pytest.mark.parametrize("mask", [strobe.causal, strobe.window(20, 0), None], ids=str)
def test_it_computes_what_the_textbook_does(mask: strobe.Mask | None, page: int) -> None:
    p, (q, cu) = (
        pool(LENGTHS, page, dim=64, dim_v=64, dtype=torch.bfloat16),
        queries(COUNTS, dim=64, dtype=torch.bfloat16),
    )
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    a = on_gpu(q, p.k, p.v, p.table, p.lengths, cu)
    found = strobe.attention_paged(*a, mask=mask, sinks=sinks.cuda(), return_lse=True)
    close(found, dense(q, cu, p, mask=mask, sinks=sinks))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("page", [1, 8, 12, 16, 64, 256])
def test_entries_that_are_no_pages_are_missing_keys(page: int, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are missing in some blocks of keys, in all of a sequence, and in most splits of a long one."""
    lengths, missing = [37, 0, 900, 290, 99, 1, 9000], {0: range(37), 2: (70, 140, 899), 3: (5,), 6: range(600, 8000)}
    p = without_keys(pool(lengths, page, dim=128, dim_v=128, dtype=torch.bfloat16), missing)
    q, cu = queries(COUNTS if packed else [2] * 7, dim=128, dtype=torch.bfloat16)
    given = (q, p.k, p.v, p.table, p.lengths, cu) if packed else (q.view(7, 2, 4, 128), p.k, p.v, p.table, p.lengths)
    found = {
        (backend, options.get("invariant", False)): strobe.attention_paged(
            *on_gpu(*given), return_lse=True, backend=backend, **options
        )
        for backend, options in (("tiled", {}), *((name, {"invariant": x}) for name in KERNELS for x in (False, True)))
    }
    monkeypatch.setattr(page_checks, "check_contents", lambda *_: None)  # on a CPU the call would be refused
    expected = strobe.attention_paged(*given, return_lse=True, backend="reference")
    for one in found.values():
        close(one, expected)


def test_bad_tables_are_survived_and_found_by_check() -> None:
    p, (q, cu) = (
        pool([40, 33], 8, dim=64, dim_v=64, dtype=torch.bfloat16),
        queries([1, 1], dim=64, dtype=torch.bfloat16),
    )
    p.k, p.v = p.k.nan_to_num(), p.v.nan_to_num()
    whole = dense(q, cu, p, mask=strobe.causal)
    table, lengths = p.table.clone(), p.lengths.clone()
    table[0, 5:] = 10**6  # behind the keys in use
    lengths[0] = 10**6
    q, k, v, table, lengths, cu = on_gpu(q, p.k, p.v, table, lengths, cu)
    for backend in ("tiled", *KERNELS):
        close(strobe.attention_paged(q, k, v, table, lengths, cu, max_q=1, return_lse=True, backend=backend), whole)
    with pytest.raises(ValueError, match=r"lengths\[0\] is 1000000"):
        strobe.paged.check(table, lengths, k)
    lengths[0] = 48
    with pytest.raises(ValueError, match="entry 5 of sequence 0 is 1000000"):
        strobe.paged.check(table, lengths, k)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("packed", [True, False])
def test_one_graph_is_replayed_with_other_lengths_and_tables(packed: bool, kernel: str) -> None:
    """Nothing is read back: append, plan and attention are captured, and see what is written into their tensors."""
    counts = [1, 3, 1] if packed else [2, 2, 2]
    pools = [
        pool(lengths, 16, dim=64, dim_v=64, dtype=torch.bfloat16, seed=s, spare=9) for s, lengths in enumerate(LONG)
    ]
    q, cu = queries(counts, dim=64, dtype=torch.bfloat16)
    width, pages = (max(p.table.shape[1] for p in pools), max(len(p.k) for p in pools))
    q_, cu_ = on_gpu(q if packed else q.view(3, 2, 4, 64), cu)
    k, v = torch.zeros(2, pages, 16, 2, 64, dtype=torch.bfloat16, device="cuda")
    table, lengths = (
        torch.zeros(3, width, dtype=torch.int32, device="cuda"),
        torch.ones(3, dtype=torch.int32, device="cuda"),
    )
    new = torch.ones(3, 2, 64, dtype=torch.bfloat16, device="cuda")
    plan = strobe.paged.Plan()

    def step() -> Any:
        strobe.paged.append(new, new, k, v, strobe.paged.slots(table, 16, lengths[:, None] - 1)[:, 0])
        plan.update(lengths, cu_)
        more = (cu_,) if packed else ()
        return strobe.attention_paged(
            q_, k, v, table, lengths, *more, max_q=max(counts), mask=strobe.window(90, 0), plan=plan, return_lse=True,
            backend=kernel,
        )  # fmt: skip

    step()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for p in pools:
        table.fill_(-1)
        table[:, : p.table.shape[1]] = p.table.cuda()
        lengths.copy_(p.lengths)
        k[: len(p.k)], v[: len(p.v)] = p.k.cuda(), p.v.cuda()
        graph.replay()
        for i, n in enumerate(p.lengths.tolist()):
            at = int(p.table[i, (n - 1) // 16])
            p.k[at, (n - 1) % 16] = p.v[at, (n - 1) % 16] = 1
        found = (out, lse) if packed else (out.flatten(0, 1), lse.transpose(0, 1).flatten(1))
        close(found, dense(q, cu, Pool(p.k, p.v, p.table, p.lengths), mask=strobe.window(90, 0)))


LONG = [[37, 150, 1], [3, 20, 128], [100, 101, 102]]
