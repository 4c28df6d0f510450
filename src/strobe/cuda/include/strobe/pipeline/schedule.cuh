// The tile that a block works on: rows of queries, or of keys, of one head of one sequence.
#pragma once
#include <strobe/pipeline/rows.cuh>
#include <strobe/ptx/warp.cuh>

namespace strobe {

// ---- tiles of queries -----------------------------------------------------------------------------------------------

// An item of a work list has key blocks [first, end) of a tile. The tile has `count` parts; their results lie in
// first_slot, then in every other slot from 2 (first_slot / 2 + 1) on (kernels/plan_work.cuh).
struct Part {
  int first, end, first_slot, count;
};

// Rows [row0, row0 + kBlockM) of one head. Rows and keys count from the start of the sequence in memory. With packed
// GQA, kPackGqa heads of a group are rows of one tile: row r is query r / kPackGqa of head r % kPackGqa of the group.
struct Tile : Sequence {
  int row0, head;
  int work;   // the tile's number; with split-KV, that of one of its splits; from a work list, its result's slot
  Part part;  // from a work list
};

// The 64 rows of a consumer, in a tensor of queries.
template <class Config> STROBE_DEVICE Box box_of_consumer(const Tile& tile, int consumer) {
  return Config::Queries::template box<64>(tile.q, tile.head, tile.row0 + 64 * consumer);
}

// Tiles are numbered so that heads whose keys and values fit into the L2 together form a section; inside a section the
// rows with the most keys come first, so that the long tiles do not run last.
template <class Config, class Params> STROBE_DEVICE Tile decode_tile(int work, const Params& p) {
  const int index = Config::kSplit ? quotient(work, p.splits) : work;
  const int heads_in_all = p.batch * p.heads;
  const int per_section = p.row_blocks * p.section, section = quotient(index, per_section),
            rest = index - section * per_section;
  const int head0 = section * p.section, width = min(p.section, heads_in_all - head0);
  const int block = quotient(rest, width), bh = head0 + rest - block * width;
  const int batch = quotient(bh, p.heads);
  Tile t{Sequence{}, (p.row_blocks - 1 - block) * Config::kBlockM, bh - batch * p.heads, work, Part{}};
  static_cast<Sequence&>(t) = sequence_of<Config>(p, batch);
  t.k.length = t.k.used;
  return t;
}

// Persistent blocks take tiles from a counter. A block begins with the tile of its own number and takes one tile too
// many, so p.tiles are taken in all: the counter wraps around to 0, ready for the next launch.
template <class Params> STROBE_DEVICE int take_tile(const Params& p) {
  return grid_dim() + atomic_inc_wrap(p.counter, p.tiles - 1);
}

// The tiles that a block works on: taken from the counter or, with paged keys, those of its piece of the work list.
template <class Config, bool kListed = Config::Keys::kPaged> struct WorkOf {
  template <class Params> STROBE_DEVICE static int first(const Params&) { return block_idx(); }
  template <class Params> STROBE_DEVICE static int end(const Params& p) { return p.tiles; }
  template <class Params> STROBE_DEVICE static int next(const Params& p, int) { return take_tile(p); }
  template <class Params> STROBE_DEVICE static Tile tile(int index, const Params& p) {
    return decode_tile<Config>(index, p);
  }
};
// A record of the list is kRecord numbers. The pieces come first, then the items. That of an item says all that a tile
// needs to know of its sequence; that of a piece says which items it has and, since a block would begin with one
// latency after the other, what the first of them says. Invariant kernels look there: their planner does not know it
// yet when it writes the piece. `index` is a record's.
constexpr int kRecord = 16, kFirstItem = 12, kEndOfItems = 13;
template <class Config> struct WorkOf<Config, true> {
  static constexpr int kNoMore = 0x7fffffff;
  // This block's.
  template <class Params> STROBE_DEVICE static int first_item(const Params& p) {
    return ld_global(p.work + kRecord * block_idx() + kFirstItem);
  }
  template <class Params> STROBE_DEVICE static int end_of_items(const Params& p) {
    return ld_global(p.work + kRecord * block_idx() + kEndOfItems);
  }
  template <class Params> STROBE_DEVICE static int record_of(const Params& p, int item) {
    return item < end_of_items(p) ? int(grid_dim()) + item : kNoMore;
  }
  template <class Params> STROBE_DEVICE static int first(const Params& p) {
    return Config::kInvariant ? record_of(p, first_item(p)) : int(block_idx());
  }
  template <class Params> STROBE_DEVICE static int end(const Params&) { return kNoMore; }
  template <class Params> STROBE_DEVICE static int next(const Params& p, int index) {
    const int own = index - int(grid_dim());
    return record_of(p, (own < 0 ? first_item(p) : own) + 1);
  }
  template <class Params> STROBE_DEVICE static Tile tile(int index, const Params& p) {
    const int* const at = p.work + kRecord * index;
    const u32x4 x = ld_global_x4(at), y = ld_global_x4(at + 4), z = ld_global_x4(at + 8);
    Tile t{Sequence{}, int(x.z), int(x.y), int(x.w), Part{int(y.x), int(y.y), int(y.z), int(y.w)}};
    t.batch = int(x.x);
    t.q = Span{Config::Queries::kVarlen ? 0 : t.batch, int(z.x), int(z.y), int(z.y)};
    t.k = paged_keys(p, t.batch, int(z.w));
    t.positions = positions_in_pages<Config>(t, int(z.z));
    return t;
  }
};

STROBE_DEVICE void publish_positions(u32 slot, const Positions& at) {
  st_shared(slot, u32x4{u32(at.offset_q), u32(at.whole_q), u32(at.offset_k), u32(at.whole_k)});
}
STROBE_DEVICE Positions read_positions(u32 slot) {
  const u32x4 x = ld_shared_x4(slot);
  sync_warp();  // all lanes have read them before one of them gives the slot back
  return Positions{int(x.x), int(x.y), int(x.z), int(x.w)};
}

// The tile info slot: the producer publishes where a tile lies, since working that out takes several divisions. The
// producer's arrival on a full barrier makes it visible. Positions follow, and only kernels that need them read them:
// they take registers.
constexpr u32 kTileInfoPositions = 32, kTileInfoPart = 48;  // where they begin, and the part of listed work
template <class Config> STROBE_DEVICE void publish_tile(u32 slot, const Tile& t) {
  st_shared(slot, u32x4{u32(t.row0), u32(t.head), u32(t.batch), u32(t.q.length)});
  st_shared(slot + 16, u32x4{u32(t.k.length), u32(t.q.first), u32(t.k.first), u32(t.work)});
  if (Config::kPositions) publish_positions(slot + kTileInfoPositions, t.positions);
  if (Config::Keys::kPaged)
    st_shared(slot + kTileInfoPart,
              u32x4{u32(t.part.first), u32(t.part.end), u32(t.part.first_slot), u32(t.part.count)});
}
template <class Config> STROBE_DEVICE Tile read_tile(u32 slot) {
  const u32x4 x = ld_shared_x4(slot), y = ld_shared_x4(slot + 16);
  const u32x4 z = Config::Keys::kPaged ? ld_shared_x4(slot + kTileInfoPart) : u32x4{};
  sync_warp();  // as in read_positions
  const int batch = int(x.z), keys = int(y.x);
  Tile t;
  t.batch = batch;
  t.q = Span{Config::Queries::kVarlen ? 0 : batch, int(y.y), int(x.w), int(x.w)};
  t.k = Span{Config::Keys::kVarlen ? 0 : batch, int(y.z), keys, keys};
  t.positions = Positions{};
  t.row0 = int(x.x), t.head = int(x.y), t.work = int(y.w);
  t.part = Part{int(z.x), int(z.y), int(z.z), int(z.w)};
  return t;
}

// ---- tiles of keys --------------------------------------------------------------------------------------------------

// Keys [key0, key0 + kBlockN) of one key head. kGroupParts: the query heads of a group are divided among p.group_parts
// tiles, and each has dK and dV of its own. Then head_k counts parts, of p.group query heads each, and head_kv is the
// head of the K and V that they see.
struct KeyTile : Sequence {
  int key0, head_k, head_kv;

  // The tile's first row in a tensor that has a row for each key.
  template <class X> STROBE_DEVICE X* rows_of(X* tensor, i64 batch_stride, i64 head_stride, i64 row_stride) const {
    return k.rows(tensor, batch_stride, head_stride, row_stride, head_k, key0);
  }
};

// Heads are grouped into sections, and the last section takes the rest. Inside a section key blocks go in order: under
// a causal mask the first has the most queries. Config::kLastFirst reverses the order (see dq_turns.cuh).
template <class Config, class Params> STROBE_DEVICE KeyTile decode_key_tile(int index, const Params& p) {
  const int per_section = p.key_blocks * p.section, section = min(quotient(index, per_section), p.sections - 1),
            rest = index - section * per_section;
  const int head0 = section * p.section, width = section + 1 < p.sections ? p.section : p.batch * p.heads_k - head0;
  const int block = quotient(rest, width), bh = head0 + rest - block * width;
  const int batch = quotient(bh, p.heads_k);
  KeyTile t;
  static_cast<Sequence&>(t) = sequence_of<Config>(p, batch);
  t.head_k = t.head_kv = bh - batch * p.heads_k;
  if constexpr (Config::kGroupParts) t.head_kv = quotient(t.head_k, p.group_parts);
  t.key0 = (Config::kLastFirst ? p.key_blocks - 1 - block : block) * Config::kBlockN;
  return t;
}

// Recomputes the tile instead of keeping it live: it is seldom needed, and registers are few.
template <class Config, class Params> STROBE_DEVICE KeyTile tile_again(const Params& p) {
  return decode_key_tile<Config>(opaque(int(block_idx())), p);
}

// ---- statistics of rows ---------------------------------------------------------------------------------------------

// Statistics of rows (LSE, delta) and sums of dQ have room for whole blocks of kStatBlock queries of each sequence:
// this returns where those of a sequence and head begin. `first_row` is that of the sequence in varlen tensors.
template <class Config, class Params>
STROBE_DEVICE i64 first_stat(const Params& p, int head, int batch, int first_row) {
  constexpr int kRows = Config::kStatBlock;
  const int offset =
      Config::Queries::kVarlen ? quotient(first_row + batch * kRows, kRows) * kRows : batch * p.stat_blocks * kRows;
  return i64(head) * p.stat_rows + offset;
}

// The `index`-th block of kStatBlock queries of all heads and sequences.
struct StatBlock {
  int m, head, batch;
  Span q;
};
template <class Config, class Params> STROBE_DEVICE StatBlock stat_block(int index, const Params& p) {
  StatBlock b;
  const int bh = quotient(index, p.stat_blocks);
  b.m = index - bh * p.stat_blocks;
  b.batch = quotient(bh, p.heads);
  b.head = bh - b.batch * p.heads;
  b.q = queries_of<Config>(p, b.batch);
  return b;
}

}  // namespace strobe
