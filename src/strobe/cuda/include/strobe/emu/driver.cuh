// Appended to a kernel's source: the C entry that runs all blocks of one launch. Includes nothing of its own.
#include <atomic>
#include <thread>

namespace strobe {
namespace emu {

struct Launch {  // the order is that of strobe.emulator.program._Launch
  const void* params;
  u64 params_bytes;
  const Buffer* buffers;
  u32 buffer_count, grid, threads, smem, async, seed, workers;
  Counters* counters;
  char* report;
  u64 report_capacity;
};

inline void call_kernel(const void* params) { ::kernel(*static_cast<const Params*>(params)); }

inline std::string launch(const Launch& launch) {
  if (launch.params_bytes != sizeof(Params))
    return format("params has %llu bytes, the kernel's Params %zu", launch.params_bytes, sizeof(Params));
  if (launch.threads == 0 || launch.threads % 32 || launch.threads > strobe_launch_bound)
    return format("threads=%u; must be a multiple of 32, at most the kernel's launch bound %u", launch.threads,
                  strobe_launch_bound);
  if (launch.smem > 232448) return format("smem=%u; at most 232448 bytes", launch.smem);
  std::unique_ptr<Params, void (*)(Params*)> params(
      static_cast<Params*>(aligned_alloc(128, (sizeof(Params) + 127) / 128 * 128)), [](Params* p) { free(p); });
  memcpy(static_cast<void*>(params.get()), launch.params, sizeof(Params));
  const std::vector<Buffer> buffers(launch.buffers, launch.buffers + launch.buffer_count);
  std::atomic<u32> next{0}, failed{~0u};
  std::vector<std::string> reports(launch.workers);
  std::vector<u32> failed_block(launch.workers, ~0u);
  std::vector<Counters> counters(launch.workers);
  auto work = [&](u32 worker) {
    Stacks stacks(launch.threads);
    if (!stacks.base) {
      reports[worker] = "no memory for the stacks of the emulated threads";
      failed_block[worker] = 0;
      failed = 0;
      return;
    }
    for (u32 i; (i = next++) < launch.grid && failed == ~0u;) {
      Block block(i, launch.grid, launch.threads, launch.smem, launch.async, launch.seed, params.get(), buffers,
                  call_kernel);
      block.run(stacks);
      const u64* from = reinterpret_cast<const u64*>(&block.counters);
      u64* to = reinterpret_cast<u64*>(&counters[worker]);
      for (size_t k = 0; k < sizeof(Counters) / sizeof(u64); ++k) to[k] += from[k];
      if (block.failure.empty()) continue;
      reports[worker] = block.failure, failed_block[worker] = i, failed = i;
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

}  // namespace emu
}  // namespace strobe

extern "C" __attribute__((visibility("default"))) int strobe_emulator_run(const strobe::emu::Launch* launch) {
  const std::string report = strobe::emu::launch(*launch);
  snprintf(launch->report, launch->report_capacity, "%s", report.c_str());
  return !report.empty();
}
