// Global and shared memory. Shared memory is addressed by 32-bit byte addresses; as on a GPU they do not start at 0.
#pragma once
#include <strobe/emu/base.cuh>

namespace strobe {

struct u32x2 {
  u32 x, y;
};
struct u32x4 {
  u32 x, y, z, w;
};

STROBE_DEVICE u32 smem_base() { return emu::Block::kSharedBase; }

namespace emu {
template <class T> inline T load_global(const T* p, Site site) {
  check_global(p, sizeof(T), sizeof(T), false, "ld_global", site);
  return *p;
}
template <class T> inline void store_global(void* p, const T& x, Site site) {
  check_global(p, sizeof(T), sizeof(T), true, "st_global", site);
  memcpy(p, &x, sizeof(T));
}
}  // namespace emu

STROBE_DEVICE int ld_global(const int* p, Site site = Site::here()) { return emu::load_global(p, site); }
STROBE_DEVICE float ld_global(const float* p, Site site = Site::here()) { return emu::load_global(p, site); }
STROBE_DEVICE u16 ld_global(const u16* p, Site site = Site::here()) { return emu::load_global(p, site); }
template <class T> STROBE_DEVICE T ld_constant(const T* p, bool valid, Site site = Site::here()) {
  return valid ? emu::load_global(p, site) : T{};
}
STROBE_DEVICE float ld_global_l2(const float* p, Site site = Site::here()) { return emu::load_global(p, site); }
template <u32 N> STROBE_DEVICE void ld_global_l2(float (&to)[N], const float* p, bool valid, Site site = Site::here()) {
  if (valid) emu::check_global(p, sizeof(to), sizeof(to), false, "ld_global_l2", site);
  valid ? memcpy(to, p, sizeof(to)) : memset(to, 0, sizeof(to));
}
STROBE_DEVICE u32x4 ld_global_x4(const void* p, Site site = Site::here()) {
  emu::check_global(p, 16, 16, false, "ld_global_x4", site);
  u32x4 v;
  memcpy(&v, p, 16);
  return v;
}
STROBE_DEVICE void st_global(float* p, float x, Site site = Site::here()) { emu::store_global(p, x, site); }
STROBE_DEVICE void st_global_x2(float* p, float x, float y, Site site = Site::here()) {
  emu::store_global(p, u64(as_bits(y)) << 32 | as_bits(x), site);
}
STROBE_DEVICE void st_global(u16* p, u16 x, Site site = Site::here()) { emu::store_global(p, x, site); }
STROBE_DEVICE void st_global(u32* p, u32 x, Site site = Site::here()) { emu::store_global(p, x, site); }
STROBE_DEVICE void st_global(void* p, u32x4 x, Site site = Site::here()) { emu::store_global(p, x, site); }

STROBE_DEVICE u32 ld_shared(u32 addr, Site site = Site::here()) {
  u32 x;
  emu::load_shared(&x, addr, 4, "ld_shared", site);
  return x;
}
STROBE_DEVICE float ld_shared_f32(u32 addr, Site site = Site::here()) {
  float x;
  emu::load_shared(&x, addr, 4, "ld_shared_f32", site);
  return x;
}
STROBE_DEVICE void ld_shared_x2(u32 addr, float& x, float& y, Site site = Site::here()) {
  float v[2];
  emu::load_shared(v, addr, 8, "ld_shared_x2", site);
  x = v[0], y = v[1];
}
STROBE_DEVICE u32x4 ld_shared_x4(u32 addr, Site site = Site::here()) {
  u32x4 v;
  emu::load_shared(&v, addr, 16, "ld_shared_x4", site);
  return v;
}
STROBE_DEVICE void st_shared(u32 addr, u32 x, Site site = Site::here()) {
  emu::store_shared(addr, &x, 4, "st_shared", site);
}
STROBE_DEVICE void st_shared(u32 addr, float x, Site site = Site::here()) {
  emu::store_shared(addr, &x, 4, "st_shared", site);
}
STROBE_DEVICE void st_shared(u32 addr, u32x2 v, Site site = Site::here()) {
  emu::store_shared(addr, &v, 8, "st_shared", site);
}
STROBE_DEVICE void st_shared(u32 addr, u32x4 v, Site site = Site::here()) {
  emu::store_shared(addr, &v, 16, "st_shared", site);
}

namespace emu {

struct MatrixLane {
  u32 address;
  u32* regs[4];
};

STROBE_OUTLINE void check_matrix_rows(void** lanes, const char* op, Site site) {
  Block& b = block();
  const u32 first = b.running / 32 * 32;
  u32 address[32];
  for (u32 i = 0; i < 32; ++i) {
    address[i] = static_cast<MatrixLane*>(lanes[i])->address;
    check_shared(address[i], 16, 16, op, site, static_cast<int>(first + i));
  }
  for (u32 i = 0; i < 32; i += 8)
    b.counters.bank_conflicts += Block::extra_wavefronts(address + i, 0xff, 8, 16);  // 8 rows a phase
}

template <bool Transpose>
inline void load_matrices(u32 address, u32& r0, u32& r1, u32& r2, u32& r3, const char* op, Site site) {
  MatrixLane lane{address, {&r0, &r1, &r2, &r3}};
  block().converge(Scope::warp, op, true, site, &lane, [=](void** lanes) {
    Block& b = block();
    check_matrix_rows(lanes, op, site);
    b.counters.shared_bytes_read += 512;
    for (u32 m = 0; m < 4; ++m) {
      u16 rows[8][8];
      for (u32 i = 0; i < 8; ++i) {
        const u32 from = static_cast<MatrixLane*>(lanes[8 * m + i])->address;
        if (b.async) note_read(b.running / 32 * 32 + 8 * m + i, from, 16, Proxy::generic, op, site);
        memcpy(rows[i], shared_at(from), 16);
      }
      for (u32 i = 0; i < 32; ++i) {
        const u32 row = i / 4, column = 2 * (i % 4);
        *static_cast<MatrixLane*>(lanes[i])->regs[m] = Transpose ? rows[column][row] | u32(rows[column + 1][row]) << 16
                                                                 : rows[row][column] | u32(rows[row][column + 1]) << 16;
      }
    }
  });
}

}  // namespace emu

STROBE_DEVICE void ldmatrix_x4(u32 addr, u32& a, u32& b, u32& c, u32& d, Site site = Site::here()) {
  emu::load_matrices<false>(addr, a, b, c, d, "ldmatrix_x4", site);
}
STROBE_DEVICE void ldmatrix_x4_trans(u32 addr, u32& a, u32& b, u32& c, u32& d, Site site = Site::here()) {
  emu::load_matrices<true>(addr, a, b, c, d, "ldmatrix_x4_trans", site);
}

namespace emu {

template <bool Transpose>
inline void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d, const char* op, Site site) {
  MatrixLane lane{address, {&a, &b, &c, &d}};
  block().converge(Scope::warp, op, true, site, &lane, [=](void** lanes) {
    Block& block = emu::block();
    check_matrix_rows(lanes, op, site);
    block.counters.shared_bytes_written += 512;
    for (u32 m = 0; m < 4; ++m) {
      u16 rows[8][8];
      for (u32 i = 0; i < 32; ++i)
        for (u32 half = 0; half < 2; ++half) {
          const u16 x = u16(*static_cast<MatrixLane*>(lanes[i])->regs[m] >> (16 * half));
          const u32 row = i / 4, column = 2 * (i % 4) + half;
          (Transpose ? rows[column][row] : rows[row][column]) = x;
        }
      for (u32 i = 0; i < 8; ++i) {
        const u32 to = static_cast<MatrixLane*>(lanes[8 * m + i])->address,
                  thread = block.running / 32 * 32 + 8 * m + i;
        if (block.async) {
          check_overwrite(thread, to, 16, rows[i], op, site);
          note_write(thread, block.clock(thread)[thread], to, 16, false, true, site);
        }
        memcpy(shared_at(to), rows[i], 16);
      }
    }
  });
}

}  // namespace emu

STROBE_DEVICE void stmatrix_x4(u32 addr, u32 a, u32 b, u32 c, u32 d, Site site = Site::here()) {
  emu::store_matrices<false>(addr, a, b, c, d, "stmatrix_x4", site);
}
STROBE_DEVICE void stmatrix_x4_trans(u32 addr, u32 a, u32 b, u32 c, u32 d, Site site = Site::here()) {
  emu::store_matrices<true>(addr, a, b, c, d, "stmatrix_x4_trans", site);
}

namespace emu {

STROBE_OUTLINE void copy_async(u32 dst, const void* src, bool valid, Site site) {
  Block& b = block();
  check_shared(dst, 16, 16, "cp_async_16", site);
  if (valid) check_global(src, 16, 16, false, "cp_async_16", site);
  b.counters.shared_bytes_written += 16;
  if (!b.async) {
    valid ? memcpy(shared_at(dst), src, 16) : memset(shared_at(dst), 0, 16);
    return;
  }
  check_overwrite(b.running, dst, 16, nullptr, "cp_async_16", site);
  note_write(b.running, b.clock(b.running)[b.running], dst, 16, true, true, site);
  poison(dst, 16);
  Thread& thread = b.self();
  thread.copies.push_back(CopyInFlight{dst, valid ? src : nullptr, thread.copy_groups + 1, site});
}

// The thread's copies of all but the last `pending` groups land; from its next barrier on, others may see them.
STROBE_OUTLINE void wait_copies(u32 pending) {
  Block& b = block();
  Thread& thread = b.self();
  size_t kept = 0;
  for (const CopyInFlight& copy : thread.copies) {
    if (copy.group + pending > thread.copy_groups) {
      thread.copies[kept++] = copy;
      continue;
    }
    copy.src ? memcpy(shared_at(copy.dst), copy.src, 16) : memset(shared_at(copy.dst), 0, 16);
    note_write(b.running, b.clock(b.running)[b.running], copy.dst, 16, false, true, copy.site);
  }
  thread.copies.resize(kept);
}

}  // namespace emu

STROBE_DEVICE void cp_async_16(u32 dst, const void* src, bool valid, Site site = Site::here()) {
  emu::copy_async(dst, src, valid, site);
}
STROBE_DEVICE void cp_async_16(u32 dst, const void* src, Site site = Site::here()) {
  emu::copy_async(dst, src, true, site);
}
STROBE_DEVICE void cp_async_commit() { ++emu::self().copy_groups; }
template <int Pending> STROBE_DEVICE void cp_async_wait() { emu::wait_copies(Pending); }

}  // namespace strobe
