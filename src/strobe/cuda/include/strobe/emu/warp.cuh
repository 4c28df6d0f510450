// Warp shuffles and votes, block and named barriers.
#pragma once
#include <strobe/emu/base.cuh>
#include <strobe/emu/memory.cuh>

namespace strobe {
namespace emu {

u32 exchange(u32 value, int source_lane, const char* op, Site site);
u32 ballot(bool x, const char* op, Site site);
void sync_warp(Site site);
void sync_block(Site site);
void named_barrier(u32 id, u32 threads, bool wait, const char* op, Site site);
u32 acquire_turn(const u32* counter, Site site);
void release_turn(u32* counter, Site site);

}  // namespace emu

STROBE_DEVICE float shfl_xor(float x, int lane_mask, Site site = Site::here()) {
  return as_float(emu::exchange(as_bits(x), static_cast<int>(thread_idx() % 32) ^ lane_mask, "shfl_xor", site));
}
STROBE_DEVICE u32 shfl(u32 x, int lane, Site site = Site::here()) { return emu::exchange(x, lane, "shfl", site); }
STROBE_DEVICE bool any(bool x, Site site = Site::here()) { return emu::ballot(x, "any", site) != 0; }
STROBE_DEVICE u32 ballot(bool x, Site site = Site::here()) { return emu::ballot(x, "ballot", site); }
STROBE_DEVICE int lanes_where(bool x, Site site = Site::here()) {
  return __builtin_popcount(emu::ballot(x, "lanes_where", site));
}
STROBE_DEVICE void sync_warp(Site site = Site::here()) { emu::sync_warp(site); }
STROBE_DEVICE void sync_block(Site site = Site::here()) { emu::sync_block(site); }
STROBE_DEVICE void bar_sync(u32 id, u32 threads, Site site = Site::here()) {
  emu::named_barrier(id, threads, true, "bar_sync", site);
}
STROBE_DEVICE void bar_arrive(u32 id, u32 threads, Site site = Site::here()) {
  emu::named_barrier(id, threads, false, "bar_arrive", site);
}

STROBE_DEVICE u32 atomic_inc_wrap(u32* counter, u32 last, Site site = Site::here()) {
  emu::check_global(counter, 4, 4, true, "atomic_inc_wrap", site);
  u32 old = __atomic_load_n(counter, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(counter, &old, old >= last ? 0 : old + 1, false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
  return old;
}
STROBE_DEVICE u32 acquire_turn(const u32* counter, Site site = Site::here()) {
  return emu::acquire_turn(counter, site);
}
STROBE_DEVICE void release_turn(u32* counter, Site site = Site::here()) { emu::release_turn(counter, site); }
STROBE_DEVICE void fence_device() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

}  // namespace strobe
