// Reports of a block that cannot go on, or that left something behind.
#include <cstdarg>
#include <strobe/emu/engine/block.cuh>

namespace strobe {
namespace emu {

STROBE_COLD std::string place_of(Site site) { return std::string(site.file) + ":" + std::to_string(site.line); }

STROBE_COLD std::string format(const char* pattern, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, pattern);
  vsnprintf(text, sizeof text, pattern, arguments);
  va_end(arguments);
  return text;
}

// ---- who waits for what ---------------------------------------------------------------------------------------------
STROBE_COLD std::string name_threads(const std::vector<u32>& indices) {
  std::vector<std::pair<u32, u32>> runs;
  for (u32 i : indices) {
    if (!runs.empty() && runs.back().second + 1 == i) runs.back().second = i;
    else runs.emplace_back(i, i);
  }
  bool whole = true;
  for (auto& run : runs) whole = whole && run.first % 32 == 0 && run.second % 32 == 31;
  std::string text =
      whole ? (indices.size() == 32 ? "warp " : "warps ") : "thread" + std::string(indices.size() == 1 ? " " : "s ");
  for (size_t i = 0; i < runs.size() && i < 8; ++i) {
    const u32 from = runs[i].first / (whole ? 32 : 1), to = runs[i].second / (whole ? 32 : 1);
    text += (i ? ", " : "") + (from == to ? format("%u", from) : format("%u-%u", from, to));
  }
  return text + (runs.size() > 8 ? ", ..." : "") +
         format(" (%zu thread%s)", indices.size(), indices.size() == 1 ? "" : "s");
}

STROBE_COLD std::string Block::deadlock() {
  std::vector<std::pair<std::string, std::vector<u32>>> groups;
  for (const Thread& thread : threads) {
    std::string what;
    switch (thread.waiting) {
      case Waiting::nothing:
        continue;
      case Waiting::another_block:
        what = std::string(thread.op) + " at " + place_of(thread.site) + "; no other block ends the wait";
        break;
      case Waiting::exited:
        what = "exited";
        break;
      case Waiting::group: {
        const Group& group = (thread.parity == 32 ? warps : warpgroups)[thread.object];
        what = std::string(thread.op) + " at " + place_of(thread.site) +
               format("; divergent: only %u of the %u lanes of %s %u came", group.arrived, group.size,
                      thread.parity == 32 ? "warp" : "warpgroup", thread.object);
        break;
      }
      case Waiting::named_barrier: {
        const NamedBarrier& barrier = named[thread.object];
        what = (thread.object ? format("%s(%u, %u)", thread.op, thread.object, barrier.expected)
                              : std::string(thread.op)) +
               " at " + place_of(thread.site) + format("; %u of %u threads arrived", barrier.arrived, barrier.expected);
        break;
      }
      case Waiting::mbarrier: {
        const Mbarrier& barrier = mbarriers[thread.object];
        what = format("mbar_wait(0x%x, parity %u) at ", barrier.address - kSharedBase, thread.parity) +
               place_of(thread.site) +
               format("; barrier state: %u of %u arrivals, %lld bytes pending%s, phase %u",
                      barrier.count - barrier.pending, barrier.count, barrier.bytes,
                      barrier.bytes < 0 ? " (more came than were expected)" : "", barrier.phase);
        break;
      }
    }
    size_t i = 0;
    while (i < groups.size() && groups[i].first != what) ++i;
    if (i == groups.size()) groups.emplace_back(what, std::vector<u32>());
    groups[i].second.push_back(thread.index);
  }
  std::string text = format("deadlock in block %u: no thread can go on", index);
  for (auto& group : groups) text += "\n  " + name_threads(group.second) + ": " + group.first;
  return text;
}

STROBE_COLD std::string Block::left_over() {
  for (const Mbarrier& barrier : mbarriers)
    if (barrier.bytes != 0)
      return format(
          "block %u ended with %lld bytes pending on the mbarrier at 0x%x (phase %u): expect_tx and the copies do not "
          "agree, or nobody waited",
          index, barrier.bytes, barrier.address - kSharedBase, barrier.phase);
  if (!async) return "";
  for (const Thread& thread : threads)
    if (!thread.stores.empty())
      return format(
                 "block %u ended while a TMA store of thread %u may still read shared memory (missing "
                 "tma_store_wait_read)\n  at ",
                 index, thread.index) +
             place_of(thread.stores[0].site);
  return "";
}

}  // namespace emu
}  // namespace strobe
