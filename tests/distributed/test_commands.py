"""`strobe plan`, and `strobe bench --suite context-parallel`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import rank_work
import torch
from rank_pool import RankPool
from shard_cases import Case, on_one_rank
from typer.testing import CliRunner

import strobe
from strobe.bench import context_parallel
from strobe.distributed import Counted, ShardPlan, simulator
from strobe.distributed.cost import METHODS, Machine, Shape, estimate
from strobe.distributed.report import size
from strobe.distributed.shard_strategies import STRATEGIES
from strobe.tools import cli, plan_command as planning

SMALL = context_parallel.Size(96, 4, 2, 8, torch.float32)


def command(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    return done.exit_code, done.output


def test_plan_of_a_million_tokens() -> None:
    code, text = command("plan", "--ranks", "64", "--length", "1M", "--link", "400Gb", "--inner", "8")
    assert code == 0
    assert "1,048,576 positions in 1 document on 64 ranks, zigzag, causal" in text
    assert "links 400 Gb/s, 500 TFLOP/s" in text
    rows = {line.split()[0]: line for line in text.splitlines() if line.split() and line.split()[0] in METHODS}
    assert set(rows) == {"ring", "halo", "allgather", "hybrid"}  # 64 ranks are too many for 32 heads
    plan = ShardPlan(1 << 20, ranks=64, mask=strobe.causal)
    for name, line in rows.items():
        assert size(estimate(plan, Shape(32, 8, 128, 128), name, Machine(), inner=8).sent) in line
    assert sum("least time" in line for line in rows.values()) == 1


def test_bytes_on_paper_are_those_that_are_sent() -> None:
    """The table shows as sent what a plan really sends, one that is small enough to be run."""
    code, text = command(
        "plan", "--ranks", "4", "--length", "37", "--heads", "6", "--heads-k", "2", "--head-dim", "8", "--dtype",
        "float64", "--batch", "2",
    )  # fmt: skip
    assert code == 0
    case = Case(dims=(8, 8))
    for method in ("ring", "halo", "allgather", "ulysses"):

        def work(mesh: Any, method: str = method) -> int:
            counted = Counted(mesh)
            on_one_rank(case, counted, mesh.rank, case.plan(4), method, through_lse=False, check=False)
            return counted.sent

        (line,) = (line for line in text.splitlines() if line.split()[:1] == [method])
        assert f" {size(max(simulator.run(4, work)))} " in line


def test_a_faster_link_makes_transfers_shorter_and_nothing_else() -> None:
    def columns(link: str) -> list[str]:
        _, text = command("plan", "--ranks", "8", "--length", "64K", "--link", link)
        (line,) = (line for line in text.splitlines() if line.split()[:1] == ["ring"])
        return line.split()

    slow, fast = columns("100Gb"), columns("50GB")
    assert slow[1:3] == fast[1:3] and slow[5:7] == fast[5:7]  # sent, compute
    assert float(slow[3]) > float(fast[3]) and slow[4] == fast[4] == "ms"


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("--length", "1.5M"), "'--length': must be an integer such as 5000, 4K or 1M (K is 1,024), got '1.5M'"),
        (("--length", "8K", "--window", "0"), "'--window': must be at least 1, got 0"),
        (
            ("--length", "8K", "--link", "fast"),
            "--link must look like 400Gb (bits a second) or 50GB (bytes), got 'fast'",
        ),
        (("--length", "8K", "--heads", "6", "--heads-k", "4"), "--heads must be a multiple of --heads-k, got 6 and 4"),
        (
            ("--length", "8K", "--ranks", "100000"),
            "--ranks must be at most 1024, got 100000: what each rank sends to each other one is counted, 9,999,900,000 "
            "times here; give the ranks that share one sequence",
        ),
        (("--length", "8K", "--inner", "3"), "--inner must be a divisor of the 8 ranks, got 3"),
        (("--length", "8K", "--strategy", "spiral"), "must be one of contiguous, zigzag, documents, striped"),
    ],
    ids=lambda x: x[-1] if isinstance(x, tuple) else "",
)
def test_what_a_plan_cannot_be(arguments: tuple[str, ...], told: str) -> None:
    code, text = command("plan", "--ranks", "8", *arguments)
    assert code == 2
    assert told in " ".join(text.replace("│", " ").split())


def test_strategies_of_the_command_are_those_of_plans() -> None:
    assert set(planning._STRATEGIES) == set(STRATEGIES)


def test_windows_count_the_query_itself() -> None:
    _, text = command("plan", "--ranks", "2", "--length", "64", "--window", "4")
    assert "causal & window(3, 0)" in text


def test_bench_measures_every_method_and_counts_its_bytes(pool: RankPool) -> None:
    for rows in pool.run(rank_work.bench, SMALL):
        assert [r.method for r in rows] == [context_parallel.ALONE, "ring", "halo", "allgather", "ulysses", "hybrid"]
        assert all(r.forward_ms > 0 and r.both_ms > 0 for r in rows)
        assert all(r.sent == r.on_paper > 0 and r.ranks == 4 for r in rows[1:])


def test_bench_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There is one rank without torchrun."""
    monkeypatch.setitem(context_parallel.SIZES, "cpu", SMALL)
    out = tmp_path / "found.json"
    code, text = command("bench", "--suite", "context-parallel", "--device", "cpu", "--out", str(out))
    assert code == 0, text
    assert "96 tokens, causal, 4 heads on 2, dim 8, float32; 1 rank\n" in text
    assert "all steps of 4 shards on one device run at" in text
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [row["method"] for row in found["rows"]] == [context_parallel.ALONE, "ring", "halo", "allgather", "ulysses"]
    assert found["cut"]["shards"] == 4 and found["cut"]["forward"] > 0
    assert not torch.distributed.is_initialized()
    code, text = command("bench", "--suite", "context-parallel", "--suite", "quick")
    assert code == 2 and "runs by itself" in text
