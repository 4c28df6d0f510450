"""The schedule of context parallelism with the CUDA kernels in it, ranks and kernels on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import strobe
from strobe.distributed import ShardPlan, attention, join, shard, simulator, step
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
