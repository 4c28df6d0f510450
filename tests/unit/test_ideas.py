"""Ideas for the Hopper kernels as edits of their source: each applies to the kernels as they are now, and those for the
forward that are right compute the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from fake_gpu import H200

from benchmarks.studies import backward_stamps, ideas
from strobe.backends.tiled import forward as tiled
from strobe.cuda.parts.kernel import TemplateKernel, TextKernel
from strobe.emulator import backend, compiler
from strobe.problem.arguments import Inputs
from strobe.tools import tune
from strobe.tools.tune_forward import TileCase
from strobe.variants.mask import causal

RIGHT = [idea for idea in ideas.forward_ideas(64, 64, "bounded") if not idea.is_bound]


@pytest.mark.parametrize("name", ideas.PASSES)
def test_every_idea_applies_to_every_kernel(name: str) -> None:
    subject, (length, *_) = ideas.PASSES[name]
    for dims in subject.dims:
        for kind in subject.kinds:
            for case in subject.cases(*dims, kind, [length]):
                in_use, *others = subject.candidates(*dims, kind)
                sources = {launch.kernel.source for launch in case.plan(in_use, H200).launches}
                for idea in others:
                    edited = {launch.kernel.source for launch in case.plan(idea, H200).launches}
                    assert edited - sources, idea
                    sources |= edited


def test_an_edit_that_finds_nothing_is_an_error() -> None:
    (case,) = ideas.forward_cases(64, 64, "full", [8192])
    with pytest.raises(ValueError, match="stale: forward_sm90.* has no 'what was renamed'"):
        case.plan(ideas.Idea("stale", (("what was renamed", ""),)), H200)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("idea", RIGHT[1:], ids=str)
def test_an_idea_computes_the_same(idea: ideas.Idea) -> None:
    case = TileCase("small", 150, 200, batch=1, heads=1, heads_k=1, dim=64, dim_v=64, mask=causal, kind="bounded")
    q, k, v, out = case.tensors("cpu")
    plan = case.plan(None, dataclasses.replace(H200, sms=1))
    (launch,) = plan.launches
    assert isinstance(launch.kernel, TemplateKernel)
    edited = idea.applied(launch.kernel, "emu")
    assert isinstance(edited, TextKernel) or idea.producer
    made = dataclasses.replace(plan, launches=(dataclasses.replace(launch, kernel=edited),))
    backend.launch(made, {"q": q, "k": k, "v": v, "o": out, "seed": 0}, mode="async", seed=1)
    expected, _ = tiled.forward(case.problem, Inputs(*(t.transpose(1, 2) for t in (q, k, v))))
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=0.02, atol=0.02)


def test_half_of_q_fits_into_registers() -> None:
    (case,) = ideas.forward_cases(128, 128, "full", [8192])
    half = next(idea for idea in ideas.FORWARD if idea.name.startswith("half of Q"))
    assert tune.compiles(case.plan(half, H200).launches[0].kernel) is None


def test_the_command_writes_what_was_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def sweep(subject: tune.Subject, *rest: object) -> dict[str, object]:
        asked.append((subject, rest[-1]))
        return {"method": rest[-1], "rows": [], "best": {}}

    monkeypatch.setattr(tune, "sweep", sweep)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name, (subject, _) in ideas.PASSES.items():
        out = tmp_path / f"{name}.json"
        assert ideas.main(["--pass", name, "--method", "sustained", "-o", str(out)]) == 0
        assert asked.pop() == (subject, "sustained")
        assert json.loads(out.read_text()) == {"kind": "ideas", "method": "sustained", "rows": []}


@pytest.mark.parametrize("study", [ideas, backward_stamps], ids=lambda study: study.__name__)
def test_the_command_needs_a_gpu(
    study: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        study.main(["-o", str(tmp_path / "ideas.json")])
    assert "there is no GPU" in capsys.readouterr().err
