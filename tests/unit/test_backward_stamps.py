"""Stamps of the stages of Hopper's backward: they apply to the kernel as it is now, cost no branch, change no gradient, and
are read as they are written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case
from emulator.gradients import check, planned
from everyday import everyday
from fake_gpu import H200
from oracle import expected_gradients, prepare

from benchmarks.studies import backward_stamps as stamps
from benchmarks.studies.ideas import backward_cases
from strobe.cuda.parts.plan import Plan
from strobe.cuda.plans import backward_sm90
from strobe.cuda.runtime import jit, ptxas_log
from strobe.emulator import backend, compiler
from strobe.variants.mask import causal

CASES = [
    Case("group", 200, 300, batch=1, heads=4, heads_k=2, dim=64, mask=causal),
    Case("d128", 200, 300, batch=2, heads=2, heads_k=1, dim=128, mask=causal),
    Case("full", 300, 400, batch=1, heads=2, heads_k=1, dim=128),
    Case("padded_dim", 140, 200, batch=2, heads=1, heads_k=1, dim=72),
]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("order", stamps.ORDERS)
def test_a_stamped_kernel_compiles(order: str, dim: int) -> None:
    """A register of the producer may be spilled: under a causal mask the kernel in use does that, by turns."""
    for case in backward_cases(dim, dim, stamps.KIND, [4096]):
        plain, plan = (stamps.planned(case, idea, order, H200) for idea in (stamps.IN_USE, stamps.STAMPED))
        assert [a.kernel == b.kernel for a, b in zip(plain.launches, plan.launches, strict=True)].count(False) == 1
        assert len(plan.launches) == (2 if "turns" in order else 3)
        log = jit.compile(plan.launches[1].kernel.source, backward_sm90.ARCH).log
        assert ptxas_log.spills(log) <= 16 and not ptxas_log.warnings(log)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("case", everyday(CASES, ["group"]))
@pytest.mark.parametrize("order", stamps.ORDERS)
def test_gradients_are_the_same_with_stamps(order: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_sm90, "TURNS_UP_TO", stamps.ORDERS[order])
    p, inputs = prepare(case, torch.bfloat16)
    for seed in (0, 1, 2):
        plan, tensors, finish = planned("sm90", p, inputs)
        backend.launch(stamps.STAMPED.planned(plan, "emu"), tensors, mode="async" if seed else "sync", seed=seed)
        check(p, inputs, finish(), *expected_gradients(case, torch.bfloat16))


def test_each_stage_has_a_stamp_without_a_branch() -> None:
    """A predicated store: ptxas branches around atomic sums, and would order products and exponentials in another way."""
    source = stamps.planned(stamps.CASES[0], stamps.STAMPED, "stamped", H200).launches[1].kernel.source
    assert source.count('asm volatile("mov.u32 %0, %clock;"') == 1
    stored = source.split("void put(int word, u32 x) const {")[1].split("\n  }\n")[0]
    assert "@writes st.global.u32" in stored and "if (" not in stored and "atom" not in stored
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


def test_stamps_are_read_behind_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def ready(plan: Plan, tensors: dict[str, Any]) -> Callable[[], None]:
        words = tensors.get("dropout_rows")

        def call() -> None:
            if words is not None:
                assert words.shape == (plan.launches[1].grid, 4, 2 * 256 // 64 + 1, stamps.WORDS)
                # Sums of several calls, unless the words are zero before the one that counts.
                words.add_(torch.arange(1, words.numel() + 1, dtype=torch.int32).view(words.shape))

        return call

    monkeypatch.setattr(stamps, "on_gpu", ready)
    monkeypatch.setattr(stamps, "make_tensors", lambda case, device, seed: None)
    monkeypatch.setattr(stamps, "kernel_tensors", lambda case, x: {})
    monkeypatch.setattr(stamps.backend, "machine_of", lambda device: H200)
    monkeypatch.setattr(stamps, "CASES", [stamps.case_of(128, causal, 256, 1, 4, 2)])
    rows = stamps.stamped(torch.device("cpu"))["rows"]
    assert [row["idea"] for row in rows] == list(stamps.ORDERS)
    in_order = rows[0]
    assert in_order["cycles"]["consumer 1"]["issue dQ"] == 1 and set(in_order["ms"]) == {"in use", "stamped"}


def test_the_command_writes_what_was_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(stamps, "stamped", lambda device: {"kind": "backward-stages", "rows": []})
    out = tmp_path / "found.json"
    assert stamps.main(["-o", str(out)]) == 0
    assert json.loads(out.read_text()) == {"kind": "backward-stages", "rows": []}
