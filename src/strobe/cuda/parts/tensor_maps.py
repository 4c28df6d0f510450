"""The tensor maps of the Hopper kernels: how TMA finds a tile of a tensor (tile/tma_tile.cuh)."""

from __future__ import annotations

from strobe.cuda.parts.element import ELEMENTS, PANEL_BYTES, Element
from strobe.cuda.runtime.driver import TensorMapSpec
from strobe.problem import Problem, Rows, Strides

FAR = 1 << 30  # see `tile_map`; also in tile/tma_tile.cuh


def tile_map(
    problem: Problem,
    kind: str,
    rows: Rows,
    dim: int,
    strides: Strides,
    box_rows: int,
    columns: int,
    *,
    one_box: bool,
    element: Element | None = None,
) -> TensorMapSpec:
    """(columns, rows, panels, heads, batch): a box is a tile of `box_rows` x `columns`. If the head dim does not
    fill whole panels it is one panel of a tile (not `one_box`). `kind` is one of `rows.KINDS`.

    Packed sequences end anywhere, and a box must not run into the next one: keys there may hold anything, and output
    there is another's. Their maps are (columns, rows in a box, heads, rows in memory, far away). A row is addressed by
    the sum of two coordinates. The first counts to the height of a box and no further: started at c instead of 0, the
    box ends c rows early. The second says where in memory the box begins, c rows before its place, which may be before
    the tensor. Coordinates must not be negative, though, so it is raised by FAR, and the last coordinate, also FAR,
    takes that back: FAR = 2^30 times its stride of 2^34 bytes less a row adds -FAR rows (addresses wrap mod 2^64).
    (The obvious way, to encode an address before the tensor, faults if no memory is mapped there.) Buffers of which
    sequences fill a part have such maps, too; rows count through all of them. `element`: that of the tensor, if it is
    not the one of the products; there is one box a panel then.
    """
    clipped = kind != "dense"
    one_box = one_box and element is None
    element = element or ELEMENTS[problem.dtype]
    size, panel = element.bytes, element.panel
    batch_stride, head_stride, row_stride = (size * s for s in strides)
    # A dimension of size 1 may have any stride, and the hardware wants a multiple of 16.
    alone = batch_stride if clipped and problem.batch > 1 else 128
    row_stride = row_stride if (rows.total if kind == "varlen" else rows.length) > 1 else alone
    head_stride = head_stride if rows.heads > 1 else row_stride
    batch_stride = batch_stride if problem.batch > 1 else row_stride
    steps: tuple[int, ...] = (row_stride, 128, head_stride, batch_stride)
    box: tuple[int, ...] = (panel, box_rows, 1, 1, 1)
    if clipped:
        dims: tuple[int, ...] = (dim, box_rows, rows.heads, 2 * FAR, FAR + 1)
        steps = (row_stride, head_stride, row_stride, (1 << 34) - row_stride)
    elif one_box:
        dims = (panel, rows.length, dim // panel, rows.heads, problem.batch)
        box = (panel, box_rows, element.panels(columns), 1, 1)
    else:
        dims = (dim, rows.length, 1, rows.heads, problem.batch)
    return TensorMapSpec(0, size, dims, steps, box, PANEL_BYTES, element.in_maps)  # type: ignore[arg-type]


def buffer_rows(length: int, strides: Strides) -> int:
    """Return how many rows lead from the buffer of one sequence to that of the next, for a clipped map."""
    return strides[0] // strides[2] if length > 1 else 1


def packed_gqa_map(
    problem: Problem, pack: int, len_q: int, dim: int, strides: Strides, element: Element | None = None
) -> TensorMapSpec:
    """(columns, heads of a tile, queries, tiles of a query, batch): a box is 64 rows, each query's heads one after the
    other. Of varlen queries (columns, heads, queries in a box, queries in memory, far away), clipped as by `tile_map`.
    `problem`: with `pack` heads as rows."""
    element = element or ELEMENTS[problem.dtype]
    size = element.bytes
    batch_stride, head_stride, row_stride = (size * s for s in strides)
    if problem.q.varlen:
        row_stride = row_stride if problem.q.total > pack else 128
        head_stride = head_stride if pack * problem.heads > 1 else 128
        dims = (dim, pack * problem.heads, 64 // pack, 2 * FAR, FAR + 1)
        steps = (head_stride, row_stride, row_stride, (1 << 34) - row_stride)
        box = (element.panel, pack, 64 // pack, 1, 1)
        return TensorMapSpec(0, size, dims, steps, box, PANEL_BYTES, element.in_maps)  # type: ignore[arg-type]
    dims = (dim, pack, len_q, problem.heads, problem.batch)
    wanted = (head_stride, row_stride, pack * head_stride, batch_stride)
    known = tuple(s if n > 1 else 128 for n, s in zip(dims[1:], wanted, strict=True))  # a size of 1 may have any stride
    box = (element.panel, pack, 64 // pack, 1, 1)
    return TensorMapSpec(0, size, dims, known, box, PANEL_BYTES, element.in_maps)  # type: ignore[arg-type]


def tma_limits(problem: Problem) -> str | None:
    """Return why TMA does not read the tensors of this problem; None if it does."""
    lengths = (problem.len_q, problem.len_k, problem.len_k)
    heads = (problem.heads, problem.heads_k, problem.heads_k)
    sizes = zip(problem.strides, heads, lengths, strict=True)
    if any((head == 0 and n > 1) or (row == 0 and length > 1) for (_, head, row), n, length in sizes):
        return "an expanded tensor (a stride is 0); TMA needs memory that is there"
    return None
