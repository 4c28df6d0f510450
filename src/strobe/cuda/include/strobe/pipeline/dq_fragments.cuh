// The fp32 sums of dQ of backward_sm80. They lie in register order, so that the sums of a warp are contiguous.
// convert_dq_sm80.cuh undoes that order.
#pragma once
#include <strobe/ptx/atomic.cuh>
#include <strobe/ptx/memory.cuh>

namespace strobe {

// kBlockM x kDim sums of a grid of kWarps warps, kWarpsQ of them along the queries (see warp_gemm.cuh).
template <class Config> struct DqFragments {
  static constexpr int kWarpsQ = Config::kWarpsQ, kWarpsDim = Config::kWarps / kWarpsQ, kThreads = 32 * Config::kWarps;
  static constexpr int kTilesM = Config::kStatBlock / (16 * kWarpsQ), kTilesDim = Config::kDim / (16 * kWarpsDim);
  static constexpr int kFloats = Config::kStatBlock * Config::kDim, kFours = kFloats / (4 * kThreads);

  // The `four`-th group of four registers of a thread: rows r and r + 8, columns c and c + 1.
  STROBE_DEVICE static int row(int thread, int four) {
    return 16 * (thread / 32 % kWarpsQ + kWarpsQ * (four / (2 * kTilesDim))) + thread % 32 / 4;
  }
  STROBE_DEVICE static int column(int thread, int four) {
    return 16 * (thread / 32 / kWarpsQ + kWarpsDim * (four / 2 % kTilesDim)) + 8 * (four % 2) + 2 * (thread % 4);
  }

  // kVector: one instruction adds four numbers; else neighbouring lanes add neighbouring numbers.
  STROBE_DEVICE static void add(float* sums, int thread, int four, const float* x) {
    if constexpr (Config::kVector) {
      atomic_add_x4(sums + 4 * (four * kThreads + thread), x[0], x[1], x[2], x[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) atomic_add(sums + (4 * four + i) * kThreads + thread, x[i]);
    }
  }
  STROBE_DEVICE static void load(float (&x)[4], const float* sums, int thread, int four) {
    if constexpr (Config::kVector) {
      ld_global_l2(x, sums + 4 * (four * kThreads + thread), true);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = ld_global(sums + (4 * four + i) * kThreads + thread);
    }
  }
};

}  // namespace strobe
