"""The schedule of context parallelism with the CUDA kernels in it, ranks and kernels on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import strobe
from strobe.distributed import ShardPlan, attention, join, shard, simulator, spans, step
from strobe.distributed.method import Task
from strobe.distributed.ring import Deliver
from strobe.emulator import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


@pytest.mark.parametrize("lengths", [(150,), (90, 7, 53)], ids=["dense", "packed"])
@pytest.mark.parametrize("method", ["ring", "allgather"])
def test_forward(method: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if len(lengths) == 1:  # the kernels merge

        def merged_afterwards(*tensors: torch.Tensor) -> None:
            raise AssertionError

        monkeypatch.setattr(step, "merge_", merged_afterwards)
    torch.manual_seed(2)
    plan = ShardPlan(lengths, ranks=3, mask=strobe.causal, strategy="documents")
    q, (k, v) = torch.randn(1, 150, 4, 64).bfloat16(), torch.randn(2, 1, 150, 2, 64).bfloat16()
    cu = torch.tensor(plan.starts, dtype=torch.int32)
    exact, exact_lse = strobe.attention_varlen(
        *(t[0].double() for t in (q, k, v)), cu, cu, mask=strobe.causal, return_lse=True
    )

    def work(mesh: Any) -> tuple[torch.Tensor, torch.Tensor]:
        mine = shard(plan, q, k, v, rank=mesh.rank)
        return attention(*mine, mesh=mesh, plan=plan, method=method, backend="emulator", return_lse=True)

    parts = simulator.run(3, work)
    out, lse = join(plan, [o for o, _ in parts]), join(plan, [x for _, x in parts], 2)
    torch.testing.assert_close(out[0].double(), exact, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse[0].double(), exact_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "lengths, mask, strategy, rounded",
    [
        pytest.param((150,), strobe.full, "zigzag", [0, 0, 0], marks=pytest.mark.thorough),
        (
            (150,),
            strobe.causal,
            "zigzag",
            [25, 25, 0],
        ),  # the last step that has all rows is followed by one that has half
        pytest.param((150,), strobe.causal, "contiguous", [0, 0, 0], marks=pytest.mark.thorough),
        # only the first rows have a second step
        pytest.param((150,), strobe.window(20, 0), "contiguous", [0, 30, 30], marks=pytest.mark.thorough),
        pytest.param((90, 7, 53), strobe.causal, "contiguous", None, marks=pytest.mark.thorough),
    ],
    ids=["full", "causal", "contiguous", "window", "packed"],
)
def test_the_last_step_of_a_ring_rounds(
    lengths: tuple[int, ...],
    mask: strobe.Mask,
    strategy: str,
    rounded: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bits are those of a pass over what is merged, which remains for `rounded` rows of each rank."""
    monkeypatch.setenv("STROBE_EMULATE", "sm90")
    torch.manual_seed(2)
    plan = ShardPlan(lengths, ranks=3, mask=mask, strategy=strategy)
    q, (k, v) = torch.randn(1, 150, 2, 64).bfloat16(), torch.randn(2, 1, 150, 1, 64).bfloat16()
    left: dict[int, int] = {}

    def finished(task: Task, state: step.State) -> Any:
        left[task.rank] = spans.size(spans.difference((state._everything,), state._finished))
        return whole(task, state)

    whole = Task.finished
    monkeypatch.setattr(Task, "finished", finished)

    def work(mesh: Any) -> tuple[torch.Tensor, torch.Tensor]:
        mine = shard(plan, q, k, v, rank=mesh.rank)
        return attention(*mine, mesh=mesh, plan=plan, method="ring", backend="emulator", return_lse=True)

    found = simulator.run(3, work)
    if rounded is not None:
        assert [left[rank] for rank in range(3)] == rounded
    assert sum(left.values()) < 150
    monkeypatch.setattr(Deliver, "_last_calls", lambda ring: [()] * 3)
    before = simulator.run(3, work)
    assert list(left.values()) == [50, 50, 50]
    for (out, lse), (want, want_lse) in zip(found, before, strict=True):
        assert out.dtype == torch.bfloat16 and out.is_contiguous()
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
