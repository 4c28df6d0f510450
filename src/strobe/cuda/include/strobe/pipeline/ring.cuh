// A ring of buffers between one producer and its consumers, with two mbarriers a buffer: `full` (the copy has landed)
// and `empty` (all consumers have read it). Position and parity run on across tiles.
#pragma once
#include <strobe/ptx/tma.cuh>
#include <strobe/ptx/warp.cuh>

namespace strobe {

STROBE_DEVICE bool elected() { return thread_idx() % 32 == 0; }  // lane 0 arrives for its warp

template <int kStages> struct Ring {
  u32 full, empty;  // shared-memory addresses of the first barrier of each kind
  u32 stage = 0, parity;

  // Consumers wait for the first fill (parity 0); the producer finds the buffers empty (parity 1 passes on a fresh
  // barrier).
  STROBE_DEVICE Ring(u32 barriers, bool producer) : full(barriers), empty(barriers + 8 * kStages), parity(producer) {}

  static constexpr int kBuffers = kStages;
  static constexpr u32 kBytes = 16 * kStages;
  STROBE_DEVICE static void init(u32 barriers, u32 arrivals_to_empty, u32 arrivals_to_full = 1) {
    for (int i = 0; i < kStages; ++i) {
      mbar_init(barriers + 8 * i, arrivals_to_full);
      mbar_init(barriers + 8 * (kStages + i), arrivals_to_empty);
    }
  }
  STROBE_DEVICE u32 full_barrier() const { return full + 8 * stage; }
  STROBE_DEVICE void wait_full() const { mbar_wait(full + 8 * stage, parity); }
  STROBE_DEVICE void wait_empty() const { mbar_wait(empty + 8 * stage, parity); }
  STROBE_DEVICE void release() const { mbar_arrive(empty + 8 * stage); }
  STROBE_DEVICE void next() {
    if (kStages == 1 || ++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  // Producer: wait until the buffer is empty and expect `bytes` in it; their copies complete on the barrier returned.
  STROBE_DEVICE u32 begin_load(u32 bytes) const {
    wait_empty();
    mbar_arrive_expect_tx(full_barrier(), bytes);
    return full_barrier();
  }
  // Consumer: one arrival a warp, then the next buffer.
  STROBE_DEVICE void release_and_advance() {
    if (elected()) release();
    next();
  }
  STROBE_DEVICE void skip() {
    wait_full();
    sync_warp();  // else one lane's release could let the barrier run a round ahead of another's wait
    release_and_advance();
  }
};

}  // namespace strobe
