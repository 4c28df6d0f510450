// All rungs share this. Python prints in front of it: Element (float, or u16 for the bits of bf16), kDim, kSmem, and
// the arguments
//     struct Params { q, k, v, o, lse, workspace, …; float scale, scale_log2;
//                     int slices, len_q, len_k, causal, stage; … };
// Tensors are [slices][length][kDim] without gaps; a slice is one head of one sequence. There are as many key and value
// heads as query heads.
#pragma once
#include <strobe/ptx/math.cuh>
#include <strobe/ptx/memory.cuh>
#include <strobe/ptx/mma.cuh>
#include <strobe/ptx/warp.cuh>
#include <strobe/tile/softmax.cuh>

namespace strobe {

// A query sees the keys before this one. Causal masks are aligned at the end: the last query sees the last key.
STROBE_DEVICE int visible_keys(const Params& p, int query) {
  return p.causal ? max(0, min(p.len_k, query + p.len_k - p.len_q + 1)) : p.len_k;
}

STROBE_DEVICE float exp_natural(float x) { return exp2_approx(x * kLog2e); }
STROBE_DEVICE float log_natural(float x) { return log2_approx(x) * kLn2; }

// ld_global goes through the cache for data that nobody writes. This one is for data that the same kernel has written.
#ifdef __CUDACC__
STROBE_DEVICE float ld_global_fresh(const float* p) { return *static_cast<const volatile float*>(p); }
#else
STROBE_DEVICE float ld_global_fresh(const float* p, Site site = Site::here()) { return emu::load_global(p, site); }
#endif

// The scalar rungs lay their 256 threads out as 16 x 16: the 16 threads of a row are neighbours in a warp, and reduce
// with shuffles.
STROBE_DEVICE float row_max(float x) {
  for (int reach = 8; reach; reach /= 2) x = fmax(x, shfl_xor(x, reach));
  return x;
}
STROBE_DEVICE float row_sum(float x) {
  for (int reach = 8; reach; reach /= 2) x += shfl_xor(x, reach);
  return x;
}

// A tile of fp32 numbers in shared memory. One word of padding a row: else a column would lie in a single bank.
template <int kColumns> struct SharedTile {
  static constexpr int kPitch = kColumns + 1;
  STROBE_DEVICE static constexpr int bytes(int rows) { return rows * kPitch * 4; }
  u32 base;
  STROBE_DEVICE float get(int row, int column) const { return ld_shared_f32(base + (row * kPitch + column) * 4); }
  STROBE_DEVICE void set(int row, int column, float x) const { st_shared(base + (row * kPitch + column) * 4, x); }
  // Rows [first, first + rows) of a matrix of `length` rows; what lies beyond is zero.
  STROBE_DEVICE void load(const float* matrix, int first, int rows, int length, int threads) const {
    for (int i = thread_idx(); i < rows * kColumns; i += threads) {
      const int row = i / kColumns, column = i % kColumns;
      set(row, column, first + row < length ? ld_global(matrix + i64(first + row) * kColumns + column) : 0.f);
    }
  }
};

}  // namespace strobe
