// dQ from the sums of backward_sm80: out of the order of registers, scaled and rounded. See dq_fragments.cuh.
//
// A block of 256 threads takes one block of queries.
#pragma once
#include <strobe/pipeline/dq_fragments.cuh>
#include <strobe/pipeline/query_blocks.cuh>
#include <strobe/ptx/math.cuh>
#include <strobe/ptx/tma.cuh>

namespace strobe {

template <class Config, class Params> STROBE_DEVICE void convert_dq_sm80(const Params& p) {
  using T = typename Config::Element;
  using Sums = DqFragments<Config>;
  constexpr int kBlockM = Config::kStatBlock, kChunks = Config::kDim / 8;
  constexpr u32 kRowBytes = Config::kDim * 2 + 16;  // of the tile in shared memory: 16 more, so that rows meet no banks
  static_assert(kBlockM * kRowBytes == Config::kSmem, "the shared memory that Python asks for");
  const int bh = quotient(block_idx(), p.stat_blocks), m = block_idx() - bh * p.stat_blocks;
  const int batch = quotient(bh, p.heads), head = bh - batch * p.heads;
  const int first_row = Config::kVarlen ? ld_global(p.cu_q + batch) : 0;
  const int len_q = Config::kVarlen ? ld_global(p.cu_q + batch + 1) - first_row : p.len_q;
  if (m * kBlockM >= len_q) return;
  wait_for_previous_grid();
  const i64 first =
      (Config::kVarlen ? 0 : batch) * p.dq_batch + head * p.dq_head + i64(first_row + m * kBlockM) * p.dq_row;
  const float* sums = p.dq_sum + (first_stat<Config>(p, head, batch, first_row) / kBlockM + m) * Sums::kFloats;
#pragma unroll 2
  for (int i = thread_idx(); i < Sums::kFloats / 4; i += 256) {
    const int thread = i % Sums::kThreads, four = i / Sums::kThreads;
    float x[4];
    Sums::load(x, sums, thread, four);
    if constexpr (Config::kPartialOut) {
      const int row = Sums::row(thread, four), column = Sums::column(thread, four);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (m * kBlockM + row + 8 * r < len_q && column < p.dim)
          st_global_x2(reinterpret_cast<float*>(p.dq) + first + i64(row + 8 * r) * p.dq_row + column,
                       x[2 * r] * p.scale_grad, x[2 * r + 1] * p.scale_grad);
      continue;
    }
    const u32 to = smem_base() + Sums::row(thread, four) * kRowBytes + Sums::column(thread, four) * 2;
    st_shared(to, pack2<T>(x[0] * p.scale_grad, x[1] * p.scale_grad));
    st_shared(to + 8 * kRowBytes, pack2<T>(x[2] * p.scale_grad, x[3] * p.scale_grad));
  }
  if (Config::kPartialOut) return;
  sync_block();
  u16* dq = p.dq + first;
#pragma unroll 2
  for (int i = thread_idx(); i < kBlockM * kChunks; i += 256) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (m * kBlockM + row < len_q && chunk * 8 < p.dim)
      st_global(dq + i64(row) * p.dq_row + chunk * 8, ld_shared_x4(smem_base() + row * kRowBytes + chunk * 16));
  }
}

}  // namespace strobe
