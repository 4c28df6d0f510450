// Which entries dropout keeps. strobe/dropout.py is the definition, and says why a hash serves two queries and two
// keys.
#pragma once
#include <strobe/ptx/base.cuh>

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
constexpr u32 kFoldEven = 0x9e3779b1u, kFoldOdd = 0xcd9e8d57u;  // for even and odd queries

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
// Shared by the two queries and keys of a cell; `fold` it by kFoldEven or kFoldOdd for 16 bits a key.
STROBE_DEVICE u32 dropout_cell(const DropoutRow& row, int key) {
  return fold(row.a + u32(key) / 2, 0xd2511f53u) ^ row.b;
}

// P of a fragment: rows are queries `row` and row + 8, columns are keys, two neighbours a register pair. `column` is
// the key of the thread's first column, which is even. Weights that are dropped become 0; `threshold` is 16 bits, high.
template <int N>
STROBE_DEVICE void drop_fragment(float (&p)[N], const DropoutRow (&rows)[2], u32 by, int column, u32 threshold) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const u32 bits = fold(dropout_cell(rows[(i >> 1) & 1], column + 8 * (i >> 2)), by);
    if (bits << 16 < threshold) p[i] = 0.f;
    if (bits < threshold) p[i + 1] = 0.f;
  }
}

}  // namespace strobe
