"""DTensors: `strobe.sdpa` computes on four ranks what PyTorch's SDPA computes in one process; `strobe.attention` refuses
them and says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rank_work
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_pool import RankPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import strobe

BATCH, HEADS, LENGTH = 0, 1, 2
# Shapes of q and of k and v, the axis that is sharded, options.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, dict[str, Any]]] = {
    "batch": ((4, 2, 5, 8), (4, 2, 6, 8), BATCH, {"is_causal": True}),
    "uneven batch": ((3, 2, 5, 8), (3, 2, 6, 8), BATCH, {}),
    "a batch for all": ((1, 2, 5, 8), (4, 2, 6, 8), BATCH, {}),
    "heads": ((2, 8, 5, 8), (2, 8, 6, 8), HEADS, {}),
    "uneven heads": ((2, 6, 5, 8), (2, 6, 6, 8), HEADS, {}),
    "groups that fit": ((1, 8, 5, 8), (1, 4, 6, 8), HEADS, {"enable_gqa": True}),
    "groups that do not fit": ((1, 12, 5, 8), (1, 3, 6, 8), HEADS, {"enable_gqa": True}),
    "one key head": ((1, 4, 5, 8), (1, 1, 6, 8), HEADS, {}),
    "length": ((1, 2, 5, 8), (1, 2, 6, 8), LENGTH, {"is_causal": True}),
    "two axes": ((5, 8), (6, 8), 0, {}),
    "three axes": ((4, 5, 8), (4, 6, 8), 0, {}),
    "length of three axes": ((4, 5, 8), (4, 6, 8), 1, {}),
    "five axes": ((2, 3, 2, 5, 8), (2, 3, 2, 6, 8), 1, {}),
    "a mask": ((2, 4, 5, 8), (2, 4, 6, 8), HEADS, {"attn_mask": (2, 4, 5, 6)}),
    "a mask for all heads": ((4, 2, 5, 8), (4, 2, 6, 8), BATCH, {"attn_mask": (5, 6)}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_pytorch_in_one_process(pool: RankPool, name: str) -> None:
    of_q, of_k, axis, options = CASES[name]
    torch.manual_seed(5)
    options = {key: torch.randn(x, dtype=torch.float64) if key == "attn_mask" else x for key, x in options.items()}
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (of_q, of_k, of_k)]
    out = F.scaled_dot_product_attention(*leaves, **options)
    dout = torch.randn_like(out)
    wanted = [out, *torch.autograd.grad(out, leaves, dout)]
    tensors = [t.detach() for t in leaves]
    for found in pool.run(rank_work.sdpa_of_dtensors, tensors, dout, [axis] * 3, options):
        for a, b in zip(found, wanted, strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b.detach(), atol=1e-12, rtol=1e-12)


def test_dropout_of_replicas_is_refused(pool: RankPool) -> None:
    """Each rank would draw a seed of its own, and what is the same on all would differ."""
    q = torch.randn(4, 2, 5, 8, dtype=torch.float64)
    for ok, told in pool.outcomes(rank_work.sdpa_of_dtensors, [q] * 3, q, [None] * 3, {"dropout_p": 0.5}):
        assert not ok and "dropout_p is 0.5 and ranks compute the same" in told[0]
    pool.run(rank_work.sdpa_of_dtensors, [q] * 3, q, [BATCH] * 3, {"dropout_p": 0.5})


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_attention_refuses_them_and_names_the_way_out(mesh: Any) -> None:
    plain = torch.randn(1, 4, 2, 8)
    q = distribute_tensor(plain, mesh, [Shard(2)])
    with pytest.raises(TypeError, match=r"q is a DTensor with placements \(Shard\(dim=2\),\); call .*to_local\(\)"):
        strobe.attention(q, q, q)
    with pytest.raises(TypeError, match=r"v is a DTensor .* or strobe.sdpa"):
        strobe.attention(plain, plain, distribute_tensor(plain, mesh, [Replicate()]))
    torch.testing.assert_close(strobe.attention(*[q.to_local()] * 3), strobe.attention(plain, plain, plain))
