// Named barriers and mbarriers: counts, phases, and the happens-before they create.
#include <strobe/emu/engine/block.cuh>
#include <strobe/emu/tma.cuh>
#include <strobe/emu/warp.cuh>

namespace strobe {
namespace emu {

void named_barrier(u32 id, u32 threads, bool wait, const char* op, Site site) {
  Block& b = block();
  const u32 me = b.running;
  if (id > 15) b.fail(format("%s: barrier id %u, but there are 16 (0..15)", op, id), site);
  if (threads == 0 || threads % 32 || threads > b.thread_count)
    b.fail(format("%s: %u threads; must be a multiple of 32, at most the block's %u", op, threads, b.thread_count),
           site);
  NamedBarrier& barrier = b.named[id];
  if (barrier.arrived == 0) barrier.expected = threads;
  if (barrier.expected != threads)
    b.fail(format("%s: barrier %u with %u threads, but %u threads that arrived before gave %u", op, id, threads,
                  barrier.arrived, barrier.expected),
           site);
  if (b.async) b.join(barrier.clock.data(), b.clock(me));
  if (++barrier.arrived < barrier.expected) {
    if (b.async && !wait) b.tick(me);
    if (!wait) return;
    barrier.waiting.push_back(me);
    return b.suspend(Waiting::named_barrier, op, site, id);
  }
  barrier.arrived = 0;
  std::vector<u32> released;
  released.swap(barrier.waiting);
  for (u32 thread : released) b.make_ready(thread);
  if (wait) released.push_back(me);
  else if (b.async) b.tick(me);
  if (b.async) {
    for (u32 thread : released) {  // the barrier's clock covers that of everyone who came
      memcpy(b.clock(thread), barrier.clock.data(), b.slots * sizeof(u32));
      b.tick(thread);
    }
    barrier.clock.assign(b.slots, 0);
  }
}

u32 find_mbarrier(u32 address, const char* op, Site site) {
  Block& b = block();
  const u32 offset = address - kSharedBase;
  if (address % 8) b.fail(format("%s: mbarrier at shared offset 0x%x is not 8-byte aligned", op, offset), site);
  if (address < kSharedBase || offset + 8 > b.smem)
    b.fail(format("%s: mbarrier at shared offset 0x%x lies outside shared memory (%u bytes)", op, offset, b.smem),
           site);
  const int at = b.mbarrier_at[offset / 4];
  if (at < 0) b.fail(format("%s: no mbarrier was initialised at shared offset 0x%x", op, offset), site);
  const Mbarrier& barrier = b.mbarriers[at];
  if (b.async && barrier.initialiser != b.running && b.clock(b.running)[barrier.initialiser] < barrier.init_clock)
    b.fail(format("%s: the mbarrier at 0x%x was initialised by thread %u with no barrier in between", op, offset,
                  barrier.initialiser),
           site);
  return static_cast<u32>(at);
}

void complete_phase(u32 at) {
  Block& b = block();
  Mbarrier& barrier = b.mbarriers[at];
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.count;
  if (b.async) {
    barrier.arriving[b.thread_count + at] = barrier.phase;
    b.join(barrier.completed.data(), barrier.arriving.data());
    barrier.arriving.assign(b.slots, 0);
  }
  for (u32 thread : barrier.waiting) b.make_ready(thread);
  barrier.waiting.clear();
}

void mbar_arrive(u32 address, u32 bytes, const char* op, Site site) {
  Block& b = block();
  const u32 at = find_mbarrier(address, op, site);
  Mbarrier& barrier = b.mbarriers[at];
  if (barrier.pending == 0)
    b.fail(
        format(
            "%s: one arrival too many on the mbarrier at 0x%x: all %u of phase %u are in, %lld bytes are still to come",
            op, address - kSharedBase, barrier.count, barrier.phase, barrier.bytes),
        site);
  if (b.async) {
    b.join(barrier.arriving.data(), b.clock(b.running));
    b.tick(b.running);
  }
  --barrier.pending;
  barrier.bytes += bytes;
  complete_phase(at);
}

}  // namespace emu
}  // namespace strobe
