"""The backward kernels for Hopper on fp32 inputs: limits, tiles, plan, variants.

Four launches: `split_terms` writes q, k, v and dO in three bf16 terms each into the workspace, `delta` prepares the
statistics of rows, `dq_fp32_sm90` and `dkv_fp32_sm90` compute S and P each for themselves, as the kernels for head dims
above 128 do: nothing is summed up in memory, and the results are always deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from strobe.cuda.parts import terms
from strobe.cuda.parts.blocks import key_tiles, query_tiles
from strobe.cuda.parts.features import Features
from strobe.cuda.parts.kernel import TemplateKernel
from strobe.cuda.parts.params import Struct
from strobe.cuda.parts.plan import Dims, Launch, Machine, Plan, padded_dims
from strobe.cuda.parts.shared_memory import SharedMemory
from strobe.cuda.parts.terms import TERMS, as_terms, terms_map
from strobe.cuda.plans.backward_plan import (
    Statistics,
    Wanted,
    bias_gradient_values,
    delta_kernel,
    delta_launch,
    gradient_strides,
    in_parts,
    score_values,
)
from strobe.cuda.plans.backward_wide_sm90 import STAT_BLOCK, DkvTile, DqTile, common_config, dkv_params, dq_params
from strobe.cuda.plans.forward_fp32_sm90 import DIMS, fp32_features
from strobe.cuda.plans.forward_sm90 import ARCH
from strobe.cuda.runtime.driver import TensorMapSpec
from strobe.problem import Problem, Strides
from strobe.variants.mask import causal

__all__ = ["DIMS", "DKV_TILES", "DQ_TILES", "dkv_kernel", "dq_kernel", "limits", "plan", "variants"]

_MAPS = ("q_terms", "k_terms", "v_terms", "d_o_terms")

# What shared memory has room for; see `dq_fp32_sm90`: a buffer for each consumer. Not swept.
DQ_TILES: dict[Dims, DqTile] = {(64, 64): DqTile(64, 2, 2, block_m=64), (128, 128): DqTile(32, 2, 2, block_m=64)}
DKV_TILES: dict[Dims, DkvTile] = {(64, 64): DkvTile(64), (128, 128): DkvTile(32)}


def limits(problem: Problem) -> str | None:
    return terms.limits(problem) if problem.gradients else "no forward kernel"


def _kernel(
    template: str,
    features: Features,
    tile: DqTile | DkvTile,
    memory: SharedMemory,
    struct: Struct,
    sizes: dict[str, int | bool | str],
    block: int,
    flags: str = "",
) -> TemplateKernel:
    """`block`: the keys, or queries, that it takes at a time."""
    one_box = not features.rows.clipped
    return TemplateKernel(
        name=f"{template}[{features.name.replace(terms.ELEMENT, 'fp32', 1)} {tile}{flags}]",
        arch=ARCH,
        params=struct,
        threads=384,
        smem=memory.size,
        header=template,
        template=template,
        label=replace(features, element="fp32").label(),
        element=features.element,
        config=tuple({**common_config(features, one_box), **sizes}.items()),
        memory=memory,
        types=features.types(),
        products=terms.products(features, block),
        facts={**features.facts(), "fp32": True, "tile": str(tile), "one_box": one_box},
    )


def dq_kernel(features: Features) -> TemplateKernel:
    dim, dim_v = features.dim, features.dim_v
    tile = DQ_TILES[dim, dim_v]
    memory = tile.memory(TERMS * dim, TERMS * dim_v)
    struct = dq_params(features.scores.fields(), _MAPS, buffers=False)
    return _kernel("dq_fp32_sm90", features, tile, memory, struct, tile.config(), tile.block_n)


def dkv_kernel(features: Features, parts: bool = False) -> TemplateKernel:
    dim, dim_v = features.dim, features.dim_v
    tile = DKV_TILES[dim, dim_v]
    memory, flags = tile.memory(TERMS * dim, TERMS * dim_v, dropout=False), " parts" if parts else ""
    struct, sizes = dkv_params(features.scores.fields(), _MAPS, buffers=False), tile.config() | {"kGroupParts": parts}
    return _kernel("dkv_fp32_sm90", features, tile, memory, struct, sizes, tile.block_m, flags)


def _delta_kernel(features: Features, wanted: Wanted) -> TemplateKernel:
    made = delta_kernel(replace(features, element="float"), wanted, ARCH, STAT_BLOCK, 0)
    return replace(made, facts={"fp32": True})


def plan(problem: Problem, strides: dict[str, Strides], machine: Machine) -> Plan:
    """`strides`: of o, d_o and the gradients."""
    dims = padded_dims(DIMS, problem.dim, problem.dim_v)
    read = as_terms(problem, dims[0])
    features, wanted = Features.of(read, dims).without_sinks(), Wanted.of(problem)
    statistics = Statistics.of(problem, STAT_BLOCK)
    inputs = {**dict(zip("qkv", problem.strides, strict=True)), "d_o": strides["d_o"]}
    workspace, launches, details = dict(statistics.workspace), [], {}
    if wanted.dq or wanted.dkv:
        workspace |= terms.workspace(problem, dims[0], gradients=True)
        launches.append(terms.launch(problem, dims[0], ARCH, inputs))
        details["inputs"] = "in three bf16 terms"
    # It begins when the terms are there. The launch after it waits for this one alone, and relies on that.
    launches.append(delta_launch(problem, _delta_kernel(features, wanted), statistics, strides))
    shared, parts = {**score_values(problem), **statistics.values()}, in_parts(problem)

    def maps(block_m: int, block_n: int) -> dict[str, TensorMapSpec]:
        one_box = not features.rows.clipped
        of_queries = terms_map(read, features.rows.queries, read.q, dims[0], block_m, one_box=one_box)
        of_keys = terms_map(read, features.rows.keys, read.k, dims[0], block_n, one_box=one_box)
        return dict(zip(_MAPS, (of_queries, of_keys, of_keys, of_queries), strict=True))

    if wanted.dkv:
        plain = replace(features, scores=replace(features.scores, bias_gradient=""))  # dQ's kernel computes that
        kernel, schedule = dkv_kernel(plain, problem.group_parts > 1), key_tiles(parts, 64, machine.sms)
        grid = schedule["key_blocks"] * problem.batch * parts.heads_k
        own = {**features.rows.values(parts, tma=False), **schedule, **gradient_strides(strides, "dk", "dv")}
        launches.append(Launch(kernel, grid, shared | own, maps(DKV_TILES[dims].block_m, 64), overlaps=True))
        details |= {"backward kernel for dK, dV": kernel.name}
    if wanted.dq:
        kernel, schedule = dq_kernel(features), query_tiles(problem, 64, machine.l2_bytes)
        own = {**features.rows.values(problem, tma=False), **schedule, **gradient_strides(strides, "dq")}
        own |= bias_gradient_values(problem, strides)
        found = maps(64, DQ_TILES[dims].block_n)
        launches.append(Launch(kernel, schedule["tiles"], shared | own, found, overlaps=not wanted.dkv))
        details |= {"backward kernel for dQ": kernel.name}
    return Plan(tuple(launches), workspace, details)


def variants(arch: str = ARCH, *, exhaustive: bool = False) -> Iterator[TemplateKernel]:
    """The kernels that calls ask for."""
    for dim, _ in DIMS:
        yield terms.kernel(dim, arch, gradients=True)
    seen: set[TemplateKernel] = set()
    for features in fp32_features(exhaustive):
        features = features.without_sinks()
        made = [dq_kernel(features), dkv_kernel(features)]
        if exhaustive or features.scores.mask is causal:
            made.append(dkv_kernel(features, parts=True))
        made += [_delta_kernel(features, Wanted(sinks=sinks)) for sinks in (False, True)]
        for kernel in made:
            if kernel not in seen:
                seen.add(kernel)
                yield kernel
