"""The small experiments beside the benchmark: their measuring, and the tables made of what is committed."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bench_results import synthetic

from benchmarks.pages import comparisons, forward_page, method_page, tried
from benchmarks.studies import experiments, training_costs
from strobe.bench.results import save
from strobe.cuda.plans import forward_sm90
from strobe.cuda.runtime import jit
from strobe.measure.stopwatch import Settings, Stopwatch, TimedCall
from strobe.measure.turns import medians


def test_times_are_kept_by_place_in_the_turn() -> None:
    calls: list[str] = []

    def slow_at_first(name: str) -> None:
        if not calls or calls[-1] != name:
            time.sleep(0.003)
        calls.append(name)

    providers = {name: (lambda name=name: slow_at_first(name), contextlib.nullcontext) for name in ("a", "b", "c")}
    found = experiments.by_place(Stopwatch(torch.device("cpu"), Settings()), providers, places=4, rounds=9)
    assert set(found) == {"a", "b", "c"} and all(len(places) == 4 for places in found.values())
    for first, *others in found.values():
        assert first >= 2.9 > 1.0 > max(others)


def test_a_call_is_the_providers() -> None:
    case = experiments.replace(experiments.cases("grid36")[0], batch=1, heads=2, heads_k=2, len_q=24, len_k=24)
    call, scope = experiments.prepared(case, "strobe-tiled", torch.device("cpu"))
    with scope():
        assert call().shape[-1] == case.dim_v


def test_what_training_adds_is_a_pair_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(training_costs, "_CALLS", 1)
    row = training_costs.cpu_time(cpu, samples=1)
    assert set(row["us"]) == {"strobe", "sdpa"} and min(row["us"].values()) > 0
    leaves = training_costs._leaves(cpu, 1, 16, 2, 1, 16)
    plain, fixed = (training_costs._backward({"deterministic": x}, leaves) for x in (False, True))
    assert [g.shape for g in fixed()] == [t.shape for t in leaves]
    calls = {"plain": TimedCall(plain), "deterministic": TimedCall(fixed)}
    ms = medians(calls, Stopwatch(cpu, Settings(budget_ms=1, rounds=2)))
    assert set(ms) == {"plain", "deterministic"} and min(ms.values()) > 0


def test_inputs_differ_from_plain_bf16_in_one_thing() -> None:
    problems = experiments.input_cases()
    assert {problem["bf16"].dim for problem in problems} == {64, 128, 256}
    assert sum(problem["bf16"].heads == 64 for problem in problems) == len(problems) / 2
    for problem in problems:
        plain = problem["bf16"]
        assert plain.heads == plain.heads_k and plain.dtype == "bfloat16"
        for name, other in problem.items():
            changed = {
                f for f in ("dtype", "heads_k", "heads", "batch", "len_q") if getattr(other, f) != getattr(plain, f)
            }
            assert changed == {"bf16": set(), "fp16": {"dtype"}, "grouped": {"heads_k"}}[name]
            assert name != "grouped" or other.group == 8


def test_tables(tmp_path: Path) -> None:
    assert method_page.block(tmp_path) == "" == forward_page.block(tmp_path)
    folder = tmp_path / "benchmarks" / "results" / "h200" / "studies"
    folder.mkdir(parents=True)
    ms = {"strobe-sm90": [2.0] + [1.0] * 11, "torch-cudnn": [3.0] + [1.25] * 11}
    (folder / "turns.json").write_text(json.dumps({"rows": [{"case": "d128-full-8k", "rounds": 3, "ms": ms}]}))
    assert "5th percentiles" not in method_page.block(tmp_path)  # of a grid that is not there
    grid = synthetic(("grid36",))
    save(grid, folder.parent / "grid36.json")
    mean = comparisons.mean_ratio(comparisons.ratios(grid, "grid36", "strobe-sm90", "torch-cudnn"))
    assert f"geometric mean of `grid36`: {mean:.3f} by medians" in method_page.block(tmp_path)
    ratio = "| d128-full-8k | 2 providers, 12 calls | ratio | 1.500 | 1.250 | 1.250 | 1.250 |  |"
    assert ratio in method_page.block(tmp_path)


@pytest.mark.skipif(jit.nvrtc_status() is not None, reason=str(jit.nvrtc_status()))
def test_variants_are_compiled_and_counted(tmp_path: Path) -> None:
    rows = list(experiments.variants(torch.device("cpu"), most=2))
    assert len(rows) == 2 and all(0 < row["seconds"] < 60 and row["spills"] == 0 for row in rows)
    assert [row["tile"] for row in rows] == [str(forward_sm90.table_tile(64, 64))] * 2
    folder = tmp_path / "benchmarks" / "results" / "another" / "studies"
    folder.mkdir(parents=True)
    rows[0] |= {"seconds": 1.0}
    rows[1] |= {"seconds": 3.0, "spills": 8}
    machine = {"host_cpu": "a CPU", "host_cores": 16}
    (folder / "variants.json").write_text(json.dumps({"rows": rows, "provenance": machine}))
    assert forward_page.compiled(tmp_path)[-1].endswith("2 variants in bf16, median 2.00 s, longest 3.00 s; 1 spill.")


def test_an_idea_brings_the_mean_of_its_cases() -> None:
    rows = [{"dim": 64, "case": case, "tile": tile, "ms": ms} for case, tile, ms in TIMED]
    study = {"rows": [*rows, {"dim": 64, "case": "a", "tile": "idea", "reason": "spills"}]}
    assert tried.gains(study, "idea") == pytest.approx([2.0, 0.5]) and tried.names(study) == ["in use", "idea", "other"]
    assert tried.brought([2.0, 0.5]) == "1.000 (0.500 to 2.000)" and tried.brought([]) == ""
    assert forward_page.table_row("idea", [2.0, 0.5], False) == "| idea | 1.00 (0.50 to 2.00) | no |"


def test_the_kernel_in_use_is_timed_before_and_behind_an_idea() -> None:
    both = {"in use": 1.0, "k and v": 1.0, "in use, again": 4.0}
    rows = [{"direction": d, "dim": 64, "case": "a", "turns": both} for d in ("forward", "backward")]
    rows.append({"direction": "forward", "dim": 64, "case": "b", "turns": both, "sustained": both})
    found = tried.fetches({"rows": rows}, "forward")
    assert tried.gains(found, "k and v") == [2.0, 2.0, 2.0] and tried.gains(found, tried.AGAIN) == [0.25] * 3
    assert tried.gains(found, "k and v", case="b", method="sustained") == [2.0]


TIMED = (("a", "in use", 1.0), ("a", "idea", 0.5), ("b", "in use", 3.0), ("b", "idea", 6.0), ("b", "other", 1.0))


def test_a_variant_that_took_too_long_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    took = iter([1.4, 1.7, 1.2, 1.3, 1.8, 1.6, 1.5])
    monkeypatch.setattr(jit, "compile", lambda *_: jit.Compiled(b"", "", next(took), (13, 0)))
    variant = next(forward_sm90.variants())
    found = [experiments._variant(variant, "sm_90a") for _ in range(3)]
    assert [row["tries"] for row in found] == [[1.4], [1.7, 1.2, 1.3], [1.8, 1.6, 1.5]]
    assert [row["seconds"] for row in found] == [1.4, 1.3, 1.6]


def test_without_a_gpu_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        experiments.main(["turns", "-o", str(tmp_path / "x.json")])
    assert "there is no GPU" in capsys.readouterr().err


def test_a_file_has_its_provenance_and_a_row_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"a": 1}, {"a": [2.0, 3.0]}]
    monkeypatch.setitem(experiments.STUDIES, "variants", lambda device: iter(rows))
    path = tmp_path / "new" / "x.json"
    assert experiments.main(["variants", "-o", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["rows"] == rows and found["complete"] and found["provenance"]["torch"] == torch.__version__
    assert '\n  {"a": [2.0, 3.0]}\n' in path.read_text()


def test_a_study_that_is_stopped_leaves_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(device: torch.device) -> Iterator[dict]:
        yield {"a": 1}
        raise KeyboardInterrupt

    monkeypatch.setitem(experiments.STUDIES, "variants", stopped)
    with pytest.raises(KeyboardInterrupt):
        experiments.main(["variants", "-o", str(tmp_path / "x.json")])
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["rows"] == [{"a": 1}] and not found["complete"]
