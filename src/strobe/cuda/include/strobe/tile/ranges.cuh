// Interval arithmetic: bounds the result of an operation, given bounds of its operands. So it can decide for a whole
// block, without testing each pair, that a condition holds or does not hold (kernels/block_map.cuh).
//
// Each operation has the name that cuda/parts/print_condition.py prints for it. An unknown range is `anything`.
#pragma once
#include <strobe/ptx/warp.cuh>
#include <strobe/tile/functions.cuh>

namespace strobe {

template <class T> struct Range {
  T lo, hi;

  STROBE_DEVICE Range(T lo, T hi) : lo(lo), hi(hi) {}
  template <class U> STROBE_DEVICE Range(const Range<U>& r) : lo(T(r.lo)), hi(T(r.hi)) {}  // of a narrower type
};

namespace ranges {

template <class T> constexpr bool kIsFloat = false;
template <> constexpr bool kIsFloat<float> = true;

template <class T> STROBE_DEVICE Range<T> anything() {
  if constexpr (kIsFloat<T>) return Range<T>(neg_inf(), -neg_inf());  // NaN, too
  else if constexpr (sizeof(T) == 1) return Range<T>(false, true);
  else {
    constexpr T kLeast = T(u64(1) << (8 * sizeof(T) - 1));
    return Range<T>(kLeast, ~kLeast);
  }
}
// Says whether both ends are below 2^bits in magnitude; for floats, whether they are far from overflow: a range with an
// infinite end counts as anything.
template <class T> STROBE_DEVICE bool moderate(const Range<T>& r, int bits) {
  if constexpr (kIsFloat<T>) return fabs(r.lo) < 1e37f && fabs(r.hi) < 1e37f;
  else return r.lo > -(i64(1) << bits) && r.hi < i64(1) << bits;
}
template <class T> STROBE_DEVICE Range<T> hull(const Range<T>& a, const Range<T>& b) {
  return Range<T>(minimum(a.lo, b.lo), maximum(a.hi, b.hi));
}
template <class T> STROBE_DEVICE Range<T> point(T x) {
  const Range<T> r(x, x);
  if constexpr (kIsFloat<T>) return moderate(r, 0) ? r : anything<T>();
  else return r;
}

// The range of a result. Integers that overflow wrap around, so they may be anything. Floats are rounded once or twice,
// depending on what the compiler fuses, so their range gets some slack.
template <class T> STROBE_DEVICE Range<T> result(i64 lo, i64 hi) {
  const Range<T> all = anything<T>();
  return lo < all.lo || hi > all.hi ? all : Range<T>(T(lo), T(hi));
}
STROBE_DEVICE Range<float> result(float lo, float hi) {
  constexpr float kShare = 1.f / (1 << 20), kLeast = 1e-36f;
  if (!(fabs(lo) < 1e37f && fabs(hi) < 1e37f)) return anything<float>();
  return Range<float>(lo - fabs(lo) * kShare - kLeast, hi + fabs(hi) * kShare + kLeast);
}

template <class T> STROBE_DEVICE Range<T> add(const Range<T>& a, const Range<T>& b) {
  if (!moderate(a, 62) || !moderate(b, 62)) return anything<T>();
  if constexpr (kIsFloat<T>) return result(a.lo + b.lo, a.hi + b.hi);
  else return result<T>(i64(a.lo) + b.lo, i64(a.hi) + b.hi);
}
template <class T> STROBE_DEVICE Range<T> subtract(const Range<T>& a, const Range<T>& b) {
  if (!moderate(a, 62) || !moderate(b, 62)) return anything<T>();
  if constexpr (kIsFloat<T>) return result(a.lo - b.hi, a.hi - b.lo);
  else return result<T>(i64(a.lo) - b.hi, i64(a.hi) - b.lo);
}

// The least and the largest value at the corners: the extremes of a function that is monotonic in each operand lie
// there.
template <class T, class U, class F> STROBE_DEVICE Range<T> at_corners(const Range<U>& a, const Range<U>& b, F f) {
  const auto w = f(a.lo, b.lo), x = f(a.lo, b.hi), y = f(a.hi, b.lo), z = f(a.hi, b.hi);
  const auto lo = minimum(minimum(w, x), minimum(y, z)), hi = maximum(maximum(w, x), maximum(y, z));
  if constexpr (kIsFloat<T>) return result(lo, hi);
  else return result<T>(lo, hi);
}
template <class T> STROBE_DEVICE Range<T> multiply(const Range<T>& a, const Range<T>& b) {
  if (!moderate(a, 31) || !moderate(b, 31)) return anything<T>();
  if constexpr (kIsFloat<T>) return at_corners<T>(a, b, [](float x, float y) { return x * y; });
  else return at_corners<T>(a, b, [](i64 x, i64 y) { return x * y; });
}
template <class T> STROBE_DEVICE bool has_zero(const Range<T>& r) { return r.lo <= 0 && r.hi >= 0; }
STROBE_DEVICE Range<float> divide(const Range<float>& a, const Range<float>& b) {
  if (!moderate(a, 0) || !moderate(b, 0) || has_zero(b)) return anything<float>();
  return at_corners<float>(a, b, [](float x, float y) { return x / y; });
}
template <class T> STROBE_DEVICE Range<T> floor_divide(const Range<T>& a, const Range<T>& b) {
  if (!moderate(a, 62) || !moderate(b, 62) || has_zero(b)) return anything<T>();
  return at_corners<T>(a, b, [](i64 x, i64 y) { return floor_div(x, y); });
}
template <class T> STROBE_DEVICE Range<T> modulo(const Range<T>& a, const Range<T>& b) {
  if (!moderate(a, 62) || !moderate(b, 62) || has_zero(b)) return anything<T>();
  const i64 n = b.lo, turns = floor_div(i64(a.lo), n);
  if (b.lo == b.hi && turns == floor_div(i64(a.hi), n)) {
    const i64 x = a.lo - turns * n, y = a.hi - turns * n;
    return Range<T>(T(x), T(y));
  }
  return b.lo > 0 ? Range<T>(0, b.hi - 1) : Range<T>(b.lo + 1, 0);
}
template <class T> STROBE_DEVICE Range<T> magnitude(const Range<T>& a) {
  if (!moderate(a, 62)) return anything<T>();
  if (a.lo >= 0) return a;
  if constexpr (kIsFloat<T>) return a.hi <= 0 ? Range<T>(-a.hi, -a.lo) : Range<T>(0.f, maximum(-a.lo, a.hi));
  else {
    const i64 lo = -i64(a.lo), hi = a.hi;
    return a.hi <= 0 ? result<T>(-hi, lo) : result<T>(0, maximum(lo, hi));
  }
}
template <class T> STROBE_DEVICE Range<T> least(const Range<T>& a, const Range<T>& b) {
  if (kIsFloat<T> && (!moderate(a, 0) || !moderate(b, 0))) return anything<T>();
  return Range<T>(minimum(a.lo, b.lo), minimum(a.hi, b.hi));
}
template <class T> STROBE_DEVICE Range<T> greatest(const Range<T>& a, const Range<T>& b) {
  if (kIsFloat<T> && (!moderate(a, 0) || !moderate(b, 0))) return anything<T>();
  return Range<T>(maximum(a.lo, b.lo), maximum(a.hi, b.hi));
}
// The range of a function that never falls.
template <class F> STROBE_DEVICE Range<float> rising(F f, const Range<float>& a) {
  return Range<float>(f(a.lo), f(a.hi));
}
template <class T, class U> STROBE_DEVICE Range<T> convert(const Range<U>& a) {
  if constexpr (kIsFloat<U> && !kIsFloat<T>) {
    const float most = sizeof(T) == 8 ? 4e18f : 2e9f;
    return a.lo > -most && a.hi < most ? Range<T>(T(a.lo), T(a.hi)) : anything<T>();
  } else if constexpr (!kIsFloat<T> && sizeof(T) < sizeof(U)) return result<T>(a.lo, a.hi);
  else return Range<T>(a);
}

// ---- conditions: whether they surely hold, and whether they may -----------------------------------------------------

template <class T> STROBE_DEVICE Range<bool> less(const Range<T>& a, const Range<T>& b) {
  return Range<bool>(a.hi < b.lo, a.lo < b.hi);
}
template <class T> STROBE_DEVICE Range<bool> less_equal(const Range<T>& a, const Range<T>& b) {
  return Range<bool>(a.hi <= b.lo, a.lo <= b.hi);
}
template <class T> STROBE_DEVICE Range<bool> equal(const Range<T>& a, const Range<T>& b) {
  return Range<bool>(a.lo == a.hi && b.lo == b.hi && a.lo == b.lo, a.lo <= b.hi && b.lo <= a.hi);
}
STROBE_DEVICE Range<bool> negate(const Range<bool>& a) { return Range<bool>(!a.hi, !a.lo); }
STROBE_DEVICE Range<bool> both(const Range<bool>& a, const Range<bool>& b) {
  return Range<bool>(a.lo && b.lo, a.hi && b.hi);
}
STROBE_DEVICE Range<bool> either(const Range<bool>& a, const Range<bool>& b) {
  return Range<bool>(a.lo || b.lo, a.hi || b.hi);
}
template <class T> STROBE_DEVICE Range<T> select(const Range<bool>& c, const Range<T>& a, const Range<T>& b) {
  return c.lo ? a : !c.hi ? b : hull(a, b);
}

// ---- ranges of individual values ------------------------------------------------------------------------------------

template <class T> STROBE_DEVICE T of_lane(T x, int lane) {
  if constexpr (sizeof(T) == 8) {
    const u32 low = shfl(u32(u64(x)), lane), high = shfl(u32(u64(x) >> 32), lane);
    return T(u64(high) << 32 | low);
  } else if constexpr (kIsFloat<T>) return as_float(shfl(as_bits(x), lane));
  else return T(shfl(u32(x), lane));
}
// The range of f(0) to f(count - 1), which the lanes of a warp compute together.
template <class F> STROBE_DEVICE auto over(int count, F f) {
  const int lane = thread_idx() % 32;
  auto found = point(f(min(lane, count - 1)));
#pragma unroll 1
  for (int i = lane + 32; i < count; i += 32) found = hull(found, point(f(i)));
#pragma unroll
  for (int step = 16; step; step /= 2) {
    const decltype(found) other(of_lane(found.lo, lane ^ step), of_lane(found.hi, lane ^ step));
    found = hull(found, other);
  }
  return found;
}

}  // namespace ranges
}  // namespace strobe
