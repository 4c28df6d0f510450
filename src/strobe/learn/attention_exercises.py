"""The exercises of the FlashAttention lesson: the online softmax, then attention without the matrix of scores."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

import strobe
from strobe.learn.checking import Case, Exercise
from strobe.learn.simulator import Array, Report
from strobe.learn.starter_exercises import matrix

# ---- online softmax: one pass, rescaling -----------------------------------------------------------------------------


def log_sum_exp_stub(t, s, lse, n):
    row = t.thread
    total = 0.0
    for i in range(n):
        total += math.exp(s[row, i])  # exp(1000) is too large for any float
    lse[row] = math.log(total)


def log_sum_exp_solution(t, s, lse, n):
    row = t.thread
    m, total = -math.inf, 0.0
    for i in range(n):
        score = s[row, i]
        m_new = max(m, score)
        total = total * math.exp(m - m_new) + math.exp(score - m_new)
        m = m_new
    lse[row] = m + math.log(total)


def _log_sum_exp_cases() -> Iterator[Case]:
    rising = [[100.0 * i for i in range(11)], [1000.0 - 100.0 * i for i in range(11)]]
    for what, rows in (("moderate scores", matrix(4, 6, 1)), ("scores up to 1000", rising)):
        n, lse = len(rows[0]), Array("lse", shape=len(rows))

        def once(report: Report, most: int = len(rows) * n) -> str | None:
            return f"right, but {report.loads['s']} loads of s; {most} are enough" if report.loads["s"] > most else None

        expected = [max(row) + math.log(sum(math.exp(x - max(row)) for x in row)) for row in rows]
        yield Case(what, 1, len(rows), (Array("s", rows), lse, n), lse, expected, once)


LOG_SUM_EXP = Exercise(
    "log_sum_exp",
    "lse[row] = log(sum of exp(s[row, i])), for scores of any size, reading each score once.",
    (
        "log sum exp(s) = m + log sum exp(s - m) for every m. With m the largest score, no exponent is positive.",
        "The largest score is known only at the end. Keep the largest so far, and the sum relative to it.",
        "When the maximum grows from m to m_new, each term of the sum must shrink by exp(m - m_new): multiply the whole sum.",
    ),
    log_sum_exp_stub,
    log_sum_exp_solution,
    _log_sum_exp_cases,
)


# ---- attention: the output is rescaled as well -----------------------------------------------------------------------


def attention_stub(t, q, k, v, o, n, d):
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


def attention_solution(t, q, k, v, o, n, d):
    row = t.thread
    query = [q[row, i] for i in range(d)]
    m, total, out = -math.inf, 0.0, [0.0] * d
    for key in range(n):
        score = sum(query[i] * k[key, i] for i in range(d)) / math.sqrt(d)
        m_new = max(m, score)
        rescale, p = math.exp(m - m_new), math.exp(score - m_new)
        total = total * rescale + p
        for i in range(d):
            out[i] = out[i] * rescale + p * v[key, i]
        m = m_new
    for i in range(d):
        o[row, i] = out[i] / total


def _attention_cases() -> Iterator[Case]:
    for what, n, d, size in (("moderate scores", 5, 4, 1.0), ("scores in the thousands", 6, 4, 60.0)):
        generator = torch.Generator().manual_seed(n)
        q, k, v = (torch.randn(n, d, dtype=torch.float64, generator=generator) for _ in range(3))
        q, k = q * size, k * size
        o = Array("o", shape=(n, d))

        def once(report: Report, most: int = n * n * d) -> str | None:
            excess = [f"{report.loads[x]} loads of {x}, {most} are enough" for x in "kv" if report.loads[x] > most]
            return f"right, but {' and '.join(excess)}" if excess else None

        expected = strobe.attention(q, k, v, backend="reference").tolist()
        arguments = (*(Array(name, x.tolist()) for name, x in (("q", q), ("k", k), ("v", v))), o, n, d)
        yield Case(what, 1, n, arguments, o, expected, once)


ATTENTION = Exercise(
    "attention",
    "o = softmax(q kᵀ / sqrt(d)) v, one thread per query, reading each key and value once: FlashAttention with tiles of one.",
    (
        "It is `log_sum_exp` with one more thing that is summed up relative to the maximum.",
        "When the maximum grows, the sum and the output so far shrink by the same factor.",
    ),
    attention_stub,
    attention_solution,
    _attention_cases,
)

FLASH = (LOG_SUM_EXP, ATTENTION)
