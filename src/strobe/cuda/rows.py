"""`Rows`, one of the four parts of a kernel: where queries and keys lie, which positions they have, how tiles are loaded.

The C++ half is pipeline/rows.cuh. Queries and keys have a kind each. A further kind is a struct there and a line in KINDS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strobe.cuda.params import Field
from strobe.cuda.tensor_maps import buffer_rows
from strobe.problem import Problem, Strides

# Kind -> the struct of pipeline/rows.cuh. buffer: (batch, heads, length, dim) of which sequences fill a part.
KINDS = {"dense": "DenseRows", "varlen": "VarlenRows", "buffer": "BufferRows"}


@dataclass(frozen=True)
class Rows:
    queries: str = "dense"
    keys: str = "dense"
    positions: bool = False  # what is in memory is a part of a longer sequence

    @staticmethod
    def of(problem: Problem) -> Rows:
        keys = "varlen" if problem.k.varlen else "buffer" if problem.k.positions else "dense"
        return Rows("varlen" if problem.q.varlen else "dense", keys, problem.positions)

    @property
    def varlen(self) -> bool:
        return "varlen" in (self.queries, self.keys)

    @property
    def clipped(self) -> bool:
        """Whether boxes of some tensor end where a sequence does: then there is one box a panel."""
        return self.queries == "varlen" or self.keys != "dense"

    def config(self, pack_gqa: int = 1) -> dict[str, int | bool | str]:
        queries = f"PackedGqaRows<{pack_gqa}>" if pack_gqa > 1 else KINDS[self.queries]
        return {"Queries": queries, "Keys": KINDS[self.keys], "kPositions": self.positions, "kPackGqa": pack_gqa}

    @staticmethod
    def fields(*, tma: bool) -> list[Field]:
        between = ("k_batch_rows", "v_batch_rows") if tma else ()  # rows between the buffers of two sequences
        return [
            *(Field(t, "const int*") for t in ("cu_q", "cu_k", "positions")),
            *(Field(n, "int") for n in (*between, "batch", "heads", "group", "len_q", "len_k", "dim", "dim_v")),
        ]

    def values(self, problem: Problem, *, tma: bool) -> dict[str, Any]:
        found = {
            "batch": problem.batch,
            "heads": problem.heads,
            "group": problem.group,
            "len_q": problem.len_q,
            "len_k": problem.len_k,
            "dim": problem.dim,
            "dim_v": problem.dim_v,
        }
        if tma:
            for name, strides in zip(("k_batch_rows", "v_batch_rows"), problem.k.strides, strict=True):
                found[name] = buffer_rows(problem.len_k, strides) if self.keys == "buffer" else 0
        return found


def stride_fields(*tensors: str) -> list[Field]:
    return [Field(f"{t}_{axis}", "i64") for t in tensors for axis in ("batch", "head", "row")]


def stride_values(strides: Mapping[str, Strides]) -> dict[str, int]:
    return {f"{t}_{a}": s for t, axes in strides.items() for a, s in zip(("batch", "head", "row"), axes, strict=True)}
