"""The forward for Hopper at head dims above 256, up to 512: the kernel of `forward_sm90`, one launch for each part of the
columns of V and O.

A consumer has registers for 64 rows and 256 columns of O. So the columns are divided into parts, which launches compute
one after the other, each with an S and P of its own: up to 1.5 times the products. To a launch, the columns of its part
are all that V and O have; they begin further on in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from strobe.cuda.parts.features import wide_features
from strobe.cuda.parts.kernel import TemplateKernel
from strobe.cuda.parts.plan import MAX_DIM, MAX_DIM_SM90, Dims, Launch, Machine, Plan, padded_dims
from strobe.cuda.plans import forward_sm90
from strobe.cuda.plans.forward_sm90 import ARCH, Tile, tma_limits
from strobe.problem import Problem, Strides

__all__ = ["DIMS", "TILES", "column_parts", "limits", "plan", "variants"]

DIMS: list[Dims] = [(384, 192), (512, 256)]  # of queries and keys, and of a part of the values

# K and V for one query tile fill shared memory. At 512 O has no room of its own and is staged over Q. Not swept.
TILES = {(384, 192): Tile(2, 48, q_slots=1, store_panels=1), (512, 256): Tile(2, 32, q_slots=1)}


def column_parts(dim_v: int) -> list[tuple[int, int]]:
    """(first, count): as few parts as possible, of whole panels of 64 columns but for the last."""
    count = -(-dim_v // MAX_DIM)
    width = 64 * -(-dim_v // (64 * count))
    return [(first, min(width, dim_v - first)) for first in range(0, dim_v, width)]


def limits(problem: Problem) -> str | None:
    if problem.gradients:
        return "no backward kernel"
    if (reason := tma_limits(problem, MAX_DIM_SM90)) is not None:
        return reason
    if problem.partial or problem.state is not None:
        return f"results that are merged with others; at head dims above {MAX_DIM} the kernels merge none"
    return None


def plan(problem: Problem, out_strides: Strides, machine: Machine, tile: Tile | None = None) -> Plan:
    parts = column_parts(problem.dim_v)
    dims = padded_dims([*forward_sm90.DIMS, *DIMS], problem.dim, parts[0][1])
    launches: list[Launch] = []
    for first, count in parts:
        part = replace(problem, dim_v=count)
        found = forward_sm90.plan(part, out_strides, machine, tile or TILES.get(dims), dims)
        begin = {"v": first * problem.dtype.itemsize, "o": first * problem.dtype.itemsize}
        own = found.launches[-1:] if launches else found.launches  # a launch that finds visible blocks serves all parts
        launches += [replace(launch, offsets=begin if first else {}) for launch in own]
    details = {**found.details, "parts of the columns of V": len(parts)}
    return Plan(tuple(launches), found.workspace, details)  # the parts use the workspace one after the other


def variants(arch: str = ARCH, *, exhaustive: bool = False) -> Iterator[TemplateKernel]:
    """The kernels that calls ask for."""
    for features in wide_features(DIMS, exhaustive):
        tile, varlen = TILES[features.dim, features.dim_v], features.rows.varlen
        for split in (False, True) if exhaustive or varlen else (False,):
            yield forward_sm90.kernel(features, tile, split=split, pack_gqa=1, one_box=not varlen)
