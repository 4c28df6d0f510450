// Global and shared memory. Shared memory is addressed by 32-bit byte addresses, never by pointers.
#pragma once
#include <strobe/ptx/base.cuh>

namespace strobe {

struct u32x2 {
  u32 x, y;
};
struct u32x4 {
  u32 x, y, z, w;
};

// First byte of the block's dynamic shared memory; 1024-byte aligned, as the 128-byte swizzle wants it.
STROBE_DEVICE u32 smem_base() {
  extern __shared__ __align__(1024) u8 strobe_smem[];
  return static_cast<u32>(__cvta_generic_to_shared(strobe_smem));
}

STROBE_DEVICE int ld_global(const int* p) {
  int x;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(x) : "l"(p));
  return x;
}
STROBE_DEVICE float ld_global(const float* p) {
  float x;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(p));
  return x;
}
STROBE_DEVICE u16 ld_global(const u16* p) {
  u16 x;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(x) : "l"(p));
  return x;
}
// Reads what no launch writes meanwhile: the compiler may merge such loads and move them. With `valid` false nothing is
// read.
STROBE_DEVICE float ld_constant(const float* p, bool valid) {
  float x;
  asm("{ .reg .pred valid; setp.ne.b32 valid, %2, 0; mov.b32 %0, 0; @valid ld.global.nc.f32 %0, [%1]; }"
      : "=f"(x)
      : "l"(p), "r"(int(valid)));
  return x;
}
STROBE_DEVICE u16 ld_constant(const u16* p, bool valid) {
  u16 x;
  asm("{ .reg .pred valid; setp.ne.b32 valid, %2, 0; mov.b16 %0, 0; @valid ld.global.nc.u16 %0, [%1]; }"
      : "=h"(x)
      : "l"(p), "r"(int(valid)));
  return x;
}
STROBE_DEVICE bool ld_constant(const bool* p, bool valid) {
  u16 x;
  asm("{ .reg .pred valid; setp.ne.b32 valid, %2, 0; mov.b16 %0, 0; @valid ld.global.nc.u8 %0, [%1]; }"
      : "=h"(x)
      : "l"(p), "r"(int(valid)));
  return x != 0;
}
STROBE_DEVICE int ld_constant(const int* p, bool valid) {
  int x;
  asm("{ .reg .pred valid; setp.ne.b32 valid, %2, 0; mov.b32 %0, 0; @valid ld.global.nc.b32 %0, [%1]; }"
      : "=r"(x)
      : "l"(p), "r"(int(valid)));
  return x;
}
STROBE_DEVICE i64 ld_constant(const i64* p, bool valid) {
  i64 x;
  asm("{ .reg .pred valid; setp.ne.b32 valid, %2, 0; mov.b64 %0, 0; @valid ld.global.nc.b64 %0, [%1]; }"
      : "=l"(x)
      : "l"(p), "r"(int(valid)));
  return x;
}
STROBE_DEVICE double ld_constant(const double* p, bool valid) {
  double x;
  asm("{ .reg .pred valid; setp.ne.b32 valid, %2, 0; mov.f64 %0, 0d0000000000000000; @valid ld.global.nc.f64 %0, [%1]; "
      "}"
      : "=d"(x)
      : "l"(p), "r"(int(valid)));
  return x;
}
STROBE_DEVICE short ld_constant(const short* p, bool valid) {
  short x;
  asm("{ .reg .pred valid; setp.ne.b32 valid, %2, 0; mov.b16 %0, 0; @valid ld.global.nc.s16 %0, [%1]; }"
      : "=h"(x)
      : "l"(p), "r"(int(valid)));
  return x;
}
STROBE_DEVICE signed char ld_constant(const signed char* p, bool valid) {
  short x;
  asm("{ .reg .pred valid; setp.ne.b32 valid, %2, 0; mov.b16 %0, 0; @valid ld.global.nc.s8 %0, [%1]; }"
      : "=h"(x)
      : "l"(p), "r"(int(valid)));
  return static_cast<signed char>(x);
}
STROBE_DEVICE u8 ld_constant(const u8* p, bool valid) {
  u16 x;
  asm("{ .reg .pred valid; setp.ne.b32 valid, %2, 0; mov.b16 %0, 0; @valid ld.global.nc.u8 %0, [%1]; }"
      : "=h"(x)
      : "l"(p), "r"(int(valid)));
  return u8(x);
}
// Reads what is written during this launch; 4, 8 or 16 bytes, aligned to as many. With `valid` false nothing is read
// and `to` becomes 0.
STROBE_DEVICE float ld_global_l2(const float* p) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
  return x;
}
STROBE_DEVICE void ld_global_l2(float (&to)[2], const float* p, bool valid) {
  to[0] = to[1] = 0.f;
  asm volatile("{ .reg .pred valid; setp.ne.b32 valid, %3, 0; @valid ld.global.cg.v2.f32 {%0, %1}, [%2]; }"
               : "+f"(to[0]), "+f"(to[1])
               : "l"(p), "r"(int(valid))
               : "memory");
}
STROBE_DEVICE void ld_global_l2(float (&to)[4], const float* p, bool valid) {
  to[0] = to[1] = to[2] = to[3] = 0.f;
  asm volatile("{ .reg .pred valid; setp.ne.b32 valid, %5, 0; @valid ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4]; }"
               : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3])
               : "l"(p), "r"(int(valid))
               : "memory");
}
STROBE_DEVICE u32x4 ld_global_x4(const void* p) {  // 16 bytes, 16-byte aligned
  u32x4 v;
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
STROBE_DEVICE void st_global(float* p, float x) { asm volatile("st.global.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory"); }
STROBE_DEVICE void st_global(u16* p, u16 x) { asm volatile("st.global.b16 [%0], %1;" ::"l"(p), "h"(x) : "memory"); }
STROBE_DEVICE void st_global(u32* p, u32 x) { asm volatile("st.global.b32 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }
STROBE_DEVICE void st_global_x2(float* p, float x, float y) {  // 8-byte aligned
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(x), "f"(y) : "memory");
}
STROBE_DEVICE void st_global(void* p, u32x4 x) {  // 16 bytes, 16-byte aligned
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

STROBE_DEVICE u32 ld_shared(u32 addr) {
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(addr) : "memory");
  return x;
}
STROBE_DEVICE float ld_shared_f32(u32 addr) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(addr) : "memory");
  return x;
}
STROBE_DEVICE void ld_shared_x2(u32 addr, float& x, float& y) {  // 8-byte aligned
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(addr) : "memory");
}
STROBE_DEVICE u32x4 ld_shared_x4(u32 addr) {  // 16 bytes, 16-byte aligned
  u32x4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(addr)
               : "memory");
  return v;
}
STROBE_DEVICE void st_shared(u32 addr, u32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(addr), "r"(x) : "memory");
}
STROBE_DEVICE void st_shared(u32 addr, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(addr), "f"(x) : "memory");
}
STROBE_DEVICE void st_shared(u32 addr, u32x2 v) {  // 8-byte aligned
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(addr), "r"(v.x), "r"(v.y) : "memory");
}
STROBE_DEVICE void st_shared(u32 addr, u32x4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Four 8x8 16-bit matrices; lane l gives the address of row l%8 of matrix l/8. Afterwards each thread holds two
// neighbours of row lane/4, columns 2*(lane%4): the operand layout of mma. `_trans` transposes each matrix on the way.
STROBE_DEVICE void ldmatrix_x4(u32 addr, u32& a, u32& b, u32& c, u32& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(addr)
               : "memory");
}
STROBE_DEVICE void ldmatrix_x4_trans(u32 addr, u32& a, u32& b, u32& c, u32& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(addr)
               : "memory");
}

// The inverse of ldmatrix: lane l gives the address of row l%8 of matrix l/8.
STROBE_DEVICE void stmatrix_x4(u32 addr, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
STROBE_DEVICE void stmatrix_x4_trans(u32 addr, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// 16 bytes from global to shared memory without passing through registers; with `valid` false nothing is read and the
// 16 bytes become zero. Complete only after cp_async_wait (own copies) and a barrier (everyone's).
STROBE_DEVICE void cp_async_16(u32 dst, const void* src, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
STROBE_DEVICE void cp_async_16(u32 dst, const void* src) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
STROBE_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending> STROBE_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace strobe
