// Every access to global or shared memory passes through here: bounds, alignment, and in asynchronous mode
// happens-before.
#include <strobe/emu/engine/block.cuh>
#include <strobe/emu/memory.cuh>

namespace strobe {
namespace emu {

// ---- global memory --------------------------------------------------------------------------------------------------
STROBE_COLD std::string describe_global(u64 address, u64 bytes) {
  const Block& b = block();
  const Buffer* nearest = nullptr;
  u64 distance = ~0ull;
  for (const Buffer& buffer : b.buffers) {
    const u64 end = buffer.address + buffer.bytes;
    const u64 away = address < buffer.address ? buffer.address - address
                     : address + bytes > end  ? address + bytes - end
                                              : 0;
    if (away < distance) distance = away, nearest = &buffer;
  }
  if (!nearest || distance > (1u << 20)) return format("address 0x%llx lies in no buffer", address);
  const i64 past = static_cast<i64>(address) - static_cast<i64>(nearest->address + nearest->bytes);
  if (address < nearest->address)
    return format("%llu bytes before the start of `%s` (%llu bytes)", nearest->address - address, nearest->name,
                  nearest->bytes);
  if (past >= 0) return format("%lld bytes past the end of `%s` (%llu bytes)", past, nearest->name, nearest->bytes);
  return format("the last %llu bytes lie past the end of `%s` (%llu bytes)", distance, nearest->name, nearest->bytes);
}

STROBE_COLD void report_global(u64 address, u32 bytes, u32 alignment, bool write, const Buffer* buffer, const char* op,
                               Site site) {
  Block& b = block();
  if (!buffer)
    b.fail(format("%s: %s of %u bytes of global memory out of bounds: ", op, write ? "write" : "read", bytes) +
               describe_global(address, bytes),
           site);
  if (address % alignment)
    b.fail(format("%s: misaligned global address, byte %llu of `%s` (0x%llx); must be a multiple of %u", op,
                  address - buffer->address, buffer->name, address, alignment),
           site);
  b.fail(format("%s: write to the read-only buffer `%s`, byte %llu", op, buffer->name, address - buffer->address),
         site);
}

void check_global(const void* p, u32 bytes, u32 alignment, bool write, const char* op, Site site) {
  Block& b = block();
  const u64 address = reinterpret_cast<u64>(p);
  (write ? b.counters.global_bytes_written : b.counters.global_bytes_read) += bytes;
  const Buffer* buffer = b.last_buffer;
  if (!buffer || address < buffer->address || address + bytes > buffer->address + buffer->bytes) {
    buffer = nullptr;
    for (const Buffer& candidate : b.buffers)
      if (address >= candidate.address && address + bytes <= candidate.address + candidate.bytes) buffer = &candidate;
    b.last_buffer = buffer;
  }
  if (!buffer || address % alignment || (write && !buffer->writable))
    report_global(address, bytes, alignment, write, buffer, op, site);
}

// ---- shared memory --------------------------------------------------------------------------------------------------
inline u8* shared_at(u32 address) { return block().shared.get() + (address - kSharedBase); }

STROBE_COLD void report_shared(u32 address, u32 bytes, u32 alignment, const char* op, Site site, int thread) {
  Block& b = block();
  const i64 offset = static_cast<i64>(address) - kSharedBase;
  if (offset >= 0 && offset + bytes <= b.smem)
    b.fail(format("%s: misaligned shared offset 0x%llx; must be a multiple of %u", op, offset, alignment), site,
           thread);
  const std::string where = offset < 0 ? format("%lld bytes before its start", -offset)
                            : offset >= b.smem
                                ? format("%lld bytes past its end", offset - b.smem)
                                : format("the last %lld bytes lie past its end", offset + bytes - b.smem);
  b.fail(format("%s: %u bytes of shared memory out of bounds: ", op, bytes) + where + format(" (%u bytes)", b.smem),
         site, thread);
}

void check_shared(u32 address, u32 bytes, u32 alignment, const char* op, Site site, int thread) {
  const i64 offset = static_cast<i64>(address) - kSharedBase;
  if (offset < 0 || offset + bytes > block().smem || address % alignment)
    report_shared(address, bytes, alignment, op, site, thread);
}

u16 site_number(Site site) {
  std::vector<Site>& sites = block().sites;
  for (size_t i = 1; i < sites.size(); ++i)
    if (sites[i].line == site.line && sites[i].file == site.file) return static_cast<u16>(i);
  sites.push_back(site);
  return static_cast<u16>(sites.size() - 1);
}

STROBE_COLD std::string name_slot(u16 slot, u16 site) {
  Block& b = block();
  const std::string where = " at " + place_of(b.sites[site]);
  if (slot < b.thread_count) return format("thread %u (warp %u, lane %u)", slot, slot / 32, slot % 32) + where;
  return format("the copy that completes on the mbarrier at 0x%x, issued",
                b.mbarriers[slot - b.thread_count].address - kSharedBase) +
         where;
}

enum class Proxy { generic, async };

// `thread` is about to see these bytes.
void note_read(u32 thread, u32 address, u32 bytes, Proxy proxy, const char* op, Site site) {
  Block& b = block();
  const u32* clock = b.clock(thread);
  const u16 number = site_number(site);
  const u32 first = (address - kSharedBase) / 4;
  for (u32 i = first; i < first + bytes / 4; ++i) {
    Word& word = b.words[i];
    if (word.copy_in_flight) {
      b.fail(format("%s: read of shared memory with a copy still in flight (missing wait or barrier), offset 0x%x; the "
                    "copy was issued by ",
                    op, 4 * i) +
                 name_slot(word.write_slot, word.write_site),
             site, static_cast<int>(thread));
    }
    if (word.write_clock && word.write_slot != thread && clock[word.write_slot] < word.write_clock) {
      b.fail(format("%s: read of shared memory at offset 0x%x that was written with no barrier in between (missing "
                    "wait or barrier), by ",
                    op, 4 * i) +
                 name_slot(word.write_slot, word.write_site),
             site, static_cast<int>(thread));
    }
    if (proxy == Proxy::async &&
        word.generic) {  // the writer's first fence after the write, and this thread must know of it
      bool fenced = false;
      for (const auto& fence : b.threads[word.write_slot].fences) {
        if (fence.first <= word.write_stamp) continue;
        fenced = word.write_slot == thread || fence.second <= clock[word.write_slot];
        break;
      }
      if (!fenced) {
        b.fail(format("%s: reads shared memory at offset 0x%x through the async proxy, but its writer has not executed "
                      "fence_proxy_async() (and a barrier) since; written by ",
                      op, 4 * i) +
                   name_slot(word.write_slot, word.write_site),
               site, static_cast<int>(thread));
      }
    }
    word.read_slot = static_cast<u16>(thread), word.read_clock = clock[thread], word.read_site = number;
  }
}

// `thread` may write these bytes now. `value`: a race that changes nothing is not reported.
void check_overwrite(u32 thread, u32 address, u32 bytes, const void* value, const char* op, Site site) {
  Block& b = block();
  const u32* clock = b.clock(thread);
  const u32 first = (address - kSharedBase) / 4;
  for (u32 i = first; i < first + bytes / 4; ++i) {
    const Word& word = b.words[i];
    if (word.copy_in_flight)
      b.fail(
          format("%s: write to shared memory at offset 0x%x with a copy still in flight to it, issued by ", op, 4 * i) +
              name_slot(word.write_slot, word.write_site),
          site, static_cast<int>(thread));
    if (word.readers_in_flight)
      b.fail(format("%s: write to shared memory at offset 0x%x that a wgmma or TMA store in flight still reads "
                    "(missing wait); it was issued by ",
                    op, 4 * i) +
                 name_slot(word.read_slot, word.read_site),
             site, static_cast<int>(thread));
    if (value && !memcmp(b.shared.get() + 4 * i, static_cast<const u8*>(value) + 4 * (i - first), 4)) continue;
    if (word.write_clock && word.write_slot != thread && clock[word.write_slot] < word.write_clock)
      b.fail(format("%s: shared memory at offset 0x%x is written twice with no barrier in between, before by ", op,
                    4 * i) +
                 name_slot(word.write_slot, word.write_site),
             site, static_cast<int>(thread));
    if (word.read_clock && word.read_slot != thread && clock[word.read_slot] < word.read_clock)
      b.fail(
          format("%s: shared memory at offset 0x%x is overwritten with no barrier after it was read by ", op, 4 * i) +
              name_slot(word.read_slot, word.read_site),
          site, static_cast<int>(thread));
  }
}

// These bytes are now (or, with `in_flight`, will be) those of `slot`.
void note_write(u32 slot, u32 clock, u32 address, u32 bytes, bool in_flight, bool generic, Site site) {
  Block& b = block();
  const u16 number = site_number(site);
  const u32 first = (address - kSharedBase) / 4;
  ++b.stamp;
  for (u32 i = first; i < first + bytes / 4; ++i) {
    Word& word = b.words[i];
    word.write_slot = static_cast<u16>(slot), word.write_clock = clock, word.write_site = number,
    word.write_stamp = b.stamp;
    word.copy_in_flight = in_flight, word.generic = generic;
  }
}

void note_reader_in_flight(u32 address, u32 bytes, int change) {
  Block& b = block();
  const u32 first = (address - kSharedBase) / 4;
  for (u32 i = first; i < first + bytes / 4; ++i)
    b.words[i].readers_in_flight = static_cast<u16>(b.words[i].readers_in_flight + change);
}

inline void poison(u32 address, u32 bytes) {
  const u32 pattern = kPoison;
  for (u32 i = 0; i < bytes; i += 4) memcpy(shared_at(address) + i, &pattern, 4);
}

// A thread's ordinary load and store.
void load_shared(void* to, u32 address, u32 bytes, const char* op, Site site) {
  Block& b = block();
  check_shared(address, bytes, bytes, op, site);
  if (b.async) note_read(b.running, address, bytes, Proxy::generic, op, site);
  b.counters.shared_bytes_read += bytes;
  b.note_banks(address, bytes, site);
  memcpy(to, shared_at(address), bytes);
}
void store_shared(u32 address, const void* from, u32 bytes, const char* op, Site site) {
  Block& b = block();
  check_shared(address, bytes, bytes, op, site);
  if (b.async) {
    check_overwrite(b.running, address, bytes, from, op, site);
    note_write(b.running, b.clock(b.running)[b.running], address, bytes, false, true, site);
  }
  b.counters.shared_bytes_written += bytes;
  b.note_banks(address, bytes, site);
  memcpy(shared_at(address), from, bytes);
}

}  // namespace emu
}  // namespace strobe
