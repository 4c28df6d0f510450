"""A small GPT, trained on the GPU by the kernels, both ways, learns what PyTorch's math attention makes it learn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gpu.kernels import fastest, kernels_here
from training_example import load

import strobe
from strobe.bench.kernel_names import kernels_that_ran

SMALL = ["--device", "cuda", "--batch", "8", "--context", "256", "--layers", "2", "--width", "128", "--heads", "2"]
gpt = load()


def test_the_curves_agree_in_bfloat16(tmp_path: Path) -> None:
    out = tmp_path / "curve.json"
    names = ["strobe", *(f"strobe:{kernel}" for kernel in kernels_here())]
    assert gpt.main([*SMALL, "--steps", "100", "--compare", *names, "--out", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    runs = {run["attention"]: run for run in found["runs"] if run["seed"] == 0}
    assert found["settings"]["dtype"] == "bfloat16" and runs["strobe"]["loss"][-1] < runs["strobe"]["loss"][0] - 2
    for name, kernel in zip(names, [fastest(), *kernels_here()], strict=True):
        assert (runs[name]["forward"], runs[name]["backward"]) == (kernel, kernel)


def test_a_wrong_mask_does_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    right = strobe.attention
    monkeypatch.setattr(strobe, "attention", lambda q, k, v, **rest: right(q, k, v, **(rest | {"mask": strobe.full})))
    assert gpt.main([*SMALL, "--steps", "50", "--compare"]) == 1


def test_the_kernels_run_both_ways() -> None:
    options = gpt.options_of([*SMALL, "--steps", "2"])
    gpt.train(options, "strobe", 0)  # what there is to compile is compiled
    device = torch.device("cuda")
    ran = kernels_that_ran({"attention": (lambda: step(options), torch.enable_grad)}, device)["attention"]
    assert any(f"forward_{fastest()}" in name for name in ran), ran
    assert any(f"backward_{fastest()}" in name for name in ran), ran


def step(options: object) -> None:
    """The attention of one training step, alone: the profiler's list is short."""
    shape = (options.batch, options.context, options.heads, options.width // options.heads)  # type: ignore[attr-defined]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gpt.attention_named("strobe")(q, k, v).sum().backward()
