"""An error on one rank is an error on every rank, and never a hang."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_work
import torch
from rank_pool import ROOT, RankPool

import strobe
from strobe.distributed import ShardPlan, agreement, attention, decode, merge, simulator, unshard


@pytest.mark.parametrize(
    "changed, words",
    [
        ({1: {"heads": 4}}, r"q is \(1, 'rows', 2, 8\) on rank 0 2 3, \(1, 'rows', 4, 8\) on rank 1"),
        ({3: {"dtype": torch.float64}}, r"dtype is torch.float32 on rank 0 1 2, torch.float64 on rank 3"),
        ({2: {"mask": strobe.full}}, r"mask is .*causal on rank 0 1 3, .*full on rank 2"),
        ({0: {"method": "halo"}, 1: {"method": "halo"}}, r"method is halo on rank 0 1, ring on rank 2 3"),
        ({1: {"scale": 0.5}}, r"scale is None on rank 0 2 3, 0.5 on rank 1"),
        ({1: {"grad": True}}, r"a gradient is needed is False on rank 0 2 3, True on rank 1"),
        ({2: {"length": 17}}, r"plan is 16\|contiguous.* on rank 0 1 3, 17\|contiguous.* on rank 2"),
    ],
    ids=["heads", "dtype", "mask", "method", "scale", "gradient", "plan"],
)
def test_ranks_that_disagree(pool: RankPool, changed: dict[int, dict[str, Any]], words: str) -> None:
    for ok, value in pool.outcomes(rank_work.call_differently, changed):
        assert not ok and "ValueError: ranks disagree about the call: " in value[0]
        assert re.search(words, value[0]), value[0]
    assert all(ok for ok, _ in pool.outcomes(rank_work.call_differently, {})), "the ranks can still talk"


@pytest.mark.parametrize(
    "mine, words",
    [
        ({"rows": 5}, "ValueError: q has 5 rows, but rank 1 holds 4 of the 16 positions of the plan"),
        ({"method": "hybrid"}, "ValueError: method='hybrid' needs two dimensions of mesh"),
        ({"method": "tree"}, "ValueError: method must be one of 'auto', 'ring', .* got 'tree'"),
        ({"dtype": torch.int32}, "TypeError: q has dtype torch.int32; allowed are"),
        ({"layout": "hd"}, "ValueError: layout must be one of 'bshd', 'bhsd', got 'hd'"),
    ],
    ids=["rows", "mesh", "method", "dtype", "layout"],
)
def test_an_error_of_one_rank_is_told_to_all(pool: RankPool, mine: dict[str, Any], words: str) -> None:
    outcomes = pool.outcomes(rank_work.call_differently, {1: mine})
    for rank, (ok, value) in enumerate(outcomes):
        assert not ok
        told = "" if rank == 1 else "ValueError: strobe.distributed.attention cannot run: rank 1: "
        assert re.match(re.escape(told) + words, value[0]), value[0]
    assert all(ok for ok, _ in pool.outcomes(rank_work.call_differently, {}))


@pytest.mark.parametrize(
    "signal, when",
    [("SIGKILL", "before the call"), ("SIGKILL", "in its middle"), ("SIGSTOP", "in its middle")],
    ids=lambda x: x,
)
def test_a_rank_that_dies(tmp_path: Path, signal: str, when: str) -> None:
    """A rank may die or be silent. Each of the others ends with an error that names it, also the one that does not talk
    to it."""
    timeout, lost = 8.0, 1
    script = "import sys, rank_work; rank_work.lose_a_rank(int(sys.argv[1]), 4, sys.argv[2], 1, *sys.argv[3:5], 8.0)"
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script]
    ranks = [
        subprocess.Popen(
            [*command, str(r), str(tmp_path / "store"), signal, when],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for r in range(4)
    ]
    try:
        told = {r: ranks[r].communicate(timeout=300)[0] for r in range(4) if r != lost}
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for rank, text in told.items():
        seconds, error = text.split(" ", 1)
        assert error.startswith(f"rank {rank} could not "), error
        assert re.search(rf"could not (send to|receive from) rank {lost}: ", error), error
        assert "gloo" not in error and "typically" not in error, "where in gloo it happened is nobody's business"
        assert float(seconds) < timeout + 4


def test_arguments() -> None:
    """Those that no other rank has to know about."""
    q = torch.randn(1, 4, 2, 8)

    def fails(error: type[Exception], match: str, *tensors: torch.Tensor, **keywords: Any) -> None:
        def work(mesh: Any) -> None:
            with pytest.raises(error, match=match):
                attention(*(tensors or (q, q, q)), **{"mesh": mesh, **keywords})

        simulator.run(1, work)

    fails(ValueError, "dropout is 0.1; it needs a seed", dropout=0.1)
    fails(ValueError, "softcap and score cannot be given together", softcap=1.0, score=strobe.alibi(torch.ones(2)))
    fails(TypeError, "mask must be a strobe mask", mask=torch.ones(4, 4) > 0)
    fails(ValueError, "method must be one of 'auto', 'ring', .*, got 'tree'", method="tree")
    fails(ValueError, "layout must be one of 'bshd', 'bhsd', got 'hd'", layout="hd")
    fails(ValueError, "q has 2 axes; allowed are 3", *[torch.randn(4, 8)] * 3)
    fails(TypeError, "mesh must be a DeviceMesh", mesh="cp")
    packed = ShardPlan([2, 2], ranks=1)
    fails(ValueError, "batch size 2; with a plan of several documents", *[torch.randn(2, 4, 2, 8)] * 3, plan=packed)


def test_what_needs_a_plan_of_a_kind() -> None:
    q = torch.randn(1, 32, 2, 8)

    def work(mesh: Any) -> list[str]:
        told = []
        for keywords in (
            {"invariant": True, "plan": ShardPlan(64, ranks=2, block=4)},
            {"invariant": True, "plan": ShardPlan(64, ranks=2, block=16), "method": "ring"},
            {"method": "ulysses", "plan": ShardPlan(64, ranks=2), "one head": True},
            {"plan": ShardPlan(64, ranks=4)},
        ):
            x = q[:, :, :1] if keywords.pop("one head", False) else q
            try:
                attention(x, x, x, mesh=mesh, **keywords)
                told.append("")
            except ValueError as error:
                told.append(str(error))
        return told

    for told in simulator.run(2, work):
        assert "cut at multiples of at least 16 positions" in told[0] and "got block=4" in told[0]
        assert "invariant=True needs method='allgather'" in told[1] and "got method='ring'" in told[1]
        assert told[2] == "method='ulysses' needs a query head for each of the 2 ranks, q has 1 heads"
        assert told[3] == "plan is for 4 ranks, mesh has 2"


def told_on_each_rank(*functions: Callable[[Any], Any]) -> list[list[str]]:
    """Return the errors on two ranks for each function of a transport."""

    def work(mesh: Any) -> list[str]:
        told = []
        for function in functions:
            with pytest.raises((TypeError, ValueError)) as caught:
                function(mesh)
            told.append(str(caught.value))
        return told

    return [list(each) for each in zip(*simulator.run(2, work, timeout=20), strict=True)]


def test_ranks_that_decode_differently() -> None:
    q, k = torch.randn(1, 1, 2, 8), torch.randn(1, 4, 2, 8)
    told = told_on_each_rank(
        lambda mesh: decode(q, k, k, mesh=mesh, scale=0.5 if mesh.rank else None),
        lambda mesh: decode(q, k, k, mesh=mesh, sinks=torch.zeros(2) if mesh.rank else None),
        lambda mesh: decode(q, k, k, mesh=mesh, plan=ShardPlan(8, ranks=2, mask=strobe.causal if mesh.rank else None)),
        lambda mesh: decode(q, k[:, :, : 1 + mesh.rank], k[:, :, : 1 + mesh.rank], mesh=mesh),
        lambda mesh: decode(q, k, k, mesh=mesh) if mesh.rank else attention(k, k, k, mesh=mesh),
    )
    for here, there in told:
        assert here == there
    words = [each[0].removeprefix("ranks disagree about the call: ") for each in told]
    assert words[0] == "scale is None on rank 0, 0.5 on rank 1"
    assert words[1] == "sinks is None on rank 0, (2,) on rank 1"
    assert "mask is strobe.full on rank 0, strobe.causal on rank 1" in words[2]
    assert words[3].startswith("k is (1, 'rows', 1, 8) on rank 0, (1, 'rows', 2, 8) on rank 1; v is ")
    names = [f"strobe.distributed.{name} on rank {rank}" for rank, name in enumerate(("attention", "decode"))]
    assert words[4] == f"function is {', '.join(names)}"


def test_an_error_of_one_rank_in_decode_merge_and_unshard() -> None:
    """Also of a rank that holds no keys: it would otherwise wait for those that raise."""
    q, k, plan = torch.randn(1, 1, 2, 8), torch.randn(1, 4, 2, 8), ShardPlan(8, ranks=2)
    empty = k[:, :0]
    told = told_on_each_rank(
        lambda mesh: decode(q, k, k.double() if mesh.rank else k, mesh=mesh),
        lambda mesh: decode(q, *((k[..., :7], k) if mesh.rank else (empty, empty)), mesh=mesh),
        lambda mesh: decode(q, k, k, mesh=mesh, plan=ShardPlan(8, ranks=4 if mesh.rank else 2)),
        lambda mesh: merge(q, torch.zeros(1, 2, 1 + mesh.rank), mesh=mesh),
        lambda mesh: unshard(plan, torch.zeros(1, 4 - mesh.rank), mesh=mesh),
    )
    for here, there in told:
        assert re.fullmatch(
            rf"strobe.distributed.(decode|merge|unshard) cannot run: rank 1: \w+: {re.escape(there)}", here
        )
    assert [there.split(",")[0].split(";")[0] for _, there in told] == [
        "v has dtype torch.float64",
        "q and k disagree in head dim: 8 and 7",
        "plan is for 4 ranks",
        "lse must be (…",
        "a tensor has shape (1",
    ]


def test_shards_of_other_kinds_are_named() -> None:
    plan = ShardPlan(8, ranks=2)
    (told,) = told_on_each_rank(lambda mesh: unshard(plan, torch.zeros(1 + mesh.rank, 4), mesh=mesh))
    kinds = [f"[({n}, 'rows', torch.float32)] on rank {n - 1}" for n in (1, 2)]
    assert told[0] == told[1] == f"ranks disagree about the call: tensors is {', '.join(kinds)}"


def test_decoding_needs_positions_for_a_mask() -> None:
    q = torch.randn(1, 1, 2, 8)

    def work(mesh: Any) -> None:
        with pytest.raises(ValueError, match="a plan must say which those are"):
            decode(q, q, q, mesh=mesh, mask=strobe.causal)
        with pytest.raises(ValueError, match="plan has 2 documents"):
            decode(q, q, q, mesh=mesh, plan=ShardPlan([1, 1], ranks=1))
        with pytest.raises(ValueError, match="k has 1 rows, but rank 0 holds 5"):
            decode(q, q, q, mesh=mesh, plan=ShardPlan(5, ranks=1))

    simulator.run(1, work)


def test_the_seed_of_a_step_is_not_another_kind_of_call() -> None:
    """The facts on which ranks have agreed do not grow with a training run; seeds that differ are found where they
    ask."""

    class Alone:
        rank, size = 0, 1

    alone = Alone()
    for seed in (1, 2, 3):
        agreement.agree([alone], {"function": "f", "seed": seed}, None, torch.device("cpu"), None)  # type: ignore[list-item]
    assert len(agreement._agreed[alone]) == 1
