"""The forward for Hopper at head dims above 256, up to 512: the kernel of `forward_sm90`, one launch for each part of the
columns of V and O.

A consumer has registers for 64 rows and 256 columns of O. So the columns are divided into parts, which launches compute
one after the other, each with an S and P of its own: up to 1.5 times the products. To a launch, the columns of its part
are all that V and O have; they begin further on in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from strobe.backends.backend import Capabilities
from strobe.cuda.parts.architecture import HOPPER
from strobe.cuda.parts.features import wide_features
from strobe.cuda.parts.kernel import TemplateKernel
from strobe.cuda.parts.plan import MAX_DIM, Dims, Machine, Plan, padded_dims
from strobe.cuda.parts.tensor_maps import tma_limits
from strobe.cuda.plans import forward_sm90
from strobe.cuda.plans.forward_sm90 import ARCH, Tile
from strobe.cuda.plans.planner import Planner
from strobe.problem import Problem, Strides

__all__ = ["DIMS", "PLANNER", "TILES", "column_parts", "plan", "variants"]

DIMS: list[Dims] = [(384, 192), (512, 256)]  # of queries and keys, and of a part of the values

# K and V for one query tile fill shared memory. At 512 O has no room of its own and is staged over Q. Not swept.
TILES = {(384, 192): Tile(2, 48, q_slots=1, store_panels=1), (512, 256): Tile(2, 32, q_slots=1)}


def column_parts(dim_v: int) -> list[tuple[int, int]]:
    """(first, count): as few parts as possible, of whole panels of 64 columns but for the last."""
    count = -(-dim_v // MAX_DIM)
    width = 64 * -(-dim_v // (64 * count))
    return [(first, min(width, dim_v - first)) for first in range(0, dim_v, width)]


def plan(problem: Problem, strides: Mapping[str, Strides], machine: Machine, tile: Tile | None = None) -> Plan:
    parts = column_parts(problem.dim_v)
    dims = padded_dims([*forward_sm90.DIMS, *DIMS], problem.dim, parts[0][1])
    plans = [
        forward_sm90.plan(replace(problem, dim_v=count), strides, machine, tile or TILES.get(dims), dims)
        for _, count in parts
    ]
    launches = [*plans[0].launches]
    for (first, _), part in zip(parts[1:], plans[1:], strict=True):
        begin = first * problem.dtype.itemsize
        # A launch that finds visible blocks serves all parts.
        launches.append(replace(part.launches[-1], offsets={"v": begin, "o": begin}))
    details = {**plans[-1].details, "parts of the columns of V": len(parts)}
    return Plan(tuple(launches), plans[-1].workspace, details)  # the parts use the workspace one after the other


def variants(arch: str = ARCH, *, exhaustive: bool = False) -> Iterator[TemplateKernel]:
    """The kernels that calls ask for."""
    for features in wide_features(DIMS, exhaustive):
        tile, varlen = TILES[features.dim, features.dim_v], features.rows.varlen
        for split in (False, True) if exhaustive or varlen else (False,):
            yield forward_sm90.kernel(features, tile, split=split, pack_gqa=1, one_box=not varlen)


PLANNER = Planner(
    name="forward_wide_sm90",
    architecture=HOPPER,
    dims=[(dim, dim) for dim, _ in DIMS],
    scope=f"above head dim {MAX_DIM}",
    can=Capabilities(pages=True, invariant=True, partial=False),
    further_limits=tma_limits,
    plan=plan,
    variants=variants,
)
