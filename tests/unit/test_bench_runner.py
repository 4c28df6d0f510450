"""A run, on the CPU and with providers that misbehave: every one of them becomes a row with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strobe.bench import exactness, providers, results as files, runner
from strobe.bench.exactness import Judge, Tensors
from strobe.bench.providers import Prepared, Provider, Refusal
from strobe.bench.suites import Case, case
from strobe.measure import stopwatch as measure

CPU = torch.device("cpu")
QUICK = measure.Settings(budget_ms=5, rounds=3, warmup_ms=0)
CASES = [
    case("t", "full-64", heads=2, length=64, dim=16, dtype="float32"),
    case("t", "causal-96", heads=4, heads_k=2, length=96, dim=16, mask="causal", dtype="float32"),
    case("t", "grad-64", heads=4, heads_k=2, length=64, dim=16, mask="causal", dtype="float32", direction="backward"),
]


def good(what: Case, x: Tensors) -> Prepared:
    return Prepared(
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=what.mask == "causal", enable_gqa=True
        )
    )


def forgets_the_mask(what: Case, x: Tensors) -> Prepared:
    return Prepared(lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True))


def gives_nan(what: Case, x: Tensors) -> Prepared:
    return Prepared(lambda q, k, v: good(what, x).forward(q, k, v) * float("nan"))


def raises(what: Case, x: Tensors) -> Prepared:
    raise RuntimeError("a kernel exploded in /srv/builds/code/file.cu")


def runs_out_of_memory(what: Case, x: Tensors) -> Prepared:
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 GiB")

    return Prepared(forward)


def is_missing(what: Case, x: Tensors) -> Prepared:
    raise Refusal("not installed", "nobody has it")


def fails_late(what: Case, x: Tensors) -> Prepared:
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
    monkeypatch.setattr(runner, "cases", lambda suite, direction, on_gpu: list(CASES))
    monkeypatch.setattr(
        runner.ceilings, "measure", lambda watch, dtypes: files.Ceilings({"float32": 0.1}, 10.0, "made up")
    )


def test_everyone_gets_a_row_with_a_reason(zoo: None) -> None:
    found = runner.Runner(runner.Request(("t",), CPU, settings=QUICK)).run()
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
    found = runner.Runner(runner.Request(("t",), CPU, settings=QUICK)).run()
    row = found.find("good", CASES[1].key)
    assert row is not None and row.timing is not None and row.error is not None
    assert row.timing.summary.n == len(row.timing.samples_ms) >= 3 and row.timing.method == "perf_counter"
    assert row.error.passed and row.error.checked == "every head" and 0 < row.error.relative < 1e-5
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
        runner.Runner(runner.Request(("t",), CPU, settings=QUICK, out=out)).run(stop)
    found = files.load(out)
    assert not found.complete and len(found.rows) == 2 * len(ZOO)


def test_real_providers_agree_on_the_cpu(zoo: None) -> None:
    """Ours and PyTorch's, with softcap, sinks, bias and a window; those that cannot say so."""
    request = runner.Request(("models",), CPU, settings=QUICK, profile=False)
    work = runner.Runner(request)
    work.providers = providers.select(["strobe-tiled", "strobe-aten_cpu", "eager", "torch-math", "torch-flash"])
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


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_judge_is_right_and_strict(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autograd in float64, in several blocks of rows; one key that is dropped out of 500 is noticed in
    bfloat16."""
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
    x = runner.make_tensors(what, CPU, 3)
    q, k, v = (t.double().requires_grad_() for t in (x.q, x.k, x.v))
    mask = what.mask_object().dense(300, 500)

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
        runner.Request(("quick",), CPU, only=("nothing-like-it",)).cases()
    with pytest.raises(ValueError, match="l2 must be 'flushed' or 'warm'"):
        measure.Settings(l2="cold")
