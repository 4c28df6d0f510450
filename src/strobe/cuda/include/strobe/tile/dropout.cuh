// Which entries dropout keeps. strobe/dropout.py is the definition, and says which queries and keys share a hash.
#pragma once
#include <strobe/ptx/math.cuh>

namespace strobe {

STROBE_DEVICE u32 mix(u32 x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}
STROBE_DEVICE u32 fold(u32 x, u32 by) {
  const u64 product = u64(x) * by;
  return u32(product) ^ u32(product >> 32);
}
// By which a cell is folded for 16 bits a key; for even and odd queries, and for the keys of its two octets.
constexpr STROBE_DEVICE u32 dropout_factor(bool odd, int octet) {
  return octet ? (odd ? 0xc2b2ae3du : 0xb5297a4du) : (odd ? 0xcd9e8d57u : 0x9e3779b1u);
}

// Two keys for a pair of queries. `head_key` is that of a sequence and a head.
struct DropoutRow {
  u32 a, b;
};
STROBE_DEVICE u32 dropout_head_key(u64 seed, int batch, int head) {
  const u32 key = mix(mix(u32(seed >> 32) ^ 0x9e3779b9u) ^ u32(seed));
  return mix(mix(key ^ u32(batch)) + u32(head));
}
STROBE_DEVICE DropoutRow dropout_row(u32 head_key, int query) {
  const u32 a = mix(head_key ^ u32(query) / 2);
  return DropoutRow{a, mix(a ^ 0x85ebca6bu)};
}
// The hash of the keys `key`, key + 1, key + 8 and key + 9: key is a multiple of 16 plus an even number below 8.
STROBE_DEVICE u32 dropout_cell(const DropoutRow& row, int key) { return fold(row.a + u32(key), 0xd2511f53u) ^ row.b; }

// dP - delta, where dropout scales those entries of dP that it keeps.
template <bool kDropout> STROBE_DEVICE float centred(float dp, float scale, float delta) {
  return kDropout ? fma(dp, scale, -delta) : dp - delta;
}

// What a thread with fragments of P asks: rows are queries `query` and query + 8, which have the same parity, columns
// are keys, two neighbours a register pair. `column` is the key of the thread's first column; `threshold` is an fp16
// number, twice.
template <bool kEnabled> struct Dropout {
  DropoutRow rows[2];
  u32 factors[2], threshold;

  template <class Params> STROBE_DEVICE Dropout(const Params& p, u32 head_key, int query)
      : Dropout(p, dropout_row(head_key, query), dropout_row(head_key, query + 8), query) {}
  template <class Params>
  STROBE_DEVICE Dropout(const Params& p, const DropoutRow& row, const DropoutRow& other, int query)
      : rows{row, other}, factors{dropout_factor(query % 2, 0), dropout_factor(query % 2, 1)},
        threshold(p.dropout_threshold) {}

  // Of the i-th pair of the fragment: the bits of the halves that are kept.
  STROBE_DEVICE u32 kept(int i, int column) const {
    return not_less_f16x2(fold(dropout_cell(rows[i & 1], column + 16 * (i >> 2)), factors[i >> 1 & 1]), threshold);
  }
  // P, rounded: weights that are dropped become 0.
  template <int N> STROBE_DEVICE void drop(u32 (&weights)[N], int column) const {
#pragma unroll
    for (int i = 0; i < N; ++i) weights[i] &= kept(i, column);
  }
  template <int N> STROBE_DEVICE void drop(float (&x)[N], int column) const {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const u32 keep = kept(i / 2, column);
      x[i] = keep & 1 ? x[i] : 0.f;
      x[i + 1] = keep >> 31 ? x[i + 1] : 0.f;
    }
  }
};
template <> struct Dropout<false> {
  template <class Params> STROBE_DEVICE Dropout(const Params&, u32, int) {}
  template <class Params> STROBE_DEVICE Dropout(const Params&, const DropoutRow&, const DropoutRow&, int) {}
  template <class X> STROBE_DEVICE void drop(X&, int) const {}
};

}  // namespace strobe
