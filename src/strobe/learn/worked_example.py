"""The algorithm on numbers small enough to follow by hand: four queries, four keys, tiles of two.

`tile_steps` is the online softmax as one would write it on a blackboard. `checks` compares every number with values
that were worked out independently, and `strobe.attention` with the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import strobe

Q = ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0), (7.0, 8.0))
K = ((0.5, 1.5), (2.5, 3.5), (4.5, 5.5), (6.5, 7.5))
V = ((0.1, 0.2), (0.3, 0.4), (0.5, 0.6), (0.7, 0.8))
BLOCK = 2


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.tensor(Q, dtype=dtype), torch.tensor(K, dtype=dtype), torch.tensor(V, dtype=dtype)


@dataclass(frozen=True)
class Step:
    """One tile of keys, met by one tile of queries. Rows are the tile's queries."""

    rows: range
    keys: range
    s: torch.Tensor  # (rows, keys)  scores of this tile
    m: torch.Tensor  # (rows,)       largest score so far
    alpha: torch.Tensor  # (rows,)   e^(m before - m now): what the work so far was scaled too large by
    p: torch.Tensor  # (rows, keys)  e^(s - m)
    l: torch.Tensor  # (rows,)       sum of all p so far, relative to m  # noqa: E741
    o: torch.Tensor  # (rows, dim)   sum of p v so far, not yet divided by l

    @property
    def normalised(self) -> torch.Tensor:
        """The output if these were all the keys."""
        return self.o / self.l[:, None]


def tile_steps(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_q: int = BLOCK, block_k: int = BLOCK
) -> Iterator[Step]:
    """FlashAttention's two loops over (n, d) matrices, one step per pair of tiles."""
    scale = 1 / math.sqrt(q.shape[1])
    for q0 in range(0, len(q), block_q):
        rows = range(q0, min(q0 + block_q, len(q)))
        m = q.new_full((len(rows),), -math.inf)
        l = q.new_zeros(len(rows))  # noqa: E741
        o = q.new_zeros(len(rows), v.shape[1])
        for k0 in range(0, len(k), block_k):
            keys = range(k0, min(k0 + block_k, len(k)))
            s = scale * q[rows.start : rows.stop] @ k[keys.start : keys.stop].T
            m_new = torch.maximum(m, s.amax(1))
            alpha = torch.exp(m - m_new)
            p = torch.exp(s - m_new[:, None])
            l = alpha * l + p.sum(1)  # noqa: E741
            o = alpha[:, None] * o + p @ v[keys.start : keys.stop]
            m = m_new
            yield Step(rows, keys, s, m, alpha, p, l, o)


@dataclass(frozen=True)
class Check:
    what: str
    computed: float
    golden: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return abs(self.computed - self.golden) <= self.tolerance  # False for NaN


def checks(backend: str | None = None) -> list[Check]:
    """Every golden number against what the loops above and `strobe.attention` compute."""
    q, k, v = inputs()
    first, second = list(tile_steps(q, k, v))[:2]
    results: list[Check] = []

    def compare(what: str, computed: torch.Tensor, golden: list[float], tolerance: float) -> None:
        for i, (a, b) in enumerate(zip(computed.flatten().tolist(), golden, strict=True)):
            results.append(Check(f"{what}[{i}]" if len(golden) > 1 else what, a, b, tolerance))

    compare("first tile: S", first.s, [2.474874, 6.717514, 5.303301, 15.202796], 1e-6)
    compare("first tile: m", first.m, [6.717514, 15.202796], 1e-6)
    compare("first tile: P[0,0]", first.p[0, 0], [0.0143696], 1e-7)
    compare("first tile: P[1,0]", first.p[1, 0], [5.02000e-5], 1e-9)
    compare("first tile: l", first.l, [1.0143696, 1.0000502], 1e-7)
    compare("first tile: O", first.normalised, [0.2971668, 0.3971668, 0.2999900, 0.3999900], 1e-7)
    compare("second tile: S row 0", second.s[0], [10.960155, 15.202796], 1e-6)
    compare("second tile: alpha", second.alpha, [2.064853e-4, 2.520043e-9], 1e-10)
    compare("second tile: l", second.l, [1.014579048, 1.000050203], 1e-9)

    golden_o = [0.697084216, 0.797084216, 0.699989959, 0.799989959, 0.699999965, 0.799999965, 0.7, 0.8]
    golden_lse = [15.217269591, 35.001835870, 54.800775717, 74.599765416]
    golden_causal = [0.1, 0.2, 0.299989960, 0.399989960, 0.499999965, 0.599999965, 0.7, 0.8]
    finished = [step.normalised for step in tile_steps(q, k, v) if step.keys.stop == len(k)]
    compare("output of the loops", torch.cat(finished), golden_o, 1e-9)
    out, lse = strobe.attention(q, k, v, return_lse=True, backend=backend)
    compare("strobe.attention", out, golden_o, 1e-6)
    compare("its LSE", lse, golden_lse, 1e-6)
    compare(
        "strobe.attention, causal", strobe.attention(q, k, v, mask=strobe.causal, backend=backend), golden_causal, 1e-6
    )
    return results
