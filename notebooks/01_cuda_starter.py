# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # CUDA for people without a GPU
#
# Two programs, each written three times: as plain Python, as a kernel on a *simulated* GPU, and as the same kernel in
# CUDA C++. The first turns a picture grey. The second multiplies matrices. After that you know threads, blocks,
# guards, barriers, shared memory, and why the order in which memory is read decides how fast a program is.
#
# - **Without a GPU** everything below runs. The simulator is Python. The CUDA C++ kernels run on strobe's emulator,
#   which needs a C++ compiler (`g++` is enough, and Colab has it).
# - **With a GPU** the CUDA C++ cells run on it. Any NVIDIA GPU of the last years will do. A T4, which Colab lends for
#   nothing, runs this whole notebook: these kernels use no instruction newer than that. In the second notebook a T4
#   runs everything too, but there the library's own attention kernels, which want Ampere or later, step aside for its
#   PyTorch tiles.

# %% [markdown]
# ## Set-up
#
# If strobe is not installed, this cell installs a wheel that lies beside the notebook. On Colab: make one on your
# machine with `pip wheel --no-deps .` in a checkout, and drop it into the file panel.

# %%
import importlib.util
import pathlib
import subprocess
import sys

if importlib.util.find_spec("strobe") is None:
    wheels = sorted(pathlib.Path(".").glob("strobe-*.whl"))
    if not wheels:
        raise SystemExit("strobe is not installed, and there is no strobe-*.whl beside this notebook")
    subprocess.check_call([sys.executable, "-m", "pip", "install", "--quiet", str(wheels[-1])])

# %%
import random
import time

import torch

from strobe.learn.drawing import bars, show, thread_map
from strobe.learn.exercises import (
    BLOCK_SUM,
    GRAYSCALE,
    GRAYSCALE_2D,
    MATMUL,
    MATMUL_TILED,
    TRANSPOSE,
)
from strobe.learn.run import gpu, run_kernel, source
from strobe.learn.simulator import WARP, Array, KernelError, launch

print("CUDA C++ runs on", "the emulator: " + gpu() if gpu() else torch.cuda.get_device_name())

# %% [markdown]
# ## 1. A grey picture, in plain Python
#
# A pixel has three numbers: red, green, blue. Its grey value is a weighted mean, because eyes see green best. Pixels
# do not depend on each other. That is what makes the problem fit for a GPU.

# %%
numbers = random.Random(0)
PIXELS = 10
rgb = [[round(numbers.random(), 2) for _ in range(3)] for _ in range(PIXELS)]


def grayscale_python(rgb):
    gray = []
    for r, g, b in rgb:
        gray.append(0.299 * r + 0.587 * g + 0.114 * b)
    return gray


expected = grayscale_python(rgb)
print([round(x, 3) for x in expected])
assert abs(0.299 + 0.587 + 0.114 - 1) < 1e-12  # white stays white

# %% [markdown]
# ## 2. The same on a grid of threads
#
# A GPU has no loop over pixels. It starts one **thread** per pixel, all running the same function, the **kernel**. A
# thread asks who it is, and takes its pixel. Threads come in **blocks** of equal size, blocks form the **grid**:
#
#     i = block_idx * block_dim + thread_idx
#
# Ten pixels in blocks of four need three blocks, which is twelve threads. Two have no pixel. In the figure a cell is
# `block.thread`, and the two are dashed (on a terminal: in brackets).

# %%
BLOCK = 4
GRID = -(-PIXELS // BLOCK)  # rounded up
assert (GRID, GRID * BLOCK - PIXELS) == (3, 2)
show(thread_map(1, PIXELS, BLOCK))


# %%
def grayscale(t, rgb, gray, pixels):
    i = t.block_idx.x * t.block_dim.x + t.thread_idx.x
    if i < pixels:  # the guard
        gray[i] = 0.299 * rgb[i, 0] + 0.587 * rgb[i, 1] + 0.114 * rgb[i, 2]


device_rgb, device_gray = Array("rgb", rgb), Array("gray", shape=PIXELS)
report = launch(grayscale, GRID, BLOCK, device_rgb, device_gray, PIXELS)
print(report)
assert device_gray.to_host() == expected
assert (report.loads["rgb"], report.stores["gray"]) == (3 * PIXELS, PIXELS)


# %% [markdown]
# What if the guard is missing? On a GPU the two extra threads would read and write whatever lies behind the arrays.
# That may crash. It may also change some other array, silently, which is worse. The simulator stops and names the
# thread.


# %%
def no_guard(t, rgb, gray, pixels):
    i = t.block_idx.x * t.block_dim.x + t.thread_idx.x
    gray[i] = 0.299 * rgb[i, 0] + 0.587 * rgb[i, 1] + 0.114 * rgb[i, 2]


try:
    launch(no_guard, GRID, BLOCK, Array("rgb", rgb), Array("gray", shape=PIXELS), PIXELS)
    raise AssertionError("the simulator should have complained")
except KernelError as error:
    print(error)
    assert "thread 2 of block 2" in str(error) and "rgb[10, 0] out of bounds" in str(error)

# %% [markdown]
# ## 3. The same in CUDA C++
#
# Line by line it is the kernel above. `ld_global` and `st_global` read and write the GPU's memory. Plain CUDA would
# write `rgb[3 * i]`. strobe has a function for each instruction, and each function exists twice: as the instruction,
# and as plain C++ for machines without a GPU.

# %%
print(source("grayscale"))

# %%
pixels = 100_000
picture = torch.rand(pixels, 3)
gray = torch.full((pixels,), float("nan"))  # so that a pixel that nobody writes is noticed
threads = 256
ran = run_kernel(
    "grayscale",
    grid=-(-pixels // threads),
    threads=threads,
    rgb=picture,
    gray=gray,
    pixels=pixels,
    block=threads,
)
torch.testing.assert_close(gray, picture @ torch.tensor([0.299, 0.587, 0.114]))
print(ran)
if ran.counters:
    assert ran.counters.global_bytes_read == 3 * 4 * pixels and ran.counters.global_bytes_written == 4 * pixels

# %% [markdown]
# ## 4. Launch configurations
#
# Is a block of 4 a good choice? Threads do not run alone. The hardware runs **warps** of 32 threads, one instruction
# for all of them. A block of 4 occupies a whole warp and leaves 28 lanes of it idle. So block sizes are multiples of
# 32. And not too large either: a multiprocessor takes whole blocks only, and a block has at most 1024 threads. 128 or
# 256 is where one starts.
#
# The grid is then as many blocks as cover the work.

# %%
assert WARP == 32 and WARP - BLOCK == 28
WORK = 1000
many = [[0.5, 0.5, 0.5]] * WORK
configurations = {}
for block in (4, 32, 100, 128, 256, 1024):
    grid = -(-WORK // block)
    report = launch(grayscale, grid, block, Array("rgb", many), Array("gray", shape=WORK), WORK)
    lanes = report.warps * WARP
    configurations[f"{grid} x {block}"] = 100 * WORK / lanes
    print(
        f"{grid:4d} blocks of {block:4d}: {report.warps:4d} warps, {lanes - WORK:5d} of {lanes:5d} lanes without a pixel"
    )
show(bars("lanes with work, percent", configurations))
assert configurations["250 x 4"] == 12.5 and configurations["8 x 128"] > 97
assert configurations["10 x 100"] < 80  # 100 threads fill 3 warps and an eighth of a fourth

# %% [markdown]
# The same comparison with the CUDA C++ kernel. A GPU shows its clock. The emulator has none; it shows that the work is
# the same.

# %%
for threads in (32, 128, 256, 1024):
    gray = torch.full((pixels,), float("nan"))
    grid = -(-pixels // threads)
    arguments = {"rgb": picture, "gray": gray, "pixels": pixels, "block": threads}
    ran = run_kernel("grayscale", grid=grid, threads=threads, **arguments)
    assert not gray.isnan().any()
    print(f"{grid:5d} blocks of {threads:4d}: {ran}")

# %% [markdown]
# ## 5. Two dimensions, and who sits next to whom
#
# A picture has rows and columns, so blocks may have an x and a y. Memory has only one dimension: row after row. And
# global memory is not moved byte by byte but in **sectors** of 32 bytes. If the 32 threads of a warp read 32
# neighbouring floats, that is four sectors, and every byte is used. If they read a column, each thread needs a sector
# of its own, and seven eighths of what is moved is thrown away.
#
# So: **x, which runs fastest among threads, must be the column, which runs fastest in memory.**

# %%
show(thread_map(3, 6, (4, 2)))


# %%
def copy_rows(t, a, b):
    b[t.thread_idx.y, t.thread_idx.x] = a[t.thread_idx.y, t.thread_idx.x]


def copy_columns(t, a, b):
    b[t.thread_idx.x, t.thread_idx.y] = a[t.thread_idx.x, t.thread_idx.y]


square = [[0.0] * 32 for _ in range(32)]
rows = launch(copy_rows, 1, (32, 32), Array("a", square), Array("b", shape=(32, 32)))
columns = launch(copy_columns, 1, (32, 32), Array("a", square), Array("b", shape=(32, 32)))
show(
    bars(
        "sectors moved to copy 32 x 32 floats",
        {"x is the column": rows.sectors, "x is the row": columns.sectors},
    )
)
assert rows.sectors == 2 * 32 * 4 and columns.sectors == 8 * rows.sectors

# %% [markdown]
# ## 6. Whose memory is it?
#
# The host (your CPU) and the device (the GPU) have memories of their own. A program does five things:
#
# 1. **allocate** on the device. This is slow, so frameworks keep what they have allocated and hand it out again;
# 2. **copy** the inputs there, over a bus that is many times slower than the GPU's own memory;
# 3. **launch** the kernel. The call returns at once; the GPU works on its own;
# 4. **copy** the result back, which waits for the kernel;
# 5. **free**.
#
# The simulator keeps the two worlds apart as well: indexing an `Array` outside of a kernel is an error.

# %%
try:
    device_gray[0]
    raise AssertionError("device memory was read on the host")
except KernelError as error:
    print(error)

# %% [markdown]
# In PyTorch: `torch.empty(..., device="cuda")` allocates from a cache, `.to("cuda")` and `.cpu()` copy, and a tensor
# that nobody refers to is returned to the cache. Two things are worth knowing.
#
# - **Pinned memory.** The operating system may move ordinary memory about, so the driver first copies it to a buffer
#   that stays in place. `tensor.pin_memory()` allocates such memory to begin with. The copy is faster, and with
#   `non_blocking=True` it runs while the CPU goes on.
# - **Asynchrony.** A kernel's time is not the time of the call. Wait (`torch.cuda.synchronize()`), or let the GPU
#   take the time (`torch.cuda.Event(enable_timing=True)`), as `run_kernel` does.

# %%
if torch.cuda.is_available():
    ordinary = torch.rand(1 << 26)
    pinned = ordinary.pin_memory()
    for kind, tensor in {
        "ordinary": ordinary,
        "pinned": pinned,
        "ordinary again": ordinary,
    }.items():
        torch.cuda.synchronize()
        start = time.perf_counter()
        tensor.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        print(f"{kind:15s} {tensor.numel() * 4 / (time.perf_counter() - start) / 1e9:6.1f} GB/s to the device")
else:
    print("no GPU here: nothing to copy to")

# %% [markdown]
# How much do copies matter? Grey conversion moves 16 bytes a pixel and does 5 operations. There is nothing to be
# gained by copying a picture over a slow bus just for that. Rule: **take data to the GPU once, do everything there.**

# %%
bytes_per_pixel, operations_per_pixel = 3 * 4 + 4, 3 + 2  # three multiplications, two additions
assert (bytes_per_pixel, operations_per_pixel) == (16, 5)
print(f"{operations_per_pixel / bytes_per_pixel:.2f} operations per byte")

# %% [markdown]
# ## 7. Matrix multiplication, in plain Python
#
# `C = A B`: every number of C is a sum over a row of A and a column of B. Two matrices of n² numbers, n³
# multiplications: here there is something to be gained. Every number that is fetched could be used n times, *if one
# kept it*.


# %%
def matmul_python(a, b):
    m, k, n = len(a), len(b), len(b[0])
    c = [[0.0] * n for _ in range(m)]
    for row in range(m):
        for column in range(n):
            for i in range(k):
                c[row][column] += a[row][i] * b[i][column]
    return c


M, N, K = 8, 8, 8
a = [[round(numbers.uniform(-1, 1), 2) for _ in range(K)] for _ in range(M)]
b = [[round(numbers.uniform(-1, 1), 2) for _ in range(N)] for _ in range(K)]
product = torch.tensor(matmul_python(a, b))
torch.testing.assert_close(product, torch.tensor(a) @ torch.tensor(b))

# %% [markdown]
# ## 8. One thread per number of C
#
# The two outer loops become the grid. The inner loop stays. `total` is a local variable: a **register**, the fastest
# memory there is.


# %%
def matmul(t, a, b, c, m, n, k):
    row = t.block_idx.y * t.block_dim.y + t.thread_idx.y
    column = t.block_idx.x * t.block_dim.x + t.thread_idx.x
    if row < m and column < n:
        total = 0.0
        for i in range(k):
            total += a[row, i] * b[i, column]
        c[row, column] = total


TILE = 4
grid = (-(-N // TILE), -(-M // TILE))
c = Array("c", shape=(M, N))
naive = launch(matmul, grid, (TILE, TILE), Array("a", a), Array("b", b), c, M, N, K)
torch.testing.assert_close(torch.tensor(c.to_host()), product)
print(naive)
assert naive.loads["a"] == naive.loads["b"] == M * N * K

# %% [markdown]
# It is right, and it is wasteful. A has 64 numbers, yet 512 are loaded: each one 8 times, once per column of C.

# %%
assert (M * K, naive.loads["a"], naive.loads["a"] // (M * K)) == (64, 512, 8)

# %% [markdown]
# ## 9. Tiles in shared memory
#
# Threads of one block can share a small fast memory. So let a block fetch a tile of A and a tile of B together, each
# thread one number of each, and then everyone uses everything.
#
#             B      ┌───┬───┐
#                    │ ↓ │   │          for each pair of tiles, left to right and top to bottom:
#                    ├───┼───┤            fetch both          each thread one number of each
#                    │ ↓ │   │            barrier             the tiles are complete
#                    └───┴───┘            add up              TILE products per thread
#     A  ┌───┬───┐   ┌───┬───┐            barrier             nobody needs the tiles any more
#        │ → │ → │   │ C │   │
#        ├───┼───┤   ├───┼───┤
#        │   │   │   │   │   │
#        └───┴───┘   └───┴───┘
#
# A **barrier** is a line that no thread of the block crosses before all have arrived. In CUDA it is
# `__syncthreads()`. Here it is `yield`.


# %%
def matmul_tiled(t, a, b, c, m, n, k):
    x, y = t.thread_idx.x, t.thread_idx.y
    row, column = t.block_idx.y * TILE + y, t.block_idx.x * TILE + x
    a_tile, b_tile = t.shared("a_tile", (TILE, TILE)), t.shared("b_tile", (TILE, TILE))
    total = 0.0
    for start in range(0, k, TILE):
        a_tile[y, x] = a[row, start + x] if row < m and start + x < k else 0.0
        b_tile[y, x] = b[start + y, column] if start + y < k and column < n else 0.0
        yield  # the tiles are complete
        for i in range(TILE):
            total += a_tile[y, i] * b_tile[i, x]
        yield  # nobody needs them any more
    if row < m and column < n:
        c[row, column] = total


c = Array("c", shape=(M, N))
tiled = launch(matmul_tiled, grid, (TILE, TILE), Array("a", a), Array("b", b), c, M, N, K)
torch.testing.assert_close(torch.tensor(c.to_host()), product)
print(tiled)
show(
    bars(
        "loads from global memory",
        {"one thread, one number": naive.loads.total(), "tiles of 4 x 4": tiled.loads.total()},
    )
)
assert naive.loads.total() == TILE * tiled.loads.total()  # a tile of side T saves a factor T


# %% [markdown]
# ### What can go wrong
#
# **A race.** Leave out the second barrier. A quick thread starts the next round and overwrites a number that a slow
# one still needs. On a GPU the result is wrong *sometimes*. The simulator remembers who touched what since the last
# barrier.


# %%
def one_barrier(t, a, b, c, m, n, k):
    x, y = t.thread_idx.x, t.thread_idx.y
    row, column = t.block_idx.y * TILE + y, t.block_idx.x * TILE + x
    a_tile, b_tile = t.shared("a_tile", (TILE, TILE)), t.shared("b_tile", (TILE, TILE))
    total = 0.0
    for start in range(0, k, TILE):
        a_tile[y, x], b_tile[y, x] = a[row, start + x], b[start + y, column]
        yield
        for i in range(TILE):
            total += a_tile[y, i] * b_tile[i, x]
    c[row, column] = total


broken = launch(
    one_barrier,
    grid,
    (TILE, TILE),
    Array("a", a),
    Array("b", b),
    Array("c", shape=(M, N)),
    M,
    N,
    K,
    strict=False,
)
print(broken.problems[0])
assert any("race on a_tile" in problem for problem in broken.problems)


# %% [markdown]
# **A divergent barrier.** If only some threads of a block reach a barrier, those wait for ever. It happens when the
# guard is put *around* the loop: threads outside of the matrix must still help to fetch, and must still wait.


# %%
def guarded_barrier(t, x):
    if t.thread_idx.x < 3:
        x[t.thread_idx.x] = 1.0
        yield


try:
    launch(guarded_barrier, 1, 4, Array("x", shape=4))
    raise AssertionError("the simulator should have complained")
except KernelError as error:
    print(error)
    assert "thread 3 already finished" in str(error)


# %% [markdown]
# **Bank conflicts.** Nothing is wrong, but slow. Shared memory has 32 banks of 4 bytes. Word w lies in bank w mod 32.
# A warp that asks for 32 words in 32 banks gets them at once. If all 32 lie in one bank, they come one after the
# other. That is what reading a column of a 32 x 32 tile does. The cure is a column that nobody uses: rows are then 33
# words apart, and a column walks through all banks.


# %%
def read_columns(t, out, pitch):
    tile = t.shared("tile", (32, pitch))
    x, y = t.thread_idx.x, t.thread_idx.y
    tile[y, x] = 1.0
    yield
    out[y, x] = tile[x, y]


conflicts = {}
for pitch in (32, 33):
    print(
        f"rows {pitch} words apart: a column lies in banks",
        [row * pitch % 32 for row in range(6)],
        "…",
    )
    conflicts[f"{pitch} words a row"] = launch(
        read_columns, 1, (32, 32), Array("out", shape=(32, 32)), pitch
    ).bank_conflicts
show(bars("bank conflicts", conflicts))
assert conflicts == {"32 words a row": 32 * 31, "33 words a row": 0}

# %% [markdown]
# ## 10. The same in CUDA C++
#
# First the kernel that reads everything from global memory, then the tiles. The tile has 16 x 16 numbers here, so a
# block has 256 threads.

# %%
print(source("matmul"))
print(source("matmul_tiled"))

# %%
m, n, k = 70, 50, 90
left, right = torch.randn(m, k), torch.randn(k, n)
blocks = -(-m // 16) * -(-n // 16)
found = {}
for name, shared_bytes in {"matmul": 0, "matmul_tiled": 2 * 16 * 16 * 4}.items():
    result = torch.full((m, n), float("nan"))
    found[name] = run_kernel(
        name, grid=blocks, threads=256, smem=shared_bytes, a=left, b=right, c=result, m=m, n=n, k=k
    )
    torch.testing.assert_close(result, left @ right, rtol=1e-4, atol=1e-4)
    print(name, found[name])

if found["matmul"].counters:
    read = {name: ran.counters.global_bytes_read / 1024 for name, ran in found.items()}
    show(bars("KiB read from global memory", read))
    assert found["matmul"].counters.global_bytes_read == 4 * 2 * m * n * k
    assert read["matmul"] > 10 * read["matmul_tiled"]  # not 16, because the tiles at the edges are not full

# %% [markdown]
# Is that a fast matrix multiplication? No. Every product still costs two reads of shared memory. Real kernels hold a
# piece of C per thread in registers, and then leave the arithmetic to the matrix units. That is a ladder of its own,
# and strobe has one for attention (`docs/ladder.md`). But the idea does not change: **fetch once, use often, keep
# what you need close by.** FlashAttention is this idea, applied to a softmax. That is the second notebook.
#
# ## 11. Exercises
#
# Each has a task and a stub that is wrong in an instructive way. Copy the stub, change it, check it. `check` says
# which thread wrote which wrong element.

# %%
print(GRAYSCALE.show())
print(GRAYSCALE.check(GRAYSCALE.stub))


# %%
def my_grayscale(t, rgb, gray, pixels):
    i = t.thread_idx.x  # ← change this
    if i < pixels:
        gray[i] = 0.299 * rgb[i, 0] + 0.587 * rgb[i, 1] + 0.114 * rgb[i, 2]


print(GRAYSCALE.check(my_grayscale))
print("hint:", GRAYSCALE.hint(1))

# %% [markdown]
# The others: `GRAYSCALE_2D`, `BLOCK_SUM`, `MATMUL`, `MATMUL_TILED`, `TRANSPOSE`. Every one has `show()`, `hint(1)`,
# `hint(2)` …, `check(kernel)` and, when you give up, `show_solution()`.

# %%
for exercise in (GRAYSCALE_2D, BLOCK_SUM, MATMUL, MATMUL_TILED, TRANSPOSE):
    first_try, solved = exercise.check(exercise.stub), exercise.check(exercise.solution)
    assert not first_try.passed and solved.passed
    print(first_try, end="\n\n")
