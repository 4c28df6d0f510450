// Finds the blocks that a score's condition lets through: key blocks for a tile of queries or, transposed, query blocks
// for a tile of keys (pipeline/block_bits.cuh). Each block gets two bits: some pairs are visible; some are hidden.
//
// A thread block makes one word of either kind of bits for one tile; each of its 32 warps decides one block. Interval
// arithmetic decides most blocks, from the values that the condition reads for their rows and for their keys. Only the
// others are tested pair by pair.
#pragma once
#include <strobe/pipeline/scores.cuh>
#include <strobe/ptx/warp.cuh>
#include <strobe/tile/ranges.cuh>

namespace strobe {

// A block of queries and keys of one head, at least one of each.
template <class Config, class Condition> struct BlockOfPairs {
  using At = Where<false, Config::kPackGqa>;
  const Sequence& s;
  int head, row0, key0, rows, keys;

  STROBE_DEVICE At at(int row, int key) const {
    return where<Condition, Config>(s, s.positions, head, row0 + row, key0 + key);
  }
  // The range of f(at, i), which depends on the query alone, on the key alone, or on neither.
  template <class F> STROBE_DEVICE auto over_queries(F f) const {
    return ranges::over(rows, [&](int i) { return f(at(i, 0), 0); });
  }
  template <class F> STROBE_DEVICE auto over_keys(F f) const {
    return ranges::over(keys, [&](int i) { return f(at(0, i), 0); });
  }
  template <class F> STROBE_DEVICE auto of_all(F f) const { return ranges::point(f(at(0, 0), 0)); }
};

template <class Config, class Mask, class Condition, class Params> struct BlockMap {
  using Block = BlockOfPairs<Config, Condition>;
  const Params& p;

  // Bit 0: some pair of the block is visible; bit 1: some pair is hidden. A lane has the same keys in every row, so
  // values for keys are read once, and a value for a row serves all of the lane's keys.
  STROBE_DEVICE u32 look(const Condition& condition, const Block& block) const {
    u32 seen = 0;
#pragma unroll 1
    for (int r = 0; r < block.rows && seen != 3; ++r) {
      bool visible = false, hidden = false;
#pragma unroll
      for (int i = 0; i < Config::kBlockN; i += 32) {
        const int k = i + int(thread_idx() % 32);
        const bool found = condition.of_pair(block.at(r, k), 0);
        visible |= k < block.keys && found, hidden |= k < block.keys && !found;
      }
      seen |= (any(visible) ? 1 : 0) | (any(hidden) ? 2 : 0);
    }
    return seen;
  }
  STROBE_DEVICE u32 pairs_of(const Sequence& s, int head, int row0, int key0) const {
    const Condition condition = Condition::of(p);
    const int rows = min(Config::kBlockM, s.q.length - row0), keys = min(Config::kBlockN, s.k.length - key0);
    const Block block{s, head, row0, key0, rows, keys};
    const Range<bool> holds = condition.of_block(block);
    return holds.lo ? 1 : !holds.hi ? 2 : look(condition, block);
  }
  // Says whether the interval of the mask lets any pair of a block through.
  STROBE_DEVICE bool in_interval(const Sequence& s, int row0, int key0) const {
    if (row0 >= s.q.length) return false;
    const Mask mask = mask_of<Mask, Config>(p, s.q.length, s.k.length, s.positions);
    const int last = min(row0 + Config::kBlockM, s.q.length) - 1;
    return mask.lo(row0) < key0 + Config::kBlockN && mask.hi(last) > key0;
  }

  STROBE_DEVICE void run() const {
    const int index = block_idx(), rest = quotient(index, p.map_words), word = index - rest * p.map_words;
    const int slice = quotient(rest, p.map_tiles), tile = rest - slice * p.map_tiles;
    const int batch = p.map_heads ? quotient(slice, p.map_heads) : slice, head = slice - batch * max(p.map_heads, 1);
    const int warp = thread_idx() / 32, block = 32 * word + warp;
    Sequence s = sequence_of<Config>(p, batch);
    s.k.length = s.k.used;
    const int row0 = (Config::kTransposed ? block : tile) * Config::kBlockM,
              key0 = (Config::kTransposed ? tile : block) * Config::kBlockN;
    u32 seen = 0;
    if (in_interval(s, row0, key0))
      for (int i = 0; i < p.heads_in_one && seen != 3; ++i) seen |= pairs_of(s, head * p.heads_in_one + i, row0, key0);
    if (thread_idx() % 32 == 0) st_shared(smem_base() + 4 * warp, seen);
    sync_block();
    if (thread_idx() < 2) {
      u32 bits = 0;
      for (int i = 0; i < 32; ++i) bits |= (ld_shared(smem_base() + 4 * i) >> thread_idx() & 1) << i;
      u32* const to = p.block_map + batch * p.map_batch + head * p.map_head;
      st_global(to + (tile * 2 + thread_idx()) * p.map_words + word, bits);
    }
  }
};

template <class Config, class Mask, class Condition, class Params> STROBE_DEVICE void block_map(const Params& p) {
  BlockMap<Config, Mask, Condition, Params>{p}.run();
}

}  // namespace strobe
