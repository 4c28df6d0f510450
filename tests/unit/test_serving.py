"""Around paged attention: merging states, keys that sequences share, writing new keys, and plans."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from paged_cases import dense, pool, queries

import strobe
from strobe.nn.rotary import angles, rotate
from strobe.paged import attention
from strobe.problem.work_list import KEPT_STEPS, Kind


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# ---- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -1.0, 4.0, -torch.inf])])
def test_parts_of_the_keys_merge_to_the_whole(sinks: torch.Tensor | None) -> None:
    q, k, v = (torch.randn(2, n, 4, 8, dtype=torch.float64) for n in (5, 30, 30))
    parts = [
        strobe.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in itertools.pairwise((0, 0, 11, 12, 30))
    ]
    outs, lses = zip(*parts, strict=True)
    expected = strobe.attention(q, k, v, sinks=sinks, return_lse=True)
    for given in ((outs, lses), (torch.stack(outs), torch.stack(lses))):
        for found, want in zip(strobe.merge(*given, sinks=sinks), expected, strict=True):
            torch.testing.assert_close(found, want)
    into = torch.empty(q.shape, dtype=torch.float32)
    assert strobe.merge(outs, lses, sinks=sinks, out=into)[0] is into
    torch.testing.assert_close(into, expected[0].float())
    assert all(torch.equal(a, b) for a, b in zip(outs, (out.clone() for out, _ in parts), strict=True))


def test_rows_without_keys_merge_to_rows_without_keys() -> None:
    out, lse = strobe.merge([torch.zeros(3, 2, 4)] * 2, [torch.full((2, 3), -torch.inf)] * 2)
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_that_see_no_key_may_hold_anything(dtype: torch.dtype) -> None:
    """A part that saw no key may be memory that nobody wrote, be it the first one or a later one."""
    outs, lses = torch.randn(3, 2, 5, 4, 8).to(dtype), torch.randn(3, 2, 4, 5)
    for i in range(3):
        lses[i, ..., i], lses[i, ..., 4] = -torch.inf, -torch.inf
    dead = (lses == -torch.inf).mT.unsqueeze(-1)
    expected, expected_lse = strobe.merge(outs.masked_fill(dead, 0), lses)
    before = outs.masked_fill(dead, torch.nan)
    given = before.clone()
    found, lse = strobe.merge(given, lses)
    assert torch.equal(found, expected) and torch.equal(lse, expected_lse)
    assert found[:, :4].isfinite().all() and not found[:, 4].any()
    assert torch.equal(given.isnan(), before.isnan())  # parts are not written


def test_errors_of_merge() -> None:
    out, lse = torch.zeros(3, 2, 4), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="outs and lses must be as many, and at least one; got 1 and 2"):
        strobe.merge([out], [lse, lse])
    with pytest.raises(ValueError, match=r"outs\[1\] has shape"):
        strobe.merge([out, out[:1]], [lse, lse])
    with pytest.raises(ValueError, match=r"lses\[1\] must be \(…, heads, rows\)"):
        strobe.merge([out, out], [lse, lse.mT])
    with pytest.raises(ValueError, match="sinks must have shape"):
        strobe.merge([out], [lse], sinks=torch.zeros(3))


# ---- shared keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -1.0, 4.0, 0.0])])
def test_shared_keys_are_keys_in_front(sinks: torch.Tensor | None, packed: bool) -> None:
    """Two levels: all five sequences share 40 keys; the first two share 9 more, the third and fourth 16."""
    counts = [2, 2, 2, 2, 2]
    own, (q, cu) = pool([10, 3, 25, 2, 7], 8), queries(counts)
    shared = pool([40, 9, 16, 0], 8, seed=5)
    k, v = torch.cat((own.k, shared.k)), torch.cat((own.v, shared.v))
    table = shared.table + len(own.k)
    levels = [
        strobe.paged.Level(table[:1], int32(40), int32(0, 10)),
        strobe.paged.Level(table[1:], int32(9, 16, 0), int32(0, 4, 8, 10)),
    ]
    batched = q if packed else q.view(5, 2, 4, 8)
    out, lse = strobe.attention_paged(
        batched, k, v, own.table, own.lengths, cu if packed else None, shared=levels, sinks=sinks, return_lse=True
    )
    if not packed:
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    for i, group in enumerate((1, 1, 2, 2, 3)):
        keys = [torch.cat(t, 1) for t in zip(shared.keys(0), shared.keys(group), own.keys(i), strict=True)]
        rows = slice(int(cu[i]), int(cu[i + 1]))
        expected = strobe.attention(q[None, rows], *keys, mask=strobe.causal, sinks=sinks, return_lse=True)
        torch.testing.assert_close(out[rows], expected[0][0])
        torch.testing.assert_close(lse[:, rows], expected[1][0])
    into = torch.empty_like(batched)
    found = strobe.attention_paged(
        batched, k, v, own.table, own.lengths, cu if packed else None, shared=levels, sinks=sinks, out=into
    )
    assert found is into
    torch.testing.assert_close(into.view_as(q), out)


def test_shared_keys_need_no_positions() -> None:
    own, (q, cu) = pool([10], 8), queries([1])
    level = strobe.paged.Level(own.table, own.lengths, int32(0, 1))
    for options in ({"mask": strobe.window(3, 0)}, {"score": strobe.alibi(torch.ones(4))}):
        with pytest.raises(strobe.Unsupported, match="put the shared pages into each sequence's table"):
            strobe.attention_paged(q, own.k, own.v, own.table, own.lengths, cu, shared=[level], **options)


# ---- new keys --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("rotary", [None, False, True])
def test_new_keys_are_written_where_the_table_says(rotary: bool | None, layout: str) -> None:
    p = pool([13, 16, 5], 8)
    k_new, v_new = torch.randn(2, 3, 2, 2, 8, dtype=torch.float64)
    positions = p.lengths[:, None] + torch.arange(2)
    for i, n in enumerate((2, 2, 1)):  # a page for the new keys
        p.table[i, n] = (
            p.table[i, n]
            if p.table[i, n] >= 0
            else int(sorted(set(range(len(p.k))) - set(p.table.flatten().tolist()))[0])
        )
    slots = strobe.paged.slots(p.table, p.page, positions)
    k, v = (t.clone() if layout == "nhd" else t.transpose(1, 2).contiguous() for t in (p.k, p.v))
    cos, sin = angles(torch.arange(40), 6)
    turn = None if rotary is None else (cos, sin, positions, rotary)
    strobe.paged.append(k_new, v_new, k, v, slots, rotary=turn, layout=layout)
    k, v = (t if layout == "nhd" else t.transpose(1, 2) for t in (k, v))
    written = k_new if rotary is None else rotate(k_new, cos[positions], sin[positions], rotary)
    expected_k, expected_v = p.k.clone(), p.v.clone()
    for i, j in itertools.product(range(3), range(2)):
        at = int(positions[i, j])
        page = int(p.table[i, at // 8])
        expected_k[page, at % 8], expected_v[page, at % 8] = written[i, j], v_new[i, j]
    torch.testing.assert_close(k, expected_k, equal_nan=True)
    torch.testing.assert_close(v, expected_v, equal_nan=True)


def test_negative_slots_are_skipped_and_others_must_exist() -> None:
    p = pool([13], 8, spare=0)
    k, v = p.k.nan_to_num(), p.v.nan_to_num()
    new = torch.ones(3, 2, 8, dtype=torch.float64)
    before = k.clone()
    strobe.paged.append(new, new, k, v, torch.tensor([-1, 9, -5]))
    assert (k[1, 1] == 1).all()
    k[1, 1] = before[1, 1]
    assert torch.equal(k, before)
    with pytest.raises(ValueError, match="slot 2 is 16; the pool has 16 rows, 2 pages of 8"):
        strobe.paged.append(new, new, k, v, torch.tensor([-1, 9, 16]))
    with pytest.raises(ValueError, match="k_new must be torch.float64 of shape"):
        strobe.paged.append(new.float(), new, k, v, torch.tensor([-1, 9, 15]))
    with pytest.raises(strobe.Unsupported, match="8-bit"):
        strobe.paged.append(new, new, k, v, torch.tensor([-1, 9, 15]), k_scale=torch.ones(1))
    assert torch.equal(k, before)


def test_slots_without_an_entry_are_negative() -> None:
    table = int32(3, 1, -1).view(1, 3)
    found = strobe.paged.slots(table, 4, torch.tensor([[0, 5, 8, 12, -1]]))
    assert found.tolist() == [[12, 5, -1, -1, -1]]
    sequences, positions = torch.tensor([0, 0]), torch.tensor([7, 2])
    assert strobe.paged.slots(table, 4, positions, sequences).tolist() == [7, 14]


def test_skipped_rows_are_not_read_back_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU runs this way: no shape depends on what is skipped."""
    from strobe.paged import pool

    pool_ = torch.randn(3, 4, 2, 8)
    for slots in ([5, -1, 11, 200], [-1, -1, -1, -1], [0, 1, 2, 3]):
        rows, expected, found = torch.randn(4, 2, 8), pool_.clone(), pool_.clone()
        for i, slot in enumerate(slots):
            if 0 <= slot < 12:
                expected[slot // 4, slot % 4] = rows[i]
        pool.scatter_without_reading(found, torch.tensor(slots), rows)
        assert torch.equal(found, expected)


def test_a_decode_loop() -> None:
    """Tokens one by one into pages: each sees what attention to the whole sequence sees."""
    heads, heads_k, dim, page = 4, 2, 8, 4
    q, k, v = (torch.randn(2, 11, n, dim, dtype=torch.float64) for n in (heads, heads_k, heads_k))
    pool_k, pool_v = torch.full((2, 7, page, heads_k, dim), torch.nan, dtype=torch.float64)
    table = torch.randperm(7)[:6].view(2, 3).int()
    expected = strobe.attention(q, k, v, mask=strobe.causal)
    for t in range(11):
        slots = strobe.paged.slots(table, page, torch.full((2, 1), t))
        strobe.paged.append(k[:, t : t + 1], v[:, t : t + 1], pool_k, pool_v, slots)
        out = strobe.attention_paged(q[:, t : t + 1], pool_k, pool_v, table, torch.full((2,), t + 1).int())
        torch.testing.assert_close(out[:, 0], expected[:, t])


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_is_updated_first_and_changes_nothing() -> None:
    p, (q, cu) = pool([37, 20, 5], 8), queries([1, 2, 1])
    plan = strobe.paged.Plan()
    with pytest.raises(ValueError, match="plan has no work yet"):
        strobe.attention_paged(q, p.k, p.v, p.table, p.lengths, cu, plan=plan)
    plan.update(p.lengths, cu)
    found = strobe.attention_paged(q, p.k, p.v, p.table, p.lengths, cu, plan=plan, return_lse=True)
    for a, b in zip(found, dense(q, cu, p, mask=strobe.causal), strict=True):
        torch.testing.assert_close(a, b)
    assert "no lists yet" in plan.describe()
    with pytest.raises(ValueError, match=r"cu_q must be int32 of shape \(4,\)"):
        plan.update(p.lengths, cu[:-1])
    with pytest.raises(ValueError, match="lengths must be int32"):
        plan.update(p.lengths.long())


Given = dict[str, tuple[Any, ...]]


def kind(name: str, filled: Given | None = None, room: int = 256) -> Kind:
    """Return a kind of calls that keep in `filled` what their lists are made from, and where."""
    given: Given = {} if filled is None else filled
    return Kind(name, 64, room, lambda *tensors: given.update({name: tensors}), lambda memory: f"{name}: {len(memory)}")


def test_lists_are_filled_once_a_step() -> None:
    """The first call of a kind fills them, or `update`, where the last step had one."""
    lengths, cu, filled = torch.ones(3).int(), torch.arange(4).int(), {}
    kinds = {name: kind(name, filled) for name in ("full", "window")}

    def call(plan: strobe.paged.Plan, name: str, lengths: torch.Tensor, cu: torch.Tensor | None) -> int:
        found = plan.list_for(kinds[name], lengths, cu, None, None)
        found.used = plan.step
        return found.memory.data_ptr()

    plan = strobe.paged.Plan()
    plan.update(lengths, cu)
    assert filled == {}
    at = call(plan, "full", lengths, cu)
    assert [t.data_ptr() for t in (filled["full"][0], filled["full"][4])] == [lengths.data_ptr(), at]
    filled.clear()
    assert call(plan, "full", lengths, cu) == at and filled == {}
    other = call(plan, "window", lengths, cu)
    newer = torch.ones(3).int()
    plan.update(newer, cu)
    assert {name: (t[0].data_ptr(), t[4].data_ptr()) for name, t in filled.items()} == {
        "full": (newer.data_ptr(), at),
        "window": (newer.data_ptr(), other),
    }
    filled.clear()
    assert call(plan, "full", newer, cu) == at and filled == {}
    plan.update(newer, cu)  # the last step had no window
    assert list(filled) == ["full"] and call(plan, "window", newer, cu) == other and list(filled) == ["full", "window"]
    filled.clear()
    plan.update(torch.ones(2).int())  # other sequences: lists of three are of no use
    assert filled == {}


def test_lists_that_no_call_uses_are_dropped_but_for_those_of_graphs() -> None:
    plan, lengths, filled = strobe.paged.Plan(), torch.ones(3).int(), {}
    plan.update(lengths)
    for name in ("dropped", "captured", "used"):
        plan.list_for(kind(name, filled), lengths, None, None, None).used = 0
    lists = {known.kind.key: known for known in plan.by_kind.values()}
    lists["captured"].captured = True
    for _ in range(KEPT_STEPS + 1):
        filled.clear()
        plan.update(lengths)
        assert "captured" in filled
        lists["used"].used = plan.step
    assert plan.describe() == "captured: 16\nused: 16" and [known.key for known in plan.by_kind] == ["captured", "used"]


def test_lists_share_the_room_for_partial_results() -> None:
    plan, lengths = strobe.paged.Plan(), torch.ones(3).int()
    plan.update(lengths)

    def room(size: int) -> torch.Tensor:
        return plan.list_for(kind(f"{size}", room=size), lengths, None, None, None).room

    small = room(1000)
    assert room(900) is small and room(1001).numel() == 2000 and room(1500) is room(1001)
    assert room(1000) is small  # a graph may have it


def test_lists_are_made_from_whole_tensors() -> None:
    """Kernels read numbers that lie one after the other."""
    columns, plan, filled = torch.arange(12).int().view(4, 3), strobe.paged.Plan(), {}
    lengths, starts, cu, of_four = columns[:, 0], columns[:, 1], torch.zeros(5, 2).int()[:, 0], kind("four", filled)
    for _ in range(2):
        plan.update(lengths, cu, starts=starts)
        plan.list_for(of_four, lengths, cu, starts, None).used = plan.step
        found = [t for t in filled.pop("four") if t is not None]
        assert all(t.is_contiguous() for t in found) and found[0].tolist() == [0, 3, 6, 9]


def test_levels_have_lists_of_their_own() -> None:
    """Filled from the level's lengths; those of a level that a step does not have are kept, but not used."""
    lengths, filled = torch.ones(3).int(), {}
    full = kind("full", filled)

    def level() -> strobe.paged.Level:
        return strobe.paged.Level(torch.zeros(1, 2).int(), torch.ones(1).int(), torch.tensor([0, 3]).int())

    plan, first, second = strobe.paged.Plan(), level(), level()
    plan.update(lengths, shared=[first])
    assert plan.of_level(1) is None
    of_level = plan.of_level(0)
    assert of_level is not None
    known = of_level.list_for(full, first.lengths, first.cu_q, None, None)
    known.used = of_level.step
    assert filled.pop("full")[0] is first.lengths
    plan.update(lengths)
    assert plan.of_level(0) is None and filled == {}
    plan.update(lengths, shared=[second])
    assert plan.of_level(0) is of_level and filled.pop("full")[0] is second.lengths
    assert of_level.list_for(full, second.lengths, second.cu_q, None, None) is known and filled == {}


def test_calls_with_other_tensors_have_other_lists() -> None:
    """`update` gives a list no tensor that its calls lack, nor leaves out the starts that they have."""
    lengths, indptr, starts = torch.ones(3).int(), torch.arange(4).int(), torch.zeros(3).int()
    plan, filled = strobe.paged.Plan(), {}
    calls = {"plain": (None, None), "moved": (starts, None), "ragged": (None, indptr)}
    kinds = {name: kind(name, filled) for name in calls}

    def call_all() -> None:
        for name, (starts, indptr) in calls.items():
            plan.list_for(kinds[name], lengths, None, starts, indptr).used = plan.step

    plan.update(lengths)
    call_all()
    filled.clear()
    newer = indptr.clone()
    plan.update(lengths, indptr=newer)
    assert {name: t[2:4] for name, t in filled.items()} == {"plain": (None, None), "ragged": (None, newer)}
    call_all()
    assert filled["moved"][2] is starts
    plan.update(lengths)  # without the indptr: lengths must fit
    assert filled["ragged"][3] is None
    with pytest.raises(ValueError, match=r"indptr must be int32 of shape \(4,\)"):
        plan.update(lengths, indptr=indptr[1:])
    level = strobe.paged.Level((torch.tensor([0, 2]).int(), torch.zeros(2).int()), lengths[:1], torch.ones(2).int())
    plan.update(lengths, shared=[level])
    of_level = plan.of_level(0)
    assert of_level is not None
    of_level.list_for(kind("level", filled), *level[1:], None, level.table[0]).used = of_level.step
    filled.clear()
    plan.update(lengths, shared=[level])
    assert filled["level"][3] is level.table[0]


def test_a_call_with_levels_takes_the_plan_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    own, front = pool([5, 3], 8), pool([16], 8, seed=5)
    k, v = torch.cat((own.k, front.k)), torch.cat((own.v, front.v))
    level = strobe.paged.Level(front.table + len(own.k), front.lengths, torch.tensor([0, 2]).int())
    q, plan, taken = queries([1, 1])[0][:, None], strobe.paged.Plan(), []
    attend = attention.attend
    monkeypatch.setattr(attention, "attend", lambda a: taken.append(a.plan) or attend(a))
    for shared in ((), (level,)):
        plan.update(own.lengths, shared=shared)
        strobe.attention_paged(q, k, v, own.table, own.lengths, shared=[level], plan=plan)
    assert taken == [plan, None, plan, plan.of_level(0)]
