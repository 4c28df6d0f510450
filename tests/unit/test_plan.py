"""From problem to launch: padded head dims, tensor maps that the hardware takes, sources that do not depend on what may
change between calls."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from cases import Case
from hypothesis import given, settings, strategies as st
from kernel_cases import SUPPORTED
from oracle import prepare

from strobe.cuda import jit, plan, tiles
from strobe.cuda.plan import FAR, Plan, plan_sm80, plan_sm90
from strobe.mask import Mask, causal, causal_top_left, chunked, full, prefix, window
from strobe.problem import Problem, check

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


def problem_of(case: Case, dtype: torch.dtype = torch.bfloat16) -> Problem:
    return prepare(case, dtype)[0]


def out_strides(p: Problem) -> tuple[int, int, int]:
    rows = p.total_q if p.packed else p.len_q
    return rows * p.heads * p.dim_v, p.dim_v, p.heads * p.dim_v


def plans(p: Problem) -> list[Plan]:
    return [plan_sm80(p, "sm_80", out_strides(p)), plan_sm90(p, out_strides(p), 132)]


# ---- head dims -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", tiles.DIMS)
def test_every_head_dim_has_a_kernel(family: str) -> None:
    steps = range(8, tiles.MAX_DIM + 1, 8)
    for dim, dim_v in itertools.product(steps, steps):
        padded, padded_v = tiles.padded_dims(family, dim, dim_v)
        assert padded >= dim and padded_v >= dim_v and (padded, padded_v) in tiles.DIMS[family]


def test_head_dims_are_rounded_up_no_further_than_needed() -> None:
    assert tiles.padded_dims("sm80", 33, 8) == (64, 64)
    assert tiles.padded_dims("sm80", 64, 64) == (64, 64)
    assert tiles.padded_dims("sm90", 72, 72) == (96, 96)
    assert tiles.padded_dims("sm90", 192, 128) == (192, 128)
    assert tiles.padded_dims("sm90", 160, 120) == (192, 128)
    assert tiles.padded_dims("sm90", 128, 192) == (192, 192)
    assert tiles.padded_dims("sm90", 200, 8) == (256, 256)


def test_a_tile_is_whole_panels() -> None:
    assert tiles.tile_bytes(64, 64) == 64 * 128
    assert tiles.tile_bytes(64, 65) == tiles.tile_bytes(64, 128) == 2 * 64 * 128


# ---- variants --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arch", [*ARCHS, "sm_90a"])
def test_variants_fit_into_shared_memory(arch: str) -> None:
    found = list(plan.variants(arch, exhaustive=True))
    assert found and len({v.name for v in found}) == len(set(found)), "two variants of one name"
    for variant in found:
        most = tiles.SMEM_BYTES[tiles.generation(arch)] // variant.tile.blocks_per_sm
        assert variant.smem <= most, f"{variant.name}: {variant.smem} bytes of {most}"
        assert variant.threads <= 1024 and variant.threads % 32 == 0
        assert variant.kernel == ("forward_sm90" if arch == "sm_90a" else "forward_sm80")


def test_common_variants_are_among_all() -> None:
    for arch in ("sm_80", "sm_90a"):
        assert set(plan.variants(arch)) <= set(plan.variants(arch, exhaustive=True))


@pytest.mark.parametrize("case", SUPPORTED, ids=str)
def test_plans_use_listed_tiles_and_dims(case: Case) -> None:
    """What is compiled ahead of time has the tiles that calls will ask for."""
    p = problem_of(case)
    for found, arch in zip(plans(p), ("sm_80", "sm_90a"), strict=True):
        listed = {(v.tile, v.dim, v.dim_v, v.softcap) for v in plan.variants(arch, exhaustive=True)}
        v, fold = found.variant, plan.fold_of(p) if arch == "sm_90a" else 1
        folded = plan.fold_group(p, out_strides(p))[0] if fold == 1 else p
        assert v.fold == fold and (v.tile, v.dim, v.dim_v, v.softcap) in listed
        assert found.values["row_blocks"] == -(-fold * folded.len_q // v.tile.block_m)
        tiles = found.values["row_blocks"] * p.batch * folded.heads // fold  # type: ignore[operator]
        assert found.values["tiles"] == tiles * found.values["splits"]  # type: ignore[operator]
        assert 1 <= found.grid <= found.values["tiles"]  # type: ignore[operator]


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
        wanted = plans(problem_of(base))[i].variant
        for other in others:
            found = plans(problem_of(other))[i].variant
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
        variants = [plans(problem_of(case))[i].variant for case in (base, *others)]
        variants.append(plans(problem_of(base, torch.float16))[i].variant)
        assert len({v.source for v in variants}) == len(variants)
        assert len({v.name for v in variants}) == len(variants)


def test_masks_of_one_shape_are_one() -> None:
    assert plan.shape_of(window(5, 7)) is plan.shape_of(window(100, 0))
    assert plan.shape_of(causal) is not plan.shape_of(full)


def test_names_say_what_is_compiled() -> None:
    p = problem_of(Case("x", 100, 200, heads=4, heads_k=4, dim=40, mask=causal, softcap=2.0, sinks=True))
    ampere, hopper = (found.variant.name for found in plans(p))
    for name, kernel in ((ampere, "forward_sm80"), (hopper, "forward_sm90")):
        assert name.startswith(kernel) and "bf16 64" in name and name.endswith("softcap sinks padded]")
    described = plans(p)[1].describe()
    assert described["kernel"] == hopper and "queries" in str(described["tile"])


def test_source_carries_the_numbers_python_sends() -> None:
    for found in plans(problem_of(Case("x", 100, 200, dim=128))):
        v = found.variant
        assert f"kSmem = {v.smem}" in v.source and f"kThreads = {v.threads}" in v.source
        assert f"sizeof(Params) == {v.params.size}" in v.source and f"kernels/{v.kernel}.cuh" in v.source


# ---- arguments -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", SUPPORTED, ids=str)
def test_values_are_all_the_arguments_but_the_maps(case: Case) -> None:
    for found in plans(problem_of(case)):
        names = {field.name for field in found.variant.params.fields}
        assert set(found.values) | {f"map_{t}" for t in found.maps} == names
        assert all(found.values[name] == 0 for name in plan.POINTERS)


def test_sections_put_heads_together_only_where_rows_differ() -> None:
    even = problem_of(Case("full", 512, 512, heads=8, heads_k=2, dim=64))
    uneven = problem_of(Case("causal", 512, 512, heads=8, heads_k=2, dim=64, mask=causal))
    banded = problem_of(Case("window", 512, 512, heads=8, heads_k=2, dim=64, mask=window(9, 0)))
    assert plans(even)[1].values["section"] == 1 == plans(banded)[1].values["section"]
    assert plans(uneven)[1].values["section"] == 16  # two sequences of eight heads: all of it fits
    many = problem_of(Case("causal", 128, 128, batch=8, heads=32, heads_k=16, dim=64, mask=causal))
    per_head = 128 * 128 * 2
    for heads_in_l2, section in ((64, 128), (40, 80), (1, 64), (0, 64)):  # query heads: two share one head's keys
        assert plan_sm90(many, out_strides(many), 132, l2_bytes=heads_in_l2 * per_head).values["section"] == section
    wide = problem_of(Case("causal", 64, 64, batch=8, heads=16, heads_k=16, dim=256, mask=causal))
    assert plan_sm90(wide, out_strides(wide), 132, l2_bytes=0).values["section"] == 16


# ---- tensor maps -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", SUPPORTED, ids=str)
def test_tensor_maps_are_valid(case: Case) -> None:
    p = problem_of(case)
    found = plan_sm90(p, out_strides(p), 132)
    heads = p.heads // plan.fold_of(p) if plan.fold_of(p) > 1 else plan.fold_group(p, out_strides(p))[0].heads
    assert list(found.maps) == ["q", "k", "v", "o"]
    for name, spec in found.maps.items():
        spec.validate()
        assert len(spec.dims) == 5 and spec.box[0] * spec.element_bytes == spec.swizzle == 128, name
        assert spec.dims[2 if p.packed else 3] == (heads if name in "qo" else p.heads_k)


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
    for spec in plan_sm90(p, out_strides(p), 132).maps.values():
        spec.validate()


def test_packed_boxes_end_with_their_sequence() -> None:
    """A box whose first coordinate starts at c has its rows where it would have them without, less the last c: the two
    large coordinates cancel, modulo the 2^64 of an address, and no coordinate is ever negative."""
    p = problem_of(Case("packed", 0, 0, dim=64, lengths=((70, 100), (0, 3), (65, 129))))
    for spec in plan_sm90(p, out_strides(p), 132).maps.values():
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


# ---- decoding: the heads of a group become rows
# --------------------------------------------------------------------------
DECODE = Case("decode", 1, 300, batch=2, heads=8, heads_k=2, dim=64)


@pytest.mark.parametrize("mask", [full, causal, window(None, 0), prefix(7)], ids=str)
def test_one_query_of_a_group_is_folded(mask) -> None:  # type: ignore[no-untyped-def]
    problem = problem_of(dataclasses.replace(DECODE, mask=mask))
    q, k, v = problem.strides
    folded, strides = plan.fold_group(problem, (1024, 64, 512))
    assert (folded.heads, folded.len_q, folded.group, folded.mask) == (2, 4, 1, full)
    assert folded.strides == ((q[0], 4 * q[1], q[1]), k, v)
    assert strides == (1024, 256, 64)
    values = plan_sm80(problem, "sm_80", (1024, 64, 512)).values
    assert (values["lse_batch"], values["lse_head"]) == (8, 4)  # as (batch, heads, 1) lies in memory
    assert values["tiles"] == 2 * 2  # one a key head
    assert plan_sm90(problem, (1024, 64, 512), 132).variant.mask is plan.shape_of(full)


@pytest.mark.parametrize(
    ("len_q", "group", "fold"), [(1, 4, 4), (9, 4, 4), (127, 64, 64), (128, 4, 1), (9, 7, 1), (9, 1, 1)]
)
def test_heads_are_folded_where_queries_are_few(len_q: int, group: int, fold: int) -> None:
    problem = problem_of(Case("few", len_q, 300, batch=2, heads=2 * group, heads_k=2, dim=64, mask=causal))
    found = plan_sm90(problem, out_strides(problem), 132)
    assert found.variant.fold == fold and found.values["lse_head"] == len_q
    if fold > 1:
        assert found.values["heads"] == 2 and found.values["group"] == 1 and found.values["len_q"] == len_q * fold
        assert found.maps["q"].dims == (64, fold, len_q, 2, 2) and found.maps["q"].box == (64, fold, 64 // fold, 1, 1)


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
    found = plan_sm90(problem, out_strides(problem), 132)
    assert found.values["splits"] == splits and found.variant.split == (splits > 1)
    assert found.values["tiles"] % splits == 0
    assert found.workspace == (found.values["tiles"] * 128 * 130 if splits > 1 else 0)  # type: ignore[operator]


@pytest.mark.parametrize("dims", tiles.DIMS["sm90"])
def test_whatever_is_planned_is_among_the_variants(dims: tuple[int, int]) -> None:
    """Only those are known to compile without spills; 8 stands for any number of heads that are rows of a tile."""
    dim, dim_v = dims
    known = {v for v in plan.variants("sm_90a", exhaustive=True) if (v.dim, v.dim_v) == dims}
    heads_and_groups = ((1, 1), (4, 4), (60, 1), (120, 1))
    for (heads, group), len_q, len_k in itertools.product(
        heads_and_groups, (1, 100, 192, 500), (64, 700, 768, 1400, 8192)
    ):
        for mask, softcap in itertools.product((full, causal), (None, 5.0)):
            found = planned(heads, group, len_q, len_k, dims, mask, softcap)
            variant = found.variant
            assert dataclasses.replace(variant, fold=8 if variant.fold > 1 else 1) in known
            assert variant.split == (found.values["splits"] > 1)  # type: ignore[operator]


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("mask", [full, causal], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_tiles_of_192_rows_are_split_where_those_of_128_are_too_many(
    dim: int, mask: Mask, softcap: float | None
) -> None:
    """60 heads, 192 queries: 120 tiles of 128 rows, or 60 of 192 in two parts."""
    found = planned(60, 1, 192, 8192, (dim, dim), mask, softcap)
    assert (found.variant.tile.block_m, found.values["splits"]) == ((192, 2) if dim < 128 else (128, 1))
    few_tiles = planned(1, 1, 1, 8192, (dim, dim), mask, softcap)
    assert few_tiles.variant.tile.block_m == 128 and few_tiles.variant.split
    short = 700 if softcap is None or dim == 64 else 570  # with softcap a part can have fewer keys
    for len_q, len_k in ((1, short), (100, 2 * short)):
        assert not planned(1, 1, len_q, len_k, (dim, dim), mask, softcap).variant.split


def planned(
    heads: int, group: int, len_q: int, len_k: int, dims: tuple[int, int], mask: Mask, softcap: float | None
) -> Plan:
    shapes = ((1, len_q, heads, dims[0]), (1, len_k, heads // group, dims[0]), (1, len_k, heads // group, dims[1]))
    tensors = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    problem, _ = check(*tensors, mask=mask, softcap=softcap)
    return plan_sm90(problem, out_strides(problem), 132)


@pytest.mark.parametrize(
    "change",
    [{"mask": window(100, 0)}, {"len_q": 2}, {"heads_k": 8}, {"sinks": True}],
    ids=["keys hidden", "two queries", "no group", "sinks"],
)
def test_what_is_not_folded(change: dict) -> None:
    problem = problem_of(dataclasses.replace(DECODE, **change))
    assert plan.fold_group(problem, (1, 2, 3)) == (problem, (1, 2, 3))
