// fp32 on tensor cores that take bf16: x = x0 + x1 + x2, each term what bf16 holds of the rest. Three terms have the 24
// bits of an fp32 number, and its range down to about 2^-109: the last term of a smaller number would be subnormal, and
// is 0. A product is the sum of six, those of terms i and j with i + j <= 2; each of the others is at most 2^-24 of the
// sum of the magnitudes |a b|.
//
// A wgmma rounds its sums towards zero, so every step that adds to a large D loses half a bit on average, always to the
// same side. That is why the terms of least weight come first, over all of K, and the product of the leading terms
// last; and why O and the gradients are no accumulators of a whole loop: each block of keys (or of queries) gives a
// fresh one, and FMAs, which round to nearest, add it up.
#pragma once
#include <strobe/ptx/math.cuh>
#include <strobe/tile/gemm_sm90.cuh>

namespace strobe {

constexpr int kTerms = 3, kTermProducts = 6;
// Product i is that of these two terms; small ones first.
constexpr STROBE_DEVICE int left_term(int i) { return i == 1 ? 2 : i == 2 || i == 4 ? 1 : 0; }
constexpr STROBE_DEVICE int right_term(int i) { return i == 0 ? 2 : i == 2 || i == 3 ? 1 : 0; }

// ---- in registers: the left operand of the next product, laid out as by `pack_fragment` -----------------------------

template <int N> struct Terms {
  u32 packed[kTerms][N];

  STROBE_DEVICE void split(const float (&x)[2 * N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float a = x[2 * i], b = x[2 * i + 1];
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        const u32 both = packed[term][i] = pack2<bf16>(a, b);
        a -= as_float(both << 16);
        b -= as_float(both & 0xffff0000u);
      }
    }
#pragma unroll
    for (int term = 0; term < kTerms; ++term) pin(packed[term]);
  }
};

// ---- in memory: a row has all columns of x0, then those of x1, then those of x2 -------------------------------------

// Eight numbers of a row. A finite number that bf16 would round to infinity is cut off instead. One that is not finite
// has NaN among its terms, and so have all sums that it is part of.
struct SplitChunk {
  u32 packed[kTerms][4];

  STROBE_DEVICE static float bf16_of(float x) { return to_float<bf16>(u16(pack2<bf16>(x, 0.f))); }
  STROBE_DEVICE static bool finite(float x) { return (as_bits(x) & 0x7f800000u) != 0x7f800000u; }
  STROBE_DEVICE static void split(float x, float (&term)[kTerms]) {
    const float rounded = bf16_of(x), truncated = as_float(as_bits(x) & 0xffff0000u);
    term[0] = finite(rounded) ? rounded : truncated;
    const float rest = x - term[0];
    term[1] = bf16_of(rest);
    term[2] = rest - term[1];
  }
  STROBE_DEVICE explicit SplitChunk(const float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float a[kTerms], b[kTerms];
      split(x[2 * i], a);
      split(x[2 * i + 1], b);
#pragma unroll
      for (int term = 0; term < kTerms; ++term) packed[term][i] = pack2<bf16>(a[term], b[term]);
    }
  }
};

// ---- products -------------------------------------------------------------------------------------------------------

// D = A B^T, 64 x kN: both in shared memory, K-major, in tiles of kRowsA and kRowsB rows, kK columns a term.
template <int kN, int kK, int kRowsA, int kRowsB> STROBE_DEVICE void gemm_terms(float (&d)[kN / 2], u64 a, u64 b) {
  using Product = Wgmma<bf16, kN>;
  constexpr u64 kTermA = tile_bytes<bf16>(kRowsA, kK) / 16, kTermB = tile_bytes<bf16>(kRowsB, kK) / 16;
  Product::template ss_zero<kK / kMmaK<bf16>, AlongK<kRowsA>, AlongK<kRowsB>>(d, a + left_term(0) * kTermA,
                                                                              b + right_term(0) * kTermB);
#pragma unroll
  for (int i = 1; i < kTermProducts; ++i)
    Product::template ss<kK / kMmaK<bf16>, AlongK<kRowsA>, AlongK<kRowsB>>(d, a + left_term(i) * kTermA,
                                                                           b + right_term(i) * kTermB);
}

// D = A B, 64 x kN: A in registers, B in a tile of kK rows, kN columns a term.
template <int kN, int kK> STROBE_DEVICE void gemm_terms_t(float (&d)[kN / 2], Terms<kK / 4>& a, u64 b) {
  using Product = Wgmma<bf16, kN>;
  constexpr u64 kTerm = tile_bytes<bf16>(kK, kN) / 16;
  Product::template rs_t_zero<kK / kMmaK<bf16>, DownRows>(d, a.packed[left_term(0)], b + right_term(0) * kTerm);
#pragma unroll
  for (int i = 1; i < kTermProducts; ++i)
    Product::template rs_t<kK / kMmaK<bf16>, DownRows>(d, a.packed[left_term(i)], b + right_term(i) * kTerm);
}

}  // namespace strobe
