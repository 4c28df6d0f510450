"""The Ampere kernel for few queries and for pages: keys are split among warps and blocks, which then meet."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from cases import Case
from emulator import test_paged as paged
from emulator.emulate import forward, member, only, plan_of, with_source
from emulator.mutation import replaced
from emulator.test_forward_kernels import check
from everyday import everyday
from oracle import prepare
from paged_cases import dense, pool, queries, without_keys

import strobe
from strobe.cuda.parts import blocks
from strobe.cuda.plans import decode_sm80, plan_work
from strobe.emulator import EmulatorError, backend, compiler
from strobe.problem import page_checks
from strobe.variants.mask import causal
from strobe.variants.ready_made import window

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

SMS = 6
CASES = [
    Case("one_query", 1, 700, batch=2, heads=2, heads_k=2, dim=64),
    Case("group_of_4", 1, 500, batch=1, heads=8, heads_k=2, dim=128),
    Case("many_parts", 1, 1400, batch=1, heads=4, heads_k=1, dim=128, scores="rising"),  # more than are read at once
    Case("falling", 1, 600, batch=1, heads=4, heads_k=1, dim=128, scores="falling", scale=0.5),
    Case("group_of_7", 3, 300, batch=2, heads=14, heads_k=2, dim=64, mask=causal),  # 21 rows
    Case("window_sinks", 2, 600, batch=1, heads=32, heads_k=2, dim=64, mask=window(200, 0), sinks=True),
    Case("warps_share_keys", 40, 600, batch=1, heads=4, heads_k=2, dim=64, mask=causal),
    Case("rows_without_keys", 60, 52, batch=1, heads=4, heads_k=2, dim=64, mask=causal),
    Case("softcap_sinks", 5, 600, batch=1, heads=2, dim=96, sinks=True, softcap=4.0, mask=causal),
    Case(
        "packed", 0, 0, heads=6, heads_k=2, dim=64, mask=causal, lengths=((1, 500), (0, 3), (1, 1), (5, 0), (60, 300))
    ),
    Case("sliced", 5, 260, batch=2, heads=4, heads_k=2, dim=96, memory="sliced", mask=window(50, 1)),
    Case("padded", 5, 260, batch=1, heads=4, heads_k=2, dim=72, dim_v=40, softcap=3.0),
    Case("192_128", 3, 500, batch=1, heads=2, dim=192, dim_v=128),
    Case("192_low", 3, 500, batch=1, heads=2, dim=192, scores="low"),
    Case("256", 35, 400, batch=1, dim=256, mask=causal),
]
EVERYDAY = "group_of_4 many_parts falling window_sinks warps_share_keys rows_without_keys packed".split()


@pytest.fixture(autouse=True)
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROBE_EMULATE", "sm80")
    for module, name in ((blocks, "LEAST_SPLIT"), (blocks, "FEWEST_SPLITS"), (decode_sm80, "LEAST_KEYS")):
        monkeypatch.setattr(module, name, 1)


@pytest.mark.parametrize("case", everyday(CASES, EVERYDAY))
def test_case(case: Case) -> None:
    problem, inputs = prepare(case, torch.bfloat16)
    made = plan_of("sm80", problem, (0, problem.dim_v, problem.heads * problem.dim_v), SMS)
    assert "decode" in only(made).kernel.name and member(made, "kPackGqa") == problem.group
    assert member(made, "kSplit") or case.name in ("packed", "rows_without_keys")
    at_once, late = (forward("sm80", problem, inputs, sms=SMS, mode=mode, seed=3) for mode in ("sync", "async"))  # type: ignore[arg-type]
    check(case, torch.bfloat16, at_once)
    assert torch.equal(late[0], at_once[0]) and torch.equal(late[1], at_once[1])


def test_whoever_is_last_the_bits_are_the_same() -> None:
    problem, inputs = prepare(CASES[1], torch.bfloat16)
    results = [forward("sm80", problem, inputs, sms=SMS, mode="async", seed=seed) for seed in range(3)]
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)


# ---- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", everyday(list(paged.CASES), ["packed_16", "packed_1", "gqa_12", "gqa_8"]))
def test_pages_against_the_textbook(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROBE_EMULATOR_MODE", "async")
    paged.test_against_the_textbook(name)


@pytest.mark.parametrize("queries_of_each", [1, 4])
def test_keys_of_pages_are_split(queries_of_each: int) -> None:
    p = pool([1500, 1, 0, 1100], 16, dim=64, dim_v=64, dtype=torch.bfloat16)
    q, cu = queries([queries_of_each] * 4, dim=64, dtype=torch.bfloat16)
    given = (q.view(4, queries_of_each, 4, 64), p.k, p.v, p.table, p.lengths)
    out, lse = strobe.attention_paged(*given, return_lse=True, backend="emulator")
    want, want_lse = dense(q, cu, p, mask=strobe.causal)
    torch.testing.assert_close(out.flatten(0, 1).double(), want.double(), atol=0.02, rtol=0.01)
    torch.testing.assert_close(lse.transpose(0, 1).flatten(1), want_lse.float(), atol=1e-4, rtol=1e-5)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables as on a GPU, where nobody looks at what they hold."""
    monkeypatch.setattr(page_checks, "check_contents", lambda *_: None)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("page", everyday([1, 12, 16, 64], ["1", "16"]))
def test_entries_that_are_no_pages(page: int, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROBE_EMULATOR_MODE", "async")
    p = without_keys(pool(paged.LONGER, page, dim=64, dim_v=64, dtype=torch.bfloat16), paged.MISSING)
    q, cu = queries(paged.COUNTS if packed else [2] * 7, dim=64, dtype=torch.bfloat16)
    given = (p, q, cu) if packed else (p, q.view(7, 2, 4, 64))
    paged.agree(paged.attend(*given), paged.attend(*given, backend="reference"))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("page", everyday([16, 1], ["16"]))
def test_lengths_beyond_the_table(page: int) -> None:
    p = pool([48, 0, 304, 16], page, dim=64, dim_v=64, dtype=torch.bfloat16)
    q, _ = queries([2] * 4, dim=64, dtype=torch.bfloat16)
    used = p.lengths // page
    ends = torch.cat([torch.zeros(1), used.cumsum(0)]).int()
    ragged = (ends, torch.cat([entries[:n] for entries, n in zip(p.table, used.tolist(), strict=True)]))
    found, want = (
        strobe.attention_paged(q.view(4, 2, 4, 64), p.k, p.v, ragged, n, return_lse=True, backend="emulator")
        for n in (p.lengths + 300, p.lengths)
    )
    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])


def test_a_shared_level() -> None:
    """Its fp32 result is a state that the sequences' own keys are merged with."""
    p, prefix = (
        pool(n, 16, dim=64, dim_v=64, dtype=torch.bfloat16, seed=i) for i, n in enumerate(([37, 0, 90], [120]))
    )
    k, v = (torch.cat(pair) for pair in ((p.k, prefix.k), (p.v, prefix.v)))
    level = strobe.paged.Level(prefix.table + len(p.k), prefix.lengths, torch.tensor([0, 3], dtype=torch.int32))
    q, _ = queries([1] * 3, dim=64, dtype=torch.bfloat16)
    given = (q.view(3, 1, 4, 64), k, v, p.table, p.lengths)
    paged.agree(
        *(strobe.attention_paged(*given, shared=[level], return_lse=True, backend=b) for b in ("emulator", "reference"))
    )


# ---- invariant rows --------------------------------------------------------------------------------------------------


def test_a_row_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, beside others, in pages of another size, and whichever blocks have its splits."""
    monkeypatch.setattr(plan_work, "FIRST_SPLITS", 128)
    keys = torch.randn(2, 600, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = torch.randn(600, 4, 64, generator=torch.Generator().manual_seed(1)) * 4
    rows[::8] *= 1e4  # their maxima are subtracted first

    def attend(*spans: tuple[int, int], page: int = 16, sms: int = 3, b: str = "emulator") -> dict[int, torch.Tensor]:
        """Each span of positions is one sequence, whose keys end with its queries."""
        machine = dataclasses.replace(backend.MACHINES["sm80"], sms=sms)
        monkeypatch.setitem(backend.MACHINES, "sm80", machine)
        k, v = torch.nn.functional.pad(keys, (0, 0, 0, 0, 0, -600 % page)).unflatten(1, (-1, page))
        table = torch.arange(len(k), dtype=torch.int32).expand(len(spans), -1).contiguous()
        q = torch.cat([rows[first:end] for first, end in spans]).bfloat16()
        cu = torch.tensor([0, *(end - first for first, end in spans)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lengths = torch.tensor([end for _, end in spans], dtype=torch.int32)
        out = strobe.attention_paged(
            q, k, v, table, lengths, cu, max_q=max(b - a for a, b in spans), backend=b, invariant=b == "emulator"
        )
        return dict(zip((at for first, end in spans for at in range(first, end)), out, strict=True))

    chunk = attend((500, 522), (3, 5), (90, 91))
    want = attend((500, 522), b="reference")
    for at in range(500, 522):
        torch.testing.assert_close(chunk[at].double(), want[at].double(), atol=0.03, rtol=0.01)
    for found in (attend((508, 509)), attend((512, 513), (511, 512), page=1, sms=20), attend((505, 521), sms=1)):
        assert all(torch.equal(chunk[at], row) for at, row in found.items())


# ---- mutations -------------------------------------------------------------------------------------------------------


class Mutation(NamedTuple):
    old: str
    new: str
    page: int = 16


WAIT = "cp_async_wait<kStages - 2>();\n      sync_team();"
MUTATIONS = {
    "no_wait": Mutation(WAIT, "sync_team();"),
    "no_barrier": Mutation(WAIT, "cp_async_wait<kStages - 2>();"),
    "waits_for_one_less": Mutation(WAIT, WAIT.replace("kStages - 2", "kStages - 1")),
    "queries_of_others": Mutation("sync_block();  // all rows of Q are here", ""),
    "another_stage": Mutation("load(loader, next, last), next", "load(loader, next, stage), next"),
    "warp_forgotten": Mutation("for (int t = 1; t < kTeams; ++t) x.add", "for (int t = 1; t < kTeams - 1; ++t) x.add"),
    "parts_too_early": Mutation("sync_block();  // all are done with the buffers", ""),
    "next_tile_too_early": Mutation("sync_block();  // all have read what lies over the buffers", ""),
    "not_counted_in": Mutation("if (!split.is_last(word)) return;", "if (split.is_last(word)) return;"),
    "entries_beyond_the_length": Mutation("return row + lane_row(group) < s.k.used;", "return true;"),
    "rows_of_no_page_read": Mutation("page < 0 ? kNowhere\n                    : u32((", "u32(("),
    "missing_not_hidden": Mutation("if constexpr (kListed) hide_missing(s[t], stage);", ""),
    "other_keys_hidden": Mutation("(column % kEach + 2 * (lane % 4)) & 1", "(column % kEach) & 1", page=1),
    "keys_of_another_warp": Mutation("int(thread_idx() / 32) * kRows;", "int(thread_idx() / 64) * kRows;"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "name", everyday(list(MUTATIONS), ["no_wait", "another_stage", "warp_forgotten", "entries_beyond_the_length"])
)
def test_mutations_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation, real, edited = MUTATIONS[name], backend.launch, []

    def edit(source: str) -> str:
        if "struct DecodeSm80" not in source:  # the planner's
            return source
        edited.append(name)
        return replaced(name, source, mutation.old, mutation.new)

    monkeypatch.setattr(decode_sm80, "MOST_STAGES", 2)  # so that buffers are used again
    monkeypatch.setattr(backend, "launch", lambda plan, *a, **o: real(with_source(plan, edit), *a, **o))
    monkeypatch.setenv("STROBE_EMULATOR_MODE", "async")
    p = without_keys(pool(paged.LONGER, mutation.page, dim=64, dim_v=64, dtype=torch.bfloat16), paged.MISSING)
    q, _ = queries([2] * 7, dim=64, dtype=torch.bfloat16)
    given = (p, q.view(7, 2, 4, 64))
    want = paged.attend(*given, backend="reference")

    def passes(seed: str) -> bool:
        monkeypatch.setenv("STROBE_EMULATOR_SEED", seed)
        try:
            paged.agree(paged.attend(*given), want)
        except (EmulatorError, AssertionError) as error:
            print(f"{name}: {error}"[:300])
            return False
        return True

    assert not all(map(passes, "123")) and edited, f"{name} passes unnoticed"


def test_plans_say_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    tiles: dict[str, Any] = {
        arch: decode_sm80.table_tile(4, 128, 128, arch) for arch in ("sm_80", "sm_86", "sm_90", "sm_120")
    }
    assert {tile.block_m for tile in tiles.values()} == {16}
    assert tiles["sm_86"].blocks_per_sm == 1 and tiles["sm_90"].keys > tiles["sm_80"].keys
