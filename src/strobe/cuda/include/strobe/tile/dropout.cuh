// Decides which entries dropout keeps. strobe/variants/dropout.py is the definition, and says which queries and keys
// share a hash.
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
// The hash's factor for even and for odd queries. `place`: 1 for the queries eight further, 2 for the keys eight
// further, 3 for both.
constexpr STROBE_DEVICE u32 dropout_factor(bool odd, int place) {
  return place & 2 ? (place & 1 ? (odd ? 0x165667b5u : 0xc2b2ae3fu) : (odd ? 0xcd9e8d57u : 0x1b56c4e9u))
                   : (place & 1 ? (odd ? 0x27d4eb21u : 0x68e31da3u) : (odd ? 0x85ebca6bu : 0xb5297a4du));
}

// 64 bits for four queries, one of which is `query`. `head_key` is that of a sequence and a head.
struct DropoutRow {
  u32 a, b;
};
STROBE_DEVICE u32 dropout_head_key(u64 seed, int batch, int head) {
  const u32 key = mix(mix(u32(seed >> 32) ^ 0x9e3779b9u) ^ u32(seed));
  return mix(mix(key ^ u32(batch)) + u32(head));
}
STROBE_DEVICE DropoutRow dropout_row(u32 head_key, int query) {
  const u32 a = mix(head_key ^ u32(query & ~9));
  return DropoutRow{a, mix(a ^ 0x85ebca6bu) | 0x80000001u};
}
// The hash of 16 entries: of the four queries with four keys, one of which is `key`. A factor makes 16 bits for each of
// two neighbouring keys of it, by one instruction.
struct DropoutCell {
  u32 by, plus;
  STROBE_DEVICE u32 bits(u32 factor) const { return by * factor + plus; }
};
STROBE_DEVICE DropoutCell dropout_cell(const DropoutRow& row, int key) {
  const u64 sum = u64(u32(key & ~9)) * row.b + (u64(row.b) << 32 | row.a);
  const u64 product = u64(u32(sum) ^ u32(sum >> 32)) * 0x9e3779b1u;
  return DropoutCell{u32(product), u32(product >> 32)};
}

// dP - delta, where dropout scales those entries of dP that it keeps.
template <bool kDropout> STROBE_DEVICE float centred(float dp, float scale, float delta) {
  return kDropout ? fma(dp, scale, -delta) : dp - delta;
}

// Dropout for a thread's fragments of P: rows are queries `query` and query + 8, columns are keys, two neighbours a
// register pair. `column` is the key of the thread's first column; `threshold` is an fp16 number, twice.
template <bool kEnabled> struct Dropout {
  DropoutRow row;
  u32 factors[4], threshold;

  template <class Params> STROBE_DEVICE Dropout(const Params& p, u32 head_key, int query)
      : Dropout(p, dropout_row(head_key, query), query) {}
  template <class Params> STROBE_DEVICE Dropout(const Params& p, const DropoutRow& row, int query)
      : row(row), threshold(p.dropout_threshold) {
#pragma unroll
    for (int place = 0; place < 4; ++place) factors[place] = dropout_factor(query % 2, place);
  }

  // Returns the mask of the halves that are kept of the i-th pair of the fragment. Four pairs share a cell.
  STROBE_DEVICE u32 kept(int i, int column) const {
    return not_less_f16x2(dropout_cell(row, column + 16 * (i >> 2)).bits(factors[i & 3]), threshold);
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
  template <class Params> STROBE_DEVICE Dropout(const Params&, const DropoutRow&, int) {}
  template <class X> STROBE_DEVICE void drop(X&, int) const {}
};

}  // namespace strobe
