// Which blocks a condition of a score lets through: for a tile of queries those of keys, or, transposed, for a tile of
// keys those of queries (pipeline/block_bits.cuh). Two bits for each: some pairs are visible; some are hidden.
//
// A thread block makes one word of one tile: each of its 32 warps looks at one block, until it has seen both kinds of
// pairs.
#pragma once
#include <strobe/pipeline/scores.cuh>
#include <strobe/ptx/warp.cuh>

namespace strobe {

template <class Config, class Mask, class Score, class Params> struct BlockMap {
  const Params& p;

  // Visible and hidden pairs of a head: bits 0 and 1. A lane has the same keys in every row, so that what a condition
  // reads for keys is read once, and what it reads for a row is shared by them.
  STROBE_DEVICE u32 look(const Sequence& s, int head, int row0, int key0, u32 seen) const {
    const Score score = Score::of(p);
    const int rows = min(Config::kBlockM, s.q.length - row0), keys = min(Config::kBlockN, s.k.length - key0);
#pragma unroll 1
    for (int r = 0; r < rows && seen != 3; ++r) {
      bool visible = false, hidden = false;
#pragma unroll
      for (int i = 0; i < Config::kBlockN; i += 32) {
        const int k = i + int(thread_idx() % 32);
        const bool found = score.visible(where<Score, Config>(s, s.positions, head, row0 + r, key0 + k), 0);
        visible |= k < keys && found, hidden |= k < keys && !found;
      }
      seen |= (any(visible) ? 1 : 0) | (any(hidden) ? 2 : 0);
    }
    return seen;
  }
  // Whether the interval of the mask lets any pair of a block through.
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
      for (int i = 0; i < p.heads_in_one; ++i) seen = look(s, head * p.heads_in_one + i, row0, key0, seen);
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

template <class Config, class Mask, class Score, class Params> STROBE_DEVICE void block_map(const Params& p) {
  BlockMap<Config, Mask, Score, Params>{p}.run();
}

}  // namespace strobe
