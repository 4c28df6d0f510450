"""A run, on the CPU and with providers that misbehave: every one of them becomes a row with a reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from strobe.bench import exactness, read_results, registry, request, results as files, runner, suites
from strobe.bench.case import BenchCase, case
from strobe.bench.exactness import Judge
from strobe.bench.inputs import Tensors, make_tensors
from strobe.bench.provider import Prepared, Provider, Refusal
from strobe.bench.request import Request
from strobe.measure import stopwatch as measure, sustained
from strobe.measure.method import SUSTAINED, TURNS

CPU = torch.device("cpu")
QUICK = measure.Settings(budget_ms=5, rounds=3, warmup_ms=0)
CASES = [
    case("t", "full-64", heads=2, length=64, dim=16, dtype="float32"),
    case("t", "causal-96", heads=4, heads_k=2, length=96, dim=16, mask="causal", dtype="float32"),
    case("t", "grad-64", heads=4, heads_k=2, length=64, dim=16, mask="causal", dtype="float32", direction="backward"),
]


def good(what: BenchCase, x: Tensors) -> Prepared:
    return Prepared(
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=what.causal, enable_gqa=True
        )
    )


def forgets_the_mask(what: BenchCase, x: Tensors) -> Prepared:
    return Prepared(lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True))


def gives_nan(what: BenchCase, x: Tensors) -> Prepared:
    return Prepared(lambda q, k, v: good(what, x).forward(q, k, v) * float("nan"))


def raises(what: BenchCase, x: Tensors) -> Prepared:
    raise RuntimeError("a kernel exploded in /srv/builds/code/file.cu")


def runs_out_of_memory(what: BenchCase, x: Tensors) -> Prepared:
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 GiB")

    return Prepared(forward)


def is_missing(what: BenchCase, x: Tensors) -> Prepared:
    raise Refusal("not installed", "nobody has it")


def fails_late(what: BenchCase, x: Tensors) -> Prepared:
    calls = []

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 5:
            raise ValueError("enough")
        return good(what, x).forward(q, k, v)

    return Prepared(forward)


ZOO = [
    Provider(f.__name__, "peer", "", f)
    for f in (good, forgets_the_mask, gives_nan, raises, runs_out_of_memory, is_missing, fails_late)
]
ZOO.append(Provider("huge", "standard", "", good, matrices=lambda c: 1 << 60))
ZOO.append(Provider("gpu_only", "peer", "", good, device="cuda"))
ZOO.append(Provider("forward_only", "peer", "", good, differentiable=False))
ZOO.append(Provider("lazy", "peer", "", good, skipped=lambda c, d: "later"))


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "select", lambda names: list(ZOO))
    monkeypatch.setattr(request, "cases", lambda suite, direction, on_gpu: list(CASES))
    monkeypatch.setattr(
        runner.ceilings, "measure", lambda watch, dtypes: files.Ceilings({"float32": 0.1}, 10.0, "made up")
    )


def test_everyone_gets_a_row_with_a_reason(zoo: None) -> None:
    found = runner.Runner(Request(("t",), CPU, settings=QUICK)).run()
    assert found.complete and len(found.rows) == len(ZOO) * len(CASES)
    status = {(r.provider, r.case.label): (r.status, r.reason) for r in found.rows}
    for label in ("full-64", "causal-96", "grad-64"):
        assert status["good", label] == ("ok", None)
        assert status["gives_nan", label][0] == "wrong"
        assert status["raises", label] == ("failed", "RuntimeError: a kernel exploded in file.cu")
        assert status["runs_out_of_memory", label][0] == "out of memory" and "128.00 GiB" in str(
            status["runs_out_of_memory", label][1]
        )
        assert status["is_missing", label] == ("not installed", "nobody has it")
        assert status["huge", label][0] == "out of memory"
        assert status["gpu_only", label][0] == "unsupported"
        assert status["lazy", label] == ("skipped", "later")
    assert status["fails_late", "full-64"][0] == "failed" and "enough" in str(status["fails_late", "full-64"][1])
    assert status["forgets_the_mask", "full-64"][0] == "ok" and status["forgets_the_mask", "causal-96"][0] == "wrong"
    assert (
        status["forward_only", "grad-64"] == ("unsupported", "no gradients")
        and status["forward_only", "full-64"][0] == "ok"
    )
    assert all(r.reason for r in found.rows if r.status != "ok") and all(
        r.timing is None for r in found.rows if r.status == "wrong"
    )


def test_a_row_is_complete(zoo: None) -> None:
    found = runner.Runner(Request(("t",), CPU, settings=QUICK)).run()
    row = found.find("good", CASES[1].key)
    assert row is not None and row.timing is not None and row.error is not None
    assert row.timing.summary.n == len(row.timing.samples_ms) >= 3 and row.timing.how == "perf_counter"
    assert row.error.passed and row.error.what == "every head" and 0 < row.error.relative < 1e-5
    assert row.flops == CASES[1].flops(CPU) and row.tflops == pytest.approx(row.flops / row.timing.summary.median / 1e9)
    assert row.of_matmul == pytest.approx(row.tflops / 0.1) and row.matrix_unit is None
    assert row.peak_bytes == CASES[1].tensor_bytes() + row.extra_bytes
    assert any("scaled_dot_product" in name for name in row.kernels)
    assert "--only 't/causal-96/float32/forward' --device cpu" in row.repeat  # with all who took turns
    assert row.timing.summary.n % row.timing.per_turn == 0


def test_a_run_that_is_stopped_leaves_what_it_had(zoo: None, tmp_path: Path) -> None:
    out = tmp_path / "r.json"

    def stop(what: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.Runner(Request(("t",), CPU, settings=QUICK, out=out)).run(stop)
    found = read_results.load(out)
    assert not found.complete and len(found.rows) == 2 * len(ZOO)


def test_real_providers_agree_on_the_cpu(zoo: None) -> None:
    """Ours and PyTorch's, with softcap, sinks, bias and a window; those that cannot say so."""
    request = Request(("models",), CPU, settings=QUICK, profile=False)
    work = runner.Runner(request)
    work.providers = registry.select(["strobe-tiled", "strobe-aten_cpu", "eager", "torch-math", "torch-flash"])
    shape = {"heads": 4, "heads_k": 2, "length": 40, "dim": 16, "dtype": "float32"}
    work.cases = [
        case("t", "softcap", **shape, mask="window(9, 0)", softcap=5.0),
        case("t", "sinks", **shape, mask="causal", sinks=True),
        case("t", "bias", **{**shape, "heads_k": 4}, bias=True),
        case("t", "both", **shape, mask="causal", direction="both"),
    ]
    found = work.run()
    status = {(r.provider, r.case.label): r.status for r in found.rows}
    assert (
        {status["strobe-tiled", c.label] for c in work.cases}
        == {status["eager", c.label] for c in work.cases}
        == {"ok"}
    )
    assert (
        status["torch-math", "sinks"] == status["torch-math", "softcap"] == "unsupported"
        and status["torch-math", "bias"] == "ok"
    )
    assert status["strobe-aten_cpu", "sinks"] == "unsupported" and status["strobe-aten_cpu", "both"] == "ok"


# ---- methods


SHORT = sustained.Settings(settle_s=0.01, settle_most_s=0.03, measure_s=0.02, repeats=2)


def test_every_method_has_its_rows(zoo: None, tmp_path: Path) -> None:
    """One check of each provider serves both methods; what is refused is refused in both."""
    asked = Request(("t",), CPU, (TURNS, SUSTAINED), settings=QUICK, sustained=SHORT, out=tmp_path / "r.json")
    runner.Runner(asked).run()
    found = read_results.load(tmp_path / "r.json")
    assert len(found.rows) == 2 * len(ZOO) * len(CASES) and found.methods() == [TURNS, SUSTAINED]
    assert len({row.identity for row in found.rows}) == len(found.rows)
    assert found.method["sustained"]["repeats"] == 2 and SUSTAINED in found.method["methods"]
    for row in found.rows:
        other = found.find(row.provider, row.case.key, SUSTAINED if row.method == TURNS else TURNS)
        assert other is not None and (row.provider == "fails_late" or row.status == other.status)
        assert row.error == other.error or row.status == "wrong"  # a NaN differs from itself
    good = found.find("good", CASES[0].key, SUSTAINED)
    assert good is not None and good.timing is not None and good.timing.mean_ms == good.ms
    assert good.timing.how == "perf_counter, back to back" and "--method sustained" in good.repeat
    assert good.timing.summary.low <= good.ms <= good.timing.summary.high
    matmul = found.ceilings.sustained_tflops["float32"]  # measured by the same method
    assert good.tflops is not None and good.of_matmul == pytest.approx(good.tflops / matmul, rel=1e-3)


def test_joules_reach_the_row(zoo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.Monitor, "mean_watts", lambda self, begin, end: 50.0)
    monkeypatch.setattr(runner.Monitor, "energy_source", "made up")
    found = runner.Runner(Request(("t",), CPU, (SUSTAINED,), settings=QUICK, sustained=SHORT)).run()
    row = found.find("good", CASES[0].key, SUSTAINED)
    assert row is not None and row.energy is not None and row.ms is not None and row.tflops is not None
    assert row.energy.source == "made up" and row.energy.watts == pytest.approx(50.0)
    assert row.energy.joules_per_call == pytest.approx(50.0 * row.ms / 1e3)
    assert row.energy.joules_per_tflop == pytest.approx(50.0 / row.tflops)
    assert row.energy.joules_per_1000_tokens == pytest.approx(row.energy.joules_per_call / 64 * 1000)


def test_methods_measure_what_they_can(zoo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's cost of a call is not sustained; do_bench needs a GPU."""
    per_call = case("t", "call", heads=1, length=32, dim=16, dtype="float32", measure="call")
    monkeypatch.setattr(request, "cases", lambda suite, direction, on_gpu: [CASES[0], per_call])
    assert Request(("t",), CPU, (SUSTAINED,)).cases() == [CASES[0]]
    assert Request(("t",), CPU, (TURNS, SUSTAINED)).methods_for(per_call) == (TURNS,)
    monkeypatch.setattr(request, "cases", lambda suite, direction, on_gpu: [per_call])
    with pytest.raises(ValueError, match="sustained cannot measure t"):
        Request(("t",), CPU, (SUSTAINED,)).cases()
    with pytest.raises(ValueError, match="do_bench times GPUs"):
        runner.Runner(Request(("t",), CPU, (TURNS, "do_bench")))
    with pytest.raises(ValueError, match="method must be one of turns, sustained, do_bench, got 'mean'"):
        Request(("t",), CPU, ("mean",))


# ---- gradients


def wrong_gradient(what: BenchCase, x: Tensors) -> Prepared:
    """The right output, and a dk that forgets one query head of each group."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(q, k, v)
            return good(what, x).forward(q, k, v)

        @staticmethod
        def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
                do = do.clone()
                do[:, 1] = 0
                dq, dk, dv = torch.autograd.grad(good(what, x).forward(*leaves), leaves, do)
            return dq, dk, dv

    return Prepared(Attention.apply)


@pytest.mark.parametrize("direction", ["backward", "both"])
def test_gradients_are_checked_before_they_are_timed(
    direction: str, zoo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = case("t", "g", heads=4, heads_k=2, length=64, dim=16, mask="causal", dtype="float32", direction=direction)
    monkeypatch.setattr(request, "cases", lambda suite, direction, on_gpu: [what])
    work = runner.Runner(Request(("t",), CPU, settings=QUICK))
    work.providers = [Provider("wrong", "peer", "", wrong_gradient), Provider("good", "peer", "", good)]
    wrong, right = work.run().rows
    assert wrong.status == "wrong" and "dq" in str(wrong.reason) and wrong.timing is None
    assert right.status == "ok" and right.error is not None and right.error.passed and right.timed


def test_a_backward_pass_is_timed_alone_and_again_and_again(zoo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward: one forward pass, whose graph is kept. Both: a forward pass for each. The same for every provider."""
    counts = {"backward": 0, "both": 0}

    def counted(direction: str) -> Any:
        def prepare(what: BenchCase, x: Tensors) -> Prepared:
            def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                counts[direction] += 1
                return good(what, x).forward(q, k, v)

            return Prepared(forward)

        return prepare

    samples = {}
    for direction in counts:
        what = case("t", "g", heads=2, length=32, dim=16, dtype="float32", direction=direction)
        monkeypatch.setattr(request, "cases", lambda suite, direction, on_gpu, what=what: [what])
        work = runner.Runner(Request(("t",), CPU, settings=QUICK, profile=False))
        work.providers = [Provider("p", "peer", "", counted(direction))]
        (row,) = work.run().rows
        assert row.timing is not None
        samples[direction] = row.timing.summary.n
    assert counts["backward"] == 4  # two to check, one for memory, one whose graph is timed
    assert counts["both"] >= 3 + samples["both"]


@pytest.mark.parametrize("direction", ["backward", "both"])
def test_suites_of_gradients_run(direction: str, zoo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case of grid36, gqa and models with its lengths cut to a few tokens: ours and textbook attention pass, and
    who cannot says why in one line."""

    def small(c: BenchCase) -> BenchCase:
        size = {"batch": 1, "heads": 2 * c.group, "heads_k": 2, "len_q": 24, "len_k": 24, "dtype": "float32"}
        return dataclasses.replace(c, **size, bias=c.bias and (1, 2 * c.group, 24, 24))

    asked = ["strobe-tiled", "strobe-sm90", "torch-math", "torch-flash", "eager", "cuda-unfused", "flashinfer"]
    made = [small(c) for suite in ("grid36", "gqa", "models") for c in suites.cases(suite, direction)]
    made = [c for c in made if c.measure == "time"]
    unlike = {(c.dim, c.value_dim, c.mask, c.group, c.softcap, c.sinks, c.bias): c for c in made}
    monkeypatch.setattr(request, "cases", lambda suite, direction, on_gpu: list(unlike.values()))
    work = runner.Runner(Request(("t",), CPU, settings=QUICK, profile=False))
    work.providers = registry.select(asked)
    found = work.run()
    for row in found.rows:
        assert row.timed or (row.status == "unsupported" and row.reason and "\n" not in row.reason), row
        assert row.case.direction == direction and f"/{direction}" in row.case.key
    ran = {name: [r.case.label for r in found.rows if r.provider == name and r.timed] for name in asked}
    assert len(ran["strobe-tiled"]) == len(ran["eager"]) == len(unlike)
    assert len(unlike) > len(ran["torch-math"]) > 10 and ran["cuda-unfused"] == ran["flashinfer"] == []
    best = next(r for r in found.rows if r.provider == "strobe-tiled")
    assert best.peak_bytes is not None and best.extra_bytes == best.peak_bytes - best.case.tensor_bytes()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_judge_is_right_and_strict(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge compares with autograd in float64, in several blocks of rows; one key that is dropped out of 500 is
    noticed in bfloat16."""
    monkeypatch.setattr(exactness, "_BLOCK_ELEMENTS", 20_000)
    what = case(
        "t",
        "x",
        batch=2,
        heads=4,
        heads_k=2,
        length=300,
        len_k=500,
        dim=32,
        mask="causal",
        dtype="bfloat16",
        direction=direction,
    )
    x = make_tensors(what, CPU, 3)
    q, k, v = (t.double().requires_grad_() for t in (x.q, x.k, x.v))
    mask = what.mask.dense(300, 500)

    def attend(k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)

    out = attend(k, v, mask)
    gradients = torch.autograd.grad(out, (q, k, v), x.do.double()) if x.do is not None else None
    judge = Judge(what, x)
    error = judge.judge(out.detach(), gradients)
    assert error.passed and error.relative < 1e-12
    dropped = mask.clone()
    dropped[:, 17] = False
    assert not judge.judge(attend(k, v, dropped).detach(), None).passed


def test_requests_are_checked() -> None:
    with pytest.raises(ValueError, match="no case of quick matches nothing-like-it"):
        Request(("quick",), CPU, only=("nothing-like-it",)).cases()
    with pytest.raises(ValueError, match="l2 must be 'flushed' or 'warm'"):
        measure.Settings(l2="cold")
