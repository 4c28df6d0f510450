// Converts the fp32 sums of backward_sm80 to dQ: undoes the register order, scales and rounds. See dq_fragments.cuh.
//
// A block of 256 threads takes one block of queries.
#pragma once
#include <strobe/pipeline/dq_fragments.cuh>
#include <strobe/pipeline/schedule.cuh>
#include <strobe/ptx/math.cuh>
#include <strobe/ptx/tma.cuh>

namespace strobe {

template <class Config, class Params> STROBE_DEVICE void convert_dq_sm80(const Params& p) {
  using T = typename Config::Element;
  using Sums = DqFragments<Config>;
  constexpr int kBlockM = Config::kStatBlock, kChunks = Config::kDim / kChunk<T>;
  // A row of the tile in shared memory; 16 bytes more avoid bank conflicts.
  constexpr u32 kRowBytes = Config::kDim * sizeof(T) + 16;
  static_assert(kBlockM * kRowBytes == Config::Bytes::tile, "the shared memory that Python asks for");
  const StatBlock at = stat_block<Config>(block_idx(), p);
  const int first_row = at.m * kBlockM, rows = at.q.length - first_row;
  if (rows <= 0) return;
  wait_for_previous_grid();
  T* const dq = at.q.rows(p.dq, p.dq_batch, p.dq_head, p.dq_row, at.head, first_row);
  float* const dq_fp32 = at.q.rows(reinterpret_cast<float*>(p.dq), p.dq_batch, p.dq_head, p.dq_row, at.head, first_row);
  const float* sums =
      p.dq_sum + (first_stat<Config>(p, at.head, at.batch, at.q.first) / kBlockM + at.m) * Sums::kFloats;
#pragma unroll 2
  for (int i = thread_idx(); i < Sums::kFloats / 4; i += 256) {
    const int thread = i % Sums::kThreads, four = i / Sums::kThreads;
    float x[4];
    Sums::load(x, sums, thread, four);
    if constexpr (Config::kPartialOut) {
      const int row = Sums::row(thread, four), column = Sums::column(thread, four);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (row + 8 * r < rows && column < p.dim)
          st_global_x2(dq_fp32 + i64(row + 8 * r) * p.dq_row + column, x[2 * r] * p.scale_grad,
                       x[2 * r + 1] * p.scale_grad);
      continue;
    }
    const u32 to = smem_base() + Sums::row(thread, four) * kRowBytes + Sums::column(thread, four) * sizeof(T);
    st_shared(to, pack2<T>(x[0] * p.scale_grad, x[1] * p.scale_grad));
    st_shared(to + 8 * kRowBytes, pack2<T>(x[2] * p.scale_grad, x[3] * p.scale_grad));
  }
  if (Config::kPartialOut) return;
  sync_block();
#pragma unroll 2
  for (int i = thread_idx(); i < kBlockM * kChunks; i += 256) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (row < rows && chunk * kChunk<T> < p.dim)
      st_global(dq + i64(row) * p.dq_row + chunk * kChunk<T>, ld_shared_x4(smem_base() + row * kRowBytes + chunk * 16));
  }
}

}  // namespace strobe
