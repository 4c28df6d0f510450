// CUDA C++ on the emulator. `source.py` rewrites a learner's kernel: `float*` becomes Ptr<float>, `__shared__ float
// t[4]` becomes Shared<float[4]>. Each read and write then passes through here, where it is checked and knows its line.
// So does each round of a loop (`step`) and each call of a function (`enter`): both may be endless.
#include <cmath>
#include <type_traits>
#include <vector>
#include <strobe/emu/engine/block.cuh>
#include <strobe/ptx/memory.cuh>
#include <strobe/ptx/warp.cuh>

namespace lesson {

using strobe::Site;
namespace emu = strobe::emu;

// ---- the launch -----------------------------------------------------------------------------------------------------
struct dim3 {
  unsigned x, y, z;
};
struct Launch {
  dim3 grid, block;
  unsigned threads;               // of a block; the emulator runs whole warps, and those beyond do nothing
  unsigned number;                // of the launch
  const volatile unsigned* stop;  // 1: the learner has interrupted it
};
inline const Launch& launch() { return *static_cast<const Launch*>(emu::block().params); }

struct Meeting {  // of lanes of a warp, for a shuffle or a vote
  unsigned mask, arrived;
  const char* op;
  Site site;
  void* lanes[32];
};
struct Progress {  // of the block that runs
  unsigned number = ~0u, block = ~0u;
  unsigned passed[1024], steps[1024];  // by thread: barriers, rounds of loops
  const char* stack[1024];             // by thread: where it begins
  unsigned slot[64], used;             // where shared arrays lie
  std::vector<bool> written;           // by byte of shared memory
  Site unwritten;                      // the first read of a byte that nobody had written, if its file is set
  unsigned reader, finished;           // who read it; threads that have ended
  Meeting meetings[32];                // by warp
  STROBE_COLD void reset() {
    number = launch().number, block = emu::block().index, used = 0;
    memset(passed, 0, sizeof passed), memset(steps, 0, sizeof steps), memset(slot, 0xff, sizeof slot);
    written.assign(emu::block().smem, false), unwritten = Site(), finished = 0;
    for (Meeting& meeting : meetings) meeting.arrived = 0;
  }
};
inline Progress& progress() {
  static thread_local Progress p;
  if (p.number != launch().number || p.block != emu::block().index) p.reset();
  return p;
}

// ---- what may not end -----------------------------------------------------------------------------------------------
constexpr unsigned kSteps = 50000000;                 // rounds of loops, of one thread
constexpr long kFrame = 32 << 10, kStack = 80 << 10;  // of a function (the compiler counts it), and of its callers
inline void stop_if_interrupted(Site site) {
  if (*launch().stop) emu::block().fail("interrupted", site);
}
inline bool step(Site site = Site::here()) {
  const unsigned steps = ++progress().steps[emu::block().running];
  if (steps % 4096 == 0) stop_if_interrupted(site);
  if (steps == kSteps)
    emu::block().fail(emu::format("does this loop end? The thread has gone round loops %u times", kSteps), site);
  return true;
}
__attribute__((always_inline)) inline void begin(Site site = Site::here()) {
  stop_if_interrupted(site);
  progress().stack[emu::block().running] = static_cast<const char*>(__builtin_frame_address(0));
}
__attribute__((always_inline)) inline void enter(Site site = Site::here()) {
  const char* frame = static_cast<const char*>(__builtin_frame_address(0));
  if (progress().stack[emu::block().running] - frame > kStack)
    emu::block().fail("does this recursion end? The thread's stack is full", site);
}
inline dim3 at(unsigned flat, dim3 size) { return {flat % size.x, flat / size.x % size.y, flat / (size.x * size.y)}; }

// ---- memory ---------------------------------------------------------------------------------------------------------
enum class Space { local, global, shared };

// The last writer of an element of global memory: block, thread and line, packed; 0: nobody.
typedef unsigned long long Writer;
struct Array {  // a tensor that the kernel got
  const char* name;
  Writer* writers;  // null: it is only read
  unsigned* epoch;  // of the writer, beside
  unsigned long long address, bytes;
};
inline const Array*& arrays() {
  static thread_local const Array* list = nullptr;
  return list;
}
inline const Array* array_of(unsigned long long address) {
  for (const Array* a = arrays(); a && a->name; ++a)
    if (address >= a->address && address < a->address + a->bytes) return a;
  return nullptr;
}

inline Writer me(Site site) {
  return (Writer(emu::block().index + 1) << 32) | (Writer(emu::block().running) << 16) | (site.line & 0xffff);
}
inline std::string who(Writer w) {
  return emu::format("thread %u of block %u, line %u", unsigned(w >> 16) & 0xffff, unsigned(w >> 32) - 1,
                     unsigned(w) & 0xffff);
}
// Nothing decides which of two comes first: they are in different blocks, or no barrier lies between them.
inline bool unordered(Writer other, unsigned epoch) {
  const unsigned block = unsigned(other >> 32) - 1, thread = unsigned(other >> 16) & 0xffff;
  if (block != emu::block().index) return true;
  return thread != emu::block().running && epoch == progress().passed[emu::block().running];
}
inline void note_global(unsigned long long address, unsigned size, const void* stored, Site site) {
  const Array* array = array_of(address);
  if (!array || !array->writers) return;
  const unsigned long long element = (address - array->address) / size;
  Writer& last = array->writers[element];
  const bool differs = stored && memcmp(reinterpret_cast<const void*>(address), stored, size);
  if (last && (!stored || differs) && unordered(last, array->epoch[element]))
    emu::block().fail(
        emu::format("race on %s[%llu]: this thread %s it, and ", array->name, element, stored ? "writes" : "reads") +
            who(last) + ", wrote it, with nothing that decides who comes first",
        site);
  if (stored) last = me(site), array->epoch[element] = progress().passed[emu::block().running];
}

template <class T> struct Value {
  typedef T type;
  static constexpr bool is_const = false;
};
template <class T> struct Value<const T> {
  typedef T type;
  static constexpr bool is_const = true;
};

struct Index {  // an index that knows the line in which it is used
  long long value;
  Site site;
  template <class I> Index(I value, Site site = Site::here()) : value(static_cast<long long>(value)), site(site) {}
};

// A missing barrier shows as a race as soon as somebody writes there. If nobody does, `end` reports the read.
inline void note_unwritten(u32 address, Site site) {
  Progress& p = progress();
  if (p.written[address - emu::kSharedBase] || *p.unwritten.file) return;
  p.unwritten = site, p.reader = emu::block().running;
}
inline void end() {
  Progress& p = progress();
  if (++p.finished == launch().threads && *p.unwritten.file)
    emu::block().fail("reads shared memory that no thread has written", p.unwritten, static_cast<int>(p.reader));
}

template <class T> struct Ptr;
template <class T> struct Ref {  // one element: reading converts it, writing assigns to it
  typedef typename Value<T>::type V;
  unsigned long long address;
  Space space;
  Site site;
  V load() const {
    V x;
    if (space == Space::shared) {
      emu::check_shared(static_cast<u32>(address), sizeof x, sizeof x, "shared memory", site);
      note_unwritten(static_cast<u32>(address), site);
      emu::load_shared(&x, static_cast<u32>(address), sizeof x, "shared memory", site);
    } else {
      if (space == Space::global) {
        emu::check_global(reinterpret_cast<const void*>(address), sizeof x, sizeof x, false, "global memory", site);
        note_global(address, sizeof x, nullptr, site);
      }
      memcpy(&x, reinterpret_cast<const void*>(address), sizeof x);
    }
    return x;
  }
  V store(V x) const {
    static_assert(!Value<T>::is_const, "the kernel writes to memory that is const");
    if (space == Space::shared) {
      emu::store_shared(static_cast<u32>(address), &x, sizeof x, "shared memory", site);
      for (unsigned i = 0; i < sizeof x; ++i) progress().written[address - emu::kSharedBase + i] = true;
    } else {
      if (space == Space::global) {
        emu::check_global(reinterpret_cast<const void*>(address), sizeof x, sizeof x, true, "global memory", site);
        note_global(address, sizeof x, &x, site);
      }
      memcpy(reinterpret_cast<void*>(address), &x, sizeof x);
    }
    return x;
  }
  operator V() const { return load(); }
  // A half becomes a float unasked, which C++ would not do behind the conversion above.
  template <class F, class = typename std::enable_if<std::is_same<F, float>::value && sizeof(V) == 2>::type>
  operator F() const {
    return static_cast<F>(load());
  }
  V operator=(V x) const { return store(x); }
  V operator=(const Ref& other) const { return store(other.load()); }
  V operator+=(V x) const { return store(load() + x); }
  V operator-=(V x) const { return store(load() - x); }
  V operator*=(V x) const { return store(load() * x); }
  V operator/=(V x) const { return store(load() / x); }
  V operator++() const { return store(load() + 1); }
  V operator--() const { return store(load() - 1); }
  V operator++(int) const {
    const V x = load();
    store(x + 1);
    return x;
  }
  V operator--(int) const {
    const V x = load();
    store(x - 1);
    return x;
  }
  Ptr<T> operator&() const { return Ptr<T>(address, space); }
};

template <class T> struct Ptr {
  unsigned long long address = 0;
  Space space = Space::local;
  Ptr() = default;
  Ptr(unsigned long long address, Space space) : address(address), space(space) {}
  Ptr(T* local) : address(reinterpret_cast<unsigned long long>(local)) {}
  template <class U> Ptr(const Ptr<U>& other) : address(other.address), space(other.space) {
    static_assert(Value<T>::is_const || !Value<U>::is_const, "a pointer to const cannot become a pointer to non-const");
  }
  Ref<T> operator[](Index i) const { return Ref<T>{address + i.value * sizeof(T), space, i.site}; }
  struct Here {  // a pointer that knows the line in which it is followed
    Ref<T> element;
    Here(const Ptr& p, Site site = Site::here()) : element{p.address, p.space, site} {}
  };
  friend Ref<T> operator*(Here p) { return p.element; }
  Ptr operator+(Index i) const { return Ptr(address + i.value * sizeof(T), space); }
  Ptr operator-(Index i) const { return Ptr(address - i.value * sizeof(T), space); }
  Ptr& operator+=(Index i) { return *this = *this + i; }
  Ptr& operator-=(Index i) { return *this = *this - i; }
  Ptr& operator++() { return *this = *this + 1; }
  Ptr& operator--() { return *this = *this - 1; }
  Ptr operator++(int) {
    const Ptr before = *this;
    ++*this;
    return before;
  }
  Ptr operator--(int) {
    const Ptr before = *this;
    --*this;
    return before;
  }
  bool operator==(const Ptr& other) const { return address == other.address; }
  bool operator!=(const Ptr& other) const { return address != other.address; }
  bool operator<(const Ptr& other) const { return address < other.address; }
  long long operator-(const Ptr& other) const {
    return (static_cast<long long>(address) - static_cast<long long>(other.address)) /
           static_cast<long long>(sizeof(T));
  }
  explicit operator bool() const { return address != 0; }
};

// ---- shared memory --------------------------------------------------------------------------------------------------
constexpr unsigned kStatic = 48 << 10;  // bytes for arrays of known size, as on a GPU; `extern` ones lie behind them
inline unsigned place(unsigned slot, unsigned bytes, Site site) {
  Progress& p = progress();
  if (p.slot[slot] == ~0u) {
    p.slot[slot] = p.used;
    p.used = (p.used + bytes + 15) / 16 * 16;
    if (p.used > kStatic)
      emu::block().fail(emu::format("the block's shared arrays have %u bytes; %u are allowed", p.used, kStatic), site);
  }
  return emu::kSharedBase + p.slot[slot];
}
inline void check_index(const char* name, long long i, unsigned long long size, Site site) {
  if (i < 0 || i >= static_cast<long long>(size))
    emu::block().fail(emu::format("index %lld of the shared array `%s` is out of bounds: it has %llu", i, name, size),
                      site);
}
template <class T> struct Shared : Ref<T> {  // a scalar
  Shared(unsigned slot, const char*, Site site = Site::here())
      : Ref<T>{place(slot, sizeof(T), site), Space::shared, site} {}
  using Ref<T>::operator=;
};
template <class T, unsigned long long N> struct View {  // some of an array's dimensions are still open
  unsigned address;
  const char* name;
  Ref<T> operator[](Index i) const {
    check_index(name, i.value, N, i.site);
    return Ref<T>{address + i.value * sizeof(T), Space::shared, i.site};
  }
  operator Ptr<T>() const { return Ptr<T>(address, Space::shared); }
};
template <class T, unsigned long long N, unsigned long long M> struct View<T[M], N> {
  unsigned address;
  const char* name;
  View<T, M> operator[](Index i) const {
    check_index(name, i.value, N, i.site);
    return View<T, M>{static_cast<unsigned>(address + i.value * sizeof(T[M])), name};
  }
};
template <class T, unsigned long long N> struct Shared<T[N]> : View<T, N> {
  Shared(unsigned slot, const char* name, Site site = Site::here())
      : View<T, N>{place(slot, sizeof(T[N]), site), name} {}
};
template <class T> struct Shared<T[]> {  // extern: as large as the launch says
  unsigned address, bytes;
  const char* name;
  Shared(unsigned, const char* name)
      : address(emu::kSharedBase + kStatic), bytes(emu::block().smem - kStatic), name(name) {}
  Ref<T> operator[](Index i) const {
    check_index(name, i.value, bytes / sizeof(T), i.site);
    return Ref<T>{address + i.value * sizeof(T), Space::shared, i.site};
  }
  operator Ptr<T>() const { return Ptr<T>(address, Space::shared); }
  Ptr<T> operator+(Index i) const { return Ptr<T>(address, Space::shared) + i; }
};

// ---- what CUDA offers -----------------------------------------------------------------------------------------------
// As `bar.sync`, for blocks that need not be whole warps.
inline void __syncthreads(Site site = Site::here()) {
  emu::Block& b = emu::block();
  const u32 me = b.running, count = launch().threads;
  if (me == 0) ++b.counters.block_barriers;
  emu::NamedBarrier& barrier = b.named[0];
  barrier.expected = count;
  if (b.async) b.join(barrier.clock.data(), b.clock(me));
  if (++barrier.arrived < count) {
    barrier.waiting.push_back(me);
    b.suspend(emu::Waiting::named_barrier, "__syncthreads()", site, 0);
    ++progress().passed[me];
    return;
  }
  barrier.arrived = 0;
  std::vector<u32> released;
  released.swap(barrier.waiting);
  for (u32 thread : released) b.make_ready(thread);
  released.push_back(me);
  if (b.async) {
    for (u32 thread : released) {
      memcpy(b.clock(thread), barrier.clock.data(), b.slots * sizeof(u32));
      b.tick(thread);
    }
    barrier.clock.assign(b.slots, 0);
  }
  ++progress().passed[me];
}
template <class T> inline T plain(T x) { return x; }
template <class T> inline typename Value<T>::type plain(Ref<T> x) { return x; }

// The lanes of `mask` come together. Each hands in `lane`; the last calls `last` with all of them
// and with the mask of those that there are, then all go on.
template <class Last> inline void meet(unsigned mask, const char* op, Site site, void* lane, Last last) {
  emu::Block& b = emu::block();
  const unsigned warp = b.running / 32, me = b.running % 32, there = launch().threads - 32 * warp;
  if (there < 32) mask &= (1u << there) - 1;
  Meeting& meeting = progress().meetings[warp];
  if (!(mask >> me & 1)) b.fail(emu::format("%s: lane %u is not in its own mask 0x%x", op, me, mask), site);
  if (!meeting.arrived) meeting.mask = mask, meeting.op = op, meeting.site = site;
  if (meeting.mask != mask || strcmp(meeting.op, op))
    b.fail(emu::format("%s with the mask 0x%x, while other lanes of the warp wait in %s with the mask 0x%x at ", op,
                       mask, meeting.op, meeting.mask) +
               place_of(meeting.site),
           site);
  meeting.lanes[me] = lane;
  meeting.arrived |= 1u << me;
  if (meeting.arrived != mask) return b.suspend(emu::Waiting::group, op, site, warp, 32);
  meeting.arrived = 0;
  b.count_bank_conflicts(warp);
  last(meeting.lanes, mask);
  for (unsigned i = 0; i < 32; ++i)
    if (mask >> i & 1 && i != me) b.make_ready(32 * warp + i);
}
inline void __syncwarp(unsigned mask = ~0u, Site site = Site::here()) {
  emu::Block& b = emu::block();
  meet(mask, "__syncwarp", site, nullptr, [&b](void**, unsigned mask) {
    const u32 first = b.running / 32 * 32;
    std::vector<u32> all(b.slots, 0);
    for (u32 i = 0; i < 32; ++i)
      if (mask >> i & 1) b.join(all.data(), b.clock(first + i));
    for (u32 i = 0; i < 32; ++i) {
      if (!(mask >> i & 1)) continue;
      memcpy(b.clock(first + i), all.data(), b.slots * sizeof(u32));
      b.tick(first + i);
    }
  });
}
template <class T> inline T exchange(unsigned mask, T x, int from, const char* op, Site site) {
  struct Lane {
    T value, result;
    int from;
  } lane{x, x, from};
  ++emu::block().counters.shuffles;
  meet(mask, op, site, &lane, [](void** lanes, unsigned mask) {
    for (int i = 0; i < 32; ++i) {
      if (!(mask >> i & 1)) continue;
      Lane* mine = static_cast<Lane*>(lanes[i]);
      if (mask >> mine->from & 1) mine->result = static_cast<Lane*>(lanes[mine->from])->value;
    }
  });
  return lane.result;
}
inline int lane() { return static_cast<int>(emu::block().running % 32); }
template <class T> inline auto __shfl_sync(unsigned mask, T x, int from, int width = 32, Site site = Site::here())
    -> decltype(plain(x)) {
  return exchange(mask, plain(x), lane() / width * width + (from & (width - 1)), "__shfl_sync", site);
}
template <class T> inline auto __shfl_xor_sync(unsigned mask, T x, int lanes, int width = 32, Site site = Site::here())
    -> decltype(plain(x)) {
  const int from = lane() ^ lanes;
  return exchange(mask, plain(x), from / width > lane() / width ? lane() : from & 31, "__shfl_xor_sync", site);
}
template <class T> inline auto __shfl_down_sync(unsigned mask, T x, unsigned by, int width = 32,
                                                Site site = Site::here()) -> decltype(plain(x)) {
  const int from = lane() + static_cast<int>(by);
  return exchange(mask, plain(x), from / width > lane() / width ? lane() : from, "__shfl_down_sync", site);
}
template <class T> inline auto __shfl_up_sync(unsigned mask, T x, unsigned by, int width = 32, Site site = Site::here())
    -> decltype(plain(x)) {
  const int from = lane() - static_cast<int>(by);
  return exchange(mask, plain(x), from < lane() / width * width ? lane() : from, "__shfl_up_sync", site);
}
inline unsigned __ballot_sync(unsigned mask, bool x, Site site = Site::here()) {
  unsigned vote = x;
  meet(mask, "__ballot_sync", site, &vote, [](void** lanes, unsigned mask) {
    unsigned all = 0;
    for (int i = 0; i < 32; ++i)
      if (mask >> i & 1) all |= *static_cast<unsigned*>(lanes[i]) << i;
    for (int i = 0; i < 32; ++i)
      if (mask >> i & 1) *static_cast<unsigned*>(lanes[i]) = all;
  });
  return vote;
}
inline int __any_sync(unsigned mask, bool x, Site site = Site::here()) { return __ballot_sync(mask, x, site) != 0; }
inline int __all_sync(unsigned mask, bool x, Site site = Site::here()) { return !__ballot_sync(mask, !x, site); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <class T> inline T atomicAdd(Ptr<T> p, T x, Site site = Site::here()) {
  if (p.space != Space::global) {
    const T old = Ref<T>{p.address, p.space, site}.load();
    Ref<T>{p.address, p.space, site}.store(old + x);
    return old;
  }
  emu::check_global(reinterpret_cast<const void*>(p.address), sizeof(T), sizeof(T), true, "atomicAdd", site);
  T old;
  memcpy(&old, reinterpret_cast<const void*>(p.address), sizeof old);
  const T sum = old + x;
  memcpy(reinterpret_cast<void*>(p.address), &sum, sizeof sum);
  if (const Array* array = array_of(p.address))
    if (array->writers) array->writers[(p.address - array->address) / sizeof(T)] = 0;  // atomics do not race
  return old;
}
template <class... Arguments> inline int printf(const char* format, Arguments... arguments) {
  const int written = ::printf(format, plain(arguments)...);
  fflush(stdout);
  return written;
}
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }

}  // namespace lesson

#define __global__ __attribute__((noinline))  // its frame is counted under its own name
#define __device__ inline
#define __host__
#define __forceinline__
#define __restrict__
#define __launch_bounds__(...)
#define threadIdx (::lesson::at(::strobe::emu::block().running, ::lesson::launch().block))
#define blockIdx (::lesson::at(::strobe::emu::block().index, ::lesson::launch().grid))
#define blockDim (::lesson::launch().block)
#define gridDim (::lesson::launch().grid)
