// The backward's tiles: which keys a block works on, and which blocks of queries see them.
#pragma once
#include <strobe/pipeline/schedule.cuh>

namespace strobe {

// Keys [key0, key0 + kBlockN) of one key head of one sequence. Rows and keys count from the start of the sequence.
// kGroupParts: the query heads of a group are divided among p.group_parts tiles, and each has dK and dV of its own.
// Then head_k counts parts, of p.group query heads each, and head_kv is whose K and V they see.
struct KeyTile {
  int key0, head_k, head_kv, batch;
  int slice;  // the batch index in the tensors: varlen sequences share one
  int len_q, len_k, first_row, first_key;
  Positions positions;

  // The tile's first row in a tensor that has a row for each key.
  template <class X> STROBE_DEVICE X* rows_of(X* tensor, i64 batch_stride, i64 head_stride, i64 row_stride) const {
    return tensor + slice * batch_stride + head_k * head_stride + i64(first_key + key0) * row_stride;
  }
};

// Some heads form a section, and the last section takes the rest; inside a section blocks of keys go in order: under a
// causal mask the first has the most queries. Config::kLastFirst turns the order around (see dq_turns.cuh).
template <class Config, class Params> STROBE_DEVICE KeyTile decode_key_tile(int index, const Params& p) {
  const int per_section = p.key_blocks * p.section, section = min(quotient(index, per_section), p.sections - 1),
            rest = index - section * per_section;
  const int head0 = section * p.section, width = section + 1 < p.sections ? p.section : p.batch * p.heads_k - head0;
  const int block = quotient(rest, width), bh = head0 + rest - block * width;
  KeyTile t;
  t.batch = quotient(bh, p.heads_k);
  t.head_k = t.head_kv = bh - t.batch * p.heads_k;
  if constexpr (Config::kGroupParts) t.head_kv = quotient(t.head_k, p.group_parts);
  t.key0 = (Config::kLastFirst ? p.key_blocks - 1 - block : block) * Config::kBlockN;
  t.len_q = p.len_q;
  t.len_k = p.len_k;
  t.first_row = t.first_key = 0;
  t.slice = Config::kVarlen ? 0 : t.batch;
  if (Config::kVarlen) {
    t.first_row = ld_global(p.cu_q + t.batch);
    t.first_key = ld_global(p.cu_k + t.batch);
    t.len_q = ld_global(p.cu_q + t.batch + 1) - t.first_row;
    t.len_k = ld_global(p.cu_k + t.batch + 1) - t.first_key;
  }
  t.positions = Positions{};
  if (Config::kPositions) {
    const int* at = p.positions + 4 * t.batch;
    t.positions = Positions{ld_global(at), ld_global(at + 1), ld_global(at + 2), ld_global(at + 3)};
  }
  return t;
}

// Once more: where it is seldom wanted, that costs less than registers.
template <class Config, class Params> STROBE_DEVICE KeyTile tile_again(const Params& p) {
  return decode_key_tile<Config>(opaque(int(block_idx())), p);
}

// Statistics of rows (LSE, delta) and sums of dQ have room for whole blocks of kStatBlock queries of each sequence:
// this is where those of a sequence and head begin.
template <class Config, class Params>
STROBE_DEVICE i64 first_stat(const Params& p, int head, int batch, int first_row) {
  constexpr int kRows = Config::kStatBlock;
  const int offset =
      Config::kVarlen ? quotient(first_row + batch * kRows, kRows) * kRows : batch * p.stat_blocks * kRows;
  return i64(head) * p.stat_rows + offset;
}

// The first of `count` queries whose keys end behind `key`, or begin behind it; `count` if there is none. The ends of a
// mask's intervals never move left, so it can be searched for: by halves, or, where all lanes of a warp ask for the
// same, 32 queries at a time.
template <bool kBegin, bool kWarp, class Mask>
STROBE_DEVICE int first_query_behind(const Mask& mask, int key, int count) {
  int from = 0, to = count;
#pragma unroll 1
  while (from < to) {
    const int step = kWarp ? (to - from + 31) / 32 : 1, lane = thread_idx() % 32;
    const int probe = kWarp ? from + lane * step : (from + to) / 2;
    const bool behind = probe >= to || (kBegin ? mask.lo(probe) : mask.hi(probe)) > key;
    const int before = kWarp ? 32 - lanes_where(behind) : !behind;  // probes that are not
    if (kWarp) to = min(to, from + before * step);
    else if (behind) to = probe;
    if (before) from = kWarp ? from + (before - 1) * step + 1 : probe + 1;
  }
  return from;
}

// Queries [first, end) see `key`.
struct QueryRange {
  int first, end;
};
template <bool kWarp = false, class Mask>
STROBE_DEVICE QueryRange queries_that_see(const Mask& mask, int key, int len_q, int len_k) {
  if (key >= len_k) return QueryRange{1 << 30, 0};  // either bound hides it
  return QueryRange{Mask::kHasHi ? first_query_behind<false, kWarp>(mask, key, len_q) : 0,
                    Mask::kHasLo ? first_query_behind<true, kWarp>(mask, key, len_q) : len_q};
}

// Query blocks [first, end) see some of the keys; those in [first_full, end_full) see all of them, and need no mask.
struct QueryBlocks {
  int first, end, first_full, end_full;
};
template <int kBlockM, int kBlockN, class Mask>  // whole warps ask
STROBE_DEVICE QueryBlocks visible_query_blocks(const Mask& mask, int key0, int len_q, int len_k) {
  const QueryRange begin = queries_that_see<true>(mask, key0, len_q, len_k),
                   last = queries_that_see<true>(mask, min(key0 + kBlockN, len_k) - 1, len_q, len_k);
  QueryBlocks b;
  b.first = begin.first / kBlockM;
  b.end = begin.first < len_q ? max(b.first, (last.end + kBlockM - 1) / kBlockM) : b.first;
  b.first_full = min(max((last.first + kBlockM - 1) / kBlockM, b.first), b.end);
  b.end_full = Mask::kHasLo ? min(max(begin.end / kBlockM, b.first_full), b.end) : b.end;
  if (key0 + kBlockN > len_k) b.first_full = b.end_full = b.end;  // keys that are not there are hidden, too
  return b;
}

}  // namespace strobe
