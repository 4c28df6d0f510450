"""Every rung of the ladder, unchanged, on the emulator: right, free of races, and doing the work that its header
says."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from emulator.mutation import replaced
from everyday import everyday
from ladder_cases import CASES, GAIN, LARGE_SCORES, WIDE

from strobe.emulator import Counters, EmulatorError, compiler
from strobe.emulator.backend import BACKENDS
from strobe.learn.ladder import execute, measure, rungs
from strobe.learn.ladder.exact import judge
from strobe.learn.ladder.rung import Rung, Shape
from strobe.problem import Problem
from strobe.problem.arguments import Arguments
from strobe.variants.mask import causal

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
    rung.__dict__["text"] = replaced("a missing barrier", rung.text, line, "")
    with pytest.raises(EmulatorError, match="no barrier"):
        check(rung, CASES["causal, more keys"], mode="async")


# What a careless hand would break in a backward rung, the case that shows it, and how the emulator or the numbers say so.
MUTATIONS = {
    "b0, the softmax without its row sum": ("b0", " - sum));", "));", "wrong"),
    "b1, delta is not subtracted": ("b1", "(dp[a][c] - delta)", "dp[a][c]", "wrong"),
    "b2, dQ does not begin at zero": ("b2", "st_global(p.dq + row * kDim + i, 0.f)", "(void)i", "NaN"),
    "b2, blocks overwrite dQ": ("b2", "          atomic_add(p.dq +", "          st_global(p.dq +", "wrong"),
    "b2, P and dS are read too early": ("b2", "    sync_block();  // P and dS are complete\n", "", "no barrier"),
    "b3, dS is read too early": ("b3", "    sync_block();  // dS is complete\n", "", "no barrier"),
    "b3, dQ is not scaled": ("b3", "pack2<bf16>(ld_global(dq) * p.scale,", "pack2<bf16>(ld_global(dq),", "wrong"),
    "b3, copies are not waited for": (
        "b3",
        "    cp_async_wait<0>();\n    sync_block();",
        "    sync_block();",
        "in flight",
    ),
    "b3, the mask is that of the key's neighbour": ("b3", "my_row(a) < seen", "my_row(a) <= seen", "wrong"),
}


@pytest.mark.parametrize("name", everyday(list(MUTATIONS), ["b3, dS is read too early"]))
def test_mistakes_in_a_backward_rung_are_noticed(name: str) -> None:
    number, old, new, finding = MUTATIONS[name]
    rung, shape = dataclasses.replace(rungs.get(number)), CASES["causal, more keys"]
    rung.__dict__["text"] = replaced(name, rung.text, old, new)
    x = execute.make(rung, shape)
    if finding in ("wrong", "NaN"):
        execute.emulate(rung, shape, x, "async")
        verdict = judge(rung, shape, x)
        assert not verdict.passed and ("NaN" in str(verdict)) == (finding == "NaN"), verdict
    else:
        with pytest.raises(EmulatorError, match=finding):
            execute.emulate(rung, shape, x, "async")


def test_the_last_rung_is_what_the_library_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are the same as through the backend, which plans for itself."""
    monkeypatch.setenv("STROBE_EMULATE", "sm90")
    rung, shape = rungs.get("b4"), CASES["causal, more keys"]
    x = execute.make(rung, shape)
    execute.emulate(rung, shape, x)
    assert x.d_o is not None
    q, k, v, o, lse, d_o = (t[None] for t in (x.q, x.k, x.v, x.o, x.lse, x.d_o))
    a = Arguments(q, k, v, mask=causal, scale=shape.scale, layout="bhsd", return_lse=True)
    problem, layout = Problem.of(a)
    run = BACKENDS["emulator"].bind(problem.backward(("q", "k", "v")), layout).run
    for found, wanted in zip(x.results(rung).values(), run(a, o, lse, d_o, None)[:3], strict=True):
        assert torch.equal(found[None], wanted)


@pytest.mark.parametrize("number", everyday(["05", "09", "12", "b0", "b2", "b3", "b4"], ["12", "b3"]))
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


WHOLE_TILES = Shape(slices=1, len_q=256, len_k=256, dim=64)  # for every rung but 13, whose model knows of that


@pytest.fixture(scope="module")
def counted() -> dict[str, measure.Row]:
    said: list[str] = []
    rows = measure.run(WHOLE_TILES, rungs.RUNGS, torch.device("cpu"), said.append)
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


def test_the_steps_of_the_gradient_do_what_they_promise(counted: dict[str, measure.Row]) -> None:
    def count(number: str, what: str) -> int:
        counters = counted[number].counters
        assert counters is not None
        return counters[what]

    rows, pairs, dim = WHOLE_TILES.len_q, WHOLE_TILES.pairs, WHOLE_TILES.dim
    assert count("b0", "global_bytes_written") > 4 * 3 * pairs  # P, dP and dS
    assert count("b1", "global_bytes_written") == 4 * (3 * dim + 1) * rows  # the gradients and delta, no matrix at all
    assert count("b1", "exp2") == 2 * count("b2", "exp2")  # P is recomputed once, not twice
    assert count("b2", "shared_bytes_read") < 0.8 * count("b1", "shared_bytes_read")  # five products, not seven
    for number, keys, once in (("b2", 32, 4 + 2 * 4), ("b3", 64, 4 + 3 * 2)):  # bytes: zeros, gradients
        sums = 4 * (rows // keys) * rows * dim  # each block of keys adds a part to each number of dQ
        assert count(number, "global_bytes_written") == sums + (once * dim + 4) * rows, number  # 4: delta
    products = 5 * pairs * dim // (16 * 8 * 16)
    assert count("b2", "mma") == 0 and count("b3", "mma") == products and count("b3", "bank_conflicts") == 0
    assert count("b4", "mma") == 0 < count("b4", "wgmma")
    assert count("b4", "block_barriers") < count("b3", "block_barriers") / 4
