"""Every rung of the ladder on the GPU that there is, by the rule that the emulator's tests use."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from ladder_cases import CASES, GAIN, LARGE_SCORES

from strobe.bench import runner
from strobe.learn.ladder import execute, measure, rungs
from strobe.learn.ladder.exact import judge
from strobe.learn.ladder.rung import Rung, Shape
from strobe.measure import stopwatch as bench_measure

SHAPES = {
    **CASES,
    "long": Shape(slices=3, len_q=1000, len_k=1500, dim=64),
    "long, causal": Shape(2, 1500, 1500, 64, True),
}


def check(rung: Rung, shape: Shape, gain: float = 1.0) -> None:
    device = torch.device("cuda", 0)
    if (reason := execute.cannot_run(rung, device)) is not None:
        pytest.skip(reason)
    x = execute.make(rung, shape, device, gain=gain)
    execute.prepare(rung, shape, x)()
    torch.cuda.synchronize()
    error = judge(rung, shape, x)
    assert error.passed, f"{rung.name}, {shape}: {error}"


@pytest.mark.parametrize("rung", rungs.RUNGS, ids=lambda rung: rung.number)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("case", SHAPES)
def test_exact(rung: Rung, dim: int, case: str) -> None:
    check(rung, dataclasses.replace(SHAPES[case], dim=dim))


@pytest.mark.parametrize("rung", [r for r in rungs.RUNGS if not r.backward], ids=lambda rung: rung.number)
def test_scores_of_a_thousand(rung: Rung) -> None:
    check(rung, LARGE_SCORES, GAIN)


@pytest.mark.alone
def test_the_gradient_is_timed_as_a_flight() -> None:
    """b4, the library's, is the fastest, and each row has what the documents need."""
    rows = measure.run(Shape(slices=16, len_q=2048, len_k=2048, dim=128), rungs.BACKWARD, torch.device("cuda", 0))
    timed = [row for row in rows if not row.skipped]
    assert timed and all(row.passed and row.ms and row.tflops for row in timed), rows
    assert not any(row.failed for row in rows)
    if len(timed) == len(rungs.BACKWARD):
        assert max(timed, key=lambda row: row.tflops or 0).number == "b4"
        assert all(row.speed_up for row in timed[2:])


def test_sums_by_atomics_differ_in_their_last_bits_only() -> None:
    """b1 gives the same bits every time. b2 and b3 add dQ in any order, and stay within the rule."""
    shape = Shape(slices=2, len_q=1024, len_k=1024, dim=64)
    for number in ("b1", "b2", "b3"):
        rung, device = rungs.get(number), torch.device("cuda", 0)
        if execute.cannot_run(rung, device) is not None:
            continue
        x = execute.make(rung, shape, device)
        launch = execute.prepare(rung, shape, x)
        found = []
        for _ in range(3):
            launch()
            torch.cuda.synchronize()
            assert judge(rung, shape, x).passed
            found.append([t.clone() for t in x.results(rung).values()])
        first = found[0]
        for again in found[1:]:
            same = [torch.equal(a, b) for a, b in zip(first, again, strict=True)]
            assert same[1:] == [True, True] and (same[0] or number != "b1"), number


def test_rows_are_timed() -> None:
    shape = Shape(slices=4, len_q=512, len_k=512, dim=64)
    rows = measure.run(shape, [rungs.get("05"), rungs.get("09")], torch.device("cuda", 0))
    for row in rows:
        assert row.skipped or (row.passed and row.ms and row.tflops and row.samples >= 3), row
    assert rows[1].speed_up is None  # 08, against which 09 is measured, was not run


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_unfused_rungs_are_a_provider(direction: str) -> None:
    settings = bench_measure.Settings(budget_ms=5, rounds=3, warmup_ms=0)
    request = runner.Request(
        ("grid36",),
        torch.device("cuda", 0),
        direction=direction,
        providers=("cuda-unfused",),
        only=("d64-causal-512", "d128-full-512"),
        settings=settings,
    )
    rows = runner.Runner(request).run().rows
    assert len(rows) == 2
    for row in rows:
        assert row.timed and row.error is not None and row.error.passed and "kernel" in row.kernels, row
