// Hopper: bulk copies of contiguous bytes.
#include <mutex>
#include <strobe/emu/bulk.cuh>
#include <strobe/emu/engine/block.cuh>

namespace strobe {
namespace emu {

inline void check_bulk(const void* global, u32 shared, u32 bytes, bool write, const char* op, Site site) {
  if (bytes == 0 || bytes % 16) block().fail(format("%s: %u bytes; must be a multiple of 16", op, bytes), site);
  check_shared(shared, bytes, 16, op, site);
  for (u32 at = 0; at < bytes; at += 16) check_global(static_cast<const char*>(global) + at, 16, 16, write, op, site);
}
inline std::mutex& sums() {  // blocks run on several threads of the host
  static std::mutex mutex;
  return mutex;
}

void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar, Site site) {
  Block& b = block();
  check_bulk(src, dst, bytes, false, "bulk_load", site);
  const u32 at = find_mbarrier(bar, "bulk_load", site);
  if (b.async && !b.mbarriers[at].fenced)
    b.fail("bulk_load: its mbarrier was initialised, but mbar_init_fence() was not executed", site);
  b.counters.shared_bytes_written += bytes;
  const u32 slot = b.thread_count + at;
  if (b.async) {
    check_overwrite(b.running, dst, bytes, nullptr, "bulk_load", site);
    note_write(slot, b.mbarriers[at].phase + 1, dst, bytes, true, false, site);
    poison(dst, bytes);
  }
  auto land = [=, &b] {
    memcpy(shared_at(dst), src, bytes);
    if (b.async) note_write(slot, b.mbarriers[at].phase + 1, dst, bytes, false, false, site);
    b.mbarriers[at].bytes -= bytes;
    complete_phase(at);
  };
  if (b.async) b.landings.push_back(land);
  else land();
}

// Copies from shared to global memory.
void bulk_out(float* dst, u32 src, u32 bytes, bool add, const char* op, Site site) {
  Block& b = block();
  check_bulk(dst, src, bytes, true, op, site);
  b.counters.shared_bytes_read += bytes;
  if (b.async) {
    note_read(b.running, src, bytes, Proxy::async, op, site);
    note_reader_in_flight(src, bytes, 1);
  }
  auto read = [=, &b, &thread = b.self()] {
    std::vector<float> taken(bytes / 4);
    memcpy(taken.data(), shared_at(src), bytes);
    auto write = [=] {
      std::lock_guard<std::mutex> one_at_a_time(sums());
      for (size_t i = 0; i < taken.size(); ++i) dst[i] = add ? dst[i] + taken[i] : taken[i];
    };
    if (b.async) {
      note_reader_in_flight(src, bytes, -1);
      thread.writes.push_back(write);
    } else {
      write();
    }
  };
  if (b.async) b.self().stores.push_back(StoreInFlight{read, b.self().store_groups + 1, site});
  else read();
}

void bulk_wait_written() {
  wait_stores(0);
  Thread& thread = self();
  for (const auto& write : thread.writes) write();
  thread.writes.clear();
}

}  // namespace emu
}  // namespace strobe
