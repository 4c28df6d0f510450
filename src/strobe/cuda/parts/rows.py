"""`Rows`, one of the four parts of a kernel: where queries and keys lie, which positions they have, how tiles are loaded.

The C++ half is pipeline/rows.cuh. Queries and keys have a kind each. A further kind is a struct there and a line in KINDS.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from strobe.cuda.parts.element import ELEMENTS
from strobe.cuda.parts.params import Field
from strobe.cuda.parts.tensor_maps import buffer_rows
from strobe.problem import Problem, Strides

# Kind -> the struct of pipeline/rows.cuh. buffer: (batch, heads, length, dim) of which sequences fill a part.
KINDS = {"dense": "DenseRows", "varlen": "VarlenRows", "buffer": "BufferRows", "paged": "PagedRows"}
_PAGED = ("table", "indptr", "lengths", "starts")
_LARGEST_BOX, _SMALLEST_BOX = 256, 8  # rows; those of smaller pages are gathered one by one


@dataclass(frozen=True)
class Rows:
    queries: str = "dense"
    keys: str = "dense"
    positions: bool = False  # what is in memory is a part of a longer sequence
    page: int = 0  # divides the rows of a page; 1: rows are gathered

    @staticmethod
    def of(problem: Problem) -> Rows:
        queries = "varlen" if problem.q.varlen else "dense"
        if problem.k.pages is not None:
            page = math.gcd(problem.k.pages.size, _LARGEST_BOX)
            return Rows(queries, "paged", True, page if page >= _SMALLEST_BOX else 1)
        keys = "varlen" if problem.k.varlen else "buffer" if problem.k.positions else "dense"
        return Rows(queries, keys, problem.positions)

    def gathered(self) -> Rows:
        """Return the rows of kernels without TMA: every row of a page has an address of its own."""
        return replace(self, page=1) if self.page else self

    def box_rows(self, rows: int) -> int:
        """Return the rows of keys in a TMA box of a tile of `rows`: no box spans two pages."""
        return math.gcd(self.page, rows)

    @property
    def varlen(self) -> bool:
        return "varlen" in (self.queries, self.keys)

    @property
    def clipped(self) -> bool:
        """Return whether boxes of some tensor end where a sequence does: then there is one box a panel."""
        return self.queries == "varlen" or self.keys != "dense"

    def config(self, pack_gqa: int = 1) -> dict[str, int | bool | str]:
        packed = "PackedVarlenRows" if self.queries == "varlen" else "PackedGqaRows"
        queries = f"{packed}<{pack_gqa}>" if pack_gqa > 1 else KINDS[self.queries]
        keys = f"PagedRows<{self.page}>" if self.page else KINDS[self.keys]
        return {"Queries": queries, "Keys": keys, "kPositions": self.positions, "kPackGqa": pack_gqa}

    @staticmethod
    def fields(*, tma: bool, paged: bool = False) -> list[Field]:
        between = ("k_batch_rows", "v_batch_rows") if tma else ()  # rows between the buffers of two sequences, or pages
        pages = [Field(t, "const int*") for t in _PAGED] if paged else []
        pages += [Field(n, "int") for n in ("page_size", "pages", "table_width")] if paged else []
        return [
            *(Field(t, "const int*") for t in ("cu_q", "cu_k", "positions")),
            *pages,
            *(Field(n, "int") for n in (*between, "batch", "heads", "group", "len_q", "len_k", "dim", "dim_v")),
        ]

    def values(self, problem: Problem, *, tma: bool) -> dict[str, Any]:
        fields = {
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
                fields[name] = buffer_rows(problem.len_k, strides) if self.keys in ("buffer", "paged") else 0
        if (pages := problem.k.pages) is not None:
            fields |= {"page_size": pages.size, "pages": pages.count, "table_width": pages.width or 0}
        return fields

    @staticmethod
    def limits_of_copies(problem: Problem) -> str | None:
        """Return which pages are too far for rows that are copied one by one: where they begin is counted in 32
        bits."""
        pages, chunk = problem.k.pages, ELEMENTS[problem.dtype].chunk
        far = (
            pages is not None and max(pages.count * page for page, _, _ in problem.k.strides) // chunk >= (1 << 32) - 1
        )
        return "a pool of 64 GB or more" if far else None

    @staticmethod
    def limits(problem: Problem) -> str | None:
        """Return which pages no Hopper kernel reads."""
        pages = problem.k.pages
        if pages is None:
            return None
        if pages.size % _SMALLEST_BOX:
            reason = Rows.limits_of_copies(problem)
            return f"{reason}, in pages that are no multiples of 8 rows" if reason else None
        for page, _, row in problem.k.strides:
            if row <= 0 or page % row or pages.count * (page // row) >= 1 << 30:
                return "pages that whole rows do not lead to, or too far"
        return None


def pack_gqa_of(problem: Problem, box_rows: int) -> int:
    """Heads that the kernel itself takes as rows of one tile: those of a group, where queries are too few to fill tiles or
    keys lie in pages. The boxes that it copies hold whole queries, so only groups that divide their rows."""
    pays = problem.k.pages is not None or (not problem.varlen and problem.len_q < 128)
    return problem.group if pays and not problem.dropout and box_rows % problem.group == 0 else 1


def group_as_rows(problem: Problem, pack: int) -> Problem:
    """The problem with `pack` heads as rows of one tile: those of a group, or so many that they divide it."""
    rows = replace(problem.q, heads=problem.heads // pack, length=problem.len_q * pack, total=problem.q.total * pack)
    return replace(problem, q=rows)


def stride_fields(*tensors: str) -> list[Field]:
    return [Field(f"{t}_{axis}", "i64") for t in tensors for axis in ("batch", "head", "row")]


def stride_values(strides: Mapping[str, Strides]) -> dict[str, int]:
    return {f"{t}_{a}": s for t, axes in strides.items() for a, s in zip(("batch", "head", "row"), axes, strict=True)}
