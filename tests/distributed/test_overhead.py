"""One rank pays nothing for being one of several."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import strobe
from strobe.distributed import ShardPlan, attention, operation, simulator

LENGTH = 8192


def seconds(call: Callable[[], Any], calls: int) -> float:
    found = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def test_one_rank_makes_the_same_call_and_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 32, 4, 8)
    calls = []
    attend = operation.attend
    monkeypatch.setattr(operation, "attend", lambda a: calls.append(a) or attend(a))

    def work(mesh: Any) -> torch.Tensor:
        def never(*_: Any) -> None:
            raise AssertionError("nothing is there to talk to")

        mesh.exchange = mesh.all_gather = mesh.reduce_scatter = never
        return attention(q, q, q, mesh=mesh, plan=ShardPlan(32, ranks=1, mask=strobe.causal), method="ring")

    (found,) = simulator.run(1, work)
    (a,) = calls
    assert a.mask == strobe.causal and a.positions is None and not a.partial and a.q.shape == q.shape
    assert torch.equal(found, strobe.attention(q, q, q, mask=strobe.causal))


def test_overhead_of_one_rank_at_8k_is_below_5_percent() -> None:
    """Both make the same call of the core, so what the ring adds is what it adds to a short call."""
    short, long = torch.randn(1, 16, 1, 16), torch.randn(1, LENGTH, 1, 16)
    plan = ShardPlan(16, ranks=1, mask=strobe.causal)

    def work(mesh: Any) -> float:
        def ring() -> Any:
            return attention(short, short, short, mesh=mesh, plan=plan, method="ring")

        def core() -> Any:
            return strobe.attention(short, short, short, mask=strobe.causal)

        core(), ring()
        return statistics.median(seconds(ring, 20) - seconds(core, 20) for _ in range(7))

    (added,) = simulator.run(1, work)
    alone = seconds(lambda: strobe.attention(long, long, long, mask=strobe.causal), 3)
    assert added < 0.05 * alone, f"{1e6 * added:.0f} µs on {1e3 * alone:.1f} ms"
