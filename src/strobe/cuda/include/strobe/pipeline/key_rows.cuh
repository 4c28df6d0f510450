// Fragments of S^T and dP^T: rows are keys, columns are queries. What a thread knows of its two keys.
#pragma once
#include <strobe/pipeline/query_blocks.cuh>
#include <strobe/tile/dropout.cuh>
#include <strobe/tile/softmax.cuh>

namespace strobe {

constexpr u32 kKeyRowsBytes = 64 * 8;  // of a warpgroup

// The queries that see each key are in shared memory: registers are scarce, and only blocks on the edge of a mask ask.
template <class Mask, int kBlockM> struct KeyRows {
  static constexpr bool kHasEnd = Mask::kHasLo || !Mask::kHasHi;  // a key that is not there is hidden by either bound
  int key,
      column;  // the thread's first key, counted in the sequence, and another 8 further; its first query of a block
  u32 ranges;

  // `first_key`: of the warpgroup's 64, whose kKeyRowsBytes lie at `memory`.
  STROBE_DEVICE KeyRows(const Mask& mask, int first_key, int len_q, int len_k, u32 memory)
      : column(2 * (thread_idx() % 4)) {
    const int row = thread_idx() % 128 / 32 * 16 + thread_idx() % 32 / 4;
    key = first_key + row;
    ranges = memory + 8 * row;
    if (column == 0) {
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        const QueryRange r = queries_that_see(mask, key + 8 * i, len_q, len_k);
        st_shared(ranges + 64 * i, u32x2{u32(r.first), u32(r.end)});
      }
    }
    sync_warp();  // a warp reads its own rows
  }

  // For who asks for no mask.
  STROBE_DEVICE explicit KeyRows(int first_key)
      : key(first_key + thread_idx() % 128 / 32 * 16 + thread_idx() % 32 / 4), column(2 * (thread_idx() % 4)),
        ranges(0) {}

  // The mask of a fragment with the queries of block m: a key is seen by columns [lo, hi), from the thread's first on.
  struct Bounds {
    int lo[2], hi[2];
    STROBE_DEVICE bool hides(int i) const {
      const int row = fragment_row(i), column = fragment_column(i);
      return (Mask::kHasHi && column < lo[row]) || (kHasEnd && column >= hi[row]);
    }
  };
  STROBE_DEVICE Bounds bounds(int m) const {
    const int first = m * kBlockM + column;
    Bounds b;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      b.lo[i] = int(ld_shared(ranges + 64 * i)) - first;
      b.hi[i] = int(ld_shared(ranges + 64 * i + 4)) - first;
    }
    return b;
  }

  // Which of the fragment's entries i to i + 3 dropout keeps: two neighbouring queries, whose row keys lie at
  // `row_keys`, times two keys. (The next four have the same cell: to keep it would take registers that are not there.)
  STROBE_DEVICE void kept(bool (&keep)[4], u32 row_keys, int i, u32 threshold) const {
    float a, b;
    ld_shared_x2(row_keys, a, b);
    const DropoutCell cell = dropout_cell(DropoutRow{as_bits(a), as_bits(b)}, key);
    const u32 halves = key % 2 ? 0x7632 : 0x5410;  // those of the key, of two words
#pragma unroll
    for (int octet = 0; octet < 2; ++octet) {
      const int place = 2 * octet + i / 4 % 2;
      const u32 even = cell.bits(dropout_factor(false, place)), odd = cell.bits(dropout_factor(true, place));
      not_less_f16x2(keep[2 * octet], keep[2 * octet + 1], bytes_of(even, odd, halves), threshold);
    }
  }
};

}  // namespace strobe
