// Matrix products of a block whose warps form a grid: mma.sync with both operands in swizzled shared memory.
//
// A warp's accumulators are 16 x 16 tiles, 8 registers each. Along either axis the tiles of a warp are `first`, first +
// kStride, first + 2 * kStride, …, where `first` is its place in the grid and kStride the warps of the grid along this
// axis. Then every address is a constant away from that of the first tile, whatever the swizzle.
#pragma once
#include <strobe/tile/gemm_sm80.cuh>

namespace strobe {

constexpr u32 kTileRowsBytes = 16 * kPanelRowBytes;  // from a tile to the one below it

// An operand of kRows rows. kDown: the product sums down its rows, else along its columns; the operand's own tiles lie
// along the other axis.
template <bool kDown, int kRows, int kStride> struct Operand {
  u32 address;  // what this lane gives to ldmatrix for the first tile and step

  STROBE_DEVICE Operand(u32 lane_address, int first)
      : address(kDown ? step_columns(lane_address, kRows, first) : lane_address + first * kTileRowsBytes) {}

  // The operand without its first `tiles` tiles, which fill whole panels.
  STROBE_DEVICE Operand behind(int tiles) const {
    Operand rest = *this;
    rest.address += kStride * tiles / 4 * (kRows * kPanelRowBytes);
    return rest;
  }
  STROBE_DEVICE void load(u32 (&x)[4], int tile, int step) const {
    if (kDown)
      ldmatrix_x4_trans(step_columns(address, kRows, kStride * tile) + step * kTileRowsBytes, x[0], x[1], x[2], x[3]);
    else ldmatrix_x4(step_columns(address, kRows, step) + kStride * tile * kTileRowsBytes, x[0], x[1], x[2], x[3]);
  }
};
template <bool kDown, int kRows, int kStride>
STROBE_DEVICE Operand<kDown, kRows, kStride> left_operand(u32 tile, int first) {
  return {kDown ? lane_address_b(tile, kRows) : lane_address_a(tile, kRows), first};
}
template <bool kDown, int kRows, int kStride>
STROBE_DEVICE Operand<kDown, kRows, kStride> right_operand(u32 tile, int first) {
  return {kDown ? lane_address_a(tile, kRows) : lane_address_b(tile, kRows), first};
}

// D = A B over kSum summands, or D += A B.
template <class T, int kSum, bool kZero, int kTilesM, int kTilesN, class A, class B>
STROBE_DEVICE void gemm(float (&d)[kTilesM][kTilesN][8], const A& left, const B& right) {
#pragma unroll
  for (int step = 0; step < kSum / kMmaK<T>; ++step) {
    u32 a[kTilesM][4];
#pragma unroll
    for (int t = 0; t < kTilesM; ++t) left.load(a[t], t, step);
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
      u32 b[4];
      right.load(b, n, step);
#pragma unroll
      for (int t = 0; t < kTilesM; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* x = &d[t][n][4 * half];
          if (kZero && step == 0)
            mma_m16n8k16_zero<T>(x[0], x[1], x[2], x[3], a[t][0], a[t][1], a[t][2], a[t][3], b[2 * half],
                                 b[2 * half + 1]);
          else
            mma_m16n8k16<T>(x[0], x[1], x[2], x[3], a[t][0], a[t][1], a[t][2], a[t][3], b[2 * half], b[2 * half + 1]);
        }
    }
  }
}

// Writes a warp's tiles to a matrix of kRows rows in shared memory.
template <int kRows, int kStrideM, int kStrideN> struct Target {
  u32 address;

  STROBE_DEVICE Target(u32 matrix, int first_m, int first_n) {
    const u32 lane = thread_idx_again() % 32;
    address = matrix + chunk_offset(kRows, 16 * first_m + lane / 4, 2 * first_n) + 4 * (lane % 4);
  }
  template <class T> STROBE_DEVICE void store(const float (&x)[8], int m, int n) const {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {  // eight columns, four registers; then another eight
      const u32 at = step_columns(address ^ (i >> 2 << 4), kRows, kStrideN * n);
      st_shared(at + kStrideM * m * kTileRowsBytes + (i >> 1 & 1) * 8 * kPanelRowBytes, pack2<T>(x[i], x[i + 1]));
    }
  }
};

}  // namespace strobe
