// Warp shuffles and votes, block and named barriers.
#pragma once
#include <strobe/emu/base.cuh>

namespace strobe {
namespace emu {

template <class Pick> inline u32 exchange(u32 value, const char* op, Site site, Pick source_lane) {
  struct Lane {
    u32 value, result;
    int source;
  } lane{value, 0, source_lane(block().running % 32)};
  ++block().counters.shuffles;
  block().converge(Scope::warp, op, false, site, &lane, [](void** lanes) {
    for (int i = 0; i < 32; ++i) {
      Lane* mine = static_cast<Lane*>(lanes[i]);
      mine->result = static_cast<Lane*>(lanes[mine->source & 31])->value;
    }
  });
  return lane.result;
}

}  // namespace emu

STROBE_DEVICE float shfl_xor(float x, int lane_mask, Site site = Site::here()) {
  return as_float(
      emu::exchange(as_bits(x), "shfl_xor", site, [=](u32 lane) { return static_cast<int>(lane) ^ lane_mask; }));
}
STROBE_DEVICE u32 shfl(u32 x, int lane, Site site = Site::here()) {
  return emu::exchange(x, "shfl", site, [=](u32) { return lane; });
}
STROBE_DEVICE bool any(bool x, Site site = Site::here()) {
  struct Lane {
    bool value;
  } lane{x};
  emu::block().converge(emu::Scope::warp, "any", false, site, &lane, [](void** lanes) {
    bool result = false;
    for (int i = 0; i < 32; ++i) result = result || static_cast<Lane*>(lanes[i])->value;
    for (int i = 0; i < 32; ++i) static_cast<Lane*>(lanes[i])->value = result;
  });
  return lane.value;
}
STROBE_DEVICE u32 ballot(bool x, Site site = Site::here()) {
  u32 lane = x;
  emu::block().converge(emu::Scope::warp, "ballot", false, site, &lane, [](void** lanes) {
    u32 bits = 0;
    for (int i = 0; i < 32; ++i) bits |= *static_cast<u32*>(lanes[i]) << i;
    for (int i = 0; i < 32; ++i) *static_cast<u32*>(lanes[i]) = bits;
  });
  return lane;
}
STROBE_DEVICE int lanes_where(bool x, Site site = Site::here()) {
  int lane = x;
  emu::block().converge(emu::Scope::warp, "lanes_where", false, site, &lane, [](void** lanes) {
    int count = 0;
    for (int i = 0; i < 32; ++i) count += *static_cast<int*>(lanes[i]);
    for (int i = 0; i < 32; ++i) *static_cast<int*>(lanes[i]) = count;
  });
  return lane;
}
STROBE_DEVICE void sync_warp(Site site = Site::here()) {
  emu::Block& b = emu::block();
  b.converge(emu::Scope::warp, "sync_warp", false, site, nullptr, [&b](void**) {
    if (!b.async) return;
    const u32 first = b.running / 32 * 32;
    std::vector<u32> all(b.slots, 0);
    for (u32 i = first; i < first + 32; ++i) b.join(all.data(), b.clock(i));
    for (u32 i = first; i < first + 32; ++i) {
      memcpy(b.clock(i), all.data(), b.slots * sizeof(u32));
      b.tick(i);
    }
  });
}
STROBE_DEVICE void sync_block(Site site = Site::here()) {
  if (emu::block().running == 0) ++emu::block().counters.block_barriers;
  emu::named_barrier(0, emu::block().thread_count, true, "sync_block", site);
}
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
  emu::Block& b = emu::block();
  emu::check_global(counter, 4, 4, false, "acquire_turn", site);
  b.pause("acquire_turn", site);
  return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}
STROBE_DEVICE void release_turn(u32* counter, Site site = Site::here()) {
  emu::check_global(counter, 4, 4, true, "release_turn", site);
  __atomic_fetch_add(counter, 1u, __ATOMIC_RELEASE);
  ++emu::block().turns_released;
}
STROBE_DEVICE void fence_device() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

}  // namespace strobe
