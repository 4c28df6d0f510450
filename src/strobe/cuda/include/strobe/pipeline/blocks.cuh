// Blocks: which blocks of keys a tile of queries visits, which blocks of queries a tile of keys visits, in which order,
// and which of them need the mask. Kernels walk a range by `begin`, `has` and `next`.
#pragma once
#include <strobe/pipeline/block_bits.cuh>
#include <strobe/pipeline/rows.cuh>
#include <strobe/ptx/warp.cuh>

namespace strobe {

// ---- of keys, from the last to the first ----------------------------------------------------------------------------

// Blocks [first, end) are visible to some of the rows; those in [first_full, end_full) to all of them, and need no
// mask.
struct KeyBlocks {
  int first, end, first_full, end_full;

  STROBE_DEVICE bool any() const { return first < end; }
  STROBE_DEVICE int begin() const { return end - 1; }
  STROBE_DEVICE bool has(int n) const { return n >= first; }
  STROBE_DEVICE static int from(int n) { return n; }  // n, or the next visible block
  STROBE_DEVICE static int next(int n) { return n - 1; }
  STROBE_DEVICE bool has_next(int n) const { return n > first; }
  STROBE_DEVICE bool masked(int n) const { return n >= end_full || n < first_full; }
  STROBE_DEVICE static bool partial(int) { return true; }        // the score's condition must be evaluated
  STROBE_DEVICE int before(int n) const { return end - 1 - n; }  // how many blocks come before n
};
// The key blocks that a condition lets through.
struct SparseKeyBlocks : KeyBlocks {
  BlockBits bits;

  STROBE_DEVICE bool any() const { return has(begin()); }
  STROBE_DEVICE int begin() const { return from(end - 1); }
  STROBE_DEVICE int from(int n) const { return bits.down(n, first); }
  STROBE_DEVICE int next(int n) const { return from(n - 1); }
  STROBE_DEVICE bool has_next(int n) const { return has(next(n)); }
  STROBE_DEVICE bool partial(int n) const { return bits.partial(n); }
};
template <class Config> using KeyBlocksOf = Either<Config::kSparse, SparseKeyBlocks, KeyBlocks>;

// The ends of a mask's intervals never move left as queries grow, so the first and the last query suffice.
template <int kBlockN, class Mask>
STROBE_DEVICE KeyBlocks visible_blocks(const Mask& mask, int first_query, int last_query) {
  KeyBlocks b;
  b.first = mask.lo(first_query) / kBlockN;
  b.end = max(b.first, (mask.hi(last_query) + kBlockN - 1) / kBlockN);
  b.first_full = Mask::kHasLo ? min(max((mask.lo(last_query) + kBlockN - 1) / kBlockN, b.first), b.end) : 0;
  b.end_full = min(max(mask.hi(first_query) / kBlockN, b.first_full), b.end);
  return b;
}

// The blocks of `b` in [from, to).
STROBE_DEVICE KeyBlocks within(const KeyBlocks& b, int from, int to) {
  KeyBlocks r;
  r.first = min(max(b.first, from), to);
  r.end = max(min(b.end, to), r.first);
  r.first_full = min(max(b.first_full, r.first), r.end);
  r.end_full = min(max(b.end_full, r.first_full), r.end);
  return r;
}
// Split-KV: the blocks of `b`, which are those of one warpgroup, in one of `splits` equal splits of the tile's key
// blocks.
STROBE_DEVICE KeyBlocks blocks_of_split(const KeyBlocks& b, const KeyBlocks& tile, int split, int splits) {
  const int each = quotient(tile.end - tile.first + splits - 1, splits);
  const int from = min(tile.first + split * each, tile.end), to = min(from + each, tile.end);
  return within(b, from, to);
}

// The key blocks that some of `rows` rows of a tile see.
template <class Config, class Mask, class Tile>
STROBE_DEVICE KeyBlocks blocks_of_rows(const Mask& mask, const Tile& tile, int first_row, int rows) {
  const int last_row = min(first_row + rows, tile.q.length) - 1;
  return visible_blocks<Config::kBlockN>(mask, first_row / Config::kPackGqa, last_row / Config::kPackGqa);
}
// Returns the range in the tile's split; none if the rows lie beyond the sequence.
template <class Config, class Params, class Mask, class Tile>
STROBE_DEVICE KeyBlocks blocks_of_interval(const Params& p, const Mask& mask, const Tile& tile, int first_row,
                                           int rows) {
  if (first_row >= tile.q.length) return KeyBlocks{0, 0, 0, 0};
  const KeyBlocks seen = blocks_of_rows<Config>(mask, tile, first_row, rows);
  if (!Config::kSplit) return seen;
  if (Config::Keys::kPaged) return within(seen, tile.part.first, tile.part.end);
  return blocks_of_split(seen, blocks_of_rows<Config>(mask, tile, tile.row0, Config::kBlockM),
                         remainder(tile.work, p.splits), p.splits);
}
template <class Config, class Params, class Mask, class Tile>
STROBE_DEVICE KeyBlocksOf<Config> key_blocks(const Params& p, const Mask& mask, const Tile& tile, int first_row,
                                             int rows) {
  const KeyBlocks seen = blocks_of_interval<Config>(p, mask, tile, first_row, rows);
  if constexpr (Config::kSparse)
    return SparseKeyBlocks{seen, block_bits(p, tile.batch, tile.head, tile.row0 / Config::kBlockM)};
  else return seen;
}

// ---- of queries, from the first to the last -------------------------------------------------------------------------

// The first of `count` queries whose keys end after `key` (kBegin: begin after it); `count` if there is none. The ends
// of a mask's intervals never move left, so a search finds it: by bisection or, with kWarp, where all lanes of a warp
// search for the same query, with 32 probes at a time.
template <bool kBegin, bool kWarp, class Mask>
STROBE_DEVICE int first_query_behind(const Mask& mask, int key, int count) {
  int from = 0, to = count;
#pragma unroll 1
  while (from < to) {
    const int step = kWarp ? (to - from + 31) / 32 : 1, lane = thread_idx() % 32;
    const int probe = kWarp ? from + lane * step : (from + to) / 2;
    const bool behind = probe >= to || (kBegin ? mask.lo(probe) : mask.hi(probe)) > key;
    const int before = kWarp ? 32 - lanes_where(behind) : !behind;  // probes that are not `behind`
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
  if (key >= len_k) return QueryRange{1 << 30, 0};  // empty, whichever bound a caller reads
  return QueryRange{Mask::kHasHi ? first_query_behind<false, kWarp>(mask, key, len_q) : 0,
                    Mask::kHasLo ? first_query_behind<true, kWarp>(mask, key, len_q) : len_q};
}

// Blocks [first, end) see some of the keys; those in [first_full, end_full) see all of them, and need no mask. The
// blocks of all query heads of a group follow one another: after the last block comes the first block of the next head.
struct QueryBlocks {
  int first, end, first_full, end_full;

  STROBE_DEVICE bool any() const { return first < end; }
  STROBE_DEVICE int begin() const { return first; }
  STROBE_DEVICE int count() const { return end - first; }
  STROBE_DEVICE int next(int m) const { return m + 1 == end ? first : m + 1; }
  STROBE_DEVICE int previous(int m) const { return m == first ? end - 1 : m - 1; }
  STROBE_DEVICE bool masked(int m) const { return m < first_full || m >= end_full; }
  STROBE_DEVICE static bool partial(int) { return true; }
};
// The query blocks that a condition lets through.
struct SparseQueryBlocks : QueryBlocks {
  BlockBits bits;
  int visible;

  STROBE_DEVICE SparseQueryBlocks(const QueryBlocks& b, const BlockBits& bits)
      : QueryBlocks(b), bits(bits), visible(bits.count_of(first, end)) {}
  STROBE_DEVICE bool any() const { return visible > 0; }
  STROBE_DEVICE int begin() const { return bits.up(first, end); }
  STROBE_DEVICE int count() const { return visible; }
  STROBE_DEVICE int next(int m) const {
    const int behind = bits.up(m + 1, end);
    return behind < end ? behind : begin();
  }
  STROBE_DEVICE int previous(int m) const {
    const int before = bits.down(m - 1, first);
    return before >= first ? before : bits.down(end - 1, first);
  }
  STROBE_DEVICE bool partial(int m) const { return bits.partial(m); }
};
template <class Config> using QueryBlocksOf = Either<Config::kSparse, SparseQueryBlocks, QueryBlocks>;

// Calls visit(head, m) for every block of each head of a group, starting at block `begin`.
template <class Blocks, class Params, class Visit>
STROBE_DEVICE void for_each_query_block(const Blocks& blocks, const Params& p, int begin, int group, Visit visit) {
  int m = begin;
#pragma unroll 1
  for (int i = 0; i < p.group; ++i) {
#pragma unroll 1
    do {
      visit(group * p.group + i, m);
      m = blocks.next(m);
    } while (m != begin);
  }
}
template <int kBlockM, int kBlockN, class Mask>  // called by whole warps
STROBE_DEVICE QueryBlocks visible_query_blocks(const Mask& mask, int key0, int len_q, int len_k) {
  const QueryRange begin = queries_that_see<true>(mask, key0, len_q, len_k),
                   last = queries_that_see<true>(mask, min(key0 + kBlockN, len_k) - 1, len_q, len_k);
  QueryBlocks b;
  b.first = begin.first / kBlockM;
  b.end = begin.first < len_q ? max(b.first, (last.end + kBlockM - 1) / kBlockM) : b.first;
  b.first_full = min(max((last.first + kBlockM - 1) / kBlockM, b.first), b.end);
  b.end_full = Mask::kHasLo ? min(max(begin.end / kBlockM, b.first_full), b.end) : b.end;
  if (key0 + kBlockN > len_k) b.first_full = b.end_full = b.end;  // keys beyond the sequence are hidden, too
  return b;
}
template <class Config, class Params, class Mask, class Tile>
STROBE_DEVICE QueryBlocksOf<Config> query_blocks(const Params& p, const Mask& mask, const Tile& tile) {
  const QueryBlocks seen =
      visible_query_blocks<Config::kBlockM, Config::kBlockN>(mask, tile.key0, tile.q.length, tile.k.length);
  if constexpr (Config::kSparse)
    return SparseQueryBlocks(seen, block_bits(p, tile.batch, tile.head_k, tile.key0 / Config::kBlockN));
  else return seen;
}

}  // namespace strobe
