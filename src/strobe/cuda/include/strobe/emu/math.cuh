// Scalar arithmetic that has an instruction of its own. Where the hardware approximates (ex2, lg2, rcp), this is exact
// to rounding; flushing of subnormal numbers is the instruction's.
#pragma once
#include <strobe/emu/base.cuh>

namespace strobe {
namespace emu {

float exp2(float x);
u16 round_bf16(float x);
u16 round_fp16(float x);

inline float flush(float x) { return __builtin_fabsf(x) < 1.17549435e-38f ? __builtin_copysignf(0.f, x) : x; }

inline float widen_fp16(u16 x) {
  const u32 magnitude = u32(x & 0x7fffu) << 13, sign = u32(x & 0x8000u) << 16;
  const u32 scaled = as_bits(as_float(magnitude) * 0x1p112f);  // also normalises subnormal halves
  return as_float(((x & 0x7c00u) == 0x7c00u ? magnitude | 0x7f800000u : scaled) | sign);
}

}  // namespace emu

STROBE_DEVICE float exp2_approx(float x) { return emu::exp2(x); }
STROBE_DEVICE float log2_approx(float x) { return __builtin_log2f(x); }
STROBE_DEVICE float rcp_approx(float x) { return emu::flush(1.f / emu::flush(x)); }
STROBE_DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
STROBE_DEVICE float mul_rn(float a, float b) { return a * b; }
STROBE_DEVICE float add_rn(float a, float b) { return a + b; }
STROBE_DEVICE int highest_bit(u32 x) { return 31 - __builtin_clz(x); }
STROBE_DEVICE int lowest_bit(u32 x) { return __builtin_ctz(x); }
STROBE_DEVICE int bits_set(u32 x) { return __builtin_popcount(x); }
STROBE_DEVICE float sqrt_approx(float x) { return emu::flush(__builtin_sqrtf(emu::flush(x))); }
STROBE_DEVICE float sin_approx(float x) { return __builtin_sinf(x); }
STROBE_DEVICE float cos_approx(float x) { return __builtin_cosf(x); }
STROBE_DEVICE float error_function(float x) { return __builtin_erff(x); }
STROBE_DEVICE float round_down(float x) { return __builtin_floorf(x); }
STROBE_DEVICE float round_up(float x) { return __builtin_ceilf(x); }
STROBE_DEVICE float round_to_zero(float x) { return __builtin_truncf(x); }
STROBE_DEVICE float round_to_even(float x) { return __builtin_rintf(x); }
STROBE_DEVICE float fabs(float x) { return __builtin_fabsf(x); }
STROBE_DEVICE float fmax(float a, float b) {  // the number if one is NaN; +0 above -0
  if (a != a) return b;
  if (b != b) return a;
  return a > b ? a : b > a ? b : as_float(as_bits(a) & as_bits(b));
}

template <class T> STROBE_DEVICE u32 pack2(float lo, float hi);
template <> STROBE_DEVICE u32 pack2<bf16>(float lo, float hi) {
  return emu::round_bf16(lo) | u32(emu::round_bf16(hi)) << 16;
}
template <> STROBE_DEVICE u32 pack2<fp16>(float lo, float hi) {
  return emu::round_fp16(lo) | u32(emu::round_fp16(hi)) << 16;
}

STROBE_DEVICE u32 not_less_f16x2(u32 a, u32 b) {
  u32 r = 0;
  for (u32 half = 0; half < 32; half += 16)
    if (!(emu::widen_fp16(u16(a >> half)) < emu::widen_fp16(u16(b >> half)))) r |= 0xffffu << half;
  return r;
}
STROBE_DEVICE void not_less_f16x2(bool& lo, bool& hi, u32 a, u32 b) {
  const u32 both = not_less_f16x2(a, b);
  lo = both & 1, hi = both >> 31;
}
STROBE_DEVICE u32 bytes_of(u32 a, u32 b, u32 nibbles) {
  u32 r = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u32 from = nibbles >> 4 * i & 7;
    r |= ((from < 4 ? a : b) >> 8 * (from & 3) & 0xff) << 8 * i;
  }
  return r;
}

template <class T> STROBE_DEVICE float to_float(u16 x);
template <> STROBE_DEVICE float to_float<bf16>(u16 x) { return as_float(u32(x) << 16); }
template <> STROBE_DEVICE float to_float<fp16>(u16 x) { return emu::widen_fp16(x); }

}  // namespace strobe
