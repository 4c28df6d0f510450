// Sums of dQ in fp32, to which all blocks of keys add: who writes them, in which order, and in which layout.
//
// A consumer leaves its 64 x 64 numbers in shared memory as its registers hold them, 16 bytes a thread at a time, and a
// warp of the producer's adds them to global memory, where they lie in the same order. convert_dq.cuh undoes it.
#pragma once
#include <strobe/pipeline/barriers.cuh>
#include <strobe/ptx/bulk.cuh>
#include <strobe/ptx/memory.cuh>
#include <strobe/ptx/tma.cuh>

namespace strobe {

constexpr int kDqFloats = 64 * 64;  // of one consumer
constexpr u32 kDqBytes = 4 * kDqFloats, kDqThreads = 128 + 32;

// One for each consumer and its adding warp; `buffer` is its part of shared memory.
struct DqSum {
  u32 buffer;
  int consumer;

  // Consumer: wait until the buffer is empty, put fours of registers [first, end), which are constants, and hand it
  // over.
  STROBE_DEVICE void begin_put() const { bar_sync(kBarrierDqEmpty + consumer, kDqThreads); }
  STROBE_DEVICE void put(const float (&dq)[32], int first, int end) const {
    const u32 to = buffer + thread_idx() % 128 * 16;
#pragma unroll
    for (int i = first; i < end; ++i)
      st_shared(to + i * 2048,
                u32x4{as_bits(dq[4 * i]), as_bits(dq[4 * i + 1]), as_bits(dq[4 * i + 2]), as_bits(dq[4 * i + 3])});
  }
  STROBE_DEVICE void end_put() const {
    fence_proxy_async();
    bar_arrive(kBarrierDqFull + consumer, kDqThreads);
  }

  // Adding warp. With `turn`, sums are taken in a fixed order: this is the `number`-th of them.
  template <bool kDeterministic> STROBE_DEVICE void add(float* to, u32* turn, u32 number) const {
    bar_arrive(kBarrierDqEmpty + consumer, kDqThreads);
    bar_sync(kBarrierDqFull + consumer, kDqThreads);
    if (thread_idx() % 32 == 0) {
      if (kDeterministic)
        while (acquire_turn(turn) != number) {
        }
      bulk_add(to, buffer, kDqBytes);
      tma_store_commit();
      if (kDeterministic) {
        bulk_wait_written();
        release_turn(turn);
      } else {
        tma_store_wait_read<0>();
      }
    }
    sync_warp();
  }
};

}  // namespace strobe
