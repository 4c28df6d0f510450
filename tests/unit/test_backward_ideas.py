"""Ideas for sums of dQ: each applies to the kernels as they are now, compiles, and computes the same; stamps are read as
they are written."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import Case
from emulator.gradients import check, planned
from everyday import everyday
from fake_gpu import H200
from oracle import expected_gradients, prepare

from benchmarks.studies import backward_ideas as ideas, backward_stamps as stamps
from strobe.cuda import backward_sm90, jit
from strobe.cuda.plan import Plan
from strobe.emulator import EmulatorError, backend, compiler
from strobe.mask import causal
from strobe.tools import tune

EDITED = [idea for idea in (*ideas.IDEAS, *ideas.STAMPED) if idea.edits]
GROUP = Case("group", 200, 300, batch=1, heads=4, heads_k=2, dim=64, mask=causal)
CASES = [
    GROUP,
    Case("d128", 200, 300, batch=2, heads=2, heads_k=1, dim=128, mask=causal),
    Case("full", 300, 400, batch=1, heads=2, heads_k=1, dim=128),
    Case("padded_dim", 140, 200, batch=2, heads=1, heads_k=1, dim=72),
]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("idea", EDITED, ids=str)
def test_an_idea_compiles(idea: ideas.BackwardIdea, dim: int) -> None:
    for case in ideas.cases(dim, dim, ideas.KIND, [4096]):
        for launch in case.plan(idea, H200).launches:
            assert ideas.compiles(launch.kernel) is None, launch.kernel.name


def test_the_last_block_rounds_instead_of_a_launch() -> None:
    case, *_ = ideas.cases(64, 64, ideas.KIND, [512])
    assert len(case.plan(ideas.IN_USE, H200).launches) == 2  # by turns
    in_order, plan = (case.plan(i, H200) for i in (replace(ideas.IN_USE, turns=False), ideas.ROUNDS))
    assert len(in_order.launches) == 3 and len(plan.launches) == 2
    assert plan.workspace["turns"] == 2 * 4 * case.batch * case.heads * case.len_q // 128
    assert "kTurns = true" in plan.launches[0].kernel.source and "kDqFloats = 8192" in plan.launches[0].kernel.source


def computed(idea: ideas.BackwardIdea, case: Case, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_sm90, "TURNS_UP_TO", 1 << 30 if idea.turns else 0)
    p, inputs = prepare(case, torch.bfloat16)
    plan, tensors, finish = planned("sm90", p, inputs)
    backend.launch(idea.planned(plan, "emu"), tensors, mode="async" if seed else "sync", seed=seed)
    check(p, inputs, finish(), *expected_gradients(case, torch.bfloat16))


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("case", everyday(CASES, ["group"]))
@pytest.mark.parametrize("idea", EDITED, ids=str)
def test_an_idea_computes_the_same(idea: ideas.BackwardIdea, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (0, 1, 2):
        computed(idea, case, seed, monkeypatch)


MISTAKES = {
    "counted before its sums are written": ("    bulk_wait_written();\n", ""),
    "one block too few": ("adders(to) - 1;", "adders(to) - 2;"),
    "one block too many": ("adders(to) - 1;", "adders(to);"),
    "a turn that is not awaited": ("if (elected()) await_turn(p.turns + to.part, number);", ""),
    "pieces in other banks": ("ld_shared_x2(pieces ^ 16 * j,", "ld_shared_x2(pieces + 16 * j,"),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = MISTAKES[name]
    (idea,) = (idea for idea in ideas.IDEAS if any(old in text for _, text in idea.edits))
    wrong = replace(idea, edits=tuple((anchor, text.replace(old, new)) for anchor, text in idea.edits))
    for seed in (1, 2):
        try:
            computed(wrong, GROUP, seed, monkeypatch)
        except (AssertionError, EmulatorError):
            return
    pytest.fail(f"{name}: unnoticed")


def test_a_stamp_costs_no_branch() -> None:
    """The order of products and exponentials is the same with stamps: no atomic sums, which ptxas branches around."""
    case = ideas.STAMPED_CASES[0]
    source = case.plan(ideas.STAMPED[0], H200).launches[1].kernel.source
    assert source.count('asm volatile("mov.u32 %0, %clock;"') == 1
    assert jit.compile(source, backward_sm90.ARCH).log.count("spill stores") == 1
    used = {int(n) for n in source.replace("stamps.at(", "\0").split("\0")[1:] for n in [n.split(")")[0]]}
    assert used == set(range(len(stamps.CONSUMER)))


def test_stages_are_differences_modulo_their_words() -> None:
    """Two blocks of threads on one multiprocessor, one on another, whose clock passes 2^32."""
    words = torch.zeros(3, 4, 5, stamps.WORDS, dtype=torch.int64)
    for block, begin in enumerate((1000, 1500, 2**32 - 200)):
        for role, names in enumerate(stamps.ROLES.values()):
            for row in range(1, 4):
                for stage in range(len(names)):
                    words[block, role, row, stage] = begin + 10 + 100 * row + 3 * stage + 7 * (role == 1)
        words[block, 0, 0, :6] = torch.tensor([begin, begin + 20, begin + 320, begin + 350, begin + 400, block // 2])
    words = torch.where(words % 2**32 < 2**31, words % 2**32, words % 2**32 - 2**32).to(torch.int32)
    found = stamps.stages(words)
    assert found["consumer 0"]["a block of queries"] == 100 and found["consumer 0"]["issue S"] == 3
    assert found["producer"]["until the next"] == 100 - 3 * (len(stamps.LOADER) - 1)
    assert found["consumer 1 behind consumer 0"] == {"mean": 7, "deviation": 0}
    assert found["a block of threads"]["all blocks of queries"] == 300
    assert found["a multiprocessor"] == pytest.approx(
        {"cycles": 900, "busy": 1200 / 1800, "between blocks of threads": 100 / 1800, "at the end": 500 / 1800}
    )
    assert "all blocks of queries" in stamps.table(found)


@pytest.mark.thorough
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_gradients_are_compared_with_those_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but on the emulator."""
    applied = ideas.BackwardIdea.planned

    def on_emulator(plan: Plan, tensors: dict[str, Any]) -> Callable[[], object]:
        return lambda: backend.launch(plan, tensors)

    monkeypatch.setattr(ideas.BackwardIdea, "planned", lambda self, made, target="emu": applied(self, made, "emu"))
    monkeypatch.setattr(ideas, "on_gpu", on_emulator)
    monkeypatch.setattr(ideas.backend, "machine_of", lambda device: H200)
    monkeypatch.setattr(ideas, "CHECKED", [ideas.case_of(64, causal, 300, 1, 2, 1)])
    monkeypatch.setattr(ideas, "REPEATS", 1)
    assert ideas.check(ideas.ROUNDS, torch.device("cpu")) == ""
    places, warps = ideas.ROUNDS.edits
    wrong = replace(ideas.ROUNDS, edits=((places[0], places[1].replace("p.scale_grad", "1.1f * p.scale_grad")), warps))
    assert "run 0: dQ is off by 0.0" in ideas.check(wrong, torch.device("cpu"))


def test_stamps_are_read_behind_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def ready(plan: Plan, tensors: dict[str, Any]) -> Callable[[], None]:
        words = tensors.get("dropout_rows")

        def call() -> None:
            if words is not None:
                assert words.shape == (plan.launches[1].grid, 4, 2 * 256 // 64 + 1, stamps.WORDS)
                words.copy_(torch.arange(1, words.numel() + 1, dtype=torch.int32).view(words.shape))

        return call

    monkeypatch.setattr(ideas, "on_gpu", ready)
    monkeypatch.setattr(ideas, "make_tensors", lambda case, device, seed: None)
    monkeypatch.setattr(ideas, "kernel_tensors", lambda case, x: {})
    monkeypatch.setattr(ideas.backend, "machine_of", lambda device: H200)
    monkeypatch.setattr(ideas, "STAMPED_CASES", [ideas.case_of(128, causal, 256, 1, 4, 2)])
    rows = ideas.stamped(torch.device("cpu"))["rows"]
    assert [row["idea"] for row in rows] == [idea.name for idea in ideas.STAMPED]
    in_order = rows[0]
    assert in_order["cycles"]["consumer 1"]["issue dQ"] == 1 and set(in_order["ms"]) == {"in use", "stamped"}


def test_an_idea_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **how: object) -> SimpleNamespace:
        if command[-1].startswith("by turns,"):
            raise subprocess.TimeoutExpired(command, ideas.CHECK_S)
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    asked = []

    def sweep(subject: tune.Subject, *rest: object) -> dict[str, object]:
        asked.extend(subject.candidates(64, 64, ideas.KIND))
        return {"method": rest[-1], "rows": [], "best": {}}

    monkeypatch.setattr(ideas.subprocess, "run", run)
    monkeypatch.setattr(tune, "sweep", sweep)
    found = ideas.timed_ideas(torch.device("cpu"), "turns")
    hung = ideas.IDEAS[-1]
    assert found["rows"] == [{"tile": hung.name, "reason": f"did not end within {ideas.CHECK_S} s"}]
    assert asked == [idea for idea in ideas.IDEAS if idea is not hung]


def test_the_command_writes_what_was_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(ideas, "timed_ideas", lambda device, method: {"method": method, "rows": []})
    monkeypatch.setattr(ideas, "stamped", lambda device: {"kind": "backward-stages", "rows": []})
    out = tmp_path / "found.json"
    assert ideas.main(["--method", "sustained", "-o", str(out)]) == 0
    assert json.loads(out.read_text()) == {"method": "sustained", "rows": []}
    assert ideas.main(["--stamps", "-o", str(out)]) == 0
    assert json.loads(out.read_text()) == {"kind": "backward-stages", "rows": []}
    monkeypatch.setattr(ideas, "check", lambda idea, device: "dQ is off")
    assert ideas.main(["--check", ideas.IDEAS[1].name]) == 1
