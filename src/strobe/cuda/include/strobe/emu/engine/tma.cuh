// Hopper: mbarriers and bulk tensor copies.
#include <strobe/emu/engine/block.cuh>
#include <strobe/emu/tma.cuh>

namespace strobe {
namespace emu {

struct DecodedMap {  // what strobe.emulator.encode_tensor_map writes
  char magic[4];
  u8 rank, element_bytes, swizzle, padding;
  u64 address;
  u32 dims[5], box[5];
  u64 strides[4];  // bytes, of dimensions 1..
  u32 row_bytes() const { return box[0] * element_bytes; }
  u32 rows() const { return box[1] * box[2] * box[3] * box[4]; }
  u32 bytes() const { return row_bytes() * rows(); }
};

// The 128-, 64- and 32-byte swizzles move 16-byte chunks by address bits 7 and up.
inline u32 swizzled(u32 address, u32 span) { return address ^ (((address >> 7) & (span / 16 - (span != 0))) << 4); }

inline DecodedMap decode_map(const TensorMap* map, u32 shared, const char* op, Site site) {
  Block& b = block();
  DecodedMap decoded;
  memcpy(&decoded, map, sizeof decoded);
  if (memcmp(decoded.magic, "STRB", 4))
    b.fail(format("%s: not a tensor map of strobe.emulator.encode_tensor_map", op), site);
  if (decoded.rank != 5)
    b.fail(format("%s: the tensor map has %u dimensions, the instruction 5", op, decoded.rank), site);
  if (reinterpret_cast<u64>(map) % 64) b.fail(format("%s: the tensor map is not 64-byte aligned", op), site);
  check_shared(shared, decoded.bytes(), decoded.swizzle ? 8 * decoded.swizzle : 128, op, site);
  return decoded;
}

// Calls visit(shared address, global address or 0, bytes inside the tensor, where they begin) for each 16-byte chunk of
// the box.
template <class Visit> inline void for_each_chunk(const DecodedMap& map, u32 shared, Corner corner, Visit visit) {
  const int (&c)[5] = corner.at;
  u32 row = 0;
  for (u32 i4 = 0; i4 < map.box[4]; ++i4)
    for (u32 i3 = 0; i3 < map.box[3]; ++i3)
      for (u32 i2 = 0; i2 < map.box[2]; ++i2)
        for (u32 i1 = 0; i1 < map.box[1]; ++i1, ++row) {
          const i64 at[5] = {c[0], i64(c[1]) + i1, i64(c[2]) + i2, i64(c[3]) + i3, i64(c[4]) + i4};
          u64 global = map.address;
          bool inside = true;
          for (int d = 1; d < 5; ++d) {
            inside = inside && at[d] >= 0 && at[d] < i64(map.dims[d]);
            global += static_cast<u64>(at[d]) * map.strides[d - 1];
          }
          for (u32 byte = 0; byte < map.row_bytes(); byte += 16) {
            const i64 first = i64(c[0]) * map.element_bytes + byte, end = i64(map.dims[0]) * map.element_bytes;
            const i64 from = first < 0 ? -first : 0, to = end - first < 16 ? end - first : 16;
            const bool some = inside && from < to;
            visit(swizzled(shared + row * map.row_bytes() + byte, map.swizzle),
                  some ? global + static_cast<u64>(first + from) : 0, some ? static_cast<u32>(to - from) : 0,
                  static_cast<u32>(some ? from : 0));
          }
        }
}

inline void check_box(const DecodedMap& map, u32 shared, Corner corner, bool write, const char* op, Site site) {
  for_each_chunk(map, shared, corner, [&](u32, u64 global, u32 bytes, u32) {
    if (bytes) check_global(reinterpret_cast<const void*>(global), bytes, map.element_bytes, write, op, site);
  });
}

// ---- mbarrier -------------------------------------------------------------------------------------------------------
void mbar_init(u32 bar, u32 count, Site site) {
  Block& b = block();
  check_shared(bar, 8, 8, "mbar_init", site);
  if (count == 0 || count > 0xfffff) b.fail(format("mbar_init: count %u; must be 1..1048575", count), site);
  const u32 word = (bar - kSharedBase) / 4;
  if (b.mbarrier_at[word] < 0) {
    if (b.mbarriers.size() == Block::kMbarriers)
      b.fail(format("mbar_init: more than %u mbarriers", Block::kMbarriers), site);
    b.mbarrier_at[word] = static_cast<short>(b.mbarriers.size());
    b.mbarriers.emplace_back();
  }
  Mbarrier& barrier = b.mbarriers[b.mbarrier_at[word]];
  if (!barrier.waiting.empty()) b.fail("mbar_init: threads wait on this mbarrier", site);
  const u32 phase = barrier.phase & ~1u;  // clocks never run backwards
  barrier = Mbarrier();
  barrier.address = bar, barrier.count = barrier.pending = count, barrier.initialiser = b.running,
  barrier.phase = phase;
  if (!b.async) return;
  barrier.init_clock = b.clock(b.running)[b.running];
  barrier.arriving.assign(b.slots, 0);
  barrier.completed.assign(b.slots, 0);
}
void mbar_init_fence() {
  for (Mbarrier& barrier : block().mbarriers) barrier.fenced = barrier.fenced || barrier.initialiser == block().running;
}
void mbar_wait(u32 bar, u32 parity, Site site) {
  Block& b = block();
  const u32 at = find_mbarrier(bar, "mbar_wait", site);
  if (parity > 1) b.fail(format("mbar_wait: parity %u; must be 0 or 1", parity), site);
  while ((b.mbarriers[at].phase & 1) == parity) {
    b.mbarriers[at].waiting.push_back(b.running);
    b.suspend(Waiting::mbarrier, "mbar_wait", site, at, parity);
  }
  if (b.async) b.join(b.clock(b.running), b.mbarriers[at].completed.data());
}

// ---- bulk tensor copies ---------------------------------------------------------------------------------------------
void tma_load(u32 dst, const TensorMap* map, u32 bar, Corner corner, Site site) {
  Block& b = block();
  const DecodedMap decoded = decode_map(map, dst, "tma_load_5d", site);
  const u32 at = find_mbarrier(bar, "tma_load_5d", site);
  if (b.async && !b.mbarriers[at].fenced)
    b.fail("tma_load_5d: its mbarrier was initialised, but mbar_init_fence() was not executed", site);
  check_box(decoded, dst, corner, false, "tma_load_5d", site);
  b.counters.shared_bytes_written += decoded.bytes();
  const u32 slot = b.thread_count + at;
  if (b.async) {
    check_overwrite(b.running, dst, decoded.bytes(), nullptr, "tma_load_5d", site);
    note_write(slot, b.mbarriers[at].phase + 1, dst, decoded.bytes(), true, false, site);
    poison(dst, decoded.bytes());
  }
  auto land = [=, &b] {
    for_each_chunk(decoded, dst, corner, [](u32 to, u64 global, u32 bytes, u32 offset) {
      if (bytes < 16) memset(shared_at(to), 0, 16);
      if (bytes) memcpy(shared_at(to) + offset, reinterpret_cast<const void*>(global), bytes);
    });
    if (b.async) note_write(slot, b.mbarriers[at].phase + 1, dst, decoded.bytes(), false, false, site);
    b.mbarriers[at].bytes -= decoded.bytes();
    complete_phase(at);
  };
  if (b.async) b.landings.push_back(land);
  else land();
}

void tma_store(const TensorMap* map, u32 src, Corner corner, Site site) {
  Block& b = block();
  const DecodedMap decoded = decode_map(map, src, "tma_store_5d", site);
  check_box(decoded, src, corner, true, "tma_store_5d", site);
  b.counters.shared_bytes_read += decoded.bytes();
  if (b.async) {
    note_read(b.running, src, decoded.bytes(), Proxy::async, "tma_store_5d", site);
    note_reader_in_flight(src, decoded.bytes(), 1);
  }
  auto read = [=, &b] {
    for_each_chunk(decoded, src, corner, [](u32 from, u64 global, u32 bytes, u32 offset) {
      if (bytes) memcpy(reinterpret_cast<void*>(global), shared_at(from) + offset, bytes);
    });
    if (b.async) note_reader_in_flight(src, decoded.bytes(), -1);
  };
  if (b.async) b.self().stores.push_back(StoreInFlight{read, b.self().store_groups + 1, site});
  else read();
}
void commit_stores() { ++self().store_groups; }
void wait_stores(u32 pending) {
  Thread& thread = self();
  std::vector<StoreInFlight> kept;
  for (StoreInFlight& store : thread.stores) {
    if (store.group + pending > thread.store_groups) kept.push_back(store);
    else store.read();
  }
  thread.stores.swap(kept);
}
void fence_proxy_async() {
  Block& b = block();
  mbar_init_fence();
  if (b.async) b.self().fences.emplace_back(++b.stamp, b.clock(b.running)[b.running]);
}

}  // namespace emu
}  // namespace strobe
