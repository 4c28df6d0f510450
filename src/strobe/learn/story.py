"""The example that the page tells its story with: six words, recorded by the library.

Scores are multiples of a half, so that a reader can check them by hand. No weight is smaller than 0.05 or larger than
0.5. The row of "sat" meets a larger score in its second tile of keys and again in its third."""

from __future__ import annotations

import math
from typing import Any

import torch

import strobe
from strobe.tile_trace import trace
from strobe.variants.mask import Mask

WORDS = ("she", "sat", "on", "the", "river", "bank")
Q = ((1, 2, 0, 0), (1, 1, 2, 1), (0, 1, 1, 0), (0, -1, 1, 1), (0, -1, 1, 0), (1, 0, 1, 0))
K = ((2, 0, 0, 0), (0, 1, 0, 0), (0, 1, 1, 0), (1, 0, -1, 2), (-1, 0, 2, 0), (0, 0, 2, 1))
V = ((3, 0, 0, 1), (0, 2, 1, 0), (1, 1, 0, 0), (0, 0, 1, 1), (0, 1, 3, 2), (1, 0, 4, 2))
BLOCK_Q, BLOCK_K = 3, 2
ROW = 1  # "sat": the row whose numbers are followed
D_O = ((1, 0, -1, 0), (0, 1, 0, -1), (1, 1, 0, 0), (0, 0, 1, 1), (-1, 0, 1, 0), (0, -1, 0, 1))  # for the backward pass

# The chapter on masks: so many tokens in tiles of so many rows and keys, drawn; and at a real size, counted.
_DRAWN, _DRAWN_BLOCK, _REAL, _REAL_BLOCK = 24, 4, 4096, 128


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(6, 4) each, float64."""
    return tuple(torch.tensor(x, dtype=torch.float64) for x in (Q, K, V))  # type: ignore[return-value]


def story() -> dict[str, Any]:
    """Everything that the chapters draw; `trace` is a `Trace`, all else is as JSON can hold it."""
    q, k, v = inputs()
    run = trace(q, k, v, block_q=BLOCK_Q, block_k=BLOCK_K)
    p = [[math.exp(s - lse) for tile in row for s in tile.s] for row, lse in zip(run.rows, run.lse, strict=True)]  # type: ignore[operator]
    size = torch.float32.itemsize
    single = trace(*(t.float() for t in (q, k, v)), block_q=BLOCK_Q, block_k=BLOCK_K).totals()
    moved = {who: counters.hbm_read + counters.hbm_written for who, counters in single.items()}
    return {
        "words": WORDS,
        "row": ROW,
        "q": Q,
        "k": K,
        "v": V,
        "trace": run,
        "p": p,
        "bytes": moved | {"kept_standard": 2 * len(Q) * len(K) * size, "kept_flash": len(Q) * size},
        "backward": backward(),
        "masks": [_mask(*which) for which in MASKS],
    }


# ---- backward --------------------------------------------------------------------------------------------------------


def backward() -> dict[str, Any]:
    """The backward pass tile by tile, from q, k, v, o, do and one LSE per row. The gradients are autograd's through
    `strobe.attention`; a tile's numbers follow from the formulas."""
    q, k, v = (t.requires_grad_() for t in inputs())
    do = torch.tensor(D_O, dtype=torch.float64)
    out, lse = strobe.attention(q, k, v, return_lse=True, backend="tiled")
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), do)
    q, k, v, out, lse = (t.detach() for t in (q, k, v, out, lse))
    delta = (do * out).sum(1, keepdim=True)
    tiles = []
    for first_row in range(0, len(q), BLOCK_Q):
        rows = slice(first_row, first_row + BLOCK_Q)
        for first_key in range(0, len(k), BLOCK_K):
            keys = slice(first_key, first_key + BLOCK_K)
            s = q[rows] @ k[keys].T / math.sqrt(q.shape[1])
            p = torch.exp(s - lse[rows, None])
            ds = p * (do[rows] @ v[keys].T - delta[rows])
            tiles.append({"rows": first_row, "keys": first_key, "s": s.tolist(), "p": p.tolist(), "ds": ds.tolist()})
    gradients = {name: x.tolist() for name, x in (("dq", dq), ("dk", dk), ("dv", dv))}
    return {"do": D_O, "lse": lse.tolist(), "tiles": tiles} | gradients


# ---- masks -----------------------------------------------------------------------------------------------------------

MASKS: tuple[tuple[str, str, Mask, Mask], ...] = (
    ("full", "Everyone sees everyone.", strobe.full, strobe.full),
    ("causal", "A word sees itself and the words before it.", strobe.causal, strobe.causal),
    ("window", "A word sees itself and its nearest predecessors.", strobe.window(6, 0), strobe.window(511, 0)),
    ("documents", "A word sees the words of its own document.", strobe.chunked(6), strobe.chunked(1024)),
)


def _mask(name: str, about: str, drawn: Mask, real: Mask) -> dict[str, Any]:
    q, k, v = (torch.zeros(_DRAWN, 1) for _ in range(3))
    steps = trace(q, k, v, block_q=_DRAWN_BLOCK, block_k=_DRAWN_BLOCK, mask=drawn).steps
    tiles = [
        {"row": s.block, "key": s.tile, "kind": "skip" if s.kind == "skip" else "part" if s.masked else "whole"}
        for s in steps
        if s.kind in ("skip", "add")
    ]
    visible = drawn.dense(_DRAWN, _DRAWN).int().tolist()
    return {
        "name": name,
        "about": about,
        "n": _DRAWN,
        "block": _DRAWN_BLOCK,
        "tiles": tiles,
        "visible": ["".join(map(str, row)) for row in visible],
        "real": {"n": _REAL, "block": _REAL_BLOCK, "share": _visited(real) / _REAL**2, "mask": repr(real)},
    }


def _visited(mask: Mask) -> int:
    """Pairs in the tiles that are computed."""
    pairs = 0
    for start in range(0, _REAL, _REAL_BLOCK):
        first, end, _, _ = mask.tiles(start, start + _REAL_BLOCK, _REAL_BLOCK, _REAL, _REAL)
        pairs += (end - first) * _REAL_BLOCK**2
    return pairs
