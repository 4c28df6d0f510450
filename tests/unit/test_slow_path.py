"""Calls on a GPU that no kernel runs are not silent. The GPU is not there: problems name its device, and the backends believe
that it is an Ampere or a Hopper one."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import strobe
from strobe.backends import dispatch, slow_path
from strobe.call import bound_call
from strobe.cuda import backend as cuda_backend
from strobe.cuda.parts.architecture import AMPERE
from strobe.problem import Problem, supposed
from strobe.problem.arguments import Arguments, Layout


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_path, "_warned", set())
    monkeypatch.delenv(slow_path.SILENCE, raising=False)
    monkeypatch.delenv("STROBE_VERBOSE", raising=False)
    reason = "it needs compute capability 9.0"
    monkeypatch.setattr(cuda_backend, "missing", lambda device, *archs: None if AMPERE in archs else reason)


def problem(dim: int = 64, dtype: torch.dtype = torch.bfloat16, length: int = 16, **options: Any) -> Problem:
    shape = (2, length, 4, dim)
    return supposed(torch.device("cuda", 0), dtype, shape, shape, shape, **options)


def reported(*problems: Problem) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for each in problems:
            slow_path.report(each, dispatch.choose(each))
    return [str(w.message) for w in found]


@pytest.mark.parametrize(
    ("slow", "says"),
    [
        (problem(dtype=torch.float32), ("float32 inputs", "Cast q, k and v to bfloat16 or float16")),
        (problem(dim=61), ("head dim 61", "Pad the head dims with zeros to 64 and 64")),
        (problem(dim=61, dtype=torch.float32), ("float32 inputs", "Do both")),
    ],
    ids=["fp32", "odd head dim", "both"],
)
def test_a_reason_is_told_once_with_the_way_out(slow: Problem, says: tuple[str, ...], ampere: None) -> None:
    (message,) = reported(slow, slow)
    assert "runs on 'tiled'" in message and slow_path.SILENCE in message
    for text in says:
        assert text in message
    assert not reported(slow)


def test_each_reason_is_told(ampere: None) -> None:
    assert len(reported(problem(dtype=torch.float32), problem(dim=61), problem(dtype=torch.float32, length=17))) == 2


def test_what_kernels_run_is_not_slow(ampere: None) -> None:
    assert dispatch.choose(problem()).name == "sm80"
    assert not reported(problem(), problem(length=0, dtype=torch.float32))  # without keys there is nothing to run


def test_the_environment_silences_the_warning(ampere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(slow_path.SILENCE, "1")
    assert not reported(problem(dtype=torch.float32))


def test_verbose_has_a_line_for_each_call(
    ampere: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reported(problem(dtype=torch.float32))
    assert not capsys.readouterr().err
    monkeypatch.setenv("STROBE_VERBOSE", "1")
    reported(problem(dtype=torch.float32), problem(dtype=torch.float32, length=17), problem())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(
        line.startswith("strobe: tiled runs the forward pass of attention: ") for line in lines
    )


@pytest.mark.parametrize("backend", [None, "tiled"])
def test_calls_are_reported_where_they_are_bound(
    backend: str | None, ampere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, at the caller's line, and not where the caller has named the backend."""
    slow = problem(dtype=torch.float32)
    monkeypatch.setattr(bound_call.Problem, "of", staticmethod(lambda a, needs_grad: (slow, Layout.BSHD)))
    monkeypatch.setattr(bound_call.remembered, "calls", {})
    x = torch.randn(2, 16, 4, 64)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            strobe.attention(x, x, x, backend=backend)
    assert [w.filename for w in found] == ([] if backend else [__file__])


def test_a_backward_pass_without_a_kernel_is_reported(ampere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = object.__new__(bound_call.BoundCall)
    bound.problem, bound.layout, bound.backend, bound._backward = problem(), Layout.BSHD, dispatch.get("sm80"), {}
    monkeypatch.setattr(dispatch, "choose_backward", lambda p, forward: dispatch.get("tiled"))
    monkeypatch.setattr(
        dispatch, "bind", lambda backend, p, layout: SimpleNamespace(run=lambda *arguments: backend.name)
    )
    x, a = torch.randn(2, 16, 4, 64), Arguments(None, None, None)
    with pytest.warns(UserWarning, match="the backward pass of attention: .* runs on 'tiled'"):
        assert bound.backward(("q",), a, x, x, x, None) == "tiled"
