"""Ideas for the Hopper forward: each applies to the kernels as they are now, fits into registers, and those for dropout
that are right give the same bits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import H200

from benchmarks.studies import forward_ideas
from strobe.cuda.kernel import TemplateKernel
from strobe.cuda.plan import Plan
from strobe.emulator import backend, compiler
from strobe.mask import Mask, causal, full
from strobe.tools import tune

EVERY_DAY = {("dropout", 128, 128, "full")}
GROUPS = [
    pytest.param(name, dims, kind, marks=[] if (name, *dims, kind) in EVERY_DAY else [pytest.mark.thorough])
    for name, subject in forward_ideas.SUBJECTS.items()
    for dims in subject.dims
    for kind in subject.kinds
]
DROPOUT = [idea for idea in forward_ideas.dropout_ideas(128, 128, "full") if not idea.is_bound]


@pytest.mark.parametrize("name", forward_ideas.SUBJECTS)
def test_every_idea_is_another_kernel(name: str) -> None:
    subject = forward_ideas.SUBJECTS[name]
    for dims in subject.dims:
        for kind in subject.kinds:
            for case in subject.cases(*dims, kind, forward_ideas.LENGTHS):
                assert case.dropout == (forward_ideas.DROPOUT if name == "dropout" else 0)
                ideas = subject.candidates(*dims, kind)
                sources = {launch.kernel.source for idea in ideas for launch in case.plan(idea, H200).launches}
                assert len(sources) == len(ideas)
                assert len({str(idea) for idea in ideas}) == len(ideas)


@pytest.mark.parametrize(("name", "dims", "kind"), GROUPS)
def test_no_idea_spills(name: str, dims: tuple[int, int], kind: str) -> None:
    subject = forward_ideas.SUBJECTS[name]
    ideas, group = subject.candidates(*dims, kind), subject.cases(*dims, kind, [4096])
    assert tune.unable(subject, ideas, group, H200) == {}


def _emulated(idea: forward_ideas.Candidate, dim: int, mask: Mask, dropout: float = 0.0) -> tuple[torch.Tensor, ...]:
    """Output and LSE."""
    shape: dict[str, Any] = {"dim": dim, "dim_v": dim, "mask": mask, "dropout": dropout, "kind": "full"}
    case = forward_ideas.Case("small", 100, 500, batch=1, heads=1, heads_k=1, **shape)
    torch.manual_seed(0)
    q, k, v, out = case.tensors("cpu")
    k[:, 200:230] *= 5  # so that a maximum rises
    lse = torch.full((1, 1, case.len_q), torch.nan)
    plan = case.plan(forward_ideas.Candidate("in use", tile=idea.tile), dataclasses.replace(H200, sms=1))
    (launch,) = plan.launches
    assert isinstance(launch.kernel, TemplateKernel)
    made = dataclasses.replace(plan, launches=(dataclasses.replace(launch, kernel=idea.applied(launch.kernel, "emu")),))
    backend.launch(made, {"q": q, "k": k, "v": v, "o": out, "lse": lse, "seed": 7}, mode="async", seed=1)
    return out, lse


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(("dim", "mask"), [(64, causal), pytest.param(128, full, marks=pytest.mark.thorough)], ids=str)
def test_what_is_dropped_stays_the_same(dim: int, mask: Mask) -> None:
    expected, _ = _emulated(DROPOUT[0], dim, mask, 0.3)
    assert expected.isfinite().all()
    for idea in DROPOUT[1:]:
        assert torch.equal(_emulated(dataclasses.replace(idea, tile=None), dim, mask, 0.3)[0], expected), idea


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_row_sums_by_products_are_those_of_the_weights() -> None:
    in_use, by_products, _, by_fma = forward_ideas.row_sum_ideas(64, 64, "bounded")
    expected, lse = _emulated(in_use, 64, causal)
    for idea in (by_products, by_fma):
        out, found = _emulated(idea, 64, causal)
        torch.testing.assert_close(out, expected, rtol=0.02, atol=0.01)
        torch.testing.assert_close(found, lse, rtol=0, atol=0.004)  # of rounded weights


def _timed(outputs: dict[str, Callable[[torch.Tensor], torch.Tensor]], ideas: list[forward_ideas.Candidate]) -> Any:
    """`calls` of ideas that write what `outputs` makes of the same numbers."""
    (case,) = forward_ideas.cases(64, 64, "full", [64])
    case = dataclasses.replace(case, batch=1, heads=1, heads_k=1)
    numbers, left = torch.randn(case.shapes()[0]), list(ideas)

    def ready(plan: Plan, tensors: dict[str, Any]) -> Callable[[], Any]:
        change = outputs[left.pop(0).name]
        return lambda: tensors["o"].copy_(change(numbers))

    return forward_ideas.calls(ideas, case, torch.device("cpu"), H200, ready)


def test_ideas_with_other_results_are_not_timed() -> None:
    tile = forward_ideas.TILES[64][0]
    outputs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "in use": lambda o: o,
        "same": lambda o: o,
        "almost": lambda o: o * 1.008,
        "another tile": lambda o: o * 1.008,
        "another tile, wrong": lambda o: torch.cat([o[:, :-1], -o[:, -1:]], 1),
        "another tile, NaN": lambda o: o * torch.nan,
        f"{forward_ideas.BOUND}half": lambda o: o / 2,
    }
    ideas = [
        forward_ideas.Candidate(name, tile=tile if "tile" in name or name.startswith("bound") else None)
        for name in outputs
    ]
    found, wrong = _timed(outputs, ideas)
    assert list(found) == ["in use", "same", "another tile", f"{forward_ideas.BOUND}half"]
    assert list(wrong) == ["almost", "another tile, wrong", "another tile, NaN"]


def test_the_command_writes_what_was_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def sweep(subject: tune.Subject, *rest: object) -> dict[str, object]:
        return {"method": rest[-1], "rows": [{"dim": dim} for dim, _ in subject.dims], "best": {}}

    monkeypatch.setattr(tune, "sweep", sweep)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    out = tmp_path / "ideas.json"
    assert forward_ideas.main(["--method", "do_bench", "-o", str(out)]) == 0
    dims = {"dropout": (64, 128, 256), "row sums": (64,), "tiles": (64, 128)}
    rows = [{"of": name, "dim": dim} for name, found in dims.items() for dim in found]
    assert json.loads(out.read_text()) == {"kind": "ideas", "method": "do_bench", "rows": rows}
