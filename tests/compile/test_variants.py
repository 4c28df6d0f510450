"""Every kernel variant that a plan can produce compiles for its architecture: nothing spills, and Python's arguments
fit.

The common variants are compiled for sm_80 and sm_90a each time, but for those that lie between two others. The other
architectures compile the templates of sm_80: one of each every time, the rest in `make test-all`.
STROBE_EXHAUSTIVE=1 compiles every combination of features for every architecture."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import cubins
import pytest

from strobe.cuda.parts.architecture import SMEM_BYTES, generation
from strobe.cuda.parts.element import BF16
from strobe.cuda.parts.features import Features
from strobe.cuda.parts.kernel import TemplateKernel
from strobe.cuda.parts.output import Output
from strobe.cuda.parts.plan import Dims
from strobe.cuda.parts.rows import Rows
from strobe.cuda.parts.scores import Scores
from strobe.cuda.plans import decode_sm80, families, forward_sm90
from strobe.cuda.runtime import jit, ptxas_log
from strobe.variants.mask import Mask, causal, used_keys
from strobe.variants.ready_made import window
from strobe.variants.score import softcap

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")
EXHAUSTIVE = bool(os.environ.get("STROBE_EXHAUSTIVE"))

pytestmark = pytest.mark.skipif(jit.nvrtc_status() is not None, reason=str(jit.nvrtc_status()))


def selected(arch: str) -> list[TemplateKernel]:
    """Select, by default: all head dims, the mask that needs the most registers with all features and with rounded head
    dims, plain kernels of the other types, dropout, results in fp32, and those that are merged with such. The type
    hardly shows in registers, so what has dropout is compiled for one."""
    if EXHAUSTIVE:
        return list(families.variants(arch, exhaustive=True)) + packed_gqa(arch) + invariant(arch, forward_sm90.DIMS)
    found = []
    for kernel in families.variants(arch):
        facts = kernel.facts
        window = "window" in kernel.name  # with used keys alone it is no other mask
        everything = kernel.element == "bf16" and window and facts["varlen"]
        has_dropout, other_type = facts.get("dropout", False), kernel.element == "fp16" or "inputs" in facts
        dropped = kernel.element == "bf16" and has_dropout and facts["dim"] in (64, 128)
        plain = other_type and not window and not facts.get("varlen", False) and not has_dropout
        shards = kernel.element == "bf16" and has(kernel, "kPartialOut") and facts.get("dim", 64) in (64, 128)
        shards = shards or (kernel.element == "bf16" and facts.get("rounds_state", False))
        if everything or dropped or shards or (plain and facts.get("dim", 64) in (64, 128)):
            found.append(kernel)
    return found + packed_gqa(arch) + invariant(arch, [(128, 128)])


def packed_gqa(arch: str) -> list[TemplateKernel]:
    """Groups of 2 and of 64 heads; elsewhere 8 stands for any."""
    if arch != forward_sm90.ARCH:
        features = Features(BF16, 128, 128, Scores(window(1, 1), softcap(30.0), sinks=True))
        tile = decode_sm80.choose_tile(features, 32, arch)
        return [decode_sm80.kernel(features, tile, arch, split=True, pack=2, exact_dims=False)]
    found = []
    for dim, dim_v in forward_sm90.DIMS:
        features = Features(BF16, dim, dim_v, Scores(window(1, 1), softcap(30.0), sinks=True))
        tile = forward_sm90.split_tiles(features)[0]
        found += [forward_sm90.kernel(features, tile, split=True, pack_gqa=n, one_box=False) for n in (2, 64)]
    return found


def invariant(arch: str, dims: list[Dims]) -> list[TemplateKernel]:
    """Paged calls whose rows have the same bits whatever is beside them, in pages that are boxes and in gathered rows."""
    found = []
    for (dim, dim_v), page in itertools.product(dims, (16, 1)):
        scores = Scores(window(1, 1) & used_keys, softcap(30.0), sinks=True)
        rows = Rows("varlen", "paged", True, page)
        features = Features(BF16, dim, dim_v, scores, rows, Output(invariant=True))
        if arch != forward_sm90.ARCH:
            if page == 1:
                tile = decode_sm80.choose_tile(features, 32, arch)
                found.append(decode_sm80.kernel(features, tile, arch, split=True, pack=4, exact_dims=False))
            continue
        tile = forward_sm90.split_tiles(features)[0]
        found.append(forward_sm90.kernel(features, tile, split=True, pack_gqa=4, one_box=False))
    return found


def usual(arch: str) -> list[TemplateKernel]:
    """Return the selected kernels but those between two others: with dropout, a diagonal lies between no mask and a
    window, unless a group is in parts; rounded states of other head dims than 64 and 128 are compiled with the window
    alone, and kernels for few queries are compiled for three head dims."""
    found = []
    for kernel in selected(arch):
        facts = kernel.facts
        between = facts.get("mask") == "causal" and facts.get("dropout", False) and not has(kernel, "kGroupParts")
        other = facts.get("rounds_state", False) and facts.get("mask") != "window" and facts["dim"] not in (64, 128)
        rare = kernel.template == "decode_sm80" and facts["dim"] not in (64, 128, 256)
        if not between and not other and not rare:
            found.append(kernel)
    return found


def few(arch: str) -> list[TemplateKernel]:
    """Return one of the selected kernels of each template: another one for each architecture."""
    by_template: dict[str, list[TemplateKernel]] = {}
    for kernel in selected(arch):
        by_template.setdefault(kernel.template, []).append(kernel)
    return [kernels[ARCHS.index(arch) * (len(kernels) - 1) // (len(ARCHS) - 1)] for kernels in by_template.values()]


@pytest.mark.thorough
@pytest.mark.parametrize("arch", ARCHS)
def test_variants_compile_without_spills(arch: str) -> None:
    check_all(selected(arch), arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_usual_variants_compile_without_spills(arch: str) -> None:
    kernels = usual(arch)
    assert {k.template for k in kernels} == {k.template for k in selected(arch)}
    check_all(kernels, arch)


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch not in ("sm_80", "sm_90a")])
def test_a_few_variants_compile_without_spills(arch: str) -> None:
    kernels = few(arch)
    assert len(kernels) == 5
    check_all(kernels, arch)


def check_all(kernels: list[TemplateKernel], arch: str) -> None:
    def build(kernel: TemplateKernel) -> tuple[TemplateKernel, jit.Artifact]:
        return kernel, jit.get(kernel.source, arch, name=kernel.name)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = list(pool.map(build, kernels))
    assert built
    wrong = []
    for kernel, artifact in built:
        info = cubins.inspect(artifact.cubin)[kernel.entry]
        if info.stack_frame > allowed_stack(kernel) or ptxas_log.warnings(artifact.log):
            wrong.append(f"{kernel.name}: {info.stack_frame} bytes of stack, {ptxas_log.warnings(artifact.log)}")
        assert [size for _, size in info.params] == [kernel.params.size], kernel.name
        assert kernel.smem <= SMEM_BYTES[generation(arch)], kernel.name
        assert info.registers * kernel.threads * kernel.blocks_per_sm <= 65536, kernel.name
        assert warpgroups_fit(kernel, info.registers), kernel.name
    assert not wrong, "\n".join(wrong)


def allowed_stack(kernel: TemplateKernel) -> int:
    """Bytes a thread. Spilled registers are the only stack there is. The cubin tells its size, be it compiled now or found
    in the cache. These kernels fill the registers; with dropout, sums in order, a softcap, or gradients in fp32, a few
    do not fit."""
    if kernel.template == "forward_sm90" and kernel.facts["dim"] == 384 and has(kernel, "kSplit"):
        return 32  # windows with a softcap
    if kernel.template == "decode_sm80" and kernel.facts["dim"] == 256:
        return 48  # windows with a softcap and sinks
    if kernel.template not in ("backward_sm90", "backward_sm80", "forward_sm80"):
        return 0
    if kernel.facts["dropout"]:
        return 56 if kernel.facts.get("rotate") else 24  # deterministic sums without a mask at head dim 64
    if kernel.template == "backward_sm80" and kernel.arch == "sm_90" and kernel.element == "fp16":
        return 48  # a diagonal at head dim 64; in bf16 there are none
    backward = "backward" in kernel.template
    crowded = kernel.facts.get("deterministic") or (backward and kernel.facts["softcap"])
    if backward and has(kernel, "kPartialOut"):
        return 48  # packed shards on sm80 at head dim 64; others have 16 at most
    return 16 if crowded else 0


def has(kernel: TemplateKernel, flag: str) -> bool:
    return bool(dict(kernel.config).get(flag, False))


def warpgroups_fit(kernel: TemplateKernel, registers: int) -> bool:
    """A warpgroup that asks for more registers than the others have given back waits for ever."""
    config = dict(kernel.config)
    if "kRegsConsumer" not in config:
        return True
    consumers = kernel.threads // 128 - 1
    return 128 * (config["kRegsProducer"] + consumers * config["kRegsConsumer"]) <= registers * kernel.threads


def test_masks_of_one_shape_share_a_kernel() -> None:
    def source(mask: Mask) -> str:
        features = Features(BF16, 64, 64, Scores(mask))
        tile = forward_sm90.choose_tile(features)
        return forward_sm90.kernel(features, tile, split=False, pack_gqa=1, one_box=True).source

    assert source(window(5, 7)) == source(window(100, 0))
    assert source(causal) == source(window(None, 3))
    assert source(causal) != source(window(3, None))
