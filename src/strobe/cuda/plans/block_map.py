"""Block-sparse calls: a kernel finds out on the device which blocks the score's condition lets through. The attention
kernel after it visits those.

The bits of a tile say which blocks have a visible pair and which a hidden one (pipeline/block_bits.cuh). Blocks without
a visible pair are neither loaded nor computed. In blocks without a hidden pair the condition is not evaluated.
"""

from __future__ import annotations

from typing import NamedTuple

from strobe.cuda.parts import print_condition, print_mask
from strobe.cuda.parts.features import Features
from strobe.cuda.parts.kernel import TemplateKernel, flags, template_kernel
from strobe.cuda.parts.params import Field, params
from strobe.cuda.parts.plan import MAP, Launch
from strobe.cuda.parts.rows import Rows
from strobe.cuda.parts.scores import MAP_FIELDS, entry_fields, mask_values, number_fields, number_values
from strobe.cuda.parts.shared_memory import Region, SharedMemory
from strobe.problem import Problem
from strobe.variants.mask import MAX_CONSTANTS

LEAST_KEYS = 1024  # an estimate: below, there are few blocks to leave out, and one more launch costs as much
_OWN = [
    Field(MAP, "u32*"),
    *MAP_FIELDS[1:],
    Field("mask", "int", MAX_CONSTANTS),
    *(Field(n, "int") for n in ("map_heads", "map_tiles", "heads_in_one")),
]


def pays(problem: Problem) -> bool:
    long = problem.len_k >= LEAST_KEYS and problem.len_q >= 128
    return long and problem.logit.condition is not None and problem.k.pages is None


class BlockMap(NamedTuple):
    """The launch that makes the bits, their size, and the values of the kernel that reads them."""

    launch: Launch
    workspace: dict[str, int]
    values: dict[str, int]


def block_map(
    problem: Problem, features: Features, arch: str, block_m: int, block_n: int, *, transposed: bool
) -> BlockMap:
    """Return the map of tiles of `block_m` queries that visit blocks of `block_n` keys or, transposed, the other way
    round. A transposed map is for key heads: a block counts as visible if one head of the group sees it."""
    condition, printed = problem.logit.condition, _printed(features)
    assert condition is not None
    blocks_q, blocks_k = -(-problem.len_q // block_m), -(-problem.len_k // block_n)
    tiles, blocks = (blocks_k, blocks_q) if transposed else (blocks_q, blocks_k)
    by_batch = "b" in condition.variables() or problem.varlen or problem.positions
    by_head = "h" in condition.variables()
    heads = problem.heads_k if transposed else problem.heads
    words = -(-blocks // 32)
    slices = (problem.batch if by_batch else 1, heads if by_head else 1)
    strides = {
        "map_batch": tiles * 2 * words * slices[1] if by_batch else 0,
        "map_head": tiles * 2 * words if by_head else 0,
        "map_words": words,
    }
    fields = {
        "map_heads": slices[1] if by_head else 0,
        "map_tiles": tiles,
        "heads_in_one": problem.heads // problem.heads_k if transposed and by_head else 1,
    }
    values = {
        **features.rows.values(problem, tma=False),
        **number_values(printed.fields.values()),
        **{f"{problem.loads[i].name}_strides": problem.loads[i].strides for i in printed.entries},
        "mask": mask_values(problem.mask),
        **strides,
        **fields,
    }
    spec = kernel(features, arch, block_m, block_n, transposed=transposed)
    count = slices[0] * slices[1] * tiles
    launch = Launch(spec, count * words, values)
    return BlockMap(launch, {MAP: 4 * count * 2 * words}, strides)


def kernel(features: Features, arch: str, block_m: int, block_n: int, *, transposed: bool) -> TemplateKernel:
    printed = _printed(features)
    config = {**features.rows.config(), "kBlockM": block_m, "kBlockN": block_n, "kTransposed": transposed}
    return template_kernel(
        "block_map",
        f"{features.scores.name} {block_m}x{block_n}{flags(transposed=transposed)}",
        arch=arch,
        params=params(
            Rows.fields(tma=False), number_fields(printed.fields), entry_fields(printed.entries.values()), _OWN
        ),
        threads=1024,
        element=features.element.name,
        config=config,
        memory=SharedMemory([Region("seen", 128)]),
        types=(
            ("Mask", print_mask.struct(features.scores.mask, features.rows.positions)),
            ("Condition", printed.text),
        ),
    )


def _printed(features: Features) -> print_condition.PrintedCondition:
    condition = features.scores.score.condition
    assert condition is not None
    return print_condition.printed(condition, features.scores.entries)
