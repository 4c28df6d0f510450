"""benchmarks/models.py: it runs, on a CPU and in small, and what it times is what it says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "models.py"


@pytest.fixture(scope="module")
def models() -> Any:
    spec = importlib.util.spec_from_file_location("models_benchmark", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows(models: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "models.json"
    options = ["--shape", "tiny", "--device", "cpu", "--providers", "strobe", "sdpa", "--budget-ms", "20"]
    rows = models.main([*options, "--out", str(out)])
    assert [(r["what"], r["provider"]) for r in rows] == [
        (what, provider) for what in ("prefill", "training step") for provider in ("strobe", "sdpa")
    ]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * row["length"] / row["ms"] * 1e3)
    assert capsys.readouterr().out.count("tokens/s") == 4
    assert len(json.loads(out.read_text())["rows"]) == 4


def test_providers_have_one_model(models: Any) -> None:
    torch.manual_seed(0)
    stack, x = models.Stack(models.SHAPES["tiny"]).double(), torch.randn(2, 24, 64, dtype=torch.float64)
    torch.testing.assert_close(stack(x, models.attend_strobe), stack(x, models.attend_sdpa))
    changed = x.clone()
    changed[:, -1] += 1
    before, after = (stack(t, models.attend_strobe)[:, :-1] for t in (x, changed))
    torch.testing.assert_close(after, before)  # causal


def test_a_wrong_provider_is_not_timed(models: Any) -> None:
    with pytest.raises(SystemExit, match="wrong is not right"):
        models.check({"wrong": lambda q, k, v: q}, torch.randn(1, 24, 64), models.SHAPES["tiny"])
