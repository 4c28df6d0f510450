// Hopper's warpgroup matrix product. In synchronous mode it happens at issue. In asynchronous mode it happens at the
// wait that retires its group: until then the accumulators hold NaN, the shared operands must not be written, and
// register operands must keep their values. (Register operands are watched where they live: pass elements of an array
// that outlives the wait.) Sums: as in mma.cuh, the products of a step in the order of k, then added to D.
#pragma once
#include <strobe/emu/base.cuh>
#include <strobe/emu/math.cuh>
#include <strobe/emu/memory.cuh>

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

struct WgmmaShape {
  int bytes;                              // of an element of A and B
  void (*widen)(const void*, float* to);  // the elements of a chunk of 16 bytes
  int n;
  A from;
  B major;
};
void wgmma(WgmmaLane lane, WgmmaShape shape, bool zero, Site site);
void wgmma_fence(Site site);
void wgmma_commit(Site site);
void wgmma_wait(u32 pending, Site site);

template <class T> inline void widen_chunk(const void* chunk, float* to) {
  for (u32 i = 0; i < 16 / sizeof(T); ++i) {
    T x;
    memcpy(&x, static_cast<const u8*>(chunk) + i * sizeof(T), sizeof(T));
    to[i] = to_float<T>(x.bits);
  }
}
template <class T, int N, A From, B Major> inline void wgmma(const WgmmaLane& lane, bool zero, Site site) {
  static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma: N is 8..256 in steps of 8");
  static_assert(sizeof(T) == 2 || (From != A::shared_mn && Major == B::k_major), "transposing takes 16-bit elements");
  wgmma(lane, WgmmaShape{int(sizeof(T)), widen_chunk<T>, N, From, Major}, zero, site);
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
    for (float& x : sum) x = as_float(emu::kPoison);
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
  void add_row(int r, const float* from, int columns, float by_there, float by_here, Site site = Site::here()) {
    for (int i = 0; i < N / 8; ++i) {
      float x[2];
      ld_global_l2(x, from + 8 * i, 8 * i < columns, site);
      for (int j = 0; j < 2; ++j) sum[4 * i + 2 * r + j] = fma(sum[4 * i + 2 * r + j], by_here, x[j] * by_there);
    }
  }
  void store_row(int r, float* to, int columns, Site site = Site::here()) const {
    for (int i = 0; i < min(columns, N) / 8; ++i)
      st_global_x2(to + 8 * i, sum[4 * i + 2 * r], sum[4 * i + 2 * r + 1], site);
  }
};

STROBE_DEVICE void wgmma_fence(Site site = Site::here()) { emu::wgmma_fence(site); }
STROBE_DEVICE void wgmma_commit(Site site = Site::here()) { emu::wgmma_commit(site); }
template <int Pending> STROBE_DEVICE void wgmma_wait(Site site = Site::here()) {
  static_assert(Pending >= 0 && Pending <= 7, "wgmma.wait_group takes 0..7");
  emu::wgmma_wait(Pending, site);
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
