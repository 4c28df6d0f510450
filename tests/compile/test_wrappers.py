"""Every instruction wrapper compiles, without spills, for every architecture that has it."""

import re
from pathlib import Path

import cubins
import pytest

from strobe.cuda.parts import wgmma
from strobe.cuda.runtime import jit, ptxas_log

pytestmark = pytest.mark.skipif(jit.nvrtc_status() is not None, reason=str(jit.nvrtc_status()))

PTX = Path(jit.__file__).parents[1] / "include" / "strobe" / "ptx"

AMPERE = """
#include <strobe/ptx/atomic.cuh>
#include <strobe/ptx/base.cuh>
#include <strobe/ptx/math.cuh>
#include <strobe/ptx/memory.cuh>
#include <strobe/ptx/mma.cuh>
#include <strobe/ptx/warp.cuh>
namespace strobe {  // where our fma, any, min win over CUDA's own
struct Params { const u16* x; const float* f; const int* n; float* out; u16* out16; u32* out32; };
template <class T> STROBE_DEVICE float entry(const void* p, bool valid) {
  return float(ld_constant(static_cast<const T*>(p), valid));
}
STROBE_DEVICE float functions(const void* p, float x, bool v) {  // what users' functions are made of
  x += entry<int>(p, v) + entry<i64>(p, v) + entry<double>(p, v) + entry<short>(p, v) + entry<signed char>(p, v);
  x += entry<u8>(p, v) + sqrt_approx(x) + error_function(x) + add_rn(x, mul_rn(x, x));
  x += round_down(x) + round_up(3.f * x) + round_to_zero(5.f * x) + round_to_even(7.f * x);
  const u32 bits = as_bits(x) | 1u;
  return x + float(highest_bit(bits) + lowest_bit(bits) + bits_set(bits));
}
template <class T> STROBE_DEVICE void products(const Params& p, u32 smem) {
  u32 a, b, c, d;
  ldmatrix_x4(smem, a, b, c, d);
  u32 e, f, g, h;
  ldmatrix_x4_trans(smem + 512, e, f, g, h);
  float s[4];
  mma_m16n8k16_zero<T>(s[0], s[1], s[2], s[3], a, b, c, d, e, f);
  mma_m16n8k16<T>(s[0], s[1], s[2], s[3], a, b, c, d, g, h);
  st_shared(smem, pack2<T>(s[0], s[1]));
  st_shared(smem + 12, bytes_of(not_less_f16x2(a, 0x3c003c00u), b, 0x5410));
  st_shared(smem + 4, s[2] + to_float<T>(ld_global(p.x)));
  st_shared(smem + 8, ld_constant(p.f, a < 3) + to_float<T>(ld_constant(p.x, a < 5)));
  if (ld_constant(reinterpret_cast<const bool*>(p.x), a < 7)) st_shared(smem + 12, 1.f);
}
STROBE_KERNEL(128, 1) kernel(STROBE_GRID_CONSTANT Params p) {
  const u32 tid = thread_idx_again(), smem = smem_base() + 1024 * warp_uniform(u32(opaque(i64(tid))) / 32);
  cp_async_16(smem + 16 * (tid % 32), p.x + 8 * tid);
  cp_async_16(smem + 512 + 16 * (tid % 32), p.x + 8 * tid, int(tid) < ld_global(p.n));
  cp_async_commit();
  cp_async_wait<0>();
  sync_block();
  products<bf16>(p, smem);
  products<fp16>(p, smem);
  const float y = rcp_approx(shfl_xor(ld_shared_f32(smem + 8), 1));
  float x = fma(exp2_approx(ld_global(p.f)), log2_approx(ld_shared_f32(smem)), fabs(y));
  const bool found = any(x > 0.f) || lanes_where(x > 1.f) > 3 || ballot(x > 2.f) == 5;
  if (found) x = fmax(x, as_float(shfl(as_bits(x), max(0, min(3, int(tid))))));
  x += functions(p.n, x, tid < 5);
  sync_warp();
  bar_arrive(1, 256);
  bar_sync(2, 128);
  u32x4 v = ld_shared_x4(smem);
  st_shared(smem + 16, v);
  st_shared(smem + 32, u32x2{v.x, v.y});
  st_global(p.out + tid, x);
  st_global(p.out16 + tid, u16(ld_shared(smem)));
  st_global(p.out32 + tid, atomic_inc_wrap(p.out32, grid_dim() - 1) + block_idx());
  st_global(static_cast<void*>(p.out32 + 4 * tid), v);
  fence_device();
  float two[2], four[4];
  ld_global_l2(two, p.out + 2 * tid, tid < 7);
  ld_global_l2(four, p.out + 4 * tid, tid < 9);
  st_global_x2(p.out + 2 * tid, two[0] + four[3], two[1]);
  atomic_add(p.out, x);
#if __CUDA_ARCH__ >= 900
  atomic_add_x4(p.out + 4 * tid, x, two[0], four[1], four[2]);
#endif
}
}  // namespace strobe
"""

SINES = """
#include <strobe/ptx/math.cuh>
#include <strobe/ptx/memory.cuh>
namespace strobe {
struct Params { const float* x; float* out; };
STROBE_KERNEL(128, 1) kernel(STROBE_GRID_CONSTANT Params p) {
  const float x = ld_global(p.x + thread_idx());
  st_global(p.out + thread_idx(), sin_approx(x) + cos_approx(x));
}
}  // namespace strobe
"""

HOPPER = """
#include <strobe/ptx/bulk.cuh>
#include <strobe/ptx/memory.cuh>
#include <strobe/ptx/tma.cuh>
#include <strobe/ptx/warp.cuh>
#include <strobe/ptx/wgmma.cuh>
{shapes}
namespace strobe {{
struct Params {{ TensorMap in, out; float* sums; u32* turn; }};
STROBE_KERNEL(256, 1) kernel(STROBE_GRID_CONSTANT Params p) {{
  const u32 tile = smem_base(), bar = tile + 65536;
  if (thread_idx() == 0) {{
    tma_prefetch_map(&p.in);
    mbar_init(bar, 1);
    mbar_init(bar + 8, 1);
    mbar_init_fence();
  }}
  sync_block();
  wait_for_previous_grid();
  if (warp_uniform(thread_idx() / 128) == 0) {{
    regs_dec<40>();
    if (thread_idx() == 0) {{
      mbar_wait(bar + 8, 1);
      mbar_arrive_expect_tx(bar, 16384 + 512);
      tma_load_5d(tile, &p.in, bar, 0, 0, 0, 0, block_idx());
      bulk_prefetch(p.sums, 512);
      bulk_load(tile + 16384, p.sums, 512, bar);
    }}
    return;
  }}
  regs_inc<232>();
  mbar_wait(bar, 0);
  constexpr int N = {n};
  float d[N / 2];
  u32 a[4] = {{1, 2, 3, 4}};
  const u64 desc = wgmma_desc(tile, 0, 1024);
  wgmma_fence();
  Wgmma<{element}, N>::ss_zero(d, desc, desc);
  Wgmma<{element}, N>::ss(d, desc, desc);
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);
  pin(a);
  keep_above(tile, d[0]);
  float e[N / 2];
  wgmma_fence();
  Wgmma<{element}, N>::rs_zero(e, a[0], a[1], a[2], a[3], desc);
  Wgmma<{element}, N>::rs(e, a[0], a[1], a[2], a[3], desc);
  wgmma_commit();
  wgmma_wait<0>();
  pin(e);
  const u64 desc_t = wgmma_desc(tile, 8192, 1024);
  for (int i = 0; i < N / 2; ++i) st_global(p.sums + thread_idx() * N + i, d[i] + e[i]);
  wgmma_fence();
  Wgmma<{element}, N>::rs_t_zero(d, a[0], a[1], a[2], a[3], desc_t);
  Wgmma<{element}, N>::rs_t(d, a[0], a[1], a[2], a[3], desc_t);
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);
  mbar_arrive(bar + 8);
  for (int i = 0; i < N / 2; ++i) st_global(p.sums + thread_idx() * N + i, d[i]);
  stmatrix_x4(tile + 16 * thread_idx(), a[0], a[1], a[2], a[3]);
  stmatrix_x4_trans(tile + 16 * thread_idx(), a[0], a[1], a[2], a[3]);
  ld_shared_x2(tile + 8 * thread_idx(), d[0], d[1]);
  const u32x4 four = ld_global_x4(p.sums);
  st_shared(tile + 4096, as_bits(d[0]) + as_bits(d[1]) + four.x + four.w);
  fence_proxy_async();
  bar_sync(1, 128);
  launch_dependents();
  if (thread_idx() == 128) {{
    tma_store_5d(&p.out, tile, 0, 0, 0, 0, block_idx());
    tma_store_commit();
    tma_store_wait_read<0>();
    while (acquire_turn(p.turn) != block_idx()) {{
    }}
    if (block_idx() == 0) bulk_store(p.sums, tile, 1024);
    else bulk_add(p.sums, tile, 1024);
    tma_store_commit();
    bulk_wait_written();
    release_turn(p.turn);
  }}
}}
}}  // namespace strobe
"""

CHAIN_OF_TWO = """
#include <strobe/ptx/memory.cuh>
#include <strobe/ptx/wgmma.cuh>
{printed}
namespace strobe {{
struct Params {{ float* sums; }};
struct Next {{ static constexpr STROBE_DEVICE int step(int i) {{ return 2 * i; }} }};
STROBE_KERNEL(128, 1) kernel(STROBE_GRID_CONSTANT Params p) {{
  constexpr int N = {n};
  u32 a[8] = {{1, 2, 3, 4, 5, 6, 7, u32(opaque(8))}};
  pin(a);
"""

CHAINS = f"""{CHAIN_OF_TWO}
  float d[N / 2];
  const u64 desc = wgmma_desc(smem_base(), 0, 1024);
  wgmma_fence();
  Wgmma<{{element}}, N>::ss_zero<3, Next, Next>(d, desc, desc);
  Wgmma<{{element}}, N>::rs_t<2, Next>(d, a, desc);
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);
  for (int i = 0; i < N / 2; ++i) st_global(p.sums + thread_idx() * N + i, d[i]);
}}}}
}}}}  // namespace strobe
"""

ACCUMULATORS = f"""{CHAIN_OF_TWO}
  Accumulators<{{element}}, N> d;
  d.declare();
  float by[2] = {{{{p.sums[0], p.sums[1]}}}};
  d.zero();
  for (int r = 0; r < 2; ++r) d.load_row(r, p.sums + thread_idx() * N, N - 8);
  wgmma_fence();
  d.rs_t<2, Next>(a, wgmma_desc(smem_base(), 8192, 1024));
  wgmma_commit();
  wgmma_wait<0>();
  d.scale(by);
  d.stage<N / 16 - 1>(smem_base() + 16 * thread_idx(), by);
  d.stage_fp32<N / 32 - 1>(smem_base() + 8 * thread_idx(), thread_idx() & 1, by);
  d.add_staged<N / 32 - 1>(smem_base() + 8 * thread_idx(), thread_idx() & 1, by[0] > 0.f);
  for (int r = 0; r < 2; ++r) d.store_row(r, p.sums + thread_idx() * N, N - 8);
}}}}
}}}}  // namespace strobe
"""


def check(source, arch, most_stack=0):
    compiled = jit.compile(source, arch)
    info = cubins.inspect(compiled.cubin)["kernel"]
    assert ptxas_log.spills(compiled.log) == 0, compiled.log
    assert ptxas_log.warnings(compiled.log) == [], compiled.log
    assert info.stack_frame <= most_stack
    return info


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_ampere_wrappers_compile(arch):
    info = check(AMPERE, arch)
    assert info.max_threads == 128 and 0 < info.registers <= 128


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_sines_compile(arch):
    check(SINES, arch)


@pytest.mark.parametrize("element", ["bf16", "fp16"])
@pytest.mark.parametrize("n", [64, 128])
def test_hopper_wrappers_compile(element, n):
    source = HOPPER.format(shapes=wgmma.shapes(element, [(n, wgmma.FORMS)]), element=element, n=n)
    assert check(source, "sm_90a").max_threads == 256


@pytest.mark.parametrize("element", ["bf16", "fp16"])
@pytest.mark.parametrize("n", [64, 128])
def test_chains_of_products_compile(element, n):
    source = CHAINS.format(printed=wgmma.shapes(element, [(n, [("ss_zero", 3), ("rs_t", 2)])]), element=element, n=n)
    assert check(source, "sm_90a").max_threads == 128


@pytest.mark.parametrize("element", ["bf16", "fp16"])
@pytest.mark.parametrize("n", [64, 256])
def test_accumulators_declared_in_ptx_compile(element, n):
    text = wgmma.accumulators(element, n, 2)
    assert check(ACCUMULATORS.format(printed=text, element=element, n=n), "sm_90a").registers > n // 2
    scaled = re.findall(r"mul\.ftz\.f32 d(\d+), d(\d+), %(\d)", text)
    assert scaled == [(f"{i}", f"{i}", f"{i >> 1 & 1}") for i in range(n // 2)]  # the factor of its row
    staged = re.findall(
        r"mul\.ftz\.f32 (x|y), d%(\d+), %(\d)", text
    )  # behind address and factors, which are %0, %1, %2
    assert staged == [("xy"[i & 1], f"{3 + i}", f"{1 + (i >> 1 & 1)}") for i in range(8)]
    kind = "bf16" if element == "bf16" else "f16"
    assert re.findall(rf"cvt\.rn\.{kind}x2\.f32 p(\d), y, x", text) == ["0", "1", "2", "3"]  # the upper half first
    chosen = re.findall(r"selp\.f32 x(\d), d%(\d+), d%(\d+), odd; mul\.ftz\.f32 x\1, x\1, %(\d)", text)
    assert chosen == [  # in fp32: the fourth operand is the first register, and rows follow each other
        (f"{j}", f"{4 + 4 * (i ^ 2) + j}", f"{4 + 4 * i + j}", f"{2 + j // 2}") for i in range(4) for j in range(4)
    ]
    moved = r"xor\.b32 a, %0, (\d+); (?:@there )?(?:ld|st)\.shared"
    assert re.findall(moved, text) == 2 * ["0", "32", "64", "96"]
    added = re.findall(r"selp\.f32 y, x(\d+), x(\d+), odd; add\.ftz\.f32 d%(\d+), d%(\d+), y", text)
    assert added == [(f"{i ^ 8}", f"{i}", f"{3 + i}", f"{3 + i}") for i in range(16)]
    pair = r"setp\.gt\.s32 there, %1, (\d+); @there st\.global\.v2\.f32 \[%0 \+ (\d+)\], {d(\d+), d(\d+)}"
    stored = [[int(x) for x in found] for found in re.findall(pair, text)]
    assert sorted(d for _, _, *registers in stored for d in registers) == list(range(n // 2))  # each of them once
    for column, at, d, _ in stored:  # a register's column is 8 * (i // 4), four bytes each
        assert column == 8 * (d // 4) and at == 4 * column


def test_every_wrapper_is_used_here():
    ours = AMPERE + SINES + HOPPER + CHAINS
    definition = re.compile(r"^(?:template <.*?> )?(?:constexpr )?STROBE_DEVICE \w+ (\w+)(?:<\w+>)?\(", re.M)
    wrappers = {name: header.name for header in PTX.glob("*.cuh") for name in definition.findall(header.read_text())}
    assert len(wrappers) > 50
    assert {name: header for name, header in wrappers.items() if not re.search(rf"\b{name}\b", ours)} == {}


def test_wgmma_prints_only_the_forms_asked_for():
    text = wgmma.shapes("fp16", [(64, ["rs_t"]), (128, [("ss_zero", 3)]), (64, ["rs_t_zero"])])
    assert re.findall(r"void (\w+)\(", text) == ["rs_t_zero", "rs_t", "ss_zero"]
    assert re.findall(r"(none|sum), 1, 1, [01]", text) == ["none", "sum", "none", "sum", "sum"]
    assert text.count("struct Wgmma<fp16, 64>") == 1
    assert "m64n64k16.f32.f16.f16" in text and "float (&d)[32]" in text
    assert text.startswith("#ifdef __CUDACC__") and text.endswith("#endif\n")  # invisible to the emulator's compiler


@pytest.mark.parametrize(
    ("element", "ns", "named"),
    [
        ("fp8", [(64, ["ss"])], "fp8"),
        ("bf16", [(60, ["ss"])], "60"),
        ("bf16", [(264, ["ss"])], "264"),
        ("bf16", [(64, ["sr"])], "sr"),
        ("bf16", [(64, [])], "forms"),
        ("bf16", [(64, "ss")], "forms"),
        ("bf16", [(64, [("ss", 0)])], r"\('ss', 0\)"),
    ],
)
def test_wgmma_names_what_it_cannot_print(element, ns, named):
    with pytest.raises(ValueError, match=named):
        wgmma.shapes(element, ns)


def test_accumulators_name_what_they_cannot_be():
    with pytest.raises(ValueError, match="fp8"):
        wgmma.accumulators("fp8", 64, 2)
    for n in (264, 72):  # too many, and not in sixteens
        with pytest.raises(ValueError, match=f"{n}"):
            wgmma.accumulators("bf16", n, 2)
