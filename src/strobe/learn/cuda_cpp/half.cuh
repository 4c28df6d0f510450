// `__half` for lessons, in plain C++: on the emulator and for NVRTC, which often comes without cuda_fp16.h. Arithmetic
// is done in float and rounded once, to nearest even.
struct __half {
  unsigned short bits;
  __half() = default;
  __device__ __forceinline__ __half(float x) {
    union {
      float value;
      unsigned bits;
    } from = {x};
    const unsigned sign = from.bits >> 16 & 0x8000, size = from.bits & 0x7fffffff;
    if (size >= 0x7f800000) bits = sign | (size > 0x7f800000 ? 0x7fff : 0x7c00);
    else if (size >= 0x477ff000) bits = sign | 0x7c00;  // rounds to infinity
    else if (size < 0x33000001) bits = sign;            // rounds to zero
    else {
      const int exponent = static_cast<int>(size >> 23) - 112;  // of a half
      const unsigned shift = exponent > 0 ? 13 : 14 - exponent, whole = (size & 0x7fffff) | 0x800000;
      const unsigned kept = whole >> shift, rest = whole & ((1u << shift) - 1), tie = 1u << (shift - 1);
      // The leading one of a normal number adds to its exponent; so does a carry out of the rounding.
      bits = sign + (exponent > 0 ? (exponent - 1) << 10 : 0) + kept + (rest > tie || (rest == tie && (kept & 1)));
    }
  }
  __device__ __forceinline__ operator float() const {
    const unsigned exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 0) return (bits & 0x8000 ? -1.0f : 1.0f) * static_cast<float>(fraction) * 5.9604644775390625e-8f;
    union {
      unsigned bits;
      float value;
    } to = {(bits & 0x8000u) << 16 | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13};
    return to.value;
  }
};
typedef __half half;

__device__ __forceinline__ __half __float2half(float x) { return __half(x); }
__device__ __forceinline__ __half __float2half_rn(float x) { return __half(x); }
__device__ __forceinline__ float __half2float(__half x) { return static_cast<float>(x); }
__device__ __forceinline__ __half operator-(__half x) { return __half(-__half2float(x)); }
__device__ __forceinline__ __half __hfma(__half a, __half b, __half c) {
  return __half(__half2float(a) * __half2float(b) + __half2float(c));
}
#define STROBE_HALF(op, name)                                                 \
  __device__ __forceinline__ __half operator op(__half a, __half b) {         \
    return __half(__half2float(a) op __half2float(b));                        \
  }                                                                           \
  __device__ __forceinline__ __half& operator op## = (__half & a, __half b) { \
    return a = __half(__half2float(a) op __half2float(b));                    \
  }                                                                           \
  __device__ __forceinline__ __half name(__half a, __half b) { return a op b; }
STROBE_HALF(+, __hadd)
STROBE_HALF(-, __hsub)
STROBE_HALF(*, __hmul)
STROBE_HALF(/, __hdiv)
#undef STROBE_HALF
#define STROBE_HALF(op) \
  __device__ __forceinline__ bool operator op(__half a, __half b) { return __half2float(a) op __half2float(b); }
STROBE_HALF(<)
STROBE_HALF(>)
STROBE_HALF(<=)
STROBE_HALF(>=)
STROBE_HALF(==)
STROBE_HALF(!=)
#undef STROBE_HALF
