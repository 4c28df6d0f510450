// The operations of users' score functions, besides C++'s operators. Integer division rounds down, as in Python.
#pragma once
#include <strobe/tile/softmax.cuh>

namespace strobe {

// Clamps an index to [0, length).
template <class T> STROBE_DEVICE i64 within(T i, i64 length) {
  return i < 0 ? 0 : i64(i) < length ? i64(i) : length - 1;
}

template <class T> STROBE_DEVICE T floor_div(T a, T b) {
  if (b == 0) return 0;
  return a / b - T(a % b != 0 && (a < 0) != (b < 0));
}
template <class T> STROBE_DEVICE T floor_mod(T a, T b) { return a - floor_div(a, b) * b; }
template <class T> STROBE_DEVICE T minimum(T a, T b) { return b < a ? b : a; }
template <class T> STROBE_DEVICE T maximum(T a, T b) { return b > a ? b : a; }
template <class T> STROBE_DEVICE T absolute(T x) { return x < 0 ? -x : x; }

// Exact quotients are exact, so that round_down(divide(6, 3)) is 2; others are off by one bit at most. C++'s division
// has a path for numbers near the ends of the range, with which ptxas takes a minute for the 64 scores of a thread.
STROBE_DEVICE float divide(float a, float b) {
  const float r = rcp_approx(b), y = a * r, better = fma(fma(-y, b, a), r, y);
  return better == better ? better : y;  // y where numbers are 0 or infinite
}
// Whole turns are taken off in two steps, as exactly as FMAs do it, so that sines are off by 1e-6 at most up to some
// ten thousand turns. CUDA's own have a path for larger numbers, which is as long.
STROBE_DEVICE float within_half_a_turn(float x) {
  const float turns = round_to_even(x * 0.15915494f);
  return fma(turns, 1.7484556e-7f, fma(turns, -6.2831855f, x));
}
STROBE_DEVICE float sine(float x) { return sin_approx(within_half_a_turn(x)); }
STROBE_DEVICE float cosine(float x) { return cos_approx(within_half_a_turn(x)); }
STROBE_DEVICE float exp_fast(float x) { return exp2_approx(x * kLog2e); }
STROBE_DEVICE float log_fast(float x) { return log2_approx(x) * kLn2; }
STROBE_DEVICE float sigmoid_fast(float x) { return rcp_approx(1.f + exp2_approx(-x * kLog2e)); }
// 0 to the power of 0 is 1, though its logarithm times 0 is not a number.
STROBE_DEVICE float pow_fast(float a, float b) { return b == 0.f ? 1.f : exp2_approx(b * log2_approx(a)); }

}  // namespace strobe
