"""`Output`, one of the four parts of a kernel: how the result of a tile leaves it.

    rounded   in the dtype of q
    partial   in fp32, to be merged with the results over other keys
    merged    a state (O and LSE over other keys) is merged with it, and the result is partial or rounded
    split     O, m and l of one split of the keys, which the last split merges (split-KV)
    invariant the bits of a row do not depend on other rows: splits have fixed places, and no warp decides for its rows

The C++ half is pipeline/output_rows.cuh, staging.cuh, state_parts.cuh and split_kv.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strobe.cuda.parts.element import TENSOR
from strobe.cuda.parts.params import COUNTER, Field
from strobe.cuda.parts.rows import stride_fields
from strobe.problem import Problem


@dataclass(frozen=True)
class Output:
    partial: bool = False
    rounds_state: bool = False  # merges a state in fp32 with its result, which goes elsewhere, rounded
    split: bool = False
    invariant: bool = False

    @staticmethod
    def of(problem: Problem, split: bool = False) -> Output:
        rounds_state = problem.state is not None and problem.state.out is not None
        return Output(problem.partial, rounds_state, split, problem.invariant)

    @property
    def can_merge(self) -> bool:
        """Partial kernels are told by `p.merge` whether there is a state."""
        return self.partial or self.rounds_state

    @property
    def plain(self) -> bool:
        return not self.can_merge and not self.split

    def config(self) -> dict[str, int | bool | str]:
        flags = {"kPartialOut": self.partial, "kMerge": self.can_merge, "kSplit": self.split}
        return {**flags, "kInvariant": self.invariant}

    def fields(self) -> list[Field]:
        merge = [Field("merge", "int"), Field("unscale", "float")] if self.can_merge else []
        slots = [Field("items", "int"), Field("slot_rows", "int")] if self.invariant else []  # of `plan_work.Work`
        return [
            Field("o", "float*" if self.partial else TENSOR),
            Field("lse", "float*"),  # may be null
            *stride_fields("o"),
            Field("lse_batch", "i64"),
            Field("lse_head", "i64"),
            *merge,
            *slots,
        ]

    SPLIT_FIELDS = (
        Field(COUNTER, "u32*"),  # one hands out tiles, the others count the splits of a tile
        Field("partial", "float*"),  # where the splits of a tile leave O, m and l
    )

    def values(self, problem: Problem, pack_gqa: int = 1) -> dict[str, Any]:
        fields: dict[str, Any] = lse_values(problem, pack_gqa)
        if self.can_merge:
            fields["merge"] = int(problem.state is not None)
            fields["unscale"] = 1 / problem.logit.kernel_form(problem.scale).after
        return fields


def lse_values(problem: Problem, pack_gqa: int = 1) -> dict[str, int]:
    """Strides of the LSE: those of the state's, or those of a new contiguous tensor. `pack_gqa`: so many heads are
    counted as rows."""
    rows = problem.q.total if problem.q.varlen else problem.len_q
    batch, head = problem.state.lse if problem.state is not None else (problem.heads * rows, rows // pack_gqa)
    return {"lse_batch": batch, "lse_head": head}
