// Converts the fp32 sums of the backward to dQ: undoes the register order, scales and rounds. See dq_sum.cuh.
//
// A block of 256 threads takes one block of kBlockM queries: 128 threads for the numbers that each consumer has added.
#pragma once
#include <strobe/pipeline/dq_sum.cuh>
#include <strobe/pipeline/schedule.cuh>
#include <strobe/ptx/math.cuh>

namespace strobe {

template <class Config, class Params> struct ConvertDq {
  using T = typename Config::Element;
  static constexpr int kBlockM = Config::kStatBlock, kColumns = kBlockM == 128 ? 64 : 128;
  // A row of the tile in shared memory; 16 bytes more avoid bank conflicts.
  static constexpr u32 kRowBytes = kColumns * sizeof(T) + 16;
  static_assert(kBlockM * kRowBytes == Config::Bytes::tile, "the shared memory that Python asks for");

  STROBE_DEVICE static void run(const Params& p) {
    const StatBlock at = stat_block<Config>(block_idx(), p);
    const int first_row = at.m * kBlockM, rows = at.q.length - first_row;
    if (rows <= 0) return;
    wait_for_previous_grid();
    const i64 block = first_stat<Config>(p, at.head, at.batch, at.q.first) / kBlockM + at.m;
    const int consumer = thread_idx() / 128, t = thread_idx() % 128;
    const int row = 16 * (t / 32) + t % 32 / 4 + DqRows<kBlockM>::first(0, consumer),
              column = 2 * (t % 4) + DqRows<kBlockM>::column(consumer);
    const float* sums = p.dq_sum + (block * 2 + consumer) * kDqFloats + 4 * t;
    T* const dq = at.q.rows(p.dq, p.dq_batch, p.dq_head, p.dq_row, at.head, first_row);
    float* const dq_fp32 =
        at.q.rows(reinterpret_cast<float*>(p.dq), p.dq_batch, p.dq_head, p.dq_row, at.head, first_row);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float x[4];
      ld_global_l2(x, sums + i * 512, true);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float a = x[2 * r] * p.scale_grad, b = x[2 * r + 1] * p.scale_grad;
        if (!Config::kPartialOut)
          st_shared(smem_base() + (row + 8 * r) * kRowBytes + (column + 8 * i) * sizeof(T), pack2<T>(a, b));
        else if (row + 8 * r < rows && column + 8 * i < p.dim)
          st_global_x2(dq_fp32 + i64(row + 8 * r) * p.dq_row + column + 8 * i, a, b);
      }
    }
    if (Config::kPartialOut) return;
    sync_block();
    constexpr int kChunks = kColumns / kChunk<T>;
#pragma unroll
    for (int i = thread_idx(); i < kBlockM * kChunks; i += 256) {
      const int r = i / kChunks, chunk = i % kChunks;
      if (r < rows && chunk * kChunk<T> < p.dim)
        st_global(dq + i64(r) * p.dq_row + chunk * kChunk<T>, ld_shared_x4(smem_base() + r * kRowBytes + chunk * 16));
    }
  }
};

template <class Config, class Params> STROBE_DEVICE void convert_dq(const Params& p) {
  ConvertDq<Config, Params>::run(p);
}

}  // namespace strobe
