// The online softmax on a fragment of scores.
//
// A warp holds 16 rows of N scores as the matrix units leave them: thread `lane` has rows g = lane/4 and g + 8, and
// register i of its N/2 is row g + 8 * ((i >> 1) & 1), column 8 * (i >> 2) + 2 * (lane % 4) + (i & 1). Four
// neighbouring lanes share a row.
#pragma once
#include <strobe/ptx/math.cuh>
#include <strobe/ptx/memory.cuh>
#include <strobe/ptx/warp.cuh>

namespace strobe {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
STROBE_DEVICE float neg_inf() { return as_float(0xff800000u); }

STROBE_DEVICE float quad_max(float x) {
  x = fmax(x, shfl_xor(x, 1));
  return fmax(x, shfl_xor(x, 2));
}
STROBE_DEVICE float quad_sum(float x) {
  x += shfl_xor(x, 1);
  return x + shfl_xor(x, 2);
}

constexpr STROBE_DEVICE int fragment_row(int i) { return (i >> 1) & 1; }  // which of the thread's two rows
constexpr STROBE_DEVICE int fragment_column(int i) {
  return 8 * (i >> 2) + (i & 1);
}  // from the thread's first column, 2 * (lane % 4)

// Scores outside [lo, hi) become -inf; both are counted from the thread's first column, one pair per row.
template <bool kHasLo, int N> STROBE_DEVICE void mask_fragment(float (&s)[N], const int (&lo)[2], const int (&hi)[2]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int row = fragment_row(i), column = fragment_column(i);
    if (column >= hi[row] || (kHasLo && column < lo[row])) s[i] = neg_inf();
  }
}

// tanh(x) = 1 - 2 / (1 + exp(2x)) is off by an ulp of 1, however small x is: near 0 its series takes over.
STROBE_DEVICE float tanh_fast(float x) {
  const float x2 = x * x, series = fma(x * x2, fma(x2, fma(x2, -17.f / 315, 2.f / 15), -1.f / 3), x);
  return x2 < 1.f / 16 ? series : fma(-2.f, rcp_approx(1.f + exp2_approx(x * (2.f * kLog2e))), 1.f);
}

// tanh where |x| is at most kTanhNear, by FMAs alone: beside an exponential for each score the special-function unit
// has no time for two more. Off by 2e-7 at most. tanh(x * scale): the powers of `scale` join the coefficients.
constexpr float kTanhNear = 0.25f;
STROBE_DEVICE float tanh_near(float x, float scale) {
  const float x2 = x * x, cube = scale * scale * scale;
  return x * fma(x2, fma(x2, 0.12879714f * (cube * scale * scale), -0.33324748f * cube), scale);
}

// The factor that normalises a row of O, and the row's LSE (natural log), from the sum of its weights and its maximum,
// `top`, in log2 units. A sink is one more logit in the sum. Rows that saw nothing give 0 and -inf; NaN gives NaN.
// kFixed: products are rounded before something is added to them, where compilers may choose an FMA in one place and
// not in another one; then two pieces of code give the same bits.
template <bool kHasSink, bool kFixed = false>
STROBE_DEVICE float normaliser(float sum, float top, float sink, float& lse) {
  float keep = 1.f;
  if (kHasSink) {
    // The higher of the two has weight 1: an infinite one must not be subtracted from itself.
    const float t = kFixed ? mul_rn(sink, kLog2e) : sink * kLog2e, higher = fmax(top, t);
    keep = top == higher ? 1.f : exp2_approx(top - higher);  // 0 if the row saw nothing
    sum = (kFixed ? mul_rn(sum, keep) : sum * keep) + (t == higher ? 1.f : exp2_approx(t - higher));
    top = higher;
  }
  lse = sum == 0.f ? neg_inf() : (top + log2_approx(sum)) * kLn2;
  return sum == 0.f ? 0.f : keep / sum;
}

// P as the left operand of the next product: the layout already fits, two neighbours make one register. Keys without a
// score have weight 0.
template <class T, int M, int N> STROBE_DEVICE void pack_fragment(u32 (&p)[M], const float (&s)[N]) {
#pragma unroll
  for (int i = 0; i < M; ++i) p[i] = i < N / 2 ? pack2<T>(s[2 * i % N], s[(2 * i + 1) % N]) : 0u;
}

// A weight, exp2(s * scale - m * scale), costs one FMA and one EX2, and has the error of rounding m * scale. Up to this
// size that is less than the rounding of a weight to 16 bits. Beyond it, m is subtracted from the scores first.
constexpr float kLargestShift = 16384.f;

// Row statistics of the thread's two rows: m, the largest score so far, and l, the thread's share of sum(exp(s - m)).
//
// kLazyRescale: m stays where it is until it would grow by more than 8 in log2 units, and O is rescaled only then. p
// stays below 2^8, which fp32 sums and 16-bit weights bear, but the largest weight is no longer exactly 1.
template <bool kLazyRescale = false> struct Softmax {
  float m[2], l[2];
  float alpha[2];  // the factor by which the last `maxima` rescaled l; O needs it, too
  float shift[2];  // -m * scale, or 0 if m has been subtracted from the scores
  float scale;     // scores are in units of 1 / (scale * ln 2), so that exp(s) is exp2(s * scale): one FMA and one EX2
  bool grew;       // some row has to rescale O: of this thread, or with kLazyRescale of this warp

  STROBE_DEVICE void reset(float scale_log2) {
    m[0] = m[1] = neg_inf();
    l[0] = l[1] = 0.f;
    scale = scale_log2;
  }

  // The statistics can rest in shared memory between two blocks of keys, 16 bytes a thread.
  STROBE_DEVICE void save(u32 address) const {
    st_shared(address, u32x4{as_bits(m[0]), as_bits(m[1]), as_bits(l[0]), as_bits(l[1])});
  }
  STROBE_DEVICE void load(u32 address, float scale_log2) {
    const u32x4 x = ld_shared_x4(address);
    m[0] = as_float(x.x), m[1] = as_float(x.y), l[0] = as_float(x.z), l[1] = as_float(x.w);
    scale = scale_log2;
  }

  // The new maxima; what was summed before is rescaled to them. kMaybeEmpty: rows may not have seen any key yet, and
  // exp(-inf - -inf) must not become NaN. Large maxima are subtracted from `s`: in all rows of a warp where one has
  // such a maximum or, with kByRow, in that one alone, so that no row's bits depend on its neighbours. `keeps`: a bit
  // for each row whose maximum stays where it is.
  template <bool kMaybeEmpty, bool kByRow = false, int N> STROBE_DEVICE void maxima(float (&s)[N], u32 keeps = 0) {
    grew = false;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float chain[4];  // independent maxima: few warps share a scheduler, so latency shows
#pragma unroll
      for (int i = 0; i < N; i += 8)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float x = s[i + 2 * row + (j & 1) + 4 * (j >> 1)];
          chain[j] = i == 0 ? x : fmax(chain[j], x);
        }
      float now = fmax(m[row], quad_max(fmax(fmax(chain[0], chain[1]), fmax(chain[2], chain[3]))));
      if (kLazyRescale && !kMaybeEmpty) {
        const bool far = (now - m[row]) * scale > 8.f;
        now = far ? now : m[row];
        grew |= far;
      }
      if (kByRow && (keeps >> row & 1)) now = m[row];
      const float safe = kMaybeEmpty && now == neg_inf() ? 0.f : now;
      alpha[row] = exp2_approx((m[row] - safe) * scale);
      m[row] = now;
      shift[row] = -safe * scale;
      l[row] = kByRow ? mul_rn(l[row], alpha[row]) : l[row] * alpha[row];
    }
    const bool large = fmax(fabs(shift[0]), fabs(shift[1])) > kLargestShift;
    if (kLazyRescale && !kMaybeEmpty) {  // one vote for both
      grew = any(grew | large);
      if (grew && any(large)) subtract(s);
    } else if (any(large)) subtract<kByRow>(s);
  }
  template <bool kByRow = false, int N> STROBE_DEVICE void subtract(float (&s)[N]) {
    const auto is_meant = [&](int row) { return !kByRow || fabs(shift[row]) > kLargestShift; };
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float from = m[fragment_row(i)];
      s[i] -= from == neg_inf() || !is_meant(fragment_row(i)) ? 0.f : from;
    }
#pragma unroll
    for (int row = 0; row < 2; ++row)
      if (is_meant(row)) shift[row] = 0.f;
  }

  // Scores From to To of the fragment become weights, p = exp(s - m), and are added to the sums.
  template <int From, int To, int N> STROBE_DEVICE void weights(float (&s)[N]) {
    float sum[2][2] = {{0.f, 0.f}, {0.f, 0.f}};
#pragma unroll
    for (int i = From; i < To; ++i) {
      const int row = fragment_row(i);
      s[i] = exp2_approx(fma(s[i], scale, shift[row]));
      sum[row][i & 1] += s[i];
    }
    l[0] += sum[0][0] + sum[0][1];
    l[1] += sum[1][0] + sum[1][1];
  }

  // S -> P: both steps, and P rounded. `alpha` is what O has to be multiplied by.
  template <class T, int M, int N> STROBE_DEVICE void to_weights(u32 (&p)[M], float (&s)[N]) {
    maxima<true>(s);
    weights<0, N>(s);
    pack_fragment<T>(p, s);
  }

  // Takes the same kMaybeEmpty as `maxima`, which then always moves the maximum.
  template <bool kMaybeEmpty = false, int N> STROBE_DEVICE void rescale(float (&o)[N]) const {
    if (kLazyRescale && !kMaybeEmpty && !grew) return;
#pragma unroll
    for (int i = 0; i < N; ++i) o[i] *= alpha[fragment_row(i)];
  }

  // Called after the last key; see `normaliser`.
  template <bool kHasSink, bool kFixed = false> STROBE_DEVICE float finish(int row, float sink, float& lse) const {
    const float top = kFixed ? mul_rn(m[row], scale) : m[row] * scale;
    return normaliser<kHasSink, kFixed>(quad_sum(l[row]), top, sink, lse);
  }
};

// The softmax of a block under a speculative row maximum, that of the blocks before it: the exponentials need not wait
// for a new one. It is right unless some score is far above it, which the sums tell: none, hence no weight, may exceed
// 2^8. The scores stay as they are, for the fallback to `Softmax`. kByRow: each row decides for itself, so that its
// bits do not depend on its neighbours, and a block in which it sees nothing changes none of them.
template <class T, int N, bool kByRow = false> struct SpeculativeSoftmax {
  static constexpr float kLargestSum = 256.f;
  float scale, shift[2];  // inf for a row that has seen nothing yet, and for a large maximum: sums are then rejected
  float sum[2] = {0.f, 0.f};
  u32 packed[N / 2];

  STROBE_DEVICE SpeculativeSoftmax(const Softmax<>& past)
      : scale(past.scale), shift{usable(-past.m[0] * past.scale), usable(-past.m[1] * past.scale)} {}
  STROBE_DEVICE static float usable(float x) { return fabs(x) > kLargestShift ? -neg_inf() : x; }

  template <int From, int To> STROBE_DEVICE void weights(const float (&s)[N]) {
    if constexpr (From < To) {
      float even[2] = {0.f, 0.f}, odd[2] = {0.f, 0.f};
#pragma unroll
      for (int i = From; i < To; i += 2) {
        const int row = fragment_row(i);
        const float a = exp2_approx(fma(s[i], scale, shift[row])), b = exp2_approx(fma(s[i + 1], scale, shift[row]));
        even[row] += a;
        odd[row] += b;
        packed[i / 2] = pack2<T>(a, b);
      }
      sum[0] += even[0] + odd[0];
      sum[1] += even[1] + odd[1];
    }
  }

  STROBE_DEVICE float sums(const Softmax<>& past) const { return past.l[0] + sum[0] + sum[1]; }

  // Takes over the sums and weights if the maximum is right for every row of the warp; else they are computed again,
  // and O has to be rescaled. NaN does not pass.
  STROBE_DEVICE bool accept(Softmax<>& past, u32 (&weights)[N / 2], float (&s)[N]) const {
    if (any(!(sum[0] <= kLargestSum && sum[1] <= kLargestSum))) {
      if constexpr (kByRow) compute_again(past, weights, s);
      else past.template to_weights<T>(weights, s);
      return false;
    }
    past.l[0] += sum[0];
    past.l[1] += sum[1];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) weights[i] = packed[i];
    return true;
  }

 private:
  // Rows that all four lanes accept keep their maximum, so their weights come out as they were.
  STROBE_DEVICE void compute_again(Softmax<>& past, u32 (&weights)[N / 2], float (&s)[N]) const {
    const float l[2] = {past.l[0] + sum[0], past.l[1] + sum[1]};
    u32 keeps = 0;
#pragma unroll
    for (int row = 0; row < 2; ++row) keeps |= u32(quad_max(sum[row] <= kLargestSum ? 0.f : 1.f) == 0.f) << row;
    past.template maxima<true, true>(s, keeps);
    past.template weights<0, N>(s);
    pack_fragment<T>(weights, s);
#pragma unroll
    for (int row = 0; row < 2; ++row)
      if (keeps >> row & 1) past.l[row] = l[row];
  }
};

}  // namespace strobe
