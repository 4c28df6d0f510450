"""Paged keys in the Hopper kernel: NaN in unused rows, pages in random order, queries packed or not."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from emulator.emulate import with_source
from emulator.mutation import replaced
from everyday import everyday
from paged_cases import Pool, dense, pool, queries, without_keys

import strobe
from strobe.emulator import EmulatorError, backend, compiler
from strobe.problem import page_checks

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
LENGTHS, COUNTS = [37, 0, 150, 100, 99, 1, 16], [1, 2, 40, 1, 0, 1, 5]
CASES: dict[str, dict[str, Any]] = {
    "packed_16": {"page": 16},
    "packed_1": {"page": 1},
    "gqa_12": {"page": 12, "counts": [2] * 7},
    "packed_48_window": {"page": 48, "mask": strobe.window(20, 0)},
    "packed_256_full": {"page": 256, "mask": None},
    "gqa_8": {"page": 8, "counts": [2] * 7},
    "gqa_64_hnd": {"page": 64, "counts": [2] * 7, "layout": "hnd"},
    "gqa_16_indptr": {"page": 16, "counts": [2] * 7, "indptr": True},
    "starts": {"page": 16, "counts": [2] * 7, "starts": [5, 0, 100, -3, 7, 0, 2], "mask": strobe.window(30, 0)},
    "alibi": {"page": 16, "counts": [2] * 7, "score": strobe.alibi(torch.tensor([0.1, 0.2, 0.3, 0.4]))},
    "stripes": {"page": 16, "mask": strobe.causal & strobe.mask_function(lambda b, h, q, k: (q - k) % 3 != 1)},
}


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROBE_EMULATE", "sm90")


@pytest.mark.parametrize("name", everyday(list(CASES), ("packed_16", "packed_1", "gqa_16_indptr")))
def test_against_the_textbook(name: str) -> None:
    case = dict(CASES[name])
    page, counts, indptr = case.pop("page"), case.pop("counts", None), case.pop("indptr", False)
    p = pool(LENGTHS, page, dim=64, dim_v=64, dtype=torch.bfloat16)
    q, cu = queries(counts or COUNTS, dim=64, dtype=torch.bfloat16)
    k, v, table = p.k, p.v, p.table
    if case.get("layout") == "hnd":
        k, v = (t.transpose(1, 2).contiguous() for t in (k, v))
    if indptr:
        used = [-(-n // page) for n in LENGTHS]
        ends = torch.tensor([0, *used], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        table = (ends, torch.cat([p.table[i, :n] for i, n in enumerate(used)]))
    if "starts" in case:
        case["starts"] = torch.tensor(case["starts"], dtype=torch.int32)
    given = (q, k, v, table, p.lengths, cu) if counts is None else (q.view(7, 2, 4, 64), k, v, table, p.lengths)
    out, lse = strobe.attention_paged(*given, return_lse=True, backend="emulator", **case)
    want, want_lse = strobe.attention_paged(*given, return_lse=True, backend="reference", **case)
    if "starts" not in case and "layout" not in case and not indptr:
        options = {"mask": case.get("mask", strobe.causal), "score": case.get("score")}
        whole = dense(q, cu, p, **options)
        if counts is not None:
            whole = whole[0].view(7, 2, 4, 64), whole[1].view(4, 7, 2).transpose(0, 1)
        torch.testing.assert_close(want.double(), whole[0].double(), atol=0.01, rtol=0.01)
    torch.testing.assert_close(out.double(), want.double(), atol=0.03, rtol=0.01)
    torch.testing.assert_close(lse, want_lse.to(lse.dtype), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", everyday(["packed", "packed_window", "dense", "dense_full_8_heads"], ["packed"]))
def test_trees(name: str) -> None:
    """Each query says which of the new keys it sees. `packed` has sequences with fewer keys than queries."""
    dense_queries, heads = name.startswith("dense"), 8 if "heads" in name else 4
    mask = strobe.window(20, 0) if "window" in name else None if "full" in name else strobe.causal
    lengths, counts = ([37, 150, 3], [5, 64, 4]) if not dense_queries else ([37, 150, 9], [3, 3, 3])
    p = pool(lengths, 16, dim=64, dim_v=64, dtype=torch.bfloat16)
    q, cu = queries(counts, heads=heads, dim=64, dtype=torch.bfloat16)
    tail = torch.randint(-(1 << 62), 1 << 62, (len(q),), generator=torch.Generator().manual_seed(2))
    given: tuple[Any, ...] = (q, p.k, p.v, p.table, p.lengths, cu)
    if dense_queries:
        given, tail = (q.view(3, 3, heads, 64), *given[1:5]), tail.view(3, 3)
    out, lse = strobe.attention_paged(*given, tail=tail, mask=mask, return_lse=True, backend="emulator")
    want, want_lse = strobe.attention_paged(*given, tail=tail, mask=mask, return_lse=True, backend="reference")
    torch.testing.assert_close(out.double(), want.double(), atol=0.03, rtol=0.01)
    torch.testing.assert_close(lse, want_lse.to(lse.dtype), atol=1e-4, rtol=1e-5)


def test_keys_are_split() -> None:
    p = pool([3000, 1, 2100], 64, dim=128, dim_v=128, dtype=torch.bfloat16)
    q, cu = queries([1, 1, 1], dim=128, dtype=torch.bfloat16)
    out, lse = strobe.attention_paged(
        q.view(3, 1, 4, 128), p.k, p.v, p.table, p.lengths, return_lse=True, backend="emulator"
    )
    want, want_lse = dense(q, cu, p, mask=strobe.causal)
    torch.testing.assert_close(out.flatten(0, 1).double(), want.double(), atol=0.01, rtol=0.01)
    torch.testing.assert_close(lse.transpose(0, 1).flatten(1), want_lse.float(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("page", [1, 16])
def test_warps_of_the_producer_meet_in_any_order(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies land late and in any order, and some sequences have no keys."""
    monkeypatch.setenv("STROBE_EMULATOR_MODE", "async")
    p = pool([37, 0, 300, 0, 0, 200, 1], page, dim=64, dim_v=64, dtype=torch.bfloat16)
    q, _ = queries([2] * 7, dim=64, dtype=torch.bfloat16)
    given = (q.view(7, 2, 4, 64), p.k, p.v, p.table, p.lengths)
    want = strobe.attention_paged(*given, backend="reference")
    for seed in ("1", "2"):
        monkeypatch.setenv("STROBE_EMULATOR_SEED", seed)
        out = strobe.attention_paged(*given, backend="emulator")
        torch.testing.assert_close(out.double(), want.double(), atol=0.03, rtol=0.01)


# Of the sequences below: all keys of the first, some in each block of keys of the third, one in the first block of the
# fourth. Pages have more keys.
LONGER, MISSING = [37, 0, 300, 290, 99, 1, 16], {0: range(37), 2: (70, 140, 299), 3: (5,)}


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables as on a GPU, where nobody looks at what they hold."""
    monkeypatch.setattr(page_checks, "check_contents", lambda *_: None)


def attend(p: Pool, q: torch.Tensor, *cu: torch.Tensor, backend: str = "emulator", **options: Any) -> Any:
    given = (q, p.k, p.v, p.table, p.lengths, *cu)
    return strobe.attention_paged(*given, return_lse=True, backend=backend, **options)


def agree(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found[0].double(), expected[0].double(), atol=0.03, rtol=0.01)
    torch.testing.assert_close(found[1], expected[1].to(found[1].dtype), atol=1e-4, rtol=1e-5)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "name",
    everyday(
        ["1", "16", "64", "256", "1_packed", "12", "16_packed", "48_window_packed", "256_full_packed"],
        ["1", "16", "16_packed"],
    ),
)
def test_entries_that_are_no_pages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys are missing, and nothing is read for them."""
    mask = strobe.window(20, 0) if "window" in name else None if "full" in name else strobe.causal
    p = without_keys(pool(LONGER, int(name.split("_")[0]), dim=64, dim_v=64, dtype=torch.bfloat16), MISSING)
    q, cu = queries(COUNTS if "packed" in name else [2] * 7, dim=64, dtype=torch.bfloat16)
    given = (p, q, cu) if "packed" in name else (p, q.view(7, 2, 4, 64))
    want = attend(*given, mask=mask, backend="reference")
    assert (want[0].flatten(0, -3)[0] == 0).all() and not want[0].isnan().any()  # a query that sees no keys
    agree(attend(*given, mask=mask), want)
    monkeypatch.setenv("STROBE_EMULATOR_MODE", "async")
    for seed in ("1", "2"):
        monkeypatch.setenv("STROBE_EMULATOR_SEED", seed)
        agree(attend(*given, mask=mask), want)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("page", [16, 1])
def test_lengths_beyond_the_table(page: int) -> None:
    """They are cut to the entries that a sequence has: behind them lie those of others."""
    p = pool([48, 0, 304, 16], page, dim=64, dim_v=64, dtype=torch.bfloat16)
    used = p.lengths // page
    ends = torch.cat([torch.zeros(1), used.cumsum(0)]).int()
    ragged = (ends, torch.cat([entries[:n] for entries, n in zip(p.table, used.tolist(), strict=True)]))
    q, _ = queries([2] * 4, dim=64, dtype=torch.bfloat16)
    found, want = (
        strobe.attention_paged(q.view(4, 2, 4, 64), p.k, p.v, ragged, n, return_lse=True, backend="emulator")
        for n in (p.lengths + 300, p.lengths)
    )
    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])


@pytest.mark.usefixtures("unchecked")
def test_splits_without_keys() -> None:
    p = pool([3000, 1, 2100], 64, dim=128, dim_v=128, dtype=torch.bfloat16)
    p = without_keys(p, {0: range(2000), 2: range(2100)})
    q, _ = queries([1, 1, 1], dim=128, dtype=torch.bfloat16)
    given = (p, q.view(3, 1, 4, 128))
    out, lse = attend(*given)
    agree((out, lse), attend(*given, backend="reference"))
    assert (out[2] == 0).all() and (lse[2] == -torch.inf).all()


class Mutation(NamedTuple):
    old: str
    new: str
    page: int = 16


TELL = "if (tells) tell(ring, missing);"
LOOK, RELEASE = "missing.look(k.stage);", "wgmma_wait<kIssuedSince>();\n    pin(s);\n    k.release_and_advance();"
GATHERED = "cp_async_wait<0>();\n    fence_proxy_async();\n    mbar_arrive(ring.full_barrier());"
MUTATIONS = {
    "told_of_none": Mutation(
        "st_shared(missing_word<Config>(ring.stage), u32(some))", "st_shared(missing_word<Config>(ring.stage), 0u)"
    ),
    "told_of_a_buffer_in_use": Mutation(f"ring.wait_empty();\n    {TELL}", f"{TELL}\n    ring.wait_empty();"),
    # Of pages, the first thread announces more before consumers look: there it would be early enough.
    "told_after_the_arrival": Mutation(GATHERED, f"{GATHERED} if (t.tells) tell(ring, true);", 1),
    "entries_of_another_block": Mutation("if (asked.row != row)", "if (asked.row < 0)", 1),
    "not_looked_at": Mutation(LOOK, ""),
    "looked_at_after_the_release": Mutation(
        f"{LOOK}\n    {RELEASE}", f"const u32 stage = k.stage;\n    {RELEASE}\n    missing.look(stage);"
    ),
    "released_for_lanes_that_look": Mutation("sync_warp();  // every lane knows it before", "//"),
    "rows_of_no_page_read": Mutation("page < 0 ? 0 : left, head)", "left, head)"),
    "other_keys_hidden": Mutation("(missing >> 2 * (lane % 4) & 0x0303", "(missing & 0x0303", 1),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", everyday(list(MUTATIONS), ["told_of_a_buffer_in_use", "told_after_the_arrival"]))
def test_mutations_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation, real, edited = MUTATIONS[name], backend.launch, []

    def edit(source: str) -> str:
        if "struct KeyLoader" not in source or "struct ForwardSm90" not in source:  # the planner's
            return source
        edited.append(name)
        return replaced(name, source, mutation.old, mutation.new)

    monkeypatch.setattr(backend, "launch", lambda plan, *a, **o: real(with_source(plan, edit), *a, **o))
    monkeypatch.setenv("STROBE_EMULATOR_MODE", "async")
    p = without_keys(pool(LONGER, mutation.page, dim=64, dim_v=64, dtype=torch.bfloat16), MISSING)
    q, _ = queries([2] * 7, dim=64, dtype=torch.bfloat16)
    given = (p, q.view(7, 2, 4, 64))
    want = attend(*given, backend="reference")

    def passes(seed: str) -> bool:
        monkeypatch.setenv("STROBE_EMULATOR_SEED", seed)
        try:
            agree(attend(*given), want)
        except (EmulatorError, AssertionError) as error:
            print(f"{name}: {error}"[:300])
            return False
        return True

    assert not all(map(passes, "123")) and edited, f"{name} passes unnoticed"
