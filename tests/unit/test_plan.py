"""Plans lead from a problem to launches: padded head dims, tensor maps that the hardware takes, sources that do not
depend on what may change between calls."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import replace

import pytest
import torch
from cases import Case
from everyday import everyday
from fake_gpu import H200
from hypothesis import given, settings, strategies as st
from kernel_cases import SUPPORTED
from oracle import check, prepare

from strobe.cuda.parts.architecture import SMEM_BYTES, generation
from strobe.cuda.parts.blocks import key_tiles, section
from strobe.cuda.parts.element import BF16, FP32
from strobe.cuda.parts.kernel import TemplateKernel
from strobe.cuda.parts.plan import MAX_DIM, Launch, Machine, Plan, pack_group, padded_dims
from strobe.cuda.parts.rows import pack_gqa_of
from strobe.cuda.parts.tensor_maps import FAR
from strobe.cuda.plans import families, forward_sm80, forward_sm90
from strobe.cuda.runtime import jit
from strobe.problem import Problem
from strobe.tools import tune_backward
from strobe.variants.mask import Mask, causal, causal_top_left, full
from strobe.variants.ready_made import chunked, prefix, window

FORWARD = {"sm_80": forward_sm80, "sm_90a": forward_sm90}
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


def problem_of(case: Case, dtype: torch.dtype = torch.bfloat16) -> Problem:
    return prepare(case, dtype)[0]


def out_strides(p: Problem) -> tuple[int, int, int]:
    rows = p.q.total if p.varlen else p.len_q
    return rows * p.heads * p.dim_v, p.dim_v, p.heads * p.dim_v


A100 = Machine("sm_80", sms=108, l2_bytes=40 << 20, smem_bytes=163 << 10)


def plan_sm80(p: Problem) -> Plan:
    return forward_sm80.plan(p, {"o": out_strides(p)}, A100)


def plan_sm90(p: Problem, machine: Machine = H200) -> Plan:
    return forward_sm90.plan(p, {"o": out_strides(p)}, machine)


def plans(p: Problem) -> list[Plan]:
    return [plan_sm80(p), plan_sm90(p)]


def only(found: Plan) -> Launch:
    (launch,) = found.launches
    return launch


def kernel_of(found: Plan) -> TemplateKernel:
    kernel = only(found).kernel
    assert isinstance(kernel, TemplateKernel)
    return kernel


# ---- head dims -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dims", [forward_sm80.DIMS, forward_sm90.DIMS], ids=["sm80", "sm90"])
def test_every_head_dim_has_a_kernel(dims: list[tuple[int, int]]) -> None:
    steps = range(8, MAX_DIM + 1, 8)
    for dim, dim_v in itertools.product(steps, steps):
        padded, padded_v = padded_dims(dims, dim, dim_v)
        assert padded >= dim and padded_v >= dim_v and (padded, padded_v) in dims


def test_head_dims_are_rounded_up_no_further_than_needed() -> None:
    assert padded_dims(forward_sm80.DIMS, 33, 8) == (64, 64)
    assert padded_dims(forward_sm80.DIMS, 64, 64) == (64, 64)
    assert padded_dims(forward_sm90.DIMS, 72, 72) == (96, 96)
    assert padded_dims(forward_sm90.DIMS, 192, 128) == (192, 128)
    assert padded_dims(forward_sm90.DIMS, 160, 120) == (192, 128)
    assert padded_dims(forward_sm90.DIMS, 128, 192) == (192, 192)
    assert padded_dims(forward_sm90.DIMS, 200, 8) == (256, 256)


def test_a_tile_is_whole_panels() -> None:
    assert BF16.tile_bytes(64, 64) == FP32.tile_bytes(64, 32) == 64 * 128
    assert BF16.tile_bytes(64, 65) == BF16.tile_bytes(64, 128) == 2 * 64 * 128
    assert BF16.fills_panels(64, 128) and not BF16.fills_panels(128, 96) and FP32.fills_panels(128, 96)


# ---- variants --------------------------------------------------------------------------------------------------------
@functools.cache
def all_variants(arch: str) -> list[TemplateKernel]:
    """Thousands: listed once for all tests."""
    return list(families.variants(arch, exhaustive=True))


@pytest.mark.parametrize("arch", everyday([*ARCHS, "sm_90a"], ["sm_86", "sm_90a"]))  # sm_86: the least memory
def test_variants_fit_into_shared_memory(arch: str) -> None:
    found = all_variants(arch)
    assert found and len({v.name for v in found}) == len(set(found)), "two variants of one name"
    for variant in found:
        most = SMEM_BYTES[generation(arch)] // variant.blocks_per_sm
        assert variant.smem <= most, f"{variant.name}: {variant.smem} bytes of {most}"
        assert variant.threads <= 1024 and variant.threads % 32 == 0


def test_common_variants_are_among_all() -> None:
    for arch in ("sm_86", "sm_90a"):
        assert set(families.variants(arch)) <= set(all_variants(arch))


@functools.cache
def all_forward_variants(arch: str) -> list[TemplateKernel]:
    """Thousands: listed once for all tests."""
    return list(FORWARD[arch].variants(arch, exhaustive=True))


def facts(kernel: TemplateKernel) -> tuple[object, ...]:
    return tuple(kernel.facts[name] for name in ("tile", "dim", "dim_v", "softcap"))


@pytest.mark.parametrize("case", SUPPORTED, ids=str)
def test_plans_use_listed_tiles_and_dims(case: Case) -> None:
    """The kernels that are compiled ahead of time have the tiles that calls will ask for."""
    p = problem_of(case)
    for found, arch in zip(plans(p), ("sm_80", "sm_90a"), strict=True):
        listed = {facts(v) for v in all_forward_variants(arch)}
        kernel, values, pack = kernel_of(found), only(found).values, 1
        if arch == "sm_90a":
            pack = pack_gqa_of(p, forward_sm90.PLANNER.packed_heads)
            assert kernel.member("kPackGqa") == pack
        packed = pack_group(p, out_strides(p))[0] if pack == 1 else p
        assert facts(kernel) in listed
        assert values["row_blocks"] == -(-pack * packed.len_q // kernel.member("kBlockM"))
        assert values["tiles"] == values["row_blocks"] * p.batch * packed.heads // pack * values["splits"]
        assert 1 <= only(found).grid <= values["tiles"]


def test_source_does_not_depend_on_what_changes_between_calls() -> None:
    """Lengths, strides, scale, heads, window sizes: one kernel serves them all."""
    base = Case("base", 150, 200, dim=64, mask=window(10, 3))
    others = [
        Case("lengths", 300, 77, dim=64, mask=window(10, 3)),
        Case("constants", 150, 200, dim=64, mask=window(99, 0)),
        Case("heads", 200, 200, batch=5, heads=8, heads_k=1, dim=64, mask=window(10, 3)),
        Case("scale", 150, 200, dim=64, mask=window(10, 3), scale=0.5),
        Case("strides", 150, 200, dim=64, mask=window(10, 3), memory="sliced"),
    ]
    for i, kernel in enumerate(("sm80", "sm90")):
        wanted = kernel_of(plans(problem_of(base))[i])
        for other in others:
            found = kernel_of(plans(problem_of(other))[i])
            assert found == wanted and found.source == wanted.source and hash(found) == hash(wanted), (
                f"{kernel}, {other}"
            )


def test_source_depends_on_what_changes_code() -> None:
    base = Case("base", 100, 200, dim=64)
    others = [
        Case("dim", 100, 200, dim=128),
        Case("dim_v", 100, 200, dim=192, dim_v=128),
        Case("padded", 100, 200, dim=56),
        Case("softcap", 100, 200, dim=64, softcap=2.0),
        Case("sinks", 100, 200, dim=64, sinks=True),
        Case("packed", 0, 0, dim=64, lengths=((100, 200),)),
        *(
            Case(str(m), 100, 200, dim=64, mask=m)
            for m in (causal, causal_top_left, window(1, 1), window(5, None), prefix(3), chunked(8))
        ),
    ]
    for i in range(2):
        variants = [kernel_of(plans(problem_of(case))[i]) for case in (base, *others)]
        variants.append(kernel_of(plans(problem_of(base, torch.float16))[i]))
        assert len({v.source for v in variants}) == len(variants)
        assert len({v.name for v in variants}) == len(variants)


def test_masks_of_one_shape_are_one_kernel() -> None:
    kernels = [
        kernel_of(plan_sm90(problem_of(Case("m", 300, 300, dim=64, mask=m)))) for m in (window(5, 7), window(99, 0))
    ]
    assert kernels[0] == kernels[1] and kernels[0].name != kernels[1].name
    assert kernels[0] != kernel_of(plan_sm90(problem_of(Case("m", 300, 300, dim=64))))


def test_names_say_what_is_compiled() -> None:
    p = problem_of(Case("x", 100, 200, heads=4, heads_k=4, dim=40, mask=causal, softcap=2.0, sinks=True))
    ampere, hopper = (kernel_of(found).name for found in plans(p))
    for name, kernel, end in ((ampere, "forward_sm80", "padded]"), (hopper, "forward_sm90", "panels]")):
        assert name.startswith(kernel) and "bf16 64 causal softcap sinks" in name and name.endswith(end)
    described = plans(p)[1].details
    assert described["kernel"] == hopper and "queries" in str(described["tile"])


def test_source_carries_the_numbers_python_sends() -> None:
    for found in plans(problem_of(Case("x", 100, 200, dim=128))):
        v = kernel_of(found)
        assert v.memory.cpp() in v.source and v.memory.size == v.smem and f"kThreads = {v.threads}" in v.source
        assert f"sizeof(Params) == {v.params.size}" in v.source and f"kernels/{v.header}.cuh" in v.source


# ---- arguments -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", SUPPORTED, ids=str)
def test_values_are_all_the_arguments_but_pointers_and_maps(case: Case) -> None:
    for found in plans(problem_of(case)):
        launch = only(found)
        fields = {field.name for field in launch.kernel.params.fields if not field.ctype.endswith("*")}
        assert set(launch.values) | {f"map_{t}" for t in launch.maps} | {"seed"} == fields


def test_sections_put_heads_together_only_where_rows_differ() -> None:
    even = problem_of(Case("full", 512, 512, heads=8, heads_k=2, dim=64))
    uneven = problem_of(Case("causal", 512, 512, heads=8, heads_k=2, dim=64, mask=causal))
    banded = problem_of(Case("window", 512, 512, heads=8, heads_k=2, dim=64, mask=window(9, 0)))
    assert only(plans(even)[1]).values["section"] == 1 == only(plans(banded)[1]).values["section"]
    assert only(plans(uneven)[1]).values["section"] == 16  # two sequences of eight heads: all of it fits
    many = problem_of(Case("causal", 128, 128, batch=8, heads=32, heads_k=16, dim=64, mask=causal))
    per_head = 128 * 128 * 2
    for heads_in_l2, heads in (
        (128, 128),
        (80, 86),
        (2, 64),
        (0, 64),
    ):  # query heads: two share one head's keys; three sections
        assert section(many, heads_in_l2 * per_head) == heads  # half of the L2 is for keys and values
    wide = problem_of(Case("causal", 64, 64, batch=8, heads=16, heads_k=16, dim=256, mask=causal))
    assert section(wide, 0) == 16


# ---- tensor maps -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", SUPPORTED, ids=str)
def test_tensor_maps_are_valid(case: Case) -> None:
    p = problem_of(case)
    maps, pack = only(plan_sm90(p)).maps, pack_gqa_of(p, forward_sm90.PLANNER.packed_heads)
    heads = p.heads // pack if pack > 1 else pack_group(p, out_strides(p))[0].heads
    assert list(maps) == ["q", "k", "v", "o"]
    for name, spec in maps.items():
        spec.validate()
        assert len(spec.dims) == 5 and spec.box[0] * spec.element_bytes == spec.swizzle == 128, name
        assert spec.dims[2 if p.varlen else 3] == (heads if name in "qo" else p.heads_k)


@settings(max_examples=60)
@given(
    st.sampled_from([1, 2, 3]),
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([1, 3]),
    st.integers(1, 32).map(lambda n: 8 * n),
    st.integers(0, 3),
    st.booleans(),
)
def test_tensor_maps_of_odd_strides(
    batch: int, len_q: int, len_k: int, heads_k: int, group: int, dim: int, extra: int, size_one: bool
) -> None:
    """Strides of any multiple of 8 elements; a dimension of size 1 may have any stride at all."""

    def tensor(length: int, heads: int) -> torch.Tensor:
        wide = torch.empty(batch, length + extra, heads + extra, dim + 8 * extra, dtype=torch.bfloat16)
        t = wide[:, :length, :heads, :dim]
        strides = list(t.stride())
        for axis in range(3):
            if size_one and t.shape[axis] == 1:
                strides[axis] = 3  # never used to address anything
        return torch.as_strided(wide, t.shape, strides)

    q, k, v = tensor(len_q, heads_k * group), tensor(len_k, heads_k), tensor(len_k, heads_k)
    p, _ = check(q, k, v)
    for spec in only(plan_sm90(p)).maps.values():
        spec.validate()


@pytest.mark.parametrize(("len_q", "heads_k", "promotion"), [(1, 2, 128), (16, 1, 128), (17, 1, 256), (2048, 8, 256)])
def test_few_rows_to_a_key_fetch_less_at_a_time(len_q: int, heads_k: int, promotion: int) -> None:
    p = problem_of(Case("few", len_q, 2048, batch=1, heads=8, heads_k=heads_k, dim=64))
    maps = forward_sm90.plan(p, {"o": out_strides(p)}, H200).launches[0].maps
    assert {maps["k"].promotion, maps["v"].promotion} == {promotion} and maps["q"].promotion == 256


def test_packed_boxes_end_with_their_sequence() -> None:
    """A box whose first coordinate starts at c has its rows where it would have them without, less the last c: the two
    large coordinates cancel, modulo the 2^64 of an address, and no coordinate is ever negative."""
    p = problem_of(Case("packed", 0, 0, dim=64, lengths=((70, 100), (0, 3), (65, 129))))
    for spec in only(plan_sm90(p)).maps.values():
        spec.validate()
        rows = spec.box[1]
        assert spec.dims[1] == rows and spec.address == 0
        for first_row, clip in ((0, 0), (0, rows - 1), (70, 5), (100, rows)):
            coordinates = (clip, 0, FAR + first_row - clip, FAR)
            assert all(0 <= c < size for c, size in zip(coordinates[1:], spec.dims[2:], strict=True))
            offset = sum(c * stride for c, stride in zip(coordinates, spec.strides, strict=True)) % 2**64
            assert offset == first_row * spec.strides[0]


def test_the_kernel_and_the_plan_agree_how_far_is_far() -> None:
    header = jit.flatten("#include <strobe/kernels/forward_sm90.cuh>\n")
    assert f"kFar = 1 << {FAR.bit_length() - 1};" in header and 1 << (FAR.bit_length() - 1) == FAR


# ---- decoding: the heads of a group become rows ----------------------------------------------------------------------
DECODE = Case("decode", 1, 300, batch=2, heads=8, heads_k=2, dim=64)


@pytest.mark.parametrize("mask", [full, causal, window(None, 0), prefix(7)], ids=str)
def test_one_query_of_a_group_is_packed(mask) -> None:  # type: ignore[no-untyped-def]
    problem = problem_of(dataclasses.replace(DECODE, mask=mask))
    q, k, v = problem.strides
    packed, strides = pack_group(problem, (1024, 64, 512))
    assert (packed.heads, packed.len_q, packed.group, packed.mask) == (2, 4, 1, full)
    assert packed.strides == ((q[0], 4 * q[1], q[1]), k, v)
    assert strides == (1024, 256, 64)
    values = only(forward_sm80.plan(problem, {"o": (1024, 64, 512)}, A100)).values
    assert (values["lse_batch"], values["lse_head"]) == (8, 4)  # as (batch, heads, 1) lies in memory
    assert values["tiles"] == 2 * 2  # one a key head
    assert kernel_of(plan_sm90(problem)).facts["mask"] == "full"


@pytest.mark.parametrize(
    ("len_q", "group", "pack"), [(1, 4, 4), (9, 4, 4), (127, 64, 64), (128, 4, 1), (9, 7, 1), (9, 1, 1)]
)
def test_heads_are_packed_where_queries_are_few(len_q: int, group: int, pack: int) -> None:
    problem = problem_of(Case("few", len_q, 300, batch=2, heads=2 * group, heads_k=2, dim=64, mask=causal))
    found = plan_sm90(problem)
    values, maps = only(found).values, only(found).maps
    assert kernel_of(found).member("kPackGqa") == pack and values["lse_head"] == len_q
    if pack > 1:
        assert values["heads"] == 2 and values["group"] == 1 and values["len_q"] == len_q * pack
        assert maps["q"].dims == (64, pack, len_q, 2, 2) and maps["q"].box == (64, pack, 64 // pack, 1, 1)


@pytest.mark.parametrize(
    ("len_q", "len_k", "batch", "splits"),
    [
        (1, 32768, 1, 16),
        (1, 32768, 16, 1),
        (1, 2048, 1, 8),
        (1, 768, 1, 3),
        (1, 767, 1, 1),
        (16, 32768, 1, 16),
        (16, 1535, 1, 1),
        (256, 32768, 1, 2),
    ],
)
def test_keys_are_split_where_tiles_are_few(len_q: int, len_k: int, batch: int, splits: int) -> None:
    """64 heads in groups of 8, on 132 multiprocessors."""
    heads = 64 if len_q < 128 else 32
    shapes = ((batch, len_q, heads, 128), (batch, len_k, 8, 128), (batch, len_k, 8, 128))
    problem, _ = check(*(torch.empty(shape, dtype=torch.bfloat16) for shape in shapes))  # gigabytes that nobody touches
    found = plan_sm90(problem)
    values = only(found).values
    assert values["splits"] == splits and kernel_of(found).member("kSplit") == (splits > 1)
    assert values["tiles"] % splits == 0
    assert found.workspace_bytes == (4 * values["tiles"] * 128 * 130 if splits > 1 else 0)


@pytest.mark.parametrize("dims", forward_sm90.DIMS)
def test_whatever_is_planned_is_among_the_variants(dims: tuple[int, int]) -> None:
    """Only those are known to compile without spills; 8 stands for any number of heads that are rows of a tile."""
    known = {v for v in all_forward_variants("sm_90a") if (v.facts["dim"], v.facts["dim_v"]) == dims}
    heads_and_groups = ((1, 1), (4, 4), (60, 1), (120, 1))
    for (heads, group), len_q, len_k in itertools.product(
        heads_and_groups, (1, 100, 192, 500), (64, 700, 768, 1400, 8192)
    ):
        for mask, softcap in itertools.product((full, causal), (None, 5.0)):
            found = planned(heads, group, len_q, len_k, dims, mask, softcap)
            kernel = kernel_of(found)
            config = dict(kernel.config)
            if kernel.member("kPackGqa") > 1:
                config |= {"kPackGqa": 8, "Queries": "PackedGqaRows<8>"}
            assert dataclasses.replace(kernel, config=tuple(config.items())) in known
            assert kernel.member("kSplit") == (only(found).values["splits"] > 1)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("mask", [full, causal], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_tiles_of_192_rows_are_split_where_those_of_128_are_too_many(
    dim: int, mask: Mask, softcap: float | None
) -> None:
    """60 heads, 192 queries: 120 tiles of 128 rows, or 60 of 192 in two parts."""
    found = planned(60, 1, 192, 8192, (dim, dim), mask, softcap)
    block_m = kernel_of(found).member("kBlockM")
    assert (block_m, only(found).values["splits"]) == ((192, 2) if dim < 128 else (128, 1))
    few_tiles = kernel_of(planned(1, 1, 1, 8192, (dim, dim), mask, softcap))
    assert few_tiles.member("kBlockM") == 128 and few_tiles.member("kSplit")
    short = 700 if softcap is None or dim == 64 else 570  # with softcap a part can have fewer keys
    for len_q, len_k in ((1, short), (100, 2 * short)):
        assert not kernel_of(planned(1, 1, len_q, len_k, (dim, dim), mask, softcap)).member("kSplit")


def planned(
    heads: int, group: int, len_q: int, len_k: int, dims: tuple[int, int], mask: Mask, softcap: float | None
) -> Plan:
    shapes = ((1, len_q, heads, dims[0]), (1, len_k, heads // group, dims[0]), (1, len_k, heads // group, dims[1]))
    tensors = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    problem, _ = check(*tensors, mask=mask, softcap=softcap)
    return plan_sm90(problem)


@pytest.mark.parametrize(
    "change",
    [{"mask": window(100, 0)}, {"len_q": 2}, {"heads_k": 8}, {"sinks": True}],
    ids=["keys hidden", "two queries", "no group", "sinks"],
)
def test_what_is_not_packed(change: dict) -> None:
    problem = problem_of(dataclasses.replace(DECODE, **change))
    assert pack_group(problem, (1, 2, 3)) == (problem, (1, 2, 3))


@pytest.mark.parametrize(("keys", "launches"), [(512, 2), (1024, 2), (1025, 3)])
def test_few_keys_take_turns(keys: int, launches: int) -> None:
    """Their sums of dQ need no zeros and no rounding."""
    (case, *_) = tune_backward.cases("sm90", 128, 128, "backward sm_90a", [keys])
    made = case.plan(None, H200).launches
    assert len(made) == launches and ("deterministic" in made[1].kernel.name) == (launches == 2)


@pytest.mark.parametrize(
    ("mask", "keys", "heads", "section", "sections"),
    [(full, 2048, 32, 1, 32), (window(9, 0), 2048, 32, 1, 32), (causal, 2048, 32, 4, 7), (causal, 1024, 33, 8, 3),
     (causal, 8192, 32, 4, 7), (causal, 2048, 3, 4, 1), (causal, 0, 3, 66, 1)],
)  # fmt: skip
def test_sections_of_keys(mask: Mask, keys: int, heads: int, section: int, sections: int) -> None:
    """Heads run together only where blocks of keys differ. The last section is the longest: from two to three others."""
    problem = problem_of(Case("section", 256, max(keys, 1), batch=1, heads=heads, heads_k=heads, dim=64, mask=mask))
    found = key_tiles(replace(problem, k=replace(problem.k, length=keys)), 128, H200.sms)
    assert (found["section"], found["sections"]) == (section, sections) and section * (sections - 1) < heads
