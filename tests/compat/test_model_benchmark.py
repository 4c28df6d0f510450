"""The suite llama on a CPU and in small: it runs, and what it times is what it says."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_results import synthetic
from typer.testing import CliRunner

from strobe.bench import llama, read_results, request, results as files, runner, suites
from strobe.bench.report import page
from strobe.bench.request import Request
from strobe.measure import stopwatch
from strobe.measure.method import SUSTAINED, TURNS
from strobe.tools import cli

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("registered")  # which also takes away what the suite registers
CPU = torch.device("cpu")
PREFILL, TRAINING = (dataclasses.replace(c, len_q=40, len_k=40) for c in llama.cases())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "cases", lambda suite, direction, on_gpu: [PREFILL, TRAINING])
    monkeypatch.setattr(
        runner.ceilings, "measure", lambda watch, dtypes: files.Ceilings({"float32": 0.1}, 10.0, "made up")
    )


def test_rows(small: None, tmp_path: Path) -> None:
    asked = Request(("llama",), CPU, settings=stopwatch.Settings(5, 2, 0), out=tmp_path / "r.json")
    runner.Runner(asked).run()
    found = read_results.load(tmp_path / "r.json")
    names = [f"model-{name}" for name in ("strobe", "sdpa", "flex_attention", "eager")]
    assert [(r.case.label, r.provider) for r in found.rows] == [
        (case.label, name) for case in (PREFILL, TRAINING) for name in names
    ]
    stored = json.loads((tmp_path / "r.json").read_text())["rows"]
    for row, data in zip(found.rows, stored, strict=True):
        if row.provider == "model-flex_attention":
            assert row.status == "skipped" and "compiled" in str(row.reason)
            continue
        assert row.timed and row.ms and row.error is not None and row.error.passed and row.peak_bytes
        assert row.tflops is None and row.tokens_per_s == pytest.approx(row.case.tokens / row.ms * 1e3)
        assert data["tokens_per_s"] == pytest.approx(row.tokens_per_s, rel=1e-4)
    peaks = {(r.case.label, r.provider): r.peak_bytes or 0 for r in found.rows}
    assert peaks["tiny-training", "model-strobe"] > 2 * peaks["tiny-prefill", "model-strobe"]  # gradients
    assert found.provenance["torch"] == torch.__version__


@pytest.mark.parametrize("case", [PREFILL, TRAINING], ids=lambda case: case.label)
def test_implementations_agree_in_bfloat16(case: Any) -> None:
    """One set of weights; and the call goes through the implementation that it is named after."""
    steps = llama.Steps(dataclasses.replace(case, dtype="bfloat16"), CPU, seed=0)
    for name in ("strobe", "sdpa", "eager"):
        verdict = steps.prepare(name)[1]
        assert verdict.passed, (name, verdict)
    model = steps._with("strobe")
    assert model.config._attn_implementation == "strobe"
    assert all(a is b for a, b in zip(model.parameters(), steps._model.parameters(), strict=True))


def test_a_training_step_leaves_no_gradients() -> None:
    steps = llama.Steps(TRAINING, CPU, seed=0)
    step, _ = steps.prepare("sdpa")
    assert step().isfinite() and all(p.grad is None for p in steps._model.parameters())


def test_a_wrong_implementation_is_not_timed(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that forgets the mask."""
    from transformers import AttentionInterface

    def forgets(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, enable_gqa=True).transpose(1, 2), None

    AttentionInterface.register("forgets", forgets)
    work = runner.Runner(Request(("llama",), CPU, settings=stopwatch.Settings(5, 2, 0)))
    work.providers = [dataclasses.replace(llama.providers()[1], name="model-forgets")]
    for row in work.run().rows:
        assert row.status == "wrong" and row.timing is None and "out" in str(row.reason)


def test_layout_of_the_suites() -> None:
    models = suites.cases("models", on_gpu=True)
    assert [c.label for c in models if c.measure == "model"] == ["8b-prefill", "8b-training"]
    assert models[-2:] == suites.cases("llama", on_gpu=True)
    both = Request(("models", "llama"), CPU).cases()
    assert len(both) == len(set(both)) == len(suites.cases("models"))
    prefill, training = models[-2:]
    assert (prefill.tokens, training.tokens, prefill.model_dim) == (16384, 8192, 4096)
    assert Request(("llama",), CPU, (TURNS, SUSTAINED)).methods_for(prefill) == (TURNS, SUSTAINED)
    assert [c.label for c in suites.cases("llama", "both")] == ["tiny-training"]


def test_transformers_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "missing", lambda: "it needs transformers, which is not installed")
    done = CliRunner().invoke(cli.app, ["bench", "--suite", "llama", "--device", "cpu"])
    said = " ".join(done.output.replace("│", " ").split())
    assert done.exit_code == 2 and "suite llama: it needs transformers, which is not installed" in said


def test_without_transformers_models_have_rows_with_the_reason(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = runner.Runner(Request(("models",), CPU, settings=stopwatch.Settings(5, 2, 0))).run()
    reasons = {(r.status, r.reason) for r in found.rows if r.provider != "model-flex_attention"}
    assert len(reasons) == 1 and next(iter(reasons))[0] == "not installed"


def test_the_report_shows_tokens_per_second() -> None:
    data = page.page_data([synthetic(("llama",), methods=(TURNS, SUSTAINED))])
    rows = [row for row in data["run"]["rows"] if row["timed"]]
    assert {row["measure"] for row in rows} == {"model"} and all(row["tokens_per_s"] > 1000 for row in rows)
