"""Masks: drawn by hand, checked for the properties that kernels build on, and the same in C++."""

from __future__ import annotations

import ctypes
import pickle
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from strobe.cuda.parts import print_mask
from strobe.variants.mask import Mask, Positions, causal, causal_top_left, full
from strobe.variants.ready_made import cached_window, chunked, prefix, window
from strobe.variants.user_function import mask_function

DRAWN = {  # 5 queries, 8 keys: the last query stands opposite the last key
    full: """
        ########
        ########
        ########
        ########
        ########""",
    causal: """
        ####....
        #####...
        ######..
        #######.
        ########""",
    causal_top_left: """
        #.......
        ##......
        ###.....
        ####....
        #####...""",
    window(2, 1): """
        .####...
        ..####..
        ...####.
        ....####
        .....###""",
    window(1, 0): """
        ..##....
        ...##...
        ....##..
        .....##.
        ......##""",
    window(None, 2): """
        ######..
        #######.
        ########
        ########
        ########""",
    window(2, None): """
        .#######
        ..######
        ...#####
        ....####
        .....###""",
    prefix(6): """
        ######..
        ######..
        ######..
        #######.
        ########""",
    chunked(3): """
        ...###..
        ...###..
        ...###..
        ......##
        ......##""",
    chunked(3) & causal: """
        ...#....
        ...##...
        ...###..
        ......#.
        ......##""",
    window(4, None) & causal: """
        ####....
        #####...
        .#####..
        ..#####.
        ...#####""",
    causal & causal_top_left: """
        #.......
        ##......
        ###.....
        ####....
        #####...""",
}


@pytest.mark.parametrize("mask", DRAWN, ids=repr)
def test_drawn_by_hand(mask: Mask) -> None:
    drawing = ["".join("#" if visible else "." for visible in row) for row in mask.dense(5, 8).tolist()]
    assert drawing == DRAWN[mask].split()
    assert mask.area(5, 8) == DRAWN[mask].count("#")


def test_more_queries_than_keys() -> None:
    drawing = ["".join("#" if visible else "." for visible in row) for row in causal.dense(5, 3).tolist()]
    assert drawing == ["...", "...", "#..", "##.", "###"]
    drawing = ["".join("#" if visible else "." for visible in row) for row in chunked(2).dense(5, 3).tolist()]
    assert drawing == ["...", "...", "##.", "##.", "..#"]  # a query before the first key is in a chunk without keys


simple = st.one_of(
    st.sampled_from([full, causal, causal_top_left]),
    st.builds(window, st.none() | st.integers(0, 40), st.none() | st.integers(0, 40)),
    st.builds(prefix, st.integers(0, 60)),
    st.builds(chunked, st.integers(1, 33)),
)
any_mask = st.one_of(simple, st.builds(lambda a, b: a & b, simple, simple))


@settings(max_examples=300)
@given(any_mask, st.integers(1, 70), st.integers(1, 70), st.sampled_from([1, 4, 16]), st.sampled_from([1, 8, 16]))
def test_tiles_and_area(mask: Mask, len_q: int, len_k: int, block_q: int, block_k: int) -> None:
    dense = mask.dense(len_q, len_k)
    lo, hi = mask.bounds(torch.arange(len_q), len_q, len_k)
    assert (lo.diff() >= 0).all() and (hi.diff() >= 0).all()
    assert lo.min() >= 0 and hi.max() <= len_k
    for q0 in range(0, len_q, block_q):
        rows = dense[q0 : q0 + block_q]
        first, end, first_full, end_full = mask.tiles(q0, q0 + len(rows), block_k, len_q, len_k)
        assert 0 <= first <= first_full <= end_full <= end <= -(-len_k // block_k)
        for t in range(-(-len_k // block_k)):
            tile = rows[:, t * block_k : (t + 1) * block_k]
            assert first <= t < end or not tile.any()
            assert not first_full <= t < end_full or (tile.all() and tile.shape[1] == block_k)
    assert mask.area(len_q, len_k) == dense.sum()
    assert mask.block(torch.arange(len_q), torch.arange(len_k), len_q, len_k).equal(dense)


@settings(max_examples=60)
@given(simple, simple, st.integers(1, 40), st.integers(1, 40))
def test_and_is_the_intersection(a: Mask, b: Mask, len_q: int, len_k: int) -> None:
    assert (a & b).dense(len_q, len_k).equal(a.dense(len_q, len_k) & b.dense(len_q, len_k))


@settings(max_examples=60)
@given(any_mask, st.integers(1, 40), st.integers(1, 40))
def test_bounds_of_an_int_and_of_a_tensor(mask: Mask, len_q: int, len_k: int) -> None:
    lo, hi = mask.bounds(torch.arange(len_q), len_q, len_k)
    assert list(zip(lo.tolist(), hi.tolist(), strict=True)) == [mask.bounds(q, len_q, len_k) for q in range(len_q)]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_cpp_text_means_the_same(tmp_path: Path) -> None:
    masks = [
        full,
        causal,
        causal_top_left,
        window(7, 0),
        window(None, 3),
        prefix(5),
        chunked(6),
        chunked(6) & causal,
        window(4, 4) & causal,
        window(1 << 40, 1 << 40),
    ]
    source = "#include <algorithm>\n#define STROBE_DEVICE\nusing std::max;\nusing std::min;\n"
    for i, mask in enumerate(masks):
        source += f"namespace n{i} {{\n{print_mask.struct(mask)}}}\n"
        source += (
            f'extern "C" void bounds{i}(int len_q, int len_k, const int* c, int q, int* out) {{\n'
            f"  n{i}::Mask m{{len_q, len_k, c}};\n  out[0] = m.lo(q), out[1] = m.hi(q);\n}}\n"
            f'extern "C" int ends{i}() {{ return n{i}::Mask::kHasLo + 2 * n{i}::Mask::kHasHi; }}\n'
        )
    (tmp_path / "mask.cpp").write_text(source)
    subprocess.run(["g++", "-shared", "-fPIC", "-O1", "-o", tmp_path / "mask.so", tmp_path / "mask.cpp"], check=True)
    library = ctypes.CDLL(str(tmp_path / "mask.so"))
    found = (ctypes.c_int * 2)()
    for i, mask in enumerate(masks):
        constants = (ctypes.c_int * 8)(*mask.constants)
        assert getattr(library, f"ends{i}")() == (mask.lo is not None) + 2 * (mask.hi is not None)
        for len_q in (1, 5, 17):
            for len_k in (1, 9, 30):
                for q in range(len_q):
                    getattr(library, f"bounds{i}")(len_q, len_k, constants, q, found)
                    assert tuple(found) == mask.bounds(q, len_q, len_k), (mask, len_q, len_k, q)


def test_same_text_for_other_constants() -> None:
    assert (
        print_mask.struct(window(3, 5)) == print_mask.struct(window(700, 0))
        and window(3, 5).constants != window(700, 0).constants
    )
    assert print_mask.struct(window(3, 5)) != print_mask.struct(window(3, None))


def test_equality_and_hash() -> None:
    assert window(3, 5) == window(3, 5) and window(3, 5) != window(3, 6)
    assert len({window(3, 5), window(3, 5), window(3, 6), causal, causal & causal, causal & full}) == 3
    assert full & causal == causal and causal != "causal"


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (full, "strobe.full"),
        (causal_top_left, "strobe.causal_top_left"),
        (window(3, None), "strobe.window(3, None)"),
        (chunked(4) & causal, "strobe.chunked(4) & strobe.causal"),
        (causal & full, "strobe.causal"),
        (full & full, "strobe.full"),
    ],
)
def test_repr_can_be_typed_back(mask: Mask, text: str) -> None:
    assert repr(mask) == text


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: window(-1, 0), ValueError, "left must be at least 0, got -1"),
        (lambda: window(0, -2), ValueError, "right must be at least 0, got -2"),
        (lambda: window(1.5, 0), TypeError, "left must be an int, got 1.5"),
        (lambda: window(True, 0), TypeError, "left must be an int, got True"),
        (lambda: prefix(-1), ValueError, "prefix.n.: n must be at least 0"),
        (lambda: prefix(None), TypeError, "must be an int, got None"),
        (lambda: chunked(0), ValueError, "chunked.n.: n must be at least 1, got 0"),
        (lambda: causal & 3, TypeError, "unsupported operand"),
    ],
)
def test_errors_name_the_argument(make, error: type[Exception], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("left", (0, 3, 9))
@pytest.mark.parametrize("cached", (0, 5))
def test_a_window_over_cached_keys_is_the_part_before_the_queries(left: int, cached: int) -> None:
    """The keys of a sequence in two states: those before all queries, and the queries' own."""
    whole = window(left, 0).dense(4, cached + 4)
    assert torch.equal(cached_window(left).dense(4, cached), whole[:, :cached])


# ---- what masks refuse -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", [lambda a, b: a and b, lambda a, b: a or b, lambda a, b: not a])
def test_a_mask_is_neither_true_nor_false(combine: Callable[[Mask, Mask], object]) -> None:
    """`window(5, 0) and causal` would be causal alone."""
    with pytest.raises(TypeError, match=r"strobe.window\(5, 0\) is neither true nor false.* with &, \| and ~"):
        combine(window(5, 0), causal)


@pytest.mark.parametrize(
    "combine", [lambda m, t: m & t, lambda m, t: t & m, lambda m, t: m | t], ids=["mask & t", "t & mask", "mask | t"]
)
def test_a_tensor_beside_a_mask_says_what_to_write(combine: Callable[[Mask, torch.Tensor], object]) -> None:
    tensor = torch.rand(1, 1, 5, 8) > 0.5
    with pytest.raises(
        TypeError, match=r"strobe.causal & strobe.mask_function\(lambda b, h, q, k: tensor\[b, h, q, k\]"
    ):
        combine(causal, tensor)
    written = causal & mask_function(lambda b, h, q, k: tensor[b, h, q, k], rows=True)
    assert torch.equal(written.dense(5, 8, 1, 1), causal.dense(5, 8) & tensor)


@pytest.mark.parametrize("arguments", [(), (4,), (0, 0, 1, 1)])
def test_a_mask_is_not_called(arguments: tuple[int, ...]) -> None:
    with pytest.raises(TypeError, match="strobe.causal is a mask, not a function: write mask=strobe.causal"):
        causal(*arguments)


# ---- conditions ------------------------------------------------------------------------------------------------------


def test_a_condition_is_part_of_a_mask() -> None:
    allowed = torch.rand(3, generator=torch.Generator().manual_seed(0)) > 0.5
    mask = window(3, 0) & mask_function(lambda b, h, q, k: (q + k) % 2 == 0)
    assert repr(mask) == "strobe.mask_function(window(3, 0) & function)" and mask.interval == window(3, 0) != mask
    assert mask.area(5, 8) == mask.dense(5, 8).sum() < window(3, 0).area(5, 8)
    again = pickle.loads(pickle.dumps(mask))
    assert again == mask and hash(again) == hash(mask) and again.name == mask.name
    assert not mask_function(lambda b, h, q, k: k != 3).hides_nothing(1, 8)
    of_heads = mask_function(lambda b, h, q, k: allowed[h])
    assert of_heads.dense(2, 4, heads=3).shape == (1, 3, 2, 4)
    assert torch.equal(of_heads.dense(2, 4, heads=3)[0, :, 0, 0], allowed)
    with pytest.raises(ValueError, match="depends on h; give heads"):
        of_heads.dense(2, 4)


def test_names_of_what_was_combined() -> None:
    either = (causal & window(3, 0)) | chunked(4)
    assert repr(either) == "strobe.mask_function(causal and window(3, 0) or chunked(4))"
    assert repr(~causal & causal & causal) == "strobe.mask_function(not causal) & strobe.causal"
    assert repr(mask_function(lambda b, h, q, k: q >= k)) == "strobe.mask_function(function)"


def test_a_condition_at_a_part_of_a_sequence() -> None:
    mask = window(6, 0) & mask_function(lambda b, h, q, k: (q - k) % 3 != 1)
    whole = mask.dense(9, 12)
    assert torch.equal(mask.dense(4, 5, at=Positions(3, 9, 2, 12)), whole[3:7, 2:7])
