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
# Attention compares every token with every token. For N tokens that is a matrix of N² scores, which nobody wants to see.
# It is made, turned into weights, multiplied, and thrown away. FlashAttention computes the same result, exactly, and
# never makes that matrix. This notebook derives how it does that, in small steps, and checks each of them.
#
# You should know what a matrix product and a softmax are. Where CUDA comes in, the first notebook, `01_cuda_starter`,
# helps. Everything runs on any machine. The parts in CUDA C++ run on a GPU if there is one, and otherwise on an emulator,
# which needs a C++ compiler. On a T4 (Colab) strobe computes with its PyTorch tiles, because its own attention kernels
# need Ampere or later.
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
import math
import time

import torch

import strobe
from strobe.emulator import compiler
from strobe.learn import story, worked_example
from strobe.learn.drawing import bars, hierarchy, show
from strobe.learn.exercises import ATTENTION, FLASH_CUDA, LOG_SUM_EXP
from strobe.learn.explain_page import MODERATE
from strobe.learn.gpus import GPUS
from strobe.learn.plots import curves, heat_maps
from strobe.learn.simulator import Array, launch
from strobe.measure.memory import with_peak_memory
from strobe.tiled import block_sizes

torch.manual_seed(0)
# One thread: timings of one core can be compared; those of several depend on what else runs.
torch.set_num_threads(1)
KIB, MIB, GIB = 2**10, 2**20, 2**30
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# %% [markdown]
# ## 1. Attention in words
#
# Take six words: *she sat on the river bank*. A transformer gives each of them three vectors.
#
# - The **query** $q$ says what the word is looking for. The query of "sat" might ask: who, and where?
# - The **key** $k$ says what the word has to offer.
# - The **value** $v$ is what the word passes on to those who are interested.
#
# The **score** of a query and a key is their dot product, divided by $\sqrt d$, where $d$ is the length of the vectors.
# The softmax turns the scores of a row into **weights**, which add up to 1. The output of a word is the sum of all values,
# each times its weight:
#
# $$S = \frac{Q K^\top}{\sqrt d} \qquad P = \mathrm{softmax}(S) \text{ row by row} \qquad O = P\,V$$

# %%
q, k, v = story.inputs()  # six words, four numbers each
s = q @ k.T / math.sqrt(q.shape[1])
p = torch.softmax(s, dim=1)
show(
    heat_maps(
        {"S: scores": s, "P: weights": p},
        story.WORDS,
        "Two matrices of 6 by 6 numbers, rows and columns labelled she, sat, on, the, river, bank. The scores range from "
        "-0.5 to 2.5. In the matrix of weights the row of sat has its largest entry, 0.45, in the column of bank.",
    )
)

# %% [markdown]
# "sat" gives "bank" 45 % of its attention. As a function, attention has three lines:


# %%
def standard_attention(q, k, v):
    s = q @ k.T / math.sqrt(q.shape[1])
    p = torch.softmax(s, dim=1)
    return p @ v


print(
    "largest difference from the library:",
    (standard_attention(q, k, v) - strobe.attention(q, k, v)).abs().max().item(),
)

# %% tags=["check"]
torch.testing.assert_close(standard_attention(q, k, v), strobe.attention(q, k, v))
torch.testing.assert_close(p[1, 5].item(), 0.4485, atol=1e-4, rtol=0)

# %% [markdown]
# ## 2. The memory explosion
#
# Q, K, V and O have $N d$ numbers each. S has $N^2$.
#
# **Predict.** At 1,024 tokens S takes 4 MiB (in 32-bit numbers). How much at 4,096? At 32,768?

# %%
lengths = {"1K": 1024, "4K": 4096, "10K": 10_240, "16K": 16_384, "32K": 32_768}
scores = {name: 4 * n * n for name, n in lengths.items()}
others = {name: 4 * 4 * n * 64 for name, n in lengths.items()}  # Q, K, V and O with d = 64
show(
    curves(
        "One head of one sequence, 32-bit numbers",
        list(lengths.values()),
        {
            "S": [x / GIB for x in scores.values()],
            "Q, K, V and O (d = 64)": [x / GIB for x in others.values()],
        },
        ("tokens", "GiB"),
        "The memory of S rises like a parabola to 4 GiB at 32K tokens; that of Q, K, V and O stays near zero.",
    )
)
for name, size in scores.items():
    print(f"{name:>3} tokens: S takes {size / MIB:6.0f} MiB")

# %% tags=["check"]
assert scores["1K"] == 4 * MIB and scores["4K"] == 64 * MIB and scores["10K"] == 400 * MIB
assert scores["16K"] == 1 * GIB and scores["32K"] == 4 * GIB

# %% [markdown]
# Four times the length, sixteen times the memory. And a model has dozens of heads and a batch of sequences, each with a
# matrix of its own.
#
# FlashAttention keeps the output, and two numbers per row, $m$ and $l$, which come below. With d = 64:

# %%
d = 64
for name in ("1K", "4K", "16K"):
    n = lengths[name]
    kept = 4 * n * (d + 2)  # o, m, l
    ratio = scores[name] / kept
    print(
        f"{name:>3}: S {scores[name] / MIB:5.0f} MiB, O with m and l {kept / MIB:5.2f} MiB: {ratio:5.1f} times less"
    )

# %% tags=["check"]
assert [round(n * n / (n * (d + 2)), 1) for n in (1024, 4096, 16_384)] == [15.5, 62.1, 248.2]
assert [round(4 * n * (d + 2) / MIB, 3) for n in (1024, 4096, 16_384)] == [0.258, 1.031, 4.125]

# %% [markdown]
# Be careful to say what is counted. Both methods have an output. What FlashAttention keeps *beyond* it, for the backward
# pass, is a single number per row, the log-sum-exp. That is N times less than S.

# %%
long_q, long_k, long_v = torch.randn(3, 4096, d)
_, lse = strobe.attention(long_q, long_k, long_v, return_lse=True, backend="tiled")
print(f"4096 tokens: {lse.numel()} numbers are kept, where S has {4096 * 4096}")

# %% tags=["check"]
assert lse.numel() == 4096

# %% [markdown]
# ## 3. Where memory is
#
# Registers belong to one thread, shared memory belongs to one block of threads, and device memory belongs to all. The
# first two are on the chip, where the arithmetic is done.

# %%
h200 = GPUS[0]
show(hierarchy(h200))

# %% [markdown]
# The scores of one head with 4,096 tokens take 64 MiB. They do not fit on the chip, not even on all of it together. A
# tile of 128 × 128 scores takes 64 KiB, and fits on a single multiprocessor.
#
# Device memory (HBM on large GPUs) lies beside the chip. **Predict.** How many operations can a GPU do in the time in
# which one byte arrives from there? One? Ten?

# %%
for g in GPUS:
    print(
        f"{g['name']:>11}: {g['tflops']['float16'] * 1000 / g['bandwidth']:4.0f} operations per byte, with 16-bit numbers"
    )

# %% tags=["check"]
assert all(g["tflops"]["float16"] * 1000 / g["bandwidth"] > 100 for g in GPUS)
assert scores["4K"] > h200["sms"] * h200["shared"] * KIB > 128 * 128 * 4

# %% [markdown]
# More than a hundred. A softmax does a handful of operations per number, so it waits for memory nearly all of the time.
# The question is not how much one computes. It is how often one goes to memory.
#
# ## 4. The four trips of standard attention
#
# Standard attention is three kernels, and between them the matrix travels:
#
#     kernel 1   S = Q Kᵀ / √d    writes S   ──►  trip 1
#     kernel 2   reads S          trip 2     ◄──
#                P = softmax(S)   writes P   ──►  trip 3
#     kernel 3   reads P          trip 4     ◄──
#                O = P V
#
# That is $4N^2$ numbers. We can count them, on the simulator of the first notebook.


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
s, p, o = (
    Array(name, shape=shape) for name, shape in (("s", (N, N)), ("p", (N, N)), ("o", (N, D)))
)
first = launch(scores_kernel, N // BLOCK, BLOCK, arrays["q"], arrays["k"], s, N, D)
second = launch(softmax_kernel, N // BLOCK, BLOCK, s, p, N)
third = launch(values_kernel, N // BLOCK, BLOCK, p, arrays["v"], o, N, D)
trips = {
    "S out": first.stores["s"],
    "S in": second.loads["s"],
    "P out": second.stores["p"],
    "P in": third.loads["p"],
}
show(bars(f"numbers moved on each trip, N = {N}", trips))

# %% tags=["check"]
torch.testing.assert_close(torch.tensor(o.to_host(), dtype=torch.float64), expected)
assert list(trips.values()) == [N * N] * 4

# %% [markdown]
# ## 5. The key trick
#
# Could one kernel do it all? Take a few rows of Q. Go through the keys tile by tile. Make a small tile of S on the chip,
# use it at once, forget it. The two products allow that: they are sums over keys, and a sum can be taken in pieces.
#
# The softmax does not allow it, it seems. Its denominator needs **all** scores of a row before the first weight is known.
# The **online softmax** takes this obstacle away. We derive it in five steps.
#
# ### Step 1: why there is a maximum at all
#
# A weight is $e^s$ divided by the sum of all $e^s$. **Predict.** What comes out for a score of 1000?

# %%
row = torch.tensor([1.0, 3.0, 2.0, 1000.0])
naive = torch.exp(row) / torch.exp(row).sum()
print("naive:  ", naive.tolist())

# %% [markdown]
# $e^{1000}$ is too large for any number type. But a common factor cancels:
#
# $$\frac{e^{s-m}}{\sum e^{s-m}} \text{ is the same for every } m.$$
#
# With $m$ the largest score, no exponent is positive, and nothing overflows.

# %%
shifted = torch.exp(row - row.max()) / torch.exp(row - row.max()).sum()
print("shifted:", shifted.tolist())

# %% tags=["check"]
assert naive.isnan().any() and shifted[3] == 1 and shifted.isfinite().all()

# %% [markdown]
# ### Step 2: two passes
#
# So one looks at the row twice: once for $m$, once for the sum $l$. To look twice, one must have kept the scores. That is
# the matrix again.
#
# ### Step 3: a maximum that is only true so far
#
# Now read the scores one by one. Keep the largest **so far**, and the sum **relative to it**. Let the scores be 1, 3, 2,
# 5. After three of them $m = 3$, and
#
# $$l = e^{1-3} + e^{3-3} + e^{2-3}$$
#
# Then 5 arrives. What we need now is
#
# $$l' = e^{1-5} + e^{3-5} + e^{2-5} + e^{5-5}$$
#
# The old terms are all wrong. Each was taken relative to 3, and should be relative to 5. But they are wrong **by the same
# factor**:
#
# $$e^{1-5} = e^{1-3}\,e^{3-5} \qquad e^{3-5} = e^{3-3}\,e^{3-5} \qquad e^{2-5} = e^{2-3}\,e^{3-5}$$
#
# So we need not know them any more. It is enough to multiply their sum:
#
# $$l' = l\,e^{3-5} + e^{5-5}, \qquad \text{in general} \quad l' = l\,\alpha + e^{s-m'}, \quad \alpha = e^{m-m'}$$
#
# **That is why one rescales.** What has been summed is in units of $e^m$. When $m$ changes, the unit changes, and the sum
# has to be converted. It is a change of currency, not the correction of an error.
#
# **Predict.** Before you run the cell: what is α when the score 2 arrives?

# %%
m, total = -math.inf, 0.0
print(f"{'s':>4} {'m':>4} {'α':>8} {'l':>8}")
for score in (1.0, 3.0, 2.0, 5.0):
    m_new = max(m, score)
    alpha = math.exp(
        m - m_new
    )  # the first time it is e^(-inf) = 0, and there is nothing to convert
    total = total * alpha + math.exp(score - m_new)
    m = m_new
    print(f"{score:4} {m:4} {alpha:8.4f} {total:8.4f}")

# %% tags=["check"]
assert math.isclose(total, sum(math.exp(x - 5) for x in (1, 3, 2, 5)))

# %% [markdown]
# α is never larger than 1, because the maximum never falls. If the maximum stays, α is 1 and nothing happens. That was
# the case with the score 2.
#
# #### Exercise: the log-sum-exp
#
# The stub below is right for small scores. Make it right for all, and let it read each score once.


# %% tags=["exercise"]
def log_sum_exp(t, s, lse, n):
    row = t.thread
    total = 0.0
    for i in range(n):
        total += math.exp(s[row, i])  # exp(1000) is too large for any float
    lse[row] = math.log(total)


print(LOG_SUM_EXP.check(log_sum_exp))

# %% [markdown]
# ### Step 4: the output is a sum of the same kind
#
# The output of a row is $\sum e^{s-m} v$, divided by $l$ at the end. It is in units of $e^m$ too. So it is converted by
# the same α:
#
# $$o' = o\,\alpha + e^{s-m'}\,v$$
#
# ### Step 5: tiles instead of single scores
#
# With a tile of scores, $m'$ is the largest of $m$ and of the tile, and the new terms are a sum over the tile. Nothing
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
    error = (flash_attention(q, k, v, block_q, block_k) - expected).abs().max().item()
    print(f"tiles of {block_q:2d} x {block_k:2d}: largest error {error:.1e}")

# %% tags=["check"]
for block_q, block_k in ((1, 1), (8, 4), (5, 7), (32, 32)):
    torch.testing.assert_close(flash_attention(q, k, v, block_q, block_k), expected)

# %% [markdown]
# **Predict.** And if one forgets to rescale? Does it crash? Does it give infinities? Does it matter how many tiles there
# are?

# %%
for tiles, block_k in (("four tiles", 8), ("one tile", N)):
    forgotten = flash_attention(q, k, v, 8, block_k, rescale=False)
    error = (forgotten - expected).abs().max().item()
    print(
        f"{tiles}: largest error {error:.3f}, all numbers finite: {bool(forgotten.isfinite().all())}"
    )

# %% tags=["check"]
assert (flash_attention(q, k, v, 8, 8, rescale=False) - expected).abs().max() > 0.01
torch.testing.assert_close(
    flash_attention(q, k, v, 8, N, rescale=False), expected
)  # with one tile nothing is converted

# %% [markdown]
# The result is wrong and looks plausible, which makes it a nasty mistake.
#
# #### Exercise: attention, one thread per query
#
# This is FlashAttention with tiles of one key. The stub overflows for large scores.


# %% tags=["exercise"]
def attention(t, q, k, v, o, n, d):
    row = t.thread
    query = [q[row, i] for i in range(d)]  # in registers
    total, out = 0.0, [0.0] * d
    for key in range(n):
        score = sum(query[i] * k[key, i] for i in range(d)) / math.sqrt(d)
        p = math.exp(score)  # overflows for large scores
        total += p
        for i in range(d):
            out[i] += p * v[key, i]
    for i in range(d):
        o[row, i] = out[i] / total


print(ATTENTION.check(attention))

# %% [markdown]
# ## 6. The worked example
#
# Four queries, four keys, d = 2, tiles of two. On a terminal: `strobe demo --example`.


# %%
def walk(q, k, v, block=2):
    for step in worked_example.tile_steps(q, k, v, block, block):
        print(
            f"queries {step.rows.start}-{step.rows.stop - 1}, keys {step.keys.start}-{step.keys.stop - 1}"
        )
        for i, row in enumerate(step.rows):
            numbers = " ".join(f"{x:10.6f}" for x in step.s[i])
            out = " ".join(f"{x:.6f}" for x in step.normalised[i])
            print(
                f"  row {row}: s {numbers}  m {step.m[i]:10.6f}  α {step.alpha[i]:.6e}  l {step.l[i]:.7f}  o/l {out}"
            )


q4, k4, v4 = worked_example.inputs()
walk(q4, k4, v4)

# %% [markdown]
# This example circulates with wrong numbers: the first tile's scores are often printed as 1.77, 3.89, 4.95, 10.61. Here
# every number is compared with a value that was worked out independently.

# %%
checks = worked_example.checks()
print(f"{sum(check.passed for check in checks)} of {len(checks)} numbers agree, for example:")
for check in checks[:4]:
    print(f"  {check.what}: {check.computed:.6f}")

# %% tags=["check"]
assert checks and all(check.passed for check in checks)
first, second = list(worked_example.tile_steps(q4, k4, v4))[:2]
golden = torch.tensor([[2.474874, 6.717514], [5.303301, 15.202796]], dtype=torch.float64)
torch.testing.assert_close(first.s, golden, atol=1e-6, rtol=0)
assert (
    first.s - torch.tensor([[1.77, 3.89], [4.95, 10.61]])
).abs().min() > 0.3  # none of the others is right
torch.testing.assert_close(second.alpha[0].item(), 2.064853e-4, atol=1e-10, rtol=0)
out = torch.tensor(
    [[0.697084216, 0.797084216], [0.699989959, 0.799989959], [0.699999965, 0.799999965], [0.7, 0.8]]
)
torch.testing.assert_close(strobe.attention(q4, k4, v4), out.double(), atol=1e-6, rtol=0)

# %% [markdown]
# It is also a poor example. The scores are so far apart that the softmax is almost one-hot: the last key of each row takes
# nearly all of the weight, and α is almost 0. The rescale then looks like "forget what came before". That is not what it
# is.

# %%
weights = torch.softmax(q4 @ k4.T / math.sqrt(2), dim=1)
print("weight of the last key, per row:", [round(x, 6) for x in weights[:, 3].tolist()])

# %% [markdown]
# ## 7. A better one
#
# Scores of about 1. Now the weights are all of one size, some rows are rescaled by about a half, others not at all, and a
# forgotten rescale shows.

# %%
q2, k2, v2 = (torch.tensor(MODERATE[name], dtype=torch.float64) for name in "qkv")
walk(q2, k2, v2)
exact, wrong = standard_attention(q2, k2, v2), flash_attention(q2, k2, v2, 2, 2, rescale=False)
print("row 0, exact:              ", [round(x, 4) for x in exact[0].tolist()])
print("row 0, without the rescale:", [round(x, 4) for x in wrong[0].tolist()])

# %% tags=["check"]
assert weights[:, 3].min() > 0.98 and second.alpha.max() < 1e-3
steps = list(worked_example.tile_steps(q2, k2, v2))
assert 0.4 < steps[1].alpha[0] < 0.6 and steps[1].alpha[1] == 1
torch.testing.assert_close(flash_attention(q2, k2, v2, 2, 2), exact)
torch.testing.assert_close(strobe.attention(q2, k2, v2), exact)
assert (wrong[0] - exact[0]).abs().max() > 0.05

# %% [markdown]
# ## 8. Tiles on a GPU
#
# One block of threads takes $B_r$ rows of Q. All its threads fetch a tile of $B_c$ keys and values into shared memory.
# Each thread then works on its own row. $m$, $l$ and $o$ stay in registers all the time.
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
        s = [
            sum(query[i] * k_tile[key, i] for i in range(d)) / math.sqrt(d)
            for key in range(block_k)
        ]
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
    moved[block_q] = report.loads["k"] + report.loads["v"]
print("numbers of K and V fetched, by rows of a tile:", moved)

# %% tags=["check"]
torch.testing.assert_close(torch.tensor(o.to_host(), dtype=torch.float64), expected)
assert report.loads["q"] == report.stores["o"] == N * D
assert all(count == 2 * N * N * D // rows for rows, count in moved.items())  # the model, exactly

# %% [markdown]
# ### Exercise: FlashAttention in CUDA C++
#
# The same kernel in CUDA C++, with d = 8 and tiles of 16 keys. The stub sums $e^s$ itself. Give it a maximum and a
# rescale. This is the kernel that the rest of strobe makes fast.

# %% tags=["exercise"]
flash = """
// Tiles of 16 keys; a thread owns a query. d is 8.
__global__ void flash(const float* q, const float* k, const float* v, float* o, int n, float scale) {
  __shared__ float k_tile[16][8], v_tile[16][8];
  int row = blockIdx.x * blockDim.x + threadIdx.x;
  float query[8], out[8], l = 0.0f;
  for (int i = 0; i < 8; ++i) { query[i] = row < n ? q[row * 8 + i] : 0.0f; out[i] = 0.0f; }
  for (int start = 0; start < n; start += 16) {
    for (int e = threadIdx.x; e < 16 * 8; e += blockDim.x) {  // the block fetches the tile together
      int key = start + e / 8;
      k_tile[e / 8][e % 8] = key < n ? k[key * 8 + e % 8] : 0.0f;
      v_tile[e / 8][e % 8] = key < n ? v[key * 8 + e % 8] : 0.0f;
    }
    __syncthreads();
    for (int j = 0; j < 16 && start + j < n; ++j) {
      float s = 0.0f;
      for (int i = 0; i < 8; ++i) s += scale * query[i] * k_tile[j][i];
      float p = expf(s);
      l += p;
      for (int i = 0; i < 8; ++i) out[i] += p * v_tile[j][i];
    }
    __syncthreads();
  }
  if (row < n) for (int i = 0; i < 8; ++i) o[row * 8 + i] = out[i] / l;
}
"""
print(
    FLASH_CUDA.check(flash)
    if compiler() or device.type == "cuda"
    else "there is neither a GPU nor a C++ compiler here"
)

# %% [markdown]
# ## 9. How large must a tile be?
#
# Keys and values are fetched again for each block of rows: $N/B_r$ times. So flash moves $2N^2d/B_r$ numbers, and
# standard attention moves $4N^2$. Flash moves less only if
#
# $$\frac{2N^2 d}{B_r} < 4N^2, \qquad \text{that is} \qquad B_r > \frac d2$$
#
# The simulator has counted it, with d = 4:

# %%
by_flash = {f"flash, Br = {block_q}": count for block_q, count in moved.items()}
show(bars("numbers moved (d = 4)", {"standard": 4 * N * N} | by_flash))

# %% tags=["check"]
assert moved[D // 2] == 4 * N * N and moved[1] > 4 * N * N > moved[4]

# %% [markdown]
# In real life d is 64 or 128. **Predict.** Many first kernels have a tile of 16 rows, and it is sometimes called optimal.
# How much does it move, next to standard attention?

# %%
for d in (64, 128):
    shares = {block_q: 2 * d / block_q / 4 for block_q in (16, 32, 64, 128, 256)}
    print(
        f"d = {d:3d}, standard = 1:",
        ", ".join(f"Br = {block_q}: {share:.3g}" for block_q, share in shares.items()),
    )

# %% [markdown]
# Twice as much, or four times as much. Why not a tile of a thousand rows, then? Because o and the scores of the tile must
# fit in registers. strobe's kernels have 64 to 256 rows.
#
# Now measure, with strobe's `tiled` backend. It is the loop of section 5 with everything that a library needs around it.
# Here the "chip" is the cache of a CPU (or the GPU, if you have one), and each small tile costs a few calls of PyTorch.
# This is one core, so that the numbers can be compared.


# %%
def seconds(call, repeats=3):
    best = math.inf
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


n, d = 512, 64
big_q, big_k, big_v = torch.randn(3, n, d, device=device)
times = {}
for block_q, block_k in ((16, 16), (16, 128), (64, 64), (128, 128), (512, 512)):
    with block_sizes(block_q, block_k):
        times[f"{block_q} x {block_k}"] = 1000 * seconds(
            lambda: strobe.attention(big_q, big_k, big_v, backend="tiled")
        )
show(bars(f"milliseconds on this {device.type}, {n} tokens, tiles of queries x keys", times, "ms"))

# %% [markdown]
# And now against the length: the time, and the memory that was really in use at the peak (beyond q, k and v).
#
# **Predict.** Which curves are parabolas?

# %%
lengths = [512, 1024, 2048, 3072, 4096]
methods = {
    "standard": standard_attention,
    "strobe, tiled": lambda q, k, v: strobe.attention(q, k, v, backend="tiled"),
    f"strobe, {strobe.explain(big_q, big_k, big_v).backend}": strobe.attention,
}
if len(methods) < 3:  # the backend that is chosen by itself is the tiled one
    methods = dict(list(methods.items())[:2])
took, peak = {name: [] for name in methods}, {name: [] for name in methods}
for n in lengths:
    x = torch.randn(3, n, 64, device=device)
    for name, method in methods.items():
        took[name].append(1000 * seconds(lambda method=method, x=x: method(*x), repeats=2))
        peak[name].append(
            (with_peak_memory(lambda method=method, x=x: method(*x), device)[1] or 0) / MIB
        )
show(
    curves(
        f"Time on this {device.type}, one head, d = 64",
        lengths,
        took,
        ("tokens", "milliseconds"),
        "Time against length for standard attention and for strobe's backends; all grow quadratically, because all of them "
        "compute every score.",
    )
)

# %%
show(
    curves(
        "Peak memory beyond q, k and v, measured",
        lengths,
        peak,
        ("tokens", "MiB"),
        "Measured peak memory against length: standard attention rises quadratically to more than 100 MiB at 4,096 tokens, "
        "strobe's backends stay close to zero.",
    )
)

# %% tags=["check"]
assert peak["standard"][-1] > 10 * peak["strobe, tiled"][-1]
assert 12 < peak["standard"][-1] / peak["standard"][1] < 20  # four times the length
for n in (64, 200):
    x = torch.randn(3, n, 16, dtype=torch.float64, device=device)
    torch.testing.assert_close(strobe.attention(*x, backend="tiled"), standard_attention(*x))

# %% [markdown]
# Every method computes all N² scores, so all times are parabolas. But only standard attention *stores* the scores, so only
# its memory is one.
#
# ## 10. Backward: compute it again
#
# For the gradients one needs P. Standard attention has kept it. FlashAttention has not, and does not need to. P follows
# from the scores and from one number per row, the log-sum-exp $L = m + \log l$:
#
# $$p = \frac{e^{s-m}}{l} = e^{s-L}$$
#
# So the backward pass makes each tile of S once more. It gets the final P of that tile at once, with no online softmax
# this time, and goes on:
#
# $$dV \mathrel{+}= P^\top dO \qquad dP = dO\,V^\top \qquad dS = P \circ (dP - \delta)$$
# $$dQ \mathrel{+}= dS\,K/\sqrt d \qquad dK \mathrel{+}= dS^\top Q/\sqrt d \qquad \delta = \mathrm{rowsum}(dO \circ O)$$
#
# Where does δ come from? The derivative of the softmax is $dS = P \circ (dP - \mathrm{rowsum}(P \circ dP))$. That sum runs
# over all keys, which a tile does not see. But $\mathrm{rowsum}(P \circ dP) = \mathrm{rowsum}(dO \circ O)$, and that is
# known before one starts.


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
ours = flash_backward(q, k, v, o, lse, do, 8, 5)
for name, mine, right in zip(("dQ", "dK", "dV"), ours, by_autograd, strict=True):
    print(f"{name}: largest difference from autograd {(mine - right).abs().max().item():.1e}")

# %% tags=["check"]
by_strobe = torch.autograd.grad(strobe.attention(*leaves, backend="tiled"), leaves, do)
for mine, library, right in zip(ours, by_strobe, by_autograd, strict=True):
    torch.testing.assert_close(mine, right)
    torch.testing.assert_close(library, right)

# %% [markdown]
# This computes more: five matrix products, where four are enough if P is kept. It is faster nevertheless on a GPU, because
# computing is cheap and moving N² numbers is not.
#
# ## 11. Three generations of one idea
#
# **FA-1** (2022) had the loops the other way round: keys outside, queries inside. Then o, m and l of all rows wait in
# memory, and are fetched and stored for every tile of keys. It also kept o normalised, which costs a division at each
# step:
#
# $$o' = o\,\frac{l}{l'}\,\alpha + \frac{p\,v}{l'}$$
#
# **FA-2** (2023) swaps the loops. The o of a row stays in registers from the first key to the last, and is divided once.
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
            moved += q[r].numel() + 2 * (
                o[r].numel() + m[r].numel() + total[r].numel()
            )  # q in; o, m, l in and out
    return o, moved


def fa2_moved(n, d, block_q):
    return (
        2 * n * d + 2 * n * d * n // block_q + n
    )  # q in and o out once, k and v per block of rows, the log-sum-exp


o1, moved1 = fa1(q, k, v, 8, 8)
show(bars("numbers moved with tiles of 8 x 8", {"FA-1": moved1, "FA-2": fa2_moved(N, D, 8)}))

# %% tags=["check"]
torch.testing.assert_close(o1, expected)
assert moved1 == 2 * N * D + (N // 8) * (3 * N * D + 4 * N) and moved1 > 1.5 * fa2_moved(N, D, 8)

# %% [markdown]
# **FA-3** (2024) is the same loop for Hopper GPUs. Nothing in the mathematics changes. What changes is who waits for whom.
# A copy engine (TMA) fetches tiles while the matrix units (wgmma) multiply. Some warps only fetch, others only compute.
# And two groups of warps take turns, so that the softmax of one runs while the other multiplies. The ladder,
# `docs/ladder.md`, builds all of it up step by step.
#
# ## 12. The same result?
#
# Yes, within rounding: nothing is approximated. Scores of a thousand do no harm, and a row that sees no key gives 0, not
# NaN.

# %%
huge_q, huge_k, huge_v = torch.randn(3, 256, 64) * torch.tensor([30.0, 30.0, 1.0])[:, None, None]
largest = (huge_q @ huge_k.T / 8).abs().max().item()
ours = strobe.attention(huge_q, huge_k, huge_v, backend="tiled")
right = standard_attention(huge_q.double(), huge_k.double(), huge_v.double())
print(f"largest score {largest:.0f}, largest error {(ours - right).abs().max().item():.1e}")
nothing, minus_infinity = strobe.attention(
    q, k, v, mask=torch.zeros(N, N, dtype=torch.bool), return_lse=True
)
print("a row that sees no key:", nothing[0].tolist(), "log-sum-exp", minus_infinity[0].item())

# %% tags=["check"]
assert largest > 1000 and (ours - right).abs().max() < 1e-2 and ours.isfinite().all()
assert (nothing == 0).all() and (minus_infinity == -math.inf).all()

# %% [markdown]
# ## 13. What approximations do instead
#
# Before FlashAttention many people tried to avoid the N² by computing something *else*. **Linformer** projects the N keys
# and the N values to a fixed number r of mixtures: $K' = E K$ and $V' = F V$, where $E$ and $F$ are r × N matrices. Then S
# has N × r numbers, and the cost grows with N. **Sparse attention** looks at some keys only. **Linear attention** replaces
# the softmax by a product that can be summed up beforehand.
#
# All of them change the result, and a model has to be trained for them. FlashAttention changes nothing: it computes the
# same function with fewer trips to memory. Its cost still grows with N². Its memory does not.
#
# Linformer learns its mixtures. Here plain averages of neighbouring keys and values play their part:

# %%
n, d = 512, 64
x_q, x_k, x_v = torch.randn(3, n, d, dtype=torch.float64)
exact = standard_attention(x_q, x_k, x_v)


def averages(x, r):
    """r mixtures of n rows: each the mean of n / r neighbours."""
    return x.reshape(r, n // r, d).mean(1)


def relative_error(found):
    return ((found - exact).norm() / exact.norm()).item()


print(
    f"FlashAttention:          relative error {relative_error(flash_attention(x_q, x_k, x_v, 64, 64)):.1e}"
)
for r in (64, 256):
    mixed = standard_attention(x_q, averages(x_k, r), averages(x_v, r))
    print(f"{r:3d} mixtures of {n} keys: relative error {relative_error(mixed):.1e}")

# %% tags=["check"]
assert relative_error(flash_attention(x_q, x_k, x_v, 64, 64)) < 1e-12
assert relative_error(standard_attention(x_q, averages(x_k, 256), averages(x_v, 256))) > 0.1

# %% [markdown]
# The keys here are random, so neighbours have nothing in common, and the averages lose most of what they said. Trained
# models do better. But none is exact.

# %% [markdown]
# ## 14. Four questions
#
# **Why is the PyTorch version slower?** Because every line of the loop is a kernel of its own. Between two of them the
# tile is written to memory and read again, and each launch costs time. The loop in section 5 has the algorithm, and none
# of the closeness. Measured here:

# %%
n = 1024
x = torch.randn(3, 1, n, 4, 64, device=device)
speed = {
    "the loop, 64 x 64": seconds(
        lambda: [flash_attention(*x[:, 0, :, head], 64, 64) for head in range(4)]
    ),
    "strobe, tiled": seconds(lambda: strobe.attention(*x, backend="tiled")),
    "standard": seconds(lambda: [standard_attention(*x[:, 0, :, head]) for head in range(4)]),
    f"strobe, {strobe.explain(*x).backend}": seconds(lambda: strobe.attention(*x)),
}
milliseconds = {name: 1000 * t for name, t in speed.items()}
show(bars(f"milliseconds, 4 heads of {n} tokens on this {device.type}", milliseconds, "ms"))

# %% [markdown]
# **What is its point, then?** It shows the algorithm in a page. It saves the memory on every device that PyTorch knows. It
# has every mask, bias and gradient. And kernels are measured against it.
#
# **What differs from the real one?** Not the algorithm. In a kernel the tile lives in registers, the products run on
# matrix units with 16-bit inputs and 32-bit sums, copies overlap with arithmetic, and $e^x$ is $2^{x \log_2 e}$, because
# the hardware has only $2^x$. A kernel *without* matrix units, as in section 8, is slower than standard attention with a
# good matrix library. Tiles save memory traffic. Speed needs both.
#
# **Why rescale?** Because everything summed so far is in units of $e^m$, and $m$ has just changed. (Section 5, step 3.)

# %% tags=["check"]
values = torch.linspace(-5, 0, 11, dtype=torch.float64)
torch.testing.assert_close(torch.exp2(values * math.log2(math.e)), torch.exp(values))

# %% [markdown]
# ## 15. The real kernel
#
# The same call on the library's CUDA kernel. Without a GPU it runs on the emulator: the same source, instruction by
# instruction, on the CPU.

# %%
half_q, half_k, half_v = (torch.randn(1, 96, 1, 64).to(torch.bfloat16) for _ in range(3))
right = standard_attention(*(x[0, :, 0].double() for x in (half_q, half_k, half_v)))
if compiler() is not None:
    ours = strobe.attention(half_q, half_k, half_v, backend="emulator")[0, :, 0]
    print("emulated kernel, largest error:", (ours - right).abs().max().item())
else:
    print("no C++ compiler here: the emulator cannot run")
print()
print(strobe.explain(half_q.to(device), half_k.to(device), half_v.to(device)))

# %% tags=["check"]
assert compiler() is None or (ours - right).abs().max() < 2e-2

# %% [markdown]
# ## Where to go from here
#
# - Watch the algorithm run, tile by tile, in a browser: `strobe explain-page --open`.
# - Climb from the naive kernel to the fastest one: `strobe ladder`, and `docs/ladder.md`.
# - Read the algorithm as the library has it: `src/strobe/backends/tiled/forward.py`.
# - Read the papers: [online softmax](https://arxiv.org/abs/1805.02867) (Milakov, Gimelshein),
#   [attention without O(n²) memory](https://arxiv.org/abs/2112.05682) (Rabe, Staats),
#   [FlashAttention](https://arxiv.org/abs/2205.14135), [-2](https://arxiv.org/abs/2307.08691) and
#   [-3](https://arxiv.org/abs/2407.08608), [Linformer](https://arxiv.org/abs/2006.04768).
