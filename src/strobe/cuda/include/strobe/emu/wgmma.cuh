// Hopper's warpgroup matrix product. In synchronous mode it happens at issue. In asynchronous mode it happens at the
// wait that retires its group: until then the accumulators hold NaN, the shared operands must not be written, and
// register operands must keep their values. (Register operands are watched where they live: pass elements of an array
// that outlives the wait.) Sums: as in mma.cuh, sixteen products in the order of k, then added to D.
#pragma once
#include <strobe/emu/base.cuh>
#include <strobe/emu/math.cuh>
#include <strobe/emu/memory.cuh>
#include <strobe/emu/tma.cuh>

namespace strobe {
namespace emu {

struct RegisterOperand {
  u32 value;
  const u32* where;  // null for a temporary, which nobody can overwrite
  RegisterOperand(const u32& x) : value(x), where(&x) {}
  RegisterOperand(u32&& x) : value(x), where(nullptr) {}
};

enum class A { shared, shared_mn, registers };
enum class B { k_major, mn_major };

struct WgmmaLane {
  float* d;
  u64 a_desc, b_desc;
  u32 a[4];
  const u32* a_where[4];
};

struct Accumulator {  // D in flight; row r, column n at value[r * n_columns + n]
  float* d[128];
  std::vector<float> value;
  int columns;
  u32 uses;
};

struct Product {
  WgmmaLane lanes[128];
  Site site;
  u32 group;
  Accumulator* accumulator;
  bool zero;
  void (*multiply)(const WgmmaLane*, float*, bool);
  void (*visit_operands)(const WgmmaLane*, void (*)(u32 warp, u32 address, void*), void*);
};

struct Wgmmas {
  std::vector<std::unique_ptr<Product>> products;
  std::vector<std::unique_ptr<Accumulator>> accumulators;
  u32 groups = 0;
  bool fenced = false;
};

inline u32 descriptor_field(u64 descriptor, int shift) { return static_cast<u32>((descriptor >> shift) & 0x3fff) << 4; }

// Address of 8 elements: of row `row` of a K-major operand, columns 8*half.. ; of k row `k` of an MN-major one, columns
// n..
inline u32 k_major_chunk(u64 descriptor, u32 row, u32 half) {
  return swizzled(
      descriptor_field(descriptor, 0) + row / 8 * descriptor_field(descriptor, 32) + row % 8 * 128 + 16 * half, 128);
}
inline u32 mn_major_chunk(u64 descriptor, u32 k, u32 n) {
  return swizzled(descriptor_field(descriptor, 0) + n / 64 * descriptor_field(descriptor, 16) +
                      k / 8 * descriptor_field(descriptor, 32) + k % 8 * 128 + n % 64 * 2,
                  128);
}

template <int N, A From, B Major, class Visit> inline void visit_chunks(const WgmmaLane* lanes, Visit visit) {
  const u64 a = lanes[0].a_desc, b = lanes[0].b_desc;
  if (From == A::shared)
    for (u32 row = 0; row < 64; ++row)
      for (u32 half = 0; half < 2; ++half) visit(row / 16, k_major_chunk(a, row, half), true, row, half);
  if (From == A::shared_mn)
    for (u32 k = 0; k < 16; ++k)
      for (u32 m = 0; m < 64; m += 8) visit(m / 16, mn_major_chunk(a, k, m), true, k, m);
  if (Major == B::k_major)
    for (u32 n = 0; n < N; ++n)
      for (u32 half = 0; half < 2; ++half) visit(4u, k_major_chunk(b, n, half), false, n, half);
  else
    for (u32 k = 0; k < 16; ++k)
      for (u32 n = 0; n < N; n += 8) visit(4u, mn_major_chunk(b, k, n), false, k, n);
}

// D[64][N] (+)= A B
template <class T, int N, A From, B Major> inline void multiply(const WgmmaLane* lanes, float* d, bool zero) {
  float a[64][16], b[16][N];
  visit_chunks<N, From, Major>(lanes, [&](u32, u32 address, bool is_a, u32 row, u32 at) {
    u16 x[8];
    memcpy(x, shared_at(address), 16);
    for (int i = 0; i < 8; ++i) {
      const float value = to_float<T>(x[i]);
      if (is_a && From == A::shared_mn) a[at + i][row] = value;
      else if (is_a) a[row][8 * at + i] = value;
      else if (Major == B::k_major) b[8 * at + i][row] = value;
      else b[row][at + i] = value;
    }
  });
  if (From == A::registers)
    for (int i = 0; i < 128; ++i)
      for (int j = 0; j < 4; ++j)
        for (int h = 0; h < 2; ++h)
          a[i / 32 * 16 + i % 32 / 4 + 8 * (j & 1)][i % 4 * 2 + 8 * (j >> 1) + h] =
              to_float<T>(static_cast<u16>(lanes[i].a[j] >> (16 * h)));
  for (int row = 0; row < 64; ++row) {
    float sum[N] = {};
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < N; ++n) sum[n] += a[row][k] * b[k][n];
    float* to = d + row * N;
    for (int n = 0; n < N; ++n) to[n] = zero ? sum[n] : to[n] + sum[n];
  }
}

// Register i of thread t: row 16*(t/32) + (t%32)/4 + 8*((i>>1)&1), column 8*(i>>2) + 2*(t%4) + (i&1).
inline int accumulator_row(int t, int i) { return t / 32 * 16 + t % 32 / 4 + 8 * ((i >> 1) & 1); }
inline int accumulator_column(int t, int i) { return 8 * (i >> 2) + 2 * (t % 4) + (i & 1); }
STROBE_OUTLINE void gather(float* const (&d)[128], float* matrix, int columns) {
  for (int t = 0; t < 128; ++t)
    for (int i = 0; i < columns / 2; ++i) matrix[accumulator_row(t, i) * columns + accumulator_column(t, i)] = d[t][i];
}
STROBE_OUTLINE void scatter(float* const (&d)[128], const float* matrix, int columns) {
  for (int t = 0; t < 128; ++t)
    for (int i = 0; i < columns / 2; ++i) d[t][i] = matrix[accumulator_row(t, i) * columns + accumulator_column(t, i)];
}

inline Wgmmas& products_of_this_warpgroup() {
  std::shared_ptr<Wgmmas>& products = block().products[block().running / 128];
  if (!products) products = std::make_shared<Wgmmas>();
  return *products;
}

inline void check_descriptor(u64 descriptor, const char* which, Site site) {
  if (descriptor >> 62 != 1)
    block().fail(format("wgmma: descriptor of %s does not ask for the 128-byte swizzle (bits 62-63 are %u)", which,
                        static_cast<u32>(descriptor >> 62)),
                 site);
  if (descriptor >> 49 & 7)
    block().fail(
        format("wgmma: descriptor of %s has a base offset; tiles start at multiples of 1024 bytes here", which), site);
}

template <class T, int N, A From, B Major> inline void wgmma(WgmmaLane lane, bool zero, Site site) {
  static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma: N is 8..256 in steps of 8");
  block().converge(Scope::warpgroup, "wgmma", true, site, &lane, [=](void** lanes) {
    Block& b = block();
    ++b.counters.wgmma;
    b.counters.flops += 2ull * 64 * N * 16;
    auto product = std::make_unique<Product>();
    Accumulator in_place;
    for (int i = 0; i < 128; ++i) {
      product->lanes[i] = *static_cast<WgmmaLane*>(lanes[i]);
      in_place.d[i] = product->lanes[i].d;
      if (product->lanes[i].b_desc != product->lanes[0].b_desc || product->lanes[i].a_desc != product->lanes[0].a_desc)
        b.fail("wgmma: the descriptor differs between the threads of the warpgroup", site,
               static_cast<int>(b.running / 128 * 128 + i));
    }
    if (From != A::registers) check_descriptor(lane.a_desc, "A", site);
    check_descriptor(lane.b_desc, "B", site);
    const u32 first = b.running / 128 * 128, lane_number = b.running % 32;
    visit_chunks<N, From, Major>(product->lanes, [&](u32 warp, u32 address, bool, u32, u32) {
      check_shared(address, 16, 16, "wgmma", site);
      b.counters.shared_bytes_read += 16;
      if (!b.async) return;  // each warp reads its own rows of A; all of them read all of B
      note_read(warp < 4 ? first + 32 * warp + lane_number : b.running, address, 16, Proxy::async, "wgmma", site);
      note_reader_in_flight(address, 16, 1);
    });
    if (!b.async) {
      float d[64 * N];
      if (!zero) gather(in_place.d, d, N);
      multiply<T, N, From, Major>(product->lanes, d, zero);
      return scatter(in_place.d, d, N);
    }
    Wgmmas& flight = products_of_this_warpgroup();
    if (!flight.fenced) b.fail("wgmma: no wgmma_fence() since the last wait", site);
    Accumulator* accumulator = nullptr;
    for (auto& candidate : flight.accumulators)
      if (candidate->d[0] == in_place.d[0]) accumulator = candidate.get();
    if (!accumulator) {
      flight.accumulators.push_back(std::make_unique<Accumulator>());
      accumulator = flight.accumulators.back().get();
      memcpy(accumulator->d, in_place.d, sizeof in_place.d);
      accumulator->columns = N;
      accumulator->uses = 0;
      accumulator->value.resize(64 * N);
      gather(in_place.d, accumulator->value.data(), N);
      for (float* d : in_place.d)
        for (int i = 0; i < N / 2; ++i) d[i] = as_float(Block::kPoison);
    }
    if (accumulator->columns != N) b.fail("wgmma: the accumulator is in flight with another N", site);
    ++accumulator->uses;
    product->site = site, product->group = flight.groups + 1, product->accumulator = accumulator, product->zero = zero;
    product->multiply = multiply<T, N, From, Major>;
    product->visit_operands = [](const WgmmaLane* all, void (*visit)(u32, u32, void*), void* context) {
      visit_chunks<N, From, Major>(all, [&](u32 warp, u32 address, bool, u32, u32) { visit(warp, address, context); });
    };
    flight.products.push_back(std::move(product));
  });
}

STROBE_OUTLINE void retire(Wgmmas& flight, Product& product, Site site) {
  Block& b = block();
  const u32 first = b.running / 128 * 128;
  for (u32 i = 0; i < 128; ++i)
    for (u32 j = 0; j < 4; ++j)
      if (product.lanes[i].a_where[j] && *product.lanes[i].a_where[j] != product.lanes[i].a[j])
        b.fail(
            format("wgmma: register operand a%u was overwritten while the product was in flight (before the wait at ",
                   j) +
                site.text() + ")",
            product.site, static_cast<int>(first + i));
  product.multiply(product.lanes, product.accumulator->value.data(), product.zero);
  product.visit_operands(
      product.lanes,
      [](u32 warp, u32 address, void* context) {
        note_reader_in_flight(address, 16, -1);
        Block& all = block();  // from now on it counts as read by the (first thread of the) warp that waited
        const u32 reader = *static_cast<u32*>(context) + (warp < 4 ? 32 * warp : 0);
        for (u32 i = 0; i < 4; ++i) {
          Word& word = all.words[(address - Block::kSharedBase) / 4 + i];
          word.read_slot = static_cast<u16>(reader), word.read_clock = all.clock(reader)[reader];
        }
      },
      const_cast<u32*>(&first));
  Accumulator* accumulator = product.accumulator;
  if (--accumulator->uses) return;
  for (u32 t = 0; t < 128; ++t)
    for (int i = 0; i < accumulator->columns / 2; ++i)
      if (as_bits(accumulator->d[t][i]) != Block::kPoison)
        b.fail(format("wgmma: accumulator register %d was written while the product was in flight (before the wait at ",
                      i) +
                   site.text() + ")",
               product.site, static_cast<int>(first + t));
  scatter(accumulator->d, accumulator->value.data(), accumulator->columns);
  for (auto& candidate : flight.accumulators)
    if (candidate.get() == accumulator) {
      candidate.swap(flight.accumulators.back());
      flight.accumulators.pop_back();
      break;
    }
}

}  // namespace emu

template <class T, int N> struct Wgmma {
  typedef emu::RegisterOperand Register;
  static void ss_zero(float (&d)[N / 2], u64 a, u64 b, Site site = Site::here()) { shared_a(d, a, b, true, site); }
  static void ss(float (&d)[N / 2], u64 a, u64 b, Site site = Site::here()) { shared_a(d, a, b, false, site); }
  static void rs_zero(float (&d)[N / 2], Register a0, Register a1, Register a2, Register a3, u64 b,
                      Site site = Site::here()) {
    register_a<emu::B::k_major>(d, a0, a1, a2, a3, b, true, site);
  }
  static void rs(float (&d)[N / 2], Register a0, Register a1, Register a2, Register a3, u64 b,
                 Site site = Site::here()) {
    register_a<emu::B::k_major>(d, a0, a1, a2, a3, b, false, site);
  }
  static void rs_t_zero(float (&d)[N / 2], Register a0, Register a1, Register a2, Register a3, u64 b,
                        Site site = Site::here()) {
    register_a<emu::B::mn_major>(d, a0, a1, a2, a3, b, true, site);
  }
  static void rs_t(float (&d)[N / 2], Register a0, Register a1, Register a2, Register a3, u64 b,
                   Site site = Site::here()) {
    register_a<emu::B::mn_major>(d, a0, a1, a2, a3, b, false, site);
  }
  // Chains.
  template <int kSteps, class A, class B>
  static void ss_zero(float (&d)[N / 2], u64 a, u64 b, Site site = Site::here()) {
    for (int i = 0; i < kSteps; ++i) shared_a(d, a + A::step(i), b + B::step(i), i == 0, site);
  }
  template <int kSteps, class A, class B> static void ss(float (&d)[N / 2], u64 a, u64 b, Site site = Site::here()) {
    for (int i = 0; i < kSteps; ++i) shared_a(d, a + A::step(i), b + B::step(i), false, site);
  }
  template <int kSteps, class A, class B>
  static void ss_tt_zero(float (&d)[N / 2], u64 a, u64 b, Site site = Site::here()) {
    for (int i = 0; i < kSteps; ++i)
      emu::wgmma<T, N, emu::A::shared_mn, emu::B::mn_major>(emu::WgmmaLane{d, a + A::step(i), b + B::step(i), {}, {}},
                                                            i == 0, site);
  }
  template <int kSteps, class B>
  static void rs_zero(float (&d)[N / 2], u32 (&a)[4 * kSteps], u64 b, Site site = Site::here()) {
    for (int i = 0; i < kSteps; ++i)
      register_a<emu::B::k_major>(d, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3], b + B::step(i), i == 0, site);
  }
  template <int kSteps, class B>
  static void rs_t_zero(float (&d)[N / 2], u32 (&a)[4 * kSteps], u64 b, Site site = Site::here()) {
    for (int i = 0; i < kSteps; ++i)
      register_a<emu::B::mn_major>(d, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3], b + B::step(i), i == 0, site);
  }
  template <int kSteps, class B>
  static void rs_t(float (&d)[N / 2], u32 (&a)[4 * kSteps], u64 b, Site site = Site::here()) {
    for (int i = 0; i < kSteps; ++i)
      register_a<emu::B::mn_major>(d, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3], b + B::step(i), false, site);
  }

 private:
  static void shared_a(float* d, u64 a, u64 b, bool zero, Site site) {
    emu::wgmma<T, N, emu::A::shared, emu::B::k_major>(emu::WgmmaLane{d, a, b, {}, {}}, zero, site);
  }
  template <emu::B Major>
  static void register_a(float* d, Register a0, Register a1, Register a2, Register a3, u64 b, bool zero, Site site) {
    emu::wgmma<T, N, emu::A::registers, Major>(
        emu::WgmmaLane{d, 0, b, {a0.value, a1.value, a2.value, a3.value}, {a0.where, a1.where, a2.where, a3.where}},
        zero, site);
  }
};

template <class T, int N> struct Accumulators {
  float sum[N / 2];
  Accumulators() {
    for (float& x : sum) x = as_float(emu::Block::kPoison);
  }
  static void declare() {}
  void zero() {
    for (float& x : sum) x = 0.f;
  }
  void scale(const float (&by)[2]) {
    for (int i = 0; i < N / 2; ++i) sum[i] *= by[(i >> 1) & 1];
  }
  template <int kSteps, class B> void rs_t(u32 (&a)[4 * kSteps], u64 b, Site site = Site::here()) {
    Wgmma<T, N>::template rs_t<kSteps, B>(sum, a, b, site);
  }
  template <int J> void stage(u32 address, const float (&by)[2], Site site = Site::here()) const {
    const float* x = sum + 8 * J;
    stmatrix_x4(address, pack2<T>(x[0] * by[0], x[1] * by[0]), pack2<T>(x[2] * by[1], x[3] * by[1]),
                pack2<T>(x[4] * by[0], x[5] * by[0]), pack2<T>(x[6] * by[1], x[7] * by[1]), site);
  }
  template <int J> void stage_fp32(u32 address, bool odd, const float (&by)[2], Site site = Site::here()) const {
    static_assert(32 * J + 32 <= N, "a whole panel");
    for (int i = 0; i < 4; ++i)
      for (int r = 0; r < 2; ++r) {
        const float* x = sum + 16 * J + 4 * (odd ? i ^ 2 : i) + 2 * r;
        st_shared((address ^ 32 * i) + 1024 * r, u32x2{as_bits(x[0] * by[r]), as_bits(x[1] * by[r])}, site);
      }
  }
  template <int J> void add_staged(u32 address, bool odd, bool there, Site site = Site::here()) {
    static_assert(32 * J + 32 <= N, "a whole panel");
    for (int i = 0; there && i < 4; ++i)
      for (int r = 0; r < 2; ++r) {
        float x, y, *d = sum + 16 * J + 4 * (odd ? i ^ 2 : i) + 2 * r;
        ld_shared_x2((address ^ 32 * i) + 1024 * r, x, y, site);
        d[0] += x, d[1] += y;
      }
  }
  void load_row(int r, const float* from, int columns, Site site = Site::here()) {
    for (int i = 0; i < min(columns, N) / 8; ++i) {
      float x[2];
      ld_global_l2(x, from + 8 * i, true, site);
      sum[4 * i + 2 * r] = x[0], sum[4 * i + 2 * r + 1] = x[1];
    }
  }
  void store_row(int r, float* to, int columns, Site site = Site::here()) const {
    for (int i = 0; i < min(columns, N) / 8; ++i)
      st_global_x2(to + 8 * i, sum[4 * i + 2 * r], sum[4 * i + 2 * r + 1], site);
  }
};

STROBE_DEVICE void wgmma_fence(Site site = Site::here()) {
  if (!emu::block().async) return;
  emu::block().converge(emu::Scope::warpgroup, "wgmma_fence", true, site, nullptr,
                        [](void**) { emu::products_of_this_warpgroup().fenced = true; });
}
STROBE_DEVICE void wgmma_commit(Site site = Site::here()) {
  if (!emu::block().async) return;
  emu::block().converge(emu::Scope::warpgroup, "wgmma_commit", true, site, nullptr,
                        [](void**) { ++emu::products_of_this_warpgroup().groups; });
}
template <int Pending> STROBE_DEVICE void wgmma_wait(Site site = Site::here()) {
  static_assert(Pending >= 0 && Pending <= 7, "wgmma.wait_group takes 0..7");
  if (!emu::block().async) return;
  emu::block().converge(emu::Scope::warpgroup, "wgmma_wait", true, site, nullptr, [=](void**) {
    emu::Wgmmas& flight = emu::products_of_this_warpgroup();
    std::vector<std::unique_ptr<emu::Product>> kept;
    for (auto& product : flight.products) {
      if (product->group + Pending > flight.groups) kept.push_back(std::move(product));
      else emu::retire(flight, *product, site);
    }
    flight.products.swap(kept);
    flight.fenced = false;
  });
}

STROBE_DEVICE u64 wgmma_desc(u32 addr, u32 lead_bytes, u32 stride_bytes) {
  return u64((addr & 0x3FFFF) >> 4) | u64(lead_bytes >> 4) << 16 | u64(stride_bytes >> 4) << 32 | u64(1) << 62;
}

template <int Regs> STROBE_DEVICE void regs_dec() {
  static_assert(Regs >= 24 && Regs <= 256 && Regs % 8 == 0, "setmaxnreg takes 24..256 in steps of 8");
}
template <int Regs> STROBE_DEVICE void regs_inc() {
  static_assert(Regs >= 24 && Regs <= 256 && Regs % 8 == 0, "setmaxnreg takes 24..256 in steps of 8");
}

STROBE_DEVICE void keep_above(u32 addr, float never_negative, Site site = Site::here()) {
  emu::check_shared(addr, 4, 4, "keep_above", site);
  if (never_negative < 0.f) emu::store_shared(addr, &never_negative, 4, "keep_above", site);
}

}  // namespace strobe
