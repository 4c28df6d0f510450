"""The compile suite: kernels alone, and whole first calls in new processes; whatever fails is a row with its reason."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_results import synthetic

from benchmarks.pages import results_page
from strobe.bench import compile_time, first_call, registry
from strobe.bench.case import case
from strobe.bench.provider import Refusal
from strobe.bench.results import Row, Timing
from strobe.bench.suites import cases
from strobe.measure.statistics import summarise

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SMALL = case("t", "small", batch=2, heads=2, heads_k=1, length=40, len_k=70, dim=16, mask="causal", dtype="float32")


def rows(device: torch.device) -> dict[str, Row]:
    found = compile_time.rows(
        cases("compile")[0], registry.select(["ours"]), device, lambda what, name: f"again {name}"
    )
    assert all(row.timed or row.reason for row in found)
    return {row.provider: row for row in found}


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(backend: str, what: Any, device: torch.device) -> Iterator[Any]:
        raise RuntimeError("no NVRTC in /usr/lib/cuda/libnvrtc.so")
        yield

    monkeypatch.setattr(compile_time, "_compiled", missing)


# ---- a new process
# ---------------------------------------------------------------------------------------------------------


def test_whole_calls_are_timed_in_new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU: the same processes as on a GPU, with a backend that has nothing to compile."""
    monkeypatch.setattr(first_call, "_CACHED", 1)
    monkeypatch.setenv("STROBE_NO_COMPILE", "1")  # of the one who asks; a first call has to compile
    found = dict(first_call.times(SMALL, "tiled", CPU))
    assert list(found) == ["first call", "cached call"] and all(
        0 < ms < 60_000 for samples in found.values() for ms in samples
    )


def test_the_clock_starts_with_nothing_loaded_that_a_user_would_not_have() -> None:
    script = (
        "import json, sys, strobe\n"
        "before = set(sys.modules)\n"
        "from strobe.bench import first_call\n"
        "print(json.dumps([m for m in set(sys.modules) - before if m.split('.')[0] in ('strobe', 'cuda', 'torch')]))\n"
    )
    root = Path(first_call.__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=True)
    assert set(json.loads(done.stdout)) == {"strobe.bench", "strobe.bench.first_call"}


def test_the_new_process_has_a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, str]] = []

    def run(command: list[str], env: dict[str, str], **more: Any) -> subprocess.CompletedProcess[str]:
        asked.append(env)
        return subprocess.CompletedProcess(command, 0, 'a line of somebody else\n{"ms": 1.0, "origins": []}\n', "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("STROBE_CUBIN_PATH", "elsewhere")
    assert first_call._ask(first_call._question(SMALL, "tiled", CPU), tmp_path) == {"ms": 1.0, "origins": []}
    assert asked[0]["STROBE_CACHE_DIR"] == str(tmp_path) and "STROBE_CUBIN_PATH" not in asked[0]


def test_what_goes_wrong_in_the_new_process_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refusal, match="cannot run this") as refused:
        first_call._ask(first_call._question(SMALL, "sm90", CPU), tmp_path)
    assert refused.value.status == "unsupported"
    monkeypatch.setattr(first_call, "_TIMEOUT_S", 0.01)
    with pytest.raises(RuntimeError, match="did not answer within 0.01 s"):
        first_call._ask(first_call._question(SMALL, "tiled", CPU), tmp_path)


@pytest.mark.parametrize(("code", "said"), [(0, ""), (-11, "Segmentation fault"), (1, "Traceback\nValueError: odd")])
def test_a_process_that_dies_is_a_reason(code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, code, "", said))
    last = said.splitlines()[-1] if said else "nothing"
    with pytest.raises(RuntimeError, match=f"status {code} and said: {last}"):
        first_call._ask(first_call._question(SMALL, "tiled", CPU), tmp_path)


# ---- rows
# -------------------------------------------------------------------------------------------------------------------


def answering(answers: dict[bool, dict[str, Any]]) -> Any:
    """In place of a new process: what it says with an empty cache directory, and with a filled one, which it leaves."""

    def ask(question: dict[str, Any], cache: Path) -> dict[str, Any]:
        filled = any(cache.iterdir())
        (cache / "kernel.cubin").touch()
        answer = answers[filled]
        if "status" in answer:
            raise Refusal(answer["status"], answer["reason"])
        return answer

    return ask


def test_rows_of_whole_calls(no_nvrtc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {False: {"ms": 1500.0, "origins": ["compiled"]}, True: {"ms": 30.0, "origins": ["disk"]}}
    monkeypatch.setattr(first_call, "_ask", answering(answers))
    found = rows(CUDA)
    assert list(found) == [
        f"strobe-{b}: {n}" for b in ("sm90", "sm80") for n in (*compile_time.COMPILED, *compile_time.CALLED)
    ]
    first, cached = found["strobe-sm90: first call"], found["strobe-sm90: cached call"]
    assert (first.ms, cached.ms) == (1500.0, 30.0)
    assert first.timing is not None and cached.timing is not None and cached.timing.summary.n == 3
    assert first.note == "should take at most 2 s" and cached.note == "should take at most 50 ms"
    assert first.repeat == "again strobe-sm90" and first.timing.how == first_call.METHOD
    assert found["strobe-sm80: disk"].reason == "RuntimeError: no NVRTC in libnvrtc.so"


@pytest.mark.parametrize(
    ("cached", "reason"),
    [
        ({"status": "failed", "reason": "CudaError: no"}, "CudaError: no"),
        (
            {"ms": 30.0, "origins": ["compiled"]},
            "RuntimeError: cached call: one kernel should be disk; found ['compiled']",
        ),
        ({"ms": 30.0, "origins": []}, "RuntimeError: cached call: one kernel should be disk; found []"),
    ],
)
def test_a_call_that_fails_leaves_the_other(
    cached: dict[str, Any], reason: str, no_nvrtc: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_call, "_ask", answering({False: {"ms": 900.0, "origins": ["compiled"]}, True: cached}))
    found = rows(CUDA)
    assert found["strobe-sm90: first call"].timed
    broken = found["strobe-sm90: cached call"]
    assert (broken.status, broken.reason, broken.timing) == ("failed", reason, None)


def test_without_a_gpu_the_calls_say_so(no_nvrtc: None) -> None:
    found = rows(CPU)
    assert found["strobe-sm80: cached call"].reason == "a whole call needs an NVIDIA GPU"
    assert found["strobe-sm80: cached call"].status == "unsupported"


def test_the_documents_have_both() -> None:
    run = synthetic(("tiles",))
    for name, ms in (("first", 900.0), ("disk", 2.0), ("memory", 0.02), ("first call", 1234.0), ("cached call", 45.0)):
        timing = Timing([ms], summarise([ms]), "perf_counter", "warm")
        run.rows.append(Row(cases("compile")[0], f"strobe-sm90: {name}", "ours", timing=timing))
    text = results_page.page({"made-up": {"compile": run}})
    assert "| kernel | compiled | from disk | from memory | first call | first call, kernel on disk |" in text
    assert "| `strobe-sm90` d64-full | 900 ms | 2 ms | 20.0 µs | 1.23 s | 45 ms |" in text


@pytest.mark.parametrize(
    ("backend", "kernels"), [("sm90", ("backward_sm90", "dq_sm90", "dkv_sm90")), ("sm80", ("backward_sm80",))]
)
def test_a_backward_is_compiled_as_a_backward(backend: str, kernels: tuple[str, ...]) -> None:
    for what in cases("compile", "backward"):
        assert compile_time._variant(backend, what, CPU).name.startswith(kernels), what.label
        assert not compile_time._variant(backend, cases("compile")[0], CPU).name.startswith(kernels)
    with pytest.raises(Refusal, match="belongs to one pass"):
        compile_time._variant(backend, cases("compile", "both")[0], CPU)
