// Plans the work of paged calls: a list of items in device memory, so that lengths are never read back.
//
// A tile is kBlockM rows of one head of one sequence; its length is the key blocks that they see, at least one. All
// tiles, heads outermost, form a line, which is cut into equal pieces, one for each block of the kernel that follows.
// The list has a record for each piece and for each item (pipeline/schedule.cuh).
// An item is what a piece has of a tile. Piece c leaves the result of its first item in slot 2 c and that of its last
// one in slot 2 c + 1, since it cuts no others. Tile t in piece c is item t + c: along the line one of the two grows.
//
// For invariant kernels (kSplitBlocks > 0) every tile is cut into splits, at keys that depend on nothing but their
// positions. Items are the splits of all tiles along the line, slot i is that of item i, and pieces begin with the
// split that begins nearest to where they should. Behind the items lie counters, four for each item.
//
// A plan fills its lists for the lengths of each step, also those that the step's calls do not read, whose room is
// for other lengths: an item for which there is no room is left out.
//
// One thread block a head; each adds up all sequences, of which a thread has neighbours.
#pragma once
#include <strobe/pipeline/blocks.cuh>
#include <strobe/pipeline/schedule.cuh>

namespace strobe {

// Splits of kUnit blocks of keys, twice kForEachDoubling of them, then kForEachDoubling for each time that the keys
// double: their number grows as a logarithm, and none has more than a sixteenth of the keys before it.
// cuda/plans/plan_work.py has the same rule.
template <int kUnit> struct FixedSplits {
  static constexpr int kBits = 4, kForEachDoubling = 1 << kBits;
  STROBE_DEVICE static int of(int block) {
    const int unit = max(0, block) / kUnit, doublings = max(0, highest_bit(unit | 1) - kBits);
    return doublings * kForEachDoubling + (unit >> doublings);
  }
  STROBE_DEVICE static int begin(int split) {
    const int doublings = max(0, split / kForEachDoubling - 1);
    return kUnit * ((split - doublings * kForEachDoubling) << doublings);
  }
};

template <class Config, class Mask, class Params> struct PlanWork {
  static constexpr int kThreads = Config::kThreads;
  static constexpr bool kInvariant = Config::kSplitBlocks > 0;
  using Splits = FixedSplits<kInvariant ? Config::kSplitBlocks : 1>;
  const Params& p;
  u64 line, tiles;   // lengths of one head's tiles in all, and how many they are
  u64 total, count;  // of all heads, and pieces that are not empty

  // ---- the line -----------------------------------------------------------------------------------------------------

  // Sums of all threads before this one, and of all.
  STROBE_DEVICE static u32 sum_before(u32 mine, u32 buffer, u32& all) {
    const int lane = thread_idx() % 32, warp = thread_idx() / 32;
    const u32 upto = sum_of_lanes(mine, lane);
    if (lane == 31) st_shared(buffer + 4 * warp, upto);
    sync_block();
    const u32 of_warp = lane < kThreads / 32 ? ld_shared(buffer + 4 * lane) : 0, warps = sum_of_lanes(of_warp, lane);
    all = shfl(warps, 31);
    return shfl(warps - of_warp, warp) + upto - mine;
  }
  STROBE_DEVICE static u32 sum_of_lanes(u32 x, int lane) {  // up to this one
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const u32 other = shfl(x, lane >= by ? lane - by : 0);
      x += lane >= by ? other : 0;
    }
    return x;
  }
  STROBE_DEVICE u64 begin(u64 piece) const { return piece * total / count; }
  STROBE_DEVICE u64 piece_of(u64 position) const { return ((position + 1) * count - 1) / total; }

  // Calls visit(tile, blocks, at) for each tile of a sequence, whose table begins at position `at`, in blocks.
  template <class Visit> STROBE_DEVICE void for_each_tile(int batch, Visit visit) const {
    Tile tile{};
    static_cast<Sequence&>(tile) = sequence_of<Config>(p, batch);
    const Mask mask = mask_of<Mask, Config>(p, tile.q.length, tile.k.length, tile.positions);
    const int start = tile.positions.offset_k, at = (start - (start < 0) * (Config::kBlockN - 1)) / Config::kBlockN;
#pragma unroll 1
    for (tile.row0 = 0; tile.row0 < tile.q.length; tile.row0 += Config::kBlockM)
      visit(tile, blocks_of_rows<Config>(mask, tile, tile.row0, Config::kBlockM), at);
  }
  STROBE_DEVICE static int length_of(const KeyBlocks& b) { return max(1, b.end - b.first); }

  // ---- pieces and items ---------------------------------------------------------------------------------------------

  // Returns, where every tile would be cut, nearly as many pieces as there are blocks, but the same number for each
  // tile.
  STROBE_DEVICE u64 pieces() const {
    const u64 most = u64(p.pieces), all = tiles * p.heads;
    if (all == 0) return 0;
    const u64 even = most / all * all;
    const u64 wanted = even * 32 >= most * 31 ? even : most;
    return total < wanted ? total : wanted;
  }
  STROBE_DEVICE void store(int record, int part, u32x4 x) const {  // one of four parts of a record
    st_global(static_cast<void*>(p.work + kRecord * record + 4 * part), x);
  }
  STROBE_DEVICE bool fits(u32 item) const { return item < u32(p.items); }
  STROBE_DEVICE void write_item(int record, const Tile& t, u32 slot, u32x4 part) const {
    store(record, 0, u32x4{u32(t.batch), block_idx(), u32(t.row0), slot});
    store(record, 1, part);
    store(record, 2, u32x4{u32(t.q.first), u32(t.q.length), u32(t.positions.offset_k), u32(t.k.used)});
  }
  STROBE_DEVICE void begin_piece(u64 c, u32 item) const { st_global(p.work + kRecord * c + kFirstItem, item); }
  STROBE_DEVICE void end_piece(u64 c, u32 item) const {
    st_global(p.work + kRecord * c + kEndOfItems, fits(item) ? item : u32(p.items));
  }
  STROBE_DEVICE void write_tile(const Tile& t, const KeyBlocks& blocks, u64 tile, u64 start) const {
    const u64 end = start + length_of(blocks);
    const int first = int(piece_of(start)), last = int(piece_of(end - 1));
    const u32 parts = last - first + 1, first_slot = parts == 1 || begin(first) != start ? 2 * first + 1 : 2 * first;
#pragma unroll 1
    for (int c = first; c <= last; ++c) {
      const u64 from = begin(c), to = begin(c + 1);
      const int item = int(tile) + c;
      const u32 b0 = blocks.first + (from > start ? u32(from - start) : 0),
                b1 = to < end ? blocks.first + u32(to - start) : blocks.end;
      const u32 slot = c == first ? first_slot : 2 * c;
      const u32x4 part{b0, b1, first_slot, parts};
      if (fits(item)) write_item(p.pieces + item, t, slot, part);
      if (from >= start) begin_piece(c, item), write_item(c, t, slot, part);
      if (to <= end) end_piece(c, item + 1);
    }
  }

  // ---- splits at fixed places, for invariant kernels --------------------------------------------------------------
  STROBE_DEVICE static int splits_of(const KeyBlocks& b, int at) {
    return b.any() ? Splits::of(b.end - 1 + at) - Splits::of(b.first + at) + 1 : 1;
  }
  STROBE_DEVICE void write_splits(const Tile& t, const KeyBlocks& b, int at, u64 first, u64 start) const {
    const int splits = splits_of(b, at), split0 = Splits::of(b.first + at);
#pragma unroll 1
    for (int i = 0; i < splits; ++i) {
      const u32 item = u32(first) + i;
      const int b0 = i == 0 ? b.first : Splits::begin(split0 + i) - at,
                b1 = i == splits - 1 ? b.end : Splits::begin(split0 + i + 1) - at;
      if (fits(item)) {
        write_item(p.pieces + item, t, item, u32x4{u32(b0), u32(b1), u32(first), u32(splits)});
        st_global(static_cast<void*>(p.work + kRecord * (p.pieces + p.items) + 4 * item), u32x4{0, 0, 0, 0});
      }
      const u64 end = start + max(1, b1 - b0);
      for (u64 c = start == 0 ? 0 : piece_of(start - 1) + 1; c < count && begin(c) < end; ++c)
        cut_line(c, 2 * (begin(c) - start) <= end - start ? item : item + 1);
      if (end == total) end_piece(count - 1, item + 1);
      start = end;
    }
  }
  STROBE_DEVICE void cut_line(u64 c, u32 item) const {
    begin_piece(c, item);
    if (c > 0) end_piece(c - 1, item);
  }

  STROBE_DEVICE void run() {
    const int each = (p.batch + kThreads - 1) / kThreads, from = thread_idx() * each, to = min(from + each, p.batch);
    u32 length = 0, number = 0, splits = 0, all_length, all_number, all_splits = 0;
    for (int batch = from; batch < to; ++batch)
      for_each_tile(batch, [&](const Tile&, const KeyBlocks& b, int at) {
        length += length_of(b), ++number;
        if (kInvariant) splits += splits_of(b, at);
      });
    u64 start = sum_before(length, smem_base(), all_length), tile = sum_before(number, smem_base() + 128, all_number);
    u64 item = kInvariant ? sum_before(splits, smem_base() + 256, all_splits) : 0;
    line = all_length, tiles = all_number, total = line * p.heads, count = pieces();
    for (int c = int(count) + thread_idx(); block_idx() == 0 && c < p.pieces; c += kThreads)
      for (int part = 0; part < 4; ++part) store(c, part, u32x4{0, 0, 0, 0});  // empty: a tile without rows
    start += line * block_idx(), tile += tiles * block_idx(), item += u64(all_splits) * block_idx();
    for (int batch = from; batch < to; ++batch)
      for_each_tile(batch, [&](const Tile& t, const KeyBlocks& b, int at) {
        if constexpr (kInvariant) write_splits(t, b, at, item, start);
        else write_tile(t, b, tile, start);
        if (kInvariant) item += splits_of(b, at);
        start += length_of(b), ++tile;
      });
  }
};

template <class Config, class Mask, class Params> STROBE_DEVICE void plan_work(const Params& p) {
  PlanWork<Config, Mask, Params>{p, 0, 0, 0, 0}.run();
}

}  // namespace strobe
