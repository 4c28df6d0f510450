// The two matrix products of attention on wgmma, for one warpgroup that owns 64 query rows. Both only issue: fence before, commit
// and wait after.
#pragma once
#include <strobe/ptx/wgmma.cuh>
#include <strobe/tile/swizzle.cuh>

namespace strobe {

constexpr u32 kGroupBytes = 8 * kPanelRowBytes;  // eight rows of a panel: the unit of the swizzle

// Descriptors count in 16-byte units. Along K a K-major operand moves by 32 bytes inside a panel, then to the next panel; an MN-major
// one by 16 rows.
STROBE_DEVICE u64 k_major_step(u64 desc, int rows, int step) { return desc + (step / 4) * (rows * kPanelRowBytes / 16) + (step % 4) * 2; }
STROBE_DEVICE u64 mn_major_step(u64 desc, int step) { return desc + step * (16 * kPanelRowBytes / 16); }

STROBE_DEVICE u64 k_major(u32 tile) { return wgmma_desc(tile, 0, kGroupBytes); }
STROBE_DEVICE u64 mn_major(u32 tile, int rows) { return wgmma_desc(tile, rows * kPanelRowBytes, kGroupBytes); }

// S = Q K^T: q a 64-row tile, k the first kKeys rows of a tile of kRowsK, both in shared memory.
template <class T, int kKeys, int kDim, int kRowsK> STROBE_DEVICE void gemm_qk(float (&s)[kKeys / 2], u64 q, u64 k) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    if (step == 0)
      Wgmma<T, kKeys>::ss_zero(s, q, k);
    else
      Wgmma<T, kKeys>::ss(s, k_major_step(q, 64, step), k_major_step(k, kRowsK, step));
  }
}

// O += P V: P in registers, v a tile of kKeys rows.
template <class T, int kKeys, int kDimV> STROBE_DEVICE void gemm_pv(float (&o)[kDimV / 2], u32 (&p)[kKeys / 4], u64 v) {
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step)
    Wgmma<T, kDimV>::rs_t(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3], mn_major_step(v, step));
}

}  // namespace strobe
