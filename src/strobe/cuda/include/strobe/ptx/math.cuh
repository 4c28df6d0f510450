// Scalar arithmetic that has an instruction of its own.
#pragma once
#include <strobe/ptx/base.cuh>

namespace strobe {

STROBE_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
STROBE_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
STROBE_DEVICE float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
STROBE_DEVICE float sqrt_approx(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
STROBE_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// Rounded by itself: the compiler makes no FMA of it. Keeps subnormal numbers.
STROBE_DEVICE float mul_rn(float a, float b) {
  float y;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
STROBE_DEVICE float add_rn(float a, float b) {
  float y;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
STROBE_DEVICE float fabs(float x) {  // keeps subnormal numbers, so that it costs nothing: a modifier of its user
  float y;
  asm("abs.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
STROBE_DEVICE float fmax(float a, float b) { return ::fmaxf(a, b); }
STROBE_DEVICE int highest_bit(u32 x) { return 31 - ::__clz(int(x)); }  // of a number that is not 0
STROBE_DEVICE int lowest_bit(u32 x) { return ::__ffs(int(x)) - 1; }
STROBE_DEVICE int bits_set(u32 x) { return ::__popc(x); }
// Users' functions take these sines and cosines of up to half a turn, and CUDA's own.
STROBE_DEVICE float sin_approx(float x) { return __sinf(x); }
STROBE_DEVICE float cos_approx(float x) { return __cosf(x); }
STROBE_DEVICE float error_function(float x) { return ::erff(x); }
STROBE_DEVICE float round_down(float x) { return ::floorf(x); }
STROBE_DEVICE float round_up(float x) { return ::ceilf(x); }
STROBE_DEVICE float round_to_zero(float x) { return ::truncf(x); }
STROBE_DEVICE float round_to_even(float x) { return ::rintf(x); }

// Two floats rounded to 16 bit, `lo` in the lower half. (The instruction names the upper half first.)
template <class T> STROBE_DEVICE u32 pack2(float lo, float hi);
template <> STROBE_DEVICE u32 pack2<bf16>(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
template <> STROBE_DEVICE u32 pack2<fp16>(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// Compares two pairs of fp16 numbers: 0xffff in the halves in which a >= b, or one is NaN.
STROBE_DEVICE u32 not_less_f16x2(u32 a, u32 b) {
  u32 r;
  asm("set.geu.u32.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
STROBE_DEVICE void not_less_f16x2(bool& lo, bool& hi, u32 a, u32 b) {
  u32 x, y;
  asm("{\n.reg .pred p, q;\nsetp.geu.f16x2 p|q, %2, %3;\nselp.u32 %0, 1, 0, p;\nselp.u32 %1, 1, 0, q;\n}"
      : "=r"(x), "=r"(y)
      : "r"(a), "r"(b));
  lo = x, hi = y;
}
// Bytes of two words, `a` holding numbers 0 to 3 and `b` 4 to 7; the least nibble chooses the lowest.
STROBE_DEVICE u32 bytes_of(u32 a, u32 b, u32 nibbles) { return __byte_perm(a, b, nibbles); }

template <class T> STROBE_DEVICE float to_float(u16 x);
template <> STROBE_DEVICE float to_float<bf16>(u16 x) { return as_float(u32(x) << 16); }
template <> STROBE_DEVICE float to_float<fp16>(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

}  // namespace strobe
