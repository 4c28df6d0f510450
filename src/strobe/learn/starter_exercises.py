"""The exercises of the CUDA starter: indices and guards, barriers, shared memory, banks."""

from __future__ import annotations

import random
from collections.abc import Iterator

from strobe.learn.checking import Case, Exercise
from strobe.learn.simulator import Array, Report

Matrix = list[list[float]]
TILE = 4  # side of the tiles of MATMUL_TILED
SQUARE = 32  # side of the tiles of TRANSPOSE: a warp


def matrix(rows: int, columns: int, seed: int) -> Matrix:
    numbers = random.Random(seed)
    return [[round(numbers.uniform(-1, 1), 2) for _ in range(columns)] for _ in range(rows)]


def pixels_of(count: int, seed: int) -> Matrix:
    """Colours: three numbers from 0 to 1 each."""
    return [[(x + 1) / 2 for x in row] for row in matrix(count, 3, seed)]


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


# ---- grey: one index, one guard --------------------------------------------------------------------------------------


def grayscale_stub(t, rgb, gray, pixels):
    i = t.thread_idx.x  # right in the first block only
    if t.block_idx.x == 0:
        gray[i] = rgb[i, 0]  # 0.299 red + 0.587 green + 0.114 blue


def grayscale_solution(t, rgb, gray, pixels):
    i = t.block_idx.x * t.block_dim.x + t.thread_idx.x
    if i < pixels:
        gray[i] = 0.299 * rgb[i, 0] + 0.587 * rgb[i, 1] + 0.114 * rgb[i, 2]


def _gray(r: float, g: float, b: float) -> float:
    return 0.299 * r + 0.587 * g + 0.114 * b


def _grayscale_cases() -> Iterator[Case]:
    for pixels in (8, 10):
        rgb, gray = pixels_of(pixels, pixels), Array("gray", shape=pixels)
        arguments = (Array("rgb", rgb), gray, pixels)
        yield Case(f"{pixels} pixels in blocks of 4", _blocks(pixels, 4), 4, arguments, gray, [_gray(*p) for p in rgb])


GRAYSCALE = Exercise(
    "grayscale",
    "Turn `pixels` colour pixels grey, one thread per pixel: gray[i] = 0.299 r + 0.587 g + 0.114 b; r, g, b are rgb[i, 0..2].",
    (
        "A thread knows t.block_idx.x, t.block_dim.x and t.thread_idx.x. Blocks lie one behind the other.",
        "10 pixels in blocks of 4 need 3 blocks, so 12 threads. What should the last two do?",
        "i = block_idx * block_dim + thread_idx, and everything else under `if i < pixels`.",
    ),
    grayscale_stub,
    grayscale_solution,
    _grayscale_cases,
)


# ---- grey again, in two dimensions -----------------------------------------------------------------------------------


def grayscale_2d_stub(t, rgb, gray, height, width):
    row, column = t.thread_idx.x, t.thread_idx.y  # which is the row? where does the block begin?
    r, g, b = (rgb[row, column, i] for i in range(3))
    gray[row, column] = 0.299 * r + 0.587 * g + 0.114 * b


def grayscale_2d_solution(t, rgb, gray, height, width):
    row = t.block_idx.y * t.block_dim.y + t.thread_idx.y
    column = t.block_idx.x * t.block_dim.x + t.thread_idx.x
    if row < height and column < width:
        r, g, b = (rgb[row, column, i] for i in range(3))
        gray[row, column] = 0.299 * r + 0.587 * g + 0.114 * b


def _grayscale_2d_cases() -> Iterator[Case]:
    for height, width in ((4, 8), (3, 6)):
        rgb = [pixels_of(width, 10 * height + row) for row in range(height)]
        gray = Array("gray", shape=(height, width))
        expected = [[_gray(*pixel) for pixel in row] for row in rgb]
        grid = (_blocks(width, 4), _blocks(height, 2))
        arguments = (Array("rgb", rgb), gray, height, width)
        yield Case(f"{height} x {width} in blocks of 2 x 4", grid, (4, 2), arguments, gray, expected)


GRAYSCALE_2D = Exercise(
    "grayscale_2d",
    "The same for an image of `height` rows and `width` columns, with blocks that have an x and a y.",
    (
        "x is the column, y the row: neighbouring threads have neighbouring x, and so do neighbouring pixels.",
        "Both the last row and the last column of blocks may stick out. The guard has two halves.",
    ),
    grayscale_2d_stub,
    grayscale_2d_solution,
    _grayscale_2d_cases,
)


# ---- sum of a block: a barrier in a loop -----------------------------------------------------------------------------


def block_sum_stub(t, x, sums, n):
    i = t.thread_idx.x
    part = t.shared("part", t.block_dim.x)
    part[i] = x[t.thread] if t.thread < n else 0.0
    reach = t.block_dim.x // 2
    while reach > 0:
        if i < reach:
            part[i] += part[i + reach]
            yield  # is this the right place, and is it enough?
        reach //= 2
    if i == 0:
        sums[t.block] = part[0]


def block_sum_solution(t, x, sums, n):
    i = t.thread_idx.x
    part = t.shared("part", t.block_dim.x)
    part[i] = x[t.thread] if t.thread < n else 0.0
    yield
    reach = t.block_dim.x // 2
    while reach > 0:
        if i < reach:
            part[i] += part[i + reach]
        yield
        reach //= 2
    if i == 0:
        sums[t.block] = part[0]


def _block_sum_cases() -> Iterator[Case]:
    for n in (16, 21):
        x = [row[0] for row in matrix(n, 1, n)]
        sums = Array("sums", shape=_blocks(n, 8))
        expected = [sum(x[i : i + 8]) for i in range(0, n, 8)]
        yield Case(f"{n} numbers in blocks of 8", _blocks(n, 8), 8, (Array("x", x), sums, n), sums, expected)


BLOCK_SUM = Exercise(
    "block_sum",
    "sums[b] is the sum of block b's numbers. Half of the threads add the other half's numbers, then a quarter, and so on.",
    (
        "A barrier is for all threads of a block, or it is a deadlock. Which threads reach the one in the stub?",
        "Move the yield out of the `if`: those with nothing to add must wait too.",
        "And nobody may add before everyone has stored: one more yield before the loop.",
    ),
    block_sum_stub,
    block_sum_solution,
    _block_sum_cases,
)


# ---- matrix multiplication -------------------------------------------------------------------------------------------


def matmul_stub(t, a, b, c, m, n, k):
    row = t.block_idx.y * t.block_dim.y + t.thread_idx.y
    column = t.block_idx.x * t.block_dim.x + t.thread_idx.x
    if row < m and column < n:
        c[row, column] = 0.0  # the sum over i of a[row, i] * b[i, column]


def matmul_solution(t, a, b, c, m, n, k):
    row = t.block_idx.y * t.block_dim.y + t.thread_idx.y
    column = t.block_idx.x * t.block_dim.x + t.thread_idx.x
    if row < m and column < n:
        total = 0.0
        for i in range(k):
            total += a[row, i] * b[i, column]
        c[row, column] = total


def _product(a: Matrix, b: Matrix) -> Matrix:
    return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in zip(*b, strict=True)] for row in a]


def _matmul_case(m: int, n: int, k: int, tiled: bool) -> Case:
    a, b, c = matrix(m, k, m), matrix(k, n, n), Array("c", shape=(m, n))
    grid = (_blocks(n, TILE), _blocks(m, TILE))

    def fetched_once_per_block(report: Report) -> str | None:
        allowed = {"a": m * k * grid[0], "b": k * n * grid[1]}
        excess = [
            f"{report.loads[x]} loads of {x}, {most} are enough"
            for x, most in allowed.items()
            if report.loads[x] > most
        ]
        return f"right, but {' and '.join(excess)}: let threads share what they fetch" if excess else None

    what = f"({m} x {k}) @ ({k} x {n}) in blocks of {TILE} x {TILE}"
    arguments = (Array("a", a), Array("b", b), c, m, n, k)
    demand = fetched_once_per_block if tiled else (lambda report: None)
    return Case(what, grid, (TILE, TILE), arguments, c, _product(a, b), demand)


MATMUL = Exercise(
    "matmul",
    "c = a b, one thread per number of c: a is (m, k), b is (k, n).",
    ("A loop over k, in a plain Python variable: that is a register.", "Write c once, after the loop."),
    matmul_stub,
    matmul_solution,
    lambda: iter([_matmul_case(4, 4, 4, False), _matmul_case(3, 6, 5, False)]),
)


# ---- the same in tiles -----------------------------------------------------------------------------------------------


def matmul_tiled_stub(t, a, b, c, m, n, k):
    TILE = 4
    x, y = t.thread_idx.x, t.thread_idx.y
    row, column = t.block_idx.y * TILE + y, t.block_idx.x * TILE + x
    a_tile, b_tile = t.shared("a_tile", (TILE, TILE)), t.shared("b_tile", (TILE, TILE))
    total = 0.0
    for start in range(0, k, TILE):
        a_tile[y, x] = a[row, start + x]  # beyond the edge of a?
        b_tile[y, x] = b[start + y, column]
        yield
        for i in range(TILE):
            total += a_tile[y, i] * b_tile[i, x]
        # may the next round overwrite the tiles already?
    c[row, column] = total


def matmul_tiled_solution(t, a, b, c, m, n, k):
    TILE = 4
    x, y = t.thread_idx.x, t.thread_idx.y
    row, column = t.block_idx.y * TILE + y, t.block_idx.x * TILE + x
    a_tile, b_tile = t.shared("a_tile", (TILE, TILE)), t.shared("b_tile", (TILE, TILE))
    total = 0.0
    for start in range(0, k, TILE):
        a_tile[y, x] = a[row, start + x] if row < m and start + x < k else 0.0
        b_tile[y, x] = b[start + y, column] if start + y < k and column < n else 0.0
        yield
        for i in range(TILE):
            total += a_tile[y, i] * b_tile[i, x]
        yield
    if row < m and column < n:
        c[row, column] = total


MATMUL_TILED = Exercise(
    "matmul_tiled",
    f"c = a b again, but a block fetches tiles of {TILE} x {TILE} into shared memory and every thread uses them.",
    (
        "Two barriers a round: one when the tiles are complete, one when everyone is done with them.",
        "A thread outside of c still fetches and waits with the others. It only must not write.",
        "Beyond the edges a tile holds zeros: they add nothing to a sum.",
    ),
    matmul_tiled_stub,
    matmul_tiled_solution,
    lambda: iter([_matmul_case(8, 8, 8, True), _matmul_case(6, 5, 7, True)]),
)


# ---- transposition: banks and sectors --------------------------------------------------------------------------------


def transpose_stub(t, a, b):
    SQUARE = 32
    x, y = t.thread_idx.x, t.thread_idx.y
    tile = t.shared("tile", (SQUARE, SQUARE))  # a column of it lies in a single bank
    tile[y, x] = a[y, t.block_idx.x * SQUARE + x]
    yield
    b[t.block_idx.x * SQUARE + y, x] = tile[x, y]


def transpose_solution(t, a, b):
    SQUARE = 32
    x, y = t.thread_idx.x, t.thread_idx.y
    tile = t.shared("tile", (SQUARE, SQUARE + 1))  # one column more than needed: now a column lies in 32 banks
    tile[y, x] = a[y, t.block_idx.x * SQUARE + x]
    yield
    b[t.block_idx.x * SQUARE + y, x] = tile[x, y]


def _transpose_cases() -> Iterator[Case]:
    for blocks in (1, 2):
        columns = blocks * SQUARE
        a = [[float(row * columns + column) for column in range(columns)] for row in range(SQUARE)]
        b = Array("b", shape=(columns, SQUARE))
        least = 2 * SQUARE * columns * 4 // 32  # every byte once, in sectors of 32

        def fast(report: Report, least: int = least) -> str | None:
            if report.bank_conflicts:
                return f"right, but shared memory has {report.bank_conflicts} bank conflicts; none are needed"
            if report.sectors > least:
                return f"right, but global memory moves {report.sectors} sectors; {least} are enough"
            return None

        expected = [list(column) for column in zip(*a, strict=True)]
        yield Case(f"{SQUARE} x {columns}", blocks, (SQUARE, SQUARE), (Array("a", a), b), b, expected, fast)


TRANSPOSE = Exercise(
    "transpose",
    f"b = aᵀ in tiles of {SQUARE} x {SQUARE}. The stub is right, and slow: make it free of bank conflicts.",
    (
        "Shared memory has 32 banks of 4 bytes; word w lies in bank w % 32. Where are tile[0, y], tile[1, y], tile[2, y]?",
        "What if rows of the tile were not 32 words apart?",
    ),
    transpose_stub,
    transpose_solution,
    _transpose_cases,
)

STARTER = (GRAYSCALE, GRAYSCALE_2D, BLOCK_SUM, MATMUL, MATMUL_TILED, TRANSPOSE)
