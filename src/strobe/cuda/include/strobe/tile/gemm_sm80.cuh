// The two matrix products of attention on mma.sync, for one warp that owns kTiles * 16 query rows.
#pragma once
#include <strobe/ptx/memory.cuh>
#include <strobe/ptx/mma.cuh>
#include <strobe/ptx/warp.cuh>
#include <strobe/tile/swizzle.cuh>

namespace strobe {

// ldmatrix addresses of one lane for the 16x16 block in the corner of a tile. `a`: rows are rows of the left operand
// (Q), or keys of the transposed right one (V). `b`: rows are columns of the right operand (K).
STROBE_DEVICE u32 lane_address_a(u32 tile, int rows) {
  const u32 lane = thread_idx_again();  // computed anew for each block of keys: cheaper than registers
  return tile + chunk_offset(rows, lane & 15, (lane >> 4) & 1);
}
STROBE_DEVICE u32 lane_address_b(u32 tile, int rows) {
  const u32 lane = thread_idx_again();
  return tile + chunk_offset(rows, (lane & 7) | ((lane >> 1) & 8), (lane >> 3) & 1);
}

// S = Q K^T. `q` is the lane address of the warp's first rows in a Q tile of kRowsQ rows, `k` that of a K tile of
// kKeys.
template <class T, int kTiles, int kRowsQ, int kKeys, int kDim>
STROBE_DEVICE void gemm_qk(float (&s)[kTiles][kKeys / 2], u32 q, u32 k) {
#pragma unroll
  for (int step = 0; step < kDim / kMmaK<T>; ++step) {
    if (step) sync_warp();
    u32 a[kTiles][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      ldmatrix_x4(step_columns(q, kRowsQ, step) + t * (16 * kPanelRowBytes), a[t][0], a[t][1], a[t][2], a[t][3]);
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      u32 b[4];
      ldmatrix_x4(step_columns(k, kKeys, step) + n * (16 * kPanelRowBytes), b[0], b[1], b[2], b[3]);
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* d = &s[t][8 * n + 4 * half];
          if (step == 0)
            mma_m16n8k16_zero<T>(d[0], d[1], d[2], d[3], a[t][0], a[t][1], a[t][2], a[t][3], b[2 * half],
                                 b[2 * half + 1]);
          else
            mma_m16n8k16<T>(d[0], d[1], d[2], d[3], a[t][0], a[t][1], a[t][2], a[t][3], b[2 * half], b[2 * half + 1]);
        }
    }
  }
}

// O += P V, with P in registers. `v` is the lane address of a V tile of kKeys rows, which ldmatrix transposes: it does
// that with 16-bit elements alone.
template <class T, int kTiles, int kKeys, int kDimV>
STROBE_DEVICE void gemm_pv(float (&o)[kTiles][kDimV / 2], const u32 (&p)[kTiles][kKeys / 4], u32 v) {
  static_assert(sizeof(T) == 2, "what ldmatrix transposes");
#pragma unroll
  for (int step = 0; step < kKeys / kMmaK<T>; ++step) {
    if (step) sync_warp();
#pragma unroll
    for (int n = 0; n < kDimV / 16; ++n) {
      u32 b[4];
      ldmatrix_x4_trans(step_columns(v, kKeys, n) + step * (16 * kPanelRowBytes), b[0], b[1], b[2], b[3]);
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* d = &o[t][8 * n + 4 * half];
          const u32* a = &p[t][4 * step];
          mma_m16n8k16<T>(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b[2 * half], b[2 * half + 1]);
        }
    }
  }
}

}  // namespace strobe
