"""Every kernel variant that a plan can produce compiles for its architecture: nothing spills, and Python's arguments
fit.

The common variants are compiled each time; STROBE_EXHAUSTIVE=1 compiles every combination of features for every
architecture."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import cubins
import pytest
from strobe.cuda.tiles import SMEM_BYTES, generation

from strobe.cuda import cubin, jit, plan

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")
EXHAUSTIVE = bool(os.environ.get("STROBE_EXHAUSTIVE"))

pytestmark = pytest.mark.skipif(jit.nvrtc_status() is not None, reason=str(jit.nvrtc_status()))


def selected(arch: str) -> list[plan.Variant]:
    """By default: all head dims, the mask that needs the most registers with all features and with rounded head dims,
    and plain ones of the other type."""
    every = list(plan.variants(arch, exhaustive=True))
    folded = [
        v for v in every if v.fold > 1 and v.softcap and v.sinks and v.mask.lo is not None and v.element == "bf16"
    ]
    folded = [replace(v, fold=fold) for v in folded for fold in (2, 64)]  # elsewhere 8 stands for any
    if EXHAUSTIVE:
        return every + folded
    bf16 = [v for v in plan.variants(arch) if v.element == "bf16" and v.mask.lo is not None]
    found = [v for v in bf16 if v.packed or not v.whole_dims]
    plain = [v for v in plan.variants(arch) if v.element == "fp16" and not v.packed and v.mask.lo is None]
    return found + folded + [v for v in plain if v.dim in (64, 128)]


@pytest.mark.parametrize("arch", ARCHS)
def test_variants_compile_without_spills(arch: str) -> None:
    def build(variant: plan.Variant) -> tuple[plan.Variant, jit.Artifact]:
        return variant, jit.get(variant.source, arch, name=variant.name)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = list(pool.map(build, selected(arch)))
    assert built
    wrong = []
    for variant, artifact in built:
        info = cubins.inspect(artifact.cubin)["kernel"]
        spilled = cubin.spills(artifact.log) if artifact.origin == "compiled" else info.stack_frame
        if spilled or info.stack_frame or cubin.warnings(artifact.log):
            wrong.append(
                f"{variant.name}: {spilled} bytes spilled, stack {info.stack_frame}, {cubin.warnings(artifact.log)}"
            )
        assert [size for _, size in info.params] == [variant.params.size], variant.name
        assert variant.smem <= SMEM_BYTES[generation(arch)], variant.name
        assert info.registers * variant.threads * variant.tile.blocks_per_sm <= 65536, variant.name
    assert not wrong, "\n".join(wrong)


def test_masks_of_one_shape_share_a_kernel() -> None:
    from strobe.mask import causal, window

    assert plan.shape_of(window(5, 7)) is plan.shape_of(window(100, 0))
    assert plan.shape_of(causal) is plan.shape_of(window(None, 3))
    assert plan.shape_of(causal) is not plan.shape_of(window(3, None))
