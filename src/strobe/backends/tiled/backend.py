"""The `tiled` backend: every argument there is, on any device, forward and backward."""

from __future__ import annotations

from strobe.backends.backend import Backend, Capabilities, binder
from strobe.backends.tiled.backward import backward
from strobe.backends.tiled.forward import forward
from strobe.backends.tiled.slab import choose_blocks
from strobe.problem import Problem


def _details(problem: Problem) -> dict[str, object]:
    blocks = choose_blocks(problem)
    return {"block_q": blocks.q, "block_k": blocks.k}


def _extra_bytes(problem: Problem) -> int:
    """Two tiles of scores, the accumulators of a block of rows and, for gradients, those of all keys and values. Packed
    sequences may be put into another order."""
    blocks, size = choose_blocks(problem), problem.lse_dtype.itemsize
    rows = max(blocks.pairs * blocks.q * problem.group, blocks.scores // (problem.dim + problem.dim_v))
    extra = size * (2 * blocks.scores + rows * (problem.dim + problem.dim_v + 4))
    if problem.varlen:
        extra += (2 if problem.gradients else 1) * problem.bytes()
    if problem.gradients:
        extra += 2 * size * blocks.scores + size * problem.heads_k * problem.k.total * (problem.dim + problem.dim_v)
    return extra


BACKENDS = {
    "tiled": Backend(
        name="tiled",
        summary="FlashAttention in PyTorch tiles; every argument, any device",
        limits=lambda problem: None,
        bind=binder(forward, backward),
        details=_details,
        extra_bytes=_extra_bytes,
        can=Capabilities(pages=True, captured_gradients=True),
    )
}
