"""Warp-level instructions: arithmetic, conversions, shuffles, ldmatrix, stmatrix, mma, and what the counters say of
them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulator.toy_kernels import Toy, aligned, from_bits, place, to_bits

MMA = Toy(
    """
template <class T> void product(float (&d)[4], const u32 (&a)[4], const u32 (&b)[4]) {
  mma_m16n8k16<T>(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b[0], b[1]);
}
STROBE_KERNEL(32, 1) kernel(STROBE_GRID_CONSTANT Params p) {  // D[16x8] = A[16x16] B[8x16]^T, rows of 32 bytes, no swizzle
  const u32 lane = thread_idx(), a_at = smem_base(), b_at = a_at + 512;
  cp_async_16(a_at + 16 * lane, p.a + 8 * lane);
  if (lane < 16) cp_async_16(b_at + 16 * lane, p.b + 8 * lane);
  cp_async_commit();
  cp_async_wait<0>();
  sync_block();
  u32 a[4], b[4];
  float d[4] = {};
  ldmatrix_x4(a_at + (lane % 16) * 32 + lane / 16 * 16, a[0], a[1], a[2], a[3]);
  ldmatrix_x4(b_at + (lane % 8) * 32 + lane / 8 % 2 * 16, b[0], b[1], b[2], b[3]);
  if (p.fp16) product<fp16>(d, a, b);
  else product<bf16>(d, a, b);
  for (int i = 0; i < 4; ++i) st_global(p.d + (lane / 4 + 8 * (i / 2)) * 8 + 2 * (lane % 4) + i % 2, d[i]);
}
""",
    {"a": "uint16", "b": "uint16", "d": "float32"},
    ("fp16",),
)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("element", ["bf16", "fp16"])
def test_mma_is_the_matrix_product(element: str, mode: str) -> None:
    rng = np.random.default_rng(0)
    a, b = place(to_bits(rng.standard_normal((16, 16)), element)), place(to_bits(rng.standard_normal((8, 16)), element))
    d = aligned((16, 8), "float32")
    d[:] = np.nan
    counters = MMA.run(a=a, b=b, d=d, fp16=element == "fp16", mode=mode)
    np.testing.assert_allclose(d, from_bits(a, element) @ from_bits(b, element).T, rtol=0, atol=2e-5)
    assert (counters.mma, counters.flops, counters.block_barriers) == (1, 2 * 16 * 8 * 16, 1)
    assert counters.global_bytes_read == 512 + 256
    assert counters.global_bytes_written == 512
    assert counters.shared_bytes_read == 2 * 512


MATRICES = Toy(
    """
STROBE_KERNEL(32, 1) kernel(STROBE_GRID_CONSTANT Params p) {  // 32 rows of 16 bytes, `pitch` apart, hold 0, 1, 2, ...
  const u32 lane = thread_idx(), row = smem_base() + lane * p.pitch;
  u32 word[4], r[4];
  for (u32 i = 0; i < 4; ++i) word[i] = (8 * lane + 2 * i) | (8 * lane + 2 * i + 1) << 16;
  st_shared(row, u32x4{word[0], word[1], word[2], word[3]});
  sync_block();
  ldmatrix_x4(row, r[0], r[1], r[2], r[3]);
  for (int i = 0; i < 4; ++i) st_global(p.plain + 4 * lane + i, r[i]);
  ldmatrix_x4_trans(row, r[0], r[1], r[2], r[3]);
  for (int i = 0; i < 4; ++i) st_global(p.transposed + 4 * lane + i, r[i]);
  sync_warp();
  stmatrix_x4(row, r[0], r[1], r[2], r[3]);
  sync_warp();
  const u32x4 back = ld_shared_x4(row);
  st_global(static_cast<void*>(p.stored + 4 * lane), back);
  sync_warp();
  stmatrix_x4_trans(row, r[0], r[1], r[2], r[3]);
  sync_warp();
  const u32x4 again = ld_shared_x4(row);
  st_global(static_cast<void*>(p.restored + 4 * lane), again);
}
""",
    {"plain": "uint32", "transposed": "uint32", "stored": "uint32", "restored": "uint32"},
    ("pitch",),
    smem=32 * 144,
)


@pytest.mark.parametrize(("pitch", "conflicts"), [(16, 0), (144, 0), (128, 7 * 4 * 7), (32, 7 * 4 * 1)])
def test_ldmatrix_and_stmatrix_layouts_and_bank_conflicts(pitch: int, conflicts: int) -> None:
    plain, transposed, stored, restored = (aligned((32, 4), "uint32") for _ in range(4))
    outputs = {"plain": plain, "transposed": transposed, "stored": stored, "restored": restored}
    counters = MATRICES.run(**outputs, pitch=pitch, mode="async")
    matrices = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    lane = np.arange(32)
    for i in range(4):
        row, column = lane // 4, 2 * (lane % 4)
        assert (
            plain[:, i].copy().view(np.uint16).reshape(32, 2)
            == np.stack([matrices[i, row, column], matrices[i, row, column + 1]], 1)
        ).all()
        assert (
            transposed[:, i].copy().view(np.uint16).reshape(32, 2)
            == np.stack([matrices[i, column, row], matrices[i, column + 1, row]], 1)
        ).all()
    assert (stored.view(np.uint16).reshape(4, 8, 8) == matrices.transpose(0, 2, 1)).all()
    assert (restored.view(np.uint16).reshape(4, 8, 8) == matrices).all()
    assert counters.bank_conflicts == conflicts


SCALARS = Toy(
    """
STROBE_KERNEL(32, 1) kernel(STROBE_GRID_CONSTANT Params p) {
  for (int i = thread_idx(); i < p.n; i += 32) {
    const float x = ld_global(p.x + i), y = ld_global(p.y + i);
    const u32 b = pack2<bf16>(x, y), h = pack2<fp16>(x, y);
    st_global(p.packed + 2 * i, b);
    st_global(p.packed + 2 * i + 1, h);
    float* out = p.out + 8 * i;
    st_global(out, to_float<bf16>(b)), st_global(out + 1, to_float<fp16>(h));
    st_global(out + 2, exp2_approx(x)), st_global(out + 3, log2_approx(x)), st_global(out + 4, rcp_approx(x));
    st_global(out + 5, strobe::fmax(x, y)), st_global(out + 6, strobe::fma(x, y, 1.f));
  }
  const u32 lane = thread_idx();
  float* lanes = p.lanes + 4 * lane;
  st_global(lanes, shfl_xor(lane, 5)), st_global(lanes + 1, float(shfl(2 * lane, (lane + 3) % 32)));
  st_global(lanes + 2, any(lane == 9) ? 1.f : 0.f), st_global(lanes + 3, any(lane == 32) ? 1.f : 0.f + warp_uniform(lane + 7));
}
""",
    {"x": "float32", "y": "float32", "packed": "uint32", "out": "float32", "lanes": "float32"},
    ("n",),
)


def test_scalar_arithmetic_rounds_and_flushes_as_the_instructions_do() -> None:
    rng = np.random.default_rng(1)
    n = 4096
    bits = rng.integers(0, 2**32, n, dtype=np.uint32)  # every exponent, infinities and NaN
    bits[: n // 2] = (
        (rng.standard_normal(n // 2) * 2.0 ** rng.integers(-26, 17, n // 2)).astype(np.float32).view(np.uint32)
    )
    bits[n // 2 : n // 2 + 64] &= 0xFFFFF000 | 0x1000  # ties of fp16 and bf16
    bits[n - 8 :] = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x477FEFFF, 0x477FF000]
    x = place(bits.view(np.float32))
    y = place(np.roll(x, 1))
    packed, out, lanes = aligned((n, 2), "uint32"), aligned((n, 8), "float32"), aligned((32, 4), "float32")
    counters = SCALARS.run(x=x, y=y, packed=packed, out=out, lanes=lanes, n=n)
    assert counters.exp2 == n and counters.shuffles == 2 * 32
    lane = np.arange(32)
    assert (lanes == np.stack([lane ^ 5, 2 * ((lane + 3) % 32), lane * 0 + 1, lane * 0 + 7], 1)).all()
    tx, ty = torch.from_numpy(x.copy()), torch.from_numpy(y.copy())
    for column, dtype in enumerate((torch.bfloat16, torch.float16)):
        for half, source in enumerate((tx, ty)):
            expected = source.to(dtype)
            got = torch.from_numpy((packed[:, column] >> (16 * half)).astype(np.uint16).view(np.int16)).view(dtype)
            same = (got == expected) | (got.isnan() & expected.isnan())
            assert same.all(), (dtype, source[~same][:4], got[~same][:4], expected[~same][:4])
        assert torch.equal(
            torch.from_numpy(out[:, column].copy()).nan_to_num(7.0), tx.to(dtype).float().nan_to_num(7.0)
        )
    with np.errstate(all="ignore"):
        smallest = np.float32(2.0**-126)
        exp2 = np.exp2(x.astype(np.float64)).astype(np.float32)
        exp2[exp2 < smallest] = 0
        np.testing.assert_allclose(out[:, 2], exp2, rtol=2e-7)
        flushed = np.where(np.abs(x) < smallest, np.copysign(np.float32(0), x), x)
        reciprocal = np.float32(1) / flushed
        np.testing.assert_array_equal(
            out[:, 4], np.where(np.abs(reciprocal) < smallest, np.copysign(np.float32(0), reciprocal), reciprocal)
        )
        # Not np.fmax: Arm's instruction for it makes NaN of a signalling one.
        np.testing.assert_array_equal(out[:, 5], np.where(np.isnan(x), y, np.where(np.isnan(y), x, np.maximum(x, y))))
    assert np.signbit(out[:, 5])[(x == 0) & (y == 0) & (np.signbit(x) != np.signbit(y))].sum() == 0
