"""The ladder's unfused rungs as a provider: a reason for whatever they cannot do, and the right numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from strobe import emulator
from strobe.bench import registry, results as files, runner, unfused
from strobe.bench.case import BenchCase, case
from strobe.bench.inputs import make_tensors
from strobe.bench.request import Request
from strobe.learn.ladder import execute, rungs
from strobe.learn.ladder.rung import Shape
from strobe.measure import stopwatch as measure

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
(PROVIDER,) = registry.select(["cuda-unfused"])


def small(**more: Any) -> BenchCase:
    shape = {"batch": 2, "heads": 2, "length": 33, "len_k": 70, "dim": 64, "mask": "causal", "dtype": "float32"}
    return case("t", "small", **shape | more)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU are refused for what they are, not for where they are."""
    really = unfused.cannot
    monkeypatch.setattr(execute, "cannot_run", lambda rung, device: None)
    monkeypatch.setattr(unfused, "cannot", lambda what, device: really(what, CUDA))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"dim": 256}, "dim: 256; the rungs are made for head dims 64 and 128"),
        ({"heads_k": 1}, "1 key heads for 2 query heads; a rung takes as many of both"),
        ({"mask": "window(3, 0)"}, "no windows: a rung knows full and causal masks"),
        ({"dim_v": 128}, "head dims 64 and 128; a rung has one for keys and values"),
        ({"softcap": 5.0}, "no softcap"),
        ({"sinks": True}, "no sinks"),
        ({"bias": True}, "no bias"),
        ({"variant": "tanh"}, "no score functions"),
        ({"mask": "full", "dtype": "float16"}, None),
    ],
)
def test_a_reason_for_each_thing_that_is_missing(more: dict[str, Any], reason: str | None, as_on_a_gpu: None) -> None:
    assert unfused.cannot(small(**more), CUDA) == reason


def test_it_needs_a_gpu_and_patience() -> None:
    assert "needs an NVIDIA GPU, the tensors are on cpu" in str(unfused.cannot(small(), CPU))
    long = small(length=32768, len_k=32768)
    assert "name it" in str(PROVIDER.skipped(long, CUDA)) and PROVIDER.skipped(small(), CUDA) is None
    rung, shape = rungs.get("b0"), Shape(4, 33, 70, 64, True)
    assert PROVIDER.matrices(small(direction="backward")) == 4 * rung.workspace(shape)


class EmulatedCall:
    """Stands in for execute.Call: the same kernels on the same tensors, on the emulator."""

    def __init__(self, rung: Any, shape: Shape, device: torch.device) -> None:
        self.rung, self.shape = rung, shape

    def __call__(self, x: execute.Tensors) -> None:
        execute.emulate(self.rung, self.shape, x)


@pytest.mark.skipif(emulator.compiler() is None, reason="the emulator needs a C++ compiler")
def test_its_rows_are_right(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ceilings = files.Ceilings({"float32": 0.1}, 10.0, "made up")
    monkeypatch.setattr(runner.ceilings, "measure", lambda watch, dtypes: ceilings)
    monkeypatch.setattr(execute, "Call", EmulatedCall)
    monkeypatch.setattr(
        runner, "select", lambda names: [dataclasses.replace(PROVIDER, device=None, cannot=unfused.cannot)]
    )
    settings = measure.Settings(budget_ms=1, rounds=1, warmup_ms=0)
    work = runner.Runner(Request(("quick",), CPU, settings=settings, call_limit_s=600))
    passes = ("forward", "backward", "both")
    work.cases = [small(direction=which, dtype=dtype) for which in passes for dtype in ("float32", "bfloat16")]
    for row in work.run().rows:
        assert row.status == "ok" and row.error is not None and row.error.passed and row.timed, row


def test_every_call_has_an_output_of_its_own(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[execute.Tensors] = []
    monkeypatch.setattr(execute, "Call", lambda rung, shape, device: seen.append)
    x = make_tensors(small(), CPU, 0)
    prepared = PROVIDER.prepare(small(), x)
    first, second = (prepared.forward(x.q, x.k, x.v) for _ in range(2))
    assert prepared.layout == "bhsd" and first.shape == x.q.shape and first.data_ptr() != second.data_ptr()
    assert [t.o.data_ptr() for t in seen] == [first.data_ptr(), second.data_ptr()]


def test_only_scalar_rungs_may_round_more() -> None:
    """The rungs alone are allowed, in fp32, what their way of adding up explains."""
    for dtype in ("float32", "bfloat16"):
        allowed = {p.name for p in registry.every() if p.roundings(small(dtype=dtype))}
        assert allowed == ({"cuda-unfused"} if dtype == "float32" else set())
