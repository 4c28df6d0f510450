"""A small GPT, trained on the GPU by the kernels, both ways, learns what PyTorch's math attention makes it learn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gpu.kernels import KERNELS, fastest, kernels_here
from training_example import load

import strobe
from strobe.bench.kernel_names import kernels_that_ran
from strobe.cuda.parts.kernel import PREFIX

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


@pytest.mark.parametrize("kernel", KERNELS)
def test_only_the_kernels_run_both_ways(kernel: str) -> None:
    """Torch's profiler sees no kernel of PyTorch's attention in the attention of a training step."""
    if kernel not in kernels_here():
        pytest.skip("no Hopper GPU")
    attend = gpt.attention_named(f"strobe:{kernel}")
    q, k, v = (torch.randn(8, 256, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = attend(q, k, v)
    upstream = torch.randn_like(out)
    calls = {
        "forward": lambda: attend(q, k, v),
        "backward": lambda: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True),
    }
    calls["backward"]()  # what there is to compile is compiled
    ran = kernels_that_ran({name: (call, torch.enable_grad) for name, call in calls.items()}, torch.device("cuda"))
    for names in (ran["forward"], ran["backward"]):
        assert any(name.startswith(PREFIX) for name in names), ran
        assert not any(word in name for name in names for word in ("gemm", "softmax", "flash", "fmha", "cudnn")), ran
