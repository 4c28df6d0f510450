"""The backward kernels for Hopper on fp32 inputs: tiles, plan, variants.

Four launches: `split_terms` writes q, k, v and dO in three bf16 terms each into the workspace, `delta` prepares the
statistics of rows, `dq_fp32_sm90` and `dkv_fp32_sm90` compute S and P each for themselves, as the kernels for head dims
above 128 do: nothing is summed up in memory, and the results are always deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from strobe.backends.backend import Capabilities
from strobe.cuda.parts import terms
from strobe.cuda.parts.architecture import HOPPER
from strobe.cuda.parts.element import FP32
from strobe.cuda.parts.features import Features
from strobe.cuda.parts.kernel import TemplateKernel, flags
from strobe.cuda.parts.params import Struct
from strobe.cuda.parts.plan import Dims, Machine, Plan, padded_dims
from strobe.cuda.parts.shared_memory import SharedMemory
from strobe.cuda.parts.terms import TERMS, as_terms, features_of, terms_map
from strobe.cuda.plans.backward_plan import (
    Half,
    Statistics,
    Wanted,
    delta_kernel,
    delta_launch,
    dkv_then_dq,
    without_bias_gradient,
)
from strobe.cuda.plans.backward_wide_sm90 import STAT_BLOCK, DkvTile, DqTile, common_config, dkv_params, dq_params
from strobe.cuda.plans.forward_fp32_sm90 import DIMS, fp32_features
from strobe.cuda.plans.forward_sm90 import ARCH
from strobe.cuda.plans.planner import Planner
from strobe.cuda.runtime.driver import TensorMapSpec
from strobe.problem import Problem, Strides
from strobe.variants.mask import causal

__all__ = ["DIMS", "PLANNER", "DKV_TILES", "DQ_TILES", "dkv_kernel", "dq_kernel", "plan", "variants"]

_MAPS = ("q_terms", "k_terms", "v_terms", "d_o_terms")

# What shared memory has room for; see `dq_fp32_sm90`: a buffer for each consumer. Not swept.
DQ_TILES: dict[Dims, DqTile] = {(64, 64): DqTile(64, 2, 2, block_m=64), (128, 128): DqTile(32, 2, 2, block_m=64)}
DKV_TILES: dict[Dims, DkvTile] = {(64, 64): DkvTile(64), (128, 128): DkvTile(32)}


def _kernel(
    template: str,
    features: Features,
    tile: DqTile | DkvTile,
    memory: SharedMemory,
    struct: Struct,
    sizes: dict[str, int | bool | str],
    block: int,
    end: str = "",
) -> TemplateKernel:
    """`block`: the keys, or queries, that it takes at a time."""
    one_box = not features.rows.clipped
    return features.kernel(
        template,
        tile,
        end,
        arch=ARCH,
        params=struct,
        threads=384,
        config={**common_config(features, one_box), **sizes},
        memory=memory,
        products=terms.products(features, block),
        facts={"one_box": one_box},
    )


def dq_kernel(features: Features, tile: DqTile | None = None) -> TemplateKernel:
    dim, dim_v = features.dim, features.dim_v
    tile = tile or DQ_TILES[dim, dim_v]
    memory = tile.memory(TERMS * dim, TERMS * dim_v)
    struct = dq_params(features.scores.fields(), _MAPS, buffers=False)
    return _kernel("dq_fp32_sm90", features, tile, memory, struct, tile.config(), tile.block_n)


def dkv_kernel(features: Features, parts: bool = False) -> TemplateKernel:
    dim, dim_v = features.dim, features.dim_v
    tile = DKV_TILES[dim, dim_v]
    memory = tile.memory(TERMS * dim, TERMS * dim_v, dropout=False)
    struct, sizes = dkv_params(features.scores.fields(), _MAPS, buffers=False), tile.config() | {"kGroupParts": parts}
    return _kernel("dkv_fp32_sm90", features, tile, memory, struct, sizes, tile.block_m, flags(parts=parts))


def _delta_kernel(features: Features, wanted: Wanted) -> TemplateKernel:
    return delta_kernel(replace(features, element=FP32), wanted, ARCH, STAT_BLOCK, 0)


def plan(problem: Problem, strides: Mapping[str, Strides], machine: Machine, tile: DqTile | None = None) -> Plan:
    """`tile`: of the kernel of dQ."""
    dims = padded_dims(DIMS, problem.dim, problem.dim_v)
    read = as_terms(problem, dims[0])
    features, wanted = features_of(read, dims).without_sinks(), Wanted.of(problem)
    statistics = Statistics.of(problem, STAT_BLOCK)
    tile, of_keys = tile or DQ_TILES[dims], DKV_TILES[dims]
    one_box = not features.rows.clipped

    def maps(block_m: int, block_n: int) -> dict[str, TensorMapSpec]:
        of_queries = terms_map(read, features.rows.queries, read.q, dims[0], block_m, one_box=one_box)
        of_keys = terms_map(read, features.rows.keys, read.k, dims[0], block_n, one_box=one_box)
        return dict(zip(_MAPS, (of_queries, of_keys, of_keys, of_queries), strict=True))

    dkv = dq = None
    if wanted.dkv:
        kernel = dkv_kernel(without_bias_gradient(features), problem.group_parts > 1)
        dkv = Half(kernel, 64, maps(of_keys.block_m, 64))
    if wanted.dq:
        dq = Half(dq_kernel(features, tile), 64, maps(64, tile.block_n))
    # It begins when the terms are there. The launch after it waits for this one alone, and relies on that.
    delta = delta_launch(problem, _delta_kernel(features, wanted), statistics, strides)
    launches, details = dkv_then_dq(problem, features, statistics, strides, machine, dkv, dq, tma=False)
    if not launches:
        return Plan((delta,), statistics.workspace, details)
    inputs = {**dict(zip("qkv", problem.strides, strict=True)), "d_o": strides["d_o"]}
    workspace = {**statistics.workspace, **terms.workspace(problem, dims[0], gradients=True)}
    details = {"inputs": "in three bf16 terms", **details}
    return Plan((terms.launch(problem, dims[0], ARCH, inputs), delta, *launches), workspace, details)


def variants(arch: str = ARCH, *, exhaustive: bool = False) -> Iterator[TemplateKernel]:
    """The kernels that calls ask for."""
    for dim, _ in DIMS:
        yield terms.kernel(dim, arch, gradients=True)
    for features in (f.without_sinks() for f in fp32_features(exhaustive)):
        yield dq_kernel(features)
        yield dkv_kernel(features)
        if exhaustive or features.scores.mask is causal:
            yield dkv_kernel(features, parts=True)
        for sinks in (False, True):
            yield _delta_kernel(features, Wanted(sinks=sinks))


PLANNER = Planner(
    name="backward_fp32_sm90",
    architecture=HOPPER,
    gradients=True,
    dtypes=terms.DTYPES,
    dims=DIMS,
    scope=terms.SCOPE,
    can=Capabilities(partial=False),
    further_limits=terms.limits,
    plan=plan,
    variants=variants,
)
