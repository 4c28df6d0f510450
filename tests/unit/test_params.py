"""Argument structs have C's layout: against ctypes, the C++ compiler, and the kernel's own record of its parameter."""

import ctypes
import shutil
import struct
import subprocess

import cubins
import pytest
from hypothesis import given, settings, strategies as st

from strobe.cuda.parts.params import Field, Struct, params
from strobe.cuda.runtime import jit

CTYPES = {
    "float*": ctypes.c_void_p,
    "const u16*": ctypes.c_void_p,
    "u64": ctypes.c_uint64,
    "i64": ctypes.c_int64,
    "u32": ctypes.c_uint32,
    "int": ctypes.c_int32,
    "float": ctypes.c_float,
    "u16": ctypes.c_uint16,
}
field_lists = st.lists(
    st.tuples(st.sampled_from(sorted(CTYPES)), st.none() | st.integers(1, 5)), min_size=1, max_size=12
)

EXAMPLE = Struct(
    "Params",
    [
        Field("q", "const u16*"),
        Field("k", "const u16*"),
        Field("out", "u16*"),
        Field("small", "u16"),
        Field("lse", "float*"),
        Field("stride_q", "i64", 3),
        Field("scale_log2", "float"),
        Field("map_q", "TensorMap"),
        Field("len_q", "int"),
        Field("flags", "u32", 2),
        Field("seed", "u64"),
    ],
    align=64,
)
VALUES = {
    "q": 0x1000,
    "k": 0x2000,
    "out": 0x3000,
    "small": 7,
    "lse": 0x4000,
    "stride_q": (-1, 2**40, 3),
    "scale_log2": 0.125,
    "map_q": bytes(range(128)),
    "len_q": -5,
    "flags": [1, 2],
    "seed": 2**64 - 1,
}


def example_source():
    return f"#include <strobe/ptx/tma.cuh>\n{EXAMPLE.cpp()}\n" + (
        "STROBE_KERNEL(32, 1) kernel(STROBE_GRID_CONSTANT Params p) { *p.lse = p.scale_log2 + p.len_q; }\n"
    )


@settings(max_examples=100, deadline=None)
@given(field_lists)
def test_layout_is_that_of_ctypes(kinds):
    fields = [Field(f"f{i}", ctype, count) for i, (ctype, count) in enumerate(kinds)]
    ours = Struct("Params", fields)
    members = [(f.name, CTYPES[f.ctype] if f.count is None else CTYPES[f.ctype] * f.count) for f in fields]
    theirs = type("Theirs", (ctypes.Structure,), {"_fields_": members})
    assert ours.size == ctypes.sizeof(theirs)
    assert ours.offsets == {name: getattr(theirs, name).offset for name, _ in members}


@settings(max_examples=50, deadline=None)
@given(field_lists, st.randoms(use_true_random=False))
def test_ctypes_reads_back_what_was_packed(kinds, random):
    fields = [Field(f"f{i}", ctype, count) for i, (ctype, count) in enumerate(kinds)]
    values = {
        f.name: random.randrange(100) if f.count is None else random.choices(range(100), k=f.count) for f in fields
    }
    members = [(f.name, CTYPES[f.ctype] if f.count is None else CTYPES[f.ctype] * f.count) for f in fields]
    theirs = type("Theirs", (ctypes.Structure,), {"_fields_": members}).from_buffer(
        Struct("Params", fields).pack(values)
    )
    for f in fields:
        got = getattr(theirs, f.name)
        assert ((got or 0) if f.count is None else [x or 0 for x in got]) == values[f.name]


def test_layout_is_that_of_the_cpp_compiler(tmp_path):
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    checks = "".join(f"  show(#NAME, offsetof(Params, {n}));\n".replace("#NAME", f'"{n}"') for n in EXAMPLE.offsets)
    program = f"""
#include <cstddef>
#include <cstdio>
typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64; typedef long long i64;
namespace strobe {{ struct alignas(64) TensorMap {{ u64 opaque[16]; }}; }}
{EXAMPLE.cpp()}
static void show(const char* name, std::size_t n) {{ std::printf("%s %zu\\n", name, n); }}
int main() {{
  show("sizeof", sizeof(Params));
{checks}}}
"""
    (tmp_path / "layout.cpp").write_text(program)
    subprocess.run([compiler, "-std=c++17", "-w", tmp_path / "layout.cpp", "-o", tmp_path / "layout"], check=True)
    lines = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout.splitlines()
    shown = {name: int(value) for name, value in map(str.split, lines)}
    assert shown.pop("sizeof") == EXAMPLE.size
    assert shown == EXAMPLE.offsets


@pytest.mark.skipif(jit.nvrtc_status() is not None, reason=str(jit.nvrtc_status()))
def test_the_cubin_takes_one_parameter_of_this_size():
    info = cubins.inspect(jit.compile(example_source(), "sm_80").cubin)["kernel"]
    assert [size for _, size in info.params] == [EXAMPLE.size]


@pytest.mark.skipif(jit.nvrtc_status() is not None, reason=str(jit.nvrtc_status()))
def test_a_size_that_python_would_not_send_is_a_compile_error():
    source = example_source().replace(f"== {EXAMPLE.size}", f"== {EXAMPLE.size + 64}")
    with pytest.raises(jit.CompileError, match="not the Params that the host sends"):
        jit.compile(source, "sm_80")


def test_pack_writes_each_value_at_its_offset():
    buffer = EXAMPLE.pack(VALUES)
    assert len(buffer) == EXAMPLE.size and EXAMPLE.size % 64 == 0
    at = EXAMPLE.offsets
    assert struct.unpack_from("<QQQ", buffer, at["q"]) == (0x1000, 0x2000, 0x3000)
    assert struct.unpack_from("<3q", buffer, at["stride_q"]) == (-1, 2**40, 3)
    assert at["map_q"] % 64 == 0 and bytes(buffer[at["map_q"] : at["map_q"] + 128]) == bytes(range(128))
    assert struct.unpack_from("<i", buffer, at["len_q"]) == (-5,)
    assert struct.unpack_from("<Q", buffer, at["seed"]) == (2**64 - 1,)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"lse": None}, KeyError, "missing: \\['lse'\\]"),
        ({"size": 1}, KeyError, "unknown: \\['size'\\]"),
        ({"stride_q": (1, 2)}, ValueError, "stride_q: 2 values"),
        ({"len_q": 2**31}, ValueError, "len_q"),
        ({"len_q": 1.5}, ValueError, "len_q"),
        ({"q": -1}, ValueError, "q"),
    ],
)
def test_pack_names_what_is_wrong(change, error, named):
    values = {**VALUES, **change}
    if change.get("lse", 0) is None:
        del values["lse"]
    with pytest.raises(error, match=named):
        EXAMPLE.pack(values)


@pytest.mark.parametrize("names", [("q", "k", "out"), ("q", "k", "out", "lse", "len_q"), ("lse", "q"), ("seed",)])
def test_a_patch_changes_these_fields_and_no_other(names):
    values = {name: 100 + i for i, name in enumerate(names)}
    buffer = EXAMPLE.pack(VALUES)
    EXAMPLE.patcher(buffer, *names)(*values.values())
    assert buffer == EXAMPLE.pack({**VALUES, **values})


def test_a_patch_checks_its_fields_and_values():
    with pytest.raises(KeyError, match="nonsense"):
        EXAMPLE.patcher(bytearray(), "q", "nonsense")
    with pytest.raises(ValueError, match="stride_q"):
        EXAMPLE.patcher(bytearray(), "stride_q")
    for names in (("q", "k"), ("q", "lse")):
        with pytest.raises((TypeError, struct.error)):
            EXAMPLE.patcher(EXAMPLE.pack(VALUES), *names)(1)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Field("x", "double"), "double"),
        (lambda: Field("two words", "int"), "two words"),
        (lambda: Field("x", "int", 0), "count: 0"),
        (lambda: Struct("S", []), "fields"),
        (lambda: Struct("S", [Field("x", "int"), Field("x", "int")]), "each name once"),
        (lambda: Struct("S", [Field("x", "int")], align=48), "align: 48"),
    ],
)
def test_a_bad_struct_is_named(make, named):
    with pytest.raises(ValueError, match=named):
        make()


def test_fields_of_one_kernel_follow_those_of_all_within_their_kind():
    own = [
        Field("mine", "int"),
        Field("map_mine", "TensorMap"),
        Field("my_tensor", "u16*"),
        Field("your_tensor", "u16*"),
    ]
    struct = params(own, [Field("len_q", "int"), Field("q", "u16*")])
    assert [field.name for field in struct.fields] == ["q", "my_tensor", "your_tensor", "len_q", "mine", "map_mine"]
