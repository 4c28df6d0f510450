"""The ladder's rungs as providers: asked for or absent, a reason for whatever they cannot do, and the right numbers."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import fake_driver
import pytest
import torch
from bench_results import synthetic
from fake_driver import Recorder

import strobe
from benchmarks.pages import figures, results_page
from strobe import emulator
from strobe.bench import compile_time, registry, results as files, rungs as bench_rungs, runner
from strobe.bench.case import BenchCase, case
from strobe.bench.inputs import make_tensors
from strobe.bench.report import page
from strobe.bench.request import Request
from strobe.bench.suites import cases
from strobe.cuda import launch as launching
from strobe.cuda.plans import backward_sm90
from strobe.emulator.backend import MACHINES
from strobe.learn.ladder import execute, rungs
from strobe.learn.ladder.rung import PARAMS, POINTERS, Shape
from strobe.measure import palette, stopwatch as measure

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
QUICK = measure.Settings(budget_ms=1, rounds=1, warmup_ms=0)
NAMES = [bench_rungs.name_of(rung) for rung in rungs.RUNGS]


def fitting(rung: Any, **more: Any) -> BenchCase:
    """A small case that the rung runs."""
    dtype = str(rung.dtype).removeprefix("torch.")
    direction = "backward" if rung.backward else "forward"
    return case(
        "t", rung.number, **{"heads": 2, "length": 64, "dim": 64, "dtype": dtype, "direction": direction} | more
    )


@pytest.fixture
def any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_rungs, "_machine_lacks", lambda rung, device, dim: None)


@pytest.fixture
def as_on_a_gpu(any_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU are refused for what they are, not for where they are."""
    really = bench_rungs.cannot
    monkeypatch.setattr(bench_rungs, "cannot", lambda rung, what, device: really(rung, what, CUDA))


# ---- who is measured
# -----------------------------------------------------------------------------------------------------


def test_rungs_run_only_when_asked_for() -> None:
    assert NAMES[0] == "ladder-01-standard" and NAMES[-1] == "ladder-b4-hopper"
    assert not {p.name for p in registry.select([])} & set(NAMES)
    assert not {p.name for p in registry.select(["ours"])} & set(NAMES)
    assert [p.name for p in registry.select(["ladder"])] == NAMES
    assert [p.name for p in registry.select(["ladder-05"])] == ["ladder-05-queries-outside"]
    assert [p.name for p in registry.select(["ladder-07-swizzle", "ladder-b1"])] == [
        "ladder-07-swizzle",
        "ladder-b1-backward",
    ]
    assert {p.kind for p in registry.every()} == set(palette.KINDS)


def test_every_rung_runs_something_of_its_suite(any_machine: None) -> None:
    for rung in rungs.RUNGS:
        direction = "backward" if rung.backward else "forward"
        assert any(bench_rungs.cannot(rung, what, CUDA) is None for what in cases("ladder", direction)), rung.number


# ---- what they cannot do
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "more", "reason"),
    [
        ("05", {"dim": 256}, "dim: 256; the rungs are made for head dims 64 and 128"),
        ("05", {"dtype": "bfloat16"}, "bfloat16 inputs; the rung takes float32"),
        ("06", {"dtype": "float16"}, "float16 inputs; the rung takes bfloat16"),
        ("06", {"heads_k": 1}, "1 key heads for 2 query heads; a rung takes as many of both"),
        ("06", {"mask": "window(3, 0)"}, "no windows: a rung knows full and causal masks"),
        ("06", {"dim_v": 128}, "head dims 64 and 128; a rung has one for keys and values"),
        ("06", {"softcap": 5.0}, "no softcap"),
        ("06", {"sinks": True}, "no sinks"),
        ("06", {"bias": True}, "no bias"),
        ("b1", {"direction": "forward"}, "a backward pass; see --pass"),
        ("01", {"length": 1 << 19}, "2147483648 blocks; a launch has at most 2147483647"),
        ("06", {"mask": "causal", "length": 1000, "len_k": 70}, None),
    ],
)
def test_a_reason_for_each_thing_that_is_missing(
    number: str, more: dict[str, Any], reason: str | None, any_machine: None
) -> None:
    assert bench_rungs.cannot(rungs.get(number), fitting(rungs.get(number), **more), CUDA) == reason


def test_a_machine_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    class Facts:
        shared_memory_per_block_optin = 99 << 10

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Facts())
    monkeypatch.setattr(execute, "cannot_run", lambda rung, device: "no wgmma" if rung.hopper else None)
    for number, dim, reason in (
        ("05", 64, None),
        ("05", 128, "needs 115712 bytes of shared memory, a block has 101376"),
    ):
        assert bench_rungs.cannot(rungs.get(number), fitting(rungs.get(number), dim=dim), CUDA) == reason
    assert bench_rungs.cannot(rungs.get("13"), fitting(rungs.get("13")), CUDA) == "no wgmma"


def run(names: tuple[str, ...], chosen: list[BenchCase], device: torch.device = CPU) -> files.Results:
    work = runner.Runner(Request(("quick",), device, providers=names, settings=QUICK))
    work.cases = chosen
    return work.run()


@pytest.fixture
def no_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        runner.ceilings, "measure", lambda watch, dtypes: files.Ceilings({"float32": 0.1}, 10.0, "made up")
    )


def test_on_a_cpu_every_row_says_why(no_ceilings: None) -> None:
    """Before tensors and the float64 reference are made: the grid would take hours."""
    found = run(("ladder",), [*cases("grid36")[:2], *cases("grid36", "backward")[:2]])
    assert [r.provider for r in found.rows] == NAMES * 4
    assert {(r.kind, r.status, r.reason) for r in found.rows} == {("ladder", "unsupported", bench_rungs._GPU_ONLY)}
    assert "NVIDIA GPU" in bench_rungs._GPU_ONLY and "emulator" in bench_rungs._GPU_ONLY


def test_the_compile_suite_answers_too() -> None:
    rows = compile_time.rows(cases("compile")[0], registry.select(["ladder"]), CPU, lambda what, name: "")
    assert [r.provider for r in rows] == NAMES and all(r.status == "unsupported" and r.reason for r in rows)


def test_slow_rungs_wait_until_they_are_named(any_machine: None) -> None:
    slow = {rung.number: bench_rungs.expected_s(rung, Shape(16, 16384, 16384, 128)) for rung in rungs.RUNGS}
    assert slow["03"] > 5 and slow["01"] > 1 > slow["05"] > 10 * slow["09"]
    many = bench_rungs.expected_s(rungs.get("03"), Shape(128, 2048, 2048, 128))  # a block for each of 128 heads
    assert many < bench_rungs.expected_s(rungs.get("03"), Shape(16, 2048, 2048, 128)) * 1.01
    big = case("t", "big", heads=16, length=16384, dim=128, dtype="float32")
    three, five = registry.select(["ladder-03", "ladder-05"])
    assert "--provider ladder-03-fused-16" in str(three.skipped(big, CUDA)) and five.skipped(big, CUDA) is None
    assert registry.select(["ladder-01"])[0].matrices(big) == 4 * big.score_elements() and five.matrices(big) == 0


# ---- what they compute
# -------------------------------------------------------------------------------------------------------


class EmulatedCall:
    """Stands in for execute.Call: the same kernels on the same tensors, on the emulator."""

    def __init__(self, rung: Any, shape: Shape, device: torch.device) -> None:
        self.rung, self.shape = rung, shape

    def __call__(self, x: execute.Tensors) -> None:
        execute.emulate(self.rung, self.shape, x)


@pytest.mark.skipif(emulator.compiler() is None, reason="the emulator needs a C++ compiler")
def test_rows_are_right_by_the_benchmarks_rule(
    as_on_a_gpu: None, no_ceilings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "Call", EmulatedCall)
    chosen = registry.select(["ladder-01", "ladder-05", "ladder-09", "ladder-b1", "ladder-b3"])
    monkeypatch.setattr(runner, "select", lambda names: [dataclasses.replace(p, device=None) for p in chosen])
    shape = {"batch": 2, "length": 33, "len_k": 70, "mask": "causal"}
    small = {number: fitting(rungs.get(number), **shape) for number in ("05", "09", "b1", "b3")}
    both = dataclasses.replace(small["b1"], direction="both")
    found = run(("ladder",), [*small.values(), both])
    row = {(r.provider[7:9], r.case.direction, r.case.dtype): r for r in found.rows}
    assert len(row) == len(found.rows) == 25
    right = {(number, "forward", "float32") for number in ("01", "05")} | {("09", "forward", "bfloat16")}
    right |= {("b1", direction, "float32") for direction in ("backward", "both")} | {("b3", "backward", "bfloat16")}
    for key, found_row in row.items():
        wanted = "ok" if key in right else "unsupported"
        assert found_row.status == wanted and (found_row.reason is None) == (key in right), (key, found_row.reason)
        assert (found_row.error is not None and found_row.timing is not None) == (key in right)
    assert row["b1", "backward", "float32"].note == "the forward pass is that of ladder-05-queries-outside"
    assert row["b3", "backward", "bfloat16"].note == "the forward pass is that of ladder-09-registers"
    assert row["05", "backward", "float32"].reason == "no gradients"


@pytest.mark.parametrize("number", ["02", "05", "11", "b0", "b1", "b3"])
def test_a_call_sends_the_addresses_of_its_tensors(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver.install(monkeypatch)
    monkeypatch.setattr(execute, "_loaded", lambda rung, dim, arch: fake_driver.Kernel())
    monkeypatch.setattr(execute, "arch_of", lambda rung, device: "sm_90a")
    rung, shape = rungs.get(number), Shape(slices=3, len_q=70, len_k=150, dim=64, causal=True)
    call = execute.Call(rung, shape, CUDA)
    assert [launch.grid for launch in Recorder.made] == [grid(shape) for grid in rung.grids]
    for seed in (0, 1):  # two calls, two sets of tensors
        x = execute.make(rung, shape, seed=seed)
        call(x)
        for stage, launch in enumerate(Recorder.made):
            stream, sent = launch.sent[seed]
            assert stream == 77 and (launch.threads, launch.smem) == (rung.threads, rung.smem(64))
            pointers = {name: struct.unpack_from("<Q", sent, PARAMS.offsets[name])[0] for name in POINTERS}
            assert pointers == dict.fromkeys(POINTERS, 0) | x.addresses()
            numbers = {
                n: struct.unpack_from("<i", sent, PARAMS.offsets[n])[0] for n in ("slices", "len_q", "len_k", "stage")
            }
            assert numbers == {"slices": 3, "len_q": 70, "len_k": 150, "stage": stage}
            if rung.hopper:
                maps = [struct.unpack_from("<Q", sent, PARAMS.offsets[f"map_{t}"])[0] for t in "qkv"]
                assert maps == [x.q.data_ptr(), x.k.data_ptr(), x.v.data_ptr()]


def test_the_librarys_backward_is_launched_from_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """b4 on a GPU: three launches, with the addresses of the rung's own tensors."""
    fake_driver.install(monkeypatch)
    monkeypatch.setattr(launching, "kernel", lambda spec: fake_driver.Kernel())
    monkeypatch.setattr(execute, "machine_of", lambda device: MACHINES["sm90"])
    monkeypatch.setattr(backward_sm90, "TURNS_UP_TO", 0)  # as with more keys: all three launches
    rung, shape = rungs.get("b4"), Shape(slices=3, len_q=70, len_k=150, dim=64, causal=True)
    x = execute.make(rung, shape)
    assert x.d_o is not None and x.dq is not None and x.dk is not None and x.dv is not None
    launch = execute.prepare(rung, shape, x)
    launch()
    launch()
    plan, _ = execute._library_plan(rung, shape, x, MACHINES["sm90"])
    assert [part.kernel.template for part in plan.launches] == ["backward_delta", "backward_sm90", "convert_dq"]
    delta, main, convert = Recorder.made
    assert [len(made.sent) for made in Recorder.made] == [2, 2, 2]

    def sent(made: Recorder, part: int, name: str) -> int:
        return struct.unpack_from("<Q", made.sent[1][1], plan.launches[part].kernel.params.offsets[name])[0]

    assert [sent(delta, 0, n) for n in ("o", "d_o", "lse")] == [t.data_ptr() for t in (x.o, x.d_o, x.lse)]
    mapped = {"q": x.q, "k": x.k, "v": x.v, "d_o": x.d_o, "dk": x.dk, "dv": x.dv}
    assert {n: sent(main, 1, f"map_{n}") for n in mapped} == {n: t.data_ptr() for n, t in mapped.items()}
    assert sent(convert, 2, "dq") == x.dq.data_ptr()
    assert sent(main, 1, "dq_sum") == sent(convert, 2, "dq_sum") != 0


def test_the_librarys_backward_is_the_gradient_of_a_call(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(strobe, "attention", lambda q, k, v, **how: asked.append(how) or v)
    what = fitting(rungs.get("b4"))
    x = make_tensors(what, CPU, 0)
    prepared = registry.select(["ladder-b4"])[0].prepare(what, x)
    assert prepared.forward(x.q, x.k, x.v) is x.v and prepared.note == "the kernels of strobe-sm90"
    assert asked == [{"mask": strobe.full, "layout": "bhsd", "backend": "sm90"}]


def test_every_call_has_an_output_of_its_own(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[execute.Tensors] = []
    monkeypatch.setattr(execute, "Call", lambda rung, shape, device: seen.append)
    what = fitting(rungs.get("01"), batch=3, length=40)
    x = make_tensors(what, CPU, 0)
    prepared = registry.select(["ladder-01"])[0].prepare(what, x)
    first, second = (prepared.forward(x.q, x.k, x.v) for _ in range(2))
    assert prepared.layout == "bhsd" and first.shape == x.q.shape and first.data_ptr() != second.data_ptr()
    assert [t.o.data_ptr() for t in seen] == [first.data_ptr(), second.data_ptr()]
    assert seen[0].workspace.numel() == what.score_elements() and seen[0].lse.shape == (6, 40)


# ---- what is shown
# -----------------------------------------------------------------------------------------------------------


def test_reports_and_documents_know_the_kind() -> None:
    made = synthetic(("sweep",))
    for row in made.rows:
        if row.provider == "torch-flash":
            row.provider, row.kind = "ladder-09-registers", "ladder"
    drawn = figures.speed(made, "sweep")
    assert drawn is not None and "ladder-09-registers" in drawn.draw()
    text = results_page.page({"made-up": {"sweep": made}})
    assert "| `ladder-09-registers` | ladder |" in text and "Against standard attention" in text
    styles = page.page_data([made])["run"]["styles"]
    assert styles["ladder-09-registers"]["shape"] == "diamond" and styles["torch-math"]["dashed"]
    assert len({style["colour"] for style in styles.values()}) == len(styles)


def test_only_scalar_rungs_may_round_more() -> None:
    """What a rung's way of adding up explains is allowed to that rung and to nobody else."""
    what = case("t", "x", heads=1, length=1024, dim=64)
    found = {p.name: p.roundings(what) for p in registry.every()}
    scalar = {n: found[name] for name in found for n in ("01", "03", "04", "05") if name.startswith(f"ladder-{n}")}
    assert scalar["03"] > scalar["04"] > scalar["05"] == scalar["01"] > 0
    allowed = {bench_rungs.name_of(rung) for rung in rungs.RUNGS if rung.element == "float"}
    assert {name for name, roundings in found.items() if roundings} == allowed
