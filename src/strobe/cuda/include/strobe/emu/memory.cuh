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

STROBE_DEVICE u32 smem_base() { return emu::kSharedBase; }

namespace emu {

// Every access passes through these: bounds, alignment, and in asynchronous mode happens-before.
void check_global(const void* p, u32 bytes, u32 alignment, bool write, const char* op, Site site);
void check_shared(u32 address, u32 bytes, u32 alignment, const char* op, Site site, int thread = -1);
void load_shared(void* to, u32 address, u32 bytes, const char* op, Site site);
void store_shared(u32 address, const void* from, u32 bytes, const char* op, Site site);
struct Matrices {
  u32* regs[4];
};
void load_matrices(u32 address, Matrices to, bool transpose, const char* op, Site site);
void store_matrices(u32 address, u32x4 from, bool transpose, const char* op, Site site);
void copy_async(u32 dst, const void* src, bool valid, Site site);
void commit_copies();
void wait_copies(u32 pending);

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

STROBE_DEVICE void ldmatrix_x4(u32 addr, u32& a, u32& b, u32& c, u32& d, Site site = Site::here()) {
  emu::load_matrices(addr, {&a, &b, &c, &d}, false, "ldmatrix_x4", site);
}
STROBE_DEVICE void ldmatrix_x4_trans(u32 addr, u32& a, u32& b, u32& c, u32& d, Site site = Site::here()) {
  emu::load_matrices(addr, {&a, &b, &c, &d}, true, "ldmatrix_x4_trans", site);
}

STROBE_DEVICE void stmatrix_x4(u32 addr, u32 a, u32 b, u32 c, u32 d, Site site = Site::here()) {
  emu::store_matrices(addr, {a, b, c, d}, false, "stmatrix_x4", site);
}
STROBE_DEVICE void stmatrix_x4_trans(u32 addr, u32 a, u32 b, u32 c, u32 d, Site site = Site::here()) {
  emu::store_matrices(addr, {a, b, c, d}, true, "stmatrix_x4_trans", site);
}

STROBE_DEVICE void cp_async_16(u32 dst, const void* src, bool valid, Site site = Site::here()) {
  emu::copy_async(dst, src, valid, site);
}
STROBE_DEVICE void cp_async_16(u32 dst, const void* src, Site site = Site::here()) {
  emu::copy_async(dst, src, true, site);
}
STROBE_DEVICE void cp_async_commit() { emu::commit_copies(); }
template <int Pending> STROBE_DEVICE void cp_async_wait() { emu::wait_copies(Pending); }

}  // namespace strobe
