"""Bad tables are named, sequence and entry; what is not built says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_cases import pool, queries
from torch._subclasses.fake_tensor import FakeTensorMode

import strobe
from strobe.paged import attention
from strobe.problem.checks import with_longest


def call(change: dict[str, Any] | None = None, **more: Any) -> Any:
    p, (q, cu) = pool([37, 20, 5], 8), queries([1, 2, 1])
    given: dict[str, Any] = {"q": q, "k": p.k, "v": p.v, "table": p.table, "lengths": p.lengths, "cu_q": cu}
    return strobe.attention_paged(**{**given, **(change or {}), **more})


def with_entry(sequence: int, entry: int, value: int) -> torch.Tensor:
    table = pool([37, 20, 5], 8).table.clone()
    table[sequence, entry] = value
    return table


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lengths": int32(37, 20, 49)}, ValueError, r"lengths\[2\] is 49; sequence 2 has 6 pages of 8 rows"),
    ({"lengths": int32(37, -1, 5)}, ValueError, r"lengths\[1\] is -1"),
    (
        {"table": with_entry(1, 2, -1)},
        ValueError,
        "entry 2 of sequence 1 is -1; sequence 1 looks at its entries 0 to 2",
    ),
    ({"table": with_entry(0, 4, 99)}, ValueError, "entry 4 of sequence 0 is 99; .* the pool has 12 pages"),
    ({"table": (int32(0, 5, 8, 9), int32(*range(8), 12))}, ValueError, "entry 0 of sequence 2 is 12"),
    ({"table": (int32(0, 5, 4, 9), int32(*range(9)))}, ValueError, "indptr must not decrease, but does at sequence 1"),
    ({"table": (int32(0, 5, 8, 10), int32(*range(9)))}, ValueError, "indptr must run from 0 to at most 9"),
    ({"table": (int32(0, 5, 8, 9),)}, ValueError, r"\(indptr, indices\), got 1"),
    ({"table": None}, TypeError, "table must be a torch.Tensor"),
    ({"lengths": None}, TypeError, "lengths must be a torch.Tensor"),
    ({"lengths": torch.tensor([37, 20, 5])}, TypeError, "lengths must be int32, got torch.int64"),
    ({"lengths": int32(37, 20)}, ValueError, r"lengths must have shape \(3\), got \(2,\)"),
    ({"starts": int32(1)}, ValueError, r"starts must have shape"),
    ({"cu_q": int32(0, 1, 3, 5)}, ValueError, "cu_q must run from 0 to 4"),
    ({"cu_q": None}, ValueError, r"q has 3 axes; allowed are 4 \(batch, queries, heads, dim\), or 3"),
    ({"layout": "bshd"}, ValueError, "layout must be one of 'nhd', 'hnd', got 'bshd'"),
    ({"layout": "hnd"}, ValueError, "q has 4 heads, which is not a multiple of the 8 heads"),
    ({"k": torch.zeros(3, 8, dtype=torch.float64)}, ValueError, "k must be a pool of pages with 4 axes"),
    ({"mask": torch.ones(1, 1, dtype=torch.bool)}, TypeError, "mask must be a strobe mask or None beside paged keys"),
    ({"tail": torch.zeros(4)}, ValueError, r"tail must be int64 of shape \(4,\)"),
    ({"k_scale": torch.ones(2)}, strobe.Unsupported, "k_scale was given"),
    ({"invariant": True}, strobe.Unsupported, "invariant=True"),
    ({"backend": "aten_cpu"}, strobe.Unsupported, "backend 'aten_cpu' cannot run this: no paged keys"),
    ({"block_table": 1}, TypeError, "unexpected keyword argument 'block_table'; use table="),
    ({"cache_seqlens": 1}, TypeError, "unexpected keyword argument 'cache_seqlens'; use lengths="),
]


@pytest.mark.parametrize(("change", "kind", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_errors(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call(change)


def test_contents_are_checked_at_every_call() -> None:
    """The second call is remembered, and its table is not."""
    call()
    call()
    with pytest.raises(ValueError, match="entry 1 of sequence 0 is 40"):
        call({"table": with_entry(0, 1, 40)})


def test_gradients_are_refused_with_the_way_to_get_them() -> None:
    q = queries([1, 2, 1])[0].requires_grad_()
    with pytest.raises(strobe.Unsupported, match="gather the keys"):
        call(q=q)
    with torch.no_grad():
        call(q=q)
    compiled = torch.compile(lambda q: call(q=q), backend="eager")
    with pytest.raises(Exception, match="gather the keys"):
        compiled(q)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_tail_has_64_bits_without_max_q_too(compiled: bool) -> None:
    p, (q, cu) = pool([80], 8), queries([65])

    def step(q: torch.Tensor) -> Any:
        return strobe.attention_paged(q, p.k, p.v, p.table, p.lengths, cu, tail=torch.zeros(65).long())

    with pytest.raises(Exception if compiled else ValueError, match="tail has 64 bits"):
        (torch.compile(step, backend="eager") if compiled else step)(q)


def test_a_tail_on_a_gpu_reads_the_longest_sequence_once(monkeypatch: pytest.MonkeyPatch) -> None:
    p, (q, cu) = pool([80, 80], 8), queries([64, 3])
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)  # as if it were memory of a GPU
    read, passed, to_list = [], [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (read.append(t), to_list(t))[1])
    monkeypatch.setattr(attention, "attend", lambda a: passed.append(with_longest(a)))  # as a call begins
    for max_q in (None, 64):
        strobe.attention_paged(q, p.k, p.v, p.table, p.lengths, cu, max_q=max_q, tail=torch.zeros(67).long())
    assert len(read) == 1 and read[0] is cu and [a.max_q for a in passed] == [64, 64]
    q, cu = queries([65, 2])
    with pytest.raises(ValueError, match="tail has 64 bits.* there are 65"):
        strobe.attention_paged(q, p.k, p.v, p.table, p.lengths, cu, tail=torch.zeros(67).long())


def test_a_tail_of_fakes_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows the longest sequence under a tracer."""
    p, (q, cu) = pool([80], 8), queries([3])
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)  # as if it were memory of a GPU
    with FakeTensorMode() as mode:
        *given, tail = map(mode.from_tensor, (q, p.k, p.v, p.table, p.lengths, cu, torch.zeros(3).long()))
        assert strobe.attention_paged(*given, tail=tail).shape == q.shape


def test_check_names_sequence_and_entry() -> None:
    p = pool([37, 20, 5], 8)
    strobe.paged.check(p.table, p.lengths, p.k)
    strobe.paged.check(p.table, p.lengths, p.k.transpose(1, 2), layout="hnd")
    with pytest.raises(ValueError, match="entry 4 of sequence 0 is 99"):
        strobe.paged.check(with_entry(0, 4, 99), p.lengths, p.k)
    with pytest.raises(ValueError, match=r"lengths\[0\] is 100"):
        strobe.paged.check(p.table, int32(100, 20, 5), p.k)
    with pytest.raises(ValueError, match="one for each sequence"):
        strobe.paged.check(p.table, int32(1), p.k)


def test_explain_and_the_hint() -> None:
    p, (q, cu) = pool([37, 20, 5], 8), queries([1, 2, 1])
    said = strobe.explain(q, p.k, p.v, table=p.table, lengths=p.lengths, cu_q=cu, mask=strobe.causal)
    assert said.backend == "tiled" and said.rejected["aten_cpu"] == "no paged keys" and "paged" in said.problem
    indptr = torch.arange(4, dtype=torch.int32) * p.table.shape[1]
    for k, v, more in (
        (p.k, p.v, {"table": p.table}),  # causal, as attention_paged is
        (p.k, p.v, {"table": (indptr, p.table.flatten())}),
        (p.k.transpose(1, 2), p.v.transpose(1, 2), {"table": p.table, "layout": "hnd"}),
    ):
        again = strobe.explain(q, k, v, lengths=p.lengths, cu_q=cu, **more)
        assert "causal" in again.problem and again.ideal_bytes == said.ideal_bytes
    with pytest.raises(ValueError, match="give table= and lengths= by name"):
        strobe.explain(q, p.k, p.v, p.table, p.lengths)
