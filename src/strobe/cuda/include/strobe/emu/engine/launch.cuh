// Runs all blocks of one launch.
#include <atomic>
#include <cstdlib>
#include <thread>
#include <strobe/emu/engine/block.cuh>

namespace strobe {
namespace emu {

inline void Block::enter() {
  Block& b = block();
  b.kernel(b.params);
  Thread& thread = b.self();
  thread.waiting = Waiting::exited;
  ++b.finished;
  b.leave(thread.fiber);
}

inline void Block::start(const Stacks& stacks) {
  for (u32 i = 0; i < thread_count; ++i) {
    threads[i].fiber.start(stacks.top(i), enter);
    make_ready(i);
  }
}

bool Block::run() {
  current_block() = this;
  paused = false;
  while (failure.empty() && !paused) {
    const int next = next_ready();
    if (next < 0) break;
    running = static_cast<u32>(next);
    Fiber::change(scheduler, threads[next].fiber);
  }
  if (failure.empty() && paused) return false;
  for (const Thread& thread : threads)
    for (const auto& write : thread.writes) write();
  if (failure.empty()) failure = finished < thread_count ? deadlock() : left_over();
  for (u32 warp = 0; warp < warps.size(); ++warp) count_bank_conflicts(warp);
  current_block() = nullptr;
  return true;
}

struct Launch {  // the order is that of strobe.emulator.program._Launch
  const void* params;
  u64 params_bytes;
  const Buffer* buffers;
  u32 buffer_count, grid, threads, smem, async, seed, workers, together;
  Counters* counters;
  char* report;
  u64 report_capacity;
};

struct Slot {  // room for one block
  Stacks stacks;
  std::unique_ptr<Block> block;
  explicit Slot(u32 threads) : stacks(threads) {}
};

// The blocks that one host thread has begun: several where blocks wait for others. Each runs until it waits. Who is
// next goes by number, in async mode by chance (by seed).
struct Slots {
  std::vector<std::unique_ptr<Slot>> all;
  Random random;
  u32 at = ~0u, idle = 0;

  Slots(u32 count, u32 threads, u32 seed) : random{(u64(seed) + 1) * 0x9e3779b97f4a7c15ull} {
    for (u32 i = 0; i < count; ++i) all.emplace_back(new Slot(threads));
  }
  Slot* next(bool by_chance) {  // null if all are empty
    at = u32(by_chance ? random() % all.size() : at + 1);
    for (u32 i = 0; i < all.size(); ++i, ++at)
      if (all[at % all.size()]->block) return all[at % all.size()].get();
    return nullptr;
  }
  // Says whether all blocks wait for each other: for a long time, nobody has done anything else.
  bool stuck(const Block& ran, u64 released_before) {
    idle = ran.only_waits() && ran.turns_released == released_before ? idle + 1 : 0;
    return idle > 1000 * all.size();
  }
};

std::string run_blocks(const Launch& launch, const Kernel& kernel) {
  if (launch.params_bytes != kernel.params_bytes)
    return format("params has %llu bytes, the kernel's Params %llu", launch.params_bytes, kernel.params_bytes);
  if (launch.threads == 0 || launch.threads % 32 || launch.threads > kernel.launch_bound)
    return format("threads=%u; must be a multiple of 32, at most the kernel's launch bound %u", launch.threads,
                  kernel.launch_bound);
  if (launch.smem > 232448) return format("smem=%u; at most 232448 bytes", launch.smem);
  std::unique_ptr<void, void (*)(void*)> params(aligned_alloc(128, (kernel.params_bytes + 127) / 128 * 128), free);
  memcpy(params.get(), launch.params, kernel.params_bytes);
  const std::vector<Buffer> buffers(launch.buffers, launch.buffers + launch.buffer_count);
  std::atomic<u32> next{0}, failed{~0u};
  std::vector<std::string> reports(launch.workers);
  std::vector<u32> failed_block(launch.workers, ~0u);
  std::vector<Counters> counters(launch.workers);
  auto work = [&](u32 worker) {
    auto fail = [&](u32 block, const std::string& report) {
      reports[worker] = report, failed_block[worker] = block, failed = block;
    };
    Slots slots(launch.together, launch.threads, launch.seed);
    for (auto& slot : slots.all)
      if (!slot->stacks.base) return fail(0, "no memory for the stacks of the emulated threads");
    while (failed == ~0u) {
      for (auto& slot : slots.all) {
        if (slot->block || next >= launch.grid) continue;
        const u32 i = next++;
        if (i >= launch.grid) continue;
        slot->block.reset(new Block(i, launch.grid, launch.threads, launch.smem, launch.async, launch.seed,
                                    params.get(), buffers, kernel.run));
        slot->block->start(slot->stacks);
      }
      Slot* slot = slots.next(launch.async);
      if (!slot) return;
      Block& block = *slot->block;
      const u64 released = block.turns_released;
      if (!block.run()) {
        if (slots.stuck(block, released)) fail(block.index, block.deadlock());
        continue;
      }
      slots.idle = 0;
      const u64* from = reinterpret_cast<const u64*>(&block.counters);
      u64* to = reinterpret_cast<u64*>(&counters[worker]);
      for (size_t k = 0; k < sizeof(Counters) / sizeof(u64); ++k) to[k] += from[k];
      if (!block.failure.empty()) fail(block.index, block.failure);
      slot->block.reset();
    }
  };
  std::vector<std::thread> threads;
  for (u32 i = 1; i < launch.workers; ++i) threads.emplace_back(work, i);
  work(0);
  for (std::thread& thread : threads) thread.join();
  u32 first = 0;
  for (u32 i = 0; i < launch.workers; ++i) {
    if (failed_block[i] < failed_block[first]) first = i;
    const u64* from = reinterpret_cast<const u64*>(&counters[i]);
    u64* to = reinterpret_cast<u64*>(launch.counters);
    for (size_t k = 0; k < sizeof(Counters) / sizeof(u64); ++k) to[k] += from[k];
  }
  return reports[first];
}

int run(const Launch& launch, const Kernel& kernel) {
  const std::string report = run_blocks(launch, kernel);
  snprintf(launch.report, launch.report_capacity, "%s", report.c_str());
  return !report.empty();
}

}  // namespace emu
}  // namespace strobe
