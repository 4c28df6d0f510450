// The lanes of a warp work together here.
#include <strobe/emu/engine/block.cuh>
#include <strobe/emu/warp.cuh>

namespace strobe {
namespace emu {

u32 thread_index() { return block().running; }
u32 block_index() { return block().index; }
u32 grid_size() { return block().grid; }

u32 warp_uniform(u32 x, Site site) {
  block().converge(Scope::warp, "warp_uniform", false, site, &x, [](void** lanes) {
    for (int i = 1; i < 32; ++i) *static_cast<u32*>(lanes[i]) = *static_cast<u32*>(lanes[0]);
  });
  return x;
}

u32 exchange(u32 value, int source_lane, const char* op, Site site) {
  struct Lane {
    u32 value, result;
    int source;
  } lane{value, 0, source_lane};
  ++block().counters.shuffles;
  block().converge(Scope::warp, op, false, site, &lane, [](void** lanes) {
    for (int i = 0; i < 32; ++i) {
      Lane* mine = static_cast<Lane*>(lanes[i]);
      mine->result = static_cast<Lane*>(lanes[mine->source & 31])->value;
    }
  });
  return lane.result;
}

u32 ballot(bool x, const char* op, Site site) {
  u32 lane = x;
  block().converge(Scope::warp, op, false, site, &lane, [](void** lanes) {
    u32 bits = 0;
    for (int i = 0; i < 32; ++i) bits |= *static_cast<u32*>(lanes[i]) << i;
    for (int i = 0; i < 32; ++i) *static_cast<u32*>(lanes[i]) = bits;
  });
  return lane;
}

void sync_warp(Site site) {
  Block& b = block();
  b.converge(Scope::warp, "sync_warp", false, site, nullptr, [&b](void**) {
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

void sync_block(Site site) {
  if (block().running == 0) ++block().counters.block_barriers;
  named_barrier(0, block().thread_count, true, "sync_block", site);
}

u32 acquire_turn(const u32* counter, Site site) {
  check_global(counter, 4, 4, false, "acquire_turn", site);
  block().pause("acquire_turn", site);
  return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}
void release_turn(u32* counter, Site site) {
  check_global(counter, 4, 4, true, "release_turn", site);
  __atomic_fetch_add(counter, 1u, __ATOMIC_RELEASE);
  ++block().turns_released;
}

}  // namespace emu
}  // namespace strobe
