// Warp shuffles and votes, block and named barriers.
#pragma once
#include <strobe/ptx/base.cuh>

namespace strobe {

STROBE_DEVICE float shfl_xor(float x, int lane_mask) { return __shfl_xor_sync(0xffffffffu, x, lane_mask); }
STROBE_DEVICE u32 shfl(u32 x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
STROBE_DEVICE bool any(bool x) { return __any_sync(0xffffffffu, x); }
STROBE_DEVICE u32 ballot(bool x) { return __ballot_sync(0xffffffffu, x); }
STROBE_DEVICE int lanes_where(bool x) { return __popc(__ballot_sync(0xffffffffu, x)); }
STROBE_DEVICE void sync_warp() { __syncwarp(); }
STROBE_DEVICE void sync_block() { __syncthreads(); }

// Named barriers 1..15; `threads` counts everyone who syncs or arrives and is a multiple of 32.
STROBE_DEVICE void bar_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
STROBE_DEVICE void bar_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// One atomic increment that wraps to 0 after `last`; returns the old value.
STROBE_DEVICE u32 atomic_inc_wrap(u32* counter, u32 last) { return atomicInc(counter, last); }
// A counter by which blocks take turns: what was written before `release_turn` can be seen behind an `acquire_turn`
// that returns its value.
STROBE_DEVICE u32 acquire_turn(const u32* counter) {
  u32 x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
  return x;
}
STROBE_DEVICE void release_turn(u32* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
// All blocks see what this thread wrote before it, before what it writes afterwards.
STROBE_DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

}  // namespace strobe
