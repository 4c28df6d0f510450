"""`strobe.trace`: the library's own tiled algorithm on a small problem, every step of it recorded as data.

The numbers come out of `strobe.tiled` while it runs. What each step moves between the memories follows from its tile by
the simple model that the lessons use: a tile of Q is read once, the tiles of K and V once per block of rows, the scores
never leave the registers; standard attention writes and reads its matrix of scores twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from strobe.backends.tiled import forward as tiled
from strobe.backends.tiled.slab import LN2
from strobe.problem import Problem
from strobe.problem.arguments import Arguments, Inputs
from strobe.variants.mask import Mask


@dataclass(frozen=True)
class TileOfRow:
    """The effect of one tile of keys on one row; in natural units, although the library counts in log2."""

    tile: int
    keys: tuple[int, int]  # the first, and the one after the last
    s: list[float | None]  # scores; None: masked, that is -inf
    m_old: float | None  # the largest score before this tile; None: nothing seen yet
    m_new: float | None
    alpha: float  # e^(m_old - m_new)
    p: list[float]  # e^(s - m_new)
    l: float  # noqa: E741  alpha * (l before) + sum of p
    o: list[float]  # alpha * (o before) + p v, not yet divided by l


@dataclass(frozen=True)
class Moved:
    """Bytes that a step moves. Standard attention's use of shared memory is not counted."""

    hbm_read: int = 0
    hbm_written: int = 0
    shared_read: int = 0
    shared_written: int = 0


@dataclass(frozen=True)
class Step:
    """begin (load Q), skip, load (K and V), scores, max, rescale, add, store (O and LSE)."""

    kind: str
    block: int  # of rows
    tile: int | None  # of keys
    rows: tuple[int, int]
    keys: tuple[int, int] | None  # cut to what the rows can see; of a tile that is skipped, all of it
    masked: bool = False  # some pairs of the tile are hidden
    flash: Moved = field(default_factory=Moved)
    standard: Moved = field(default_factory=Moved)


@dataclass(frozen=True)
class Trace:
    n: int
    n_keys: int
    d: int
    d_v: int
    block_q: int
    block_k: int
    dtype: str
    mask: str
    scale: float
    steps: list[Step]
    rows: list[list[TileOfRow]]  # for each query row the tiles it met
    out: list[list[float]]
    lse: list[float | None]  # None: the row saw no key

    def to_dict(self) -> dict[str, Any]:
        """Only what JSON can hold: -inf is None."""
        return asdict(self)

    def totals(self) -> dict[str, Moved]:
        return {who: _sum([getattr(step, who) for step in self.steps]) for who in ("flash", "standard")}


def _sum(moves: list[Moved]) -> Moved:
    names = ("hbm_read", "hbm_written", "shared_read", "shared_written")
    return Moved(*(sum(getattr(move, name) for move in moves) for name in names))


def trace(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block_q: int,
    block_k: int,
    mask: Mask | None = None,
    scale: float | None = None,
) -> Trace:
    """Attention of (n, d) matrices by `strobe.tiled`, step by step. Every row of every tile is kept: meant for small
    n."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if isinstance(t, torch.Tensor) and t.dim() != 2:
            raise ValueError(f"{name} has {t.dim()} axes; a trace is of one head, (length, dim)")
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if isinstance(block, bool) or not isinstance(block, int) or block < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {block!r}")
    if isinstance(mask, torch.Tensor):
        raise TypeError("mask must be a strobe mask (strobe.causal, strobe.window(…), …) or None, got a tensor")
    a = Arguments(q.detach(), k.detach(), v.detach(), mask=mask, scale=scale)
    problem, layout = Problem.of(a)
    inputs = Inputs.of(a, layout)
    if problem.empty:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: there is nothing to trace")
    block_q, block_k = min(block_q, problem.len_q), min(block_k, problem.len_k)
    recorder = _Recorder(problem, block_k)
    out, lse = tiled.forward(problem, inputs, block_q=block_q, block_k=block_k, observer=recorder)
    return Trace(
        n=problem.len_q,
        n_keys=problem.len_k,
        d=problem.dim,
        d_v=problem.dim_v,
        block_q=block_q,
        block_k=block_k,
        dtype=str(problem.dtype).removeprefix("torch."),
        mask=problem.mask.name,
        scale=problem.scale,
        steps=list(_steps(problem, block_q, block_k, recorder.visited)),
        rows=recorder.rows,
        out=out[0, 0].double().tolist(),
        lse=_finite(lse[0, 0]),
    )


class _Recorder:
    """Copies what `tiled.forward` shows."""

    def __init__(self, problem: Problem, block_k: int) -> None:
        self._block_k = block_k
        self._least = torch.finfo(problem.lse_dtype).min  # the initial m of the library
        self.rows: list[list[TileOfRow]] = [[] for _ in range(problem.len_q)]
        self.visited: dict[tuple[int, int], tuple[range, bool]] = {}  # (first row, tile): its keys, wholly visible

    def scored(self, rows: range, keys: range, whole: bool, s: torch.Tensor, m: torch.Tensor) -> None:
        self._at = rows, keys
        self._s, self._m_old = [_finite(row) for row in self._natural(s[0])], _finite(self._natural(m[0, :, 0]))
        self.visited[rows.start, keys.start // self._block_k] = keys, whole

    def summed(
        self, p: torch.Tensor, rescale: torch.Tensor, m: torch.Tensor, ell: torch.Tensor, o: torch.Tensor
    ) -> None:
        rows, keys = self._at
        m_new = _finite(self._natural(m[0, :, 0]))
        for i, row in enumerate(rows):
            self.rows[row].append(
                TileOfRow(
                    tile=keys.start // self._block_k,
                    keys=(keys.start, keys.stop),
                    s=self._s[i],
                    m_old=self._m_old[i],
                    m_new=m_new[i],
                    alpha=rescale[0, i, 0].item(),
                    p=p[0, i].double().tolist(),
                    l=ell[0, i, 0].item(),
                    o=o[0, i].double().tolist(),
                )
            )

    def _natural(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x == self._least, -torch.inf, x.double() * LN2)


def _finite(x: torch.Tensor) -> list[float | None]:
    return [None if value == -torch.inf else value for value in x.double().tolist()]


def _steps(
    problem: Problem, block_q: int, block_k: int, visited: dict[tuple[int, int], tuple[range, bool]]
) -> Iterator[Step]:
    size, wide, dim, dim_v = problem.dtype.itemsize, problem.lse_dtype.itemsize, problem.dim, problem.dim_v
    for block, start in enumerate(range(0, problem.len_q, block_q)):
        rows = range(start, min(start + block_q, problem.len_q))
        ends = rows.start, rows.stop
        q = len(rows) * dim * size
        yield Step("begin", block, None, ends, None, False, Moved(hbm_read=q, shared_written=q), Moved(hbm_read=q))
        for tile, first in enumerate(range(0, problem.len_k, block_k)):
            every = range(first, min(first + block_k, problem.len_k))
            # Standard attention reads K and V once (let its matrix products be perfect), and does not skip.
            once = len(every) * (dim + dim_v) * size if block == 0 else 0
            scores = len(rows) * len(every) * size
            if (start, tile) not in visited:
                moved = Moved(hbm_read=2 * scores + once, hbm_written=2 * scores)
                yield Step("skip", block, tile, ends, (every.start, every.stop), True, Moved(), moved)
                continue
            keys, whole = visited[start, tile]
            at = block, tile, ends, (keys.start, keys.stop), not whole
            k, v = len(keys) * dim * size, len(keys) * dim_v * size
            yield Step("load", *at, Moved(hbm_read=k + v, shared_written=k + v), Moved(hbm_read=once))
            yield Step("scores", *at, Moved(shared_read=q + k), Moved(hbm_written=scores))
            yield Step("max", *at, Moved(), Moved(hbm_read=scores))
            yield Step("rescale", *at)
            yield Step("add", *at, Moved(shared_read=v), Moved(hbm_read=scores, hbm_written=scores))
        o = len(rows) * dim_v * size
        yield Step(
            "store", block, None, ends, None, False, Moved(hbm_written=o + len(rows) * wide), Moved(hbm_written=o)
        )
