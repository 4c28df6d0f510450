"""`invariant=True`: a row has the same bits whatever is beside it, on the real kernel.

Sequences have names, and queries at fixed positions of them. A call computes some spans of positions; what it gives for a
position of a sequence must not depend on the call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from emulator.emulate import with_source
from emulator.mutation import replaced
from everyday import everyday

import strobe
from strobe.call.attend import attend as attend_to
from strobe.cuda.parts.plan import Plan
from strobe.cuda.plans import forward_sm90, plan_work
from strobe.emulator import backend, compiler
from strobe.problem import Problem, page_checks
from strobe.problem.arguments import Arguments
from strobe.variants.score import softcap

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
HEADS, HEADS_K, DIM, BLOCK = 4, 2, 64, 128
SPLIT = 2 * BLOCK  # keys: as few as let a block be the second one of a split
LENGTHS = {"some": 1400, "long": 4700, "short": 5, "edge": 256, "none": 0}
DTYPE = torch.bfloat16


class Span(NamedTuple):
    """Queries at positions [first, end) of a sequence, whose keys end there."""

    name: str
    first: int
    end: int


# What is looked at: 44 queries, and some of them alone. Keys are cut at 1024, and windows begin on both sides of 768.
CHUNK = Span("some", 987, 1031)
ALONE = [Span("some", at, at + 1) for at in (987, 988, 995, 1023, 1024, 1025, 1030)]
OTHERS = [Span("long", 4640, 4641), Span("none", 0, 0), Span("short", 0, 5), Span("edge", 255, 256)]


class Row(NamedTuple):
    name: str
    position: int


Bits = dict[Row, tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(autouse=True)
def hopper_with_small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few keys suffice then, and take the emulator little time."""
    monkeypatch.setenv("STROBE_EMULATE", "sm90")
    monkeypatch.setattr(plan_work, "FIRST_SPLITS", SPLIT)


def keys_of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    k, v = torch.randn(2, LENGTHS[name], HEADS_K, DIM, generator=generator)
    return k.to(DTYPE), v.to(DTYPE)


def queries_of(span: Span) -> torch.Tensor:
    """Some have scores so large that their maximum is subtracted first, some whose maximum jumps from block to block: what
    a warp decides for one of them it would decide for its neighbours, too."""
    found = torch.empty(span.end - span.first, HEADS, DIM)
    for i, position in enumerate(range(span.first, span.end)):
        generator = torch.Generator().manual_seed(position)
        found[i] = torch.randn(HEADS, DIM, generator=generator) * {2: 1e5, 5: 20.0}.get(position % 8, 1.0)
    return found.to(DTYPE)


def attend(
    spans: Sequence[Span],
    page: int = 16,
    *,
    dense: bool = False,
    gone: int = 0,
    missing: range = range(0),
    check: bool = False,
    mask: Any = strobe.causal,
    **options: Any,
) -> Bits:
    """`gone`: so many keys in front have left the tables. `missing`: those whose entries are no pages. `check`: against the
    reference, too."""
    counts = [-(-(s.end - gone) // page) for s in spans]
    order = iter(torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(len(spans))).tolist())
    table = torch.full((len(spans), max(counts) + 1), -5, dtype=torch.int32)
    pools = [torch.full((sum(counts) + 2, page, HEADS_K, DIM), torch.nan, dtype=DTYPE) for _ in "kv"]
    for i, (span, count) in enumerate(zip(spans, counts, strict=True)):
        for entry in range(count):
            table[i, entry] = next(order)
            for pool, t in zip(pools, keys_of(span.name), strict=True):
                rows = t[: span.end][gone + entry * page :][:page]
                pool[table[i, entry], : len(rows)] = rows
            if gone + entry * page in missing:
                table[i, entry] = -1
    lengths = torch.tensor([s.end - gone for s in spans], dtype=torch.int32)
    q, cu = torch.cat([queries_of(s) for s in spans]), None
    if dense:
        q = q.view(len(spans), -1, HEADS, DIM)
    else:
        cu = torch.tensor([0, *(s.end - s.first for s in spans)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    if gone:
        options["starts"] = torch.full_like(lengths, gone)
    longest = max(s.end - s.first for s in spans)
    a = Arguments(q, *pools, cu, None, longest, None, mask, table=table, lengths=lengths, return_lse=True, **options)
    out, lse = attend_to(a._replace(backend="emulator", invariant=True))
    if check:
        want, want_lse = attend_to(a._replace(backend="reference"))
        torch.testing.assert_close(out.double(), want.double(), atol=0.03, rtol=0.01)
        torch.testing.assert_close(lse, want_lse.to(lse.dtype), atol=1e-4, rtol=1e-5)
    if dense:
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    rows = [Row(s.name, position) for s in spans for position in range(s.first, s.end)]
    return {row: (out[i].view(torch.uint8), lse[:, i].view(torch.int32)) for i, row in enumerate(rows)}


def differing(found: Bits, expected: Bits) -> list[Row]:
    """Rows that both have, and some they must, whose bits are not the same."""
    both = found.keys() & expected.keys()
    assert both
    return sorted(row for row in both if not all(map(torch.equal, found[row], expected[row])))


WAYS: dict[str, Callable[..., Bits]] = {
    "alone": lambda **o: {row: bits for span in ALONE for row, bits in attend([span], **o).items()},
    "in_a_batch": lambda **o: attend([*OTHERS, *ALONE], **o),
    "in_another_order": lambda **o: attend([ALONE[3], *OTHERS[::-1], CHUNK], **o),
    "in_another_chunk": lambda **o: attend([Span("some", 980, 1090)], **o),
    "four_queries": lambda **o: attend([Span("some", at, at + 4) for at in (987, 1021, 1025)], **o),
    "pages_of_64": lambda **o: attend([CHUNK], page=64, **o),
    "pages_of_1": lambda **o: attend([*ALONE[:2], OTHERS[2]], page=1, **o),
    "dense": lambda **o: attend(ALONE, dense=True, **o),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp32": {"partial": True},  # as levels are computed; shows more bits
    "window_softcap_sinks": {
        "mask": strobe.window(260, 0),
        "score": softcap(50.0),
        "sinks": torch.tensor([0.5, -1.0, 30.0, -torch.inf]),
    },
    "window": {"mask": strobe.window(140, 0)},
    "no_mask": {"mask": None},
    "alibi": {"score": strobe.alibi(torch.tensor([0.01, 0.1, 0.2, 0.5]))},
}
CASES = [f"{o}-{way}" for o in OPTIONS for way in WAYS if o != "no_mask" or way == "pages_of_1"]
EVERY_DAY = [  # three programs
    *(f"fp32-{way}" for way in ("alone", "in_a_batch", "in_another_order", "in_another_chunk", "four_queries")),
    "plain-alone",
    "window_softcap_sinks-in_a_batch",
]


@pytest.mark.parametrize("case", everyday(CASES, EVERY_DAY))
def test_a_row_has_the_same_bits(case: str) -> None:
    name, way = case.split("-")
    options = OPTIONS[name]
    if name == "no_mask":  # a row sees all keys of its span, so other spans are other keys
        assert not differing(WAYS[way](**options), attend([*OTHERS, *ALONE[:2]], **options))
        return
    assert not differing(WAYS[way](**options), attend([CHUNK, *OTHERS], check=way == "alone", **options))


@pytest.mark.parametrize("sms", everyday([4, 132], ("132",)))
def test_the_machine_does_not_matter(sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = attend([CHUNK, *OTHERS])
    monkeypatch.setitem(backend.MACHINES, "sm90", dataclasses.replace(backend.MACHINES["sm90"], sms=sms))
    assert not differing(attend([*OTHERS, CHUNK]), expected)


def test_keys_that_left_the_table_do_not_matter() -> None:
    """Beside a window: whole blocks of them."""
    mask = strobe.window(200, 0)
    expected = attend([CHUNK, OTHERS[0]], mask=mask)
    assert not differing(attend([OTHERS[0], CHUNK], mask=mask, gone=3 * BLOCK), expected)


@pytest.mark.parametrize("way", everyday(["alone", "in_a_batch", "pages_of_1"], ["alone"]))
def test_missing_keys_are_the_same_for_all(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some in the middle of a block, and most of a split."""
    monkeypatch.setattr(page_checks, "check_contents", lambda *_: None)
    options: dict[str, Any] = {"partial": True, "missing": range(192, 496)}
    expected = attend([CHUNK, *OTHERS], check=True, **options)
    assert not differing(WAYS[way](**options), expected)
    assert differing(expected, attend([CHUNK, *OTHERS], partial=True))


@pytest.mark.thorough
def test_many_splits() -> None:
    """More than are read at once when they are merged."""
    chunk = Span("long", 4560, 4600)
    for mask in (strobe.causal, strobe.window(1500, 0)):
        expected = attend([chunk, *OTHERS[1:]], mask=mask, partial=True)
        assert not differing(attend([Span("long", 4580, 4581), ALONE[0]], mask=mask, partial=True), expected)


@pytest.mark.parametrize("end", everyday([127, 128, 129, 255, 256, 257, 383, 385], ("128", "129", "257")))
def test_lengths_around_a_cut(end: int) -> None:
    """One split that is written at once, or its merge with others in which the row sees nothing."""
    alone = attend([Span("some", end - 1, end)], check=True)
    assert not differing(alone, attend([Span("some", max(0, end - 20), end + 300)]))


@pytest.mark.thorough
@pytest.mark.parametrize("page", [1, 16])
def test_copies_that_land_late_do_not_matter(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order in which splits are ready does not matter either."""
    spans = [*OTHERS[1:], Span("some", 298, 300)]
    expected = attend(spans, page)
    monkeypatch.setenv("STROBE_EMULATOR_MODE", "async")
    for seed in ("1", "2"):
        monkeypatch.setenv("STROBE_EMULATOR_SEED", seed)
        assert not differing(attend(spans, page), expected)


@pytest.mark.thorough
def test_splits_of_the_usual_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("STROBE_EMULATE", "sm90")
    assert plan_work.FIRST_SPLITS == 32 * BLOCK
    expected = attend([CHUNK, OTHERS[0]], check=True)
    assert not differing(attend([*ALONE, Span("long", 4600, 4650)]), expected)


def test_a_list_serves_several_launches() -> None:
    """The layers of a step share a list: what splits count themselves in with is zero again."""
    k, v = (t.view(-1, 16, HEADS_K, DIM) for t in (x[:640].contiguous() for x in keys_of("some")))
    q = queries_of(Span("some", 636, 640))[None]
    table, lengths = torch.arange(40, dtype=torch.int32)[None], torch.tensor([640], dtype=torch.int32)
    a = Arguments(q, k, v, mask=strobe.causal, table=table, lengths=lengths, invariant=True)
    problem, _ = Problem.of(a)
    plan = forward_sm90.plan(problem, {"o": (4 * HEADS * DIM, DIM, HEADS * DIM)}, backend.MACHINES["sm90"])
    tensors = {name: torch.zeros(size // 4, dtype=torch.int32) for name, size in plan.workspace.items()}
    tensors |= {"q": q, "k": k, "v": v, "table": table, "lengths": lengths}
    backend.launch(Plan(plan.launches[:1]), tensors)
    outs = [torch.full_like(q, torch.nan) for _ in range(3)]
    for out in outs:
        backend.launch(Plan(plan.launches[1:]), tensors | {"o": out})
    assert all(torch.equal(out, outs[0]) for out in outs) and outs[0].isfinite().all()
    want = attend([Span("some", 636, 640)])
    assert all(torch.equal(outs[0][0, i].view(torch.uint8), out) for i, (out, _) in enumerate(want.values()))


class Mutation(NamedTuple):
    """A mutation that would make the bits of a row depend on what is beside it."""

    old: str
    new: str
    options: dict[str, Any] = {"partial": True}  # noqa: RUF012
    chunk: Span = CHUNK
    alone: Sequence[Span] = ALONE


MUTATIONS = {
    "speculative_maximum": Mutation(
        "SpeculativeSoftmax<T, kScores, Config::kInvariant>",
        "SpeculativeSoftmax<T, kScores>",
    ),
    "vote_on_large_maxima": Mutation("subtract<kByRow>(s)", "subtract<false>(s)"),
    "vote_on_tanh": Mutation(
        "Score::kHasTanh && !kByEntry", "Score::kHasTanh", OPTIONS["window_softcap_sinks"] | {"partial": True}
    ),
    "splits_merged_by_fours": Mutation(
        "kTogether = kInvariant ? 1 : kAtOnce",
        "kTogether = 4",
        {"partial": True, "mask": strobe.window(1500, 0)},
        Span("long", 4560, 4600),
        [Span("long", 4580, 4581)],
    ),
    "splits_added_with_other_weights": Mutation("past[r], weight[r]);", "weight[r], past[r]);"),
    "splits_added_under_another_maximum": Mutation(
        "const float m = fmax(ml[r][0], softmax.m[r]), safe", "const float m = ml[r][0], safe"
    ),
    "cuts_that_follow_the_length": Mutation(
        "at = (start - (start < 0) * (Config::kBlockN - 1)) / Config::kBlockN;",
        "at = tile.k.length / Config::kBlockN % 2;",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation, real, edited = MUTATIONS[name], backend.launch, []

    def edit(source: str) -> str:
        if mutation.old not in source:
            return source
        edited.append(name)
        return replaced(name, source, mutation.old, mutation.new)

    monkeypatch.setattr(backend, "launch", lambda plan, *a, **o: real(with_source(plan, edit), *a, **o))
    expected = attend([mutation.chunk], **mutation.options)
    found = {row: bits for span in mutation.alone for row, bits in attend([span], **mutation.options).items()}
    assert edited and differing(found, expected)
