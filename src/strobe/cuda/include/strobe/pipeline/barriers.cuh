// The numbers of all named barriers, in one place: two uses of one number would synchronise with each other. The
// hardware has 16.
#pragma once
#include <strobe/ptx/warp.cuh>

namespace strobe {

constexpr int kMaxConsumers = 3;
enum NamedBarrier : u32 {
  kBarrierBlock = 0,                                 // sync_block
  kBarrierTurn = 1,                                  // + consumer: its turn to issue products, see ping_pong.cuh
  kBarrierWarpgroup = kBarrierTurn + kMaxConsumers,  // + consumer: its 128 threads meet
  // The backward, which has two consumers:
  kBarrierDqFull = kBarrierWarpgroup + kMaxConsumers,  // + consumer: dQ is in shared memory, see dq_sum.cuh
  kBarrierDqEmpty = kBarrierDqFull + 2,                // + consumer: that buffer is free
  kBarrierConsumers = kBarrierDqEmpty + 2,             // both consumers meet
};

STROBE_DEVICE void sync_warpgroup(int consumer) { bar_sync(kBarrierWarpgroup + consumer, 128); }

}  // namespace strobe
