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
# # FlashAttention, from the formula to the kernel
#
# Attention compares every token with every token. For N tokens that is a matrix of N² scores, which nobody wants to
# see: it is made, normalised, multiplied, thrown away. FlashAttention computes the same result, exactly, and never
# makes that matrix. This notebook derives how, in small steps, and checks each one. No number below is quoted: each
# is computed or asserted in a cell.
#
# It runs on any machine. On a T4 (Colab) everything runs as well; the library's own CUDA attention kernels want
# Ampere or later, so there strobe computes with its PyTorch tiles. The last section runs the real kernel on an
# emulator, which needs a C++ compiler.

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
import math
import time

import torch

import strobe
from strobe.backends.tiled.forward import block_sizes
from strobe.cuda.plan import variants
from strobe.emulator import compiler
from strobe.learn import worked_example
from strobe.learn.drawing import bars, show
from strobe.learn.exercises import ATTENTION, LOG_SUM_EXP
from strobe.learn.explain_page import MODERATE
from strobe.learn.gpus import GPUS
from strobe.learn.simulator import Array, launch

torch.manual_seed(0)
KIB, MIB, GIB = 2**10, 2**20, 2**30
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# ## 1. The formula
#
# Each token has a query q, a key k and a value v, vectors of d numbers. The token's output is a weighted mean of all
# values. A weight is large where the query and the key agree:
#
#     S = Q Kᵀ / √d          scores         N × N
#     P = softmax(S)         weights        N × N, every row sums to 1
#     O = P V                output         N × d
#
# As code it is three lines.


# %%
def standard_attention(q, k, v):
    s = q @ k.T / math.sqrt(q.shape[1])
    p = torch.softmax(s, dim=1)
    return p @ v


q, k, v = torch.randn(3, 128, 16, dtype=torch.float64)
torch.testing.assert_close(standard_attention(q, k, v), strobe.attention(q, k, v))
assert q.shape == strobe.attention(q, k, v).shape

# %% [markdown]
# ## 2. The memory explosion
#
# Q, K, V and O have N·d numbers each. S has N². In float32, **for one head of one sequence**:

# %%
lengths = {"1K": 1024, "4K": 4096, "10K": 10_240, "16K": 16_384, "32K": 32_768}
scores = {name: 4 * n * n for name, n in lengths.items()}
in_mib = {name: size / MIB for name, size in scores.items()}
show(bars("one matrix of scores, logarithmic", in_mib, "MiB", logarithmic=True))
assert scores["1K"] == 4 * MIB and scores["4K"] == 64 * MIB and scores["10K"] == 400 * MIB
assert scores["16K"] == 1 * GIB and scores["32K"] == 4 * GIB

# %% [markdown]
# Four times the length, sixteen times the memory. A model has dozens of heads and a batch of sequences, and each has
# its own matrix.
#
# FlashAttention keeps, per row, the output and two numbers, m and l (they come below). With d = 64:

# %%
d = 64
for name in ("1K", "4K", "16K"):
    n = lengths[name]
    kept = 4 * n * (d + 2)  # o, m, l
    ratio = scores[name] / kept
    print(f"{name:>3}: S {scores[name] / MIB:6.0f} MiB, O with m and l {kept / MIB:6.3f} MiB, {ratio:5.1f} times less")
ratios = [round(n * n / (n * (d + 2)), 1) for n in (1024, 4096, 16_384)]
assert ratios == [15.5, 62.1, 248.2]
assert [round(4 * n * (d + 2) / MIB, 3) for n in (1024, 4096, 16_384)] == [0.258, 1.031, 4.125]

# %% [markdown]
# Say what is counted. The output exists in either method. What FlashAttention needs *beyond* it and keeps for the
# backward pass is a single number per row, the log-sum-exp. That is N times less than S.

# %%
n = 4096
q, k, v = torch.randn(3, n, d)
_, lse = strobe.attention(q, k, v, return_lse=True, backend="tiled")
assert lse.numel() == n and n * n // lse.numel() == n

# %% [markdown]
# ## 3. Where memory is
#
# Registers belong to one thread, shared memory to one block of threads, device memory to everyone. The first two are on
# the chip, and there is little of them. Here is all that a whole chip has:

# %%
print(f"{'GPU':>11} {'registers':>10} {'shared':>9} {'L2':>6}   device memory")
for g in GPUS:
    registers, shared = g["sms"] * g["registers"] / KIB, g["sms"] * g["shared"] / KIB
    print(
        f"{g['name']:>11} {registers:6.1f} MiB {shared:5.1f} MiB {g['l2']:2d} MiB   {g['memory']}, {g['bandwidth']} GB/s"
    )
h100 = next(g for g in GPUS if g["name"] == "H100")
assert scores["4K"] > h100["sms"] * h100["shared"] * KIB  # the scores of one head do not fit on the whole chip
tile_bytes = 128 * 128 * 4
assert tile_bytes == 64 * KIB < h100["shared"] * KIB  # a tile of 128 x 128 of them fits on one of its multiprocessors

# %% [markdown]
# Device memory (HBM on the large ones) is beside the chip. How many operations can such a GPU do in the time in which
# one byte arrives from there?

# %%
for g in GPUS:
    print(
        f"{g['name']:>11}: {g['tflops']['float16'] * 1000 / g['bandwidth']:4.0f} operations per byte, with 16-bit numbers"
    )
assert all(g["tflops"]["float16"] * 1000 / g["bandwidth"] > 100 for g in GPUS)

# %% [markdown]
# More than a hundred, on each of them. A softmax does a handful of operations per number. It waits for memory nearly
# all of the time. So the question is not how much one computes. It is how often one goes to memory.
#
# ## 4. The four trips of standard attention
#
# Three kernels, and between them the matrix travels:
#
#     kernel 1   S = Q Kᵀ / √d    writes S   ──►  trip 1
#     kernel 2   reads S          trip 2     ◄──
#                P = softmax(S)   writes P   ──►  trip 3
#     kernel 3   reads P          trip 4     ◄──
#                O = P V
#
# That is 4N² numbers. We can count them on the simulator of the first notebook.


# %%
def scores_kernel(t, q, k, s, n, d):  # one thread per row
    row = t.thread
    query = [q[row, i] for i in range(d)]  # a list of Python numbers plays the registers
    for key in range(n):
        s[row, key] = sum(query[i] * k[key, i] for i in range(d)) / math.sqrt(d)


def softmax_kernel(t, s, p, n):
    row = t.thread
    kept = [s[row, key] for key in range(n)]
    m = max(kept)
    total = sum(math.exp(x - m) for x in kept)
    for key in range(n):
        p[row, key] = math.exp(kept[key] - m) / total


def values_kernel(t, p, v, o, n, d):
    row = t.thread
    out = [0.0] * d
    for key in range(n):
        weight = p[row, key]
        for i in range(d):
            out[i] += weight * v[key, i]
    for i in range(d):
        o[row, i] = out[i]


N, D, BLOCK = 32, 4, 8
q, k, v = torch.randn(3, N, D, dtype=torch.float64)
expected = standard_attention(q, k, v)
arrays = {name: Array(name, x.tolist()) for name, x in (("q", q), ("k", k), ("v", v))}
s, p, o = (Array(name, shape=shape) for name, shape in (("s", (N, N)), ("p", (N, N)), ("o", (N, D))))
reports = [
    launch(scores_kernel, N // BLOCK, BLOCK, arrays["q"], arrays["k"], s, N, D),
    launch(softmax_kernel, N // BLOCK, BLOCK, s, p, N),
    launch(values_kernel, N // BLOCK, BLOCK, p, arrays["v"], o, N, D),
]
torch.testing.assert_close(torch.tensor(o.to_host(), dtype=torch.float64), expected)
trips = [
    reports[0].stores["s"],
    reports[1].loads["s"],
    reports[1].stores["p"],
    reports[2].loads["p"],
]
print("numbers moved on the four trips:", trips)
assert trips == [N * N] * 4 and sum(trips) == 4 * N * N

# %% [markdown]
# ## 5. The key trick
#
# Could one kernel do it all? Take a few rows of Q, go through the keys tile by tile, make a small tile of S on the
# chip, use it at once, forget it. The two products allow that: they are sums over keys, and a sum can be taken in
# pieces.
#
# The softmax does not allow it, it seems. Its denominator needs **all** scores of a row before the first weight is
# known. The online softmax takes this obstacle away. We derive it in five steps.
#
# ### Step 1: why there is a maximum at all
#
# The weights are e^s divided by the sum of all e^s. For large s that overflows:

# %%
row = torch.tensor([1.0, 3.0, 2.0, 1000.0])
naive = torch.exp(row) / torch.exp(row).sum()
print("naive:", naive.tolist())
assert naive.isnan().any()

# %% [markdown]
# A common factor cancels: e^(s-m) / Σ e^(s-m) is the same for every m. With m the largest score, no exponent is
# positive and nothing overflows.

# %%
shifted = torch.exp(row - row.max()) / torch.exp(row - row.max()).sum()
print("shifted:", shifted.tolist())
assert shifted[3] == 1 and shifted.isfinite().all()

# %% [markdown]
# ### Step 2: two passes
#
# So one looks at the row twice: once for m, once for the sum l. To look twice, one must have kept the scores. That is
# the matrix again.
#
# ### Step 3: a maximum that is only true so far
#
# Now read the scores one by one, and keep the largest **so far** and the sum **relative to it**. Let the scores be 1,
# 3, 2, 5. After three of them m = 3, and
#
#     l = e^(1-3) + e^(3-3) + e^(2-3)
#
# Then 5 arrives. What we need now is
#
#     l' = e^(1-5) + e^(3-5) + e^(2-5) + e^(5-5)
#
# The old terms are all wrong. Each was taken relative to 3 and should be relative to 5. But they are wrong **by the
# same factor**:
#
#     e^(1-5) = e^(1-3) · e^(3-5)
#     e^(3-5) = e^(3-3) · e^(3-5)
#     e^(2-5) = e^(2-3) · e^(3-5)
#
# So we need not know them any more. It is enough to multiply their sum:
#
#     l' = l · e^(3-5) + e^(5-5)              l' = l · α + e^(s-m'),   α = e^(m-m')
#
# **That is why one rescales.** What has been summed is in units of e^m. When m changes, the unit changes, and the sum
# has to be converted. It is a change of currency, not a correction of an error.

# %%
m, total = -math.inf, 0.0
print(f"{'s':>4} {'m':>4} {'α':>8} {'l':>8}")
for score in (1.0, 3.0, 2.0, 5.0):
    m_new = max(m, score)
    alpha = math.exp(m - m_new)  # the first time e^(-inf) = 0, and there is nothing to convert
    total = total * alpha + math.exp(score - m_new)
    m = m_new
    print(f"{score:4} {m:4} {alpha:8.4f} {total:8.4f}")
assert math.isclose(total, sum(math.exp(x - 5) for x in (1, 3, 2, 5)))

# %% [markdown]
# α is never larger than 1, since the maximum never falls. If the maximum stays, α is 1 and nothing happens, as with
# the score 2 above.
#
# ### Step 4: the output is a sum of the same kind
#
# The output of a row is Σ e^(s-m) v, divided by l at the end. It is in units of e^m too. So it is converted by the
# same α:
#
#     o' = o · α + e^(s-m') v
#
# ### Step 5: tiles instead of single scores
#
# With a tile of scores, m' is the largest of m and of the tile, and the new terms are a sum over the tile. Nothing
# else changes. The algorithm:
#
#     for each tile of keys:
#         s  = q kᵀ / √d
#         m' = max(m, rowmax(s))
#         α  = e^(m - m')
#         p  = e^(s - m')
#         l  = l·α + rowsum(p)
#         o  = o·α + p v
#         m  = m'
#     o = o / l


# %%
def flash_attention(q, k, v, block_q, block_k, rescale=True):
    n, d = q.shape
    out = torch.empty_like(q)
    for q0 in range(0, n, block_q):
        rows = q[q0 : q0 + block_q]
        m = rows.new_full((len(rows), 1), -math.inf)
        total = torch.zeros_like(m)
        o = torch.zeros_like(rows)
        for k0 in range(0, n, block_k):
            s = rows @ k[k0 : k0 + block_k].T / math.sqrt(d)
            m_new = torch.maximum(m, s.amax(1, keepdim=True))
            alpha = torch.exp(m - m_new) if rescale else torch.ones_like(m)
            p = torch.exp(s - m_new)
            total = total * alpha + p.sum(1, keepdim=True)
            o = o * alpha + p @ v[k0 : k0 + block_k]
            m = m_new
        out[q0 : q0 + block_q] = o / total
    return out


for block_q, block_k in ((1, 1), (8, 4), (5, 7), (32, 32)):
    torch.testing.assert_close(flash_attention(q, k, v, block_q, block_k), expected)
print(
    "largest error with tiles of 5 x 7:",
    (flash_attention(q, k, v, 5, 7) - expected).abs().max().item(),
)

# %% [markdown]
# And if one forgets to rescale? The result still looks plausible, which makes it a nasty mistake:

# %%
forgotten = flash_attention(q, k, v, 8, 8, rescale=False)
error = (forgotten - expected).abs().max().item()
print(f"largest error without the rescale: {error:.3f}, everything finite: {bool(forgotten.isfinite().all())}")
assert error > 0.01 and forgotten.isfinite().all()
torch.testing.assert_close(
    flash_attention(q, k, v, 8, N, rescale=False), expected
)  # with one tile there is nothing to convert

# %% [markdown]
# ## 6. The worked example
#
# Four queries, four keys, d = 2, tiles of two. The library has it as `strobe.learn.worked_example`, and on a terminal
# as `strobe demo --example`.


# %%
def walk(q, k, v, block=2):
    for step in worked_example.tile_steps(q, k, v, block, block):
        print(f"queries {step.rows.start}-{step.rows.stop - 1}, keys {step.keys.start}-{step.keys.stop - 1}")
        for i, row in enumerate(step.rows):
            numbers = " ".join(f"{x:10.6f}" for x in step.s[i])
            out = " ".join(f"{x:.6f}" for x in step.normalised[i])
            print(f"  row {row}: s {numbers}  m {step.m[i]:10.6f}  α {step.alpha[i]:.6e}  l {step.l[i]:.7f}  o/l {out}")


q4, k4, v4 = worked_example.inputs()
walk(q4, k4, v4)

# %% [markdown]
# This example circulates with wrong numbers: the first tile's scores are often printed as 1.77, 3.89, 4.95, 10.61.
# They are not. Here is every number against its golden value, worked out independently.

# %%
checks = worked_example.checks()
assert checks and all(check.passed for check in checks)
print(f"{len(checks)} numbers agree, for example:")
for check in checks[:4]:
    print(f"  {check.what}: {check.computed:.6f}")
first, second = list(worked_example.tile_steps(q4, k4, v4))[:2]
golden = torch.tensor([[2.474874, 6.717514], [5.303301, 15.202796]], dtype=torch.float64)
torch.testing.assert_close(first.s, golden, atol=1e-6, rtol=0)
assert (first.s - torch.tensor([[1.77, 3.89], [4.95, 10.61]])).abs().min() > 0.3  # none of the others is right
torch.testing.assert_close(second.alpha[0].item(), 2.064853e-4, atol=1e-10, rtol=0)
out = torch.tensor([[0.697084216, 0.797084216], [0.699989959, 0.799989959], [0.699999965, 0.799999965], [0.7, 0.8]])
torch.testing.assert_close(strobe.attention(q4, k4, v4), out.double(), atol=1e-6, rtol=0)

# %% [markdown]
# It is also a poor example. The scores are so far apart that the softmax is almost one-hot: each row's last key takes
# nearly all of the weight, and α is almost 0. The rescale then looks like "forget what came before". That is not what
# it is.

# %%
weights = torch.softmax(q4 @ k4.T / math.sqrt(2), dim=1)
print("weight of the last key, per row:", [round(x, 6) for x in weights[:, 3].tolist()])
assert weights[:, 3].min() > 0.98 and second.alpha.max() < 1e-3

# %% [markdown]
# ## 7. A better one
#
# Scores of about 1. Now the weights are all of one size, some rows are rescaled by about a half, others not at all,
# and a forgotten rescale shows.

# %%
q2, k2, v2 = (torch.tensor(MODERATE[name], dtype=torch.float64) for name in "qkv")
walk(q2, k2, v2)
steps = list(worked_example.tile_steps(q2, k2, v2))
assert 0.4 < steps[1].alpha[0] < 0.6 and steps[1].alpha[1] == 1
exact = standard_attention(q2, k2, v2)
torch.testing.assert_close(flash_attention(q2, k2, v2, 2, 2), exact)
torch.testing.assert_close(strobe.attention(q2, k2, v2), exact)
wrong = flash_attention(q2, k2, v2, 2, 2, rescale=False)
print("row 0, exact:              ", [round(x, 4) for x in exact[0].tolist()])
print("row 0, without the rescale:", [round(x, 4) for x in wrong[0].tolist()])
assert (wrong[0] - exact[0]).abs().max() > 0.05

# %% [markdown]
# ## 8. Tiles on a GPU
#
# One block of threads takes Br rows of Q. All its threads fetch a tile of Bc keys and values into shared memory; each
# thread then works on its own row. m, l, o stay in registers all the time.
#
#                  keys, Bc at a time  ──►
#                ┌────┬────┬────┬────┐
#     block 0  Br│ ▓▓ │    │    │    │   ▓▓ the tile that exists right now, on the chip
#                ├────┼────┼────┼────┤
#     block 1    │    │ ▓▓ │    │    │   every block walks along its own row of tiles
#                └────┴────┴────┴────┘


# %%
def flash_kernel(t, q, k, v, o, n, d, block_k):
    row, block_q = t.thread, t.block_dim.x
    k_tile, v_tile = t.shared("k_tile", (block_k, d)), t.shared("v_tile", (block_k, d))
    query = [q[row, i] for i in range(d)]
    m, total, out = -math.inf, 0.0, [0.0] * d
    for start in range(0, n, block_k):
        for element in range(t.thread_idx.x, block_k * d, block_q):  # the block fetches together
            k_tile[element] = k[start * d + element]
            v_tile[element] = v[start * d + element]
        yield
        s = [sum(query[i] * k_tile[key, i] for i in range(d)) / math.sqrt(d) for key in range(block_k)]
        m_new = max(m, *s)
        alpha = math.exp(m - m_new)
        p = [math.exp(x - m_new) for x in s]
        total = total * alpha + sum(p)
        for i in range(d):
            out[i] = out[i] * alpha + sum(p[key] * v_tile[key, i] for key in range(block_k))
        m = m_new
        yield
    for i in range(d):
        o[row, i] = out[i] / total


moved = {}
for block_q in (1, 2, 4, 8, 16):
    inputs = [Array(name, x.tolist()) for name, x in (("q", q), ("k", k), ("v", v))]
    o = Array("o", shape=(N, D))
    report = launch(flash_kernel, N // block_q, block_q, *inputs, o, N, D, 4)
    torch.testing.assert_close(torch.tensor(o.to_host(), dtype=torch.float64), expected)
    moved[block_q] = report.loads["k"] + report.loads["v"]
    assert moved[block_q] == 2 * N * N * D // block_q  # the model, exactly
    assert report.loads["q"] == report.stores["o"] == N * D

# %% [markdown]
# ## 9. How large must a tile be?
#
# Keys and values are fetched again for each block of rows: N/Br times. So flash moves 2N²d/Br numbers, next to the
# 4N² of standard attention. It moves less only if
#
#     2N²d/Br < 4N²      that is      Br > d/2
#
# The simulator counted it, with d = 4:

# %%
by_flash = {f"flash, Br = {block_q}": count for block_q, count in moved.items()}
show(bars("numbers moved (d = 4)", {"standard": 4 * N * N} | by_flash))
assert moved[D // 2] == 4 * N * N and moved[1] > 4 * N * N > moved[4]

# %% [markdown]
# In real life d is 64 or 128. The tile of 16 rows that many first kernels have (and that is sometimes called optimal)
# then moves **twice as much** as standard attention, or four times as much:

# %%
for d in (64, 128):
    shares = {block_q: 2 * d / block_q / 4 for block_q in (16, 32, 64, 128, 256)}
    print(
        f"d = {d}, standard = 1:",
        ", ".join(f"Br = {block_q}: {share:.3g}" for block_q, share in shares.items()),
    )
    assert shares[16] == {64: 2, 128: 4}[d] and shares[d // 2] == 1

# %% [markdown]
# Why not a tile of a thousand rows, then? Because o and the tiles must fit in registers and shared memory. The
# library's kernels have these:

# %%
for arch in ("sm_80", "sm_90a"):
    rows = sorted({variant.tile.block_m for variant in variants(arch)})
    print(f"{arch}: Br = {', '.join(map(str, rows))}")
    assert min(rows) >= 64 and max(rows) <= 256

# %% [markdown]
# The same experiment with strobe's `tiled` backend, which is the loop of section 5 with everything that a library
# needs around it. Here the "chip" is a CPU's cache, and small tiles cost a call of PyTorch each:


# %%
def seconds(call, repeats=3):
    best = math.inf
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


n, d = 512, 64
big_q, big_k, big_v = torch.randn(3, n, d, device=device)
reference = standard_attention(big_q, big_k, big_v)
times, extra = {}, {}
for block_q, block_k in ((16, 16), (16, 128), (64, 64), (128, 128), (512, 512)):
    with block_sizes(block_q, block_k):
        result = strobe.attention(big_q, big_k, big_v, backend="tiled")
        torch.testing.assert_close(result, reference, atol=1e-5, rtol=1e-4)
        times[f"{block_q} x {block_k}"] = 1000 * seconds(lambda: strobe.attention(big_q, big_k, big_v, backend="tiled"))
        extra[f"{block_q} x {block_k}"] = strobe.explain(big_q, big_k, big_v, backend="tiled").extra_bytes / KIB
show(bars(f"milliseconds on this {device}, {n} tokens, tiles of queries x keys", times, "ms"))
show(bars("extra memory of these tiles, KiB, logarithmic", extra, "KiB", logarithmic=True))
assert extra["16 x 16"] < extra["64 x 64"] < extra["512 x 512"]

# %% [markdown]
# And the memory, as the sequence grows. The tiles stay as they are, so the workspace stops growing. Standard
# attention's matrices do not.

# %%
workspace, matrices = {}, {}
for n in (1024, 2048, 4096, 8192, 16_384):
    x = torch.empty(n, 64)
    workspace[n] = strobe.explain(x, x, x, backend="tiled").extra_bytes
    matrices[n] = 2 * 4 * n * n  # S and P
    print(f"{n:6d} tokens: tiles {workspace[n] / MIB:6.2f} MiB, S and P {matrices[n] / MIB:7.0f} MiB")
assert workspace[16_384] == workspace[8192] and matrices[16_384] == 4 * matrices[8192]

# %% [markdown]
# ## 10. Backward: compute it again
#
# For the gradients one needs P. Standard attention has kept it. FlashAttention has not, and does not need to: P
# follows from the scores and from one number per row, the log-sum-exp L = m + log l.
#
#     p = e^(s - m) / l = e^(s - L)
#
# So the backward pass makes each tile of S once more, gets the final P of that tile at once (no online softmax this
# time), and goes on:
#
#     dV += Pᵀ dO
#     dP  = dO Vᵀ
#     dS  = P ∘ (dP - δ)          δ = rowsum(dO ∘ O), one number per row
#     dQ += dS K / √d
#     dK += dSᵀ Q / √d
#
# Where does δ come from? The softmax's derivative is dS = P ∘ (dP - rowsum(P ∘ dP)). That sum runs over all keys,
# which a tile does not see. But rowsum(P ∘ dP) = rowsum(dO ∘ O), and that is known before one starts.


# %%
def flash_backward(q, k, v, o, lse, do, block_q, block_k):
    n, d = q.shape
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    delta = (do * o).sum(1, keepdim=True)
    for q0 in range(0, n, block_q):
        r = slice(q0, q0 + block_q)
        for k0 in range(0, n, block_k):
            c = slice(k0, k0 + block_k)
            p = torch.exp(q[r] @ k[c].T / math.sqrt(d) - lse[r, None])
            dv[c] += p.T @ do[r]
            ds = p * (do[r] @ v[c].T - delta[r])
            dq[r] += ds @ k[c] / math.sqrt(d)
            dk[c] += ds.T @ q[r] / math.sqrt(d)
    return dq, dk, dv


leaves = [x.clone().requires_grad_() for x in (q, k, v)]
do = torch.randn(N, D, dtype=torch.float64)
by_autograd = torch.autograd.grad(standard_attention(*leaves), leaves, do)
o, lse = strobe.attention(q, k, v, return_lse=True)
for ours, right in zip(flash_backward(q, k, v, o, lse, do, 8, 5), by_autograd, strict=True):
    torch.testing.assert_close(ours, right)
by_strobe = torch.autograd.grad(strobe.attention(*leaves, backend="tiled"), leaves, do)
for ours, right in zip(by_strobe, by_autograd, strict=True):
    torch.testing.assert_close(ours, right)
print("dQ, dK and dV agree with autograd, ours and the library's")

# %% [markdown]
# It computes more: five products of matrices instead of the four that are left if P is kept. It is faster nevertheless
# on a GPU, because computing is cheap and moving N² numbers is not.

# %%
products = ["Q Kᵀ", "Pᵀ dO", "dO Vᵀ", "dS K", "dSᵀ Q"]
only_if_p_is_gone = products[:1]
assert (len(products), len(products) - len(only_if_p_is_gone)) == (5, 4)

# %% [markdown]
# ## 11. Three generations of one idea
#
# **FA-1** (2022) had the loops the other way round: keys outside, queries inside. Then o, m, l of all rows wait in
# memory and are fetched and stored for every tile of keys. It also kept o normalised, which costs a division at each
# step:
#
#     o' = o · (l/l')·α + (p v)/l'
#
# **FA-2** (2023) swaps the loops. A row's o stays in registers from the first key to the last, and is divided once.
# Blocks of rows are independent, so there is more to do in parallel.


# %%
def fa1(q, k, v, block_q, block_k):
    n, d = q.shape
    o, m, total = torch.zeros_like(q), q.new_full((n, 1), -math.inf), q.new_zeros(n, 1)  # in memory
    moved = 0
    for k0 in range(0, n, block_k):
        k_tile, v_tile = k[k0 : k0 + block_k], v[k0 : k0 + block_k]
        moved += k_tile.numel() + v_tile.numel()
        for q0 in range(0, n, block_q):
            r = slice(q0, q0 + block_q)
            s = q[r] @ k_tile.T / math.sqrt(d)
            m_new = torch.maximum(m[r], s.amax(1, keepdim=True))
            alpha, p = torch.exp(m[r] - m_new), torch.exp(s - m_new)
            total_new = total[r] * alpha + p.sum(1, keepdim=True)
            o[r] = o[r] * (total[r] / total_new) * alpha + p @ v_tile / total_new
            m[r], total[r] = m_new, total_new
            moved += q[r].numel() + 2 * (o[r].numel() + m[r].numel() + total[r].numel())  # q in; o, m, l in and out
    return o, moved


def fa2_moved(n, d, block_q):
    return 2 * n * d + 2 * n * d * n // block_q + n  # q in and o out once, k and v per block of rows, the log-sum-exp


o1, moved1 = fa1(q, k, v, 8, 8)
torch.testing.assert_close(o1, expected)
print(f"numbers moved with tiles of 8 x 8: FA-1 {moved1}, FA-2 {fa2_moved(N, D, 8)}")
assert moved1 == 2 * N * D + (N // 8) * (3 * N * D + 4 * N) and moved1 > 1.5 * fa2_moved(N, D, 8)

# %% [markdown]
# **FA-3** (2024) is the same loop for Hopper GPUs. Nothing in the mathematics changes. What changes is who waits for
# whom: a copy engine (TMA) fetches tiles while the matrix units (wgmma) multiply; some warps only fetch, others only
# compute; and two groups of warps take turns, so that one's softmax runs while the other's products do.
# `docs/ladder.md` builds all of it up step by step.
#
# ## 12. The same result?
#
# Yes, within rounding: nothing is approximated. Scores of a thousand do no harm, and a row that sees no key gives 0,
# not NaN.

# %%
huge_q, huge_k, huge_v = torch.randn(3, 256, 64) * torch.tensor([30.0, 30.0, 1.0])[:, None, None]
largest = (huge_q @ huge_k.T / 8).abs().max().item()
ours = strobe.attention(huge_q, huge_k, huge_v, backend="tiled")
right = standard_attention(huge_q.double(), huge_k.double(), huge_v.double())
print(f"largest score {largest:.0f}, largest error {(ours - right).abs().max().item():.1e}")
assert largest > 1000 and (ours - right).abs().max() < 1e-2 and ours.isfinite().all()
nothing, minus_infinity = strobe.attention(q, k, v, mask=torch.zeros(N, N, dtype=torch.bool), return_lse=True)
assert (nothing == 0).all() and (minus_infinity == -math.inf).all()

# %% [markdown]
# ## 13. Four questions
#
# **Why is the PyTorch version slower?** Because every line of the loop is a kernel of its own: the tile is written to
# memory and read again between them, and each launch costs time. The loop in section 5 has the algorithm, and none of
# the closeness. Measured here:

# %%
n = 1024
x = torch.randn(3, 1, n, 4, 64, device=device)
speed = {
    "the loop, 64 x 64": seconds(lambda: [flash_attention(*x[:, 0, :, head], 64, 64) for head in range(4)]),
    "strobe, tiled": seconds(lambda: strobe.attention(*x, backend="tiled")),
    "standard": seconds(lambda: [standard_attention(*x[:, 0, :, head]) for head in range(4)]),
    f"strobe, {strobe.explain(*x).backend}": seconds(lambda: strobe.attention(*x)),
}
show(
    bars(
        f"milliseconds, 4 heads of {n} tokens on this {device}",
        {name: 1000 * t for name, t in speed.items()},
        "ms",
    )
)

# %% [markdown]
# **What is its point, then?** It shows the algorithm in a page. It saves the memory on every device that PyTorch
# knows. It has every mask, bias and gradient. And it is the yardstick for kernels.
#
# **What differs from the real one?** Not the algorithm. In a kernel the tile lives in registers, the products run on
# matrix units with 16-bit inputs and 32-bit sums, copies overlap with arithmetic, and e^x is 2^(x·log₂e), since the
# hardware has only 2^x. A kernel *without* matrix units, plain fp32 and one thread per row as in section 8, is slower
# than standard attention with a good matrix library. Tiles save memory traffic. Speed needs both.

# %%
values = torch.linspace(-5, 0, 11, dtype=torch.float64)
torch.testing.assert_close(torch.exp2(values * math.log2(math.e)), torch.exp(values))

# %% [markdown]
# **Why rescale?** Because everything summed so far is in units of e^m, and m has just changed. (Section 5, step 3.)
#
# ## 14. The real kernel
#
# The same call on the library's CUDA kernel. Without a GPU it runs on the emulator: same source, instruction by
# instruction, on the CPU.

# %%
half_q, half_k, half_v = (torch.randn(1, 96, 1, 64).to(torch.bfloat16) for _ in range(3))
right = standard_attention(*(x[0, :, 0].double() for x in (half_q, half_k, half_v)))
if compiler() is not None:
    ours = strobe.attention(half_q, half_k, half_v, backend="emulator")[0, :, 0]
    print("emulated kernel, largest error:", (ours - right).abs().max().item())
    assert (ours - right).abs().max() < 2e-2
else:
    print("no C++ compiler here: the emulator cannot run")
print()
print(strobe.explain(half_q.to(device), half_k.to(device), half_v.to(device)))

# %% [markdown]
# ## 15. Exercises
#
# First the online softmax by itself, then attention with it. The stubs are right for small scores.

# %%
for exercise in (LOG_SUM_EXP, ATTENTION):
    print(exercise.show())
    verdict = exercise.check(exercise.stub)
    print(verdict, "\n")
    assert not verdict.passed and exercise.check(exercise.solution).passed
