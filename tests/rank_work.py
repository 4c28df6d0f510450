"""What the processes of a `RankPool` do: functions of a process group, named in tests and imported by the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from shard_cases import Case, on_one_rank

_meshes: dict[Any, Any] = {}


def mesh_of(group: dist.ProcessGroup, inner: int | None) -> Any:
    """The group or, with `inner`, a pair of groups: rows travel in the first, heads are traded in the second."""
    if inner is None:
        return group
    key = group.size(), inner
    if key not in _meshes:
        size = group.size()
        assert size == dist.get_world_size(), "groups of a mesh are made by all processes"
        rows = [dist.new_group(list(range(i, size, inner))) for i in range(inner)]
        heads = [dist.new_group(list(range(i, i + inner))) for i in range(0, size, inner)]
        _meshes[key] = rows[group.rank() % inner], heads[group.rank() // inner]
    return _meshes[key]


def attend(group: dist.ProcessGroup, method: str, cases: list[Case], **keywords: Any) -> list[dict[str, torch.Tensor]]:
    mesh = mesh_of(group, 2 if method == "hybrid" else None)
    rank, size = group.rank(), group.size()
    return [on_one_rank(case, mesh, rank, case.plan(size), method, **keywords) for case in cases]
