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
# CUDA C++ is the language in which GPUs of NVIDIA are programmed. Here you learn it with two programs. The first turns
# a photograph grey. The second multiplies matrices. Each is written three times: in plain Python, as a kernel on a
# *simulated* GPU, and in CUDA C++, which you write yourself. At the end you know threads, blocks, guards, barriers and
# shared memory. And you know why the order in which memory is read decides how fast a program is.
#
# You need Python, and nothing else. **Without a GPU** the CUDA C++ runs on an emulator, which needs a C++ compiler
# (`g++` is enough, and Colab has it). **With a GPU** it runs on the GPU. A T4, which Colab lends for free, runs all of
# this notebook.
#
# Before you run a cell, try to predict what it will show. Where it says **Predict**, write your answer down first.

# %% [markdown]
# ## Set-up
#
# If strobe is missing, this cell installs it from the checkout in which the notebook lies, or from a wheel beside the
# notebook (`make package` makes one).

# %%
import importlib.util
import pathlib
import subprocess
import sys

if (found := importlib.util.find_spec("strobe")) is None:
    here = pathlib.Path.cwd()
    checkouts = [
        path for path in (here, here.parent) if (path / "src" / "strobe" / "learn").is_dir()
    ]
    wheels = sorted(here.glob("strobe_attention-*.whl"), reverse=True)
    if not (places := checkouts + wheels):
        raise ModuleNotFoundError(
            "strobe is missing, and neither its checkout nor its wheel is here. Do one of these and run the cell again:\n"
            "- in a checkout of the project, run: pip install '.[learn]'\n"
            "- run `make package` there, and put dist/strobe_attention-*.whl beside this notebook"
        )
    subprocess.check_call(
        [sys.executable, "-m", "pip", "install", "--quiet", f"{places[0]}[learn]"]
    )
elif not pathlib.Path(found.origin).with_name("learn").is_dir():
    raise ImportError(
        f"{found.origin} is another project's package of the same name. Run: pip uninstall strobe"
    )

# %%
import time

import torch

from strobe.learn.drawing import bars, show, thread_map
from strobe.learn.exercises import (
    BLOCK_MAX,
    BLOCK_SUM,
    GRAYSCALE,
    GRAYSCALE_2D,
    MATMUL,
    MATMUL_TILED,
    NEGATIVE,
    TRANSPOSE,
)
from strobe.learn.plots import images, photograph
from strobe.learn.run import gpu, run_kernel, source
from strobe.learn.simulator import WARP, Array, KernelError, launch

torch.manual_seed(0)
print("CUDA C++ runs on", f"the emulator ({gpu()})" if gpu() else torch.cuda.get_device_name())

# %% [markdown]
# ## 1. A grey picture, in plain Python
#
# A picture is a grid of pixels. A pixel is three numbers between 0 and 1: how much red, green and blue there is. Eyes see
# green best, so the grey value of a pixel is the weighted mean
#
# $$\text{gray} = 0.299\,r + 0.587\,g + 0.114\,b$$
#
# Here is Grace Hopper, who wrote one of the first compilers.

# %%
colour = photograph()  # (height, width, 3)
HEIGHT, WIDTH, _ = colour.shape
red, green, blue = colour[0, 0].tolist()
print(
    f"{HEIGHT} x {WIDTH} pixels; the first one is red {red:.2f}, green {green:.2f}, blue {blue:.2f}"
)


def grayscale_python(rgb):
    gray = []
    for r, g, b in rgb:
        gray.append(0.299 * r + 0.587 * g + 0.114 * b)
    return gray


start = time.perf_counter()
grey = torch.tensor(grayscale_python(colour.reshape(-1, 3).tolist())).reshape(HEIGHT, WIDTH)
print(f"one pixel after the other: {1000 * (time.perf_counter() - start):.0f} ms")
show(
    images(
        {"before": colour, "after": grey},
        "A portrait of Grace Hopper in uniform, in colour on the left, in shades of grey on the right.",
    )
)

# %% tags=["check"]
assert colour.min() >= 0 and colour.max() <= 1 and colour.shape == (150, 125, 3)
assert abs(0.299 + 0.587 + 0.114 - 1) < 1e-12  # white stays white
torch.testing.assert_close(grey, colour @ torch.tensor([0.299, 0.587, 0.114]))

# %% [markdown]
# No pixel depends on another. They could all be done at the same time, and that is what a GPU is for.

# %% [markdown]
# ## 2. The same on a grid of threads
#
# A GPU has no loop over pixels. It starts one **thread** for each pixel. All threads run the same function, the
# **kernel**. A thread asks who it is, and takes its pixel. Threads come in **blocks** of equal size, and the blocks form
# the **grid**:
#
# $$i = \text{blockIdx} \cdot \text{blockDim} + \text{threadIdx}$$
#
# **Predict.** Ten pixels, blocks of four threads. How many blocks do you need? How many threads have no pixel?

# %%
PIXELS, BLOCK = 10, 4
GRID = -(-PIXELS // BLOCK)  # divided, and rounded up
print(f"{GRID} blocks, {GRID * BLOCK} threads, {GRID * BLOCK - PIXELS} of them without a pixel")
show(thread_map(1, PIXELS, BLOCK))

# %% tags=["check"]
assert (GRID, GRID * BLOCK - PIXELS) == (3, 2)

# %% [markdown]
# A cell is `block.thread`. The two threads without a pixel are dashed (on a terminal: in brackets). They exist, and they
# must do nothing. That is what the `if` below is for. It is called the **guard**.
#
# The simulator runs a kernel written in Python, thread by thread, and counts what it does.


# %%
def grayscale(t, rgb, gray, pixels):
    i = t.block_idx.x * t.block_dim.x + t.thread_idx.x
    if i < pixels:  # the guard
        gray[i] = 0.299 * rgb[i, 0] + 0.587 * rgb[i, 1] + 0.114 * rgb[i, 2]


rgb = colour[60, 60 : 60 + PIXELS].tolist()  # ten pixels of the face
device_rgb, device_gray = Array("rgb", rgb), Array("gray", shape=PIXELS)
print(launch(grayscale, GRID, BLOCK, device_rgb, device_gray, PIXELS))
print([round(x, 3) for x in device_gray.to_host()])

# %% tags=["check"]
assert device_gray.to_host() == grayscale_python(rgb)

# %% [markdown]
# **Predict.** What happens without the guard?


# %%
def no_guard(t, rgb, gray, pixels):
    i = t.block_idx.x * t.block_dim.x + t.thread_idx.x
    gray[i] = 0.299 * rgb[i, 0] + 0.587 * rgb[i, 1] + 0.114 * rgb[i, 2]


try:
    launch(no_guard, GRID, BLOCK, Array("rgb", rgb), Array("gray", shape=PIXELS), PIXELS)
except KernelError as error:
    print(caught := str(error))

# %% tags=["check"]
assert "thread 2 of block 2" in caught and "rgb[10, 0] out of bounds" in caught

# %% [markdown]
# On a GPU the two threads would read and write whatever lies behind the arrays. That may crash the program. It may also
# change some other array without anybody noticing, which is worse.
#
# ### Exercise: the index and the guard
#
# The kernel below is right for the first block only. Change it until the check passes. `GRAYSCALE.hint(1)`, `hint(2)`, …
# help, and `print(GRAYSCALE.show_solution())` shows one way.


# %% tags=["exercise"]
def grayscale(t, rgb, gray, pixels):
    i = t.thread_idx.x  # right in the first block only
    if t.block_idx.x == 0:
        gray[i] = rgb[i, 0]  # 0.299 red + 0.587 green + 0.114 blue


print(GRAYSCALE.check(grayscale))

# %% [markdown]
# ## 3. The same in CUDA C++
#
# Line by line it is the kernel above. `__global__` marks a kernel. Memory is flat, so the three numbers of pixel `i` are
# `rgb[3 * i]`, `rgb[3 * i + 1]` and `rgb[3 * i + 2]`.
#
# | simulator | CUDA C++ |
# |---|---|
# | `t.thread_idx.x`, `t.block_idx.x` | `threadIdx.x`, `blockIdx.x` |
# | `t.block_dim.x`, `t.grid_dim.x` | `blockDim.x`, `gridDim.x` |
# | `launch(kernel, grid, block, a, b)` | `kernel<<<grid, block>>>(a, b)` |
# | `t.shared("tile", (4, 4))` | `__shared__ float tile[4][4];` |
# | `yield` | `__syncthreads();` |
#
# `run_kernel` compiles the text and launches it. Tensors are passed by the names of the kernel's parameters. With
# `expected` it also compares the result.

# %%
GRAY = """
__global__ void grayscale(const float* rgb, float* gray, int pixels) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < pixels)
    gray[i] = 0.299f * rgb[3 * i] + 0.587f * rgb[3 * i + 1] + 0.114f * rgb[3 * i + 2];
}
"""
pixels = HEIGHT * WIDTH
result = torch.zeros(HEIGHT, WIDTH)
ran = run_kernel(
    source=GRAY,
    grid=-(-pixels // 256),
    block=256,
    rgb=colour,
    gray=result,
    pixels=pixels,
    expected={"gray": grey},
)
print(ran)
show(
    images(
        {"by your kernel": result},
        "The portrait of Grace Hopper in shades of grey, computed by the CUDA kernel.",
    )
)

# %% tags=["check"]
torch.testing.assert_close(result, grey)
if ran.counters:
    assert (
        ran.counters.global_bytes_read == 3 * 4 * pixels
        and ran.counters.global_bytes_written == 4 * pixels
    )

# %% [markdown]
# That was a real CUDA kernel. Change it: make the picture darker, or keep only the red. Then break it. Leave out the
# guard, or read `rgb[3 * i + 3]`. On the emulator a mistake is named with its thread and its line:

# %%
try:
    broken = GRAY.replace("if (i < pixels)", "")
    run_kernel(
        source=broken, grid=-(-pixels // 256), block=256, rgb=colour, gray=result, pixels=pixels
    )
except KernelError as error:
    print(caught := str(error))

# %% tags=["check"]
assert gpu() is None or ("out of bounds" in caught and "line 5" in caught)

# %% [markdown]
# A GPU would have said nothing, or crashed. This is why one tests kernels on an emulator, or under NVIDIA's
# `compute-sanitizer`.
#
# ### Exercise: a negative
#
# In a negative, white is black and black is white. The stub is right for the first block. Where does block 1 begin, and
# what should the last threads do?

# %% tags=["exercise"]
negative = """
__global__ void negative(const float* image, float* out, int n) {
  int i = threadIdx.x;
  out[i] = 1.0f - image[i];
}
"""
print(NEGATIVE.check(negative))

# %% [markdown]
# ## 4. Launch configurations
#
# Is a block of 4 threads a good choice? Threads do not run alone. The hardware runs **warps** of 32 threads, one
# instruction for all of them. A block of 4 occupies a whole warp and leaves 28 of its lanes idle. So block sizes are
# multiples of 32. They are not too large either: a multiprocessor takes whole blocks only, and a block has at most 1024
# threads. 128 or 256 is where one starts.
#
# **Predict.** A thousand pixels. Which of the block sizes 4, 32, 100, 128, 256 and 1024 wastes the most lanes? Is 100
# better than 128?

# %%
WORK = 1000
many = [[0.5, 0.5, 0.5]] * WORK


def one_pixel(t, rgb, gray, pixels):
    i = t.block_idx.x * t.block_dim.x + t.thread_idx.x
    if i < pixels:
        gray[i] = 0.299 * rgb[i, 0] + 0.587 * rgb[i, 1] + 0.114 * rgb[i, 2]


with_work = {}
for block in (4, 32, 100, 128, 256, 1024):
    grid = -(-WORK // block)
    report = launch(one_pixel, grid, block, Array("rgb", many), Array("gray", shape=WORK), WORK)
    with_work[f"{grid} x {block}"] = 100 * WORK / (report.warps * WARP)
show(bars("lanes with work, percent", with_work))

# %% tags=["check"]
assert WARP == 32 and with_work["250 x 4"] == 12.5 and with_work["8 x 128"] > 97
assert with_work["10 x 100"] < 80  # 100 threads fill 3 warps and an eighth of a fourth

# %% [markdown]
# With a GPU, the same comparison on the clock. (The emulator has no clock. It says how much memory was moved, which is
# the same for all.)

# %%
for block in (32, 128, 256, 1024):
    grid = -(-pixels // block)
    print(
        f"{grid:4d} blocks of {block:4d}:",
        run_kernel(source=GRAY, grid=grid, block=block, rgb=colour, gray=result, pixels=pixels),
    )

# %% [markdown]
# ## 5. Two dimensions, and who sits next to whom
#
# A picture has rows and columns, so blocks may have an x and a y. Memory has one dimension: row after row. And the GPU
# does not move single bytes. It moves **sectors** of 32 bytes. If the 32 threads of a warp read 32 neighbouring floats,
# that is four sectors, and every byte is used. If they read a column, each thread needs a sector of its own, and seven
# eighths of what is moved is thrown away.
#
# So: **x, which runs fastest among threads, must be the column, which runs fastest in memory.**

# %%
show(thread_map(3, 6, (4, 2)))

# %% [markdown]
# **Predict.** A warp copies 32 × 32 floats, once with x as the column, once with x as the row. How many times as many
# sectors does the second move?


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

# %% tags=["check"]
assert rows.sectors == 2 * 32 * 4 and columns.sectors == 8 * rows.sectors

# %% [markdown]
# In CUDA C++ a block of two dimensions is `dim3 block(16, 16)`, and here `block=(16, 16)`. This kernel mirrors the
# picture:

# %%
MIRROR = """
__global__ void mirror(const float* image, float* out, int height, int width) {
  int x = blockIdx.x * blockDim.x + threadIdx.x;
  int y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x < width && y < height)
    out[y * width + x] = image[y * width + (width - 1 - x)];
}
"""
mirrored = torch.zeros(HEIGHT, WIDTH)
grid = (-(-WIDTH // 16), -(-HEIGHT // 16))
run_kernel(
    source=MIRROR, grid=grid, block=(16, 16), image=grey, out=mirrored, height=HEIGHT, width=WIDTH
)
show(
    images(
        {"grey": grey, "mirrored": mirrored},
        "The grey portrait, and the same portrait with left and right exchanged.",
    )
)

# %% tags=["check"]
assert torch.equal(mirrored, grey.flip(1))

# %% [markdown]
# ### Exercise: two dimensions


# %% tags=["exercise"]
def grayscale_2d(t, rgb, gray, height, width):
    row, column = t.thread_idx.x, t.thread_idx.y  # which is the row? where does the block begin?
    r, g, b = (rgb[row, column, i] for i in range(3))
    gray[row, column] = 0.299 * r + 0.587 * g + 0.114 * b


print(GRAYSCALE_2D.check(grayscale_2d))

# %% [markdown]
# ## 6. Whose memory is it?
#
# The host (your CPU) and the device (the GPU) have memories of their own. A program does five things:
#
# 1. **allocate** memory on the device. This is slow, so frameworks keep what they have allocated and use it again;
# 2. **copy** the inputs there, over a bus that is many times slower than the GPU's own memory;
# 3. **launch** the kernel. The call returns at once, and the GPU works on its own;
# 4. **copy** the result back, which waits for the kernel;
# 5. **free** the memory.
#
# `run_kernel` does all five for you. The simulator keeps the two worlds apart as well:

# %%
try:
    device_gray[0]
except KernelError as error:
    print(caught := str(error))

# %% tags=["check"]
assert "to_host()" in caught

# %% [markdown]
# In PyTorch: `torch.empty(..., device="cuda")` allocates from a cache, `.to("cuda")` and `.cpu()` copy, and a tensor that
# nobody uses any more goes back to the cache. Two things are worth knowing.
#
# - **Pinned memory.** The operating system may move ordinary memory about. So the driver first copies it to a buffer
#   that stays in place. `tensor.pin_memory()` allocates such memory to begin with. The copy is faster, and with
#   `non_blocking=True` it runs while the CPU goes on.
# - **Asynchrony.** The time of the call is not the time of the kernel. Wait for the GPU (`torch.cuda.synchronize()`), or
#   let it take the time itself (`torch.cuda.Event(enable_timing=True)`).

# %%
if torch.cuda.is_available():
    ordinary = torch.rand(1 << 26)
    for kind, tensor in {
        "ordinary": ordinary,
        "pinned": ordinary.pin_memory(),
        "ordinary again": ordinary,
    }.items():
        torch.cuda.synchronize()
        start = time.perf_counter()
        tensor.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        print(
            f"{kind:15s} {tensor.numel() * 4 / (time.perf_counter() - start) / 1e9:6.1f} GB/s to the device"
        )
else:
    print("no GPU here, so there is nothing to copy to")

# %% [markdown]
# How much do copies matter? A pixel has 12 bytes in, 4 bytes out, and needs 5 operations. That is a third of an operation
# per byte. Nothing is gained by copying a picture over a slow bus just for that. The rule: **take data to the GPU once,
# and do everything there.**

# %% [markdown]
# ## 7. Matrix multiplication, in plain Python
#
# $$C = A\,B, \qquad c_{ij} = \sum_k a_{ik}\, b_{kj}$$
#
# Two matrices of $n^2$ numbers, and $n^3$ multiplications. Here something can be gained: every number that is fetched
# could be used $n$ times, *if one kept it*.


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
a, b = torch.rand(M, K), torch.rand(K, N)
product = torch.tensor(matmul_python(a.tolist(), b.tolist()))
print("largest difference from torch:", (product - a @ b).abs().max().item())

# %% tags=["check"]
torch.testing.assert_close(product, a @ b)

# %% [markdown]
# ## 8. One thread per number of C
#
# The two outer loops become the grid. The inner loop stays. `total` is a local variable: a **register**, the fastest
# memory there is.
#
# **Predict.** A has 64 numbers. How many loads of A will the simulator count?


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
naive = launch(
    matmul, grid, (TILE, TILE), Array("a", a.tolist()), Array("b", b.tolist()), c, M, N, K
)
print(naive)

# %% tags=["check"]
torch.testing.assert_close(torch.tensor(c.to_host()), product)
assert (naive.loads["a"], naive.loads["a"] // (M * K)) == (512, 8)

# %% [markdown]
# 512: each number is loaded 8 times, once for every column of C. It is right, and it is wasteful.
#
# ### Exercise: the product


# %% tags=["exercise"]
def matmul(t, a, b, c, m, n, k):
    row = t.block_idx.y * t.block_dim.y + t.thread_idx.y
    column = t.block_idx.x * t.block_dim.x + t.thread_idx.x
    if row < m and column < n:
        c[row, column] = 0.0  # the sum over i of a[row, i] * b[i, column]


print(MATMUL.check(matmul))

# %% [markdown]
# ## 9. Tiles in shared memory
#
# Threads of one block can share a small fast memory. So let a block fetch a tile of A and a tile of B together, each
# thread one number of each. Then everyone uses everything.
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
# A **barrier** is a line that no thread of the block crosses before all of them have arrived. On the simulator it is
# `yield`.


# %%
def tiled(t, a, b, c, m, n, k):
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
in_tiles = launch(
    tiled, grid, (TILE, TILE), Array("a", a.tolist()), Array("b", b.tolist()), c, M, N, K
)
loads = {"one thread, one number": naive.loads.total(), "tiles of 4 x 4": in_tiles.loads.total()}
show(bars("loads from global memory", loads))

# %% tags=["check"]
torch.testing.assert_close(torch.tensor(c.to_host()), product)
assert naive.loads.total() == TILE * in_tiles.loads.total()  # a tile of side T saves a factor T

# %% [markdown]
# A tile of side T saves a factor T.
#
# ### Exercise: tiles
#
# This stub forgets the edges, and a barrier.


# %% tags=["exercise"]
def matmul_tiled(t, a, b, c, m, n, k):
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


print(MATMUL_TILED.check(matmul_tiled))

# %% [markdown]
# ## 10. Tiles in CUDA C++, and what can go wrong
#
# `__shared__` declares shared memory, `__syncthreads()` is the barrier. A tile has 16 × 16 numbers here, so a block has
# 256 threads.

# %%
MATMUL_CUDA = """
#define TILE 16
__global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float a_tile[TILE][TILE], b_tile[TILE][TILE];
  int x = threadIdx.x, y = threadIdx.y;
  int row = blockIdx.y * TILE + y, column = blockIdx.x * TILE + x;
  float sum = 0.0f;
  for (int start = 0; start < k; start += TILE) {
    a_tile[y][x] = row < m && start + x < k ? a[row * k + start + x] : 0.0f;
    b_tile[y][x] = start + y < k && column < n ? b[(start + y) * n + column] : 0.0f;
    __syncthreads();  // the tiles are complete
    for (int i = 0; i < TILE; ++i) sum += a_tile[y][i] * b_tile[i][x];
    __syncthreads();  // nobody needs them any more
  }
  if (row < m && column < n) c[row * n + column] = sum;
}
"""
m, n, k = 70, 50, 90
left, right = torch.randn(m, k), torch.randn(k, n)
arguments = {"a": left, "b": right, "c": torch.zeros(m, n), "m": m, "n": n, "k": k}
tiles = {"grid": (-(-n // 16), -(-m // 16)), "block": (16, 16)}
ran = run_kernel(source=MATMUL_CUDA, **tiles, **arguments, expected={"c": left @ right})
print(ran)

# %% tags=["check"]
torch.testing.assert_close(arguments["c"], left @ right, rtol=1e-4, atol=1e-4)
if ran.counters:
    assert ran.counters.global_bytes_read == 4 * (m * k * 4 + k * n * 5) < 4 * 2 * m * n * k / 10

# %% [markdown]
# **A race.** Leave out the second barrier. A quick thread starts the next round, and overwrites a number that a slow
# thread still needs. On a GPU the result is wrong *sometimes*. The emulator remembers who touched what since the last
# barrier.

# %%
try:
    run_kernel(
        source=MATMUL_CUDA.replace("__syncthreads();  // nobody needs them any more", ""),
        **tiles,
        **arguments,
    )
    print("no mistake was noticed (a GPU does not notice)")
except KernelError as error:
    print(caught := str(error))

# %% tags=["check"]
assert gpu() is None or "race" in caught

# %% [markdown]
# **A divergent barrier.** If only some threads of a block reach a barrier, they wait for ever. It happens when the guard
# is put *around* the loop. Threads outside of the matrix must still help to fetch, and must still wait. (With a GPU this
# cell is skipped, because it would hang.)

# %%
try:
    if gpu() is not None:
        run_kernel(
            source=MATMUL_CUDA.replace("for (int start", "if (row < m) for (int start"),
            **tiles,
            **arguments,
        )
except KernelError as error:
    print(caught := str(error))

# %% tags=["check"]
assert gpu() is None or "divergent barrier" in caught

# %% [markdown]
# ### Exercises: barriers
#
# A sum needs half of the threads, then a quarter, and so on. First on the simulator: is the `yield` in the right place?


# %% tags=["exercise"]
def block_sum(t, x, sums, n):
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


print(BLOCK_SUM.check(block_sum))

# %% [markdown]
# Then the largest number of a block, in CUDA C++. Here the barriers are missing, and one thing more.

# %% tags=["exercise"]
block_max = """
__global__ void block_max(const float* x, float* largest, int n) {
  __shared__ float part[64];
  int i = threadIdx.x, t = blockIdx.x * blockDim.x + i;
  part[i] = t < n ? x[t] : 0.0f;
  for (int reach = 32; reach > 0; reach /= 2) {
    if (i < reach) part[i] = fmaxf(part[i], part[i + reach]);
  }
  if (i == 0) largest[blockIdx.x] = part[0];
}
"""
print(BLOCK_MAX.check(block_max))

# %% [markdown]
# ## 11. Bank conflicts
#
# Now nothing is wrong, but something is slow. Shared memory has 32 **banks** of 4 bytes. Word $w$ lies in bank $w \bmod
# 32$. A warp that asks for 32 words in 32 banks gets them at once. If all 32 lie in one bank, they come one after the
# other. That happens when a warp reads a column of a 32 × 32 tile.
#
# **Predict.** What if a row of the tile had 33 words, of which one is never used?


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
    report = launch(read_columns, 1, (32, 32), Array("out", shape=(32, 32)), pitch)
    conflicts[f"{pitch} words a row"] = report.bank_conflicts
show(bars("bank conflicts", conflicts))

# %% tags=["check"]
assert conflicts == {"32 words a row": 32 * 31, "33 words a row": 0}

# %% [markdown]
# ### Exercise: a transposition without conflicts


# %% tags=["exercise"]
def transpose(t, a, b):
    SQUARE = 32
    x, y = t.thread_idx.x, t.thread_idx.y
    tile = t.shared("tile", (SQUARE, SQUARE))  # a column of it lies in a single bank
    tile[y, x] = a[y, t.block_idx.x * SQUARE + x]
    yield
    b[t.block_idx.x * SQUARE + y, x] = tile[x, y]


print(TRANSPOSE.check(transpose))

# %% [markdown]
# ## 12. strobe's own kernels
#
# The kernels of strobe look a little different. strobe has one function for each instruction of the GPU, and each
# function exists twice: as the instruction, and as plain C++ for machines without a GPU. This is how the emulator can run
# the very kernels that run on a GPU. If you want to read them, this is all you need:
#
# | CUDA C++ | strobe |
# |---|---|
# | `__global__ void f(const float* a, int n)` | `STROBE_KERNEL(256, 1) f(STROBE_GRID_CONSTANT Params p)` |
# | a parameter `a` | a field of `struct Params`, used as `p.a` |
# | `threadIdx.x`, `blockIdx.x` | `thread_idx()`, `block_idx()` |
# | `x = a[i]` (global memory) | `x = ld_global(p.a + i)` |
# | `a[i] = x` (global memory) | `st_global(p.a + i, x)` |
# | `__shared__ float t[16]; x = t[i]` | `x = ld_shared_f32(smem_base() + 4 * i)`: bytes are counted by hand |
# | `t[i] = x` (shared memory) | `st_shared(smem_base() + 4 * i, x)` |
# | `__syncthreads()` | `sync_block()` |
# | `__shfl_xor_sync(0xffffffff, x, 1)` | `shfl_xor(x, 1)` |

# %%
print(source("matmul_tiled"))

# %% [markdown]
# Is that a fast matrix multiplication? No. Every product still costs two reads of shared memory. Real kernels keep a piece
# of C per thread in registers, and leave the arithmetic to the matrix units. strobe has a ladder of such kernels for
# attention (`docs/ladder.md`). But the idea does not change: **fetch once, use often, keep what you need close by.**
#
# FlashAttention is this idea, applied to a softmax. That is the second notebook, `02_flash_attention`.
