// One thread block: its fibers, who runs next, and the points at which a warp or warpgroup must come together.
//
// Two modes. "sync": copies and matrix products happen when they are issued. "async": they happen late, what they will
// write is poisoned until then, threads run in a random order (by seed), and every shared access is checked for
// happens-before.
#pragma once
#include <functional>
#include <memory>
#include <utility>
#include <vector>
#include <strobe/emu/engine/fiber.cuh>
#include <strobe/emu/engine/report.cuh>

namespace strobe {
namespace emu {

struct Counters {  // the order is that of strobe.emulator.Counters
  u64 global_bytes_read, global_bytes_written, shared_bytes_read, shared_bytes_written, bank_conflicts, mma, wgmma,
      flops, shuffles, block_barriers, exp2;
};

struct Buffer {
  const char* name;
  u64 address, bytes;
  u32 writable;
};

enum class Scope { warp, warpgroup };
enum class Waiting { nothing, group, named_barrier, mbarrier, another_block, exited };

struct CopyInFlight {  // one cp.async
  u32 dst;
  const void* src;  // null: zeros
  u32 group;
  Site site;
};

struct StoreInFlight {         // one bulk tensor store
  std::function<void()> read;  // takes the bytes from shared memory and writes them to global memory
  u32 group;
  Site site;
};

struct Thread {
  Fiber fiber;
  u32 index = 0;
  Waiting waiting = Waiting::nothing;
  const char* op = "";
  Site site;
  u32 object = 0, parity = 0;
  u32 access = 0;  // shared accesses since the warp last met, to line up those of one instruction
  std::vector<CopyInFlight> copies;
  u32 copy_groups = 0;
  std::vector<StoreInFlight> stores;
  u32 store_groups = 0;
  std::vector<std::function<void()>> writes;  // of bulk copies that have read shared memory
  std::vector<std::pair<u32, u32>> fences;    // (stamp, own clock) of every fence_proxy_async
};

struct Group {  // a warp or a warpgroup
  u32 first = 0, size = 0, arrived = 0;
  const char* op = "";
  Site site;
  void* lanes[128];
};

struct Access {  // the same ld_shared or st_shared of the lanes of a warp
  Site site;
  u32 bytes, mask, address[32];
};

struct NamedBarrier {
  u32 expected = 0, arrived = 0;
  std::vector<u32> waiting, clock;
};

struct Mbarrier {
  u32 address, count, pending, initialiser, init_clock;
  i64 bytes = 0;
  u32 phase = 0;  // completed phases
  bool fenced = false;
  std::vector<u32> waiting, arriving, completed;  // clocks: of the arrivals of this phase, of all before
};

// The checker's record of four bytes of shared memory. Slots are threads, and behind them mbarriers, which stand for
// the copies that complete on them.
struct Word {
  u32 write_clock = 0, read_clock = 0, write_stamp = 0;
  u16 write_slot = 0, read_slot = 0, write_site = 0, read_site = 0;
  u16 readers_in_flight = 0;
  bool copy_in_flight = false, generic = false;
};

struct Random {  // xorshift
  u64 state;
  u32 operator()() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return static_cast<u32>(state >> 32);
  }
};

struct Wgmmas;  // in-flight products of one warpgroup, wgmma.cuh

struct Block {
  static constexpr u32 kMbarriers = 64;
  u32 index, grid, thread_count, smem;
  bool async;
  const void* params;
  const std::vector<Buffer>& buffers;
  void (*kernel)(const void*);
  Counters counters{};
  std::string failure;

  std::vector<Thread> threads;
  std::vector<Group> warps, warpgroups;
  std::vector<std::vector<Access>> accesses;  // by warp
  NamedBarrier named[16];
  std::vector<Mbarrier> mbarriers;
  std::vector<short> mbarrier_at;  // by shared word
  std::unique_ptr<u8[]> shared;
  std::vector<Word> words;
  std::vector<Site> sites;
  std::vector<u32> clocks;
  u32 slots = 0, stamp = 0;
  std::vector<std::function<void()>> landings;    // bulk loads on their way
  std::vector<std::shared_ptr<Wgmmas>> products;  // by warpgroup
  const Buffer* last_buffer = nullptr;

  Fiber scheduler;
  u32 running = 0, finished = 0;
  u32 pausing = 0;  // threads that wait for another block
  bool paused = false;
  u64 turns_released = 0;
  std::vector<u32> ready;  // a ring of thread indices
  u32 ready_first = 0, ready_count = 0;
  Random random;

  Block(u32 index, u32 grid, u32 thread_count, u32 smem, bool async, u32 seed, const void* params,
        const std::vector<Buffer>& buffers, void (*kernel)(const void*))
      : index(index), grid(grid), thread_count(thread_count), smem(smem), async(async), params(params),
        buffers(buffers), kernel(kernel), threads(thread_count), warps(thread_count / 32),
        warpgroups(thread_count / 128), accesses(thread_count / 32), mbarrier_at(smem / 4 + 1, -1),
        shared(new u8[smem + 1]), products(thread_count / 128), ready(thread_count),
        random{(u64(seed) << 32 | index) * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull} {
    memset(shared.get(), 0xff, smem);  // NaN in every format
    for (u32 i = 0; i < warps.size(); ++i) warps[i].first = 32 * i, warps[i].size = 32;
    for (u32 i = 0; i < warpgroups.size(); ++i) warpgroups[i].first = 128 * i, warpgroups[i].size = 128;
    for (u32 i = 0; i < thread_count; ++i) threads[i].index = i;
    if (!async) return;
    words.resize(smem / 4 + 1);
    sites.emplace_back();
    slots = (thread_count + kMbarriers + 15) / 16 * 16;
    clocks.assign(size_t(slots) * thread_count, 0);
    for (u32 i = 0; i < thread_count; ++i) clock(i)[i] = 1;
    for (NamedBarrier& barrier : named) barrier.clock.assign(slots, 0);
  }

  // ---- vector clocks ------------------------------------------------------------------------------------------------
  u32* clock(u32 thread) { return clocks.data() + size_t(slots) * thread; }
  __attribute__((noinline)) void join(u32* into, const u32* from) {
    for (u32 i = 0; i < slots; ++i) into[i] = into[i] > from[i] ? into[i] : from[i];
  }
  void tick(u32 thread) { ++clock(thread)[thread]; }

  // ---- scheduling ---------------------------------------------------------------------------------------------------
  Thread& self() { return threads[running]; }
  void make_ready(u32 thread) {
    threads[thread].waiting = Waiting::nothing;
    u32 at = ready_first + ready_count++;
    ready[at < thread_count ? at : at - thread_count] = thread;
  }
  void land_one() {
    const size_t i = random() % landings.size();
    std::function<void()> landing = std::move(landings[i]);
    landings[i] = std::move(landings.back());
    landings.pop_back();
    landing();
  }
  int next_ready() {
    if (!landings.empty() && random() % 64 == 0) land_one();
    while (ready_count == 0) {
      if (landings.empty()) return -1;
      land_one();
    }
    if (async) {
      u32 other = ready_first + random() % ready_count;
      std::swap(ready[ready_first], ready[other < thread_count ? other : other - thread_count]);
    }
    const u32 thread = ready[ready_first];
    if (++ready_first == thread_count) ready_first = 0;
    --ready_count;
    return static_cast<int>(thread);
  }
  void leave(Fiber& from) {  // run whoever is ready; the scheduler's own stack finds out when nobody is
    const u32 me = running;
    const int next = next_ready();
    if (next == static_cast<int>(me) && threads[me].waiting == Waiting::nothing) return;
    if (next >= 0) running = static_cast<u32>(next);
    Fiber::change(from, next < 0 ? scheduler : threads[next].fiber);
  }
  __attribute__((noinline)) void suspend(Waiting waiting, const char* op, Site site, u32 object, u32 parity = 0) {
    Thread& thread = self();
    thread.waiting = waiting, thread.op = op, thread.site = site, thread.object = object, thread.parity = parity;
    leave(thread.fiber);
  }
  static void enter();  // what every fiber runs
  void start(const Stacks& stacks);
  bool run();  // to the end, or until a thread waits for another block; then false

  // A thread that waits for another block: others of this block may go on, and so may the other blocks.
  void pause(const char* op, Site site) {
    Thread& thread = self();
    make_ready(running);
    thread.waiting = Waiting::another_block, thread.op = op, thread.site = site;
    paused = true, ++pausing;
    Fiber::change(thread.fiber, scheduler);
    thread.waiting = Waiting::nothing, --pausing;
  }
  bool only_waits() const { return ready_count == pausing && landings.empty(); }

  [[noreturn]] __attribute__((noinline, cold)) void fail(const std::string& what, Site site, int thread = -1) {
    const u32 who = thread < 0 ? running : static_cast<u32>(thread);
    failure = what + format("\n  block %u, thread %u (warp %u, lane %u)\n  at ", index, who, who / 32, who % 32) +
              place_of(site);
    Fiber::change(self().fiber, scheduler);
    __builtin_unreachable();
  }
  std::string deadlock();
  std::string left_over();

  // ---- convergence --------------------------------------------------------------------------------------------------
  // Every lane hands in `lane`; the last to come calls `last` with all of them, then all go on.
  template <class Last> void converge(Scope scope, const char* op, bool aligned, Site site, void* lane, Last last) {
    Group* complete = arrive(scope, op, aligned, site, lane);
    if (!complete) return;
    last(complete->lanes);
    for (u32 i = complete->first; i < complete->first + complete->size; ++i)
      if (i != running) make_ready(i);
  }
  // The group, for the last of its threads; null for the others, which return when the group goes on.
  __attribute__((noinline)) Group* arrive(Scope scope, const char* op, bool aligned, Site site, void* lane) {
    const bool is_warp = scope == Scope::warp;
    const u32 which = running / (is_warp ? 32 : 128);
    std::vector<Group>& groups = is_warp ? warps : warpgroups;
    if (which >= groups.size())
      fail(format("%s needs a whole warpgroup; this block has %u threads", op, thread_count), site);
    Group& group = groups[which];
    if (group.arrived == 0) group.op = op, group.site = site;
    if ((group.op != op && strcmp(group.op, op)) || (aligned && group.site.line != site.line)) {
      fail(format("divergent %s: this thread reaches %s while %u others wait in %s at ", is_warp ? "warp" : "warpgroup",
                  op, group.arrived, group.op) +
               place_of(group.site),
           site);
    }
    group.lanes[running - group.first] = lane;
    if (++group.arrived < group.size) {
      suspend(Waiting::group, op, site, which, group.size);
      return nullptr;
    }
    group.arrived = 0;
    for (u32 warp = group.first / 32; warp < (group.first + group.size) / 32; ++warp) count_bank_conflicts(warp);
    return &group;
  }

  // ---- bank conflicts -----------------------------------------------------------------------------------------------
  __attribute__((noinline)) void note_banks(u32 address, u32 bytes, Site site) {
    std::vector<Access>& list = accesses[running / 32];
    const u32 bit = 1u << (running % 32);
    u32 at = self().access;
    while (at < list.size() &&
           (list[at].site.line != site.line || list[at].site.file != site.file || (list[at].mask & bit)))
      ++at;
    if (at >= 4096) return;
    if (at == list.size()) list.push_back(Access{site, bytes, 0, {}});
    list[at].mask |= bit;
    list[at].address[running % 32] = address;
    self().access = at + 1;
  }
  // Wavefronts beyond the first of `lanes` accesses that the hardware would serve together.
  static __attribute__((noinline)) u32 extra_wavefronts(const u32* address, u32 mask, u32 lanes, u32 bytes) {
    u32 words[32][32], count[32] = {}, most = 1;
    for (u32 lane = 0; lane < lanes; ++lane) {
      if (!(mask >> lane & 1)) continue;
      for (u32 word = address[lane] / 4; word < (address[lane] + bytes) / 4; ++word) {
        const u32 bank = word % 32;
        u32 i = 0;
        while (i < count[bank] && words[bank][i] != word) ++i;
        if (i == count[bank]) words[bank][count[bank]++] = word;
        most = most > count[bank] ? most : count[bank];
      }
    }
    return most - 1;
  }
  __attribute__((noinline)) void count_bank_conflicts(u32 warp) {
    if (accesses[warp].empty()) return;
    for (const Access& access : accesses[warp]) {
      const u32 lanes = access.bytes > 4 ? 128 / access.bytes : 32;  // as many at a time as move 128 bytes
      for (u32 i = 0; i < 32; i += lanes)
        counters.bank_conflicts += extra_wavefronts(access.address + i, access.mask >> i, lanes, access.bytes);
    }
    accesses[warp].clear();
    for (u32 i = 32 * warp; i < 32 * warp + 32; ++i) threads[i].access = 0;
  }
};

inline Block*& current_block() {
  static thread_local Block* block = nullptr;
  return block;
}
inline Block& block() { return *current_block(); }
inline Thread& self() { return block().self(); }

}  // namespace emu
}  // namespace strobe
