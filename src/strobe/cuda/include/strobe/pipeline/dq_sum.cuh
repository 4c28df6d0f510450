// The fp32 sums of dQ over all key blocks: who adds to them, and their layout. dq_turns.cuh has the order of
// deterministic sums.
//
// A consumer leaves its 64 x 64 numbers in shared memory as its registers hold them, 16 bytes a thread at a time, and a
// warp of the producer warpgroup adds them to global memory, where they lie in the same order. convert_dq.cuh undoes
// that order.
#pragma once
#include <strobe/pipeline/barriers.cuh>
#include <strobe/pipeline/schedule.cuh>
#include <strobe/ptx/bulk.cuh>
#include <strobe/ptx/memory.cuh>
#include <strobe/ptx/tma.cuh>

namespace strobe {

constexpr int kDqFloats = 64 * 64;  // of one consumer
constexpr u32 kDqBytes = 4 * kDqFloats, kDqThreads = 128 + 32;

// The number of a consumer's part of the sums for block m of the queries.
template <class Config, class Params>
STROBE_DEVICE i64 dq_part(const Params& p, const KeyTile& tile, int head, int m, int consumer) {
  constexpr int kRows = Config::kStatBlock;
  return (first_stat<Config>(p, head, tile.batch, tile.q.first) / kRows + m) * 2 + consumer;
}

// The 64 x 64 numbers of a block of queries that a consumer has: half of the rows, or half of the columns.
template <int kBlockM> struct DqRows {
  static constexpr bool kHalfOfRows = kBlockM == 128;
  STROBE_DEVICE static int first(int m, int consumer) { return m * kBlockM + (kHalfOfRows ? 64 * consumer : 0); }
  STROBE_DEVICE static int column(int consumer) { return kHalfOfRows ? 0 : 64 * consumer; }
};

// One for each consumer and its adding warp; `buffer` is its part of shared memory.
struct DqSum {
  u32 buffer;
  int consumer;

  // ---- consumer -----------------------------------------------------------------------------------------------------
  STROBE_DEVICE void await_empty() const { bar_sync(kBarrierDqEmpty + consumer, kDqThreads); }
  STROBE_DEVICE void announce() const {
    fence_proxy_async();
    bar_arrive(kBarrierDqFull + consumer, kDqThreads);
  }
  STROBE_DEVICE void put(const float (&dq)[32]) const {
    const u32 to = buffer + thread_idx() % 128 * 16;
    await_empty();
#pragma unroll
    for (int i = 0; i < 8; ++i)
      st_shared(to + i * 2048,
                u32x4{as_bits(dq[4 * i]), as_bits(dq[4 * i + 1]), as_bits(dq[4 * i + 2]), as_bits(dq[4 * i + 3])});
    announce();
  }
  STROBE_DEVICE void add_to(float (&dq)[32]) const {  // what lies in the buffer
    const u32 from = buffer + thread_idx() % 128 * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32x4 x = ld_shared_x4(from + i * 2048);
      dq[4 * i] += as_float(x.x);
      dq[4 * i + 1] += as_float(x.y);
      dq[4 * i + 2] += as_float(x.z);
      dq[4 * i + 3] += as_float(x.w);
    }
  }

  // ---- adding warp --------------------------------------------------------------------------------------------------
  STROBE_DEVICE void add(float* sums) const {
    offer();
    await_full();
    if (thread_idx() % 32 == 0) {
      bulk_add(sums, buffer, kDqBytes);
      tma_store_commit();
      tma_store_wait_read<0>();
    }
    sync_warp();
  }
  STROBE_DEVICE void offer() const { bar_arrive(kBarrierDqEmpty + consumer, kDqThreads); }
  STROBE_DEVICE void await_full() const { bar_sync(kBarrierDqFull + consumer, kDqThreads); }
};

}  // namespace strobe
