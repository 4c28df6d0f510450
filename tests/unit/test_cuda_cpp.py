"""Ordinary CUDA C++ of a learner: right results on the emulator (or the GPU), mistakes named by thread and line, and the
same text accepted by NVRTC."""

from __future__ import annotations

import re
import signal
import threading
import time

import pytest
import torch

from strobe.cuda.runtime import jit
from strobe.emulator import compiler
from strobe.learn.cuda_cpp import launch, source as cuda_source
from strobe.learn.run import gpu, run_kernel
from strobe.learn.simulator import KernelError

runs = pytest.mark.skipif(gpu() is not None and compiler() is None, reason="needs a GPU or a C++ compiler")
emulated = pytest.mark.skipif(gpu() is None or compiler() is None, reason="a GPU would not notice")

GRAYSCALE = """
__global__ void grayscale(const float* rgb, float* gray, int pixels) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < pixels)  // the guard
    gray[i] = 0.299f * rgb[3 * i] + 0.587f * rgb[3 * i + 1] + 0.114f * rgb[3 * i + 2];
}
"""
MATMUL = """
#define TILE 8
extern "C" __global__ void matmul(const float* __restrict__ a, const float* b, float* c, int m, int n, int k) {
  __shared__ float a_tile[TILE][TILE], b_tile[TILE][TILE + 1];
  int x = threadIdx.x, y = threadIdx.y;
  int row = blockIdx.y * TILE + y, column = blockIdx.x * TILE + x;
  float sum = 0.0f;
  for (int start = 0; start < k; start += TILE) {
    a_tile[y][x] = row < m && start + x < k ? a[row * k + start + x] : 0.0f;
    b_tile[y][x] = start + y < k && column < n ? b[(start + y) * n + column] : 0.0f;
    __syncthreads();
    for (int i = 0; i < TILE; ++i) sum += a_tile[y][i] * b_tile[i][x];
    __syncthreads();  // the tiles may be overwritten
  }
  if (row < m && column < n) c[row * n + column] = sum;
}
"""
BLOCK_SUM = """
__global__ void block_sum(const float* x, float* sums, int n) {
  extern __shared__ float part[];
  int i = threadIdx.x, t = blockIdx.x * blockDim.x + i;
  part[i] = t < n ? x[t] : 0.0f;
  __syncthreads();
  for (int reach = blockDim.x / 2; reach > 0; reach /= 2) {
    if (i < reach) part[i] += part[i + reach];
    __syncthreads();
  }
  if (i == 0) sums[blockIdx.x] = part[0];
}
"""
ATTENTION = """
__device__ float dot(const float* a, const float* b, int d) {
  float sum = 0.0f;
  for (int i = 0; i < d; ++i) sum += a[i] * b[i];
  return sum;
}
__global__ void attention(const float* q, const float* k, const float* v, float* o, int n, int d, float scale) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= n) return;
  const float* query = q + row * d;  // a pointer of one's own
  float m = -INFINITY, l = 0.0f, out[16];
  for (int i = 0; i < d; ++i) out[i] = 0.0f;
  for (int j = 0; j < n; ++j) {
    float s = scale * dot(query, &k[j * d], d), m_new = fmaxf(m, s), alpha = expf(m - m_new), p = expf(s - m_new);
    l = l * alpha + p;
    for (int i = 0; i < d; ++i) out[i] = out[i] * alpha + p * v[j * d + i];
    m = m_new;
  }
  for (int i = 0; i < d; ++i) o[row * d + i] = out[i] / l;
}
"""
HISTOGRAM = """
__global__ void histogram(const int* x, int* counts, double* mean, int n) {
  __shared__ int seen;
  if (threadIdx.x == 0) seen = 0;
  __syncthreads();
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(&counts[x[i]], 1);
  if (threadIdx.x == 0) { seen += 1; mean[blockIdx.x] = 0.5 * seen; }
}
"""
WARP = """
__global__ void warp(const __half* x, half* doubled, int* votes, float* sums, int* first) {
  __shared__ __half tile[64];
  int i = threadIdx.x, t = blockIdx.x * blockDim.x + i;
  tile[i] = x[t] + x[t];
  __syncthreads();
  float sum = __half2float(tile[i]);
  for (int reach = 16; reach > 0; reach /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, reach);
  unsigned large = __ballot_sync(0xffffffffu, x[t] > __float2half(0.0f));
  doubled[t] = tile[i];
  int lane_0 = __shfl_sync(0xffffffffu, 100 + i, 0), above = __shfl_down_sync(0xffffffffu, i, 1, 8);
  if (i % 32 == 0) {
    votes[t / 32] = __popc(large);
    sums[t / 32] = sum;
    first[t / 32] = lane_0 + 1000 * above;
  }
}
"""
EVERY = {
    "warp": WARP,
    "grayscale": GRAYSCALE,
    "matmul": MATMUL,
    "block_sum": BLOCK_SUM,
    "attention": ATTENTION,
    "histogram": HISTOGRAM,
}


def gray_arguments(pixels: int = 10) -> dict[str, object]:
    return {"rgb": torch.rand(pixels, 3), "gray": torch.full((pixels,), torch.nan), "pixels": pixels}


def matmul_arguments(m: int = 19, n: int = 12, k: int = 21) -> dict[str, object]:
    a, b = torch.randn(m, k), torch.randn(k, n)
    return {"a": a, "b": b, "c": torch.full((m, n), torch.nan), "m": m, "n": n, "k": k, "grid": (2, 3), "block": (8, 8)}


# ---- right -----------------------------------------------------------------------------------------------------------


@runs
@pytest.mark.parametrize("block", [4, 32, 100, 1024])
def test_blocks_of_any_size(block: int) -> None:
    given = gray_arguments(130)
    ran = run_kernel(source=GRAYSCALE, grid=-(-130 // block), block=block, **given)
    torch.testing.assert_close(given["gray"], given["rgb"] @ torch.tensor([0.299, 0.587, 0.114]))
    if ran.counters:
        assert (ran.counters.global_bytes_read, ran.counters.global_bytes_written) == (12 * 130, 4 * 130)


@runs
def test_two_dimensions_and_shared_memory() -> None:
    given = matmul_arguments()
    ran = run_kernel(source=MATMUL, expected={"c": given["a"] @ given["b"]}, **given)
    torch.testing.assert_close(given["c"], given["a"] @ given["b"], atol=1e-4, rtol=1e-4)
    if ran.counters:
        assert ran.counters.block_barriers == 2 * 3 * 6 and ran.counters.shared_bytes_written == 2 * 4 * 64 * 3 * 6


@runs
def test_a_tile_without_padding_has_bank_conflicts_and_one_with_padding_has_none() -> None:
    transpose = """
    __global__ void transpose(const float* a, float* b) {
      __shared__ float tile[32][PITCH];
      tile[threadIdx.y][threadIdx.x] = a[threadIdx.y * 32 + threadIdx.x];
      __syncthreads();
      b[threadIdx.y * 32 + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
    }"""
    a = torch.randn(32, 32)
    conflicts = []
    for pitch in ("32", "33"):
        b = torch.zeros(32, 32)
        ran = run_kernel(source=transpose.replace("PITCH", pitch), grid=1, block=(32, 32), a=a, b=b)
        assert torch.equal(b, a.T)
        conflicts.append(ran.counters.bank_conflicts if ran.counters else None)
    assert conflicts in ([31 * 32, 0], [None, None])


@runs
def test_dynamic_shared_memory() -> None:
    x, sums = torch.randn(21), torch.zeros(3)
    wanted = torch.stack([part.sum() for part in x.split(8)])
    run_kernel(source=BLOCK_SUM, grid=3, block=8, smem=32, x=x, sums=sums, n=21, expected={"sums": wanted})


@runs
def test_functions_local_arrays_and_pointers() -> None:
    q, k, v = torch.randn(3, 10, 4)
    o = torch.zeros(10, 4)
    wanted = (q @ k.T / 2).softmax(1) @ v
    run_kernel(source=ATTENTION, grid=3, block=4, q=q, k=k, v=v, o=o, n=10, d=4, scale=0.5, expected={"o": wanted})


@runs
def test_atomics_and_other_types() -> None:
    x = torch.randint(0, 4, (100,), dtype=torch.int32)
    counts, mean = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.float64)
    run_kernel(source=HISTOGRAM, grid=4, block=32, x=x, counts=counts, mean=mean, n=100)
    assert counts.tolist() == torch.bincount(x, minlength=4).tolist() and mean.tolist() == [0.5] * 4


@runs
def test_halves_shuffles_and_votes() -> None:
    x = torch.randn(64).half()
    doubled, votes, first = torch.zeros(64).half(), torch.zeros(2).int(), torch.zeros(2).int()
    sums = torch.zeros(2)
    expected = {
        "doubled": 2 * x,
        "votes": (x > 0).view(2, 32).sum(1).int(),
        "sums": (2 * x).float().view(2, 32).sum(1),
        "first": torch.tensor([1100, 33132]).int(),  # lane 0 holds 100 + i; lane 1 holds i
    }
    run_kernel(
        source=WARP, grid=1, block=64, x=x, doubled=doubled, votes=votes, sums=sums, first=first, expected=expected
    )


@emulated
def test_halves_are_rounded_as_torch_rounds_them() -> None:
    """There and back for every half, and halfway between neighbours, to even."""
    text = """
    __global__ void round(const __half* x, float* wide, const float* between, half* rounded, int n) {
      for (int i = threadIdx.x; i < n; i += blockDim.x) { wide[i] = x[i]; rounded[i] = __float2half(between[i]); }
    }"""
    bits = torch.arange(-(2**15), 2**15 - 1, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.float16)[(bits & 0x7C00) != 0x7C00]  # finite
    between = torch.cat([(x[1:].float() + x[:-1].float()) / 2, torch.tensor([torch.inf])])
    wide, rounded = torch.zeros(len(x)), torch.zeros(len(x)).half()
    run_kernel(source=text, grid=1, block=32, x=x, wide=wide, between=between, rounded=rounded, n=len(x))
    assert torch.equal(wide, x.float()) and torch.equal(rounded, between.half())


@pytest.mark.skipif(jit.nvrtc_status() is not None, reason="needs NVRTC")
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
@pytest.mark.parametrize("name", EVERY)
def test_nvrtc_takes_the_same_text(name: str, arch: str) -> None:
    kernel = cuda_source.parse(EVERY[name])
    assert name.encode() in jit.compile(launch.for_nvrtc(kernel), arch, name=name).cubin


@pytest.mark.skipif(jit.nvrtc_status() is not None, reason="needs NVRTC")
def test_nvrtcs_errors_are_named_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = cuda_source.parse(GRAYSCALE.replace("rgb[3 * i + 1]", "rbg[3 * i + 1]"))
    with pytest.raises(KernelError, match=r'line 5: identifier "rbg" is undefined\n    gray\[i\] = '):
        launch._loaded(wrong, "sm_80", 0)


# ---- wrong -----------------------------------------------------------------------------------------------------------


def mistake(wanted: str, **given: object) -> str:
    with pytest.raises(KernelError, match=wanted) as caught:
        run_kernel(**given)  # type: ignore[arg-type]
    return str(caught.value)


@emulated
def test_out_of_bounds() -> None:
    text = GRAYSCALE.replace("if (i < pixels)", "")
    said = mistake(
        r"reads rgb\[\d+\], which is out of bounds: rgb has 30", source=text, grid=3, block=4, **gray_arguments()
    )
    assert re.search(r"thread [23] of block 2\n  line 5: gray\[i\] = 0.299f", said)
    text = GRAYSCALE.replace("gray[i] =", "gray[i - 1] =")
    assert "writes gray[-1]" in mistake("out of bounds", source=text, grid=3, block=4, **gray_arguments())


@emulated
def test_out_of_bounds_in_shared_memory() -> None:
    text = MATMUL.replace("a_tile[y][x] =", "a_tile[y][x + 1] =")
    said = mistake("index 8 of the shared array `a_tile`", source=text, **matmul_arguments())
    assert re.search(r"thread \(7, \d\) of block \(0, 0\)\n  line 9: a_tile", said)
    x, sums = torch.randn(8), torch.zeros(1)
    mistake("`part` is out of bounds: it has 4", source=BLOCK_SUM, grid=1, block=8, smem=16, x=x, sums=sums, n=8)


@emulated
def test_divergent_barriers() -> None:
    text = MATMUL.replace("for (int start", "if (row < m) for (int start")
    said = mistake(r"divergent barrier in block \(0, 2\)", source=text, **matmul_arguments())
    assert "24 of 64 threads ((0, 0), (1, 0), (2, 0), …) wait in line 11: __syncthreads();" in said
    assert "40 of 64 threads ((0, 3), (1, 3), (2, 3), …) have ended" in said
    text = BLOCK_SUM.replace("part[i + reach];\n    __syncthreads();", "part[i + reach], __syncthreads();")
    x, sums = torch.randn(8), torch.zeros(1)
    said = mistake("divergent barrier in block 0", source=text, grid=1, block=8, smem=32, x=x, sums=sums, n=8)
    assert "4 of 8 threads (0, 1, 2, …) wait in line 8" in said and "4 of 8 threads (4, 5, 6, …) have ended" in said


@emulated
def test_races_in_shared_memory() -> None:
    text = MATMUL.replace("__syncthreads();  // the tiles may be overwritten", "")
    said = mistake("race: (reads )?shared memory", source=text, **matmul_arguments())
    assert re.search(r"line (9|10): [ab]_tile\[y\]\[x\] = ", said)


@emulated
def test_races_in_global_memory() -> None:
    text = GRAYSCALE.replace("gray[i] =", "gray[i / 2] =")
    said = mistake(r"race on gray\[\d\]: this thread writes it", source=text, grid=3, block=4, **gray_arguments())
    assert re.search(r"thread \d of block \d, line 5, wrote it", said)
    text = """
    __global__ void neighbours(float* x) {
      x[blockIdx.x] = 1.0f;
      if (threadIdx.x == 0 && blockIdx.x > 0) x[blockIdx.x] = x[blockIdx.x - 1];
    }"""
    mistake(r"race on x\[0\]: this thread reads it", source=text, grid=2, block=1, x=torch.zeros(2))


@emulated
def test_ordered_accesses_are_no_race() -> None:
    text = """
    __global__ void shift(float* x, float* y) {
      int i = threadIdx.x;
      x[i] = i;
      __syncthreads();
      y[i] = x[(i + 1) % blockDim.x];
      __syncthreads();
      x[i] = -y[i];
    }"""
    for _ in range(2):  # nothing is left over from launch to launch
        x, y = torch.zeros(8), torch.zeros(8)
        run_kernel(source=text, grid=1, block=8, x=x, y=y)
        assert y.tolist() == [1, 2, 3, 4, 5, 6, 7, 0] and torch.equal(x, -y)


MISTAKES = """
__device__ float deep(int n) { return n == 0 ? 0.0f : 1.0f + deep(n - 1) * deep(n - 1); }
__global__ void mistakes(float* y, int n, int which) {
  __shared__ float tile[8];
  if (which == 0)
    while (n > 0) n = n | 1;
  if (which == 1)
    for (;;) n += 1;
  if (which == 2)
    y[0] = tile[n];
  if (which == 3)
    *(y + n) += 1.0f;
  if (which == 4)
    y[0] = *(y + n);
  if (which == 5)
    y[0] = deep(n);
  if (which == 6 && threadIdx.x < 4)
    y[0] = __shfl_down_sync(0xffffffffu, 1.0f, 1);
  if (which == 7 && threadIdx.x == 1)
    y[0] = __ballot_sync(1u, true);
}
"""


@emulated
@pytest.mark.parametrize(
    ("which", "n", "line", "said"),
    [
        (0, 1, 6, r"does this loop end\? The thread has gone round loops 50000000 times"),
        (1, 0, 8, r"does this loop end\?"),
        (2, 3, 10, "reads shared memory that no thread has written"),
        (3, 9, 12, r"reads y\[9\], which is out of bounds"),
        (4, -1, 14, r"reads y\[-1\], which is out of bounds"),
        (5, 10**9, 2, r"does this recursion end\?"),
        (
            6,
            0,
            18,
            "divergent .*\\n.*4 of 8 threads .* wait in line 18.*\\n.*\\nEvery lane in the mask .* __shfl_down_sync",
        ),
        (7, 0, 20, "__ballot_sync: lane 1 is not in its own mask 0x1"),
    ],
)
def test_mistakes_are_named_by_thread_and_line(which: int, n: int, line: int, said: str) -> None:
    text = mistake(said, source=MISTAKES, grid=1, block=8, y=torch.zeros(4), n=n, which=which)
    assert re.search(rf"line {line}: ", text) and "block 0" in text, text


@emulated
def test_local_arrays_that_are_too_large() -> None:
    """A stack has a guard beside it; such an array would reach over it, into the stack of another thread."""
    text = """
    __global__ void large(float* y, int n) {
      float many[SIZE];
      for (int i = 0; i < n; ++i) many[i] = y[i % 4];
      for (int i = 0; i < n; ++i) y[i % 4] = many[n - 1 - i];
    }"""
    given = {"grid": 1, "block": 1, "y": torch.zeros(4), "n": 4}
    said = mistake(
        r"large has 26[23],\d+ bytes of local variables; on the emulator 32,768",
        source=text.replace("SIZE", "65536"),
        **given,
    )
    assert "line 2: __global__ void large" in said
    mistake("array whose size is known only at run time", source=text.replace("SIZE", "n"), **given)


@emulated
def test_an_interrupt_stops_the_kernel() -> None:
    """Ctrl-C and a notebook's stop button interrupt; a process in the background may have been told to ignore them."""
    text = """
    __global__ void busy(float* y, int n) {
      float x = 0.0f;
      for (int i = 0; i < n; ++i) x = x * 0.5f + 1.0f;
      y[blockIdx.x] = x;
    }"""
    y = torch.zeros(1000)
    run_kernel(source=text, grid=1, block=1, y=y, n=1)  # compiled
    interrupt = threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    start = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_kernel(source=text, grid=1000, block=1, y=y, n=40_000_000)  # would take minutes
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 60 and y[0] != 0 and y[-1] == 0


@emulated
def test_wrong_results_name_their_writers() -> None:
    given = gray_arguments()
    wanted = {"gray": given["rgb"] @ torch.tensor([0.299, 0.587, 0.114])}
    text = GRAYSCALE.replace("0.587f", "0.5f")
    said = mistake("10 of 10 elements of gray are wrong", source=text, grid=3, block=4, expected=wanted, **given)
    assert re.search(r"gray\[0\] is [\d.]+, it should be [\d.]+ \(written by thread 0 of block 0, line 5\)", said)
    assert "… and 7 more" in said
    text = GRAYSCALE.replace("if (i < pixels)", "if (i < pixels - 1)")
    given["gray"] = torch.full((10,), torch.nan)
    said = mistake("1 of 10 elements", source=text, grid=3, block=4, expected=wanted, **given)
    assert "gray[9] is NaN" in said and "nobody wrote it" in said


@emulated
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("rgb[3 * i + 1]", "rbg[3 * i + 1]", r"line 5: .*rbg.* was not declared|line 5: .*undeclared identifier"),
        ("gray[i] =", "rgb[i] =", r"line 5: the kernel writes to memory that is const"),
        ("threadIdx.x;", "threadIdx.x", r"line 4: "),
    ],
)
def test_what_does_not_compile_is_named_by_line(old: str, new: str, said: str) -> None:
    text = mistake(said, source=GRAYSCALE.replace(old, new), grid=3, block=4, **gray_arguments())
    assert "lesson.cuh" not in text and "does not compile" in text


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"source": "int f();"}, ValueError, "no `__global__ void"),
        ({"source": GRAYSCALE + BLOCK_SUM}, ValueError, "it has the kernels grayscale, block_sum; say which"),
        ({"source": GRAYSCALE, "name": "gray"}, ValueError, "name: 'gray'; the source has grayscale"),
        ({"source": "__global__ void f(float4* x) {}"}, ValueError, r"the parameter `float4\* x` is not understood"),
        ({"source": GRAYSCALE, "pixels": 3}, TypeError, "rgb, gray missing: the kernel is grayscale"),
        ({"source": GRAYSCALE, **gray_arguments(), "n": 1}, TypeError, "n: no such parameter"),
        ({"source": GRAYSCALE, **gray_arguments(), "pixels": torch.ones(1)}, TypeError, "pixels must be a number"),
        ({"source": GRAYSCALE, **gray_arguments(), "rgb": torch.ones(3).double()}, TypeError, "torch.float32 fits"),
        ({"source": GRAYSCALE, **gray_arguments(), "rgb": torch.ones(3, 4).T}, ValueError, r"strides \(1, 4\)"),
        ({"source": GRAYSCALE, "block": 2048}, ValueError, "a block has at most 1024"),
        ({"source": GRAYSCALE, "grid": (0, 1)}, ValueError, r"grid: \(0, 1, 1\); sizes are at least 1"),
        ({"source": GRAYSCALE, **gray_arguments(), "expected": {"grey": torch.ones(1)}}, TypeError, "no tensor grey"),
        ({"source": GRAYSCALE, **gray_arguments(), "pixels": 3.5}, TypeError, "pixels: 3.5, but .* takes int pixels"),
        ({"source": GRAYSCALE, **gray_arguments(), "pixels": 2**31}, ValueError, "pixels: 2147483648; int holds"),
        (
            {"source": BLOCK_SUM, "x": torch.ones(4), "sums": torch.ones(1), "n": 4},
            ValueError,
            "smem: 0; block_sum has",
        ),
        ({"source": GRAYSCALE, "block": None}, TypeError, "block is missing"),
        ({}, TypeError, "source or name is missing"),
        ({"name": "grayscale"}, TypeError, "in strobe's dialect"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, object], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        run_kernel(**({"grid": 3, "block": 4} | given))  # type: ignore[arg-type]


def test_comments_and_line_numbers_survive() -> None:
    text = '// __global__ void old(float* x)\n/* two\nlines */\n__global__ void f(float* x) { printf("// %d", 1); }\n'
    kernel = cuda_source.parse(text)
    assert kernel.name == "f" and cuda_source.rewritten(text).count("\n") == text.count("\n")
    assert 'printf("// %d", 1)' in cuda_source.rewritten(text)


@pytest.mark.parametrize(
    ("loop", "counted"),
    [
        ("for (int i = 0; i < n; ++i) f(i);", "for (int i = 0;::lesson::step() && ( i < n); ++i) f(i);"),
        ("for (;;) f();", "for (;::lesson::step();) f();"),
        ("do { f(); } while (a || g(b));", "do { f(); } while (::lesson::step() && (a || g(b)));"),
        ('while (f(")")) g();', 'while (::lesson::step() && (f(")"))) g();'),
        ("while (int x = f()) g(x);", "while (int x = f()) g(x);"),
        ("__device__ int f(int n) { return n; }", "__device__ int f(int n) { ::lesson::enter(); return n; }"),
    ],
)
def test_loops_and_functions_are_counted(loop: str, counted: str) -> None:
    assert cuda_source.rewritten(loop) == counted
