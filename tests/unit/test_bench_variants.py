"""The suite of variants: every function is checked against exact results, for everyone who can compute it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

import strobe
from strobe.bench import read_results, runner, suites, table, variants
from strobe.bench.case import BenchCase
from strobe.bench.exactness import Judge
from strobe.bench.inputs import make_tensors
from strobe.bench.report import page
from strobe.bench.request import Request
from strobe.bench.results import Ceilings
from strobe.measure.stopwatch import Settings

CPU = torch.device("cpu")


@pytest.mark.parametrize("direction", [pytest.param("forward", marks=pytest.mark.thorough), "backward"])
def test_everyone_is_exact(direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.ceilings, "measure", lambda watch, dtypes: Ceilings({"float32": 0.1}, 10.0, "made up"))
    request = Request(
        ("variants",),
        CPU,
        direction=direction,
        providers=("strobe-tiled", "eager", "torch-math", "torch-flash"),
        settings=Settings(1, 1, 0),
        profile=False,
        out=tmp_path / "results.json",
    )
    found = runner.Runner(request).run()
    rows = {(row.case.variant or "softcap", row.provider): row for row in found.rows}
    for name in (*variants.NAMES, "softcap"):
        assert rows[name, "strobe-tiled"].status == rows[name, "eager"].status == "ok", name
        assert (rows[name, "torch-math"].status == "ok") == (name in MASKS or name == variants.LEARNT_BIAS), name
        assert rows[name, "torch-flash"].status == "unsupported", name
    assert read_results.load(tmp_path / "results.json").rows[0].case == found.rows[0].case
    table.show(found, Console(file=(tmp_path / "table").open("w")))
    page.write([found], tmp_path)


MASKS = ("documents", "prefix", "window", "neighbourhood", variants.BOOLEANS)


@pytest.mark.parametrize("case", suites.cases("variants", "backward"), ids=lambda case: case.label)
def test_who_forgets_the_function_is_wrong(case: BenchCase) -> None:
    x = make_tensors(case, CPU, seed=0)
    judge, leaves = Judge(case, x), [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
    out = strobe.attention(*leaves, layout="bhsd", bias=x.bias, mask=strobe.causal)
    if case.learns_bias:
        out = strobe.attention(*leaves, layout="bhsd", bias=x.bias)
        good = torch.autograd.grad(out, (*leaves, x.bias), x.do)
        assert judge.judge(out.detach(), good).passed
        assert not judge.judge(out.detach(), (*good[:3], good[3] * 1.001)).passed
    else:
        assert not judge.judge(out.detach(), torch.autograd.grad(out, leaves, x.do)).passed


def test_pairs_are_counted() -> None:
    by_name = {case.variant: case for case in suites.cases("variants")}
    n = by_name["window"].len_k
    heads = by_name["window"].heads
    assert by_name["window"].pairs(CPU) == heads * strobe.window(n // 8 - 1, 0).area(n, n)
    assert by_name["prefix"].pairs(CPU) == heads * strobe.prefix(n // 8).area(n, n)
    assert by_name["alibi"].pairs(CPU) == heads * strobe.causal.area(n, n)
    assert by_name["tanh"].pairs(CPU) == heads * n * n
    assert {case.len_k for case in suites.cases("variants", on_gpu=True)} == {2048, 4096, 8192}
