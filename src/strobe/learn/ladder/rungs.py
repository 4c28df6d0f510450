"""The ladder: which rungs there are, and how each is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strobe.cuda.parts.element import BF16
from strobe.cuda.plans.backward_sm90 import BLOCK_N, TURNS_UP_TO
from strobe.cuda.plans.forward_sm90 import table_tile
from strobe.learn.ladder.rung import Count, Rung, Shape

ByDim = Callable[[int], int]


# ---- grids: blocks of one launch -------------------------------------------------------------------------------------


def _slices(shape: Shape) -> int:
    return shape.slices


def _query_tiles(rows: int) -> Count:
    return lambda shape: shape.slices * -(-shape.len_q // rows)


def _key_tiles(keys: int) -> Count:
    return lambda shape: shape.slices * -(-shape.len_k // keys)


def _threads_per_row(threads: Count, block: int = 256) -> Count:
    """Blocks of `block` threads, so many of them for each query."""
    return lambda shape: -(-shape.slices * shape.len_q * threads(shape) // block)


def _queries(shape: Shape) -> int:
    return shape.len_q


def _squares(columns: Count, rows: Count = _queries) -> Count:
    """A block for each 16 x 16 numbers of a matrix, which has a row for each query unless `rows` says otherwise."""
    return lambda shape: shape.slices * -(-rows(shape) // 16) * -(-columns(shape) // 16)


def _warp(shape: Shape) -> int:
    return 32


def _one(shape: Shape) -> int:
    return 1


def _keys(shape: Shape) -> int:
    return shape.len_k


def _dim(shape: Shape) -> int:
    return shape.dim


def _half_dim(shape: Shape) -> int:
    return shape.dim // 2


# ---- shared memory ---------------------------------------------------------------------------------------------------


def _fp32_tile(rows: int, columns: int) -> int:
    """SharedTile of ladder.cuh: one word of padding a row."""
    return rows * (columns + 1) * 4


def _scalar_smem(rows: int) -> ByDim:
    """Tiles of Q, K, V and P."""
    return lambda dim: 3 * _fp32_tile(rows, dim) + _fp32_tile(rows, rows)


def _mma_smem(stages: int, weights: bool) -> ByDim:
    """Tiles of Q, of `stages` K and V, and of P."""
    return lambda dim: (1 + 2 * stages) * 64 * dim * 2 + (64 * 64 * 2 if weights else 0)


def _hopper_smem(consumers: int, stages: int, barriers: int) -> ByDim:
    return lambda dim: consumers * BF16.tile_bytes(64, dim) + 2 * stages * BF16.tile_bytes(128, dim) + barriers


def _backward_smem(dim: int) -> int:
    """Tiles of Q, dO, K, V, and of P and dS."""
    return 4 * _fp32_tile(32, dim) + 2 * _fp32_tile(32, 32)


def _backward_mma_smem(dim: int) -> int:
    """Tiles of 64 keys and values, of two times 32 rows of Q and dO, and of dS."""
    return (2 * 64 + 4 * 32) * dim * 2 + 64 * 64 * 2


# ---- what is kept in memory besides the tensors, in floats; what is moved --------------------------------------------


def _scores(shape: Shape) -> int:
    return shape.slices * shape.len_q * shape.len_k


def _two_matrices(shape: Shape) -> int:
    """P and dS."""
    return 2 * _scores(shape)


def _dq_and_delta(shape: Shape) -> int:
    return shape.slices * shape.len_q * (shape.dim + 1)


def _statistics(each: int) -> Count:
    return lambda shape: each * shape.slices * shape.len_q


def _traffic(rows: int | ByDim) -> dict[str, Any]:
    """Keys and values are fetched once for every tile of `rows` queries; q and o move once."""
    count: ByDim = rows if callable(rows) else lambda dim: rows
    return {"moves": lambda dim: 2 * dim / count(dim), "rows": count, "once": 2}


def _library_rows(dim: int) -> int:
    return table_tile(dim, dim).block_m


# ---- the rungs -------------------------------------------------------------------------------------------------------


def _mma(number: str, file: str, stages: int, weights: bool) -> Rung:
    return Rung(
        number, file, (_query_tiles(64),), _mma_smem(stages, weights), element="bf16", threads=128, **_traffic(64)
    )


def _hopper(number: str, file: str, consumers: int, threads: int, stages: int, barriers: int) -> Rung:
    rows = 64 * consumers
    return Rung(
        number,
        file,
        (_query_tiles(rows),),
        _hopper_smem(consumers, stages, barriers),
        element="bf16",
        threads=threads,
        keys=128,
        hopper=True,
        **_traffic(rows),
    )


FORWARD = (
    Rung(
        "01",
        "01_standard.cu",
        (_threads_per_row(_keys), _threads_per_row(_one), _threads_per_row(_dim)),
        lambda dim: 0,
        workspace=_scores,
        moves=lambda dim: 4 * dim + 5,
        once=1,
    ),
    Rung(
        "02",
        "02_shared_tiles.cu",
        (_squares(_keys), _threads_per_row(_warp), _squares(_dim)),
        lambda dim: 2 * _fp32_tile(16, 16),
        workspace=_scores,
        moves=lambda dim: 4 * dim / 16 + 5,
        once=1,
    ),
    Rung(
        "03",
        "03_fused_16.cu",
        (_slices,),
        _scalar_smem(16),
        workspace=_statistics(2),
        moves=lambda dim: 3 * dim / 16 + 2,
        once=2,
        divides_every=16,
    ),
    Rung(
        "04",
        "04_bigger_tiles.cu",
        (_slices,),
        _scalar_smem(64),
        workspace=_statistics(2),
        moves=lambda dim: 3 * dim / 64 + 0.5,
        once=2,
        divides_every=64,
    ),
    Rung("05", "05_queries_outside.cu", (_query_tiles(64),), _scalar_smem(64), **_traffic(64)),
    _mma("06", "06_mma.cu", stages=1, weights=True),
    _mma("07", "07_swizzle.cu", stages=1, weights=True),
    _mma("08", "08_cp_async.cu", stages=2, weights=True),
    _mma("09", "09_registers.cu", stages=2, weights=False),
    _hopper("10", "10_tma_wgmma.cu", consumers=1, threads=128, stages=1, barriers=16),
    _hopper("11", "11_warp_specialised.cu", consumers=2, threads=384, stages=2, barriers=80),
    _hopper("12", "12_ping_pong.cu", consumers=2, threads=384, stages=2, barriers=80),
    Rung(
        "13",
        "13_overlap.cu",
        (),
        lambda dim: 0,
        element="bf16",
        hopper=True,
        library="forward_sm90.cuh",
        **_traffic(_library_rows),
    ),
)

# Traffic of the one-pass rungs, for each pair: Q and dO come once for every tile of keys, and the part of dQ that
# belongs to it leaves in fp32; what each says of LSE and delta is added.
BACKWARD = (
    Rung(
        "b0",
        "b0_standard_backward.cu",
        (
            *(_squares(_keys), _squares(_keys), _threads_per_row(_warp)),
            *(_squares(_dim, rows=_keys), _squares(_dim), _squares(_dim, rows=_keys)),
        ),
        lambda dim: 2 * _fp32_tile(16, 16),
        workspace=_two_matrices,
        moves=lambda dim: 5 * 2 * dim / 16 + 7,
        once=3,
        forward="02",
        against="02",
    ),
    Rung(
        "b1",
        "b1_backward.cu",
        (_threads_per_row(_warp), _key_tiles(32), _query_tiles(32)),
        _backward_smem,
        workspace=_statistics(1),
        moves=lambda dim: 4 * dim / 32 + 2,
        once=9,
        forward="05",
        against="05",
    ),
    Rung(
        "b2",
        "b2_one_pass.cu",
        (_threads_per_row(_warp), _key_tiles(32)),
        _backward_smem,
        workspace=_statistics(1),
        moves=lambda dim: 3 * dim / 32 + 1,
        rows=lambda dim: 32,
        once=7,
        forward="05",
    ),
    Rung(
        "b3",
        "b3_mma.cu",
        (_threads_per_row(_warp, 128), _key_tiles(64), _threads_per_row(_half_dim, 128)),
        _backward_mma_smem,
        threads=128,
        element="bf16",
        workspace=_dq_and_delta,
        moves=lambda dim: 4 * dim / 64 + 2,
        rows=lambda dim: 64,
        once=11,
        forward="09",
    ),
    Rung(
        "b4",
        "b4_hopper.cu",
        (),
        lambda dim: 0,
        element="bf16",
        moves=lambda dim: 4 * dim / BLOCK_N,
        rows=lambda dim: BLOCK_N,
        once=11,
        spared=lambda shape: 4 if shape.len_k <= TURNS_UP_TO else 0,  # zeros and rounded sums of dQ, in fp32
        hopper=True,
        library="backward_sm90.cuh",
        forward="13",
    ),
)
RUNGS = (*FORWARD, *BACKWARD)
BY_NUMBER = {rung.number: rung for rung in RUNGS}


def get(number: str) -> Rung:
    """Return the rung of this number, with or without the leading zero."""
    rung = BY_NUMBER.get(number if number in BY_NUMBER else number.zfill(2))
    if rung is None:
        raise ValueError(f"there is no rung {number!r}; there are {', '.join(BY_NUMBER)}")
    return rung


def comparisons() -> str:
    """The rungs that are not compared with the rung before them."""
    return ", ".join(f"{rung.number}: over {rung.against}" for rung in RUNGS if rung.against) + "; for equal work"


def before(rung: Rung) -> Rung | None:
    """The rung that its prediction compares it with."""
    if rung.against is not None:
        return BY_NUMBER[rung.against]
    index = RUNGS.index(rung)
    return RUNGS[index - 1] if index else None
