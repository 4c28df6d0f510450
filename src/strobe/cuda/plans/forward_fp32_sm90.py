"""The forward kernel for Hopper on fp32 inputs: tiles, plan, variants.

Two launches: `split_terms` writes q, k and v in three bf16 terms each into the workspace, 6 bytes a number of rows that
are padded to 64 or 128 columns, and `forward_fp32_sm90` reads them. A product of two fp32 matrices is six of bf16 ones
(tile/terms.cuh).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from strobe.backends.backend import Capabilities
from strobe.cuda.parts import terms
from strobe.cuda.parts.architecture import HOPPER
from strobe.cuda.parts.blocks import QUERY_TILE_FIELDS, query_tiles
from strobe.cuda.parts.features import Features
from strobe.cuda.parts.kernel import TemplateKernel
from strobe.cuda.parts.params import COUNTER, Field, Struct, params
from strobe.cuda.parts.plan import (
    ANY_MACHINE,
    Dims,
    Launch,
    Machine,
    Plan,
    first_without_spills,
    forward_details,
    pack_group,
    padded_dims,
)
from strobe.cuda.parts.rows import Rows, stride_fields
from strobe.cuda.parts.scores import Scores
from strobe.cuda.parts.shared_memory import Region, SharedMemory, ring_bytes
from strobe.cuda.parts.terms import TERMS, as_terms, features_of, terms_map
from strobe.cuda.plans.forward_sm90 import ARCH
from strobe.cuda.plans.planner import Planner
from strobe.problem import Problem, Strides
from strobe.variants.mask import causal, full
from strobe.variants.ready_made import window
from strobe.variants.score import identity, softcap

__all__ = ["DIMS", "PLANNER", "TILES", "Tile", "kernel", "plan", "variants"]

DIMS: list[Dims] = [(64, 64), (128, 128)]
CONSUMERS = 2
REGISTERS = (40, 232)  # of a thread of the producer and of a consumer


@functools.cache
def _params(scores: tuple[Field, ...]) -> Struct:
    return params(
        [Field("sinks", "const float*"), Field("o", "float*"), Field("lse", "float*"), Field(COUNTER, "u32*")],
        stride_fields("o"),
        [Field("lse_batch", "i64"), Field("lse_head", "i64")],
        Rows.fields(tma=False),
        scores,
        QUERY_TILE_FIELDS,
        [Field(f"map_{t}_terms", "TensorMap") for t in "qkv"],
    )


@dataclass(frozen=True)
class Tile:
    """64 queries for each of two consumers."""

    block_n: int = 64  # keys at a time
    stages: int = 1  # buffers for K and for V
    q_slots: int = 1  # query tiles in shared memory

    def __str__(self) -> str:
        return f"{64 * CONSUMERS}x{self.block_n} s{self.stages} q{self.q_slots}"

    def memory(self, dim: int, dim_v: int) -> SharedMemory:
        return SharedMemory(
            [
                Region("q", terms.ELEMENT.tile_bytes(64, TERMS * dim), self.q_slots * CONSUMERS),
                Region("k", terms.ELEMENT.tile_bytes(self.block_n, TERMS * dim), self.stages),
                Region("v", terms.ELEMENT.tile_bytes(self.block_n, TERMS * dim_v), self.stages),
                Region("ring_q", ring_bytes(self.q_slots)),
                Region("ring_k", ring_bytes(self.stages)),
                Region("ring_v", ring_bytes(self.stages)),
                Region("tile_info", 32, self.q_slots),
            ]
        )


# At 128 K and V of 64 keys fill what Q leaves; with 32 keys and two buffers, reading Q for S = Q K^T would take longer than
# the product. Not swept.
TILES = {(64, 64): Tile(stages=2, q_slots=2), (128, 128): Tile()}
_SMALLER = {(64, 64): Tile(32, stages=3, q_slots=2), (128, 128): Tile(32, stages=2)}


def choose_tile(features: Features, machine: Machine = ANY_MACHINE) -> Tile:
    """A score function that no table knows gets the first tile whose kernel does not spill."""
    dims = features.dim, features.dim_v
    if not features.scores.is_unknown:
        return TILES[dims]
    return first_without_spills([TILES[dims], _SMALLER[dims]], lambda t: kernel(features, t), machine)


def kernel(features: Features, tile: Tile) -> TemplateKernel:
    n, memory = tile.block_n, tile.memory(features.dim, features.dim_v)
    config = {
        **features.config(),
        "kBlockM": 64 * CONSUMERS,
        "kBlockN": n,
        "kConsumers": CONSUMERS,
        "kStages": tile.stages,
        "kQSlots": tile.q_slots,
        "kRegsProducer": REGISTERS[0],
        "kRegsConsumer": REGISTERS[1],
        "kThreads": 128 * (CONSUMERS + 1),
        "kOneBoxPerTile": not features.rows.clipped,
    }
    return features.kernel(
        "forward_fp32_sm90",
        tile,
        arch=ARCH,
        params=_params(features.scores.fields()),
        threads=128 * (CONSUMERS + 1),
        config=config,
        memory=memory,
        products=terms.products(features, n),
        facts={"one_box": not features.rows.clipped},
    )


def plan(problem: Problem, strides: Mapping[str, Strides], machine: Machine, tile: Tile | None = None) -> Plan:
    packed, out_strides = pack_group(problem, strides["o"])
    dims = padded_dims(DIMS, problem.dim, problem.dim_v)
    read = as_terms(packed, dims[0])
    features = features_of(read, dims)
    tile = tile or choose_tile(features, machine)
    spec = kernel(features, tile)
    in_l2 = replace(read, dim=TERMS * dims[0], dim_v=TERMS * dims[1])  # what the L2 holds of a head
    schedule = query_tiles(in_l2, 64 * CONSUMERS, machine.l2_bytes)
    values = features.values(packed, {"o": out_strides}, schedule, tma=False)
    one_box = not features.rows.clipped
    maps = {
        "q_terms": terms_map(read, features.rows.queries, read.q, dims[0], 64, one_box=one_box),
        "k_terms": terms_map(read, features.rows.keys, read.k, dims[0], tile.block_n, one_box=one_box),
        "v_terms": terms_map(read, features.rows.keys, read.k, dims[1], tile.block_n, one_box=one_box),
    }
    grid = min(schedule["tiles"], machine.sms)
    details = forward_details(spec, 64 * CONSUMERS, tile.block_n, grid) | {"inputs": "in three bf16 terms"}
    in_terms = terms.launch(packed, dims[0], ARCH, dict(zip("qkv", packed.strides, strict=True)))
    launches = in_terms, Launch(spec, grid, values, maps, overlaps=True)
    return Plan(launches, terms.workspace(packed, dims[0]), details)


def variants(arch: str = ARCH, *, exhaustive: bool = False) -> Iterator[TemplateKernel]:
    """The kernels that calls ask for."""
    for dim, _ in DIMS:
        yield terms.kernel(dim, arch, gradients=False)
    for features in fp32_features(exhaustive):
        yield kernel(features, choose_tile(features))


def fp32_features(exhaustive: bool) -> Iterator[Features]:
    """Yield the features of both directions: plain, varlen, and with all that takes registers."""
    varlen, capped = Rows("varlen", "varlen"), softcap(30.0)
    for (dim, dim_v), mask in itertools.product(DIMS, (full, causal, window(1, 1))):
        plain = Features(terms.ELEMENT, dim, dim_v, Scores(mask), inputs=terms.INPUTS)
        yield plain
        yield replace(plain, rows=varlen)
        if exhaustive or mask.lo is not None:
            yield replace(plain, scores=Scores(mask, capped, sinks=True), rows=varlen)
        if exhaustive:
            for score in (identity, capped):
                yield replace(plain, scores=Scores(mask, score, sinks=True))


PLANNER = Planner(
    name="forward_fp32_sm90",
    architecture=HOPPER,
    dtypes=terms.DTYPES,
    dims=DIMS,
    scope=terms.SCOPE,
    can=Capabilities(partial=False),
    further_limits=terms.limits,
    plan=plan,
    variants=variants,
)
