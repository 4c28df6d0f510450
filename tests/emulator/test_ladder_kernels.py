"""Every rung of the ladder, unchanged, on the emulator: right, free of races, and doing the work that its header
says."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from ladder_cases import CASES, GAIN, LARGE_SCORES, WIDE

from strobe.emulator import Counters, EmulatorError, compiler
from strobe.learn.ladder import execute, measure, rungs
from strobe.learn.ladder.exact import judge
from strobe.learn.ladder.rung import Rung, Shape

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
every_rung = pytest.mark.parametrize("rung", rungs.RUNGS, ids=lambda rung: rung.number)


@pytest.fixture(scope="module", autouse=True)
def _built_side_by_side() -> None:
    """One compiler a core; with several workers the tests are spread already."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        measure.build_all(CASES["ragged"], rungs.RUNGS, torch.device("cpu"))


def check(rung: Rung, shape: Shape, mode: str = "sync", seed: int = 0, gain: float = 1.0) -> Counters:
    x = execute.make(rung, shape, seed=seed, gain=gain)
    counters = execute.emulate(rung, shape, x, mode, seed)
    error = judge(rung, shape, x)
    assert error.passed, f"{rung.name}, {shape}: {error}"
    return counters


@every_rung
@pytest.mark.parametrize("case", CASES)
def test_exact(rung: Rung, case: str) -> None:
    check(rung, CASES[case])


@every_rung
def test_scores_of_a_thousand(rung: Rung) -> None:
    x = execute.make(rung, LARGE_SCORES, gain=GAIN)
    scores = x.q.double() @ x.k.double().mT * LARGE_SCORES.scale
    assert scores.abs().max() > 1000
    if (
        rung.backward
    ):  # the weights are 0 or 1: gradients are differences of nearly equal numbers, and only have to be finite
        execute.emulate(rung, LARGE_SCORES, x)
        assert all(torch.isfinite(t).all() for t in x.results(rung).values())
    else:
        check(rung, LARGE_SCORES, gain=GAIN)


@every_rung
def test_no_race_when_copies_land_late(rung: Rung) -> None:
    check(rung, CASES["causal, more keys"], mode="async", seed=1)


# The scalar rungs, which have no copies in flight, do the same for every tile, and slowly.
@pytest.mark.parametrize("rung", [r for r in rungs.RUNGS if r.element != "float"], ids=lambda rung: rung.number)
def test_no_race_over_many_tiles(rung: Rung) -> None:
    check(rung, CASES["many tiles of keys"], mode="async", seed=1)


def test_a_missing_barrier_is_noticed() -> None:
    rung = dataclasses.replace(rungs.get("08"))
    line = "    sync_block();  // everybody's copies have arrived, and nobody reads the other buffers any more\n"
    assert rung.text.count(line) == 1
    rung.__dict__["text"] = rung.text.replace(line, "")
    with pytest.raises(EmulatorError, match="no barrier"):
        check(rung, CASES["causal, more keys"], mode="async")


@pytest.mark.parametrize("number", ["05", "09", "12"])
def test_wide_heads(number: str) -> None:
    check(rungs.get(number), WIDE)


def test_a_wrong_result_is_noticed() -> None:
    rung, shape = rungs.get("09"), CASES["ragged"]
    x = execute.make(rung, shape)
    execute.emulate(rung, shape, x)
    x.o[1, 3, 5] += 0.5
    assert not judge(rung, shape, x).passed
    x.o[1, 3, 5] = torch.nan
    assert not judge(rung, shape, x).passed


@pytest.fixture(scope="module")
def counted() -> dict[str, measure.Row]:
    said: list[str] = []
    shape = Shape(slices=1, len_q=192, len_k=192, dim=64)  # whole tiles for every rung
    rows = measure.run(shape, rungs.RUNGS, torch.device("cpu"), said.append)
    assert len(said) == 2 * len(rungs.RUNGS)
    assert all(row.passed for row in rows)
    return {row.number: row for row in rows}


def test_traffic_is_as_predicted(counted: dict[str, measure.Row]) -> None:
    """The model of the headers (3 N^2 d / B, 2 N^2 d / B, ...) against what was counted."""
    for row in counted.values():
        assert row.global_bytes is not None and row.predicted_bytes is not None
        assert row.global_bytes == pytest.approx(row.predicted_bytes, rel=0.12), row.number


def test_the_steps_do_what_they_promise(counted: dict[str, measure.Row]) -> None:
    def count(number: str, what: str) -> int:
        counters = counted[number].counters
        assert counters is not None
        return counters[what]

    assert count("04", "shared_bytes_read") < count("03", "shared_bytes_read") / 2  # a patch of scores a thread
    assert count("05", "global_bytes_written") < count("04", "global_bytes_written") / 2  # O is written once
    assert count("05", "mma") == 0 < count("06", "mma")
    assert count("06", "bank_conflicts") > 10_000 and count("07", "bank_conflicts") == 0
    assert count("06", "shared_bytes_read") == count(
        "07", "shared_bytes_read"
    )  # the swizzle moves, and removes nothing
    assert count("08", "block_barriers") <= count("07", "block_barriers") / 2
    assert count("09", "shared_bytes_read") < count("08", "shared_bytes_read")  # P stays in registers
    assert count("09", "wgmma") == 0 < count("10", "wgmma")
    assert count("11", "global_bytes_read") < count("10", "global_bytes_read")  # two consumers share the keys
    assert count("13", "mma") == 0 < count("13", "wgmma")
